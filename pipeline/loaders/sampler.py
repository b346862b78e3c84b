"""Which samples a rank takes, and when: an order of the epoch, shared out."""

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from schemas.errors import UsageError
from tasks.order import Partition, shuffled


class Order(Protocol):
    """An order of the samples of each epoch, as a function of the position alone."""

    @property
    def num(self) -> int:
        """Samples in an epoch."""

    @property
    def name(self) -> str:
        """What a saved state must agree with: another order at the same position is another sample."""

    def at(self, positions: Int64[np.ndarray, " position"], epoch: int) -> Int64[np.ndarray, " position"]:
        """Return the samples at ``positions`` of an epoch."""


@dataclass(frozen=True, slots=True)
class FullShuffle:
    """Every epoch in an order of its own, over all samples."""

    num: int
    seed: int

    @property
    def name(self) -> str:
        """``shuffle`` and the seed."""
        return f"shuffle {self.seed}"

    def at(self, positions: Int64[np.ndarray, " position"], epoch: int) -> Int64[np.ndarray, " position"]:
        """Compute the samples, about 0.1 microseconds each."""
        return shuffled(positions, self.num, seed=self.seed, epoch=epoch)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Every epoch as recorded."""

    num: int

    @property
    def name(self) -> str:
        """``in order``."""
        return "in order"

    def at(self, positions: Int64[np.ndarray, " position"], epoch: int) -> Int64[np.ndarray, " position"]:
        """Return ``positions``."""
        return positions


@dataclass(frozen=True, slots=True)
class EpochSampler:
    """One rank's batches of every epoch."""

    order: Order
    partition: Partition

    def batch(self, epoch: int, start: int) -> tuple[Int64[np.ndarray, " batch"], int]:
        """Return this rank's samples of the global batch at ``start``, and how many are new (the first ones)."""
        positions, num_new = self.partition.positions(start)
        return self.order.at(positions, epoch), num_new

    def stop(self, start: int) -> int:
        """Return the position after the global batch at ``start``; ``start`` itself at the end of the epoch."""
        return self.partition.stop(start)


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Fill what is None in from ``RANK`` and ``WORLD_SIZE``, as torchrun and others set them, else one rank alone."""
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if any(found.values()) and not all(value.isdigit() for value in found.values()) and None in (rank, world_size):
        raise UsageError(
            f"expected numbers in both RANK and WORLD_SIZE, found {found}; set both or pass rank and world_size"
        )
    rank = int(found["RANK"] or 0) if rank is None else rank
    return rank, int(found["WORLD_SIZE"] or 1) if world_size is None else world_size
