"""Stripes and layers with soft edges, for what is painted pixel by pixel."""

from collections.abc import Sequence

import numpy as np

from pipeline.demo.scene import Colour


def band(value: np.ndarray, low: float, high: float, footprint: np.ndarray) -> np.ndarray:
    """Return which part of each pixel lies in ``[low, high]``, 0 .. 1, for pixels that cover ``footprint``."""
    return np.clip((value - low) / footprint + 0.5, 0, 1) * np.clip((high - value) / footprint + 0.5, 0, 1)


def stripes(value: np.ndarray, period_m: float, width_m: float, footprint: np.ndarray) -> np.ndarray:
    """Return the same for stripes that repeat, centred on half a period; where a pixel covers many, their share."""
    from_middle = np.abs(value - np.floor(value / period_m) * period_m - period_m / 2)
    sharp = np.clip((width_m / 2 - from_middle) / footprint + 0.5, 0, 1)
    blur = np.clip(footprint / period_m - 0.25, 0, 1)
    return sharp + blur * (width_m / period_m - sharp)


def stack(layers: Sequence[tuple[np.ndarray, Colour]], below: Colour) -> np.ndarray:
    """Look down through layers of (coverage, colour), the topmost first; float32[..., 3].

    One plane a channel and no matrix product, whose rounding may depend on the number of threads.
    """
    left = np.ones_like(layers[0][0], np.float32)
    planes = np.zeros((3, *left.shape), np.float32)
    for coverage, colour in layers:
        weight = (coverage * left).astype(np.float32, copy=False)
        left -= weight
        for plane, value in zip(planes, colour, strict=True):
            plane += weight * np.float32(value)
    for plane, value in zip(planes, below, strict=True):
        plane += left * np.float32(value)
    return np.moveaxis(planes, 0, -1)
