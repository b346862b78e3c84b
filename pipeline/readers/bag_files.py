"""Files of recorded messages: where each message lies, known without unpacking what has an index, and each read within bounds.

A file is walked from its beginning, record by record, payloads skipped; indexes at its end are not believed, and not needed. So a file
that was never closed, or is cut, gives what lies before its end, and a fault says so. Chunks without the index that should follow them
are unpacked and walked too. :mod:`pipeline.readers.bag_ros1` and :mod:`pipeline.readers.bag_mcap` know the records.
"""

import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pipeline.readers.folders import open_inside
from schemas.errors import Reason, SourceError

MAX_CHUNK_NBYTES = 2**28
"""Greatest size of a chunk, packed and unpacked: recorders write some megabytes."""
MAX_MESSAGE_NBYTES = 2**27
MAX_HEADER_NBYTES = 2**22
"""Greatest size of a record that describes something."""
MAX_INDEX_NBYTES = 2**24
OUTSIDE = -1
"""Chunk of a message that lies in none."""

Fetch = Callable[[int, int], bytes]
"""``fetch(at, nbytes)``: bytes of the file or of an unpacked chunk; fewer at the end."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A stream of messages of one type."""

    topic: str
    type: str
    definition: str
    """Text of the type's definition; empty where the file carries none in the format of .msg files."""
    encoding: str
    """``ros1``, ``cdr``, or what this is not read in."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record: what it is and where it ends; its payload is not read yet."""

    kind: str
    """``message``, ``chunk``, ``index``, ``channel``, ``end`` or ``other``."""
    stop: int
    """Place of the next record."""
    data_at: int = 0
    """Place of the payload."""
    nbytes: int = 0
    """Size of the payload."""
    channel: int = -1
    log_ns: int = 0
    """When a message was recorded, in ns."""
    codec: str = ""
    """Of a chunk; empty where it is not packed."""
    unpacked_nbytes: int = 0
    crc32: int = 0
    """Of a chunk's unpacked bytes; 0 where there is none."""
    entries: tuple[tuple[int, int], ...] = ()
    """Of an index: time in ns and place within the chunk of each message."""
    described: Channel | None = None


@dataclass(slots=True)
class Places:
    """Where the messages of one channel lie."""

    log_ns: "array[int]" = field(default_factory=lambda: array("q"))
    chunk: "array[int]" = field(default_factory=lambda: array("q"))
    """Place of the chunk's record; :data:`OUTSIDE` for messages in the file itself."""
    offset: "array[int]" = field(default_factory=lambda: array("q"))
    """Place of the message's record in its chunk, or in the file."""

    def add(self, log_ns: int, chunk: int, offset: int) -> None:
        """Add a message."""
        self.log_ns.append(min(log_ns, 2**63 - 1))
        self.chunk.append(chunk)
        self.offset.append(min(offset, 2**63 - 1))


@dataclass(slots=True)
class Contents:
    """What a walk found."""

    channels: dict[int, Channel] = field(default_factory=dict)
    places: dict[int, Places] = field(default_factory=dict)
    problem: SourceError | None = None
    """Why the walk ended before the file's own end."""

    def add(self, channel: int, log_ns: int, chunk: int, offset: int) -> None:
        """Add a message."""
        self.places.setdefault(channel, Places()).add(log_ns, chunk, offset)


class BagFile:
    """An open file of chunks; a context manager. A format says how its records are parsed.

    Parameters
    ----------
    root, path
        The source, and the file relative to it.
    """

    start = 0
    """Place of the first record."""
    ends = True
    """Whether a record says that the file ends: one without was never closed."""

    def __init__(self, root: Path, path: str) -> None:
        self.root, self.path = root, path
        self._held: tuple[int, bytes] = (OUTSIDE, b"")

    def __enter__(self) -> "BagFile":
        self._file = os.fdopen(open_inside(self.root, self.path), "rb", buffering=0)
        self.nbytes = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def parse(self, fetch: Fetch, at: int, channels: Mapping[int, Channel]) -> Record:
        """Return the record at ``at``; SourceError where there is none."""
        raise NotImplementedError

    def check_magic(self) -> None:
        """Raise SourceError unless the file begins as its format does."""
        raise NotImplementedError

    def fetch(self, at: int, nbytes: int) -> bytes:
        """Read bytes of the file; fewer at its end."""
        try:
            return os.pread(self._file.fileno(), nbytes, at)
        except (OSError, OverflowError) as error:
            raise SourceError(
                f"expected a readable file, found: {error}; check the disk", Reason.IO, file=self.path
            ) from error

    def contents(self) -> Contents:
        """Walk the file; what ends the walk early is its ``problem``, and what came before is kept."""
        self.check_magic()
        found, chunks = Contents(), list[_Pending]()
        try:
            self._walk(found, chunks)
        except SourceError as error:
            found.problem = error
        for chunk in chunks:
            self._settle(chunk, found)
        self._find_channels(chunks, found)
        return found

    def _walk(self, found: Contents, chunks: "list[_Pending]") -> None:
        """Follow the records of the file. Indexes that follow a chunk are its; those of the last chunk may be cut, and do not count."""
        at = self.start
        while at < self.nbytes:
            try:
                record = self.parse(self.fetch, at, found.channels)
                if record.stop > self.nbytes or record.stop <= at:
                    raise self.cut(at)
            except SourceError:
                if chunks and chunks[-1].stop == at:
                    chunks[-1].entries.clear()
                raise
            if record.kind == "end":
                return
            _take(record, at, found, chunks)
            at = record.stop
        if self.ends:
            raise self.cut(at)

    def _settle(self, pending: "_Pending", found: Contents) -> None:
        """Take a chunk's index, or walk the chunk where it has none."""
        if not pending.entries:
            self._walk_chunk(pending.at, found)
        for record in pending.entries:
            for log_ns, offset in record.entries:
                found.add(record.channel, log_ns, pending.at, offset)

    def _walk_chunk(self, chunk: int, found: Contents) -> None:
        try:
            for at, record in self._records_in(chunk, found):
                if record.kind == "message":
                    found.add(record.channel, record.log_ns, chunk, at)
        except SourceError as error:
            found.problem = found.problem or error

    def _records_in(self, chunk: int, found: Contents) -> Iterator[tuple[int, Record]]:
        """Yield the records of a chunk; channels that it describes are taken in passing."""
        data = self._unpacked(chunk)
        at = 0
        while at < len(data):
            record = self.parse(_slicer(data), at, found.channels)
            if record.stop > len(data) or record.stop <= at:
                raise self.cut(at)
            if record.described is not None:
                found.channels.setdefault(record.channel, record.described)
            yield at, record
            at = record.stop

    def _find_channels(self, chunks: "list[_Pending]", found: Contents) -> None:
        """Look into chunks for channels that nothing outside describes: those of a file that was never closed."""
        for chunk in chunks:
            if found.places.keys() <= found.channels.keys():
                return
            try:
                for _ in self._records_in(chunk.at, found):
                    pass
            except SourceError as error:
                found.problem = found.problem or error

    def read(self, channel: int, chunk: int, offset: int, nbytes: int = 0) -> bytes:
        """Return a message, or its first ``nbytes``; SourceError where it is not there. The last unpacked chunk is held."""
        fetch = self.fetch if chunk == OUTSIDE else _slicer(self._unpacked(chunk))
        record = self.parse(fetch, offset, {})
        if record.kind != "message" or record.channel != channel:
            message = "expected a message where the index of its chunk says, found none; record it again"
            raise SourceError(message, Reason.DECODE, file=self.path)
        if record.nbytes > MAX_MESSAGE_NBYTES:
            raise too_large(f"a message of at most {MAX_MESSAGE_NBYTES} bytes", record.nbytes, self.path)
        wanted = min(nbytes or record.nbytes, record.nbytes)
        data = fetch(record.data_at, wanted)
        if len(data) < wanted:
            raise self.cut(record.data_at)
        return data

    def _unpacked(self, chunk: int) -> bytes:
        if self._held[0] != chunk:
            self._held = (OUTSIDE, b"")  # before the next one is unpacked
            record = self.parse(self.fetch, chunk, {})
            if record.kind != "chunk":
                raise self.cut(chunk)
            if max(record.nbytes, record.unpacked_nbytes) > MAX_CHUNK_NBYTES:
                largest = max(record.nbytes, record.unpacked_nbytes)
                raise too_large(f"chunks of at most {MAX_CHUNK_NBYTES} bytes", largest, self.path)
            packed = self.fetch(record.data_at, record.nbytes)
            if len(packed) < record.nbytes:
                raise self.cut(chunk)
            data = unpack(packed, record.codec, record.unpacked_nbytes, self.path)
            if record.crc32 and zlib.crc32(data) != record.crc32:
                message = "expected a chunk with its checksum, found other bytes; download or record it again"
                raise SourceError(message, Reason.DECODE, file=self.path)
            self._held = (chunk, data)
        return self._held[1]

    def cut(self, at: int) -> SourceError:
        """Return the error of a file that ends, or cannot be followed, at ``at``."""
        message = f"expected a whole file, found that it ends or breaks at byte {at} of {self.nbytes}; what lies before is read"
        return SourceError(message, Reason.TRUNCATED, file=self.path)


@dataclass(slots=True)
class _Pending:
    """A chunk whose index may follow."""

    at: int
    stop: int
    """Place after it and its index so far."""
    entries: list[Record] = field(default_factory=list)


def _take(record: Record, at: int, found: Contents, chunks: list[_Pending]) -> None:
    if record.kind == "chunk":
        chunks.append(_Pending(at, record.stop))
    elif record.kind == "index" and chunks and chunks[-1].stop == at:
        chunks[-1].entries.append(record)
        chunks[-1].stop = record.stop
    elif record.described is not None:
        found.channels[record.channel] = record.described
    elif record.kind == "message":
        found.add(record.channel, record.log_ns, OUTSIDE, at)


def _slicer(data: bytes) -> Fetch:
    return lambda at, nbytes: data[at : at + nbytes]


def too_large(expected: str, found: int, path: str) -> SourceError:
    """Return the error of something that is larger than any recorder writes."""
    return SourceError(f"expected {expected}, found {found}; check the file", Reason.TOO_LARGE, file=path)


def unpack(data: bytes, codec: str, nbytes: int, path: str) -> bytes:
    """Unpack a chunk to exactly ``nbytes`` and never to more; SourceError where it holds more, less, or no such thing."""
    if not codec:
        return data
    if codec not in ("bz2", "lz4", "zstd"):
        message = f"expected chunks packed by bz2, lz4 or zstd, found {codec[:20]!r}; record it again"
        raise SourceError(message, Reason.UNSUPPORTED, file=path)
    out = unpack_some(data, codec, nbytes + 1, path)
    if len(out) != nbytes:
        found = "more" if len(out) > nbytes else f"{len(out)}"
        raise SourceError(
            f"expected {nbytes} bytes in a chunk, found {found}; check the file", Reason.DECODE, file=path
        )
    return out


def unpack_some(data: bytes, codec: str, limit_nbytes: int, path: str) -> bytes:
    """Unpack at most ``limit_nbytes`` of a stream."""
    import pyarrow as pa  # its codecs are streams: they unpack no more than is asked for

    try:
        with pa.CompressedInputStream(pa.BufferReader(data), codec) as stream:
            return bytes(stream.read(limit_nbytes))
    except (OSError, pa.ArrowException) as error:
        message = f"expected a chunk packed by {codec}, found: {str(error)[:80]}; download or record it again"
        raise SourceError(message, Reason.DECODE, file=path) from error
