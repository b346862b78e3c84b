"""Loops of the statistics: chunk weights, delta chunks, and the merge of moments."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from tasks.kernels.decorator import kernel

COUNT, MEAN, M2, LOW, HIGH, NON_FINITE = range(6)
"""Rows of a state of moments, a column each dimension."""


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
def merge_moments(other: Float64[np.ndarray, "6 dim"], state: Float64[np.ndarray, "6 dim"]) -> None:
    """Merge ``other`` (W, m, M) into ``state``: ``mean += d W / n``, ``M2 += M + d^2 N W / n``; ``d = m - mean``.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
    """
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
