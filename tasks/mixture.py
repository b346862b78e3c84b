"""Which of several groups each position of a weighted sequence takes, as a function of the position alone.

A weighted draw that can be computed anywhere must not depend on the draws before it. Here a binary tree shares the positions out:
of the ``c``-th to arrive at a node, the left branch gets ``floor((c + 1) w + u) - floor(c w + u)``, so that after any number of
arrivals it has its share ``w`` of them, rounded (Bresenham, 1965); ``u`` is uniform in [0, 1) by the seed, which makes every single
position exact in expectation. How many a group had before is then the position within it, and no two ranks, epochs or restarts
can disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from schemas.errors import UsageError

_BITS = 32
"""Shares are whole multiples of 2**-32, so that every platform counts alike."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A sequence of groups without end, by weight; in any piece of it a group's number is right to one a level of the tree.

    Made by :meth:`of`. Nodes lie as in a binary heap: 1 is the root, those below ``n`` are ``2 n`` and ``2 n + 1``, and the
    leaves, a power of two of them, are the groups.
    """

    shares: UInt64[np.ndarray, " node"]
    """What goes left of what arrives, in 2**-32."""
    offsets: UInt64[np.ndarray, " node"]
    """``u``, in 2**-32."""

    @classmethod
    def of(cls, weights: Sequence[float], seed: int) -> "Mixture":
        """Return the mixture of groups by ``weights``, which need not sum to 1.

        Raises
        ------
        UsageError
            No weight, or one that is not a finite number above 0.
        """
        values = np.array(weights, np.float64)
        if not len(values) or not (np.isfinite(values).all() and (values > 0).all()):
            raise UsageError(f"expected one or more weights above 0, found {list(weights)}; correct the call")
        num_leaves = 1 << (len(values) - 1).bit_length()
        sums = np.zeros(2 * num_leaves)
        sums[num_leaves : num_leaves + len(values)] = values
        for node in range(num_leaves - 1, 0, -1):
            sums[node] = sums[2 * node] + sums[2 * node + 1]
        lefts = np.divide(
            sums[0::2][:num_leaves], sums[:num_leaves], out=np.ones(num_leaves), where=sums[:num_leaves] > 0
        )
        offsets = np.random.SeedSequence(seed, spawn_key=(0, 0)).generate_state(num_leaves, np.uint32)
        return cls(np.rint(lefts * 2.0**_BITS).astype(np.uint64), offsets.astype(np.uint64))

    def begin(self, position: int) -> "Arrivals":
        """Count what every group has had before ``position``."""
        num_leaves = len(self.shares)
        counts = [0, position, *[0] * (2 * num_leaves - 2)]
        rests = np.zeros(num_leaves, np.uint64)
        for node in range(1, num_leaves):
            share, offset = int(self.shares[node]), int(self.offsets[node])
            counts[2 * node], rest = divmod(counts[node] * share + offset, 1 << _BITS)
            counts[2 * node + 1] = counts[node] - counts[2 * node]
            rests[node] = rest
        return Arrivals(self.shares, rests, np.array(counts[num_leaves:], np.int64))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A mixture from one position on."""

    shares: UInt64[np.ndarray, " node"]
    rests: UInt64[np.ndarray, " node"]
    """What ``c w + u`` is beyond a whole number at that position, in 2**-32."""
    counts: Int64[np.ndarray, " group"]
    """How many each group has had before."""

    def at(
        self, positions: Int64[np.ndarray, " position"]
    ) -> tuple[Int64[np.ndarray, " position"], Int64[np.ndarray, " position"]]:
        """Return the group of each of ``positions``, counted from the beginning, and how many that group had before it.

        Parameters
        ----------
        positions
            From 0 to less than 2**31.
        """
        arrived = np.asarray(positions).astype(np.uint64)
        nodes = np.ones(len(arrived), np.int64)
        bits, one = np.uint64(_BITS), np.uint64(1)
        for _ in range(len(self.shares).bit_length() - 1):
            share, rest = self.shares[nodes], self.rests[nodes]
            left = (arrived * share + rest) >> bits
            is_right = (((arrived + one) * share + rest) >> bits) == left
            arrived = np.where(is_right, arrived - left, left)
            nodes = 2 * nodes + is_right
        groups = nodes - len(self.shares)
        return groups, self.counts[groups] + arrived.astype(np.int64)
