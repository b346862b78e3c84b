"""Resize frames bit for bit as Pillow does, straight into a preallocated batch.

The reference is Pillow 11 (openpi locks 11.2.1): ``Image.resize`` of modes L, RGB and RGBX. Pillow 13 runs the row pass first where
that is cheaper, and so differs by one least bit on odd shapes (more with bicubic, which clips between the passes); on all
common camera sizes it is equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int32, UInt8

from schemas.errors import SchemaError
from tasks.decode import decode_frame, frame_size
from tasks.kernels.pixels import filter_columns, filter_narrow_columns, filter_rows
from tasks.kernels.vectors import LANES, PRECISION_BITS, SQUARE


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

    Channels are independent (Pillow's mode RGBX, not RGBA: nothing is multiplied by alpha). A frame that has its size already is copied.
    """
    _check(frame, out)
    placement = place((frame.shape[0], frame.shape[1]), (out.shape[0], out.shape[1]), method)
    top, left, height, width = placement.source
    _fill(frame[top : top + height, left : left + width], out, placement, filter)


def decode_resized(
    data: bytes | memoryview,
    out: UInt8[np.ndarray, "H W 3"],
    *,
    method: str = "pad",
    filter: str = "bilinear",
    fast: bool = False,
) -> None:
    """Fill ``out`` with an encoded image, decoded and resized: ``decode_frame``, then ``resize_frame``.

    With ``fast`` a JPEG of four times the output or more is decoded at a half, quarter or eighth of its size, by a power of two, so
    that at least twice the output remains. Where the frame comes to lie is as exact as ever; its pixels are within 45 dB (PSNR) of the
    exact ones for photographs, which the tests hold.
    """
    if not fast:
        resize_frame(decode_frame(data), out, method=method, filter=filter)
        return
    size = frame_size(data)
    placement = place(size, (out.shape[0], out.shape[1]), method)
    part, place_size = placement.source[2:], placement.target[2:]
    whole = [math.ceil(side * place_side / part_side) for side, part_side, place_side in zip(size, part, place_size)]
    frame = decode_frame(data, fast_target=(whole[0], whole[1]))
    _check(frame, out)
    if frame.shape[:2] == size:
        resize_frame(frame, out, method=method, filter=filter)
        return
    factor = round(size[0] / frame.shape[0])
    top, left, height, width = (side / factor for side in placement.source)
    _fill(frame, out, placement, filter, box=(top, left, top + height, left + width))


def warm() -> None:
    """Compile what :func:`resize_frame` needs, about a second, so that the first frame does not wait for it."""
    resize_frame(np.zeros((48, 64, 3), np.uint8), np.empty((24, 32, 3), np.uint8))


def _check(frame: np.ndarray, out: np.ndarray) -> None:
    is_image = frame.ndim == out.ndim == 3 and frame.dtype == out.dtype == np.uint8
    if not is_image or frame.shape[2] != out.shape[2]:
        raise SchemaError(
            "expected frame and out of uint8[height, width, channel] with equal channels, "
            f"found {frame.dtype}{list(frame.shape)} and {out.dtype}{list(out.shape)}; check the reader"
        )


Box = tuple[float, float, float, float]


def _fill(part: np.ndarray, out: np.ndarray, placement: Placement, filter: str, box: Box | None = None) -> None:
    """Resize ``part``, or the ``box`` (top, left, bottom, right) of it, to its place in ``out``; the rest becomes zero."""
    top, left, height, width = placement.target
    place = out[top : top + height, left : left + width]
    if place.shape != out.shape:
        out[:top] = 0
        out[top + height :] = 0
        out[top : top + height, :left] = 0
        out[top : top + height, left + width :] = 0
    if part.shape == place.shape and box is None:
        place[...] = part
    elif out.flags.c_contiguous:
        rows = out.reshape(out.shape[0], -1)[top : top + height]
        _resample(
            part, rows, (left, height, width), filter, box or (0.0, 0.0, float(part.shape[0]), float(part.shape[1]))
        )
    else:
        contiguous = np.empty(place.shape, np.uint8)
        _fill(part, contiguous, Placement(source=placement.source, target=(0, 0, height, width)), filter, box)
        place[...] = contiguous


def _resample(part: np.ndarray, out: np.ndarray, target: tuple[int, int, int], filter: str, box: Box) -> None:
    """Pillow's two passes: columns first and rounded to uint8, then rows; a pass that changes nothing is left out.

    Inputs go to the kernels as read-only views, so that one compilation serves read-only and writable arrays.
    """
    left, height, width = target
    top_edge, left_edge, bottom_edge, right_edge = box
    channels = part.shape[2]
    rows = np.ascontiguousarray(part).reshape(part.shape[0], -1)
    if (left_edge, right_edge) != (0, part.shape[1]) or part.shape[1] != width:
        rows = _filter_columns(rows, coefficients(part.shape[1], width, filter, left_edge, right_edge), channels)
    if (top_edge, bottom_edge) == (0, part.shape[0]) and part.shape[0] == height:
        out[:, left * channels : (left + width) * channels] = rows
        return
    taps = coefficients(part.shape[0], height, filter, top_edge, bottom_edge)
    filter_rows(_read_only(rows), taps.starts, taps.lengths, taps.weights, left * channels, out)


def _filter_columns(rows: np.ndarray, taps: "Coefficients", channels: int) -> np.ndarray:
    """Filter the columns of ``uint8[row, width * channel]``."""
    rows, size = _read_only(rows), len(taps.starts) * channels
    if min(size, rows.shape[1]) < SQUARE:
        filtered = np.empty((len(rows), size), np.uint8)
        filter_narrow_columns(rows, taps.starts, taps.lengths, taps.weights, filtered)
        return filtered
    filtered = np.empty((-(-len(rows) // LANES) * LANES, size), np.uint8)
    source, target = np.empty((rows.shape[1], LANES), np.uint8), np.empty((size, LANES), np.uint8)
    filter_columns(rows, taps.starts, taps.lengths, taps.weights, source, target, filtered)
    return filtered[: len(rows)]


def _read_only(rows: np.ndarray) -> np.ndarray:
    view = rows.view()
    view.flags.writeable = False
    return view


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
def coefficients(size: int, out_size: int, filter: str, first: float = 0.0, stop: float = 0.0) -> Coefficients:
    """Return the taps by which ``size`` pixels, or those from ``first`` to ``stop``, become ``out_size``.

    Pillow's ``precompute_coeffs`` in float64 (``src/libImaging/Resample.c`` of Pillow 11). Weights are summed one after another, as
    there: a pairwise sum differs in the last bit.
    """
    if filter not in _FILTERS:
        raise SchemaError(f"expected one of the filters {', '.join(_FILTERS)}, found {filter!r}; correct the recipe")
    function, radius = _FILTERS[filter]
    scale = ((stop or float(size)) - first) / out_size
    stretch = max(scale, 1.0)
    support = radius * stretch
    centers = first + (np.arange(out_size) + 0.5) * scale
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    lengths = np.minimum((centers + support + 0.5).astype(np.int64), size) - starts
    taps = np.arange(math.ceil(support) * 2 + 1)
    values = function((taps + starts[:, None] - centers[:, None] + 0.5) * (1.0 / stretch))
    values[taps >= lengths[:, None]] = 0.0
    totals = np.cumsum(values, axis=1)[:, -1:]
    scaled = np.divide(values, totals, out=values, where=totals != 0.0) * (1 << PRECISION_BITS)
    weights = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    result = Coefficients(starts.astype(np.int32), lengths.astype(np.int32), weights)
    for array in (result.starts, result.lengths, result.weights):
        array.flags.writeable = False
    return result
