"""Rows of one HDF5 dataset: checked before anything is read, its chunks unpacked within bounds."""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from schemas.errors import Reason, SourceError

MAX_BLOCK_NBYTES = 2**30
"""Greatest size of the rows that share a chunk, which are unpacked together."""
MAX_ROW_NBYTES = 2**28
MAX_STEPS = 2**31
COPY_NBYTES = 2**22
"""Rows that are not packed are copied out in pieces of about this size."""

_REFUSALS = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)
"""What h5py raises on damaged files; which of them depends on the damage."""
_CUT = ("truncated file", "eof", "file read failed", "addr overflow", "address overflowed")
_SHUFFLE, _DEFLATE = 2, 1


@contextmanager
def refusals(path: str) -> Iterator[None]:
    """Turn whatever h5py raises on a damaged file into a SourceError with its reason."""
    try:
        yield
    except _REFUSALS as error:
        text = " ".join(str(error).split())[:200]
        raise SourceError(
            f"expected a sound HDF5 file, found: {text}; copy, download or record it again",
            _reason(error, text.lower()),
            file=path,
        ) from error


def _reason(error: Exception, text: str) -> Reason:
    if isinstance(error, MemoryError):
        return Reason.TOO_LARGE
    if any(word in text for word in _CUT):
        return Reason.TRUNCATED
    return Reason.IO if isinstance(error, PermissionError) else Reason.DECODE


def check_numbers(dataset: Any, name: str, path: str, kinds: str) -> None:
    """Raise SourceError unless a dataset is an array of numbers of bounded size, stored in its own file."""
    dtype, shape = dataset.dtype, dataset.shape
    is_plain = dtype.kind in kinds and not dtype.hasobject and (dtype.kind == "S" or dtype.itemsize <= 8)
    if shape is None or len(shape) == 0 or not is_plain:
        raise SourceError(
            f"expected an array of plain numbers along steps in {name!r}, found {dtype}{list(shape or ())}; "
            "save it as such (objects and text of free length are not read)",
            Reason.UNSUPPORTED,
            file=path,
        )
    row_nbytes = math.prod(shape[1:]) * dtype.itemsize
    if row_nbytes > MAX_ROW_NBYTES or shape[0] > MAX_STEPS:
        message = f"expected rows of at most {MAX_ROW_NBYTES} bytes in {name!r}, found {dtype}{list(shape)}"
        raise SourceError(f"{message}; check the file", Reason.TOO_LARGE, file=path)
    check_storage(dataset, name, path)


def check_storage(dataset: Any, name: str, path: str) -> None:
    """Raise SourceError where a dataset's numbers lie in other files: its own says which, and it may say any."""
    if dataset.external or dataset.is_virtual:
        raise SourceError(
            f"expected {name!r} in the file itself, found an array that is stored in others; write it into one file (h5repack)",
            Reason.UNSUPPORTED,
            file=path,
        )


def find_storage(h5py: Any, dataset: Any, name: str, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return chunk shape and filters, both empty where rows lie open; SourceError where they cannot be unpacked."""
    if dataset.chunks is None:
        return (), ()
    plist = dataset.id.get_create_plist()
    filters = tuple(int(plist.get_filter(k)[0]) for k in range(plist.get_nfilters()))
    missing = [code for code in filters if not h5py.h5z.filter_avail(code)]
    if missing or filters.count(_DEFLATE) > 1:
        raise SourceError(
            f"expected a compression that h5py has in {name!r}, found HDF5 filters {list(filters)}; run h5repack -f GZIP=1",
            Reason.UNSUPPORTED,
            file=path,
        )
    nbytes = dataset.chunks[0] * dataset.dtype.itemsize
    nbytes *= math.prod(-(-side // chunk) * chunk for side, chunk in zip(dataset.shape[1:], dataset.chunks[1:]))
    if nbytes > MAX_BLOCK_NBYTES:
        raise SourceError(
            f"expected chunks of at most {MAX_BLOCK_NBYTES} bytes in {name!r}, found {list(dataset.chunks)} of "
            f"{dataset.dtype}; run h5repack -l CHUNK= with one step a chunk",
            Reason.TOO_LARGE,
            file=path,
        )
    return tuple(dataset.chunks), filters


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset whose first axis is the step."""

    name: str
    path: str
    dataset: Any
    chunks: tuple[int, ...]
    filters: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Length of the first axis."""
        return int(self.dataset.shape[0])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(int(side) for side in self.dataset.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers, native byte order."""
        return np.dtype(self.dataset.dtype).newbyteorder("=")

    def block(self, step: int, stop: int) -> tuple[int, int]:
        """Return ``[first, last)`` of the rows that are read at once with ``step``: those of its chunk, or some before ``stop``."""
        if self.chunks and (self.filters or self._chunk_nbytes <= COPY_NBYTES):
            first = step // self.chunks[0] * self.chunks[0]
            return first, min(first + self.chunks[0], self.num_steps)
        row_nbytes = math.prod(self.row_shape) * self.dtype.itemsize
        return step, min(stop, self.num_steps, step + max(1, COPY_NBYTES // max(row_nbytes, 1)))

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows of one block; SourceError where they are damaged, or were never written.

        Chunks of shuffle and deflate are unpacked here and not by HDF5: outside h5py's global lock, and to no more than a chunk's
        size, which HDF5 does not heed.
        """
        with refusals(self.path):
            is_block = bool(self.chunks) and self.block(first, last) == (first, last)
            if is_block and set(self.filters) <= {_SHUFFLE, _DEFLATE}:
                return self._unpack(first, last)
            self._check_written(first, last)
            return np.asarray(self.dataset[first:last], self.dtype)

    @property
    def _chunk_nbytes(self) -> int:
        return math.prod(self.chunks) * self.dataset.dtype.itemsize

    def _corners(self, first: int) -> Iterator[tuple[int, ...]]:
        sides = zip(self.dataset.shape[1:], self.chunks[1:])
        return product([first // self.chunks[0] * self.chunks[0]], *(range(0, side, chunk) for side, chunk in sides))

    def _check_written(self, first: int, last: int) -> None:
        """Raise SourceError where HDF5 would make up rows: those never written are shown as zeros."""
        if not self.chunks:
            missing = self.dataset.id.get_space_status() == 0  # H5D_SPACE_STATUS_NOT_ALLOCATED
        else:
            steps = range(first, last, self.chunks[0])
            offsets = (corner for step in (*steps, last - 1) for corner in self._corners(step))
            missing = any(self.dataset.id.get_chunk_info_by_coord(at).byte_offset is None for at in offsets)
        if missing:
            raise self._unwritten(first, last)

    def _unpack(self, first: int, last: int) -> np.ndarray:
        out = np.empty((last - first, *self.row_shape), self.dataset.dtype)
        for corner in self._corners(first):
            try:
                mask, data = self.dataset.id.read_direct_chunk(corner)
            except RuntimeError as error:
                if "not allocated" in str(error):
                    raise self._unwritten(first, last) from error
                raise
            chunk = self._decode(data, mask)
            target = out[(slice(None), *(slice(at, at + side) for at, side in zip(corner[1:], self.chunks[1:])))]
            target[...] = chunk[tuple(slice(side) for side in target.shape)]
        return np.asarray(out, self.dtype)

    def _decode(self, data: bytes, mask: int) -> np.ndarray:
        itemsize, nbytes = self.dataset.dtype.itemsize, self._chunk_nbytes
        for place in reversed(range(len(self.filters))):
            if mask >> place & 1:
                continue
            if self.filters[place] == _DEFLATE:
                data = _inflate(data, nbytes, self.name, self.path)
            elif itemsize > 1 and len(data) == nbytes:
                data = np.frombuffer(data, np.uint8).reshape(itemsize, -1).T.tobytes()
        if len(data) != nbytes:
            message = f"expected a chunk of {nbytes} bytes in {self.name!r}, found {len(data)}; record or copy it again"
            raise SourceError(message, Reason.DECODE, file=self.path)
        return np.frombuffer(data, self.dataset.dtype).reshape(self.chunks)

    def _unwritten(self, first: int, last: int) -> SourceError:
        message = (
            f"expected rows {first} to {last - 1} of {self.name!r}, found that they were never written; record it again"
        )
        return SourceError(message, Reason.TRUNCATED, file=self.path)


def _inflate(data: bytes, nbytes: int, name: str, path: str) -> bytes:
    try:
        unpacker = zlib.decompressobj()
        out = unpacker.decompress(data, nbytes + 1)
    except zlib.error as error:
        message = f"expected a sound chunk in {name!r}, found: {error}; record or copy it again"
        raise SourceError(message, Reason.DECODE, file=path) from error
    if len(out) > nbytes or not unpacker.eof:
        message = f"expected a chunk that unpacks to {nbytes} bytes in {name!r}, found another; record or copy it again"
        raise SourceError(message, Reason.DECODE, file=path)
    return out
