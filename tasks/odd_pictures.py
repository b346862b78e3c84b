"""Which episode of a view was recorded otherwise than the rest: channels swapped, upside down, mirrored."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float64, UInt8

CHANGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "red and blue were swapped": lambda picture: picture[:, :, ::-1],
    "it were upside down": lambda picture: picture[::-1],
    "it were turned by 180 degrees": lambda picture: picture[::-1, ::-1],
    "it were mirrored": lambda picture: picture[:, ::-1],
}
SIDE = 16
"""Pixels a side of the mean picture of an episode."""
MIN_DIFFERENCE = 4.0
"""Mean absolute difference, in 0 to 255, under which an episode is like the others."""


def mean_picture(frames: Sequence[UInt8[np.ndarray, "height width 3"]]) -> Float64[np.ndarray, "side side 3"]:
    """Return the mean of frames of one size, taken at SIDE by SIDE places."""
    height, width = frames[0].shape[:2]
    middle = (np.arange(SIDE) + 0.5) / SIDE
    rows, columns = (middle * height).astype(np.int64), (middle * width).astype(np.int64)
    taken = np.stack([frame[rows][:, columns] for frame in frames])
    return np.asarray(taken.mean(axis=0, dtype=np.float64), np.float64)


def odd_pictures(means: Float64[np.ndarray, "episode side side 3"]) -> list[str]:
    """Say of each episode which change would make it half as different from the others, or nothing.

    An episode is compared with the median of all others, so that one that is odd does not make the rest so.
    It takes three: of two, nobody can say which is the odd one.
    """
    found = []
    for episode, mean in enumerate(means):
        others = np.delete(means, episode, axis=0)
        if len(others) < 2:
            found.append("")
            continue
        usual = np.median(others, axis=0)
        errors = {what: float(np.abs(change(mean) - usual).mean()) for what, change in CHANGES.items()}
        best = min(errors, key=lambda what: errors[what])
        difference = float(np.abs(mean - usual).mean())
        found.append(best if difference > MIN_DIFFERENCE and errors[best] < 0.5 * difference else "")
    return found
