"""Pillow 11's resampling of 8-bit images, transcribed from ``src/libImaging/Resample.c`` as plainly as it goes: slow, and no part of the product."""

import math

import numpy as np


def triangle(x: float) -> float:
    return 1.0 - abs(x) if abs(x) < 1.0 else 0.0


def cubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


def box(x: float) -> float:
    return 1.0 if -0.5 < x <= 0.5 else 0.0


FILTERS = {"bilinear": (triangle, 1.0), "bicubic": (cubic, 2.0), "box": (box, 0.5)}


def resample_columns(image: np.ndarray, out_size: int, name: str) -> np.ndarray:
    """``ImagingResampleHorizontal_8bpc`` on ``uint8[row, column, channel]``."""
    filter_function, support = FILTERS[name]
    size = image.shape[1]
    scale = size / out_size
    stretch = max(scale, 1.0)
    support *= stretch
    out = np.empty((image.shape[0], out_size, image.shape[2]), np.uint8)
    for x in range(out_size):
        center = (x + 0.5) * scale
        start = max(int(center - support + 0.5), 0)
        stop = min(int(center + support + 0.5), size)
        weights = [filter_function((k + start - center + 0.5) * (1.0 / stretch)) for k in range(stop - start)]
        total = 0.0
        for weight in weights:
            total += weight
        if total != 0.0:
            weights = [weight / total for weight in weights]
        fixed = [math.trunc((-0.5 if weight < 0 else 0.5) + weight * (1 << 22)) for weight in weights]
        sums = np.tensordot(np.array(fixed, np.int64), image[:, start:stop].astype(np.int64), axes=([0], [1]))
        out[:, x] = np.clip((sums + (1 << 21)) >> 22, 0, 255)
    return out


def resample(image: np.ndarray, height: int, width: int, name: str) -> np.ndarray:
    """``ImagingResample``: columns, then rows, each only where the size changes."""
    if image.shape[1] != width:
        image = resample_columns(image, width, name)
    if image.shape[0] != height:
        image = resample_columns(image.transpose(1, 0, 2), height, name).transpose(1, 0, 2)
    return image


def resize_with_pad(image: np.ndarray, height: int, width: int, name: str = "bilinear") -> np.ndarray:
    """openpi's ``resize_with_pad`` (``openpi_client/image_tools.py``), with :func:`resample` for ``Image.resize``."""
    found_height, found_width = image.shape[:2]
    if (found_height, found_width) == (height, width):
        return image
    ratio = max(found_width / width, found_height / height)
    resized_height, resized_width = int(found_height / ratio), int(found_width / ratio)
    resized = resample(image, resized_height, resized_width, name)
    out = np.zeros((height, width, image.shape[2]), np.uint8)
    top, left = max(0, int((height - resized_height) / 2)), max(0, int((width - resized_width) / 2))
    out[top : top + resized_height, left : left + resized_width] = resized
    return out
