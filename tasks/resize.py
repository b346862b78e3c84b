"""Resize frames bit for bit as Pillow does, straight into a preallocated batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from jaxtyping import Float64, Int32, UInt8
import numpy as np

from schemas.errors import SchemaError
from tasks.kernels.pixels import LANES, PRECISION_BITS, filter_columns, filter_rows, make_scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which part of a frame is resized, to what size, and where it comes to lie in the output."""

    source: tuple[int, int, int, int]
    """Top, left, height and width of the part of the frame that is used."""
    target: tuple[int, int, int, int]
    """Top, left, height and width of its place in the output; the rest is zero."""


def place(size: tuple[int, int], target: tuple[int, int], method: str = "pad") -> Placement:
    """Say where a frame of ``size`` comes to lie in an output of ``target``, both (height, width) in pixels.

    ``pad`` is openpi's ``resize_with_pad``, its float64 ratio and truncations included: a long side of 225 px becomes 223 of
    224. ``crop`` takes the largest centred part of the target's aspect, in whole pixels, rounded down. ``stretch`` takes all.
    """
    (height, width), (out_height, out_width) = size, target
    if min(size) < 1 or min(target) < 1:
        raise SchemaError(f"expected sizes of 1 px or more, found {size} to {target}; correct the recipe")
    whole, full = (0, 0, height, width), (0, 0, out_height, out_width)
    if method == "stretch" or size == target:
        return Placement(source=whole, target=full)
    if method == "crop":
        part_width = max(1, min(width, height * out_width // out_height))
        part_height = max(1, min(height, width * out_height // out_width))
        part = ((height - part_height) // 2, (width - part_width) // 2, part_height, part_width)
        return Placement(source=part, target=full)
    if method != "pad":
        raise SchemaError(f"expected method pad, stretch or crop, found {method!r}; correct the recipe")
    ratio = max(width / out_width, height / out_height)
    inner_height, inner_width = max(1, int(height / ratio)), max(1, int(width / ratio))
    top, left = (out_height - inner_height) // 2, (out_width - inner_width) // 2
    return Placement(source=whole, target=(top, left, inner_height, inner_width))


def resize_frame(
    frame: UInt8[np.ndarray, "h w c"],
    out: UInt8[np.ndarray, "H W c"],
    *,
    method: str = "pad",
    filter: str = "bilinear",
) -> None:
    """Fill all of ``out`` with ``frame`` resized, padding zero: bit for bit what Pillow 11 computes.

    Channels are independent (Pillow's mode RGBX, not RGBA: nothing is multiplied by alpha).
    """
    _check(frame, out)
    placement = place(frame.shape[:2], out.shape[:2], method)
    top, left, height, width = placement.source
    part = frame[top : top + height, left : left + width]
    top, left, height, width = placement.target
    if (height, width) != out.shape[:2]:
        out[:top] = 0
        out[top + height :] = 0
        out[top : top + height, :left] = 0
        out[top : top + height, left + width :] = 0
    if part.shape == (height, width, out.shape[2]):
        out[top : top + height, left : left + width] = part
        return
    contiguous = out if out.flags.c_contiguous else np.zeros(out.shape, np.uint8)
    _resample(np.ascontiguousarray(part), contiguous, placement.target, filter)
    if contiguous is not out:
        out[top : top + height, left : left + width] = contiguous[top : top + height, left : left + width]


def _check(frame: np.ndarray, out: np.ndarray) -> None:
    if frame.ndim != 3 or out.ndim != 3 or frame.dtype != np.uint8 or out.dtype != np.uint8 or frame.shape[2] != out.shape[2]:
        raise SchemaError(
            "expected frame and out of uint8[height, width, channel] with equal channels, "
            f"found {frame.dtype}{list(frame.shape)} and {out.dtype}{list(out.shape)}; check the reader"
        )


def _resample(part: np.ndarray, out: np.ndarray, target: tuple[int, int, int, int], filter: str) -> None:
    """Pillow's two passes: columns first and rounded to uint8, then rows; a pass that changes nothing is left out."""
    top, left, height, width = target
    channels = part.shape[2]
    rows = part.reshape(part.shape[0], -1)
    vertical = coefficients(part.shape[0], height, filter)
    place_rows = out.reshape(out.shape[0], -1)[top : top + height]
    if part.shape[1] != width:
        rows = _filter_columns(rows, part.shape[1], width, filter)
    if part.shape[0] == height:
        place_rows[:, left * channels : (left + width) * channels] = rows
        return
    filter_rows(rows, vertical.starts, vertical.lengths, vertical.weights, left * channels, place_rows)


def _filter_columns(rows: np.ndarray, width: int, out_width: int, filter: str) -> np.ndarray:
    horizontal = coefficients(width, out_width, filter)
    channels = rows.shape[1] // width
    padded = np.empty((-(-len(rows) // LANES) * LANES, out_width * channels), np.uint8)
    source, target = make_scratch(width, channels), make_scratch(out_width, channels)
    filter_columns(rows, horizontal.starts, horizontal.lengths, horizontal.weights, source, target, padded)
    return padded[: len(rows)]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The taps of one axis: output ``i`` is the weighted sum of inputs ``starts[i]`` to ``starts[i] + lengths[i]``."""

    starts: Int32[np.ndarray, " out"]
    lengths: Int32[np.ndarray, " out"]
    weights: Int32[np.ndarray, "out tap"]
    """Fixed point with 22 fraction bits."""


def _triangle(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    return np.where(np.abs(x) < 1.0, 1.0 - np.abs(x), 0.0)


def _box(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _cubic(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """Keys' cubic convolution with a = -0.5, in the order of operations of Pillow."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "box": (_box, 0.5),
}


@lru_cache(maxsize=256)
def coefficients(size: int, out_size: int, filter: str) -> Coefficients:
    """Return the taps by which ``size`` pixels become ``out_size``: Pillow's ``precompute_coeffs`` in float64.

    Source: ``src/libImaging/Resample.c`` of Pillow 11. Weights are summed one after another, as there: a pairwise sum
    differs in the last bit.
    """
    if filter not in _FILTERS:
        raise SchemaError(f"expected one of the filters {', '.join(_FILTERS)}, found {filter!r}; correct the recipe")
    function, radius = _FILTERS[filter]
    scale = size / out_size
    stretch = max(scale, 1.0)
    support = radius * stretch
    centers = (np.arange(out_size) + 0.5) * scale
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    stops = np.minimum((centers + support + 0.5).astype(np.int64), size)
    taps = np.arange(math.ceil(support) * 2 + 1)
    values = function((taps + starts[:, None] - centers[:, None] + 0.5) * (1.0 / stretch))
    values[taps >= (stops - starts)[:, None]] = 0.0
    totals = np.cumsum(values, axis=1)[:, -1:]
    values = np.divide(values, totals, out=values, where=totals != 0.0)
    scaled = values * (1 << PRECISION_BITS)
    weights = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    result = Coefficients(starts.astype(np.int32), (stops - starts).astype(np.int32), weights)
    for array in (result.starts, result.lengths, result.weights):
        array.flags.writeable = False
    return result
