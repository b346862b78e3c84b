"""Block shuffle: blocks of neighbouring samples in random order, samples in random order within a buffer of blocks.

What is read together stays together: while one buffer of blocks is served, nothing but those blocks is read, each of them once. As the
full shuffle, it is a function of the position; what it holds are three numbers a block.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from schemas.errors import UsageError
from tasks.order import shuffled


def block_bounds(steps: Int64[np.ndarray, " sample"], block_steps: int) -> Int64[np.ndarray, " edge"]:
    """Return where the samples of each ``block_steps`` steps begin, and the end; blocks without a sample are left out.

    Parameters
    ----------
    steps
        The step of each sample, ascending.
    block_steps
        Steps of a block, such as those of a shard.
    """
    if block_steps < 1:
        raise UsageError(f"expected blocks of 1 step or more, found {block_steps}; correct the call")
    starts = np.flatnonzero(np.diff(steps // block_steps)) + 1
    return np.concatenate([[0], starts, [len(steps)]]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The order of one epoch. Made by :meth:`of`."""

    firsts: Int64[np.ndarray, " block"]
    """First sample of the block that comes at each place."""
    starts: Int64[np.ndarray, " edge"]
    """Position at which each place begins, and the end."""
    buffers: Int64[np.ndarray, " buffer_edge"]
    """Position at which each buffer begins, and the end."""
    seed: int
    epoch: int
    part: tuple[int, ...]

    @classmethod
    def of(
        cls,
        bounds: Int64[np.ndarray, " edge"],
        buffer_blocks: int,
        *,
        seed: int,
        epoch: int,
        part: tuple[int, ...] = (),
    ) -> "BlockOrder":
        """Shuffle the blocks between ``bounds``, and share them out to buffers of at most ``buffer_blocks``, alike to one."""
        if buffer_blocks < 1:
            raise UsageError(f"expected a buffer of 1 block or more, found {buffer_blocks}; correct the call")
        num_blocks = len(bounds) - 1
        blocks = shuffled(np.arange(num_blocks), num_blocks, seed=seed, epoch=epoch, part=part)
        starts = np.concatenate([[0], np.cumsum(np.diff(bounds)[blocks])])
        num_buffers = -(-num_blocks // buffer_blocks)
        edges = np.arange(num_buffers + 1) * num_blocks // max(num_buffers, 1)
        return cls(bounds[:-1][blocks], starts, starts[edges], seed, epoch, part)

    def at(self, positions: Int64[np.ndarray, " position"]) -> Int64[np.ndarray, " position"]:
        """Return the samples at ``positions``, which may be anywhere in the epoch."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.starts[-1]):
            raise UsageError(
                f"expected positions in [0, {self.starts[-1]}), found {positions.min()} to {positions.max()}; correct the call"
            )
        buffers = np.searchsorted(self.buffers, positions, side="right") - 1
        places = np.empty_like(positions)
        for buffer in np.unique(buffers).tolist():
            first, last = self.buffers[buffer : buffer + 2].tolist()
            inside = buffers == buffer
            places[inside] = first + shuffled(
                positions[inside] - first, last - first, seed=self.seed, epoch=self.epoch, part=(*self.part, buffer)
            )
        slots = np.searchsorted(self.starts, places, side="right") - 1
        samples: np.ndarray = self.firsts[slots] + places - self.starts[slots]
        return samples
