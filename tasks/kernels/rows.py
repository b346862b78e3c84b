"""The loop of absolute statistics: moments and counts of weighted rows in one pass, one column of a block at a time.

A block's rows are first laid out column by column, so that every loop runs over neighbouring numbers and becomes vectors. The
least and the greatest key of a column say whether a bracket is touched at all: mostly it is not, and nothing is counted.
"""

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt32, UInt64

from tasks.kernels.decorator import kernel
from tasks.kernels.quantiles import Search, key_of_bits, value_of_key
from tasks.kernels.stats import COUNT, HIGH, LOW, M2, MEAN, NON_FINITE, merge_moments

BLOCK_ROWS = 1024
"""Rows reduced around one value before they are merged: 57 KB of 14 float32 columns, which stay in the core's cache, and few
enough that plain float64 sums keep 13 digits. It is part of the result's last bits, and so is the number of lanes."""

PADDING = 16
"""Numbers between two columns: a distance of 4096 bytes would put all of them into the same few lines of the cache."""

TILE = 16
"""Rows whose columns are laid out in turn: a constant, so that the compiler makes vectors of them."""

LANES = 32
"""Sums kept side by side, as adding floats in another order is no vector for a compiler that keeps every bit."""

LEAST_KEY, GREATEST_KEY = np.uint32(0x00800000), np.uint32(0xFF7FFFFF)
"""Keys of the least and the greatest finite float32."""


@kernel
def reduce_rows(
    rows: Float32[np.ndarray, "row dim"],
    weights: Int64[np.ndarray, "row"],
    search: Search,
    with_moments: bool,
    state: Float64[np.ndarray, "6 dim"],
) -> None:
    """Count the weighted rows in their brackets and, if wanted, merge their moments into ``state``.

    ``state`` has the rows COUNT, MEAN, M2, LOW, HIGH, NON_FINITE. Rows of weight 0 may hold anything. A column that is searched
    for nothing has an infinite ``inner_low`` and ``inner_high``.
    """
    num_dims = rows.shape[1]
    is_searched = (search.inner_low != -np.inf) | (search.inner_high != np.inf)
    dims = np.flatnonzero(is_searched | with_moments).astype(np.uintp)
    columns = np.empty((num_dims, BLOCK_ROWS + PADDING), np.float32)
    bits = columns.view(np.uint32)
    kept, factors = np.empty(BLOCK_ROWS, np.int64), np.empty(BLOCK_ROWS)
    keys = np.empty(BLOCK_ROWS, np.uint32)
    lanes = np.empty((2, LANES))
    block = np.empty((6, num_dims))
    for start in range(0, len(rows), BLOCK_ROWS):
        size = _take_columns(rows[start : start + BLOCK_ROWS], weights[start : start + BLOCK_ROWS], columns, kept, dims)
        if size == 0:
            continue
        total = np.int64(0)
        for i in range(size):
            total += kept[i]
            factors[i] = kept[i]
        for dim in dims:
            least, most = _fill_keys(bits[dim], size, keys)
            is_finite = least >= LEAST_KEY and most <= GREATEST_KEY
            if with_moments and is_finite:
                block[COUNT, dim], block[NON_FINITE, dim] = total, 0.0
                block[LOW, dim], block[HIGH, dim] = value_of_key(least), value_of_key(most)
                _reduce_finite(columns[dim], factors, size, lanes, block[:, dim])
            elif with_moments:
                _reduce_each(columns[dim], factors, size, block[:, dim])
            if is_searched[dim]:
                if is_finite:
                    _count_finite(keys, kept, size, total, least, most, dim, search)
                else:
                    _count_each(keys, kept, size, dim, search)
        if with_moments:
            merge_moments(block, state)


@kernel
def _take_columns(
    rows: Float32[np.ndarray, "row dim"],
    weights: Int64[np.ndarray, "row"],
    columns: Float32[np.ndarray, "dim block"],
    kept: Int64[np.ndarray, "block"],
    dims: UInt64[np.ndarray, "wanted"],
) -> int:
    """Lay out columns of the rows that have a weight, their weights in ``kept``, and return how many rows that are."""
    size = np.uintp(0)
    for row in range(np.uintp(len(rows))):
        kept[size] = weights[row]
        size += np.uintp(weights[row] != 0)
    whole = np.uintp(len(rows) - len(rows) % TILE) if size == len(rows) else np.uintp(0)
    for begin in range(np.uintp(0), whole, np.uintp(TILE)):
        for dim in dims:
            for i in range(np.uintp(TILE)):
                columns[dim, begin + i] = rows[begin + i, dim]
    place = whole
    for row in range(whole, np.uintp(len(rows))):
        if weights[row] != 0:
            for dim in dims:
                columns[dim, place] = rows[row, dim]
            place += np.uintp(1)
    return int(size)


@kernel
def _fill_keys(
    bits: UInt32[np.ndarray, "block"], size: int, keys: UInt32[np.ndarray, "block"]
) -> tuple[np.uint32, np.uint32]:
    """Set the keys of ``bits`` and return the least and the greatest."""
    least, most = np.uint32(0xFFFFFFFF), np.uint32(0)
    for i in range(np.uintp(size)):
        key = key_of_bits(bits[i])
        keys[i] = key
        least = min(least, key)
        most = max(most, key)
    return least, most


@kernel
def _reduce_finite(
    values: Float32[np.ndarray, "block"],
    factors: Float64[np.ndarray, "block"],
    size: int,
    lanes: Float64[np.ndarray, "2 lane"],
    out: Float64[np.ndarray, "6"],
) -> None:
    """Set MEAN and M2 of a column whose values are finite and whose COUNT is set; ``lanes`` is scratch.

    Distances are taken from the first value, so that an offset common to all does not cancel; since that value is one of the
    column, ``sum(w d^2)`` exceeds M2 by a factor of the sum of weights at most.
    """
    centre = np.float64(values[0])
    sums, squares = lanes[0], lanes[1]
    sums[:] = 0.0
    squares[:] = 0.0
    two = np.uintp(2 * LANES)
    whole = np.uintp(size) - np.uintp(size) % two
    for begin in range(np.uintp(0), whole, two):
        for lane in range(np.uintp(LANES)):
            first, second = begin + lane, begin + lane + np.uintp(LANES)
            a, b = np.float64(values[first]) - centre, np.float64(values[second]) - centre
            weighted_a, weighted_b = factors[first] * a, factors[second] * b
            sums[lane] += weighted_a + weighted_b
            squares[lane] += weighted_a * a + weighted_b * b
    for i in range(whole, np.uintp(size)):
        distance = np.float64(values[i]) - centre
        sums[i % np.uintp(LANES)] += factors[i] * distance
        squares[i % np.uintp(LANES)] += factors[i] * distance * distance
    total, square = 0.0, 0.0
    for lane in range(LANES):
        total += sums[lane]
        square += squares[lane]
    out[MEAN] = centre + total / out[COUNT]
    out[M2] = max(square - total * (total / out[COUNT]), 0.0)


@kernel
def _reduce_each(
    values: Float32[np.ndarray, "block"],
    factors: Float64[np.ndarray, "block"],
    size: int,
    out: Float64[np.ndarray, "6"],
) -> None:
    """Set the moments of a column, leaving out and counting values that are not finite."""
    out[:] = 0.0
    out[LOW], out[HIGH] = np.inf, -np.inf
    for i in range(size):
        value = np.float64(values[i])
        if np.isfinite(value):
            out[COUNT] += factors[i]
            out[MEAN] += factors[i] * value
            out[LOW], out[HIGH] = min(out[LOW], value), max(out[HIGH], value)
        else:
            out[NON_FINITE] += factors[i]
    out[MEAN] /= max(out[COUNT], 1.0)
    for i in range(size):
        value = np.float64(values[i])
        if np.isfinite(value):
            out[M2] += factors[i] * ((value - out[MEAN]) * (value - out[MEAN]))


@kernel
def _count_finite(  # noqa: PLR0913 - what is known of the column saves reading it
    keys: UInt32[np.ndarray, "block"],
    weights: Int64[np.ndarray, "block"],
    size: int,
    total: np.int64,
    least: np.uint32,
    most: np.uint32,
    dim: np.uintp,
    search: Search,
) -> None:
    """Count a column of finite values in its brackets; ``total`` is the sum of its weights."""
    for quantile in range(search.low.shape[1]):
        low, high = search.low[dim, quantile], search.high[dim, quantile]
        is_top = search.is_top[quantile]
        if least > high or most < low:
            if is_top == (least > high):
                search.outside[dim, quantile] += total
            continue
        width = np.uint32(high - low)
        outside, within = np.int64(0), np.uint32(0)
        for i in range(np.uintp(size)):
            is_out = keys[i] > high if is_top else keys[i] < low
            outside += weights[i] if is_out else np.int64(0)
            within += np.uint32(np.uint32(keys[i] - low) <= width)
        search.outside[dim, quantile] += outside
        if within == 0:
            continue
        shift = search.shift[dim, quantile]
        for i in range(np.uintp(size)):
            distance = np.uint32(keys[i] - low)
            if distance <= width:
                search.inside[dim, quantile, distance >> shift] += weights[i]


@kernel
def _count_each(
    keys: UInt32[np.ndarray, "block"],
    weights: Int64[np.ndarray, "block"],
    size: int,
    dim: np.uintp,
    search: Search,
) -> None:
    """Count a column in its brackets, leaving out values that are not finite."""
    for i in range(size):
        if LEAST_KEY <= keys[i] <= GREATEST_KEY:
            _count_finite(keys[i : i + 1], weights[i : i + 1], 1, weights[i], keys[i], keys[i], dim, search)
