"""Loops that normalise: whole batches of images, and rows of features."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped, UInt8

from tasks.kernels.decorator import kernel
from tasks.kernels.vectors import LINE_NBYTES, float16_bits, float32_bits, fused_multiply_add, stream_line

BLOCK = 768
"""Values that are worked on at a time, in the first cache."""


class Terms(NamedTuple):
    """``(pixel - center) * scale`` in float32 to within 0.51 of a unit in the last place, channel by channel.

    float64 would leave half of the speed (conversions); float32 alone loses digits where pixel and center nearly cancel. So
    ``center`` is a multiple of 2^-15, by which ``pixel - center`` is exact, and what it lacks is in ``rest``; ``scale`` comes in two parts.
    """

    center: Float32[np.ndarray, " n"]
    scale: Float32[np.ndarray, " n"]
    scale_rest: Float32[np.ndarray, " n"]
    rest: Float32[np.ndarray, " n"]


def split_terms(center: Float64[np.ndarray, " n"], scale: Float64[np.ndarray, " n"]) -> Terms:
    """Split float64 constants into the terms of float32 arithmetic."""
    near = np.rint(center * 2.0**15) / 2.0**15
    high = scale.astype(np.float32)
    return Terms(
        near.astype(np.float32), high, (scale - high).astype(np.float32), ((near - center) * scale).astype(np.float32)
    )


class Scratch(NamedTuple):
    """Working memory of one block."""

    planes: UInt8[np.ndarray, "3 block"]
    values: Shaped[np.ndarray, " block"]
    value_bytes: UInt8[np.ndarray, " block_itemsize"]
    """The same memory as ``values``."""


def make_scratch(dtype: str) -> Scratch:
    """Allocate for outputs of ``dtype``, a key of ``ROUNDINGS``."""
    values = np.empty(BLOCK, dtype)
    return Scratch(np.empty((3, BLOCK), np.uint8), values, values.view(np.uint8))


@kernel
def scaled(
    pixel: np.uint8, center: np.float32, scale: np.float32, scale_rest: np.float32, rest: np.float32
) -> np.float32:
    """Return ``(pixel - center) * (scale + scale_rest) + rest``."""
    distance = np.float32(pixel) - center
    value: np.float32 = fused_multiply_add(distance, scale, fused_multiply_add(distance, scale_rest, rest))
    return value


@kernel
def to_float32(value: np.float32) -> np.float32:
    """Return it as it is."""
    return value


@kernel
def to_float16(value: np.float32) -> np.uint16:
    """Round to the bits of a float16."""
    bits: np.uint16 = float16_bits(value)
    return bits


@kernel
def to_bfloat16(value: np.float32) -> np.uint16:
    """Round to the bits of a bfloat16, to nearest even."""
    bits = float32_bits(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


ROUNDINGS: dict[str, Callable[[np.float32], np.generic]] = {
    "float32": to_float32,
    "float16": to_float16,
    "uint16": to_bfloat16,
}
"""By dtype of the output; ``uint16`` holds the bits of a bfloat16, which NumPy does not have."""


@kernel
def separate_channels(pixels: UInt8[np.ndarray, " pixel_channel"], out: UInt8[np.ndarray, "3 n"]) -> None:
    """Fill ``out[c, i] = pixels[3 i + c]`` for as many pixels as there are."""
    three = np.uintp(3)
    plane0, plane1, plane2 = out[0], out[1], out[2]
    for i in range(np.uintp(pixels.shape[0]) // three):
        plane0[i] = pixels[three * i]
        plane1[i] = pixels[three * i + np.uintp(1)]
        plane2[i] = pixels[three * i + np.uintp(2)]


@kernel
def block_size(address: np.uintp, itemsize: np.uintp, block: np.uintp, left: np.uintp) -> np.uintp:
    """Return how many of the ``left`` values from ``address`` make a block that ends with a line of the cache.

    Two blocks that share a line would both write it in part, which costs as much as reading it.
    """
    size = block - address % np.uintp(LINE_NBYTES) // itemsize
    return size if size <= left else left


@kernel
def bytes_to_line(address: np.uintp, size: np.uintp) -> np.uintp:
    """Return how many of ``size`` bytes from ``address`` come before the next line of the cache."""
    line = np.uintp(LINE_NBYTES)
    head = (line - address % line) % line
    return head if head <= size else size


# The next two write a block to its place in line, and not by a function, for that would count references to arrays: an
# atomic instruction, which waits until every line written past the caches has arrived (measured: 14 ms instead of 4).


def _define_channels_last(dtype: str) -> Callable[..., None]:
    rounded = ROUNDINGS[dtype]

    @kernel
    def channels_last(
        pixels: UInt8[np.ndarray, " n"],
        terms: Terms,
        scratch: Scratch,
        phase: int,
        past_caches: bool,
        out: UInt8[np.ndarray, " n_itemsize"],
    ) -> None:
        """Fill ``out[i] = (pixels[i] - center[i % 3]) * scale[i % 3]``; the terms are repeated for ``BLOCK + 3`` values.

        ``out`` is seen as bytes; ``phase`` is its address modulo ``LINE_NBYTES``. A large batch is written ``past_caches``: an
        ordinary store first reads the line that it overwrites, which is as many bytes again.
        """
        size, block, three = np.uintp(pixels.shape[0]), np.uintp(BLOCK), np.uintp(3)
        line, first = np.uintp(LINE_NBYTES), np.uintp(phase)
        itemsize = np.uintp(out.shape[0]) // size
        center, scale, scale_rest, rest = terms.center, terms.scale, terms.scale_rest, terms.rest
        values, value_bytes = scratch.values, scratch.value_bytes
        lead = first % line // itemsize  # the first block is shorter by so much, that all others end with a line
        for edge in range(np.uintp(0), size + lead, block):
            start = edge - lead if edge > lead else np.uintp(0)
            part = pixels[start : edge + block - lead]
            at, count, turn = start * itemsize, np.uintp(part.shape[0]), start % three
            for i in range(count):
                k = i + turn
                values[i] = rounded(scaled(part[i], center[k], scale[k], scale_rest[k], rest[k]))
            num_bytes = count * itemsize
            head = bytes_to_line(first + at, num_bytes) if past_caches else num_bytes
            stop = head + (num_bytes - head) // line * line
            for i in range(head):
                out[at + i] = value_bytes[i]
            for i in range(head, stop, line):
                stream_line(value_bytes, i, out, at + i)
            for i in range(stop, num_bytes):
                out[at + i] = value_bytes[i]

    return channels_last


def _define_channels_first(dtype: str) -> Callable[..., None]:
    rounded = ROUNDINGS[dtype]

    @kernel
    def channels_first(
        pixels: UInt8[np.ndarray, "frame pixel_channel"],
        terms: Terms,
        scratch: Scratch,
        phase: int,
        past_caches: bool,
        out: UInt8[np.ndarray, " frame_channel_pixel_itemsize"],
    ) -> None:
        """Fill ``out[f, c, i] = (pixels[f, 3 i + c] - center[c]) * scale[c]``."""
        three, block = np.uintp(3), np.uintp(BLOCK)
        num_pixels = np.uintp(pixels.shape[1]) // three
        planes, values, value_bytes = scratch.planes, scratch.values, scratch.value_bytes
        line, first = np.uintp(LINE_NBYTES), np.uintp(phase)
        itemsize = np.uintp(out.shape[0]) // (np.uintp(pixels.shape[0]) * three * num_pixels)
        for frame in range(np.uintp(pixels.shape[0])):
            start = np.uintp(0)
            while start < num_pixels:
                at = (frame * three * num_pixels + start) * itemsize
                count = block_size(first + at, itemsize, block, num_pixels - start)
                separate_channels(pixels[frame, three * start : three * (start + count)], planes)
                for channel in range(three):
                    center, scale = terms.center[channel], terms.scale[channel]
                    scale_rest, rest = terms.scale_rest[channel], terms.rest[channel]
                    source = planes[channel]
                    for i in range(count):
                        values[i] = rounded(scaled(source[i], center, scale, scale_rest, rest))
                    num_bytes = count * itemsize
                    head = bytes_to_line(first + at, num_bytes) if past_caches else num_bytes
                    stop = head + (num_bytes - head) // line * line
                    for i in range(head):
                        out[at + i] = value_bytes[i]
                    for i in range(head, stop, line):
                        stream_line(value_bytes, i, out, at + i)
                    for i in range(stop, num_bytes):
                        out[at + i] = value_bytes[i]
                    at += num_pixels * itemsize
                start += count

    return channels_first


CHANNELS_LAST = {dtype: _define_channels_last(dtype) for dtype in ROUNDINGS}
CHANNELS_FIRST = {dtype: _define_channels_first(dtype) for dtype in ROUNDINGS}


@kernel
def affine_rows(
    rows: Float[np.ndarray, "row dim"],
    before: Float64[np.ndarray, " dim"],
    scales: Float64[np.ndarray, " dim"],
    after: Float64[np.ndarray, " dim"],
    keep_zero_rows: bool,
    out: Float[np.ndarray, "row dim"],
) -> None:
    """Fill ``out[r, d] = (rows[r, d] - before[d]) * scales[d] + after[d]``; a row of zeros stays, if asked."""
    size = np.uintp(rows.shape[1])
    for row in range(np.uintp(rows.shape[0])):
        source, target = rows[row], out[row]
        is_zero = keep_zero_rows
        if keep_zero_rows:
            for i in range(size):
                if source[i] != 0:
                    is_zero = False
                    break
        if is_zero:
            for i in range(size):
                target[i] = 0
        else:
            for i in range(size):
                target[i] = (np.float64(source[i]) - before[i]) * scales[i] + after[i]
