"""State and action chunks of samples, on their way from units to what the model takes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64

from pipeline.loaders.reader import DatasetReader
from schemas.errors import DatasetError
from tasks.chunks import action_chunks, chunk_stops
from tasks.normalize import Scaling, normalize, quantile, z_score
from tasks.transforms import Chain, DeltaActions, Normalize, Transform


class Vectors:
    """State and actions of a dataset, transformed, normalised and filled up to a width.

    Without transforms the rows are normalised once, here, and not for every batch; a transform sees chunks, and what
    comes after it as well.

    Parameters
    ----------
    reader
        The dataset.
    transforms
        From units to what the statistics are of.
    method
        ``zscore`` or ``quantile`` by the dataset's norm_stats, or empty.
    width
        To which state and actions are filled up with zeros; wider ones stay as they are.
    """

    def __init__(self, reader: DatasetReader, transforms: Sequence[Transform], method: str, width: int) -> None:
        self._state, self._actions = (_rows(reader, name) for name in ("state", "actions"))
        self._stops = chunk_stops(reader.rows("episode_ends"), reader.rows("valid"))
        scalings = _scalings(reader, transforms, method) if method else {}
        self._chain: Chain | None = None
        if transforms:
            self._chain = Chain((*transforms, *([Normalize(**scalings)] if method else [])))
        elif method:
            self._state, self._actions = (
                normalize(rows, scalings[name]) for name, rows in (("state", self._state), ("actions", self._actions))
            )
        self.widths = tuple(max(width, size) for size in self._sizes())

    def fill(
        self,
        steps: Int64[np.ndarray, " batch"],
        *,
        state: Float32[np.ndarray, "batch wide"],
        actions: Float32[np.ndarray, "batch horizon wide"],
        is_pad: Bool[np.ndarray, "batch horizon"],
    ) -> None:
        """Fill a batch with the samples that begin at ``steps``."""
        if self._chain is None:
            size = self._state.shape[1]
            state[:, :size], state[:, size:] = self._state[steps], 0
            action_chunks(self._actions, steps, self._stops[steps], is_pad=is_pad, out=actions)
            return
        chunks = np.empty((*is_pad.shape, self._actions.shape[1]), np.float32)
        action_chunks(self._actions, steps, self._stops[steps], is_pad=is_pad, out=chunks)
        for values, out in zip(self._chain(self._state[steps], chunks), (state, actions), strict=True):
            size = values.shape[-1]
            out[..., :size], out[..., size:] = values, 0

    def _sizes(self) -> tuple[int, int]:
        """Return how wide state and actions are after the transforms."""
        state, actions = self._state[:1], self._actions[:1, None]
        if self._chain is not None and len(state):
            state, actions = self._chain(state, actions)
        return state.shape[-1], actions.shape[-1]


def _rows(reader: DatasetReader, name: str) -> Float32[np.ndarray, "step dim"]:
    rows = reader.rows(name)
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise DatasetError(
            f"expected float32[step, dim], found {rows.dtype}{list(rows.shape)}; see `headrace info`", array=name
        )
    return rows


def _scalings(reader: DatasetReader, transforms: Sequence[Transform], method: str) -> dict[str, Scaling]:
    """Return how the dataset's own norm_stats scale state and actions; DatasetError where they are of other values."""
    from pipeline.store.tables import read_document

    content = json.loads(read_document(reader.info, "norm_stats"))
    mask = tuple(content.get("headrace", {}).get("delta_mask") or ())
    _refuse_other_values(transforms, mask if any(mask) else ())
    make, keys = (z_score, ("mean", "std")) if method == "zscore" else (quantile, ("q01", "q99"))
    return {name: make(*_constants(reader, content, name, keys)) for name in ("state", "actions")}


def _refuse_other_values(transforms: Sequence[Transform], mask: tuple[bool, ...]) -> None:
    if any(not isinstance(transform, DeltaActions) for transform in transforms) or len(transforms) > 1:
        raise DatasetError(
            "expected norm_stats of what the transforms give, found those of the dataset as it is stored; leave "
            "`normalize` out, and add Normalize.from_norm_stats(...) to the transforms"
        )
    asked = next((transform.mask for transform in transforms if isinstance(transform, DeltaActions)), ())
    if asked != mask:
        found = f"those of actions relative to the state by {mask}" if mask else "those of actions as they are stored"
        wanted = f"relative to the state by {asked}" if asked else "as they are stored"
        raise DatasetError(
            f"expected norm_stats of actions {wanted}, found {found}; leave `normalize` out, or run `headrace stats` so"
        )


def _constants(
    reader: DatasetReader, content: Mapping[str, Any], name: str, keys: tuple[str, str]
) -> list[Sequence[float]]:
    stats = content.get("norm_stats", {}).get(name)
    if stats is None:
        raise DatasetError(f"expected norm_stats of {name}, found none; run `headrace stats`")
    size = reader.rows(name).shape[1]
    constants = [stats.get(key) or () for key in keys]
    if any(len(values) < size for values in constants):
        raise DatasetError(
            f"expected {' and '.join(keys)} of {size} dimensions in norm_stats, found others; run `headrace stats`",
            array=name,
        )
    return constants
