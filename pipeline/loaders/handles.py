"""Open files: a bounded number of them, none closed while it is read, none shared with a forked child."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from pipeline.store.atomic import open_regular
from schemas.errors import DatasetError


def default_limit() -> int:
    """Return a quarter of the files that this process may open, 512 at most: others need some too."""
    import resource  # not on Windows, where os.preadv is missing as well

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 512 if soft == resource.RLIM_INFINITY else max(4, min(512, soft // 4))


class FileHandles:
    """Descriptors of files opened for reading, the least recently used closed first.

    Parameters
    ----------
    root
        Folder that the paths are relative to.
    limit
        Descriptors to keep; more are open only while more are in use.
    """

    def __init__(self, root: Path, limit: int = 0) -> None:
        self._root = root
        self._limit = limit or default_limit()
        self._reset()
        _ALL.add(self)

    def acquire(self, paths: Sequence[str]) -> list[int]:
        """Return a descriptor of each of ``paths``, open until they are given to :meth:`release`."""
        held: list[int] = []
        with self._lock:
            try:
                for path in paths:
                    held.append(self._acquire(path))  # noqa: PERF401 - what was acquired before an error counts
            except BaseException:
                self._release(paths[: len(held)])
                raise
        return held

    def release(self, paths: Sequence[str]) -> None:
        """Allow the files of ``paths``, acquired before, to be closed."""
        with self._lock:
            self._release(paths)

    def close(self) -> None:
        """Close what nobody holds. What is acquired next is opened again."""
        with self._lock:
            self._close_surplus(0)

    def __len__(self) -> int:
        return len(self._open)

    def _acquire(self, path: str) -> int:
        entry = self._open.get(path)
        if entry is None:
            entry = self._open[path] = [self._descriptor(path), 0]
        else:
            self._open.move_to_end(path)
        entry[1] += 1
        return entry[0]

    def _release(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._open[path][1] -= 1
        if len(self._open) > self._limit:
            self._close_surplus(self._limit)

    def _descriptor(self, path: str) -> int:
        try:
            return open_regular(self._root / path)
        except FileNotFoundError:
            raise DatasetError("expected a shard file, found none; run `headrace verify`", file=path) from None
        except OSError as error:
            raise DatasetError(
                f"expected a readable file, found {error.strerror}; check the disk", file=path
            ) from error

    def _close_surplus(self, limit: int) -> None:
        idle = [path for path, (_, users) in self._open.items() if not users]
        for path in idle[: max(0, len(self._open) - limit)]:
            os.close(self._open.pop(path)[0])

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()
        """``path -> [descriptor, users]``, the least recently used first."""

    def _forget_parent(self) -> None:
        """In a forked child: drop the lock, which a thread that is no more may hold, and the parent's descriptors."""
        inherited = [descriptor for descriptor, _ in self._open.values()]
        self._reset()
        for descriptor in inherited:
            os.close(descriptor)

    def __del__(self) -> None:
        for descriptor, _ in getattr(self, "_open", {}).values():
            os.close(descriptor)


def read_into(descriptor: int, parts: list[memoryview], offset: int) -> int:
    """Fill ``parts`` one after the other from a file; return the bytes read, fewer than asked for at its end alone.

    With :class:`FileHandles`, all of rows and frames that a reader asks of the file system while it serves batches.
    """
    found = os.preadv(descriptor, parts, offset)
    return found if found == sum(map(len, parts)) else _read_rest(descriptor, offset, parts, found)


def _read_rest(descriptor: int, offset: int, parts: list[memoryview], found: int) -> int:
    """Go on after a read that the kernel cut short, part by part; return the bytes read in all."""
    position = 0
    for part in parts:
        filled = min(max(found - position, 0), len(part))
        while filled < len(part):
            more = os.preadv(descriptor, [part[filled:]], offset + position + filled)
            if not more:
                return position + filled
            filled += more
        position += len(part)
    return position


_ALL: "weakref.WeakSet[FileHandles]" = weakref.WeakSet()


def _after_fork() -> None:
    for handles in list(_ALL):
        handles._forget_parent()


os.register_at_fork(after_in_child=_after_fork)
