"""Arrays of Zarr v2, chunk by chunk, within limits; https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html.

Not by zarr-python: there a chunk that is missing reads as its fill value, which is a black frame that nobody recorded;
object arrays unpickle; a packed chunk may unpack to anything; and the decoder of UMI's images must be registered first.
"""

import bz2
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from pipeline.readers.zarr_files import Files
from schemas.errors import MissingExtraError, Reason, SourceError

META = ".zarray"
MAX_META_NBYTES = 2**20
MAX_CHUNK_NBYTES = 2**30
"""Greatest size of a chunk, unpacked; real ones are 0.1 to 20 MB."""
MAX_DIMS = 8
MAX_TILES = 2**12
"""Chunks that one range of steps may be cut into along the other axes."""

_DTYPE = re.compile(r"[<>|]([biuf])(\d)", re.ASCII)
_IMAGES = {"imagecodecs_jpegxl": "jpegxl_decode", "imagecodecs_jpeg2k": "jpeg2k_decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """One array as its ``.zarray`` says, checked."""

    path: str
    """Within the store."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    order: str
    separator: str
    codec: Mapping[str, Any]
    """Configuration of the compressor; empty where there is none."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one step."""
        return self.shape[1:]

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, unpacked; chunks at the edge are stored whole."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def keys(self, row: int) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Yield ``(name, place among the rows' other axes)`` of the chunks of one range of steps, the ``row``-th."""
        counts = [range(-(-side // chunk)) for side, chunk in zip(self.row_shape, self.chunks[1:], strict=True)]
        for place in product(*counts):
            name = self.separator.join(map(str, (row, *place)))
            sides = zip(place, self.chunks[1:], self.row_shape, strict=True)
            yield f"{self.path}/{name}", tuple(slice(k * chunk, min((k + 1) * chunk, side)) for k, chunk, side in sides)


def read_array(files: Files, path: str) -> ZarrArray:
    """Read and check an array's metadata; SourceError says why it cannot be read."""
    name = f"{path}/{META}"
    try:
        data = json.loads(files.read(name, MAX_META_NBYTES))
        found = _parse(data, path) if isinstance(data, dict) else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        message = f"expected the metadata of a Zarr v2 array, found: {str(error)[:80]!r}; restore the file"
        raise SourceError(message, Reason.BAD_METADATA, file=files.path(name)) from error
    if found is None:
        message = "expected the metadata of a Zarr v2 array, found no object; restore the file"
        raise SourceError(message, Reason.BAD_METADATA, file=files.path(name))
    return found


def _parse(data: Mapping[str, Any], path: str) -> ZarrArray:
    if data.get("zarr_format") != 2:
        raise SourceError(f"expected zarr_format 2, found {str(data.get('zarr_format'))[:20]}", Reason.UNSUPPORTED)
    match = _DTYPE.fullmatch(data["dtype"]) if isinstance(data["dtype"], str) else None
    if match is None or int(match[2]) not in (
        (1,) if match[1] == "b" else (2, 4, 8) if match[1] == "f" else (1, 2, 4, 8)
    ):
        message = f"expected numbers, found dtype {str(data['dtype'])[:40]}; objects are pickles and are never read"
        raise SourceError(message, Reason.UNSUPPORTED, array=path)
    if data.get("filters"):
        found = [str(item.get("id"))[:40] for item in data["filters"]]
        raise SourceError(
            f"expected no filters, found {found}; write the array without", Reason.UNSUPPORTED, array=path
        )
    shape, chunks = (tuple(data[key]) for key in ("shape", "chunks"))
    if any(type(side) is not int for side in (*shape, *chunks)) or len(shape) != len(chunks) or not shape:
        raise ValueError(f"shape {shape} and chunks {chunks}")
    if len(shape) > MAX_DIMS or min(shape) < 0 or max(shape) >= 2**48 or min(chunks) < 1:
        raise ValueError(f"shape {shape} and chunks {chunks}")
    array = ZarrArray(
        path=path,
        shape=shape,
        chunks=chunks,
        dtype=np.dtype(data["dtype"]),
        order="F" if data.get("order") == "F" else "C",
        separator="/" if data.get("dimension_separator") == "/" else ".",
        codec=dict(data.get("compressor") or {}),
    )
    _check_limits(array)
    return array


def _check_limits(array: ZarrArray) -> None:
    tiles = math.prod(-(-side // chunk) for side, chunk in zip(array.shape[1:], array.chunks[1:], strict=True))
    row_nbytes = math.prod(array.shape[1:]) * array.chunks[0] * array.dtype.itemsize
    if array.chunk_nbytes > MAX_CHUNK_NBYTES or row_nbytes > MAX_CHUNK_NBYTES or tiles > MAX_TILES:
        message = (
            f"expected chunks of at most {MAX_CHUNK_NBYTES} bytes, found {array.chunk_nbytes} ({tiles} beside each other); "
            "write the array in smaller chunks"
        )
        raise SourceError(message, Reason.TOO_LARGE, array=array.path)
    kind = str(array.codec.get("id"))
    if array.codec and kind not in _CODECS and kind not in _IMAGES:
        message = (
            f"expected a compressor of {', '.join([*_CODECS, *_IMAGES])}, found {kind[:40]!r}; write the array anew"
        )
        raise SourceError(message, Reason.UNSUPPORTED, array=array.path)


def read_rows(files: Files, array: ZarrArray, row: int) -> np.ndarray:
    """Return the ``row``-th range of steps whole, ``dtype[steps, *row_shape]``, read-only; SourceError where it cannot be.

    A chunk that is absent is refused: what it would have held is not known.
    """
    first = row * array.chunks[0]
    count = min(array.chunks[0], array.shape[0] - first)
    parts = [(_read_chunk(files, array, name)[:count], place) for name, place in array.keys(row)]
    if len(parts) == 1:
        block = parts[0][0][(slice(None), *(slice(side) for side in array.row_shape))]
    else:
        block = np.empty((count, *array.row_shape), array.dtype)
        for part, place in parts:
            inner = tuple(slice(side.stop - side.start) for side in place)
            block[(slice(None), *place)] = part[(slice(None), *inner)]
    block.flags.writeable = False
    return block


def _read_chunk(files: Files, array: ZarrArray, name: str) -> np.ndarray:
    data = files.read(name, MAX_CHUNK_NBYTES)
    kind = str(array.codec.get("id"))
    try:
        if kind in _IMAGES:
            return _image(array, data, kind)
        found = _CODECS[kind](data, array.chunk_nbytes) if array.codec else data
    except (ValueError, RuntimeError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        message = f"expected a chunk packed by {kind}, found: {str(error)[:80]}; download it again"
        raise SourceError(message, Reason.DECODE, file=files.path(name)) from error
    if len(found) != array.chunk_nbytes:
        message = f"expected a chunk of {array.chunk_nbytes} bytes, found {len(found)}; download it again"
        reason = Reason.TRUNCATED if len(found) < array.chunk_nbytes else Reason.TOO_LARGE
        raise SourceError(message, reason, file=files.path(name))
    return np.frombuffer(found, array.dtype).reshape(array.chunks, order=array.order)  # type: ignore[call-overload]


def _image(array: ZarrArray, data: bytes, kind: str) -> np.ndarray:
    try:
        import imagecodecs
    except ImportError as error:
        message = f"expected imagecodecs, by which {kind} frames are decoded, found none; pip install 'headrace[umi]'"
        raise MissingExtraError(message) from error
    if kind == "imagecodecs_jpeg2k":
        _check_jpeg2k(data, array)
    out = np.empty([side for k, side in enumerate(array.chunks) if k or side > 1], array.dtype)
    getattr(imagecodecs, _IMAGES[kind])(data, numthreads=1, out=out)  # which refuses an image of another size or dtype
    return out.reshape(array.chunks)


def _check_jpeg2k(data: bytes, array: ZarrArray) -> None:
    """Refuse an image that declares another size than its chunk before the decoder makes room for it."""
    at = data.find(b"\xff\x4f\xff\x51", 0, 4096)
    fields = [int.from_bytes(data[k : k + 4], "big") for k in range(at + 8, at + 24, 4)]
    width, height, left, top = fields if at >= 0 else (0, 0, 0, 0)
    if (height - top) * (width - left) not in (math.prod(array.chunks[:-1]), math.prod(array.chunks)):
        raise ValueError(f"an image of {height - top} x {width - left}")


def _blosc(data: bytes, nbytes: int) -> bytes:
    from numcodecs import blosc

    if len(data) < 16 or int.from_bytes(data[12:16], "little") != len(data):
        raise ValueError(f"{len(data)} bytes of {int.from_bytes(data[12:16], 'little')}")
    _declared(int.from_bytes(data[4:8], "little"), nbytes)
    return bytes(blosc.decompress(data))


def _zstd(data: bytes, nbytes: int) -> bytes:
    from numcodecs import zstd

    _declared(_zstd_content_nbytes(data), nbytes)
    return bytes(zstd.decompress(data))


def _lz4(data: bytes, nbytes: int) -> bytes:
    from numcodecs import lz4

    _declared(int.from_bytes(data[:4], "little") if len(data) > 4 else -1, nbytes)
    return bytes(lz4.decompress(data))


def _declared(found: int, nbytes: int) -> None:
    if found != nbytes:
        raise ValueError(f"{found} bytes declared of {nbytes}")


def _zstd_content_nbytes(data: bytes) -> int:
    """Return the size that the first frame declares (RFC 8878, 3.1.1.1), or -1."""
    if len(data) < 6 or data[:4] != b"\x28\xb5\x2f\xfd":
        return -1
    flag, is_single = data[4] >> 6, data[4] >> 5 & 1
    start = 5 + (not is_single) + (0, 1, 2, 4)[data[4] & 3]
    width = (is_single, 2, 4, 8)[flag]
    if not width or len(data) < start + width:
        return -1
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)


def _zlib(data: bytes, nbytes: int) -> bytes:
    return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, nbytes + 1)  # zlib or gzip, by its header


def _bz2(data: bytes, nbytes: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, nbytes + 1)


_CODECS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "blosc": _blosc,
    "zstd": _zstd,
    "lz4": _lz4,
    "zlib": _zlib,
    "gzip": _zlib,
    "bz2": _bz2,
}
"""Compressors of numbers. Each unpacks at most one byte more than the metadata promises."""
