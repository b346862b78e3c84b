"""Which samples a rank takes, and when: an order of the epoch, shared out."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.orders import Order
from schemas.errors import UsageError
from tasks.order import Partition

STATE_VERSION = 1
"""Of states; raised when an old state would mean another position."""


@dataclass(frozen=True, slots=True)
class EpochSampler:
    """One rank's batches of every epoch."""

    order: Order
    partition: Partition
    every: int = 1
    """How many processes of this rank take its batches in turns, as torch's workers do."""

    def batch(self, epoch: int, start: int) -> tuple[Int64[np.ndarray, " batch"], int]:
        """Return this rank's samples of the global batch at ``start``, and how many are new (the first ones)."""
        positions, num_new = self.partition.positions(start)
        return self.order.at(positions, epoch), num_new

    def stop(self, start: int) -> int:
        """Return where the next global batch after ``start`` begins; ``start`` itself at the end of the epoch."""
        stop = self.partition.stop(start)
        return stop if stop == start else self.skip(stop, self.every - 1)

    def skip(self, position: int, num_batches: int) -> int:
        """Return where the global batch begins that comes ``num_batches`` later; the end of the epoch, if none does."""
        return min(position + num_batches * self.partition.global_batch, max(position, self.partition.num))

    def state(self, epoch: int, position: int, fingerprint: str) -> dict[str, Any]:
        """Return a position as a few numbers, the same on every rank, whatever the batch size or world size.

        Parameters
        ----------
        fingerprint
            Of the samples.
        """
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "samples_seen": position,
            "num_samples": self.order.num,
            "order": self.order.name,
            "fingerprint": fingerprint,
        }

    def place(self, state: Mapping[str, Any], fingerprint: str) -> tuple[int, int]:
        """Return epoch and position of a state; UsageError where it is of other samples or another order."""
        mine = self.state(0, 0, fingerprint)
        for name in ("version", "num_samples", "order", "fingerprint"):
            if state.get(name) != mine[name]:
                raise UsageError(
                    f"expected a state of this dataset and order, with {name} {mine[name]!r}, found {state.get(name)!r}; "
                    "make the loader as it was when the state was saved, or begin an epoch with set_epoch()"
                )
        epoch, seen = state.get("epoch"), state.get("samples_seen")
        if type(epoch) is not int or type(seen) is not int or epoch < 0 or not 0 <= seen <= self.order.num:
            raise UsageError(f"expected whole numbers epoch and samples_seen in range, found {epoch!r} and {seen!r}")
        return epoch, seen


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Fill what is None in from ``RANK`` and ``WORLD_SIZE``, as torchrun and others set them, else one rank alone."""
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if any(found.values()) and not all(value.isdigit() for value in found.values()) and None in (rank, world_size):
        raise UsageError(
            f"expected numbers in both RANK and WORLD_SIZE, found {found}; set both or pass rank and world_size"
        )
    rank = int(found["RANK"] or 0) if rank is None else rank
    return rank, int(found["WORLD_SIZE"] or 1) if world_size is None else world_size
