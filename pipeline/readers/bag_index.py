"""What a bag holds: its topics, and where and when each of their messages is. Kept by each process for the bags that it read last."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pipeline.readers.bag_files import BagFile
from pipeline.readers.bag_mcap import McapFile
from pipeline.readers.bag_ros1 import Ros1File
from pipeline.readers.bag_sqlite import SqliteFile
from pipeline.readers.folders import inside
from pipeline.readers.metadata import as_text
from pipeline.readers.ros_messages import HEAD_NBYTES, Value, has_stamp, read_stamp_ns, read_values
from pipeline.readers.ros_types import Field, parse_type, short_type
from schemas.errors import Reason, SourceError

ENCODINGS = ("ros1", "cdr")
SUFFIXES = (".bag", ".bag.active", ".mcap", ".db3")


@dataclass(frozen=True, slots=True)
class Stream:
    """The messages of one topic, in the order in which they were recorded."""

    topic: str
    type: str
    """As ROS 1 spells it."""
    is_ros1: bool
    fields: tuple[Field, ...]
    """Empty where no message can be read."""
    problem: str
    """Why none can be."""
    log_ns: Int64[np.ndarray, " message"]
    places: Int64[np.ndarray, "message 4"]
    """File, channel, chunk, offset."""

    def __len__(self) -> int:
        return len(self.log_ns)


@dataclass(frozen=True, slots=True)
class Bag:
    """One recording, of one file or several that follow one another."""

    root: Path
    paths: tuple[str, ...]
    """Relative to the source."""
    streams: dict[str, Stream]
    problems: tuple[SourceError, ...]
    """Of files that end early."""


def open_bag(root: Path, paths: Sequence[str]) -> Bag:
    """Return what a bag holds; SourceError where a file of it cannot be read at all."""
    return _open_bag(root, tuple(paths), _state(root, paths))


def _state(root: Path, paths: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return size and time of each file, by which one that was replaced is read again."""
    try:
        found = [os.stat(inside(root, path)) for path in paths]
    except OSError as error:
        message = f"expected a file, found: {error.strerror}; check whether the copy was complete"
        raise SourceError(message, Reason.MISSING_FILE, file=str(paths[0])) from error
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in found)


@lru_cache(maxsize=8)
def _open_bag(root: Path, paths: tuple[str, ...], state: tuple[tuple[int, int], ...]) -> Bag:
    parts: dict[str, list[_Part]] = {}
    problems: list[SourceError] = []
    for number, path in enumerate(paths):
        with open_file(root, path) as file:
            contents = file.contents()
        problems += [contents.problem] if contents.problem else []
        for channel, places in contents.places.items():
            described = contents.channels.get(channel)
            if described is None:
                message = f"expected a description of channel {channel}, found {len(places.log_ns)} messages without; record it again"
                problems.append(SourceError(message, Reason.BAD_METADATA, file=path))
                continue
            log_ns = np.frombuffer(places.log_ns, np.int64)
            where = np.empty((len(log_ns), 4), np.int64)
            where[:] = np.stack(
                [
                    np.broadcast_to(number, len(log_ns)),
                    np.broadcast_to(channel, len(log_ns)),
                    places.chunk,
                    places.offset,
                ],
                1,
            )
            key = as_text(described.topic)
            parts.setdefault(key, []).append(
                _Part(described.type, described.definition, described.encoding, log_ns, where)
            )
    streams = {topic: _join(topic, found, problems) for topic, found in sorted(parts.items())}
    return Bag(root, paths, streams, tuple(problems))


@dataclass(frozen=True, slots=True)
class _Part:
    type: str
    definition: str
    encoding: str
    log_ns: np.ndarray
    places: np.ndarray


def _join(topic: str, parts: list[_Part], problems: list[SourceError]) -> Stream:
    """Put the messages of one topic in order; those of another type than the first ones' are left out, and said."""
    first = parts[0]
    own = [part for part in parts if (part.type, part.encoding) == (first.type, first.encoding)]
    if len(own) < len(parts):
        left = sum(len(part.log_ns) for part in parts) - sum(len(part.log_ns) for part in own)
        message = f"expected one type on {topic}, found {first.type} and others; {left} messages are left out"
        problems.append(SourceError(message, Reason.UNSUPPORTED))
    log_ns = np.concatenate([part.log_ns for part in own])
    order = np.argsort(log_ns, kind="stable")
    fields, problem = _fields(first)
    places = np.concatenate([part.places for part in own])[order]
    return Stream(
        topic, as_text(short_type(first.type)), first.encoding == "ros1", fields, problem, log_ns[order], places
    )


def _fields(part: _Part) -> tuple[tuple[Field, ...], str]:
    if part.encoding not in ENCODINGS:
        return (
            (),
            f"expected messages serialised by ROS 1 or in CDR, found {as_text(part.encoding)[:20]!r}; record or convert them so",
        )
    try:
        return parse_type(part.type, part.definition, is_ros1=part.encoding == "ros1"), ""
    except SourceError as error:
        return (), error.message


def open_file(root: Path, path: str) -> BagFile | SqliteFile:
    """Return the file's own kind of reader, not opened yet."""
    if path.endswith(".mcap"):
        return McapFile(root, path)
    return SqliteFile(root, path) if path.endswith(".db3") else Ros1File(root, path)


@dataclass(slots=True)
class Messages:
    """Messages of an open bag."""

    bag: Bag
    _stack: ExitStack
    _open: dict[int, BagFile | SqliteFile] = field(default_factory=dict)

    def data(self, stream: Stream, number: int, nbytes: int = 0) -> bytes:
        """Return a message as it was recorded, or its first ``nbytes``."""
        file, channel, chunk, offset = stream.places[number].tolist()
        if file not in self._open:
            opened: BagFile | SqliteFile = open_file(self.bag.root, self.bag.paths[file])
            self._stack.push(opened.__exit__)
            self._open[file] = opened.__enter__()
        return self._open[file].read(channel, chunk, offset, nbytes)

    def values(self, stream: Stream, number: int) -> dict[str, Value]:
        """Return the values of a message."""
        return read_values(self.data(stream, number), stream.fields, is_ros1=stream.is_ros1)

    def path(self, stream: Stream, number: int) -> str:
        """Name the file that holds a message."""
        return self.bag.paths[int(stream.places[number, 0])]


@contextmanager
def messages(bag: Bag) -> Iterator[Messages]:
    """Open a bag for as long as the context lasts: each file when the first of its messages is asked for."""
    with ExitStack() as stack:
        yield Messages(bag, stack)


@dataclass(frozen=True, slots=True)
class Times:
    """When the messages of a stream were taken, in order of that time."""

    ns: Int64[np.ndarray, " message"]
    """Sorted."""
    numbers: Int64[np.ndarray, " message"]
    """Message of the stream at each of these times."""

    @property
    def distinct(self) -> "Times":
        """Return the first message of each time."""
        ns, first = np.unique(self.ns, return_index=True)
        return Times(ns, self.numbers[first])


def stream_times(bag: Bag, topic: str, clock: str) -> Times:
    """Return the times of a topic's messages: by ``header`` its stamps, where they were set, else when it was recorded (``log``)."""
    stream = bag.streams[topic]
    if clock == "log" or not has_stamp(stream.fields):
        return _ordered(stream.log_ns)
    return _stamps(bag.root, bag.paths, _state(bag.root, bag.paths))[topic]


def _ordered(ns: np.ndarray) -> Times:
    order = np.argsort(ns, kind="stable")
    return Times(ns[order], order)


@lru_cache(maxsize=8)
def _stamps(root: Path, paths: tuple[str, ...], state: tuple[tuple[int, int], ...]) -> dict[str, Times]:
    """Read the stamps of all topics in one pass over the bag, so that each chunk is unpacked once."""
    bag = _open_bag(root, paths, state)
    streams = [stream for stream in bag.streams.values() if has_stamp(stream.fields)]
    found = [stream.log_ns.copy() for stream in streams]
    places = np.concatenate([stream.places[:, [0, 2, 3]] for stream in streams])
    owners = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
    numbers = np.concatenate([np.arange(len(stream)) for stream in streams])
    with messages(bag) as read:
        for place in np.lexsort(places.T[::-1]):
            owner, number = int(owners[place]), int(numbers[place])
            stream = streams[owner]
            try:
                stamp_ns = read_stamp_ns(read.data(stream, number, HEAD_NBYTES), is_ros1=stream.is_ros1)
            except SourceError:
                continue  # refused with its reason when the message is read
            found[owner][number] = stamp_ns or found[owner][number]
    return {stream.topic: _ordered(ns) for stream, ns in zip(streams, found, strict=True)}
