"""TFRecord frames and the ``tf.train.Example`` inside them, read without TensorFlow: bytes in, arrays out.

Framing: https://www.tensorflow.org/tutorials/load_data/tfrecord; messages: tensorflow/core/example/{example,feature}.proto;
wire format: https://protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Callable, Iterator, Mapping

import crc32c
import numpy as np
from jaxtyping import Float32, Int64

from schemas.errors import Reason, SourceError

HEADER_NBYTES = 12
"""Length of the payload (uint64) and its masked crc32c (uint32), little endian."""
FOOTER_NBYTES = 4
"""Masked crc32c of the payload."""
MAX_PAYLOAD_NBYTES = 2**31 - 1
"""Protobuf's own limit of a message."""
MAX_KEY_NBYTES = 2**10
MAX_FEATURES = 2**14
"""Features of one Example; real ones have tens."""

BYTES, FLOAT, INT64 = 1, 2, 3
"""Field numbers of ``Feature``'s lists."""

Fetch = Callable[[int, int], bytes | memoryview]
"""``(offset, nbytes) -> bytes``, possibly fewer at the end."""
Extent = tuple[int, int]
"""``[start, stop)`` in a payload."""

_HEAD_NBYTES = 20
"""Longest tag and length: two varints of ten bytes."""


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the checksum that TFRecord stores: crc32c, rotated and shifted, since crcs of crcs are weak.

    >>> hex(masked_crc32c(b"123456789"))  # crc32c e3069283, RFC 3720 B.4
    '0xc78ab0e5'
    """
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def payload_nbytes(header: bytes | memoryview, left_nbytes: int) -> int:
    """Return the length that a record's header gives, checked against its crc and the bytes that are left.

    Parameters
    ----------
    header
        The first 12 bytes of the record.
    left_nbytes
        Bytes of the file from the record's start on.
    """
    if len(header) < HEADER_NBYTES:
        message = f"expected a record header of {HEADER_NBYTES} bytes, found {len(header)}; download the file again"
        raise SourceError(message, Reason.TRUNCATED)
    nbytes, crc = struct.unpack("<QI", header[:HEADER_NBYTES])
    found = masked_crc32c(header[:8])
    if crc != found:
        message = f"expected a record header with checksum {crc:08x}, found {found:08x}; download the file again"
        raise SourceError(message, Reason.DECODE)
    if nbytes > MAX_PAYLOAD_NBYTES:
        message = f"expected a record of at most {MAX_PAYLOAD_NBYTES} bytes, found {nbytes}; check the file"
        raise SourceError(message, Reason.TOO_LARGE)
    if HEADER_NBYTES + nbytes + FOOTER_NBYTES > left_nbytes:
        message = (
            f"expected a record of {nbytes} bytes, found {left_nbytes - HEADER_NBYTES} left; download the file again"
        )
        raise SourceError(message, Reason.TRUNCATED)
    return int(nbytes)


def check_payload(payload: bytes | memoryview, footer: bytes | memoryview) -> None:
    """Raise SourceError unless ``footer`` is the checksum of ``payload``."""
    stored, found = int.from_bytes(footer, "little"), masked_crc32c(payload)
    if stored != found:
        message = f"expected a record with checksum {stored:08x}, found {found:08x}; download the file again"
        raise SourceError(message, Reason.DECODE)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the varint at ``at`` and where the next byte is; negative int64 come as two's complement of 64 bits."""
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise SourceError("expected a whole number, found its beginning; download the file again", Reason.DECODE)
        octet = data[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value & (2**64 - 1), at + place + 1
    raise SourceError("expected a number of at most 10 bytes, found more; download the file again", Reason.DECODE)


def _fields(fetch: Fetch, extent: Extent) -> Iterator[tuple[int, int, Extent]]:
    """Yield ``(field number, wire type, extent of the value)`` of a message; what a length-delimited field holds is skipped."""
    at, end = extent
    while at < end:
        head = fetch(at, min(_HEAD_NBYTES, end - at))
        tag, used = read_varint(head, 0)
        number, wire = tag >> 3, tag & 7
        if wire == 2:
            nbytes, used = read_varint(head, used)
            start = at + used
        elif wire == 0:
            _, stop = read_varint(head, used)
            start, nbytes = at + used, stop - used
        elif wire in (1, 5):
            start, nbytes = at + used, 8 if wire == 1 else 4
        else:
            raise SourceError(f"expected a protobuf message, found wire type {wire}; check the file", Reason.DECODE)
        if nbytes > end - start or not number:
            raise SourceError("expected a protobuf message, found a field past its end; check the file", Reason.DECODE)
        yield number, wire, (start, start + nbytes)
        at = start + nbytes


def find_features(fetch: Fetch, nbytes: int) -> dict[str, Extent]:
    """Return ``key -> extent of its Feature`` of an Example of ``nbytes`` bytes, of which only keys and lengths are fetched.

    So the index of a file of gigabytes reads some hundred bytes of each feature, and no image.
    """
    found: dict[str, Extent] = {}
    for number, wire, features in _fields(fetch, (0, nbytes)):
        if (number, wire) != (1, 2):
            continue
        for entry_number, entry_wire, entry in _fields(fetch, features):
            if (entry_number, entry_wire) == (1, 2):
                key, extent = _entry(fetch, entry)
                found[key] = extent
        if len(found) > MAX_FEATURES:
            message = f"expected at most {MAX_FEATURES} features, found {len(found)}; check the file"
            raise SourceError(message, Reason.TOO_LARGE)
    return found


def _entry(fetch: Fetch, entry: Extent) -> tuple[str, Extent]:
    key, value = b"", (entry[1], entry[1])
    for number, wire, (start, stop) in _fields(fetch, entry):
        if (number, wire) == (1, 2):
            if stop - start > MAX_KEY_NBYTES:
                message = f"expected a key of at most {MAX_KEY_NBYTES} bytes, found {stop - start}; check the file"
                raise SourceError(message, Reason.TOO_LARGE)
            key = bytes(fetch(start, stop - start))
        elif (number, wire) == (2, 2):
            value = (start, stop)
    return key.decode("utf-8", "replace"), value


def parse_example(payload: bytes | memoryview) -> Mapping[str, memoryview]:
    """Return ``key -> Feature`` of a whole Example, each Feature still encoded, nothing copied."""
    view = memoryview(payload)
    extents = find_features(lambda at, nbytes: view[at : at + nbytes], len(view))
    return {key: view[start:stop] for key, (start, stop) in extents.items()}


def _lists(feature: bytes | memoryview, kind: int) -> Iterator[tuple[int, memoryview]]:
    """Yield ``(wire type, value)`` of every element, or packed run of elements, of a Feature's list."""
    view = memoryview(feature)

    def fetch(at: int, nbytes: int) -> memoryview:
        return view[at : at + nbytes]

    for number, wire, (start, stop) in _fields(fetch, (0, len(view))):
        if number != kind or wire != 2:
            name = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}.get(number, f"field {number}")
            wanted = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}[kind]
            message = f"expected a {wanted}, found a {name}; check the file against its features.json"
            raise SourceError(message, Reason.BAD_METADATA)
        for value_number, value_wire, (first, last) in _fields(fetch, (start, stop)):
            if value_number == 1:
                yield value_wire, view[first:last]


def byte_values(feature: bytes | memoryview) -> list[memoryview]:
    """Return the strings of a ``bytes_list``: encoded images, texts."""
    return [value for wire, value in _lists(feature, BYTES) if wire == 2]


def float_values(feature: bytes | memoryview) -> Float32[np.ndarray, " n"]:
    """Return the numbers of a ``float_list``, packed or not."""
    parts = [value for wire, value in _lists(feature, FLOAT) if wire in (2, 5)]
    if any(len(part) % 4 for part in parts):
        raise SourceError("expected floats of 4 bytes, found a remainder; check the file", Reason.DECODE)
    return np.frombuffer(b"".join(parts), "<f4").astype(np.float32)


def int64_values(feature: bytes | memoryview) -> Int64[np.ndarray, " n"]:
    """Return the numbers of an ``int64_list``, packed or not, negative ones as two's complement."""
    return decode_varints(b"".join(value for wire, value in _lists(feature, INT64) if wire in (0, 2)))


def decode_varints(data: bytes | memoryview) -> Int64[np.ndarray, " n"]:
    """Decode varints that lie one after the other.

    >>> decode_varints(bytes([1, 0x96, 1]) + bytes([255] * 9 + [1])).tolist()
    [1, 150, -1]
    """
    octets = np.frombuffer(data, np.uint8)
    is_last = octets < 0x80
    if is_last.all():  # flags and small numbers, which is what episodes hold
        return octets.astype(np.int64)
    stops = np.flatnonzero(is_last) + 1
    if not len(stops) or stops[-1] != len(octets):
        raise SourceError("expected whole numbers, found the beginning of one; check the file", Reason.DECODE)
    starts = np.concatenate([[0], stops[:-1]])
    longest = int((stops - starts).max())
    if longest > 10:
        raise SourceError("expected numbers of at most 10 bytes, found more; check the file", Reason.DECODE)
    values = np.zeros(len(stops), np.uint64)
    for place in range(longest):
        has = starts + place < stops
        values[has] |= (octets[starts[has] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values.view(np.int64)
