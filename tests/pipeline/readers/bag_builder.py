"""Tiny bags, byte by byte as the formats' own pages have them: ROS 1, MCAP, and ROS 2 in SQLite; and messages to lie in them."""

import bz2
import sqlite3
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.pipeline.readers import builders

DEFINITIONS = {
    "std_msgs/String": "string data",
    "std_msgs/Float64MultiArray": "MultiArrayLayout layout\nfloat64[] data\n"
    + "=" * 80
    + "\nMSG: std_msgs/MultiArrayLayout\nMultiArrayDimension[] dim\nuint32 data_offset\n"
    + "=" * 80
    + "\nMSG: std_msgs/MultiArrayDimension\nstring label\nuint32 size\nuint32 stride",
    "sensor_msgs/JointState": "Header header # a comment\nstring[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort\n",
    "sensor_msgs/Image": "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\nuint8[] data\n",
    "sensor_msgs/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data\n",
    "geometry_msgs/PoseStamped": "std_msgs/Header header\ngeometry_msgs/Pose pose\n",
}
_HEADERS = {
    True: "=" * 80 + "\nMSG: std_msgs/Header\nuint32 seq\ntime stamp\nstring frame_id\n",
    False: "=" * 80 + "\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n"
    + "=" * 80 + "\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n",
}  # fmt: skip
_POSE = (
    "=" * 80 + "\nMSG: geometry_msgs/Pose\nPoint position\nQuaternion orientation\n"
    + "=" * 80 + "\nMSG: geometry_msgs/Point\nfloat64 x\nfloat64 y\nfloat64 z\n"
    + "=" * 80 + "\nMSG: geometry_msgs/Quaternion\nfloat64 x\nfloat64 y\nfloat64 z\nfloat64 w\n"
)  # fmt: skip


def definition(kind: str, is_ros1: bool) -> str:
    """Return a type's definition with those of types in it."""
    text = DEFINITIONS[kind]
    text += _HEADERS[is_ros1] if "eader header" in text else ""
    return text + _POSE if "PoseStamped" in kind else text


class Writer:
    """Serialises a message's fields: packed as in ROS 1, or aligned as in CDR."""

    def __init__(self, is_ros1: bool) -> None:
        self.is_ros1, self.out = is_ros1, bytearray() if is_ros1 else bytearray(b"\0\1\0\0")

    def put(self, kind: str, *values: float) -> "Writer":
        """Append numbers of one kind, as struct names it."""
        if not self.is_ros1 and values:
            self.out += bytes(-(len(self.out) - 4) % struct.calcsize(kind))
        self.out += struct.pack(f"<{len(values)}{kind}", *values)
        return self

    def text(self, value: str) -> "Writer":
        data = value.encode() + (b"" if self.is_ros1 else b"\0")
        self.put("I", len(data)).out.extend(data)
        return self

    def array(self, kind: str, values: Sequence[float]) -> "Writer":
        return self.put("I", len(values)).put(kind, *values)

    def data(self, value: bytes) -> "Writer":
        self.put("I", len(value)).out.extend(value)
        return self

    def header(self, stamp_ns: int, number: int = 0) -> "Writer":
        if self.is_ros1:
            self.put("I", number)
        return self.put("I", stamp_ns // 10**9, stamp_ns % 10**9).text("base")


@dataclass(frozen=True)
class Message:
    """One message of a topic."""

    topic: str
    kind: str
    log_ns: int
    data: bytes


def joints(is_ros1: bool, names: Sequence[str], position: Sequence[float], *, stamp_ns: int = 0) -> bytes:
    writer = Writer(is_ros1).header(stamp_ns).put("I", len(names))
    for name in names:
        writer.text(name)
    return bytes(writer.array("d", position).array("d", [-value for value in position]).array("d", []).out)


def numbers(is_ros1: bool, values: Sequence[float]) -> bytes:
    writer = Writer(is_ros1).put("I", 1).text("dim").put("I", len(values), len(values), 0)
    return bytes(writer.array("d", values).out)


def image(is_ros1: bool, frame: np.ndarray, encoding: str, *, padding: int = 0, stamp_ns: int = 0) -> bytes:
    height, width = frame.shape[:2]
    rows = [row.tobytes() + bytes([170] * padding) for row in frame]
    writer = Writer(is_ros1).header(stamp_ns).put("I", height, width).text(encoding).put("B", 0)
    return bytes(writer.put("I", len(rows[0])).data(b"".join(rows)).out)


def compressed(is_ros1: bool, data: bytes, format: str, *, stamp_ns: int = 0) -> bytes:
    return bytes(Writer(is_ros1).header(stamp_ns).text(format).data(data).out)


def pose(is_ros1: bool, position: Sequence[float], quat_xyzw: Sequence[float], *, stamp_ns: int = 0) -> bytes:
    return bytes(Writer(is_ros1).header(stamp_ns).put("d", *position).put("d", *quat_xyzw).out)


def text(is_ros1: bool, value: str) -> bytes:
    return bytes(Writer(is_ros1).text(value).out)


# -- ROS 1 -------------------------------------------------------------------------------------------------------------


def _fields(**values: bytes) -> bytes:
    pairs = [name.encode() + b"=" + value for name, value in values.items()]
    return b"".join(struct.pack("<I", len(pair)) + pair for pair in pairs)


def _record(data: bytes, **fields: bytes) -> bytes:
    header = _fields(**fields)
    return struct.pack("<I", len(header)) + header + struct.pack("<I", len(data)) + data


def _time(ns: int) -> bytes:
    return struct.pack("<II", ns // 10**9, ns % 10**9)


def _pack(data: bytes, codec: str) -> bytes:
    if codec == "bz2":
        return bz2.compress(data)
    return pa.compress(data, codec=codec, asbytes=True) if codec else data


def write_ros1(
    path: Path, messages: Sequence[Message], *, codec: str = "", per_chunk: int = 4, is_closed: bool = True
) -> Path:
    """Write a bag of version 2.0; one that ``is_closed`` not ends after its last chunk, as where the recorder was killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {message.topic: message.kind for message in messages}
    numbers_of = {topic: struct.pack("<I", number) for number, topic in enumerate(kinds)}
    connections = {
        topic: _record(
            _fields(topic=topic.encode(), type=kind.encode(), md5sum=b"0" * 32, message_definition=definition(kind, True).encode()),
            op=b"\7", conn=numbers_of[topic], topic=topic.encode(),
        )
        for topic, kind in kinds.items()
    }  # fmt: skip
    out, infos, seen = bytearray(), b"", set[str]()
    start = len(b"#ROSBAG V2.0\n") + 4096
    for first in range(0, len(messages), per_chunk):
        chunk, index = bytearray(), dict[str, bytearray]()
        for message in messages[first : first + per_chunk]:
            if message.topic not in seen:
                seen.add(message.topic)
                chunk += connections[message.topic]
            index.setdefault(message.topic, bytearray()).extend(_time(message.log_ns) + struct.pack("<I", len(chunk)))
            chunk += _record(message.data, op=b"\2", conn=numbers_of[message.topic], time=_time(message.log_ns))
        place = start + len(out)
        out += _record(
            _pack(bytes(chunk), codec),
            op=b"\5",
            compression=(codec or "none").encode(),
            size=struct.pack("<I", len(chunk)),
        )
        for topic, entries in index.items():
            count = struct.pack("<I", len(entries) // 12)
            out += _record(bytes(entries), op=b"\4", ver=struct.pack("<I", 1), conn=numbers_of[topic], count=count)
        counts = b"".join(numbers_of[topic] + struct.pack("<I", len(entries) // 12) for topic, entries in index.items())
        times = [message.log_ns for message in messages[first : first + per_chunk]]
        infos += _record(
            counts, op=b"\6", ver=struct.pack("<I", 1), chunk_pos=struct.pack("<Q", place), start_time=_time(min(times)),
            end_time=_time(max(times)), count=struct.pack("<I", len(index)),
        )  # fmt: skip
    header = _fields(
        op=b"\3", index_pos=struct.pack("<Q", (start + len(out)) * is_closed), conn_count=struct.pack("<I", len(kinds) * is_closed),
        chunk_count=struct.pack("<I", -(-len(messages) // per_chunk) * is_closed),
    )  # fmt: skip
    padding = 4096 - 8 - len(header)
    head = struct.pack("<I", len(header)) + header + struct.pack("<I", padding) + b" " * padding
    tail = b"".join(connections.values()) + infos if is_closed else b""
    path.write_bytes(b"#ROSBAG V2.0\n" + head + bytes(out) + tail)
    return path


# -- MCAP --------------------------------------------------------------------------------------------------------------

_MAGIC = b"\x89MCAP0\r\n"


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def _mcap(op: int, content: bytes) -> bytes:
    return bytes([op]) + struct.pack("<Q", len(content)) + content


def write_mcap(
    path: Path,
    messages: Sequence[Message],
    *,
    codec: str = "",
    per_chunk: int = 4,
    is_closed: bool = True,
    is_indexed: bool = True,
    encoding: str = "cdr",
) -> Path:
    """Write an MCAP file; ``per_chunk`` 0 writes no chunks, and one that ``is_closed`` not ends after its last message."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {message.topic: message.kind for message in messages}
    described = b""
    for number, (topic, kind) in enumerate(kinds.items(), 1):
        name = kind.replace("/", "/msg/")
        described += _mcap(
            3, struct.pack("<H", number) + _text(name) + _text("ros2msg") + _text(definition(kind, False))
        )
        described += _mcap(
            4, struct.pack("<HH", number, number) + _text(topic) + _text(encoding) + struct.pack("<I", 0)
        )
    channels = {topic: number for number, topic in enumerate(kinds, 1)}
    out = bytearray(_MAGIC + _mcap(1, _text("ros2") + _text("test")))
    out += described if not per_chunk else b""
    for first in range(0, len(messages), per_chunk or len(messages) or 1):
        own = messages[first : first + (per_chunk or len(messages))]
        body, index = bytearray(described if per_chunk and not first else b""), dict[str, bytes]()
        for number, message in enumerate(own, first):
            index[message.topic] = index.get(message.topic, b"") + struct.pack("<QQ", message.log_ns, len(body))
            head = struct.pack("<HIQQ", channels[message.topic], number, message.log_ns, message.log_ns)
            body += _mcap(5, head + message.data)
        if not per_chunk:
            out += body
            continue
        packed, times = _pack(bytes(body), codec), [message.log_ns for message in own]
        head = struct.pack("<QQQI", min(times), max(times), len(body), zlib.crc32(body)) + _text(codec)
        out += _mcap(6, head + struct.pack("<Q", len(packed)) + packed)
        for topic, entries in index.items() if is_indexed else ():
            out += _mcap(7, struct.pack("<HI", channels[topic], len(entries)) + entries)
    if is_closed:
        out += _mcap(15, bytes(4))
        summary = len(out)
        out += described + _mcap(2, struct.pack("<QQI", summary, 0, 0)) + _MAGIC
    path.write_bytes(out)
    return path


# -- SQLite ------------------------------------------------------------------------------------------------------------


def write_sqlite(folder: Path, messages: Sequence[Message], *, files: int = 1, has_definitions: bool = True) -> Path:
    """Write a folder of ROS 2, the messages over ``files`` databases one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {message.topic: message.kind for message in messages}
    names = [f"{folder.name}_{number}.db3" for number in range(files)]
    for own, name in zip(np.array_split(np.arange(len(messages)), files), names, strict=True):
        database = sqlite3.connect(folder / name)
        database.executescript(
            "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT NOT NULL, type TEXT NOT NULL, serialization_format TEXT NOT NULL,"
            "offered_qos_profiles TEXT NOT NULL);"
            "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER NOT NULL, timestamp INTEGER NOT NULL, data BLOB NOT NULL);"
            "CREATE TABLE message_definitions(id INTEGER PRIMARY KEY, topic_type TEXT NOT NULL, encoding TEXT NOT NULL,"
            "encoded_message_definition TEXT NOT NULL, type_description_hash TEXT NOT NULL);"
        )
        for number, (topic, kind) in enumerate(kinds.items(), 1):
            full = kind.replace("/", "/msg/")
            database.execute("INSERT INTO topics VALUES (?, ?, ?, 'cdr', '')", (number, topic, full))
            if has_definitions:
                row = (number, full, "ros2msg", definition(kind, False), "")
                database.execute("INSERT INTO message_definitions VALUES (?, ?, ?, ?, ?)", row)
        for place in own.tolist():
            row = (place + 1, [*kinds].index(messages[place].topic) + 1, messages[place].log_ns, messages[place].data)
            database.execute("INSERT INTO messages VALUES (?, ?, ?, ?)", row)
        database.commit()
        database.close()
    lines = ["rosbag2_bagfile_information:", "  version: 8", "  storage_identifier: sqlite3", "  relative_file_paths:"]
    lines += [f"    - {name}" for name in names] + [f"  message_count: {len(messages)}"]
    (folder / "metadata.yaml").write_text("\n".join(lines) + "\n")
    return folder


def write_bags(root: Path) -> Path:
    """Write one recording in each format: pictures, joints, poses, an instruction, and a type whose definition says little."""
    for is_ros1 in (True, False):
        messages = [Message("/task", "std_msgs/String", 10**9, text(is_ros1, "lift"))]
        for step in range(3):
            at_ns = 10**9 + 10**8 * step
            frame = np.full((4, 5, 3), 20 * step, np.uint8)
            png = compressed(is_ros1, builders.image_bytes(frame), "png", stamp_ns=at_ns)
            messages += [
                Message(
                    "/camera", "sensor_msgs/Image", at_ns, image(is_ros1, frame, "bgr8", padding=1, stamp_ns=at_ns)
                ),
                Message("/wrist", "sensor_msgs/CompressedImage", at_ns, png),
                Message(
                    "/joint_states", "sensor_msgs/JointState", at_ns, joints(is_ros1, "ab", (step, 1), stamp_ns=at_ns)
                ),
                Message("/pose", "geometry_msgs/PoseStamped", at_ns, pose(is_ros1, (0, 1, 2), (0, 0, 0, 1))),
                Message("/action", "std_msgs/Float64MultiArray", at_ns, numbers(is_ros1, (step, 0.5))),
            ]
        if is_ros1:
            write_ros1(root / "plain.bag", messages)
            write_ros1(root / "packed.bag", messages, codec="bz2")
        else:
            write_mcap(root / "loose.mcap", messages, per_chunk=0)
            write_mcap(root / "packed.mcap", messages, codec="zstd")
            write_sqlite(root / "folder", messages, files=2)
    return root
