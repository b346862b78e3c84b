"""Arithmetic of small charts: where ticks stand, which points of a long line are drawn, what a histogram counts."""

import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Num

LARGEST = 1e300
"""Greater values are drawn here, so that no range overflows."""


QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)

_NO_PLACE = re.compile("veloc|accel|speed|command|target|rot|euler|quat|angular|force|joint|world2|extent|size")


class Spread(NamedTuple):
    """Where the finite values of one feature lie."""

    low: float
    q01: float
    q25: float
    median: float
    q75: float
    q99: float
    high: float
    num_non_finite: int


def spread_of(values: Num[np.ndarray, " n"]) -> Spread:
    """Return minimum, quantiles and maximum of the finite values; NaN for each where there is none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        finite = np.array([np.nan])
    low, q01, q25, median, q75, q99, high = np.quantile(finite.astype(np.float64), QUANTILES).tolist()
    return Spread(low, q01, q25, median, q75, q99, high, int((~np.isfinite(values)).sum()))


def evenly(length: int, count: int) -> Int64[np.ndarray, " k"]:
    """Return at most ``count`` distinct indices below ``length``, evenly spread, the first and the last among them.

    >>> evenly(100, 3).tolist(), evenly(2, 5).tolist(), evenly(9, 1).tolist()
    ([0, 50, 99], [0, 1], [0])
    """
    if count >= length:
        return np.arange(length, dtype=np.int64)
    return np.round(np.linspace(0, length - 1, max(count, 1))).astype(np.int64)


def ticks(low: float, high: float, count: int = 3) -> list[float]:
    """Return about ``count`` round numbers in ``[low, high]``: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 9.3)
    [0.0, 5.0]
    >>> ticks(-0.12, 0.31)
    [0.0, 0.2]
    """
    width = high - low
    if not (np.isfinite(width) and width > 0):
        return [low] if np.isfinite(low) else []
    power = 10.0 ** np.floor(np.log10(width / count))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = next((step for step in steps if width / step <= count), steps[-1])
    first, last = int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9))
    return [float(k * step) for k in range(first, last + 1)]


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Return the range of an axis on which ``[low, high]`` has some air; never empty, always finite.

    >>> padded(0.0, 100.0), padded(2.0, 2.0), padded(float("nan"), float("nan"))
    ((-6.0, 106.0), (1.8, 2.2), (-1.0, 1.0))
    """
    if not (np.isfinite(low) and np.isfinite(high)):
        return -1.0, 1.0
    low, high = max(low, -LARGEST), min(high, LARGEST)
    room = (high - low) * share if high > low else abs(high) * 0.1 or 1.0
    return low - room, high + room


def thin(y: Num[np.ndarray, " n"], max_points: int) -> Int64[np.ndarray, " k"]:
    """Return which points of a line to draw: all, or the least and the greatest of each of ``max_points // 2`` stretches.

    No peak is lost, however long the line. NaN, which breaks a line, is kept where a stretch holds nothing else.
    """
    if len(y) <= max_points:
        return np.arange(len(y), dtype=np.int64)
    edges = np.linspace(0, len(y), max(max_points // 2, 1) + 1).astype(np.int64)
    low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    kept = [
        start + pick
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        for pick in (int(low[start:stop].argmin()), int(high[start:stop].argmax()))
    ]
    return np.unique(np.array(kept, np.int64))


def histogram(values: Num[np.ndarray, " n"], num_bins: int = 40) -> tuple[Int64[np.ndarray, " bin"], float, float]:
    """Count the finite values in equal bins between their least and greatest, and return those two."""
    finite = np.clip(values[np.isfinite(values)].astype(np.float64), -LARGEST, LARGEST)
    if not len(finite):
        return np.zeros(num_bins, np.int64), float("nan"), float("nan")
    low, high = float(finite.min()), float(finite.max())
    left, right = (low, high) if high - low > 1e-9 * max(abs(low), abs(high)) else padded(low, low)
    counts, _ = np.histogram(finite, num_bins, (left, right))
    return counts.astype(np.int64), left, right


def positions(features: list[str]) -> list[tuple[int, int]]:
    """Find pairs of features that are x and y of one place, told by their names.

    Names that end in x and y (``ego.x``, ``x``), or are elements 0 and 1 of something called a position or location.
    What is commanded, aimed at or turned is not a place.

    >>> positions(["speed", "x", "y"]), positions(["eef_position[0]", "eef_position[1]", "eef_position[2]"])
    ([(1, 2)], [(0, 1)])
    >>> positions(["x_command", "y_command", "ego_velocity[0]", "ego_velocity[1]"])
    []
    """
    index = {name: k for k, name in reversed(list(enumerate(features)))}
    pairs = []
    for name, k in sorted(index.items(), key=lambda item: item[1]):
        lowered = name.lower()
        if _NO_PLACE.search(lowered):
            continue
        stem = lowered.removesuffix("[0]")
        is_vector = stem != lowered and any(word in stem for word in ("pos", "loc", "xyz", "transl", "center"))
        is_axis = lowered.endswith(("x", "_x", ".x")) and (len(lowered) == 1 or lowered[-2] in "._ /")
        if not (is_vector or is_axis):
            continue
        other = name.removesuffix("[0]") + "[1]" if is_vector else name[:-1] + ("y" if name[-1] == "x" else "Y")
        if other in index:
            pairs.append((k, index[other]))
    return pairs
