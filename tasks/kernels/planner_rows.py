"""Kernels on finished planner rows: normalisation that keeps zero rows."""

import math

import numpy as np
from jaxtyping import Float32, Float64

from tasks.kernels.decorator import kernel


@kernel
def is_zero(row: Float32[np.ndarray, " feature"], count: int) -> bool:
    """Return whether the first ``count`` features are all 0."""
    for k in range(count):  # noqa: SIM110 - Numba compiles no generator expression in all()
        if row[k] != 0:
            return False
    return True


@kernel
def scale_rows(
    rows: Float32[np.ndarray, "row feature"],
    mean: Float64[np.ndarray, " feature"],
    std: Float64[np.ndarray, " feature"],
    out: Float32[np.ndarray, "row feature"],
) -> None:
    """Fill ``out = (rows - mean) / std`` in float64; a row of zeros stays one."""
    size = np.uintp(rows.shape[1])
    for i in range(np.uintp(rows.shape[0])):
        nothing = is_zero(rows[i], rows.shape[1])
        for k in range(size):
            out[i, k] = np.float32(0) if nothing else (rows[i, k] - mean[k]) / std[k]


@kernel
def unscale_rows(
    rows: Float32[np.ndarray, "row feature"],
    mean: Float64[np.ndarray, " feature"],
    std: Float64[np.ndarray, " feature"],
    out: Float32[np.ndarray, "row feature"],
) -> None:
    """Fill ``out = rows * std + mean`` in float64; a row of zeros stays one."""
    size = np.uintp(rows.shape[1])
    for i in range(np.uintp(rows.shape[0])):
        nothing = is_zero(rows[i], rows.shape[1])
        for k in range(size):
            out[i, k] = np.float32(0) if nothing else rows[i, k] * std[k] + mean[k]


@kernel
def recenter_rows(
    rows: Float32[np.ndarray, "batch row feature"],
    centers: Float64[np.ndarray, "batch 3"],
    layout: tuple[int, int, int],
    out: Float32[np.ndarray, "batch row feature"],
) -> None:
    """Fill ``out`` with ``rows`` seen from ``centers`` (x, y, heading).

    ``layout`` is (features that are all 0 in an absent row, vectors, column of a heading or -1). The first vector is a position,
    which is shifted and turned; the others are turned. What is no vector and no heading is copied; an absent row is 0 throughout.
    """
    num_tested, num_vectors, heading_column = layout
    for b in range(rows.shape[0]):
        x, y, heading = centers[b, 0], centers[b, 1], centers[b, 2]
        c, s = math.cos(heading), math.sin(heading)
        for i in range(rows.shape[1]):
            if num_tested > 0 and is_zero(rows[b, i], num_tested):
                for k in range(rows.shape[2]):
                    out[b, i, k] = 0
                continue
            for k in range(rows.shape[2]):
                out[b, i, k] = rows[b, i, k]
            for vector in range(num_vectors):
                k = 2 * vector
                u, v = np.float64(rows[b, i, k]), np.float64(rows[b, i, k + 1])
                if vector == 0:
                    u, v = u - x, v - y
                out[b, i, k] = c * u + s * v
                out[b, i, k + 1] = c * v - s * u
            if heading_column >= 0:
                turned = rows[b, i, heading_column] - heading
                out[b, i, heading_column] = math.atan2(math.sin(turned), math.cos(turned))
