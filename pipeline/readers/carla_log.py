"""The packets of CARLA's binary recorder logs (``client.start_recorder``), one after the other.

Little endian: a header, then packets of a one-byte kind, a four-byte size and that many bytes. See CARLA's "Recorder Binary File Format".
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from schemas.errors import Reason, SourceError

MAGIC = "CARLA_RECORDER"
MAX_PACKET_NBYTES = 2**26
"""Greatest size of a packet that is looked into: 2 million actors' positions."""

FRAME_START, FRAME_END, EVENT_ADD, EVENT_DEL, EVENT_PARENT, COLLISION, POSITION, STATE = range(8)
ANIM_VEHICLE, ANIM_WALKER, VEHICLE_LIGHT, SCENE_LIGHT, KINEMATICS, BOUNDING_BOX, PLATFORM_TIME = range(8, 15)
PHYSICS_CONTROL, TRAFFIC_LIGHT_TIME, TRIGGER_VOLUME = range(15, 18)

OTHER, VEHICLE, WALKER, LIGHT, SIGN, SENSOR = range(6)
"""Types of actors."""

_BOX = [("id", "<u4"), ("origin", "<f4", 3), ("extent", "<f4", 3)]
ROWS = {
    EVENT_DEL: np.dtype([("id", "<u4")]),
    EVENT_PARENT: np.dtype([("id", "<u4"), ("parent", "<u4")]),
    COLLISION: np.dtype(
        [("id", "<u4"), ("first", "<u4"), ("second", "<u4"), ("first_is_hero", "?"), ("second_is_hero", "?")]
    ),
    POSITION: np.dtype([("id", "<u4"), ("location", "<f4", 3), ("rotation", "<f4", 3)]),
    STATE: np.dtype([("id", "<u4"), ("is_frozen", "?"), ("elapsed_s", "<f4"), ("state", "u1")]),
    ANIM_VEHICLE: np.dtype(
        [("id", "<u4"), ("steer", "<f4"), ("throttle", "<f4"), ("brake", "<f4"), ("hand_brake", "?"), ("gear", "<i4")]
    ),
    ANIM_WALKER: np.dtype([("id", "<u4"), ("speed", "<f4")]),
    VEHICLE_LIGHT: np.dtype([("id", "<u4"), ("state", "<u4")]),
    KINEMATICS: np.dtype([("id", "<u4"), ("velocity", "<f4", 3), ("angular_velocity", "<f4", 3)]),
    BOUNDING_BOX: np.dtype(_BOX),
    TRAFFIC_LIGHT_TIME: np.dtype([("id", "<u4"), ("green_s", "<f4"), ("yellow_s", "<f4"), ("red_s", "<f4")]),
    TRIGGER_VOLUME: np.dtype(_BOX),
}
"""Packets that are a u16 count and as many rows. Rotations are roll, pitch, yaw; lengths cm, angles degrees, velocities m/s."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a log says of itself."""

    version: int
    date_s: int
    town: str


@dataclass(frozen=True, slots=True)
class Added:
    """An actor that enters the simulation."""

    id: int
    kind: int
    location_cm: tuple[float, float, float]
    rotation_deg: tuple[float, float, float]
    blueprint: str
    attributes: dict[str, str]


def read_header(file: BinaryIO) -> Header:
    """Read the header and leave ``file`` at the first packet; SourceError where it is no recorder log."""
    start = file.read(2)
    magic = _read_text(file, 64) if len(start) == 2 else ""
    if magic != MAGIC:
        raise SourceError(
            f"expected {MAGIC} at the beginning, found {magic[:20]!r}; give a recorder log", Reason.UNSUPPORTED
        )
    date = file.read(8)
    town = _read_text(file, 1024)
    if len(date) < 8 or not town:
        raise SourceError("expected date and map in the header, found its end; record it again", Reason.TRUNCATED)
    return Header(int.from_bytes(start, "little"), int.from_bytes(date, "little", signed=True), town.rpartition("/")[2])


def _read_text(file: BinaryIO, limit: int) -> str:
    size = int.from_bytes(file.read(2), "little")
    return file.read(size).decode("utf-8", "replace") if size <= limit else ""


def packets(file: BinaryIO, nbytes: int, wanted: frozenset[int]) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, content) of the ``wanted`` packets from the current position on; others are passed over by their size.

    A last packet that is cut off, as a killed simulator leaves it, ends the log.
    """
    place = file.tell()
    while len(head := file.read(5)) == 5:
        kind, size = struct.unpack("<BI", head)
        place += 5 + size
        if place > nbytes:
            return
        if kind not in wanted:
            file.seek(place)
            continue
        if size > MAX_PACKET_NBYTES:
            raise SourceError(
                f"expected packets of at most {MAX_PACKET_NBYTES} bytes, found {size}; check the log", Reason.TOO_LARGE
            )
        content = file.read(size)
        if len(content) < size:
            return
        yield kind, content


def frame_start(content: bytes) -> tuple[int, float, float]:
    """Return a frame's number, duration and time since the start, s."""
    if len(content) < 24:
        raise SourceError(f"expected 24 bytes at the start of a frame, found {len(content)}; check the log")
    number, duration_s, elapsed_s = struct.unpack_from("<Qdd", content)
    return number, duration_s, elapsed_s


def rows_of(kind: int, content: bytes) -> np.ndarray:
    """Return a packet's rows as a structured array; SourceError where its size and count contradict each other."""
    dtype = ROWS[kind]
    count = int.from_bytes(content[:2], "little")
    if len(content) < 2 + count * dtype.itemsize:
        raise SourceError(
            f"expected {count} rows of {dtype.itemsize} bytes in packet {kind}, found {len(content)} bytes; check the log"
        )
    return np.frombuffer(content, dtype, count, 2)


def added_actors(content: bytes) -> list[Added]:
    """Return the actors that an EventAdd packet brings."""
    cursor = _Cursor(content)
    actors = []
    for _ in range(cursor.take("<H")[0]):
        number, kind, *pose = cursor.take("<IB6f")
        cursor.take("<I")  # number of the blueprint, which means nothing outside of that simulator
        blueprint = cursor.text()
        attributes = {}
        for _ in range(cursor.take("<H")[0]):
            cursor.take("<B")
            name = cursor.text()
            attributes[name] = cursor.text()
        location, rotation = tuple(pose[:3]), tuple(pose[3:])
        actors.append(Added(number, kind, location, rotation, blueprint, attributes))
    return actors


class _Cursor:
    """A place in a packet that moves on as fields are taken."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0

    def take(self, layout: str) -> tuple:
        try:
            values = struct.unpack_from(layout, self.content, self.place)
        except struct.error as error:
            raise SourceError(f"expected a whole EventAdd packet, found: {error}; check the log") from error
        self.place += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (size,) = self.take("<H")
        (value,) = self.take(f"<{size}s")
        return value.decode("utf-8", "replace")
