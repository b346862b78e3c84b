"""Bags of ROS 1 and ROS 2 and MCAP files, against the library rosbags where it is installed, and by what they were written from."""

import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.dataset import open_dataset
from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.bag_files import MAX_CHUNK_NBYTES
from pipeline.readers.rosbag import RosbagReader
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import Fault
from tests.conftest import shared_data
from tests.pipeline.readers import bag_builder
from tests.pipeline.readers.bag_builder import Message
from tests.pipeline.recordings import write_recipe

JOINTS = "sensor_msgs/JointState"
SECOND = 10**9


def joint_messages(
    is_ros1: bool, count: int, *, topic: str = "/joint_states", period_ns: int = SECOND // 10, **options
) -> list[Message]:
    """Joint a is the number of the message, joint b a half more; recorded 5 ms after the stamp."""
    return [
        Message(topic, JOINTS, (1 + k) * period_ns + 5_000_000, bag_builder.joints(is_ros1, ("a", "b"), (k, k + 0.5), stamp_ns=(1 + k) * period_ns, **options))
        for k in range(count)
    ]  # fmt: skip


def values(root: Path, name: str, **options) -> np.ndarray:
    """Return all rows of a signal of the only episode below ``root``."""
    reader = RosbagReader(root, **options)
    (ref,) = reader.index().episodes
    rows, faults = signals(reader, ref, [name], np.arange(ref.num_steps))
    assert faults == ()
    return rows


# -- against rosbags ---------------------------------------------------------------------------------------------------


def odometry(store, k: int):
    types = store.types
    header = _header(store, k)
    vector, point, quaternion = (types[f"geometry_msgs/msg/{name}"] for name in ("Vector3", "Point", "Quaternion"))
    pose = types["geometry_msgs/msg/Pose"](point(k, k + 0.25, -k), quaternion(0.0, 0.0, 0.6, 0.8))
    twist = types["geometry_msgs/msg/Twist"](vector(1.0 * k, 2.0, 3.0), vector(4.0, 5.0, 6.0))
    covariance = np.arange(36.0)
    return types["nav_msgs/msg/Odometry"](
        header,
        "base_link",
        types["geometry_msgs/msg/PoseWithCovariance"](pose, covariance),
        types["geometry_msgs/msg/TwistWithCovariance"](twist, covariance + k),
    )


def _header(store, k: int):
    time = store.types["builtin_interfaces/msg/Time"](k + 1, 7)
    kind = store.types["std_msgs/msg/Header"]
    return (
        kind(seq=k, stamp=time, frame_id="map" * (k % 3))
        if "seq" in kind.__dataclass_fields__
        else kind(time, "map" * (k % 3))
    )


def battery(store, k: int):
    """A type with texts, an array of messages' worth of odd sizes, and numbers of one byte before those of eight."""
    kind = store.types["sensor_msgs/msg/Range"]
    options = {"variance": 0.0} if "variance" in kind.__dataclass_fields__ else {}
    return kind(_header(store, k), 1, 0.5, 0.25, 4.0, float(k), **options)


def floats(store, k: int):
    types = store.types
    dims = [types["std_msgs/msg/MultiArrayDimension"]("x" * (k % 4), 3, 3)]
    layout = types["std_msgs/msg/MultiArrayLayout"](dims, 0)
    return types["std_msgs/msg/Float32MultiArray"](layout, np.array([k, 0.5, -k], np.float32))


ORACLES = {"/odom": ("nav_msgs/msg/Odometry", odometry), "/range": ("sensor_msgs/msg/Range", battery), "/floats": ("std_msgs/msg/Float32MultiArray", floats)}  # fmt: skip
CONTAINERS = ("ros1", "ros1-bz2", "ros1-lz4", "sqlite", "sqlite-message", "mcap", "mcap-storage")


def write_by_rosbags(root: Path, container: str) -> None:
    """Write seven messages of each type with the library's own writers."""
    from rosbags import rosbag1, rosbag2
    from rosbags.rosbag2.enums import CompressionFormat, CompressionMode
    from rosbags.typesys import Stores, get_typestore

    is_ros1 = container.startswith("ros1")
    store = get_typestore(Stores.ROS1_NOETIC if is_ros1 else Stores.ROS2_HUMBLE)
    root.mkdir()
    kind, _, packing = container.partition("-")
    if is_ros1:
        writer = rosbag1.Writer(root / "run.bag")
        if packing:
            writer.set_compression(rosbag1.Writer.CompressionFormat[packing.upper()])
    else:
        plugin = rosbag2.StoragePlugin.MCAP if kind == "mcap" else rosbag2.StoragePlugin.SQLITE3
        writer = rosbag2.Writer(root / "run", version=9, storage_plugin=plugin)
        writer.set_compression(CompressionMode[packing.upper() or "NONE"], CompressionFormat.ZSTD)
    with writer:
        connections = {
            topic: writer.add_connection(topic, name, typestore=store) for topic, (name, _) in ORACLES.items()
        }
        for k in range(7):
            for topic, (name, make) in ORACLES.items():
                serialize = store.serialize_ros1 if is_ros1 else store.serialize_cdr
                writer.write(connections[topic], (k + 1) * SECOND, serialize(make(store, k), name))


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_rosbags_wrote_comes_out_as_it_was_given(tmp_path, container):
    pytest.importorskip("rosbags")
    write_by_rosbags(tmp_path / "raw", container)
    reader = open_source(tmp_path / "raw")
    index = reader.index()
    assert (reader.name, index.faults) == ("rosbag", ())
    (ref,) = index.episodes
    k = np.arange(7.0)[:, None]
    one = np.ones((7, 1))
    expected = {
        "/odom.pose.pose.position": np.hstack([k, k + 0.25, -k]),
        "/odom.pose.pose.orientation": one * [0.0, 0.0, 0.6, 0.8],
        "/odom.pose.covariance": one * np.arange(36.0),
        "/odom.twist.twist.linear": np.hstack([k, 2 * one, 3 * one]),
        "/odom.twist.twist.angular": one * [4.0, 5.0, 6.0],
        "/odom.twist.covariance": k + np.arange(36.0),
        "/range.range": k,
        "/range.field_of_view": 0.5 * one,
        "/floats.data": np.hstack([k, 0.5 * one, -k]),
    }
    assert set(expected) <= {signal.name for signal in ref.signals}
    for name, rows in expected.items():
        found, faults = signals(reader, ref, [name], np.arange(7))
        assert faults == ()
        np.testing.assert_array_equal(found, rows)
    assert ref.signal("/odom.pose.pose.orientation").names == ("x", "y", "z", "w")


# -- messages ----------------------------------------------------------------------------------------------------------

COLOURS = st.sampled_from(["rgb8", "bgr8", "rgba8", "bgra8", "mono8"])


@given(
    encoding=COLOURS,
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    padding=st.integers(0, 3),
    is_ros1=st.booleans(),
)
def test_raw_images_come_out_in_rgb_whatever_their_order_and_padding(
    tmp_path_factory, encoding, height, width, padding, is_ros1
):
    root = tmp_path_factory.mktemp("raw")
    rgb = np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), np.uint8)
    alpha = np.full((height, width, 1), 9, np.uint8)
    stored = {
        "rgb8": rgb,
        "bgr8": rgb[..., ::-1],
        "rgba8": np.concatenate([rgb, alpha], axis=2),
        "bgra8": np.concatenate([rgb[..., ::-1], alpha], axis=2),
        "mono8": rgb[..., :1],
    }[encoding]
    message = Message(
        "/camera",
        "sensor_msgs/Image",
        SECOND,
        bag_builder.image(is_ros1, np.ascontiguousarray(stored), encoding, padding=padding),
    )
    if is_ros1:
        bag_builder.write_ros1(root / "a.bag", [message])
    else:
        bag_builder.write_mcap(root / "a.mcap", [message])
    reader = RosbagReader(root)
    (ref,) = reader.index().episodes
    (frame,) = frames(reader, ref, "/camera", np.array([0]))
    expected = np.repeat(rgb[..., :1], 3, axis=2) if encoding == "mono8" else rgb
    np.testing.assert_array_equal(frame, expected)


def test_depth_is_in_metres(tmp_path):
    millimetres = np.array([[1500, 0], [65535, 250]], np.uint16)
    message = Message("/depth", "sensor_msgs/Image", SECOND, bag_builder.image(True, millimetres, "16UC1", padding=2))
    bag_builder.write_ros1(tmp_path / "a.bag", [message])
    reader = RosbagReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.view("/depth").kind == "depth"
    (frame,) = frames(reader, ref, "/depth", np.array([0]))
    np.testing.assert_allclose(frame, millimetres / 1000, rtol=1e-6)


def test_an_image_in_an_encoding_that_is_not_read_is_refused_by_name(tmp_path):
    good = bag_builder.image(True, np.zeros((2, 2, 3), np.uint8), "rgb8")
    bayer = bag_builder.image(True, np.zeros((2, 2, 1), np.uint8), "bayer_rggb8")
    messages = [Message("/camera", "sensor_msgs/Image", (k + 1) * SECOND, data) for k, data in enumerate([good, bayer])]
    bag_builder.write_ros1(tmp_path / "a.bag", messages)
    reader = RosbagReader(tmp_path)
    (ref,) = reader.index().episodes
    found = list(frames(reader, ref, "/camera", np.array([0, 1])))
    assert isinstance(found[0], np.ndarray)
    assert isinstance(found[1], Fault) and found[1].reason is Reason.UNSUPPORTED and "bayer_rggb8" in found[1].message


@pytest.mark.parametrize("is_ros1", [True, False])
def test_joints_are_known_by_name_whatever_their_order(tmp_path, is_ros1):
    messages = joint_messages(is_ros1, 3)
    swapped = bag_builder.joints(is_ros1, ("b", "a"), (1.5, 1.0), stamp_ns=2 * SECOND // 10)
    messages[1] = Message("/joint_states", JOINTS, messages[1].log_ns, swapped)
    write = bag_builder.write_ros1 if is_ros1 else bag_builder.write_mcap
    write(tmp_path / ("a.bag" if is_ros1 else "a.mcap"), messages)
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.position"), [[0, 0.5], [1, 1.5], [2, 2.5]])
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.velocity"), [[0, -0.5], [-1, -1.5], [-2, -2.5]])
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.position", joints=("b",)), [[0.5], [1.5], [2.5]])


def test_a_message_without_one_of_the_joints_is_a_fault_and_no_guess(tmp_path):
    messages = joint_messages(True, 3)
    messages[1] = Message(
        "/joint_states", JOINTS, messages[1].log_ns, bag_builder.joints(True, ("a", "c"), (7, 8), stamp_ns=SECOND // 5)
    )
    bag_builder.write_ros1(tmp_path / "a.bag", messages)
    reader = RosbagReader(tmp_path)
    (ref,) = reader.index().episodes
    rows, faults = signals(reader, ref, ["/joint_states.position"], np.arange(3))
    np.testing.assert_array_equal(rows, [[0, 0.5], [np.nan, np.nan], [2, 2.5]])
    assert [(fault.reason, fault.start, fault.stop) for fault in faults] == [(Reason.WRONG_SHAPE, 1, 2)]


def test_joints_that_are_not_there_refuse_the_topic(tmp_path):
    bag_builder.write_ros1(
        tmp_path / "a.bag",
        [
            *joint_messages(True, 2),
            Message("/x", "std_msgs/Float64MultiArray", SECOND, bag_builder.numbers(True, (1,))),
        ],
    )
    index = RosbagReader(tmp_path, joints=("z",)).index()
    assert [(fault.stream, fault.reason) for fault in index.faults] == [("/joint_states", Reason.BAD_METADATA)]


def test_stamps_count_unless_they_were_never_set_or_the_log_is_asked_for(tmp_path):
    messages = joint_messages(True, 4)
    bag_builder.write_ros1(tmp_path / "a.bag", messages[::-1])  # late ones first, as networks deliver them
    np.testing.assert_allclose(values(tmp_path, "timestamp_s")[:, 0], [0, 0.1, 0.2, 0.3])
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.position")[:, 0], [0, 1, 2, 3])
    unset = [Message("/joint_states", JOINTS, k * SECOND, bag_builder.joints(True, ("a", "b"), (k, k))) for k in (3, 4)]
    bag_builder.write_ros1(tmp_path / "a.bag", unset)
    np.testing.assert_array_equal(values(tmp_path, "timestamp_s")[:, 0], [0, 1])
    late = [
        Message(
            "/joint_states",
            JOINTS,
            (10 - k) * SECOND,
            bag_builder.joints(True, ("a", "b"), (k, k), stamp_ns=(k + 1) * SECOND),
        )
        for k in range(3)
    ]
    bag_builder.write_ros1(tmp_path / "a.bag", late)
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.position")[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(values(tmp_path, "/joint_states.position", time="log")[:, 0], [2, 1, 0])


def test_instructions_change_when_they_are_said(tmp_path):
    said = [
        Message("/task", "std_msgs/String", ns, bag_builder.text(False, text))
        for ns, text in ((1, "reach"), (SECOND // 4, "grasp"))
    ]
    bag_builder.write_mcap(tmp_path / "a.mcap", said + joint_messages(False, 4))
    reader = RosbagReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.instructions == ("reach", "grasp")
    np.testing.assert_array_equal(values(tmp_path, "instruction_index")[:, 0], [0, 0, 1, 1])


# -- what is not read is said --------------------------------------------------------------------------------------------


def test_messages_in_other_encodings_and_of_unknown_types_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(bag_builder.DEFINITIONS, "acme_msgs/Thing", "acme_msgs/Part[] parts")
    parts = [Message("/things", "acme_msgs/Thing", SECOND, b"\0\1\0\0\0\0\0\0")]
    bag_builder.write_mcap(tmp_path / "a.mcap", joint_messages(False, 2) + parts)
    index = RosbagReader(tmp_path).index()
    assert [(fault.stream, fault.reason, fault.is_warning) for fault in index.faults] == [
        ("/things", Reason.UNSUPPORTED, True)
    ]
    assert "acme_msgs/Part" in index.faults[0].message and len(index.episodes) == 1
    bag_builder.write_mcap(tmp_path / "a.mcap", joint_messages(False, 2), encoding="json")
    index = RosbagReader(tmp_path).index()
    assert index.episodes == () and index.faults[0].reason is Reason.UNSUPPORTED and "'json'" in index.faults[0].message


def test_a_type_that_holds_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(bag_builder.DEFINITIONS, "acme_msgs/Loop", "acme_msgs/Loop again\nfloat64 x")
    bag_builder.write_mcap(tmp_path / "a.mcap", [Message("/loop", "acme_msgs/Loop", SECOND, b"\0\1\0\0" + bytes(64))])
    fault = RosbagReader(tmp_path).index().faults[0]
    assert fault.reason is Reason.UNSUPPORTED and "in itself" in fault.message


def test_a_count_of_more_elements_than_bytes_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(
        bag_builder.DEFINITIONS,
        "acme_msgs/Nothing",
        "acme_msgs/Empty[4000000000] many\nfloat64 x\n" + "=" * 80 + "\nMSG: acme_msgs/Empty\n",
    )
    bag_builder.write_ros1(tmp_path / "a.bag", [Message("/many", "acme_msgs/Nothing", SECOND, bytes(64))])
    fault = RosbagReader(tmp_path).index().faults[0]
    assert fault.reason is Reason.DECODE


# -- damage --------------------------------------------------------------------------------------------------------------


def write_one(root: Path, kind: str) -> Path:
    """Write eight messages in one of the formats."""
    codec = kind.partition("-")[2]
    codec = "" if codec in ("plain", "loose") else codec
    if kind.startswith("bag"):
        return bag_builder.write_ros1(root / "a.bag", joint_messages(True, 8), codec=codec)
    if kind.startswith("mcap"):
        return bag_builder.write_mcap(
            root / "a.mcap", joint_messages(False, 8), codec=codec, per_chunk=0 if kind == "mcap-loose" else 4
        )
    return bag_builder.write_sqlite(root / "a", joint_messages(False, 8)) / "a_0.db3"


@pytest.mark.parametrize("kind", ["bag-plain", "bag-lz4", "mcap-loose", "mcap-zstd"])
def test_a_file_cut_anywhere_gives_what_lies_before_and_says_so(tmp_path, kind):
    path = write_one(tmp_path, kind)
    whole, found = path.read_bytes(), set()
    for stop in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:stop])
        reader = RosbagReader(tmp_path)
        index = reader.index()
        assert index.faults, stop
        for ref in index.episodes:
            rows, faults = signals(reader, ref, ["/joint_states.position"], np.arange(ref.num_steps))
            np.testing.assert_array_equal(rows[:, 0], np.arange(ref.num_steps))
            assert faults == ()
            found.add(ref.num_steps)
    assert found >= {4, 8}


def test_a_bag_that_was_never_closed_is_read_to_its_end(tmp_path):
    bag_builder.write_ros1(tmp_path / "a.bag", joint_messages(True, 8), is_closed=False)
    bag_builder.write_mcap(
        tmp_path / "b.mcap", joint_messages(False, 8), codec="lz4", is_closed=False, is_indexed=False
    )
    index = RosbagReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [8, 8]
    assert [(fault.reason, fault.is_warning) for fault in index.faults] == [(Reason.TRUNCATED, True)] * 2


def test_a_chunk_that_unpacks_to_more_than_it_says_is_refused_within_bounds(tmp_path):
    path = bag_builder.write_ros1(tmp_path / "a.bag", joint_messages(True, 8), codec="bz2")
    whole = path.read_bytes()
    at = whole.index(b"size=") + 5
    for claimed in (10, MAX_CHUNK_NBYTES + 1):
        path.write_bytes(whole[:at] + struct.pack("<I", claimed) + whole[at + 4 :])
        index = RosbagReader(tmp_path).index()
        assert index.episodes == () or index.faults
        assert {fault.reason for fault in index.faults} <= {Reason.DECODE, Reason.TOO_LARGE}


def test_a_changed_byte_of_a_chunk_is_found_by_its_checksum(tmp_path):
    path = bag_builder.write_mcap(tmp_path / "a.mcap", joint_messages(False, 8))
    data = bytearray(path.read_bytes())
    place = data.rindex(struct.pack("<d", 7.5))
    data[place] ^= 1
    path.write_bytes(data)
    reader = RosbagReader(tmp_path)
    (ref,) = reader.index().episodes
    rows, faults = signals(reader, ref, ["/joint_states.position"], np.arange(8))
    assert np.isnan(rows[4:]).all() and (rows[:4, 0] == np.arange(4)).all()
    assert {fault.reason for fault in faults} == {Reason.DECODE}


def test_a_file_that_the_metadata_names_and_that_is_absent_is_a_fault(tmp_path):
    folder = bag_builder.write_sqlite(tmp_path / "run", joint_messages(False, 8), files=2)
    (folder / "run_1.db3").unlink()
    index = open_source(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [4]
    assert [fault.reason for fault in index.faults] == [Reason.MISSING_FILE, Reason.COUNT_MISMATCH]


def test_a_database_whose_messages_are_a_view_is_refused_since_it_might_never_end(tmp_path):
    path = write_one(tmp_path, "sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE messages")
        database.execute(
            "CREATE VIEW messages AS WITH RECURSIVE f(id, topic_id, timestamp, data) AS "
            "(SELECT 1, 1, 1, x'00' UNION ALL SELECT id + 1, 1, 1, x'00' FROM f) SELECT * FROM f"
        )
    index = RosbagReader(tmp_path).index()
    assert index.episodes == () and "table 'messages'" in index.faults[0].message


def test_a_database_whose_rows_would_fill_memory_is_refused(tmp_path):
    path = write_one(tmp_path, "sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE messages")
        database.execute(
            "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, data AS (zeroblob(900000000)))"
        )
        database.execute("INSERT INTO messages(id, topic_id, timestamp) VALUES (1, 1, 1)")
        database.commit()
    index = RosbagReader(tmp_path).index()
    refused = {fault.reason for fault in index.faults if not fault.is_warning}
    assert index.episodes == () and refused <= {Reason.DECODE, Reason.TOO_LARGE}


def test_nothing_is_written_beside_a_database(tmp_path):
    write_one(tmp_path, "sqlite")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    values(tmp_path, "/joint_states.position")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_options_that_mean_nothing_are_refused(tmp_path):
    bag_builder.write_ros1(tmp_path / "a.bag", joint_messages(True, 2))
    with pytest.raises(UsageError, match="time of header, log"):
        RosbagReader(tmp_path, time="wall")
    (fault,) = RosbagReader(tmp_path, clock="/nowhere").index().faults
    assert "/nowhere" in fault.message and "/joint_states" in fault.message


# -- rates ---------------------------------------------------------------------------------------------------------------


@given(
    slow=st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True),
    fast=st.lists(st.integers(0, 60), min_size=9, max_size=20, unique=True),
)
def test_each_step_of_the_clock_shows_the_message_nearest_in_time_the_earlier_of_two(tmp_path_factory, slow, fast):
    root = tmp_path_factory.mktemp("raw")
    messages = [
        Message(topic, JOINTS, at * SECOND, bag_builder.joints(False, ("a",), (at,), stamp_ns=(1 + at) * SECOND))
        for topic, times in (("/slow", slow), ("/fast", fast))
        for at in times
    ]
    bag_builder.write_mcap(root / "a.mcap", messages, per_chunk=3)
    reader = RosbagReader(root)
    (ref,) = reader.index().episodes
    assert ref.details["clock"] == "/fast"
    rows, _ = signals(reader, ref, ["timestamp_s", "/fast.position", "/slow.position"], np.arange(ref.num_steps))
    fast, slow = sorted(fast), sorted(slow)
    nearest = [min(slow, key=lambda at: (abs(at - step), at)) for step in fast]
    np.testing.assert_array_equal(rows, np.transpose([np.array(fast) - fast[0], fast, nearest]))
    own = reader.on_own_clock(ref, "/slow.position")
    rows, _ = signals(reader, own, ["timestamp_s", "/slow.position"], np.arange(own.num_steps))
    np.testing.assert_array_equal(rows, np.transpose([np.array(slow) - fast[0], slow]))


RECIPE = """
name = "arm"
rate_hz = {rate_hz}
[views.main]
from = ["/camera"]
size = [4, 4]
resize = "stretch"
[signals.state]
from = ["/joint_states.position", "/pose.pose.orientation"]
align = ["linear", "slerp"]
[signals.actions]
from = ["/action.data"]
align = "previous"
"""


def turn(at_s: float) -> tuple[float, float, float, float]:
    """Return the rotation about z by half a radian a second, x first."""
    return 0.0, 0.0, float(np.sin(at_s / 4)), float(np.cos(at_s / 4))


def write_rates(path: Path) -> None:
    """A camera at 10 Hz, joints at 100 Hz and 3 ms late, poses at 25 Hz with every second sign changed, actions at 5 Hz; 2 s."""
    messages = []
    for k in range(21):
        frame = np.full((4, 4, 3), 10 * k, np.uint8)
        data = bag_builder.image(False, frame, "rgb8", stamp_ns=SECOND + k * SECOND // 10)
        messages.append(Message("/camera", "sensor_msgs/Image", SECOND + k * SECOND // 10, data))
    for k in range(-5, 210):
        at_ns = SECOND + k * SECOND // 100 + 3_000_000
        data = bag_builder.joints(False, ("a",), ((at_ns - SECOND) / SECOND,), stamp_ns=at_ns)
        messages.append(Message("/joint_states", JOINTS, at_ns, data))
    for k in range(-1, 53):
        at_ns = SECOND + k * SECOND // 25
        sign = 1 - 2 * (k % 2)
        data = bag_builder.pose(False, (0, 0, 0), [sign * value for value in turn(k / 25)], stamp_ns=at_ns)
        messages.append(Message("/pose", "geometry_msgs/PoseStamped", at_ns, data))
    messages += [
        Message("/action", "std_msgs/Float64MultiArray", SECOND + k * SECOND // 5, bag_builder.numbers(False, (k, -k)))
        for k in range(11)
    ]
    bag_builder.write_mcap(path, sorted(messages, key=lambda message: message.log_ns), per_chunk=50)


@pytest.mark.parametrize(("rate_hz", "period_s"), [(0, 0.1), (5, 0.2), (40, 0.025)])
def test_each_stream_is_aligned_by_its_own_messages_up_and_down(tmp_path, rate_hz, period_s):
    write_rates(tmp_path / "raw/a.mcap")
    recipe = write_recipe(tmp_path, RECIPE.format(rate_hz=rate_hz))
    convert(tmp_path / "raw", tmp_path / "out", recipe, cluster=ClusterOptions(workers=0))
    data = open_dataset(tmp_path / "out")
    times_s = np.arange(round(2 / period_s) + 1) * period_s
    np.testing.assert_allclose(data["timestamp_s"], times_s, atol=1e-9)
    assert data["valid"].values.all()
    np.testing.assert_allclose(data["state"][:, 0], times_s, atol=1e-6)
    found = data["state"][:, 1:].values
    expected = np.array([turn(at_s) for at_s in times_s])
    assert np.abs(np.abs((found * expected).sum(axis=1)) - 1).max() < 1e-6
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(data["actions"][:, 0], np.floor(times_s / 0.2 + 1e-6))
    shown = data["rgb_main"][:, 0, 0, 0].values / 10
    assert np.abs(shown * 0.1 - times_s).max() <= 0.05 + 1e-9
    # the furthest of camera, joints, poses and actions
    streams = [np.arange(21) / 10, np.arange(-5, 210) / 100 + 0.003, np.arange(-1, 53) / 25, np.arange(11) / 5]
    worst_s = np.max([np.abs(stream[:, None] - times_s).min(axis=0) for stream in streams], axis=0)
    np.testing.assert_allclose(np.abs(data["align_error_s"]), worst_s, atol=1e-6)


def test_a_stream_that_pauses_refuses_the_steps_of_the_pause(tmp_path):
    write_rates(tmp_path / "raw/a.mcap")
    reader = RosbagReader(tmp_path / "raw")
    (ref,) = reader.index().episodes
    assert (ref.details["clock"], ref.rate_hz) == ("/camera", 10.0)
    own = reader.on_own_clock(ref, "/joint_states.position")
    rows, _ = signals(reader, own, ["timestamp_s", "/joint_states.position"], np.arange(own.num_steps))
    np.testing.assert_allclose(rows[:, 0], rows[:, 1], atol=1e-9)  # seconds count from the camera's first frame
    messages = [m for m in joint_messages(False, 30) if not 10 <= m.log_ns / (SECOND // 10) < 15]
    ticks = [
        Message("/action", "std_msgs/Float64MultiArray", (1 + k) * SECOND // 10, bag_builder.numbers(False, (k,)))
        for k in range(30)
    ]
    shutil.rmtree(tmp_path / "raw")
    bag_builder.write_mcap(tmp_path / "raw/a.mcap", messages + ticks)
    recipe = write_recipe(
        tmp_path,
        'name = "x"\n[signals.state]\nfrom = ["/joint_states.position"]\n[signals.actions]\nfrom = ["/action.data"]\n',
    )
    report = convert(
        tmp_path / "raw", tmp_path / "out", recipe, reader={"clock": "/action"}, cluster=ClusterOptions(workers=0)
    )
    assert report.quarantined == {"time-gap": 1}
    valid = open_dataset(tmp_path / "out")["valid"].values
    np.testing.assert_array_equal(np.flatnonzero(~valid), [9, 10, 11, 12, 13])


def test_slerp_of_what_is_no_quaternion_is_refused_before_anything_is_read(tmp_path):
    bag_builder.write_ros1(tmp_path / "raw/a.bag", joint_messages(True, 3))
    recipe = write_recipe(tmp_path, 'name = "x"\n[signals.state]\nfrom = ["/joint_states.position"]\nalign = "slerp"\n')
    with pytest.raises(UsageError, match=r"quaternions of 4 values in '/joint_states.position'.*found 2"):
        convert(tmp_path / "raw", tmp_path / "out", recipe, cluster=ClusterOptions(workers=0))


# -- real files ----------------------------------------------------------------------------------------------------------


def test_real_mcap_files_are_read_and_their_damage_said():
    reader = open_source(shared_data("mcap"))
    index = reader.index()
    assert {ref.key: ref.num_steps for ref in index.episodes} == {"torq_corrupt": 11, "torq_sample": 100}
    assert [(fault.episode, fault.reason) for fault in index.faults] == [("torq_empty", Reason.EMPTY_EPISODE)]
    corrupt = index.episodes[0]
    rows, faults = signals(reader, corrupt, ["/joint_states.position"], np.arange(11))
    assert [(fault.reason, fault.start, fault.stop) for fault in faults] == [(Reason.DECODE, 5, 6)]  # of 28 bytes
    assert np.flatnonzero(np.isnan(rows[:, 0])).tolist() == [5]
    assert (index.state, index.actions) == (("/joint_states.position",), ("/action.data",))
    sample = index.episodes[1]
    rows, faults = signals(reader, sample, ["/joint_states.position", "/action.data"], np.arange(2))
    assert faults == ()
    np.testing.assert_allclose(
        rows[0, :3], [0.27395605, -0.06112156, 0.35859792], atol=1e-8
    )  # as rosbags 0.11.9 prints it
    np.testing.assert_allclose(rows[0, 6:9], [0.05754605, 0.12910465, -0.02263432], atol=1e-8)


def test_a_real_bag_of_two_turtles_is_read():
    reader = open_source(shared_data("rosbag1"))
    index = reader.index()
    (ref,) = index.episodes
    assert ref.details["messages"]["/turtle2/pose"] == 1344
    assert ref.details["messages"]["/turtle1/cmd_vel"] == 357
    assert any("/tf_static" in note for note in index.notes)
    rows, faults = signals(reader, ref, ["/turtle1/pose"], np.arange(ref.num_steps))
    assert faults == () and np.isfinite(rows).all()
    assert np.abs(np.diff(rows[:, 0])).max() < 0.1  # a turtle moves smoothly in x


def test_a_folder_without_bags_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SourceError, match="no .bag, .mcap or .db3 file"):
        open_source(tmp_path)
