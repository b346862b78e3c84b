"""The folder beside an unfinished dataset: lock, plan, journal, parts. ``pipeline/DESIGN.md`` says what each crash leaves."""

import fcntl
import json
import os
import pwd
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.store.atomic import crc32c, sync_folder, write_atomic
from schemas.errors import LockedError, PlanError, UsageError

_CRC = ', "crc32c": '


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of one dataset's workspace."""

    root: Path
    """The dataset."""

    @property
    def folder(self) -> Path:
        """``OUT.work``."""
        return self.root.with_name(self.root.name + ".work")

    @property
    def tmp(self) -> Path:
        """Temporary files, on the dataset's file system so that a rename is atomic."""
        return self.folder / "tmp"

    @property
    def parts(self) -> Path:
        """Rows of finished shard tasks."""
        return self.folder / "parts"

    @property
    def plan(self) -> Path:
        """The immutable plan of the run under way."""
        return self.folder / "plan.json"

    @property
    def journal(self) -> Path:
        """One record for each finished task."""
        return self.folder / "journal"

    @property
    def seen(self) -> Path:
        """Size and modification time of the sources' files; a cache."""
        return self.folder / "seen.json"

    def prepare(self) -> None:
        """Make the folders, and clear what dead runs left in ``tmp``."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        for folder in (self.root, self.tmp, self.parts):
            folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder)

    def clean(self) -> None:
        """Remove everything of a finished or discarded run but ``seen.json`` and the lock held by the caller."""
        for path in (self.plan, self.journal):  # the plan first: without it the rest means nothing
            path.unlink(missing_ok=True)
        sync_folder(self.folder)
        for folder in (self.tmp, self.parts):
            shutil.rmtree(folder, ignore_errors=True)


class Lock:
    """The one writer of a dataset: an advisory file lock, with the owner's name and a heartbeat inside.

    The kernel drops the lock when its process dies, however it dies, so a stale lock needs no guessing on one machine.
    Raises LockedError, naming the owner, where another run holds it. ``name`` is the lock's file: a scheduled job holds one of
    its own, around its hooks too.
    """

    def __init__(self, workspace: Workspace, name: str = "lock") -> None:
        self.path = workspace.folder / name
        self._file = -1
        self._since = ""
        self._beat_s = 0.0

    def __enter__(self) -> "Lock":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"expected to create {self.path.parent}, found: {error.strerror}; choose another place"
            ) from error
        while self._file < 0:
            self._file = self._acquire()
        self._since = _stamp(time.time())
        self.beat(force=True)
        return self

    def _acquire(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 4096).decode("utf-8", "replace").strip() or "an unknown process"
            os.close(file)
            raise LockedError(
                f"expected no other run on this dataset, found {owner}; try again when it has ended"
            ) from None
        if self.path.exists() and os.fstat(file).st_ino == self.path.stat().st_ino:
            return file
        os.close(file)  # the previous owner removed the file between our open and our lock: try the new one
        return -1

    def beat(self, force: bool = False) -> None:
        """Write owner and time, at most every 10 seconds unless forced."""
        now_s = time.time()
        if force or now_s - self._beat_s > 10:
            self._beat_s = now_s
            who = f"process {os.getpid()} of {_user()} on {socket.gethostname()}"
            text = f"{who} since {self._since}, last seen {_stamp(now_s)}\n".encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1
        folder = self.path.parent
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _stamp(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def _user() -> str:
    """Return the name of the user, or the number where nothing knows a name, as in many containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class Journal:
    """Append-only record of finished tasks. Each line is one JSON object whose last field is the crc32c of what precedes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def open(self) -> list[dict[str, Any]]:
        """Return the intact records, cut off a torn tail, and be ready to append."""
        records, end = _intact(self.path.read_bytes() if self.path.exists() else b"")
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        os.fsync(self._file)
        sync_folder(self.path.parent)
        return records

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on the disk."""
        body = json.dumps(record, sort_keys=True, separators=(",", ":"))[:-1].encode()
        line = body + f"{_CRC}{crc32c(body)}}}\n".encode()
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _intact(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the records before the first damaged or unfinished line, and the offset where they end."""
    records: list[dict[str, Any]] = []
    end = 0
    for line in _lines(data):
        body, found, tail = line.rpartition(_CRC.encode())
        if not found or not tail.endswith(b"}\n") or tail[:-2] != str(crc32c(body)).encode():
            break
        record = json.loads(line)
        record.pop("crc32c")
        records.append(record)
        end += len(line)
    return records, end


def _lines(data: bytes) -> Iterator[bytes]:
    yield from data.splitlines(keepends=True)


def write_json(path: Path, value: object, tmp: Path) -> None:
    """Write canonical JSON atomically."""
    write_atomic(path, json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), tmp)


def read_json(path: Path, what: str) -> Any:
    """Read JSON that a run wrote; PlanError where it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise PlanError(f"expected {what} in {path}, found damaged JSON ({error}); run again with --restart") from error
