"""Records of a TFRecord shard: where they lie, and what an index must know of each without reading it whole."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.readers.folders import open_inside
from pipeline.readers.rlds_features import Features, feature_key
from schemas.errors import Reason, SourceError, locate
from schemas.source import ViewInfo
from tasks.tfrecord import (
    FOOTER_NBYTES,
    HEADER_NBYTES,
    Extent,
    byte_values,
    check_payload,
    find_features,
    float_values,
    int64_values,
    parse_example,
    payload_nbytes,
    read_varint,
)

MAX_TEXTS_NBYTES = 16 * 2**20
"""Greatest size of an episode's instructions, all steps together."""
MAX_COUNTER_NBYTES = 10 * 2**20
"""Greatest size of a flag, all steps together: a million steps."""
MAX_FACT_NBYTES = 2**16
WINDOW_NBYTES = 256
"""Bytes read at once while keys are walked: a key, its lengths and the beginning of its value."""
SUCCESS = re.compile(r"/(success|failure)/", re.ASCII)
"""By which DROID's own loaders tell a successful episode: the folder of ``file_path``."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where one record lies in its shard."""

    offset: int
    nbytes: int
    """Of the payload."""
    crc: int
    """Masked crc32c of the payload, as stored; not checked here."""


class ShardFile:
    """One open shard."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path
        self.nbytes = os.fstat(descriptor).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        try:
            return os.pread(self._descriptor, nbytes, offset)
        except OSError as error:
            message = f"expected a readable file, found: {error.strerror}; check the disk"
            raise SourceError(message, Reason.IO, file=self._path) from error

    def records(self) -> Iterator[Record]:
        """Yield the records by their framing: 16 bytes are read of each. SourceError where the framing ends."""
        offset = 0
        head = self.read(0, HEADER_NBYTES)
        while offset < self.nbytes:
            with locate(file=self._path):
                nbytes = payload_nbytes(head, self.nbytes - offset)
            tail = self.read(
                offset + HEADER_NBYTES + nbytes, FOOTER_NBYTES + HEADER_NBYTES
            )  # and the next one's header
            yield Record(offset, nbytes, int.from_bytes(tail[:FOOTER_NBYTES], "little"))
            offset += HEADER_NBYTES + nbytes + FOOTER_NBYTES
            head = tail[FOOTER_NBYTES:]

    def read_example(self, record: Record) -> Mapping[str, memoryview]:
        """Return the features of a record, read whole, both checksums checked."""
        with locate(file=self._path):
            data = memoryview(self._read_whole(record.offset, HEADER_NBYTES + record.nbytes + FOOTER_NBYTES))
            if payload_nbytes(data[:HEADER_NBYTES], self.nbytes - record.offset) != record.nbytes:
                message = "expected the record that was indexed, found one of another length; run again"
                raise SourceError(message, Reason.BAD_METADATA)
            payload = data[HEADER_NBYTES:-FOOTER_NBYTES]
            check_payload(payload, data[-FOOTER_NBYTES:])
            return parse_example(payload)

    def _read_whole(self, offset: int, nbytes: int) -> bytearray:
        if offset + nbytes > self.nbytes:
            message = (
                f"expected a record up to byte {offset + nbytes}, found {self.nbytes} bytes; download the file again"
            )
            raise SourceError(message, Reason.TRUNCATED)
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            try:
                found = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"expected a readable file, found: {error.strerror}; check the disk", Reason.IO
                ) from error
            if not found:
                raise SourceError(f"expected {nbytes} bytes, found {done}; download the file again", Reason.TRUNCATED)
            done += found
        return data

    def glance(self, record: Record) -> "Glance":
        """Walk the keys of a record, whose payload is neither read whole nor checked."""
        start = record.offset + HEADER_NBYTES
        window: tuple[int, bytes] = (0, b"")

        def fetch(at: int, nbytes: int) -> bytes:
            nonlocal window
            first, data = window
            if not (first <= at and at + nbytes <= first + len(data)):
                window = first, data = at, self.read(start + at, min(max(nbytes, WINDOW_NBYTES), record.nbytes - at))
            return data[at - first : at - first + nbytes]

        with locate(file=self._path):
            return Glance(self, start, find_features(fetch, record.nbytes))


@contextmanager
def open_shard(root: Path, path: str) -> Iterator[ShardFile]:
    """Open a shard of the source for as long as the context lasts."""
    descriptor = open_inside(root, path)
    try:
        yield ShardFile(descriptor, path)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Summary:
    """What an index says of one episode."""

    num_steps: int
    views: tuple[ViewInfo, ...]
    instructions: tuple[str, ...]
    has_index: bool
    """Whether the instruction changes within the episode."""
    placeholders: tuple[str, ...]
    """Views that hold one and the same image in every step."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Glance:
    """The keys of a record, and its small features on demand."""

    file: ShardFile
    start: int
    extents: Mapping[str, Extent]

    def summarize(self, features: Features) -> Summary:
        """Return what the index needs; SourceError where the steps cannot be counted."""
        if features.counter not in self.extents:
            message = (
                f"expected the feature {features.counter}, which features.json declares, found none; check the record"
            )
            raise SourceError(message, Reason.BAD_METADATA)
        num_steps = len(int64_values(self._read(features.counter, MAX_COUNTER_NBYTES)))
        absent, placeholders = self._missing_views(features.views, num_steps)
        views = tuple(replace(view, present=view.name not in absent) for view in features.views)
        texts = list(self._texts(features.instructions[:1]))
        instructions = tuple(dict.fromkeys([*texts, *self._texts(features.instructions[1:])]))
        return Summary(num_steps, views, instructions, len(texts) > 1, placeholders, self._facts(features.facts))

    def _read(self, key: str, limit_nbytes: int) -> bytes:
        start, stop = self.extents[key]
        if stop - start > limit_nbytes:
            message = f"expected at most {limit_nbytes} bytes in {key}, found {stop - start}; check the record"
            raise SourceError(message, Reason.TOO_LARGE)
        return self.file.read(self.start + start, stop - start)

    def _missing_views(self, views: tuple[ViewInfo, ...], num_steps: int) -> tuple[set[str], tuple[str, ...]]:
        absent, placeholders = set(), []
        for view in views:
            key = feature_key(view.name, self.extents)
            if key not in self.extents:
                absent.add(view.name)
            elif num_steps > 1 and self._is_placeholder(key, num_steps):
                placeholders.append(view.name)
        return absent | set(placeholders), tuple(placeholders)

    def _is_placeholder(self, key: str, num_steps: int) -> bool:
        """Return whether a list of images is one image, again and again. Its size alone rules out most, unread."""
        start, stop = self.extents[key]
        head = self.file.read(self.start + start, min(stop - start, WINDOW_NBYTES))
        if head[:1] != b"\x0a":
            return False
        body, used = read_varint(head, 1)
        unit, rest = divmod(body, num_steps)
        if rest or used + body != stop - start or not 0 < unit <= MAX_FACT_NBYTES:
            return False
        at, tail = self.start + start + used, min(unit, WINDOW_NBYTES)
        if self.file.read(at + unit - tail, tail) != self.file.read(at + 2 * unit - tail, tail):
            return False
        first = self.file.read(at, unit)
        return all(self.file.read(at + k * unit, unit) == first for k in range(1, num_steps))

    def _texts(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Yield the distinct texts of each of ``keys``, in order, empty ones left out."""
        for key in keys:
            if key in self.extents:
                yield from filter(None, dict.fromkeys(_texts_of(self._read(key, MAX_TEXTS_NBYTES))))

    def _facts(self, keys: tuple[str, ...]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for key in keys:
            start, stop = self.extents.get(key, (0, 0))
            if 0 < stop - start <= MAX_FACT_NBYTES:
                value = _fact(self._read(key, MAX_FACT_NBYTES))
                facts.update({key.removeprefix("episode_metadata/"): value} if value is not None else {})
        found = SUCCESS.search(str(facts.get("file_path", "")))
        return {**facts, "success": found[1] == "success"} if found else facts


def _fact(feature: bytes) -> Any:
    """Return a Feature's only value, whatever its kind; None where it has none, several, or one that is not finite."""
    for decode in (_texts_of, int64_values, float_values):
        try:
            values: Sequence[Any] | np.ndarray = decode(feature)
        except SourceError:
            continue  # of another kind
        if len(values) == 1:
            value = values[0] if isinstance(values, list) else values[0].item()
            return value if isinstance(value, str) or np.isfinite(value) else None
    return None


def _texts_of(feature: bytes) -> list[str]:
    return [as_text(value) for value in byte_values(feature)]


def as_text(value: bytes | memoryview) -> str:
    """Return a text as it is offered: what is not UTF-8 is replaced."""
    return bytes(value).decode("utf-8", "replace").strip()
