"""TFRecord and ``tf.train.Example`` written byte by byte, from the protobuf specification and none of the code under test."""

import struct
from collections.abc import Mapping, Sequence

import google_crc32c

Values = Sequence[bytes] | Sequence[float] | Sequence[int]


def varint(value: int) -> bytes:
    value &= 2**64 - 1  # two's complement
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def delimited(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def bytes_list(values: Sequence[bytes]) -> bytes:
    return delimited(1, b"".join(delimited(1, value) for value in values))


def float_list(values: Sequence[float], *, packed: bool = True) -> bytes:
    parts = [struct.pack("<f", value) for value in values]
    if not packed:
        return delimited(2, b"".join(varint(1 << 3 | 5) + part for part in parts))
    return delimited(2, delimited(1, b"".join(parts)) if parts else b"")


def int64_list(values: Sequence[int], *, packed: bool = True) -> bytes:
    parts = [varint(value) for value in values]
    if not packed:
        return delimited(3, b"".join(varint(1 << 3) + part for part in parts))
    return delimited(3, delimited(1, b"".join(parts)) if parts else b"")


def example(features: Mapping[str, bytes]) -> bytes:
    """Encode an Example of encoded lists."""
    entries = (delimited(1, delimited(1, key.encode()) + delimited(2, value)) for key, value in features.items())
    return delimited(1, b"".join(entries))


def mask(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", mask(google_crc32c.value(part))) for part in (length, payload)]
    return length + crcs[0] + payload + crcs[1]
