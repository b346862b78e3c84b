"""Compiled kernels on disk: each is compiled once a machine, not once a process.

Numba's own cache, with what it lacks for several processes. Of two that compile at once for the first time, both could give their files
the same name, and one would later run the other's code: here a lock makes one wait, and then load what the other made. And it does
not see that a function that a kernel calls has changed: here the folder's name is a digest of all kernels' sources, of Numba's
version and of the processor, so that a change of any begins an empty one, and machines that share a home do not share code.

Numba's files are pickles and machine code, trusted as Python trusts its own ``.pyc``: they are loaded from a folder alone that belongs to this user and
that nobody else may write, and only where they are, byte for byte, what was saved. Where the folder is another's, cannot be written, or its disk is full,
kernels are compiled as if there were no cache. ``NUMBA_CACHE_DIR`` names another place than ``~/.cache/headrace``, of which all may be removed at any time.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
from llvmlite import binding
from numba.core import caching

WAIT_S = 180.0
"""Longest time to wait for another process that compiles the same kernel; then it is compiled here too."""
_POLL_S = 0.02
_config: Any = numba.config
_FunctionCache: Any = caching.FunctionCache


@cache
def _folder() -> Path:
    digest = blake2b(digest_size=12)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    for part in (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), features, str(Path(__file__))):
        digest.update(part.encode())
    place = Path(_config.CACHE_DIR) if _config.CACHE_DIR else Path.home() / ".cache" / "headrace"
    return place / f"kernels-{digest.hexdigest()}"


class _LockedCache(_FunctionCache):  # type: ignore[misc]
    """A cache of one kernel; from a miss until what was compiled is saved, other processes wait."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._lock_path = _folder() / f"{function.__module__}.{function.__qualname__}.lock"
        self._held = -1

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = self._loaded(sig, target_context)
        if found is None and self._acquire():
            found = self._loaded(sig, target_context)
            if found is not None:
                self._release()
            elif not self._is_whole():
                for name in self._digests():
                    (Path(self._cache_path) / name).unlink()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            if self._held >= 0:
                super().save_overload(sig, data)
                self._lock_path.write_text(json.dumps(self._digests()))
        except OSError:
            self.disable()  # a full disk: the kernel is compiled, which is what counts
        finally:
            self._release()

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        return super().load_overload(sig, target_context) if self._is_whole() else None

    def _is_whole(self) -> bool:
        """Return whether the kernel's files are what the process that wrote them said last: a crash or a bad disk may change them."""
        try:
            return bool(json.loads(self._lock_path.read_text()) == self._digests())
        except (OSError, ValueError):
            return False

    def _digests(self) -> dict[str, str]:
        files = sorted(Path(self._cache_path).glob(f"{self._impl.filename_base}.*"))
        return {file.name: blake2b(file.read_bytes()).hexdigest() for file in files if file.suffix in (".nbi", ".nbc")}

    def _acquire(self) -> bool:
        self._release()
        try:
            self._held = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        self._release()
        return False

    def _release(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


@contextmanager
def _cache_dir(folder: Path) -> Iterator[None]:
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        _config.CACHE_DIR = before


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is this user's and nobody else can have put files there."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def keep_compiled(dispatcher: Any) -> None:
    """Let a dispatcher of ``numba.njit`` look for its machine code on disk, and leave it there."""
    try:
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(_folder()):
            return
        with _cache_dir(_folder()):
            dispatcher._cache = _LockedCache(dispatcher.py_func)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return
