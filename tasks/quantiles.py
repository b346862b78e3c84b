"""Exact quantiles of weighted values in few passes and bounded memory.

A quantile ``q`` of ``n`` values is the smallest value that at least ``q n`` of them do not exceed: NumPy's ``inverted_cdf``,
an order statistic that occurs in the data. A sample guesses a bracket for it. A pass counts the values outside the bracket and, in
bins, those inside (:class:`Counts`); then the bracket becomes the one bin that holds the quantile, or, if the guess was
wrong, what lies beyond it (:func:`narrow`). Mostly the second pass is the last. Counts are integers, so they add in any order, and
the guess changes the number of passes but never the value.

Values are float32, ordered by a key (see :mod:`tasks.kernels.quantiles`); NaN and infinity are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt32

from tasks.kernels.quantiles import Search

NUM_BINS = 16384
"""Of a bracket: with 14 dimensions and two quantiles 3.7 MB, and two passes for brackets up to 2**28 keys wide."""

LEAST_KEY, GREATEST_KEY = 0x00800000, 0xFF7FFFFF
"""Keys of the least and the greatest finite float32."""

GUESS = (0.3, 2.0)
"""A guessed bracket holds these multiples of the quantile's distance from the nearer end, in ranks of the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brackets:
    """Where each quantile is looked for: the keys ``[low, high]``."""

    percentiles: tuple[int, ...]
    low: UInt32[np.ndarray, "dim percentile"]
    high: UInt32[np.ndarray, "dim percentile"]
    is_found: Bool[np.ndarray, "dim percentile"]
    """The bracket is one key, and counting has shown that it is the quantile."""

    @property
    def is_top(self) -> Bool[np.ndarray, " percentile"]:
        """Whether values above the bracket are counted, rather than those below."""
        return np.array([percent > 50 for percent in self.percentiles], dtype=bool)

    @property
    def shift(self) -> UInt32[np.ndarray, "dim percentile"]:
        """Binary logarithm of a bin's keys: the least with which the bracket fits into the bins."""
        wide = (self.high - self.low).astype(np.int64) // NUM_BINS
        shift: UInt32[np.ndarray, "dim percentile"] = np.ceil(np.log2(wide + 1)).astype(np.uint32)
        return shift

    def inner(self) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, " dim"]]:
        """Return the values at and below which, and at and above which, a value must be counted."""
        open_low = np.where(self.is_found | self.is_top, -np.inf, values_of_keys(self.high))
        open_high = np.where(self.is_found | ~self.is_top, np.inf, values_of_keys(self.low))
        least = open_low.max(axis=1, initial=-np.inf).astype(np.float32)
        return least, open_high.min(axis=1, initial=np.inf).astype(np.float32)

    def values(self) -> Float64[np.ndarray, "percentile dim"]:
        """Return the quantiles, once all are found."""
        return values_of_keys(self.low).astype(np.float64).T + 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Weights of the values outside the brackets, towards the nearer end, and inside."""

    outside: Int64[np.ndarray, "dim percentile"]
    inside: Int64[np.ndarray, "dim percentile bin"]

    @staticmethod
    def of(brackets: Brackets) -> "Counts":
        """Return counts of nothing yet."""
        shape = brackets.low.shape
        return Counts(np.zeros(shape, np.int64), np.zeros((*shape, NUM_BINS), np.int64))

    def __add__(self, other: "Counts") -> "Counts":
        """Join the counts of different rows in the same brackets."""
        return Counts(self.outside + other.outside, self.inside + other.inside)


def guess(
    rows: Float32[np.ndarray, "row dim"], weights: Int64[np.ndarray, "row"], percentiles: Sequence[int]
) -> Brackets:
    """Guess brackets from a sample of the rows; where it has no finite value, the bracket is everything."""
    shape = (rows.shape[1], len(percentiles))
    low, high = np.full(shape, LEAST_KEY, np.uint32), np.full(shape, GREATEST_KEY, np.uint32)
    for dim in range(rows.shape[1]):
        kept = np.isfinite(rows[:, dim]) & (weights > 0)
        if not kept.any():
            continue
        order = np.argsort(rows[kept, dim])
        ordered, reached = rows[kept, dim][order], np.cumsum(weights[kept][order])
        for column, percent in enumerate(percentiles):
            tail = min(percent, 100 - percent) / 100
            shares = [tail * times if percent <= 50 else 1 - tail * times for times in GUESS]
            ends = np.searchsorted(reached, np.array(sorted(shares)) * reached[-1]).clip(0, len(ordered) - 1)
            low[dim, column], high[dim, column] = keys_of_values(ordered[ends])
    return Brackets(percentiles=tuple(percentiles), low=low, high=high, is_found=np.zeros(shape, bool))


def search(brackets: Brackets, counts: Counts, skip: Sequence[int] = ()) -> Search:
    """Return what the kernels of a pass take; the dimensions ``skip`` are not counted."""
    inner_low, inner_high = brackets.inner()
    inner_low[list(skip)], inner_high[list(skip)] = -np.inf, np.inf
    return Search(
        inner_low=inner_low,
        inner_high=inner_high,
        low=brackets.low,
        high=brackets.high,
        shift=brackets.shift,
        is_top=brackets.is_top,
        outside=counts.outside,
        inside=counts.inside,
    )


def narrow(brackets: Brackets, counts: Counts, total: Int64[np.ndarray, "dim"]) -> Brackets:
    """Return the brackets of the next pass, from a pass over all rows; ``total`` is the weight of the finite values."""
    low, high, is_found = brackets.low.copy(), brackets.high.copy(), brackets.is_found.copy()
    for dim, column in zip(*np.nonzero(~is_found)):
        if total[dim] == 0:
            is_found[dim, column] = True
            continue
        reached = np.cumsum(counts.inside[dim, column])
        outside = int(counts.outside[dim, column])
        below = int(total[dim]) - outside - int(reached[-1]) if brackets.is_top[column] else outside
        rank = max(1, -(-int(total[dim]) * brackets.percentiles[column] // 100))  # 0.07 * 100 is 7.000000000000001
        if rank <= below:
            low[dim, column], high[dim, column] = LEAST_KEY, low[dim, column] - 1
        elif rank > below + reached[-1]:
            low[dim, column], high[dim, column] = high[dim, column] + 1, GREATEST_KEY
        else:
            width = 1 << int(brackets.shift[dim, column])
            first = int(low[dim, column]) + int(np.searchsorted(reached, rank - below)) * width
            low[dim, column], high[dim, column] = first, min(first + width - 1, int(high[dim, column]))
            is_found[dim, column] = width == 1
    return Brackets(percentiles=brackets.percentiles, low=low, high=high, is_found=is_found)


def keys_of_values(values: Float32[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """Map float32 to unsigned integers that sort like them: all bits of negative ones flipped, the sign of others."""
    bits = values.astype(np.float32).view(np.uint32)
    return np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000)).astype(np.uint32)


def values_of_keys(keys: UInt32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Undo :func:`keys_of_values`."""
    bits = np.where(keys >> np.uint32(31), keys ^ np.uint32(0x80000000), ~keys).astype(np.uint32)
    return bits.view(np.float32)
