"""Records of MCAP files: https://mcap.dev/spec."""

import struct
from collections.abc import Mapping

from pipeline.readers.bag_files import MAX_HEADER_NBYTES, MAX_INDEX_NBYTES, BagFile, Channel, Fetch, Record
from schemas.errors import Reason, SourceError

MAGIC = b"\x89MCAP0\r\n"
_FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _INDEX = 2, 3, 4, 5, 6, 7
_HEAD = 9
"""Bytes of a record before its content: what it is, and its size."""
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_CHUNK_HEAD = struct.Struct("<QQQI")
TEXTUAL = ("ros2msg", "ros1msg")
"""Encodings of schemas that are texts as in .msg files."""


class McapFile(BagFile):
    """A ``.mcap``."""

    start = len(MAGIC)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._schemas: dict[int, tuple[str, str]] = {}

    def check_magic(self) -> None:
        """Raise SourceError unless the file begins as MCAP does."""
        head = self.fetch(0, len(MAGIC))
        if head != MAGIC:
            reason = Reason.TRUNCATED if MAGIC.startswith(head) else Reason.UNSUPPORTED
            raise SourceError(f"expected an MCAP file, found {head!r}; download it again", reason, file=self.path)

    def parse(self, fetch: Fetch, at: int, channels: Mapping[int, Channel]) -> Record:
        """Return the record at ``at``: a byte that says what it is, its size, its content."""
        head = fetch(at, _HEAD + _MESSAGE_HEAD.size)
        if len(head) < _HEAD:
            raise self.cut(at)
        op, size = head[0], int.from_bytes(head[1:_HEAD], "little")
        content, stop = at + _HEAD, at + _HEAD + size
        if op == _MESSAGE:
            if size < _MESSAGE_HEAD.size or len(head) < _HEAD + _MESSAGE_HEAD.size:
                raise self.cut(at)
            channel, _, log_ns, _ = _MESSAGE_HEAD.unpack_from(head, _HEAD)
            data_at = content + _MESSAGE_HEAD.size
            return Record("message", stop, data_at, stop - data_at, channel, log_ns)
        if op == _CHUNK:
            return self._chunk(fetch, content, stop)
        if op in (_SCHEMA, _CHANNEL, _INDEX):
            if size > (MAX_INDEX_NBYTES if op == _INDEX else MAX_HEADER_NBYTES):
                raise self.cut(at)
            data = fetch(content, size)
            if len(data) < size:
                raise self.cut(at)
            fields = _Fields(data, self, at)
            if op == _INDEX:
                return Record("index", stop, channel=fields.number(2), entries=fields.entries())
            return self._schema(fields, stop) if op == _SCHEMA else self._channel(fields, stop)
        return Record("end", stop + len(MAGIC)) if op == _FOOTER else Record("other", stop)

    def _chunk(self, fetch: Fetch, content: int, stop: int) -> Record:
        head = fetch(content, _CHUNK_HEAD.size + 4)
        if len(head) < _CHUNK_HEAD.size + 4:
            raise self.cut(content)
        _, _, unpacked, crc32 = _CHUNK_HEAD.unpack_from(head)
        length = int.from_bytes(head[-4:], "little")
        at = content + len(head)
        codec = fetch(at, min(length, 64)).decode("utf-8", "replace")
        nbytes = int.from_bytes(fetch(at + length, 8), "little")
        data_at = at + length + 8
        if data_at + nbytes > stop:
            raise self.cut(content)
        return Record("chunk", stop, data_at, nbytes, codec=codec, unpacked_nbytes=unpacked, crc32=crc32)

    def _schema(self, fields: "_Fields", stop: int) -> Record:
        number, name, encoding = fields.number(2), fields.text(), fields.text()
        self._schemas[number] = name, fields.text() if encoding in TEXTUAL else ""
        return Record("other", stop)

    def _channel(self, fields: "_Fields", stop: int) -> Record:
        number, schema, topic, encoding = fields.number(2), fields.number(2), fields.text(), fields.text()
        name, definition = self._schemas.get(schema, ("", ""))
        return Record("channel", stop, channel=number, described=Channel(topic, name, definition, encoding))


class _Fields:
    """Content of a record, read from its beginning."""

    def __init__(self, data: bytes, file: McapFile, place: int) -> None:
        self.data, self.at, self.file, self.place = data, 0, file, place

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if nbytes > len(self.data) - self.at:
            raise self.file.cut(self.place)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, nbytes: int) -> int:
        """Return the next whole number."""
        return int.from_bytes(self.take(nbytes), "little")

    def text(self) -> str:
        """Return the next text, which its size comes before."""
        return self.take(self.number(4)).decode("utf-8", "replace")

    def entries(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of 64-bit numbers, which their size in bytes comes before."""
        data = self.take(self.number(4))
        if len(data) % 16:
            raise self.file.cut(self.place)
        return tuple(struct.iter_unpack("<QQ", data))
