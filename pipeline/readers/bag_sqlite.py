"""ROS 2 bags in SQLite: https://github.com/ros2/rosbag2/tree/rolling/rosbag2_storage_sqlite3."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from pipeline.readers.bag_files import MAX_MESSAGE_NBYTES, OUTSIDE, Channel, Contents, too_large, unpack_some
from pipeline.readers.folders import inside, open_inside
from schemas.errors import Reason, SourceError

MAGIC = b"SQLite format 3\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
"""How a message begins that was packed by itself, and no CDR."""


class SqliteFile:
    """A ``.db3``; a context manager. Nothing is written beside it, no lock is taken.

    Parameters
    ----------
    root, path
        The source, and the file relative to it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.root, self.path = root, path

    def __enter__(self) -> "SqliteFile":
        with os.fdopen(open_inside(self.root, self.path), "rb") as plain:
            self.nbytes = os.fstat(plain.fileno()).st_size
            if plain.read(len(MAGIC)) != MAGIC:
                reason = Reason.TRUNCATED if self.nbytes < len(MAGIC) else Reason.UNSUPPORTED
                raise SourceError(
                    "expected an SQLite database, found other bytes; record it again", reason, file=self.path
                )
        with self._refusals():
            address = f"file:{quote(inside(self.root, self.path))}?mode=ro&immutable=1"
            self._database = sqlite3.connect(address, uri=True)
            self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * MAX_MESSAGE_NBYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def contents(self) -> Contents:
        """List topics and the time of every message; a damaged page ends the list, and is its ``problem``."""
        found = Contents()
        with self._refusals():
            self._database.execute("PRAGMA trusted_schema = OFF")
            listed = self._database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            tables = {name for name, sql in listed if "VIRTUAL" not in str(sql).upper().partition("(")[0]}
        for name in ("topics", "messages"):  # a view might run for ever
            if name not in tables:
                raise SourceError(f"expected the table {name!r}, found none; record it again", file=self.path)
        try:
            with self._refusals():
                definitions = self._definitions() if "message_definitions" in tables else {}
                for number, topic, kind, encoding in self._rows(
                    "SELECT id, name, type, serialization_format FROM topics"
                ):
                    text = definitions.get(kind, "")
                    found.channels[int(number)] = Channel(str(topic), str(kind), text, str(encoding))
                for number, channel, log_ns in self._rows("SELECT id, topic_id, timestamp FROM messages"):
                    found.add(int(channel), int(log_ns), OUTSIDE, int(number))
        except SourceError as error:
            found.problem = error
        log = inside(self.root, self.path) + "-wal"
        if found.problem is None and os.path.exists(log) and os.path.getsize(log):
            message = "expected a closed database, found a log of later messages beside it; open and close it once with sqlite3"
            found.problem = SourceError(message, Reason.TRUNCATED, file=self.path)
        return found

    def _definitions(self) -> dict[str, str]:
        query = "SELECT topic_type, encoding, encoded_message_definition FROM message_definitions"
        return {str(kind): str(text) for kind, encoding, text in self._rows(query) if encoding == "ros2msg"}

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows; more than bytes in the file means pages that lead back to themselves."""
        for count, row in enumerate(self._database.execute(query)):
            if count > self.nbytes:
                raise SourceError(
                    "expected rows that fit the file, found more; check it", Reason.TOO_LARGE, file=self.path
                )
            yield row

    def read(self, channel: int, chunk: int, offset: int, nbytes: int = 0) -> bytes:
        """Return a message, or its first ``nbytes``."""
        with self._refusals():
            query = "SELECT topic_id, length(data), typeof(data) FROM messages WHERE id = ?"
            found = self._database.execute(query, (offset,)).fetchone()
            if found is None or found[0] != channel or found[2] != "blob":
                raise SourceError(
                    "expected a message that was indexed, found none; run again", Reason.DECODE, file=self.path
                )
            if found[1] > MAX_MESSAGE_NBYTES:
                raise too_large(f"a message of at most {MAX_MESSAGE_NBYTES} bytes", found[1], self.path)
            (data,) = self._database.execute("SELECT data FROM messages WHERE id = ?", (offset,)).fetchone()
        if data[:4] == _ZSTD:
            data = unpack_some(data, "zstd", MAX_MESSAGE_NBYTES + 1, self.path)
            if len(data) > MAX_MESSAGE_NBYTES:
                raise too_large(f"a message of at most {MAX_MESSAGE_NBYTES} bytes", len(data), self.path)
        return bytes(data[:nbytes] if nbytes else data)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn what SQLite raises on damaged files into a SourceError."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            message = f"expected a sound SQLite database, found: {str(error)[:120]}; record it again"
            reason = Reason.TRUNCATED if "malformed" in str(error) else Reason.DECODE
            raise SourceError(message, reason, file=self.path) from error
