"""One HDF5 file, opened without trusting it: links that leave it, types that are no numbers, chunks that explode.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html. h5py, the extra ``robot``, is imported when a file is
opened. Files are opened for each call and never kept, so that readers travel to other processes and survive a fork.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.readers.folders import inside, natural_key, open_inside
from pipeline.readers.metadata import as_text
from schemas.errors import MissingExtraError, Reason, SourceError

MAX_MEMBERS = 2**17
"""Greatest number of members of one group."""
MAX_LINKS = 8
"""Soft links followed one after another."""
MAX_TEXT_NBYTES = 2**22
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


def require_h5py() -> Any:
    """Return the module h5py; MissingExtraError names the extra that brings it."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package h5py to read HDF5, found: {error}; run pip install headrace[robot]"
        ) from error
    return h5py


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


@contextmanager
def open_hdf5(root: Path, path: str) -> Iterator["Hdf5File"]:
    """Open a file of the source for as long as the context lasts; SourceError where it cannot be, or is no HDF5."""
    h5py = require_h5py()
    with os.fdopen(open_inside(root, path), "rb") as plain:
        if os.fstat(plain.fileno()).st_size == 0:
            message = "expected an HDF5 file, found 0 bytes; copy, download or record it again"
            raise SourceError(message, Reason.TRUNCATED, file=path)
    with refusals(path):
        file = h5py.File(inside(root, path), "r", locking=False)  # a lock needs write access on some file systems
    try:
        yield Hdf5File(h5py, file, path)
    finally:
        with refusals(path):
            file.close()


@dataclass(frozen=True, slots=True)
class Hdf5File:
    """An open file. Objects are named by their path in it; SourceError says why one cannot be had."""

    h5py: Any
    file: Any
    path: str
    """Relative to the source."""

    def names(self, group: str) -> list[str]:
        """Return the members of a group in natural order; none where there is no such group."""
        with refusals(self.path):
            found = self._find(group)
            if not isinstance(found, self.h5py.Group):
                return []
            if len(found) > MAX_MEMBERS:
                raise SourceError(
                    f"expected at most {MAX_MEMBERS} members in {group}, found {len(found)}; check the file",
                    Reason.TOO_LARGE,
                    file=self.path,
                )
            return sorted(found, key=natural_key)

    def is_array(self, name: str) -> bool:
        """Return whether ``name`` is a dataset."""
        with refusals(self.path):
            return isinstance(self._find(name), self.h5py.Dataset)

    def rows(self, name: str, kinds: str = "biuf") -> "Rows":
        """Return the dataset ``name``, checked, nothing of it read."""
        with refusals(self.path):
            found = self._find(name)
            if not isinstance(found, self.h5py.Dataset):
                raise SourceError(
                    f"expected the array {name!r}, found none; check the recording",
                    Reason.BAD_METADATA,
                    file=self.path,
                )
            _check_numbers(found, name, self.path, kinds)
            return Rows(name, self.path, found, *_storage(self.h5py, found, name, self.path))

    def text(self, name: str, attribute: str) -> str:
        """Return a text attribute of an object; empty where there is none, or it is no text."""
        with refusals(self.path):
            found = self._find(name)
            if found is None or attribute not in found.attrs:
                return ""
            info = found.attrs.get_id(attribute)
            if math.prod(info.shape) * info.dtype.itemsize > MAX_TEXT_NBYTES:
                raise SourceError(
                    f"expected a short text in {attribute!r} of {name}, found {info.dtype}{info.shape}; check the file",
                    Reason.TOO_LARGE,
                    file=self.path,
                )
            value = found.attrs[attribute]
        value = value.reshape(-1)[0] if isinstance(value, np.ndarray) and value.size == 1 else value
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return as_text(value) if isinstance(value, str | int | np.integer) else ""

    def mapping(self, name: str, attribute: str) -> dict[str, Any]:
        """Return the JSON object of a text attribute; empty where there is none."""
        text = self.text(name, attribute)
        if not text:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"expected JSON in {attribute!r} of {name}, found: {str(error)[:80]}; restore it", file=self.path
            ) from error
        if not isinstance(value, dict):
            raise SourceError(
                f"expected a JSON object in {attribute!r} of {name}, found {text[:40]!r}; restore it", file=self.path
            )
        return value

    def texts(self, name: str) -> list[str]:
        """Return the texts of a small array of them, such as a filter mask's."""
        with refusals(self.path):
            found = self._find(name)
            if not isinstance(found, self.h5py.Dataset) or found.ndim != 1:
                raise SourceError(f"expected a list of texts in {name!r}, found none; check the file", file=self.path)
            info = self.h5py.check_string_dtype(found.dtype)
            _check_storage(found, name, self.path)
            if info is None or len(found) * (info.length or 64) > MAX_TEXT_NBYTES:
                raise SourceError(
                    f"expected a short list of texts in {name!r}, found {found.dtype}{found.shape}; check the file",
                    Reason.UNSUPPORTED,
                    file=self.path,
                )
            return [as_text(value) for value in found.asstr(errors="replace")[:]]

    def _find(self, name: str) -> Any:
        return self._follow(self.file["/"], name, MAX_LINKS)

    def _follow(self, here: Any, name: str, left: int) -> Any:
        """Resolve a path link by link, since h5py would follow one into another file without a word."""
        here = self.file["/"] if name.startswith("/") else here
        for part in name.split("/"):
            if part in ("", "."):
                continue
            if not isinstance(here, self.h5py.Group):
                return None
            encoded = part.encode("utf-8", "surrogateescape")
            if not here.id.links.exists(encoded):
                return None
            kind = here.id.links.get_info(encoded).type
            if kind == self.h5py.h5l.TYPE_SOFT and left > 0:
                target = here.id.links.get_val(encoded).decode("utf-8", "surrogateescape")
                here = self._follow(here, target, left - 1)
            elif kind == self.h5py.h5l.TYPE_HARD:
                here = here[part]
            else:
                raise SourceError(
                    f"expected {name!r} in the file itself, found a link that leaves it or runs in a circle; "
                    "write the data into one file (h5copy, h5repack)",
                    Reason.UNSUPPORTED,
                    file=self.path,
                )
        return here


def _check_numbers(dataset: Any, name: str, path: str, kinds: str) -> None:
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
    _check_storage(dataset, name, path)


def _check_storage(dataset: Any, name: str, path: str) -> None:
    if dataset.external or dataset.is_virtual:
        raise SourceError(
            f"expected {name!r} in the file itself, found an array that is stored in others; write it into one file (h5repack)",
            Reason.UNSUPPORTED,
            file=path,
        )


def _storage(h5py: Any, dataset: Any, name: str, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
