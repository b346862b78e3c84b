"""One ROS message: its stamp, its numbers and texts, out of ROS 1's serialisation or ROS 2's (CDR).

Formats: https://wiki.ros.org/msg (little-endian, packed) and OMG CDR as DDS-XTypes 1.3, 7.4.1 has it (PLAIN_CDR: each number aligned to its
size from the end of the four bytes of encapsulation). Arrays are views of the message, nothing is copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.readers.ros_types import TEXT, Field
from schemas.errors import Reason, SourceError

Value = np.ndarray | str | tuple[str, ...]
"""What a field holds: numbers, a text, or texts."""
SKIPPED = ("std_msgs/Header", "std_msgs/MultiArrayLayout", "builtin_interfaces/Time", "builtin_interfaces/Duration")
"""Types in a message whose numbers are no values of a signal."""
HEAD_NBYTES = 12
"""Where the stamp of a header that comes first ends, in both serialisations."""


def read_values(data: bytes, fields: Sequence[Field], *, is_ros1: bool) -> dict[str, Value]:
    """Return the values of a message by dotted names: numbers, arrays of them, texts and arrays of these.

    A message in it that is nothing but numbers of one type is one array: ``position`` is x, y, z. Arrays of messages are skipped.
    SourceError (decode) where the message does not fit its type.
    """
    cursor = _Cursor.of(data, is_ros1)
    out: dict[str, Value] = {}
    _walk(cursor, fields, "", out)
    return out


def has_stamp(fields: Sequence[Field]) -> bool:
    """Return whether a message begins with a header."""
    return bool(fields) and fields[0].type == "std_msgs/Header" and not fields[0].is_array


def read_stamp_ns(head: bytes, *, is_ros1: bool) -> int:
    """Return the stamp of a message that begins with a header, from its first :data:`HEAD_NBYTES`; 0 where it was never set."""
    if len(head) < HEAD_NBYTES:
        raise _cut(len(head))
    order = "<" if is_ros1 or head[1] == 1 else ">"
    seconds, nanoseconds = np.frombuffer(head, f"{order}u4", 2, 4).tolist()
    return int(seconds) * 10**9 + int(nanoseconds)


def joined_names(fields: Sequence[Field], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield name and names of elements of each message in a message that is one array of numbers."""
    if _is_vector(fields):
        yield prefix.rstrip("."), tuple(field.name for field in fields)
        return
    for field in fields:
        if field.fields and not field.is_array and field.type not in SKIPPED:
            yield from joined_names(field.fields, f"{prefix}{field.name}.")


def _is_vector(fields: Sequence[Field]) -> bool:
    return len(fields) > 1 and all(f.kind == fields[0].kind not in ("", TEXT) and not f.is_array for f in fields)


@dataclass(slots=True)
class _Cursor:
    """A place in a message."""

    data: memoryview
    order: str
    is_aligned: bool
    at: int = 0

    @staticmethod
    def of(data: bytes, is_ros1: bool) -> "_Cursor":
        if is_ros1:
            return _Cursor(memoryview(data), "<", False)
        if data[:2] not in (b"\0\0", b"\0\1") or len(data) < 4:
            message = f"expected a message in plain CDR, found one that begins with {data[:4].hex()!r}; record it again"
            raise SourceError(message, Reason.UNSUPPORTED)
        return _Cursor(memoryview(data)[4:], "<" if data[1] else ">", True)

    def numbers(self, kind: str, count: int) -> np.ndarray:
        """Read ``count`` numbers."""
        dtype = np.dtype(self.order + kind)
        if count == 0:
            return np.zeros(0, dtype)
        if self.is_aligned:
            self.at += -self.at % dtype.itemsize
        if count * dtype.itemsize > len(self.data) - self.at:
            raise _cut(len(self.data))
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += count * dtype.itemsize
        return found

    def count(self) -> int:
        """Read a length, which is at most that of what is left."""
        count = int(self.numbers("u4", 1)[0])
        if count > len(self.data) - self.at:
            raise _cut(len(self.data))
        return count

    def text(self) -> str:
        """Read a text."""
        count = self.count()
        start, stop = self.at, self.at + count
        self.at = stop
        return bytes(self.data[start:stop]).rstrip(b"\0").decode("utf-8", "replace")


def _cut(nbytes: int) -> SourceError:
    message = (
        f"expected a message that fits its type, found one of {nbytes} bytes that ends within a field; record it again"
    )
    return SourceError(message, Reason.DECODE)


def _walk(cursor: _Cursor, fields: Sequence[Field], prefix: str, out: dict[str, Value] | None) -> None:
    """Read a message; its values go to ``out``, if there is one."""
    if not fields and cursor.is_aligned:
        cursor.numbers("u1", 1)  # an empty struct has a member that no definition names
    if _is_vector(fields):
        values = cursor.numbers(fields[0].kind, len(fields))
        if out is not None:
            out[prefix.rstrip(".")] = values
        return
    for field in fields:
        count = (field.count or cursor.count()) if field.is_array else 1
        kept = out if field.type not in SKIPPED else None
        if field.kind:
            value = _plain(cursor, field, count)
            if kept is not None:
                kept[prefix + field.name] = value
        elif field.is_array:
            _skip(cursor, field.fields, count)
        else:
            _walk(cursor, field.fields, f"{prefix}{field.name}.", kept)


def _plain(cursor: _Cursor, field: Field, count: int) -> Value:
    """Read a number, a text, or an array of either."""
    if field.kind == TEXT:
        texts = tuple(cursor.text() for _ in range(count))
        return texts if field.is_array else texts[0]
    numbers = cursor.numbers(field.kind, count)
    return numbers if field.is_array else numbers.reshape(())


def _skip(cursor: _Cursor, fields: Sequence[Field], count: int) -> None:
    for _ in range(count):
        before = cursor.at
        _walk(cursor, fields, "", None)
        if cursor.at == before:
            raise _cut(len(cursor.data))  # a message of no bytes, any number of times
