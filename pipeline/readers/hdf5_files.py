"""One HDF5 file, opened without trusting it: links that leave it, types that are no numbers, chunks that explode.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html. h5py, the extra ``robot``, is imported when a file is
opened. Files are opened for each call and never kept, so that readers travel to other processes and survive a fork.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.readers.folders import inside, natural_key, open_inside
from pipeline.readers.hdf5_rows import Rows, check_numbers, check_storage, find_storage, refusals
from pipeline.readers.hdf5_texts import read_texts
from pipeline.readers.metadata import as_text
from schemas.errors import MissingExtraError, Reason, SourceError

MAX_MEMBERS = 2**17
"""Greatest number of members of one group."""
MAX_LINKS = 8
"""Soft links followed one after another."""
MAX_TEXT_NBYTES = 2**22


def require_h5py() -> Any:
    """Return the module h5py; MissingExtraError names the extra that brings it."""
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(
            f"expected the package h5py to read HDF5, found: {error}; install h5py, as the extra headrace[robot] does"
        ) from error
    return h5py


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

    def rows(self, name: str, kinds: str = "biuf") -> Rows:
        """Return the dataset ``name``, checked, nothing of it read."""
        with refusals(self.path):
            found = self._find(name)
            if not isinstance(found, self.h5py.Dataset):
                raise SourceError(
                    f"expected the array {name!r}, found none; check the recording",
                    Reason.BAD_METADATA,
                    file=self.path,
                )
            check_numbers(found, name, self.path, kinds)
            return Rows(name, self.path, found, *find_storage(self.h5py, found, name, self.path))

    def text(self, name: str, attribute: str) -> str:
        """Return an attribute of an object that is text, a whole number or a truth value, as text; else an empty string."""
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
            if info.dtype.hasobject:
                texts = read_texts(self.file.filename, self.path, found.name, attribute, MAX_TEXT_NBYTES)
                return as_text(texts[0]) if len(texts) == 1 and self.h5py.check_string_dtype(info.dtype) else ""
            value = found.attrs[attribute]
        value = value.reshape(-1)[0] if isinstance(value, np.ndarray) and value.size == 1 else value
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return as_text(value) if isinstance(value, str | int | np.integer | np.bool_) else ""

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
            check_storage(found, name, self.path)
            if info is None or len(found) * (info.length or 64) > MAX_TEXT_NBYTES:
                raise SourceError(
                    f"expected a short list of texts in {name!r}, found {found.dtype}{found.shape}; check the file",
                    Reason.UNSUPPORTED,
                    file=self.path,
                )
            if info.length is None:
                texts = read_texts(self.file.filename, self.path, found.name, None, MAX_TEXT_NBYTES)
            else:
                texts = found.asstr(errors="replace")[:]
            return [as_text(value) for value in texts]

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
