"""Observations of the planner, normalised as its training code does, and back.

Diffusion Planner tells padding by rows that are all zero, so that a row that was is kept zero.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from schemas.errors import SchemaError
from schemas.planner import NORMALIZATION, TARGET_NORMALIZATION, Scaling
from tasks.kernels.planner_rows import scale_rows, unscale_rows


def normalize_observation(
    block: Mapping[str, np.ndarray], normalization: Mapping[str, Scaling] = NORMALIZATION
) -> dict[str, np.ndarray]:
    """Return the block with every tensor of ``normalization`` as ``(value - mean) / std``; all others, futures too, as they are."""
    return {
        name: _scaled(scale_rows, rows, normalization[name], name) if name in normalization else rows
        for name, rows in block.items()
    }


def denormalize_observation(
    block: Mapping[str, np.ndarray], normalization: Mapping[str, Scaling] = NORMALIZATION
) -> dict[str, np.ndarray]:
    """Return what :func:`normalize_observation` was given, to within the rounding of float32."""
    return {
        name: _scaled(unscale_rows, rows, normalization[name], name) if name in normalization else rows
        for name, rows in block.items()
    }


def _scaled(kernel: Any, rows: Float[np.ndarray, "*rows feature"], scaling: Scaling, name: str) -> np.ndarray:
    if rows.ndim == 0 or rows.shape[-1] != len(scaling.mean):
        raise SchemaError(
            f"expected {len(scaling.mean)} features of {name}, found {list(rows.shape)}; correct the normalisation"
        )
    table = np.ascontiguousarray(rows, np.float32).reshape(-1, rows.shape[-1])
    out = np.empty_like(table)
    kernel(table, np.array(scaling.mean, np.float64), np.array(scaling.std, np.float64), out)
    return out.reshape(rows.shape)


def stored_normalization(normalize: str) -> Mapping[str, Scaling]:
    """Return the scalings that the recipe's ``normalize`` means: published constants, none, or a ``normalization.json``'s text."""
    if not normalize.startswith("{"):
        return NORMALIZATION if normalize == "published" else {}
    return normalization_from_json(json.loads(normalize))[0]


def normalization_to_json(
    normalization: Mapping[str, Scaling] = NORMALIZATION, targets: Mapping[str, Scaling] = TARGET_NORMALIZATION
) -> dict[str, dict[str, list[float]]]:
    """Return the content of Diffusion Planner's ``normalization.json``."""
    return {
        name: {"mean": list(scaling.mean), "std": list(scaling.std)}
        for name, scaling in {**targets, **normalization}.items()
    }


def normalization_from_json(
    data: Mapping[str, Any], sizes: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, Scaling], dict[str, Scaling]]:
    """Return the scalings of observations and of targets that a ``normalization.json`` holds; unknown keys are refused.

    A mean of one number, or of fewer features than the published one, is refused too: the model would train on other units.
    ``sizes`` are those of datasets that have other features.
    """
    published = {**TARGET_NORMALIZATION, **NORMALIZATION}
    found = {
        name: _scaling(name, value, sizes.get(name, len(published[name].mean)))
        for name, value in data.items()
        if name in published
    }
    unknown = sorted(set(data) - set(published))
    if unknown or not found:
        raise SchemaError(
            f"expected the keys {', '.join(published)}, found {', '.join(unknown) or 'none'}; correct normalization.json"
        )
    return (
        {name: scaling for name, scaling in found.items() if name in NORMALIZATION},
        {name: scaling for name, scaling in found.items() if name in TARGET_NORMALIZATION},
    )


def _scaling(name: str, value: Any, size: int) -> Scaling:
    try:
        mean, std = (tuple(float(number) for number in value[key]) for key in ("mean", "std"))
    except (TypeError, KeyError, ValueError) as error:
        raise SchemaError(
            f"expected mean and std of {size} numbers for {name}, found {str(value)[:60]}; correct normalization.json"
        ) from error
    if len(mean) != size:
        raise SchemaError(f"expected {size} numbers for {name}, found {len(mean)}; correct normalization.json")
    return Scaling(mean=mean, std=std)
