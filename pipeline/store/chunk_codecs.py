"""Chunks of arrays to stored bytes and back, as the arrays' Zarr metadata say.

``raw`` and ``zstd`` store a chunk as it lies in memory. ``blosc:zstd`` and ``blosc:lz4`` store tables of features, such as planner
tensors: last axis first, so that each feature stands together, then bytes shuffled, so that exponents do. Of a dense scene that leaves
0.29 and 0.32 of the bytes, where zstd alone leaves 0.40 and takes longer to decode (``python -m benchmarks.planner``, 2026-12).
"""

import struct
import threading
from typing import Any

import numpy as np

from pipeline.store.atomic import Bytes
from schemas.dataset import ArraySpec
from schemas.errors import DatasetError, SchemaError, SourceError

ZSTD_LEVEL = 1
"""Level 3 encodes camera frames 2.7 times slower for 0-8 % less; measured on 1,024 224x224 frames, 2026-11."""

BLOSC = {"blosc:zstd": ("zstd", 3), "blosc:lz4": ("lz4hc", 3)}
"""Compressor and level by codec. LZ4HC decodes as fast as LZ4 and leaves 0.32 instead of 0.37; beyond, levels gain 1 %."""

_BLOSC_HEADER = 16
_held = threading.local()
_REPAIR = "run `headrace verify` to see all that is damaged"


def zarr_codecs(spec: ArraySpec) -> list[dict[str, Any]]:
    """Return the inner codecs of an array as Zarr v3 names them."""
    kind, _, quality = spec.codec.partition(":")
    endian, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    if kind == "jpeg":
        # imagecodecs registers the array-to-bytes codec `imagecodecs_jpeg` with zarr-python (package imagecodecs-zarr)
        return [{"name": "imagecodecs_jpeg", "configuration": {"level": int(quality), "subsampling": "444"}}, crc]
    if kind == "blosc":
        cname, clevel = BLOSC[spec.codec]
        itemsize, axes = np.dtype(spec.dtype).itemsize, len(spec.row_shape)
        options = {"typesize": itemsize, "cname": cname, "clevel": clevel, "shuffle": "shuffle"}
        return [
            {"name": "transpose", "configuration": {"order": [0, axes, *range(1, axes)]}},
            endian,
            {"name": "blosc", "configuration": {**options, "blocksize": _block_nbytes(spec)}},
            crc,
        ]
    zstd = {"name": "zstd", "configuration": {"checksum": True, "level": ZSTD_LEVEL}}
    return [endian, *([zstd] if kind == "zstd" else []), crc]


def codec_name(codecs: list[dict[str, Any]]) -> str:
    """Return the codec behind what :func:`zarr_codecs` gave."""
    by_name = {codec["name"]: codec.get("configuration", {}) for codec in codecs}
    if "imagecodecs_jpeg" in by_name:
        return f"jpeg:{by_name['imagecodecs_jpeg']['level']}"
    if "blosc" in by_name:
        return next(name for name, (cname, _) in BLOSC.items() if cname == by_name["blosc"]["cname"])
    return "zstd" if "zstd" in by_name else "raw"


def _block_nbytes(spec: ArraySpec) -> int:
    """Return a power of two that holds a chunk: of several blocks, threads would write one or another first."""
    return 1 << max(spec.row_nbytes - 1, 1).bit_length()


def encode_chunk(spec: ArraySpec, rows: np.ndarray) -> Bytes:
    """Return the stored bytes of one whole chunk, without its crc32c; raw rows are borrowed where they can be.

    Parameters
    ----------
    spec
        The array.
    rows
        ``dtype[chunk_steps, *row_shape]``.
    """
    spec.check(rows)
    little = np.dtype(spec.dtype).newbyteorder("<")
    kind, _, quality = spec.codec.partition(":")
    if kind == "blosc":
        return _encode_blosc(spec, np.ascontiguousarray(np.moveaxis(rows, -1, 1), dtype=little))
    plain = np.ascontiguousarray(rows, dtype=little).reshape(-1).view(np.uint8).data
    if kind == "raw":
        return plain
    if kind == "zstd":
        from numcodecs.zstd import Zstd

        return bytes(Zstd(level=ZSTD_LEVEL, checksum=True).encode(plain))
    if kind == "jpeg":
        from tasks.decode import encode_jpeg

        return bytes(encode_jpeg(np.ascontiguousarray(rows[0]), int(quality)))
    raise SchemaError(
        f"expected codec raw, zstd, blosc:zstd, blosc:lz4 or jpeg:Q for {spec.name}, found {spec.codec!r}; correct the recipe"
    )


def decode_chunk(spec: ArraySpec, payload: Bytes, out: np.ndarray) -> None:
    """Fill ``out`` (``dtype[chunk_steps, *row_shape]``, contiguous) from a chunk's stored bytes without their crc32c.

    Except with JPEG the second axis of ``out`` may be shorter: it is filled with the first of each row.

    Raises
    ------
    DatasetError
        The bytes do not decode to exactly one chunk: sound bytes that another writer stored.
    """
    kind = spec.codec.partition(":")[0]
    if kind == "jpeg":
        _decode_jpeg(spec, payload, out)
        return
    if kind == "blosc":
        _decode_blosc(spec, payload, out)
        return
    plain = _decode_zstd(spec, payload) if kind == "zstd" else payload
    flat = out.reshape(-1).view(np.uint8)
    found = np.frombuffer(plain, np.uint8)
    if found.size != spec.chunk_steps * spec.row_nbytes:
        raise _wrong_size(spec.chunk_steps * spec.row_nbytes, found.size)
    flat[:] = found[: flat.size]


def _wrong_size(expected: int, found: int) -> DatasetError:
    return DatasetError(f"expected {expected} bytes a chunk, found {found}; the writer was not Headrace")


def _encode_blosc(spec: ArraySpec, planes: np.ndarray) -> bytes:
    from numcodecs import blosc

    cname, clevel = BLOSC[spec.codec]
    return bytes(blosc.compress(planes.reshape(-1), cname.encode(), clevel, blosc.SHUFFLE, _block_nbytes(spec)))


def _decode_blosc(spec: ArraySpec, payload: Bytes, out: np.ndarray) -> None:
    from numcodecs import blosc

    from tasks.kernels.planes import planes_to_rows

    nbytes, num_features = spec.row_nbytes, out.shape[-1]
    found, _, stored = struct.unpack_from("<III", payload, 4) if len(payload) >= _BLOSC_HEADER else (0, 0, 0)
    if (found, stored) != (nbytes, len(payload)):
        raise _wrong_size(nbytes, found)
    planes = scratch(nbytes).view(out.dtype).reshape(num_features, -1)
    try:
        blosc.decompress(payload, planes)
    except (RuntimeError, ValueError) as error:
        raise DatasetError(f"expected a Blosc frame, found {error}; {_REPAIR}", array=spec.name) from error
    planes_to_rows(planes, out.reshape(-1, num_features))


def scratch(nbytes: int) -> np.ndarray:
    """Return ``uint8[nbytes]`` that this thread reuses: fresh pages cost as much as decoding into them."""
    buffer: np.ndarray | None = getattr(_held, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _held.buffer = np.empty(nbytes, np.uint8)
    return buffer[:nbytes]


def _decode_zstd(spec: ArraySpec, payload: Bytes) -> Bytes:
    from numcodecs.zstd import Zstd

    try:
        return bytes(Zstd().decode(payload))
    except (RuntimeError, ValueError) as error:
        raise DatasetError(f"expected a zstd frame, found {error}; {_REPAIR}", array=spec.name) from error


def _decode_jpeg(spec: ArraySpec, payload: Bytes, out: np.ndarray) -> None:
    from tasks.decode import decode_frame

    data = payload if isinstance(payload, bytes) else memoryview(payload).cast("B")
    try:
        frame = decode_frame(data)
    except SourceError as error:
        raise DatasetError(f"expected a JPEG, found {error.message}; {_REPAIR}", array=spec.name) from error
    if frame.shape != spec.row_shape:
        raise DatasetError(
            f"expected a JPEG of shape {spec.row_shape}, found {frame.shape}; {_REPAIR}", array=spec.name
        )
    out[0] = frame
