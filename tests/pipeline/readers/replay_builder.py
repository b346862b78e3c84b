"""Tiny Diffusion Policy and UMI replay buffers, written as zarr 2 writes them; values say which step they belong to."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numcodecs import LZ4, Blosc, Zstd

from tests.pipeline.readers.builders import colour, write

Encode = Callable[[np.ndarray], bytes]
BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 2, "blocksize": 0}
CODECS: dict[str, tuple[dict[str, object] | None, Encode]] = {
    "none": (None, lambda chunk: chunk.tobytes("A")),
    "blosc": (BLOSC, lambda chunk: bytes(Blosc("zstd", 5, 2).encode(chunk))),
    "zstd": ({"id": "zstd", "level": 3}, lambda chunk: bytes(Zstd(3).encode(np.ascontiguousarray(chunk)))),
    "lz4": ({"id": "lz4", "acceleration": 1}, lambda chunk: bytes(LZ4().encode(np.ascontiguousarray(chunk)))),
    "zlib": ({"id": "zlib", "level": 1}, lambda chunk: __import__("zlib").compress(chunk.tobytes("A"))),
    "gzip": ({"id": "gzip", "level": 1}, lambda chunk: __import__("gzip").compress(chunk.tobytes("A"))),
    "bz2": ({"id": "bz2", "level": 1}, lambda chunk: __import__("bz2").compress(chunk.tobytes("A"))),
}


def array_files(
    path: str,
    values: np.ndarray,
    chunks: Sequence[int],
    *,
    codec: str = "blosc",
    order: str = "C",
    separator: str = ".",
) -> dict[str, bytes]:
    """Return the files of one array; chunks at the edge are whole, as zarr 2 writes them."""
    config, encode = CODECS[codec]
    meta = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": list(chunks),
        "dtype": values.dtype.str,
        "compressor": config,
        "fill_value": 0,
        "filters": None,
        "order": order,
        **({"dimension_separator": separator} if separator != "." else {}),
    }
    files = {f"{path}/.zarray": json.dumps(meta).encode()}
    for place in np.ndindex(*(-(-side // chunk) for side, chunk in zip(values.shape, chunks, strict=True))):
        part = values[tuple(slice(k * chunk, (k + 1) * chunk) for k, chunk in zip(place, chunks, strict=True))]
        chunk = np.zeros(chunks, values.dtype, order=order)  # type: ignore[call-overload]
        chunk[tuple(slice(side) for side in part.shape)] = part
        files[f"{path}/{separator.join(map(str, place))}"] = encode(chunk)
    return files


def buffer_files(
    ends: Sequence[int], arrays: Mapping[str, np.ndarray], *, chunk_steps: int = 4, **options: str
) -> dict[str, bytes]:
    """Return the files of a replay buffer."""
    files = dict.fromkeys((".zgroup", "data/.zgroup", "meta/.zgroup"), b'{"zarr_format":2}')
    files |= array_files("meta/episode_ends", np.array(ends, np.int64), (len(ends) + 2,))
    for name, values in arrays.items():
        files |= array_files(f"data/{name}", values, (chunk_steps, *values.shape[1:]), **options)
    return files


def pusht_arrays(num_steps: int, size: tuple[int, int] = (16, 20), dtype: str = "float32") -> dict[str, np.ndarray]:
    """``state[t, d] = 10 * t + d``, ``action = -state[:, :2]``, frames as :func:`colour`."""
    state = (10 * np.arange(num_steps)[:, None] + np.arange(5)).astype(np.float32)
    return {
        "img": np.stack([colour(0, step, size) for step in range(num_steps)]).astype(dtype),
        "state": state,
        "action": -state[:, :2],
        "keypoint": np.zeros((num_steps, 9, 2), np.float32),
        "n_contacts": np.ones((num_steps, 1), np.float32),
    }


def write_folder(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        write(root / name, data)
    return root


def write_zip(path: Path, files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    write(path, buffer.getvalue())
    return path


def write_pusht(root: Path, ends: Sequence[int] = (3, 7, 9)) -> Path:
    """Write PushT's arrays as ``root/pusht.zarr``."""
    return write_folder(root / "pusht.zarr", buffer_files(ends, pusht_arrays(ends[-1])))
