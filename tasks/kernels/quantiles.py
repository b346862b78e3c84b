"""Loops of exact quantiles and of delta chunks: the values in the tails counted, everything else only compared.

The bits of a float32 are mapped to an unsigned integer, its key, that sorts like it. A bracket ``[low, high]`` of keys holds
a quantile; values inside are counted in bins of ``2**shift`` keys, values outside, towards the nearer end, in one number. Values
between the brackets, by far the most, cost one comparison with ``inner_low`` and one with ``inner_high``, or in delta chunks
none of their own, since the least and the greatest value of a chunk are known.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt32

from tasks.kernels.decorator import kernel
from tasks.kernels.stats import COUNT, HIGH, LOW, M2, MEAN, NON_FINITE, merge_moments

BLOCK_ANCHORS = 512
"""Chunks reduced together, one dimension at a time: 20 KB of sums and extremes. Part of the result's last bits."""


class Search(NamedTuple):
    """The brackets of a pass, and what it counts."""

    inner_low: Float32[np.ndarray, "dim"]
    """Values up to it must be counted."""
    inner_high: Float32[np.ndarray, "dim"]
    """Values from it on must be counted."""
    low: UInt32[np.ndarray, "dim quantile"]
    high: UInt32[np.ndarray, "dim quantile"]
    shift: UInt32[np.ndarray, "dim quantile"]
    is_top: Bool[np.ndarray, "quantile"]
    """Whether values above the bracket are counted as outside; else those below."""
    outside: Int64[np.ndarray, "dim quantile"]
    inside: Int64[np.ndarray, "dim quantile bin"]


class Chunks(NamedTuple):
    """Chunks ``actions[min(anchor + k, last)] - offset``, ``k < horizon``, that are never built.

    An entry ``k`` of consecutive anchors' chunks is consecutive steps, so that loops over anchors vectorise.
    """

    actions: Float32[np.ndarray, "dim step"]
    offsets: Float32[np.ndarray, "dim anchor"]
    anchors: Int64[np.ndarray, "anchor"]
    lasts: Int64[np.ndarray, "anchor"]
    horizon: int


@kernel
def reduce_chunks(
    chunks: Chunks,
    columns: Int64[np.ndarray, "column"],
    with_moments: bool,
    search: Search,
    state: Float64[np.ndarray, "6 dim"],
) -> None:
    """Count ``columns`` of all chunks in their brackets and, if wanted, merge their moments into ``state``."""
    actions, offsets, anchors, lasts, horizon = chunks
    near = np.empty(BLOCK_ANCHORS + horizon, np.float32)
    extremes, sums = np.empty((2, BLOCK_ANCHORS), np.float32), np.empty((2, BLOCK_ANCHORS))
    block = np.empty((6, state.shape[1]))
    begin = 0
    while begin < len(anchors):
        end = begin + 1
        while end < len(anchors) and end - begin < BLOCK_ANCHORS and lasts[end] == lasts[begin]:
            end += 1
        block[:] = 0.0
        for dim in columns:
            offset = offsets[dim, begin:end]
            for step in range(end - begin + horizon - 1):
                near[step] = actions[dim, min(anchors[begin] + step, lasts[begin])]
            is_finite = _find_extremes(near, offset, horizon, extremes)
            if with_moments and is_finite:
                _reduce_finite(near, offset, horizon, extremes, sums, block[:, dim])
            elif with_moments:
                _reduce_each(near, offset, horizon, block[:, dim])
            _count_chunks(near, offset, horizon, is_finite, extremes, dim, search)
        if with_moments:
            merge_moments(block, state)
        begin = end


@kernel
def _count_chunks(
    near: Float32[np.ndarray, "step"],
    offset: Float32[np.ndarray, "anchor"],
    horizon: int,
    is_finite: bool,
    extremes: Float32[np.ndarray, "2 block"],
    dim: int,
    search: Search,
) -> None:
    """Count one dimension of a block of chunks; of finite ones only those that reach a bracket, each in vectors."""
    inner_low, inner_high, low, high, shift, is_top, outside, inside = search
    values, keys = np.empty(horizon, np.float32), np.empty(horizon, np.uint32)
    bits = values.view(np.uint32)
    size = np.uintp(horizon)
    for anchor in range(np.uintp(len(offset))):
        if is_finite and not (extremes[0, anchor] <= inner_low[dim] or extremes[1, anchor] >= inner_high[dim]):
            continue
        for k in range(size):
            values[k] = near[anchor + k] - offset[anchor]
        if not is_finite:
            for k in range(size):
                _count(bits[k], 1, low[dim], high[dim], shift[dim], is_top, outside[dim], inside[dim])
            continue
        for k in range(size):
            keys[k] = key_of_bits(bits[k])
        for quantile in range(np.uintp(low.shape[1])):
            below, within = _count_keys(keys, low[dim, quantile], high[dim, quantile])
            outside[dim, quantile] += horizon - below - within if is_top[quantile] else below
            for k in range(size if within else np.uintp(0)):
                if low[dim, quantile] <= keys[k] <= high[dim, quantile]:
                    inside[dim, quantile, np.uint32(keys[k] - low[dim, quantile]) >> shift[dim, quantile]] += 1


@kernel
def _count_keys(keys: UInt32[np.ndarray, "horizon"], low: np.uint32, high: np.uint32) -> tuple[int, int]:
    """Return how many keys lie below and how many within ``[low, high]``."""
    below, upto = np.uint32(0), np.uint32(0)
    for k in range(np.uintp(len(keys))):
        below += np.uint32(keys[k] < low)
        upto += np.uint32(keys[k] <= high)
    return int(below), int(upto) - int(below)


@kernel
def key_of_bits(bits: np.uint32) -> np.uint32:
    """Map the bits of a float32 to an unsigned integer that sorts like it."""
    return np.uint32(~bits if bits & np.uint32(0x80000000) else bits | np.uint32(0x80000000))


@kernel
def value_of_key(key: np.uint32) -> np.float32:
    """Undo :func:`key_of_bits`."""
    bits = np.empty(1, np.uint32)
    bits[0] = key ^ np.uint32(0x80000000) if key & np.uint32(0x80000000) else ~key
    value: np.float32 = bits.view(np.float32)[0]
    return value


@kernel
def _count(  # noqa: PLR0913 - a tuple of arrays would count references at every call
    bits: np.uint32,
    weight: int,
    low: UInt32[np.ndarray, "quantile"],
    high: UInt32[np.ndarray, "quantile"],
    shift: UInt32[np.ndarray, "quantile"],
    is_top: Bool[np.ndarray, "quantile"],
    outside: Int64[np.ndarray, "quantile"],
    inside: Int64[np.ndarray, "quantile bin"],
) -> None:
    """Add ``weight`` where one value belongs; nowhere if it is not finite."""
    if bits & np.uint32(0x7F800000) == np.uint32(0x7F800000):
        return
    key = key_of_bits(bits)
    for quantile in range(np.uintp(len(low))):
        if low[quantile] <= key <= high[quantile]:
            inside[quantile, np.uint32(key - low[quantile]) >> shift[quantile]] += weight
        elif (key > high[quantile]) == is_top[quantile]:
            outside[quantile] += weight


@kernel
def _find_extremes(
    near: Float32[np.ndarray, "step"],
    offset: Float32[np.ndarray, "anchor"],
    horizon: int,
    out: Float32[np.ndarray, "2 block"],
) -> bool:
    """Set ``out[:, i]`` to the extremes of ``near[i : i + horizon] - offset[i]``; say whether all values are finite."""
    num = np.uintp(len(offset))
    least, most = out[0], out[1]
    for i in range(num):
        least[i] = most[i] = near[i] - offset[i]
    quads = np.uintp(horizon - horizon % 4)
    for k in range(np.uintp(0), quads, np.uintp(4)):  # four at a time, as reading and writing the results cost most
        for i in range(num):
            a, b = near[i + k] - offset[i], near[i + k + np.uintp(1)] - offset[i]
            c, d = near[i + k + np.uintp(2)] - offset[i], near[i + k + np.uintp(3)] - offset[i]
            ab, cd = a if a < b else b, c if c < d else d
            found = ab if ab < cd else cd
            least[i] = found if found < least[i] else least[i]
            ab, cd = a if a > b else b, c if c > d else d
            found = ab if ab > cd else cd
            most[i] = found if found > most[i] else most[i]
    for k in range(quads, np.uintp(horizon)):
        for i in range(num):
            a = near[i + k] - offset[i]
            least[i] = a if a < least[i] else least[i]
            most[i] = a if a > most[i] else most[i]
    # NaN is not seen by a comparison, and comes from NaN and infinity alone.
    return bool(
        np.isfinite(near[: len(offset) + horizon - 1]).all()
        and np.isfinite(offset).all()
        and np.isfinite(out[:, : len(offset)]).all()
    )


@kernel
def _reduce_finite(
    near: Float32[np.ndarray, "step"],
    offset: Float32[np.ndarray, "anchor"],
    horizon: int,
    extremes: Float32[np.ndarray, "2 block"],
    sums: Float64[np.ndarray, "2 block"],
    out: Float64[np.ndarray, "6"],
) -> None:
    """Set the moments of one dimension of a block of chunks; ``sums`` is scratch.

    Distances are taken from one value of the block, so that an offset common to all does not cancel.
    """
    num = len(offset)
    centre = np.float64(near[0] - offset[0])
    _sum_distances(near, offset, horizon, centre, sums)
    total, square = 0.0, 0.0
    for i in range(num):
        total += sums[0, i]
        square += sums[1, i]
    out[COUNT] = num * horizon
    out[MEAN] = centre + total / out[COUNT]
    out[M2] = max(square - total * (total / out[COUNT]), 0.0)
    out[LOW] = extremes[0, :num].min()
    out[HIGH] = extremes[1, :num].max()


@kernel
def _reduce_each(
    near: Float32[np.ndarray, "step"],
    offset: Float32[np.ndarray, "anchor"],
    horizon: int,
    out: Float64[np.ndarray, "6"],
) -> None:
    """Set what :func:`_reduce_finite` does, and NON_FINITE, leaving out values that are not finite."""
    out[LOW], out[HIGH] = np.inf, -np.inf
    total = 0.0
    for i in range(len(offset)):
        for k in range(horizon):
            value = np.float64(near[i + k] - offset[i])
            if np.isfinite(value):
                total += value
                out[COUNT] += 1.0
                out[LOW], out[HIGH] = min(out[LOW], value), max(out[HIGH], value)
    out[NON_FINITE] = len(offset) * horizon - out[COUNT]
    out[MEAN] = total / max(out[COUNT], 1.0)
    for i in range(len(offset)):
        for k in range(horizon):
            value = np.float64(near[i + k] - offset[i])
            if np.isfinite(value):
                out[M2] += (value - out[MEAN]) * (value - out[MEAN])


@kernel
def _sum_distances(
    near: Float32[np.ndarray, "step"],
    offset: Float32[np.ndarray, "anchor"],
    horizon: int,
    centre: float,
    out: Float64[np.ndarray, "2 block"],
) -> None:
    """Set ``out[:, i]`` to the sums of ``d`` and ``d**2``, ``d = near[i : i + horizon] - offset[i] - centre``."""
    num = np.uintp(len(offset))
    sums, squares = out[0], out[1]
    for i in range(num):
        sums[i] = squares[i] = 0.0
    quads = np.uintp(horizon - horizon % 4)
    for k in range(np.uintp(0), quads, np.uintp(4)):
        for i in range(num):
            a = np.float64(near[i + k] - offset[i]) - centre
            b = np.float64(near[i + k + np.uintp(1)] - offset[i]) - centre
            c = np.float64(near[i + k + np.uintp(2)] - offset[i]) - centre
            d = np.float64(near[i + k + np.uintp(3)] - offset[i]) - centre
            sums[i] += (a + b) + (c + d)
            squares[i] += (a * a + b * b) + (c * c + d * d)
    for k in range(quads, np.uintp(horizon)):
        for i in range(num):
            a = np.float64(near[i + k] - offset[i]) - centre
            sums[i] += a
            squares[i] += a * a
