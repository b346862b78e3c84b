"""How well an order is shuffled, as numbers that are known for a full shuffle."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from schemas.errors import UsageError

NEAR = 10
"""Samples that lie less than this many apart in the recording are nearly the same sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """What an order does to batches; in brackets what a full shuffle and the recorded order give."""

    displacement: float
    """Mean distance of samples from their place in the recording, of that of a random permutation (1; 0)."""
    serial_correlation: float
    """Correlation of each sample's number with that of the next (0; 1)."""
    batch_spread: float
    """Standard deviation of the batches' means, of that of batches drawn at random (1; about the root of the batch size).
    Its square is the design effect of cluster sampling (Kish, 1965): a batch of 256 with a spread of 2 says as much of the whole
    as 64 samples drawn at random."""
    near_pairs: float
    """Share of a batch's samples with another one of it less than 10 away (about ``20 batch / num``; 1)."""


def shuffle_quality(order: Int64[np.ndarray, " position"], batch_size: int) -> ShuffleQuality:
    """Measure an order of all samples of an epoch.

    Parameters
    ----------
    order
        Which sample comes at each position: a permutation.
    batch_size
        Samples of a global batch; 2 batches at least.
    """
    num = len(order)
    num_batches = num // batch_size if batch_size > 1 else 0
    if num_batches < 2:
        raise UsageError(f"expected 2 batches of 2 samples or more, found {num} in batches of {batch_size}")
    distance = np.abs(order - np.arange(num)).mean() / ((num * num - 1) / (3 * num))
    values = order.astype(np.float64)
    batches = np.sort(order[: num_batches * batch_size].reshape(num_batches, batch_size), axis=1)
    # of a mean of batch_size numbers drawn from num without replacement
    expected = values.std() / np.sqrt(batch_size) * np.sqrt((num - batch_size) / (num - 1))
    is_near = np.diff(batches, axis=1) < NEAR
    has_near = np.pad(is_near, ((0, 0), (1, 0))) | np.pad(is_near, ((0, 0), (0, 1)))
    return ShuffleQuality(
        displacement=float(distance),
        serial_correlation=float(np.corrcoef(values[:-1], values[1:])[0, 1]),
        batch_spread=float(np.sqrt(np.mean((batches.mean(axis=1) - values.mean()) ** 2)) / expected),
        near_pairs=float(has_near.mean()),
    )
