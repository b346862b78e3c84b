"""Rows of a Parquet file as plain arrays, whichever of Arrow's types a writer chose, and what could not be read."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.readers.folders import open_inside
from schemas.errors import Reason, SourceError

MAGIC = b"PAR1"
_REFUSALS = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)
"""What pyarrow raises on damaged files; which of them depends on the damage."""


@contextmanager
def open_parquet(root: Path, path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of the source for as long as the context lasts; SourceError where it cannot be."""
    with os.fdopen(open_inside(root, path), "rb") as file:
        _check_magic(file, path)
        with refusals(path):
            table = pq.ParquetFile(file, buffer_size=2**20, pre_buffer=False, page_checksum_verification=True)
        yield table


def require_footer(root: Path, path: str) -> None:
    """Raise SourceError unless ``path`` begins and ends as a finished Parquet file does; 8 bytes are read."""
    with os.fdopen(open_inside(root, path), "rb") as file:
        _check_magic(file, path)


@contextmanager
def refusals(path: str) -> Iterator[None]:
    """Turn whatever pyarrow raises on a damaged file into a SourceError."""
    try:
        yield
    except _REFUSALS as error:
        message = f"expected a sound Parquet file, found: {str(error)[:160]}; download or write it again"
        raise SourceError(message, Reason.DECODE, file=path) from error


def _check_magic(file: BinaryIO, path: str) -> None:
    nbytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(4)
    file.seek(max(nbytes - 4, 0))
    tail = file.read(4)
    file.seek(0)
    if head != MAGIC and nbytes >= 4:
        raise SourceError(
            f"expected a Parquet file, found one that begins with {head!r}; check it", Reason.DECODE, file=path
        )
    if nbytes < 12 or tail != MAGIC:
        message = f"expected a finished Parquet file, found {nbytes} bytes without a footer; download or write it again"
        raise SourceError(message, Reason.TRUNCATED, file=path)


def read_columns(file: pq.ParquetFile, names: Sequence[str], start: int, stop: int) -> pa.Table:
    """Read rows ``[start, stop)`` of top-level columns, touching only the row groups that hold them."""
    groups: list[int] = []
    first = offset = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if offset < stop and offset + num_rows > start:
            first = offset if not groups else first
            groups.append(group)
        offset += num_rows
    table = file.read_row_groups(groups, columns=list(names), use_threads=False)
    return table.select(list(names)).slice(start - first, stop - start)


def to_rows(column: pa.ChunkedArray, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return ``dtype[n, *shape]`` and which rows could be read, from scalars or lists of any kind and depth.

    Rows of another length, null rows and nulls among integers cannot; they are NaN, or 0 in an integer column. SourceError
    where the column holds no numbers.
    """
    size = int(np.prod(shape, dtype=np.int64))
    out = np.full((len(column), size), np.nan if dtype.kind == "f" else 0, dtype)
    good = np.zeros(len(column), np.bool_)
    row = 0
    for chunk in column.chunks:
        values, bounds, present = _flatten(chunk)
        whole = present & (np.diff(bounds) == size)
        picked = bounds[:-1][whole, None] + np.arange(size)
        rows = values[picked]
        if dtype.kind != "f" and rows.dtype.kind == "f":
            finite = np.isfinite(rows).all(axis=1)
            whole[np.flatnonzero(whole)[~finite]] = False
            rows = rows[finite]
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # to float32, as the metadata declares: out of range is infinite
            out[row : row + len(chunk)][whole] = rows.astype(dtype)
        good[row : row + len(chunk)] = whole
        row += len(chunk)
    return out.reshape(len(column), *shape), good


def _flatten(array: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all numbers of ``array``, where each row begins and the last ends, and which rows are not null."""
    bounds = np.arange(len(array) + 1)
    present = ~np.asarray(array.is_null().to_numpy(zero_copy_only=False), np.bool_)
    while True:
        kind = array.type
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(kind):
            array = array.dictionary_decode()
        elif pa.types.is_fixed_size_list(kind):
            bounds = bounds * kind.list_size
            array = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            offsets = array.offsets.to_numpy().astype(np.int64)
            bounds = offsets[bounds] - offsets[0]
            array = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        else:
            break
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
        raise SourceError(f"expected numbers, found {array.type}; read another column", Reason.UNSUPPORTED)
    return array.to_numpy(zero_copy_only=False) if not array.null_count else _with_nan(array), bounds, present


def _with_nan(array: pa.Array) -> np.ndarray:
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
