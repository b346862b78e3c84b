"""Records of ROS 1 bags, version 2.0: http://wiki.ros.org/Bags/Format/2.0."""

import struct
from collections.abc import Mapping

from pipeline.readers.bag_files import MAX_HEADER_NBYTES, MAX_INDEX_NBYTES, BagFile, Channel, Fetch, Record
from schemas.errors import Reason, SourceError

MAGIC = b"#ROSBAG V2.0\n"
_MESSAGE, _BAG, _INDEX, _CHUNK, _CONNECTION = 2, 3, 4, 5, 7
_CODECS = {"none": "", "bz2": "bz2", "lz4": "lz4"}


class Ros1File(BagFile):
    """A ``.bag``."""

    start = len(MAGIC)

    def check_magic(self) -> None:
        """Raise SourceError unless the file begins as a bag of version 2.0."""
        head = self.fetch(0, len(MAGIC))
        if head != MAGIC:
            reason = Reason.TRUNCATED if MAGIC.startswith(head) else Reason.UNSUPPORTED
            raise SourceError(f"expected a bag of version 2.0, found {head!r}; run rosbag fix", reason, file=self.path)

    def parse(self, fetch: Fetch, at: int, channels: Mapping[int, Channel]) -> Record:
        """Return the record at ``at``: a header of named fields, then data of a given size."""
        fields, data_at = self._header(fetch, at)
        nbytes = _number(fetch(data_at, 4), "<I", self, at)
        record = Record("other", data_at + 4 + nbytes, data_at + 4, nbytes)
        op = _number(fields.get("op", b""), "<B", self, at)
        if op == _BAG:  # it names the index at the end, once there is one
            self.ends = not any(fields.get("index_pos", b""))
        if op == _MESSAGE:
            channel, log_ns = _number(fields.get("conn", b""), "<I", self, at), self._time_ns(fields, at)
            return Record("message", record.stop, record.data_at, nbytes, channel, log_ns)
        if op == _CHUNK:
            name = fields.get("compression", b"none").decode("utf-8", "replace")
            size = _number(fields.get("size", b""), "<I", self, at)
            codec = _CODECS.get(name, name)
            return Record("chunk", record.stop, record.data_at, nbytes, codec=codec, unpacked_nbytes=size)
        if op == _INDEX:
            channel = _number(fields.get("conn", b""), "<I", self, at)
            return Record("index", record.stop, channel=channel, entries=self._entries(fetch, record))
        if op == _CONNECTION:
            return self._connection(fetch, record, fields, at)
        return record

    def _header(self, fetch: Fetch, at: int) -> tuple[dict[str, bytes], int]:
        nbytes = _number(fetch(at, 4), "<I", self, at)
        if nbytes > MAX_HEADER_NBYTES:
            raise self.cut(at)
        return self._fields(fetch(at + 4, nbytes), nbytes, at), at + 4 + nbytes

    def _fields(self, data: bytes, nbytes: int, at: int) -> dict[str, bytes]:
        """Return ``name=value`` fields, each after its size."""
        if len(data) < nbytes:
            raise self.cut(at)
        fields: dict[str, bytes] = {}
        place = 0
        while place < nbytes:
            size = _number(data[place : place + 4], "<I", self, at)
            name, sign, value = data[place + 4 : place + 4 + size].partition(b"=")
            if not sign or place + 4 + size > nbytes:
                raise self.cut(at)
            fields[name.decode("utf-8", "replace")] = value
            place += 4 + size
        return fields

    def _time_ns(self, fields: Mapping[str, bytes], at: int) -> int:
        value = fields.get("time", b"")
        if len(value) != 8:
            raise self.cut(at)
        seconds, nanoseconds = struct.unpack("<II", value)
        return int(seconds) * 10**9 + int(nanoseconds)

    def _entries(self, fetch: Fetch, record: Record) -> tuple[tuple[int, int], ...]:
        if record.nbytes > MAX_INDEX_NBYTES or record.nbytes % 12:
            raise self.cut(record.data_at)
        data = fetch(record.data_at, record.nbytes)
        if len(data) < record.nbytes:
            raise self.cut(record.data_at)
        return tuple((seconds * 10**9 + ns, offset) for seconds, ns, offset in struct.iter_unpack("<III", data))

    def _connection(self, fetch: Fetch, record: Record, fields: Mapping[str, bytes], at: int) -> Record:
        if record.nbytes > MAX_HEADER_NBYTES:
            raise self.cut(at)
        told = self._fields(fetch(record.data_at, record.nbytes), record.nbytes, at)
        topic, kind, text = (
            found.decode("utf-8", "replace")
            for found in (fields.get("topic", b""), told.get("type", b""), told.get("message_definition", b""))
        )
        channel = _number(fields.get("conn", b""), "<I", self, at)
        return Record("channel", record.stop, channel=channel, described=Channel(topic, kind, text, "ros1"))


def _number(data: bytes, kind: str, file: BagFile, at: int) -> int:
    if len(data) != struct.calcsize(kind):
        raise file.cut(at)
    return int(struct.unpack(kind, data)[0])
