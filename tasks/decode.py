"""Decode images to what Pillow shows, or say why not, in bounded memory.

JPEG goes through simplejpeg: libjpeg-turbo by the thinnest of its wrappers, so the pixels are Pillow's; it decodes in place, at
reduced sizes too, and frees the GIL. Measured on a Xeon (2026-12, one thread's CPU time, ``benchmarks/pixels.py``), 1920x1080 q90: 9.0 ms,
OpenCV 11.6, Pillow 23. Everything else, and what simplejpeg refuses without the pixels being in doubt, goes through Pillow.
"""

import io

import numpy as np
import simplejpeg
from jaxtyping import Float32, UInt8, UInt16
from PIL import Image, UnidentifiedImageError

from schemas.errors import Reason, SourceError

MAX_PIXELS = 1 << 26
"""Greatest area of an image, 8192 x 8192: a header may promise 30000 x 30000 in 100 bytes."""

MAX_SIDE_PX = 65535
"""Greatest side, which is JPEG's own limit: what resizing needs grows with the side, not only with the area."""

CARLA_FAR_M = 1000.0
"""Distance of the far plane in CARLA's 24-bit depth images."""

_FORMATS = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"RIFF", "WEBP"))
_SIMPLEJPEG_COLORS = ("RGB", "YCbCr", "Gray")
_HARMLESS = ("extraneous bytes", "unknown JFIF revision", "Unknown Adobe color transform")
"""libjpeg warnings about bytes that no pixel depends on; any other warning means wrong pixels."""


def decode_frame(
    data: bytes | memoryview,
    out: UInt8[np.ndarray, "h w 3"] | None = None,
    *,
    fast_target: tuple[int, int] | None = None,
) -> UInt8[np.ndarray, "h w 3"]:
    """Decode JPEG, PNG or WebP, told apart by content, to RGB equal to ``Image.open(...).convert("RGB")``.

    Orientation tags are not applied and alpha is dropped, as Pillow does. Stricter than Pillow in three: a JPEG whose
    entropy-coded data is damaged is refused (Pillow fills with grey), so are CMYK and 16-bit grey (Pillow clips it to 255).

    Parameters
    ----------
    data
        The whole file.
    out
        Where to decode to, C-contiguous and of the image's size; allocated if None.
    fast_target
        Height and width in px that the frame will be resized to. A JPEG may then be decoded at 1/2, 1/4 or 1/8 of its size,
        as long as at least twice the target remains on both sides; not exact, and never the default.

    Raises
    ------
    SourceError
        With reason TRUNCATED, DECODE, TOO_LARGE or UNSUPPORTED.
    """
    if _format(data) == "JPEG":
        return _decode_jpeg(data, out, fast_target)
    return _fill(out, _decode_pillow(data))


def frame_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return height and width in pixels from the header alone."""
    kind = _format(data)
    if kind == "JPEG":
        height, width, _ = _jpeg_header(data)
        return height, width
    width, height = _open(data, kind).size
    return height, width


def encode_jpeg(frame: UInt8[np.ndarray, "h w 3"], quality: int) -> bytes:
    """Encode RGB as a baseline JPEG without chroma subsampling (4:4:4), deterministically."""
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality, "RGB", "444", fastdct=False))


def decode_depth(data: bytes | memoryview, *, grey_far_m: float = 50.0) -> Float32[np.ndarray, "h w"]:
    """Decode a CARLA depth image to metres along the optical axis.

    Colour images hold 24 bits: ``(R + 256 G + 65536 B) / (2^24 - 1) * 1000`` (CARLA, sensors reference). Grey images of 8 or 16
    bits are linear with ``grey_far_m`` at the greatest value; 50 m is what TransFuser++ and its descendants clip at.
    """
    image = _open(data, _format(data))
    _load(image, data)
    if image.mode in ("RGB", "RGBA"):
        red, green, blue = np.moveaxis(np.asarray(image).astype(np.uint32), 2, 0)[:3]
        metres: np.ndarray = (red + 256 * green + 65536 * blue) * (CARLA_FAR_M / (2**24 - 1))
        return metres.astype(np.float32)
    values = _grey_values(image, "a colour or grey depth image")
    return (values * (grey_far_m / np.iinfo(values.dtype).max)).astype(np.float32)


def decode_labels(data: bytes | memoryview) -> UInt8[np.ndarray, "h w"] | UInt16[np.ndarray, "h w"]:
    """Decode class ids: red of a colour image (CARLA's semantic camera), else the values or palette indices as stored."""
    image = _open(data, _format(data))
    _load(image, data)
    if image.mode in ("RGB", "RGBA"):
        return np.ascontiguousarray(np.asarray(image)[..., 0])
    return _grey_values(image, "a label image")


def _grey_values(image: Image.Image, expected: str) -> np.ndarray:
    if image.mode.startswith("I"):
        return np.asarray(image).astype(np.uint16)
    if image.mode not in ("L", "P"):
        raise SourceError(f"expected {expected}, found mode {image.mode}; check the view's kind", Reason.UNSUPPORTED)
    return np.asarray(image)


def _format(data: bytes | memoryview) -> str:
    head = bytes(data[:12])
    for magic, name in _FORMATS:
        if head.startswith(magic) and (name != "WEBP" or head[8:] == b"WEBP"):
            return name
    if len(head) < 12:
        raise SourceError(f"expected an image, found {len(data)} bytes; record it again", Reason.TRUNCATED)
    raise SourceError(
        f"expected a JPEG, PNG or WebP file, found one that begins with {head!r}; convert it", Reason.UNSUPPORTED
    )


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS or max(height, width) > MAX_SIDE_PX:
        raise SourceError(
            f"expected at most {MAX_PIXELS} pixels and {MAX_SIDE_PX} a side, found {width}x{height}; check the file, or reduce it first",
            Reason.TOO_LARGE,
        )


def _fill(out: np.ndarray | None, frame: np.ndarray) -> np.ndarray:
    if out is None:
        return frame
    _check_out(out, frame.shape[0], frame.shape[1])
    out[...] = frame
    return out


def _check_out(out: np.ndarray, height: int, width: int) -> None:
    if out.shape != (height, width, 3) or out.dtype != np.uint8:
        raise SourceError(
            f"expected an image of {out.shape[1]}x{out.shape[0]} px, found {width}x{height}; check the recording",
            Reason.WRONG_SHAPE,
        )


def _jpeg_header(data: bytes | memoryview) -> tuple[int, int, str]:
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError is what 1.9.0 makes of a broken header
        width, height = _open(data, "JPEG").size  # of an odd kind, which Pillow may know, or broken, and it says how
        color = ""
    _check_size(height, width)
    return height, width, color


def _decode_jpeg(data: bytes | memoryview, out: np.ndarray | None, fast_target: tuple[int, int] | None) -> np.ndarray:
    """Decode by libjpeg-turbo, and by Pillow what simplejpeg refuses without the pixels being in doubt."""
    height, width, color = _jpeg_header(data)
    if color and color not in _SIMPLEJPEG_COLORS:
        raise SourceError(f"expected an RGB or grey JPEG, found {color}; convert it", Reason.UNSUPPORTED)
    if out is not None:
        _check_out(out, height, width)
    if not color:
        return _fill(out, _decode_pillow(data))
    least = _fast_size(height, width, fast_target) if fast_target and out is None else (0, 0)
    try:
        frame: np.ndarray = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], buffer=out)
        return frame
    except ValueError as error:
        message = str(error)
    if any(warning in message for warning in _HARMLESS):
        return _fill(out, _decode_pillow(data))
    reason = Reason.TRUNCATED if "Premature end" in message else Reason.DECODE
    raise SourceError(f"expected a sound JPEG, found: {message}; record it again", reason)


def _fast_size(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """Return the size at the largest power-of-two reduction that leaves twice the target (others have no SIMD path)."""
    for factor in (8, 4, 2):
        if height >= 2 * factor * target[0] and width >= 2 * factor * target[1]:
            return -(-height // factor), -(-width // factor)
    return 0, 0


def _decode_pillow(data: bytes | memoryview) -> np.ndarray:
    image = _open(data, _format(data))
    if image.mode.startswith("I") or image.mode == "CMYK":
        raise SourceError(
            f"expected a colour or 8-bit grey image, found mode {image.mode}; convert it, or declare the view as depth",
            Reason.UNSUPPORTED,
        )
    _load(image, data)
    return np.array(image.convert("RGB"))


def _open(data: bytes | memoryview, kind: str) -> Image.Image:
    """Open without decoding; the size is checked before Pillow allocates anything by it."""
    if kind != "JPEG":
        _check_size(*_declared_size(data, kind))
    try:
        image = Image.open(io.BytesIO(data), formats=(kind,))
    except Exception as error:  # on hostile bytes Pillow raises OSError, SyntaxError, ValueError, struct.error and more
        raise _refused(data, kind, error) from error
    _check_size(image.height, image.width)
    return image


def _load(image: Image.Image, data: bytes | memoryview) -> None:
    try:
        image.load()
    except Exception as error:
        raise _refused(data, image.format or "", error) from error


def _refused(data: bytes | memoryview, kind: str, error: Exception) -> SourceError:
    is_short = "truncated" in str(error).lower()
    if kind == "JPEG":
        is_short = is_short or b"\xff\xd9" not in bytes(data[-64:])
    if kind == "PNG":
        is_short = is_short or b"IEND" not in bytes(data[-64:])
    if kind == "WEBP":
        is_short = is_short or int.from_bytes(data[4:8], "little") + 8 > len(data)
    reason = Reason.TRUNCATED if is_short else Reason.DECODE
    # Pillow's own words for what it does not know name an address in memory, and a quarantine row must not differ from run to run.
    found = "bytes that it is not" if isinstance(error, UnidentifiedImageError) else error
    return SourceError(f"expected a sound {kind} image, found: {found}; record it again", reason)


def _declared_size(data: bytes | memoryview, kind: str) -> tuple[int, int]:
    """Read height and width from the first bytes of a PNG (IHDR) or WebP (VP8X, VP8L, VP8) file.

    Sources: PNG specification 11.2.2; RFC 9649 sections 2.7 and 2.5, RFC 6386 section 9.1.
    """
    head = bytes(data[:32])
    if len(head) < 30:
        raise SourceError(f"expected a {kind} image, found {len(head)} bytes; record it again", Reason.TRUNCATED)
    if kind == "PNG":
        return int.from_bytes(head[20:24], "big"), int.from_bytes(head[16:20], "big")
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    return int.from_bytes(head[28:30], "little") & 0x3FFF, int.from_bytes(head[26:28], "little") & 0x3FFF
