"""Loops of the statistics: chunk weights, moments and delta chunks."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from tasks.kernels.decorator import kernel

BLOCK_ROWS = 1024
"""Rows reduced around one mean before they are merged: 57 KB of 14 float32 columns, so that the second pass reads
the cache, and few enough that a plain float64 sum keeps 13 digits. It is part of the result's last bits."""

COUNT, MEAN, M2, LOW, HIGH, NON_FINITE = range(6)
"""Rows of the state that :func:`add_moments` carries, and of its scratch."""


@kernel
def fill_weights(
    starts: Int64[np.ndarray, "run"],
    stops: Int64[np.ndarray, "run"],
    num_anchors: Int64[np.ndarray, "run"],
    horizon: int,
    first: int,
    out: Int64[np.ndarray, "step"],
) -> None:
    """Set ``out[i]`` to how many chunk entries are step ``first + i``. With horizon 1, an anchor is one and no other is.

    Anchors ``t < A`` of a run of ``L`` steps name entries ``min(t + k, L - 1)``, ``k < H``. So step ``j < L - 1`` is
    named once by each of ``min(j, A - 1) - max(0, j - H + 1) + 1`` anchors, and the last step by anchor ``t``
    ``max(0, H - (L - 1 - t))`` times, which is an arithmetic series.
    """
    out[:] = 0
    end = first + len(out)
    for run in range(len(starts)):
        length = stops[run] - starts[run]
        anchors = num_anchors[run]
        if anchors == 0:
            continue
        offset = starts[run] - first
        for step in range(max(0, -offset), min(length - 1, end - starts[run])):
            out[offset + step] = max(0, min(step, anchors - 1) - max(0, step - horizon + 1) + 1)
        if first < stops[run] <= end:
            nearest = max(0, length - horizon)
            series = max(0, anchors - nearest) * (nearest + anchors - 1 + 2 * (horizon - length + 1))
            out[offset + length - 1] = series // 2


@kernel
def fill_delta(
    actions: Float32[np.ndarray, "step dim"],
    states: Float32[np.ndarray, "anchor dim"],
    anchors: Int64[np.ndarray, "anchor"],
    lasts: Int64[np.ndarray, "anchor"],
    out: Float32[np.ndarray, "anchor horizon dim"],
) -> None:
    """Set ``out[i, k] = actions[min(anchors[i] + k, lasts[i])] - states[i]``, in float32 as training does."""
    for anchor in range(len(anchors)):
        for k in range(out.shape[1]):
            step = min(anchors[anchor] + k, lasts[anchor])
            for dim in range(out.shape[2]):
                out[anchor, k, dim] = actions[step, dim] - states[anchor, dim]


@kernel
def add_moments(
    rows: Float32[np.ndarray, "row dim"],
    weights: Int64[np.ndarray, "row"],
    scratch: Float64[np.ndarray, "6 dim"],
    state: Float64[np.ndarray, "6 dim"],
) -> None:
    """Merge weighted rows into ``state``: rows COUNT, MEAN, M2, LOW, HIGH, NON_FINITE, a column each dimension.

    Each block of rows is reduced in two passes, ``m = sum(w x) / W`` and ``M = sum(w (x - m)^2)``, then merged by Chan,
    Golub and LeVeque (1979). Rows of weight 0 are not read. A block whose sums are not finite is reduced again,
    leaving out its values that are not.
    """
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        block_weights = weights[start : start + BLOCK_ROWS]
        _sum_block(block, block_weights, False, scratch)
        check = not np.isfinite(scratch[MEAN]).all()
        if check:
            _sum_block(block, block_weights, True, scratch)
        for dim in range(rows.shape[1]):
            scratch[MEAN, dim] /= max(scratch[COUNT, dim], 1.0)
        _square_block(block, block_weights, check, scratch)
        merge_moments(scratch, state)


@kernel
def merge_moments(other: Float64[np.ndarray, "6 dim"], state: Float64[np.ndarray, "6 dim"]) -> None:
    """Merge ``other`` (W, m, M) into ``state``: ``mean += d W / n``, ``M2 += M + d^2 N W / n``; ``d = m - mean``."""
    for dim in range(state.shape[1]):
        state[NON_FINITE, dim] += other[NON_FINITE, dim]
        if other[COUNT, dim] == 0.0:
            continue
        total = state[COUNT, dim] + other[COUNT, dim]
        distance = other[MEAN, dim] - state[MEAN, dim]
        share = other[COUNT, dim] / total
        state[M2, dim] += other[M2, dim] + distance * distance * state[COUNT, dim] * share
        state[MEAN, dim] += distance * share
        state[COUNT, dim] = total
        state[LOW, dim] = min(state[LOW, dim], other[LOW, dim])
        state[HIGH, dim] = max(state[HIGH, dim], other[HIGH, dim])


@kernel
def _sum_block(
    rows: Float32[np.ndarray, "row dim"],
    weights: Int64[np.ndarray, "row"],
    check: bool,
    out: Float64[np.ndarray, "6 dim"],
) -> None:
    """Set COUNT, MEAN (to the sum, not yet the mean), LOW, HIGH and NON_FINITE of ``out``; see ``check`` above."""
    out[:] = 0.0
    out[LOW] = np.inf
    out[HIGH] = -np.inf
    for row in range(np.uintp(len(rows))):
        weight = np.float64(weights[row])
        if weight == 0.0:
            continue
        for dim in range(np.uintp(rows.shape[1])):
            value = np.float64(rows[row, dim])
            if check and not np.isfinite(value):
                out[NON_FINITE, dim] += weight
                continue
            out[COUNT, dim] += weight
            out[MEAN, dim] += weight * value
            out[LOW, dim] = value if value < out[LOW, dim] else out[LOW, dim]
            out[HIGH, dim] = value if value > out[HIGH, dim] else out[HIGH, dim]


@kernel
def _square_block(
    rows: Float32[np.ndarray, "row dim"],
    weights: Int64[np.ndarray, "row"],
    check: bool,
    out: Float64[np.ndarray, "6 dim"],
) -> None:
    """Set M2 of ``out`` to ``sum(w (x - MEAN)^2)``."""
    out[M2] = 0.0
    for row in range(np.uintp(len(rows))):
        weight = np.float64(weights[row])
        if weight == 0.0:
            continue
        for dim in range(np.uintp(rows.shape[1])):
            value = np.float64(rows[row, dim])
            if check and not np.isfinite(value):
                continue
            distance = value - out[MEAN, dim]
            out[M2, dim] += weight * (distance * distance)
