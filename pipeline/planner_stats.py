"""Diffusion Planner's ``normalization.json``: its published constants, or means and deviations over a dataset."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32

from pipeline.planner_blocks import PlannerBlocks, pieces
from schemas.planner import FEATURES, NORMALIZATION, Scaling
from tasks.planner_normalize import normalization_to_json
from tasks.stats import Moments, merge, moments

PREDICTED_NEIGHBORS = 10
"""Neighbours that the model predicts: the targets' statistics are theirs."""
MIN_STD = 1e-6
"""A feature that varies less is left as it is."""
_POSE = ("x", "y", "cos_heading", "sin_heading")
_TARGETS = {"ego": "ego_agent_future", "neighbor": "neighbor_agents_future"}


def planner_normalization(path: str | Path, *, published: bool = False) -> dict[str, dict[str, list[float]]]:
    """Return the content of a ``normalization.json``.

    Every row counts once that no mask leaves out and that is not padding, which are zeros. Flags and the cosine and sine of a heading keep mean 0
    and deviation 1, as in the published file: a class that no sample has would otherwise divide by 0.

    Parameters
    ----------
    path
        A planner dataset, normalised or not.
    published
        The constants that the paper's authors typed, in the place of computed ones.

    Raises
    ------
    DatasetError
        Not a planner dataset.
    """
    blocks = PlannerBlocks(path)
    if published:
        return normalization_to_json()
    totals: dict[str, Moments] = {}
    for steps in pieces(blocks.anchors):
        for name, (rows, counted) in _rows(blocks, steps):
            found = moments(np.ascontiguousarray(rows), counted.astype(np.int64))
            totals[name] = merge(totals[name], found) if name in totals else found
    scalings = {name: _scaling(total, _features(name)) for name, total in totals.items()}
    observations = {name: scaling for name, scaling in scalings.items() if name not in _TARGETS}
    return normalization_to_json(observations, {name: scalings[name] for name in _TARGETS if name in scalings})


def _rows(
    blocks: PlannerBlocks, steps: np.ndarray
) -> Iterator[tuple[str, tuple[Float32[np.ndarray, "row feature"], Bool[np.ndarray, " row"]]]]:
    """Yield ``name, (rows, which of them count)`` of some samples, in the order of the file."""
    known = blocks.info.arrays
    masks = [f"{array}_valid" for array in _TARGETS.values() if f"{array}_valid" in known]
    block = blocks.read([*_TARGETS.values(), *masks, *NORMALIZATION], steps)
    for name, array in _TARGETS.items():
        future = block[array]
        present = future.any(axis=-1) if name == "neighbor" else np.ones(future.shape[:-1], np.bool_)
        valid: np.ndarray = block.get(f"{array}_valid", np.asarray(present))
        if name == "neighbor":
            future, valid = future[:, :PREDICTED_NEIGHBORS], valid[:, :PREDICTED_NEIGHBORS]
        heading = future[..., 2:]
        poses = np.concatenate([future[..., :2], np.cos(heading), np.sin(heading)], axis=-1)
        yield name, (poses.reshape(-1, len(_POSE)), valid.reshape(-1))
    for name in NORMALIZATION:
        rows = block[name].reshape(-1, block[name].shape[-1])
        yield name, (rows, np.asarray(rows.any(axis=1)))


def _features(name: str) -> tuple[str, ...]:
    return _POSE if name in _TARGETS else FEATURES.get(name.removeprefix("route_"), ())


def _scaling(total: Moments, names: tuple[str, ...]) -> Scaling:
    """Turn the moments of an array into its scaling; ``names`` count where there are as many as features."""
    count = np.maximum(total.count, 1.0)
    variance = total.m2 / count
    is_flag = np.isin(total.low, (0.0, 1.0)) & np.isin(total.high, (0.0, 1.0))
    is_flag &= np.abs(variance - total.mean * (1.0 - total.mean)) < 1e-9
    if len(names) == len(is_flag):
        is_flag |= np.array([name in _POSE[2:] or name.startswith("is_") for name in names])
    is_flag |= total.count == 0
    std = np.sqrt(variance)
    return Scaling(
        mean=tuple(np.where(is_flag, 0.0, total.mean).tolist()),
        std=tuple(np.where(is_flag | (std < MIN_STD), 1.0, std).tolist()),
    )
