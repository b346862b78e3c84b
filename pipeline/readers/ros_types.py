"""Types of ROS messages: ``.msg`` definitions as bags carry them, those of common messages where a bag carries none.

Format: https://wiki.ros.org/msg and https://docs.ros.org/en/rolling/Concepts/Basic/About-Interfaces.html. Nothing is generated or
evaluated: a definition becomes a tuple of fields, which :mod:`pipeline.readers.ros_messages` walks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from schemas.errors import Reason, SourceError

SCALARS: Mapping[str, str] = {
    "bool": "?", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4", "int64": "i8",
    "uint64": "u8", "float32": "f4", "float64": "f8", "char": "u1", "byte": "u1",
}  # fmt: skip
"""NumPy types of numbers. ROS 1's ``byte`` is signed, and holds flags all the same."""
TEXT = "string"
MAX_FIELDS = 4096
"""Fields of a message, those of messages in it counted each time."""
MAX_DEPTH = 16
MAX_DEFINITION_NBYTES = 2**20
_FIELD = re.compile(r"([A-Za-z]\w*(?:/\w+)*)(?:<=\d+)?(\[(?:<=)?(\d*)\])?\s+([A-Za-z]\w*)\s*(=?)", re.ASCII)
_BREAK = re.compile(r"^=+\s*\nMSG: *(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    name: str
    kind: str
    """NumPy type of a number, :data:`TEXT`, or an empty string for a message."""
    fields: tuple["Field", ...] = ()
    """Of a message."""
    is_array: bool = False
    count: int = 0
    """Of an array of fixed length; 0 where each message says it."""
    type: str = ""
    """Name of a message's type, without ``/msg``."""


def short_type(name: str) -> str:
    """Return a type's name as ROS 1 spells it.

    >>> short_type("sensor_msgs/msg/Image")
    'sensor_msgs/Image'
    """
    return name.replace("/msg/", "/")


def parse_type(name: str, definition: str, *, is_ros1: bool) -> tuple[Field, ...]:
    """Return the fields of a message type; SourceError (unsupported) where it has no definition that can be read.

    Parameters
    ----------
    name
        Of the type, such as ``sensor_msgs/msg/JointState``.
    definition
        Text in the format of ``.msg`` files, definitions of other types after lines of ``=``; where it is empty, or in another
        language, the common types' own are taken.
    is_ros1
        Whether a header begins with a sequence number, as in ROS 1.
    """
    name = short_type(name)
    texts = dict(COMMON)
    if is_ros1:
        texts["std_msgs/Header"] = "uint32 seq\ntime stamp\nstring frame_id"
    if len(definition) <= MAX_DEFINITION_NBYTES and "IDL: " not in definition[:200] and "module " not in definition:
        first, *others = _BREAK.split(definition)
        texts.update({short_type(kind): text for kind, text in zip(others[::2], others[1::2])})
        if definition.strip():
            texts[name] = first
    if name not in texts:
        raise SourceError(f"expected a definition of {name}, found none in its bag; record it with definitions", _NO)
    budget = iter(range(MAX_FIELDS))
    return tuple(_fields(name, texts, budget, 0))


_NO = Reason.UNSUPPORTED
_TIME = (Field("sec", "u4"), Field("nanosec", "u4"))
_PRIMITIVES = {"time": _TIME, "duration": (Field("sec", "i4"), Field("nanosec", "i4"))}


def _fields(name: str, texts: Mapping[str, str], budget: Iterator[int], depth: int) -> Iterator[Field]:
    if depth > MAX_DEPTH or name not in texts:
        raise SourceError(f"expected a definition of {name} in it, found none or one in itself; leave it out", _NO)
    for line in texts[name].splitlines():
        line = line.partition("#")[0].strip()
        if not line or line.startswith("MSG:"):
            continue
        match = _FIELD.match(line)
        if match is None or next(budget, None) is None:
            raise SourceError(f"expected fields of a message in {name}, found {line[:40]!r}; leave it out", _NO)
        kind, brackets, count, field, is_constant = match.groups()
        if is_constant:
            continue
        fields: tuple[Field, ...] = ()
        if kind in _PRIMITIVES:
            fields = _PRIMITIVES[kind]
        elif kind not in SCALARS and kind != TEXT:
            kind = _full_name(kind, name, texts)
            fields = tuple(_fields(kind, texts, budget, depth + 1))
        is_number = kind in SCALARS
        yield Field(
            name=field,
            kind=SCALARS[kind] if is_number else TEXT if kind == TEXT else "",
            fields=fields,
            is_array=bool(brackets),
            count=int(count) if brackets and count and "<=" not in brackets else 0,
            type="" if is_number or kind == TEXT else kind,
        )


def _full_name(kind: str, name: str, texts: Mapping[str, str]) -> str:
    if kind == "Header":
        return "std_msgs/Header"
    kind = short_type(kind)
    if "/" in kind:
        return kind
    own = f"{name.rpartition('/')[0]}/{kind}"
    found = [full for full in texts if full.rpartition("/")[2] == kind]
    return own if own in texts or not found else found[0]


COMMON: Mapping[str, str] = {
    "builtin_interfaces/Time": "int32 sec\nuint32 nanosec",
    "builtin_interfaces/Duration": "int32 sec\nuint32 nanosec",
    "std_msgs/Header": "builtin_interfaces/Time stamp\nstring frame_id",
    "std_msgs/String": "string data",
    "std_msgs/MultiArrayDimension": "string label\nuint32 size\nuint32 stride",
    "std_msgs/MultiArrayLayout": "MultiArrayDimension[] dim\nuint32 data_offset",
    **{f"std_msgs/{kind.capitalize() if kind != 'uint8' else 'UInt8'}": f"{kind} data" for kind in ("bool", "float32", "float64", "uint8", "int32", "int64")},
    **{f"std_msgs/{kind.capitalize()}MultiArray": f"MultiArrayLayout layout\n{kind}[] data" for kind in ("float32", "float64", "int32", "int64")},
    "geometry_msgs/Point": "float64 x\nfloat64 y\nfloat64 z",
    "geometry_msgs/Vector3": "float64 x\nfloat64 y\nfloat64 z",
    "geometry_msgs/Quaternion": "float64 x\nfloat64 y\nfloat64 z\nfloat64 w",
    "geometry_msgs/Pose": "Point position\nQuaternion orientation",
    "geometry_msgs/Twist": "Vector3 linear\nVector3 angular",
    "geometry_msgs/Wrench": "Vector3 force\nVector3 torque",
    "geometry_msgs/Accel": "Vector3 linear\nVector3 angular",
    "geometry_msgs/Transform": "Vector3 translation\nQuaternion rotation",
    "geometry_msgs/PointStamped": "std_msgs/Header header\nPoint point",
    "geometry_msgs/PoseStamped": "std_msgs/Header header\nPose pose",
    "geometry_msgs/TwistStamped": "std_msgs/Header header\nTwist twist",
    "geometry_msgs/WrenchStamped": "std_msgs/Header header\nWrench wrench",
    "geometry_msgs/AccelStamped": "std_msgs/Header header\nAccel accel",
    "geometry_msgs/TransformStamped": "std_msgs/Header header\nstring child_frame_id\nTransform transform",
    "geometry_msgs/PoseWithCovariance": "Pose pose\nfloat64[36] covariance",
    "geometry_msgs/TwistWithCovariance": "Twist twist\nfloat64[36] covariance",
    "nav_msgs/Odometry": "std_msgs/Header header\nstring child_frame_id\ngeometry_msgs/PoseWithCovariance pose\ngeometry_msgs/TwistWithCovariance twist",
    "sensor_msgs/JointState": "std_msgs/Header header\nstring[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort",
    "sensor_msgs/Image": "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\nuint8[] data",
    "sensor_msgs/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data",
    "sensor_msgs/Imu": "std_msgs/Header header\ngeometry_msgs/Quaternion orientation\nfloat64[9] orientation_covariance\n"
    "geometry_msgs/Vector3 angular_velocity\nfloat64[9] angular_velocity_covariance\n"
    "geometry_msgs/Vector3 linear_acceleration\nfloat64[9] linear_acceleration_covariance",
}  # fmt: skip
"""Definitions of common types as ROS 2 has them, for bags that carry none (SQLite before Iron)."""
