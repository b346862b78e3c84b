"""Files that appear whole and durable, or not at all; and the two checksums of the format."""

import errno
import os
import stat
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

import crc32c as crc32c_package
import xxhash

Bytes = bytes | bytearray | memoryview
"""Contiguous bytes, borrowed and not copied."""


def crc32c(data: Bytes) -> int:
    """Return the crc32c (Castagnoli) of ``data``; the GIL is free meanwhile for 32 KiB and more."""
    return int(crc32c_package.crc32c(data))


def xxh3_hex(data: Bytes) -> str:
    """Return the xxh3-128 of ``data`` as 32 hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; a pipe, device or folder in its place is an OSError and never blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path) -> bytes:
    """Read a file whole, as :func:`open_regular` opens it."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename alone may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and those above it, durably; nothing happens where it exists."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, data: Bytes, tmp: Path) -> None:
    """Replace ``path`` by ``data`` in one step that survives a crash at any moment.

    Parameters
    ----------
    path
        File to create or replace.
    data
        Its whole content.
    tmp
        Folder for the unfinished file, on the same file system as ``path``.
    """
    with AtomicFile(path, tmp) as file:
        file.write(data)
        file.commit()


class AtomicFile:
    """A new file written front to back; :meth:`commit` gives it its name, leaving the context without removes it.

    Offers what ``pyarrow`` asks of a file object (``write``, ``tell``, ``flush``, ``closed``).

    Parameters
    ----------
    path
        The name it will have.
    tmp
        Folder for the unfinished file, on the same file system as ``path``.
    """

    def __init__(self, path: Path, tmp: Path) -> None:
        make_folder(path.parent)
        make_folder(tmp)
        self.path = path
        self.nbytes = 0
        self._temporary = tmp / f"{path.parent.name}.{path.name}.{uuid.uuid4().hex}"
        self._hash = xxhash.xxh3_128()
        self._descriptor = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)

    def write(self, data: Bytes) -> int:
        """Append ``data`` and hash it."""
        return self.write_all((data,))

    def write_all(self, parts: tuple[Bytes, ...]) -> int:
        """Append several buffers with one system call, where the kernel takes them at once."""
        views = [memoryview(part).cast("B") for part in parts]
        expected = sum(len(view) for view in views)
        for view in views:
            self._hash.update(view)
        written = os.writev(self._descriptor, views)
        if written < expected:  # signals and full disks cut writes short; the rest is written or the error raised
            rest = memoryview(b"".join(views))[written:]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self.nbytes += expected
        return expected

    def xxh3(self) -> str:
        """Return the xxh3-128 of what has been written, hexadecimal."""
        return self._hash.hexdigest()

    def commit(self) -> None:
        """Make the file durable and give it its name, atomically."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the unfinished file; nothing happens after :meth:`commit`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._temporary.unlink(missing_ok=True)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.nbytes

    def flush(self) -> None:
        """Do nothing: no byte is held back here."""

    def close(self) -> None:
        """Do nothing: :meth:`commit` or the end of the context decides what becomes of the file."""

    @property
    def closed(self) -> bool:
        """Whether the file was committed or discarded."""
        return self._descriptor < 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
