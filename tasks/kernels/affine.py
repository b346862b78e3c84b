"""Loops that normalise: whole batches of images, and rows of features."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped, UInt8

from tasks.kernels.decorator import kernel
from tasks.kernels.lines import LINE_NBYTES, WIDTH, lines_first, lines_last
from tasks.kernels.vectors import float16_bits, float32_bits, fused_multiply_add

NUM_TERMS = 3 * WIDTH + 3
"""Constants that channels last takes: those of three vectors, from any channel on."""


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
    "bfloat16": to_bfloat16,
}
"""To float32, or to the bits of the others as uint16."""


@kernel
def values_to_line(phase: int, itemsize: np.uintp, size: np.uintp) -> np.uintp:
    """Return how many of ``size`` values from an address, ``phase`` modulo a line, come before the next line of the cache."""
    line = np.uintp(LINE_NBYTES)
    head = (line - np.uintp(phase)) % line // itemsize
    return head if head <= size else size


def _define_channels_last(dtype: str) -> Callable[..., None]:
    rounded, stream, store = ROUNDINGS[dtype], lines_last(dtype, True), lines_last(dtype, False)

    @kernel
    def channels_last(
        pixels: UInt8[np.ndarray, " n"], terms: Terms, phase: int, past_caches: bool, out: Shaped[np.ndarray, " n"]
    ) -> None:
        """Fill ``out[i] = (pixels[i] - center[i % 3]) * scale[i % 3]``; the terms are repeated for ``NUM_TERMS`` values.

        ``phase`` is the address of ``out`` modulo ``LINE_NBYTES``. A large batch is written ``past_caches``: an
        ordinary store first reads the line that it overwrites, which is as many bytes again.
        """
        center, scale, scale_rest, rest = terms
        size, itemsize, three = np.uintp(pixels.shape[0]), np.uintp(out.itemsize), np.uintp(3)
        head = values_to_line(phase, itemsize, size) if past_caches else np.uintp(0)
        step = three * np.uintp(LINE_NBYTES) // itemsize
        groups = (size - head) // step
        turn, at = head % three, head * itemsize
        if past_caches:
            stream(pixels, head, center, scale, scale_rest, rest, turn, out, at, groups)
        else:
            store(pixels, head, center, scale, scale_rest, rest, turn, out, at, groups)
        for begin, end in ((np.uintp(0), head), (head + groups * step, size)):
            for i in range(begin, end):
                k = i % three
                out[i] = rounded(scaled(pixels[i], center[k], scale[k], scale_rest[k], rest[k]))

    return channels_last


def _define_channels_first(dtype: str) -> Callable[..., None]:
    rounded, stream, store = ROUNDINGS[dtype], lines_first(dtype, True), lines_first(dtype, False)

    @kernel
    def channels_first(
        pixels: UInt8[np.ndarray, "frame pixel_channel"],
        terms: Terms,
        phase: int,
        past_caches: bool,
        out: Shaped[np.ndarray, " frame_channel_pixel"],
    ) -> None:
        """Fill ``out[f, c, i] = (pixels[f, 3 i + c] - center[c]) * scale[c]``; see above for the others."""
        center, scale, scale_rest, rest = terms
        size, itemsize, three = np.uintp(pixels.shape[1]), np.uintp(out.itemsize), np.uintp(3)
        num, line = size // three, np.uintp(LINE_NBYTES)
        plane = num * itemsize
        past_caches &= plane % line == 0  # else no two planes begin at the same place of a line
        head = values_to_line(phase, itemsize, num) if past_caches else np.uintp(0)
        groups = (num - head) * itemsize // line
        for frame in range(np.uintp(pixels.shape[0])):
            base = frame * size
            at = (base + head) * itemsize
            if past_caches:
                stream(pixels, base + three * head, center, scale, scale_rest, rest, plane, out, at, groups)
            else:
                store(pixels, base + three * head, center, scale, scale_rest, rest, plane, out, at, groups)
            for begin, end in ((np.uintp(0), head), (head + groups * line // itemsize, num)):
                for i in range(begin, end):
                    for c in range(three):
                        value = scaled(pixels[frame, three * i + c], center[c], scale[c], scale_rest[c], rest[c])
                        out[base + c * num + i] = rounded(value)

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
