"""Which samples a rank takes, and when: an order of the epoch, shared out."""

import os
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.orders import Order
from schemas.errors import UsageError
from tasks.order import Partition


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
