"""Where the files of a Zarr store lie: in a folder, or in a ``.zarr.zip``, of which single members are read by their place.

Zip: APPNOTE 6.3.10. ``zipfile`` reads the central directory, once in a process for each state of a file (a UMI
recording has a member a frame); members are then two ``pread`` each, so that threads share nothing.
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from pipeline.readers.folders import inside, list_folder, open_inside, read_inside
from schemas.errors import Reason, SourceError

MAX_DIRECTORY_NBYTES = 2**28
"""Greatest size of a zip's central directory: some three million files."""
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_STORED, _DEFLATED = 0, 8


class Files(Protocol):
    """Read-only files by name."""

    def read(self, name: str, limit_nbytes: int) -> bytes:
        """Return a file's content; SourceError with reason MISSING_FILE where there is none."""

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in ``path``."""

    def path(self, name: str) -> str:
        """Return the file that holds ``name``, relative to the source."""


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """A store that is a folder."""

    root: Path
    """Of the source."""
    folder: str
    """Of the store, relative to the source; may be empty."""

    def path(self, name: str) -> str:
        """Return the file's own path."""
        return f"{self.folder}/{name}" if self.folder else name

    def read(self, name: str, limit_nbytes: int) -> bytes:
        """Read a regular file of the source; no link leads out of it."""
        return read_inside(self.root, self.path(name), limit_nbytes)

    def folders(self, path: str) -> list[str]:
        """List a folder."""
        relative = self.path(path)
        inside(self.root, relative)
        return sorted(list_folder(self.root, relative).folders)


@dataclass(frozen=True, slots=True)
class ZipFiles:
    """A store that is a zip file. Its names are keys and never paths, so they can lead nowhere."""

    root: Path
    archive: str
    """Relative to the source."""

    def path(self, name: str) -> str:
        """Return the archive, whatever the name."""
        return self.archive

    def folders(self, path: str) -> list[str]:
        """Name the folders that members lie in."""
        prefix = f"{path}/"
        below = (name[len(prefix) :] for name in self._members() if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def read(self, name: str, limit_nbytes: int) -> bytes:
        """Read and unpack one member, its crc32 checked, never to more than the directory says or ``limit_nbytes``."""
        member = self._members().get(name)
        if member is None:
            message = f"expected {name} in the archive, found none; check whether the download or copy was complete"
            raise SourceError(message, Reason.MISSING_FILE, file=self.archive)
        if max(member.nbytes, member.packed_nbytes) > limit_nbytes:
            message = f"expected at most {limit_nbytes} bytes in {name}, found {member.nbytes}; check the archive"
            raise SourceError(message, Reason.TOO_LARGE, file=self.archive)
        descriptor = open_inside(self.root, self.archive)
        try:
            return _unpack(descriptor, name, member)
        except SourceError as error:
            error.where = {"file": self.archive, **error.where}
            raise
        finally:
            os.close(descriptor)

    def _members(self) -> Mapping[str, "Member"]:
        descriptor = open_inside(self.root, self.archive)
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return _directory(str(self.root), self.archive, (status.st_size, status.st_mtime_ns, status.st_ino))


@dataclass(frozen=True, slots=True)
class Member:
    """One member, as the central directory has it."""

    offset: int
    packed_nbytes: int
    nbytes: int
    crc: int
    method: int


@lru_cache(maxsize=2)
def _directory(root: str, archive: str, stamp: tuple[int, int, int]) -> Mapping[str, Member]:
    """Read the central directory; ``stamp`` tells states of the file apart."""
    try:
        with os.fdopen(open_inside(Path(root), archive), "rb") as file:
            _check_directory(file, archive)
            with zipfile.ZipFile(file) as opened:
                return dict(_members(opened))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        message = f"expected a zip file, found: {str(error)[:80]}; download it again"
        raise SourceError(message, Reason.DECODE, file=archive) from error
    except OSError as error:
        message = f"expected a readable file, found: {error.strerror}; check the disk"
        raise SourceError(message, Reason.IO, file=archive) from error


def _check_directory(file: io.BufferedReader, archive: str) -> None:
    """Refuse what is no whole zip, or has a directory that is too large, before ``zipfile`` holds it in memory."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, end - 2**16 - 64))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        message = "expected a zip file, found none, or one without its end; download it again"
        raise SourceError(message, Reason.TRUNCATED, file=archive)
    nbytes = int.from_bytes(tail[at + 12 : at + 16], "little")
    if nbytes == 2**32 - 1 and at >= 20:  # zip64: the locator before says where the size is
        file.seek(min(int.from_bytes(tail[at - 12 : at - 4], "little"), start + at) + 40)
        nbytes = int.from_bytes(file.read(8), "little")
    if nbytes > MAX_DIRECTORY_NBYTES:
        message = (
            f"expected a zip directory of at most {MAX_DIRECTORY_NBYTES} bytes, found {nbytes}; unpack the archive"
        )
        raise SourceError(message, Reason.TOO_LARGE, file=archive)
    file.seek(0)


def _members(opened: zipfile.ZipFile) -> Iterator[tuple[str, Member]]:
    for info in opened.filelist:
        method = info.compress_type if not info.flag_bits & 1 else -1  # encrypted
        yield info.filename, Member(info.header_offset, info.compress_size, info.file_size, info.CRC, method)


def _unpack(descriptor: int, name: str, member: Member) -> bytes:
    if member.method not in (_STORED, _DEFLATED):
        message = f"expected {name} stored or deflated, found it encrypted or packed otherwise; zip it again"
        raise SourceError(message, Reason.UNSUPPORTED)
    head = _pread(descriptor, _LOCAL_HEADER.size, member.offset)
    if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04":
        raise SourceError(f"expected {name} where the directory says, found none; download it again", Reason.DECODE)
    *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(head)
    start = member.offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    data = _pread(descriptor, member.packed_nbytes, start)
    if len(data) != member.packed_nbytes:
        message = f"expected {member.packed_nbytes} bytes of {name}, found {len(data)}; download the archive again"
        raise SourceError(message, Reason.TRUNCATED)
    if member.method == _DEFLATED:
        data = _inflate(data, name, member.nbytes)
    if len(data) != member.nbytes or zlib.crc32(data) != member.crc:
        message = f"expected {member.nbytes} bytes of {name} with crc32 {member.crc:08x}, found others; download the archive again"
        raise SourceError(message, Reason.DECODE)
    return data


def _inflate(data: bytes, name: str, nbytes: int) -> bytes:
    try:
        return zlib.decompressobj(-15).decompress(data, nbytes + 1)
    except zlib.error as error:
        raise SourceError(f"expected deflated data in {name}, found: {error}; zip it again", Reason.DECODE) from error


def _pread(descriptor: int, nbytes: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, nbytes, offset)
    except OSError as error:
        raise SourceError(f"expected a readable file, found: {error.strerror}; check the disk", Reason.IO) from error
