"""What is odd about recorded numbers: runs of one value, and motion that no vehicle is capable of."""

import numpy as np
from jaxtyping import Bool, Float64, Num


def travelled(positions: Float64[np.ndarray, "step dim"]) -> Float64[np.ndarray, " step"]:
    """Return each step's distance from the step before, in the positions' unit; NaN for the first and beside gaps."""
    steps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    return np.concatenate([np.full(min(1, len(positions)), np.nan), steps])


def turned(headings_rad: Float64[np.ndarray, " step"]) -> Float64[np.ndarray, " step"]:
    """Return each step's turn since the step before, the shorter way round, in [0, pi]; NaN for the first and beside gaps.

    >>> turned(np.array([3.1, -3.1, 0.0]))[1].round(3)
    np.float64(0.083)
    """
    turns = np.diff(headings_rad, prepend=np.nan)
    return np.abs((turns + np.pi) % (2 * np.pi) - np.pi)


def repeats(values: Num[np.ndarray, " step"], present: Bool[np.ndarray, " step"], least: int) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of each longest run of ``least`` or more equal values, all present.

    >>> repeats(np.array([7, 7, 7, 2, 2]), np.ones(5, bool), 3)
    [(0, 3)]
    """
    same = (values[1:] == values[:-1]) & present[1:] & present[:-1]
    return [(start, stop + 1) for start, stop in runs(same) if stop + 1 - start >= least]


def runs(mask: Bool[np.ndarray, " step"]) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` of each run of True.

    >>> runs(np.array([True, True, False, True]))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
