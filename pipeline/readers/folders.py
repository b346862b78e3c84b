"""Look into a source's folders without trusting them: natural order, links that lead out, files that are no files."""

import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import Reason, SourceError
from schemas.source import Fault

MAX_DEPTH = 6
"""Levels below the root in which recordings are looked for: ``version/split/town/route`` and some."""

MAX_FRAME_NBYTES = 64 * 2**20
"""Greatest size of one encoded frame."""

SNIFF_FOLDERS = 2000
"""Folders that sniffing looks into before it says no: a foreign tree may hold millions."""

_DIGITS = re.compile(r"(\d+)", re.ASCII)
_NUMBERED = re.compile(r"(\d{1,9})((?:\.[A-Za-z0-9]+)+)", re.ASCII)
_SNAPSHOT = re.compile(r"(.*/(?:datasets|models|spaces)--[^/]+)/snapshots/[^/]+(?:/|\Z)", re.DOTALL)
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def natural_key(name: str) -> tuple[object, ...]:
    """Return a sort key that puts ``episode_2`` before ``episode_10``, folder by folder.

    >>> sorted(["b/e10", "b/e2", "a"], key=natural_key)
    ['a', 'b/e2', 'b/e10']
    """
    parts = [
        tuple(
            # Digits compare by their count first: a name in a file may have more of them than Python makes a number of.
            (0, len(piece.lstrip("0")), piece.lstrip("0")) if piece.isdecimal() and piece.isascii() else (1, 0, piece)
            for piece in _DIGITS.split(part)
        )
        for part in name.split("/")
    ]
    return (parts, name)


def source_root(path: str | Path) -> Path:
    """Return the absolute folder ``path``; SourceError says why it cannot be a source."""
    root = Path(path).expanduser().absolute()
    try:
        with os.scandir(root) as entries:
            if next(entries, None) is None:
                raise SourceError(
                    f"expected recordings, found the empty folder {root}; check the path", Reason.EMPTY_EPISODE
                )
    except FileNotFoundError as error:
        raise SourceError(
            f"expected a folder of recordings, found nothing at {root}; check the path", Reason.MISSING_FILE
        ) from error
    except NotADirectoryError as error:
        raise SourceError(
            f"expected a folder of recordings, found the file {root}; unpack it, or give its folder"
        ) from error
    except (OSError, ValueError) as error:
        raise SourceError(
            f"expected a readable folder, found: {error}; check the permissions of {root}", Reason.IO
        ) from error
    return root


def inside(root: Path, relative: str) -> str:
    """Return the real path of ``relative``; SourceError where a link or ``..`` leads out of ``root``.

    One kind of link may: those of a snapshot in the Hugging Face cache, whose files all lie in the cache's ``blobs``.
    """
    real_root = os.path.realpath(root)
    try:
        path = os.path.realpath(os.path.join(real_root, relative))
    except (OSError, ValueError) as error:  # a null character
        raise SourceError(
            f"expected a path, found {relative!r}: {error}; correct the metadata", file=relative
        ) from error
    if not _lies_in(path, real_root) and not _is_cached_blob(real_root, relative, path):
        raise SourceError(
            f"expected a file of the source, found a path that leaves it: {relative}; copy the files that links point to into it",
            Reason.UNSUPPORTED,
            file=relative,
        )
    return path


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _is_cached_blob(real_root: str, relative: str, path: str) -> bool:
    """Say whether ``path`` is a file in ``blobs`` of the cached repository that the snapshot ``real_root`` is of, by a link.

    huggingface_hub keeps ``<kind>s--<owner>--<name>/{blobs/<digest>, snapshots/<commit>/<link to a blob>}``.
    """
    if not _lies_in(os.path.normpath(os.path.join(real_root, relative)), real_root):
        return False  # a name in the metadata, and no link, asks for it
    match = _SNAPSHOT.match(real_root)
    return match is not None and os.path.dirname(path) == os.path.join(match[1], "blobs")


def open_inside(root: Path, relative: str) -> int:
    """Open a regular file of the source and return its descriptor; SourceError carries the reason and the file.

    A pipe does not block, a device is not read, a link may not lead out of the source.
    """
    path = inside(root, relative)
    try:
        descriptor = os.open(path, _OPEN)
    except (FileNotFoundError, NotADirectoryError) as error:
        message = "expected a file, found none; check whether the download or copy was complete"
        raise SourceError(message, Reason.MISSING_FILE, file=relative) from error
    except OSError as error:
        raise SourceError(
            f"expected a readable file, found: {error.strerror}; check it", Reason.IO, file=relative
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceError(
            "expected a regular file, found a folder, pipe or device; remove it", Reason.UNSUPPORTED, file=relative
        )
    return descriptor


def read_inside(root: Path, relative: str, limit_nbytes: int = MAX_FRAME_NBYTES, *, head_nbytes: int = 0) -> bytes:
    """Read a file of the source, or its first ``head_nbytes``; SourceError where it is absent, empty, large or no file."""
    with os.fdopen(open_inside(root, relative), "rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > limit_nbytes:
            raise SourceError(
                f"expected at most {limit_nbytes} bytes, found {nbytes}; check the file",
                Reason.TOO_LARGE,
                file=relative,
            )
        if nbytes == 0:
            raise SourceError(
                "expected content, found a file of 0 bytes; record or copy it again", Reason.TRUNCATED, file=relative
            )
        try:
            return _read(file, min(nbytes, head_nbytes or nbytes))
        except OSError as error:
            raise SourceError(
                f"expected a readable file, found: {error.strerror}; check the disk", Reason.IO, file=relative
            ) from error


def _read(file: io.FileIO, nbytes: int) -> bytes:
    blocks = []
    while nbytes > 0 and (block := file.read(nbytes)):
        blocks.append(block)
        nbytes -= len(block)
    return b"".join(blocks)


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder as it was listed."""

    path: str
    """Relative to the source, with ``/``; empty for the source itself."""
    folders: frozenset[str]
    """Names of folders in it, links to folders of the same source included."""
    files: frozenset[str]
    """Names of everything else."""
    links: frozenset[str] = frozenset()
    """Those of ``folders`` that are links."""
    refused: tuple[Fault, ...] = ()
    """Entries that were not followed."""

    @property
    def names(self) -> frozenset[str]:
        """Names of everything in it, also of what is not followed: who opens it says what is wrong."""
        return self.files | self.folders | {fault.path.rpartition("/")[2] for fault in self.refused}

    def join(self, name: str) -> str:
        """Return the path of an entry, relative to the source."""
        return f"{self.path}/{name}" if self.path else name


def list_folder(root: Path, path: str) -> Folder:
    """List one folder by a single ``scandir``, without a ``stat`` per file; SourceError where it cannot be listed."""
    folders: set[str] = set()
    files: set[str] = set()
    links: set[str] = set()
    refused: list[Fault] = []
    try:
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                relative = f"{path}/{entry.name}" if path else entry.name
                if not _is_text(entry.name):
                    message = f"expected a name in UTF-8, found {entry.name!a}; rename it"
                    refused.append(Fault(reason=Reason.UNSUPPORTED, message=message, path=ascii(relative)))
                elif entry.is_symlink() and (fault := _leaves(root, relative)):
                    refused.append(fault)
                elif _is_folder(entry):
                    folders.add(entry.name)
                    links.update([entry.name] if entry.is_symlink() else [])
                else:
                    files.add(entry.name)
    except OSError as error:
        message = f"expected a folder that can be listed, found: {error.strerror}; check it"
        raise SourceError(message, Reason.IO, file=path) from error
    return Folder(path, frozenset(folders), frozenset(files), frozenset(links), tuple(refused))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leaves(root: Path, relative: str) -> Fault | None:
    try:
        inside(root, relative)
    except SourceError as error:
        return Fault(reason=error.reason, message=error.message, path=relative)
    return None


def walk_folders(root: Path, descend: Callable[[Folder], bool]) -> Iterator[Folder | Fault]:
    """Yield the source's folders in natural order, the outer one first, and what could not be listed or followed.

    Folders for which ``descend`` is False are not looked into, nor are links: what they lead to is found where it lies, once.
    """
    pending: list[tuple[str, int]] = [("", 0)]
    while pending:
        path, depth = pending.pop()
        try:
            folder = list_folder(root, path)
        except SourceError as error:
            yield Fault(reason=error.reason, message=error.message, path=path)
            continue
        yield folder
        yield from folder.refused
        if depth < MAX_DEPTH and descend(folder):
            below = sorted(folder.folders - folder.links, key=natural_key, reverse=True)
            pending += [(folder.join(name), depth + 1) for name in below]


def misplaced(folder: Folder, suffixes: tuple[str, ...]) -> Iterator[Fault]:
    """Yield what is a folder in the place of a file, by its name."""
    for name in sorted(folder.folders, key=natural_key):
        if name.lower().endswith(suffixes):
            message = f"expected a file, found the folder {name}; put the file in its place, or rename the folder"
            yield Fault(reason=Reason.UNSUPPORTED, message=message, path=folder.join(name))


@dataclass(frozen=True, slots=True)
class Numbered:
    """Files named by their number, such as ``00017.json.gz``."""

    first: int
    stop: int
    """One past the last number."""
    count: int
    width: int
    """Digits of the first one's name."""
    suffix: str
    others: int
    """Entries that are named otherwise."""


def numbered(names: frozenset[str], suffixes: tuple[str, ...]) -> Numbered:
    """Find the numbers of files with one of ``suffixes``; ``-0001.npz`` or ``00001.json.tmp`` are others."""
    found: dict[int, tuple[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match and match[2].lower() in suffixes:
            found[int(match[1])] = (len(match[1]), match[2])
    if not found:
        return Numbered(0, 0, 0, 0, "", len(names))
    first, last = min(found), max(found)
    width, suffix = found[first]
    return Numbered(first, last + 1, len(found), width, suffix, len(names) - len(found))
