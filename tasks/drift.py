"""How far data lies from frozen statistics, and which dimensions no scaling can serve."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from tasks.stats import Summary

MAX_SHIFT_STD = 0.5
"""A mean that moved by more frozen standard deviations is flagged."""
MAX_STD_RATIO = 2.0
"""So is a standard deviation that became so many times greater or smaller."""
MAX_OUTSIDE = 0.1
"""So is a dimension with a greater share of values outside the frozen [q01, q99]; of the frozen data itself it is 0.02."""

MIN_STD = 1e-4
"""In the unit of the column, a tenth of a milliradian or millimetre: what varies less is noise, which z-scores blow up.
diffusion_policy's LinearNormalizer takes the same bound for a range."""
MAX_REACH = 1000.0
"""Of the extremes, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionDrift:
    """One dimension, compared with its frozen statistics."""

    array: str
    dim: int
    shift_std: float | None
    """Mean less the frozen mean, in frozen standard deviations; None where that is zero and the mean is another."""
    std_ratio: float | None
    """Standard deviation over the frozen one; None where that is zero and this is not."""
    outside: float | None
    """Share of values outside the frozen [q01, q99]; None where the frozen statistics have no quantiles."""
    flags: tuple[str, ...]
    """Which of ``shift``, ``std`` and ``outside`` pass their bound."""


def drift(
    array: str,
    frozen: Mapping[str, Float64[np.ndarray, "dim"]],
    found: Summary,
    outside: Int64[np.ndarray, "dim"] | None,
) -> list[DimensionDrift]:
    """Compare an array with frozen ``mean`` and ``std``.

    Parameters
    ----------
    outside
        Number of values outside the frozen [q01, q99].
    """
    rows = []
    for dim, (mean, std) in enumerate(zip(frozen["mean"].tolist(), frozen["std"].tolist(), strict=True)):
        shift = _ratio(float(found.mean[dim]) - mean, std)
        ratio = 1.0 if std == found.std[dim] else _ratio(float(found.std[dim]), std)
        share = None if outside is None else int(outside[dim]) / int(found.count[dim])
        flags = {
            "shift": shift is None or abs(shift) > MAX_SHIFT_STD,
            "std": ratio is None or not 1 / MAX_STD_RATIO <= ratio <= MAX_STD_RATIO,
            "outside": share is not None and share > MAX_OUTSIDE,
        }
        passed = tuple(name for name, is_passed in flags.items() if is_passed)
        rows.append(DimensionDrift(array=array, dim=dim, shift_std=shift, std_ratio=ratio, outside=share, flags=passed))
    return rows


def _ratio(value: float, std: float) -> float | None:
    return value / std if std > 0 else None if value else 0.0


def near_constant(found: Summary) -> dict[int, str]:
    """Say of each dimension that z-scores or quantiles would blow up why: ``dim -> reason``."""
    reasons = {}
    q01, q99 = (found.percentiles.get(percent) for percent in (1, 99))
    for dim, (std, low, high) in enumerate(zip(found.std.tolist(), found.low.tolist(), found.high.tolist())):
        reach = max(found.mean[dim] - low, high - found.mean[dim])
        if low == high:
            reasons[dim] = f"constant: always {low:g}"
        elif q01 is not None and q99 is not None and q01[dim] == q99[dim]:
            reasons[dim] = f"q01 and q99 are both {q01[dim]:g}, while values reach from {low:g} to {high:g}"
        elif std < MIN_STD:
            reasons[dim] = f"std {std:.3g} is below {MIN_STD:g} of its unit, with values from {low:g} to {high:g}"
        elif reach > MAX_REACH * std:
            reasons[dim] = f"std {std:.3g} is small against values from {low:g} to {high:g}: {reach / std:.0f} std away"
    return reasons
