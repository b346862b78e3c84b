"""Orders of an epoch: in full shuffle, in blocks, as recorded, or weighted; each a function of the position alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from pipeline.store.atomic import xxh3_hex
from schemas.errors import UsageError
from tasks.blocks import BlockOrder, block_bounds
from tasks.mixture import Arrivals, Mixture
from tasks.order import shuffled

Positions = Int64[np.ndarray, " position"]


class Order(Protocol):
    """An order of the samples of each epoch, as a function of the position alone."""

    @property
    def num(self) -> int:
        """Positions of an epoch."""

    @property
    def name(self) -> str:
        """What a saved state must agree with: another order at the same position is another sample."""

    def at(self, positions: Positions, epoch: int) -> Positions:
        """Return the samples at ``positions`` of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How ``shuffle`` keeps together what is read together, for disks and object stores."""

    block_steps: int = 64
    """Steps that stay together; those of a shard read every file once an epoch."""
    buffer_blocks: int = 256
    """Blocks whose samples are mixed: what should fit in memory or in a cache at a time."""


Shuffle = bool | str | Blocks
"""True or ``full``, ``block`` or :class:`Blocks`, False."""


@dataclass(frozen=True, slots=True)
class FullShuffle:
    """Every epoch in an order of its own, over all samples."""

    num: int
    seed: int
    part: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """``shuffle`` and the seed."""
        return f"shuffle {self.seed}"

    def at(self, positions: Positions, epoch: int) -> Positions:
        """Compute the samples, about 0.1 microseconds each."""
        return shuffled(positions, self.num, seed=self.seed, epoch=epoch, part=self.part)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Every epoch as recorded."""

    num: int

    @property
    def name(self) -> str:
        """``in order``."""
        return "in order"

    def at(self, positions: Positions, epoch: int) -> Positions:
        """Return ``positions``."""
        return positions


class BlockShuffle:
    """Every epoch in an order of its own, block by block: see :mod:`tasks.blocks`.

    Parameters
    ----------
    steps
        The step of each sample, ascending.
    blocks
        What stays together.
    seed, part
        Of the shuffle.
    """

    def __init__(
        self, steps: Int64[np.ndarray, " sample"], blocks: Blocks, seed: int, part: tuple[int, ...] = ()
    ) -> None:
        self.num, self._blocks, self._seed, self._part = len(steps), blocks, seed, part
        self._bounds = block_bounds(steps, blocks.block_steps)
        self._order = self._of(0)

    @property
    def name(self) -> str:
        """``block shuffle`` with its sizes and the seed."""
        return f"block shuffle {self._seed}, {self._blocks.buffer_blocks} of {self._blocks.block_steps} steps"

    def at(self, positions: Positions, epoch: int) -> Positions:
        """Compute the samples; an epoch's blocks are shuffled when it is first asked for."""
        order = self._order
        if order.epoch != epoch:
            order = self._order = self._of(epoch)
        return order.at(positions)

    def _of(self, epoch: int) -> BlockOrder:
        return BlockOrder.of(self._bounds, self._blocks.buffer_blocks, seed=self._seed, epoch=epoch, part=self._part)


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that share a weight."""

    weight: float
    order: Order
    samples: Int64[np.ndarray, " member"] | int
    """The samples that the order's are: by number, or so many more."""


class WeightedOrder:
    """Groups of samples by weight, each in an order of its own that goes on from epoch to epoch.

    A group whose samples are all served begins again, in another order, before an epoch of the mixture ends; one that is not
    served whole in an epoch goes on in the next. See :mod:`tasks.mixture`.

    Parameters
    ----------
    groups
        What is mixed.
    num
        Positions that are called an epoch.
    seed
        Of the mixture; each group's order has its own.
    """

    def __init__(self, groups: Sequence[Group], num: int, seed: int) -> None:
        if not 1 <= num < 2**31:
            raise UsageError(f"expected an epoch of 1 to 2**31 - 1 samples, found {num}; correct epoch_samples")
        self._groups, self.num, self._seed = groups, num, seed
        self._mixture = Mixture.of([group.weight for group in groups], seed)
        self._begun: tuple[int, Arrivals] = (0, self._mixture.begin(0))

    @property
    def name(self) -> str:
        """The seed, and a digest of weights and sizes."""
        sizes = ";".join(f"{group.weight!r} {group.order.num} {group.order.name}" for group in self._groups)
        return f"mixture {self._seed} of {len(self._groups)} groups {xxh3_hex(sizes.encode())[:16]}"

    def at(self, positions: Positions, epoch: int) -> Positions:
        """Compute the samples."""
        if self._begun[0] != epoch:
            self._begun = (epoch, self._mixture.begin(epoch * self.num))
        numbers, served = self._begun[1].at(positions)
        samples = np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            group, mine = self._groups[number], numbers == number
            samples[mine] = _members(group, served[mine])
        return samples


def _members(group: Group, served: Positions) -> Positions:
    """Return the samples of a group after it has served as many."""
    rounds, positions = np.divmod(served, group.order.num)
    found = np.empty_like(served)
    for number in np.unique(rounds).tolist():
        inside = rounds == number
        found[inside] = group.order.at(positions[inside], number)
    return group.samples + found if isinstance(group.samples, int) else group.samples[found]


def order_maker(shuffle: Shuffle, seed: int) -> Callable[[Int64[np.ndarray, " sample"], tuple[int, ...]], Order]:
    """Return what makes an order of samples at given steps.

    Raises
    ------
    UsageError
        ``shuffle`` is none of those there are.
    """
    if shuffle == "block":
        shuffle = Blocks()
    if isinstance(shuffle, Blocks):
        blocks = shuffle
        return lambda steps, part: BlockShuffle(steps, blocks, seed, part)
    if shuffle is False:
        return lambda steps, part: InOrder(len(steps))
    if shuffle not in (True, "full"):
        raise UsageError(
            f"expected shuffle True, 'full', 'block', Blocks(...) or False, found {shuffle!r}; correct the call"
        )
    return lambda steps, part: FullShuffle(len(steps), seed, part)
