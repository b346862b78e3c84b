"""Learning by Cheating routes."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.lbc import LbcReader
from schemas.errors import Reason, SchemaError
from schemas.source import Fault
from tests.pipeline.readers import builders


def test_the_real_route_has_160_steps_and_four_views(shared_data: Path) -> None:
    reader = open_source(shared_data / "carla_lbc_route")
    index = reader.index()
    (ref,) = index.episodes
    assert (index.format, ref.key, ref.num_steps, ref.rate_hz) == ("lbc", "route_00", 160, 2.0)
    sizes = {view.name: (view.height_px, view.width_px, view.kind) for view in ref.views}
    assert sizes == {
        "rgb": (144, 256, "rgb"),
        "rgb_left": (144, 256, "rgb"),
        "rgb_right": (144, 256, "rgb"),
        "topdown": (512, 512, "labels"),
    }
    assert index.faults == ()
    rows, faults = signals(reader, ref, ["x", "speed", "brake", "timestamp_s"], np.array([0, 80]))
    # By eye from measurements/0000.json and 0080.json.
    np.testing.assert_array_equal(
        rows, [[-226.46817199206743, 3.3797341881785896e-08, 0, 0], [-195.17399445321257, 6.152857671010768, 0, 40]]
    )
    assert faults == ()


def test_the_real_route_moves_where_theta_points(shared_data: Path) -> None:
    """GPS frame: the angle of motion in (x, y) is theta, which docs/formats.md states."""
    reader = LbcReader(shared_data / "carla_lbc_route")
    (ref,) = reader.index().episodes
    rows, _ = signals(reader, ref, ["x", "y", "theta", "speed"], np.arange(160))
    moves = np.diff(rows[:, :2], axis=0)
    fast = rows[:-1, 3] > 5
    angle = np.arctan2(moves[:, 1], moves[:, 0])
    error = np.angle(np.exp(1j * (angle - rows[:-1, 2])))
    assert (
        np.median(np.abs(error[fast])) < 1e-2
    )  # measured 0.003 rad, at 2 Hz and over turns; another frame is off by pi/2


def test_frames_of_the_real_route_are_what_pillow_shows(shared_data: Path) -> None:
    from PIL import Image

    reader = LbcReader(shared_data / "carla_lbc_route")
    (ref,) = reader.index().episodes
    for view in ("rgb", "rgb_left", "rgb_right"):
        for step, frame in zip((0, 7, 159), frames(reader, ref, view, np.array([0, 7, 159])), strict=True):
            with Image.open(shared_data / f"carla_lbc_route/route_00/{view}/{step:04d}.png") as image:
                np.testing.assert_array_equal(frame, np.asarray(image.convert("RGB")))
    (labels,) = frames(reader, ref, "topdown", np.array([3]))
    assert isinstance(labels, np.ndarray)
    assert labels.shape == (512, 512)


@pytest.mark.parametrize("root", ["", "split", "split/town", "split/town/route_2"])
def test_the_root_may_be_the_route_or_lie_above_it(tmp_path: Path, root: str) -> None:
    builders.write_lbc_route(tmp_path / "split/town/route_2")
    index = open_source(tmp_path / root).index()
    (ref,) = index.episodes
    assert ref.key == ("split/town/route_2".removeprefix(root).strip("/") or "route_2")
    assert ref.num_steps == 4


def test_routes_come_in_natural_order(tmp_path: Path) -> None:
    for name in ("route_10", "route_2", "route_1"):
        builders.write_lbc_route(tmp_path / name, 1)
    assert [ref.key for ref in LbcReader(tmp_path).index().episodes] == ["route_1", "route_2", "route_10"]


def test_python_reprs_and_json_are_read_alike(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 3)
    (route / "measurements/0001.json").write_text('{"speed": NaN, "steer": 1e-3, "brake": true, "command": 1}')
    (route / "measurements/0002.json").write_text(
        "{'speed': nan, 'steer': -inf, 'brake': False, 'it\\'s': (1, 2), 'command': 1}"
    )
    reader = LbcReader(route)
    (ref,) = reader.index().episodes
    rows, faults = signals(reader, ref, ["speed", "steer", "brake", "instruction_index"], np.arange(3))
    left = ref.instructions.index("Turn left at the next intersection.")
    np.testing.assert_array_equal(rows, [[1, 0.25, 0, 0], [np.nan, 1e-3, 1, left], [np.nan, -np.inf, 0, left]])
    assert faults == ()


def test_a_missing_broken_or_empty_measurement_is_nan_and_a_fault_of_its_step(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 7)
    (route / "measurements/0001.json").unlink()
    (route / "measurements/0002.json").unlink()
    (route / "measurements/0004.json").write_text("{'x': 1.0, 'spe")
    (route / "measurements/0005.json").write_text("")
    reader = LbcReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.num_steps == 7
    block = reader.read_signals(ref, ["speed"], np.arange(7))
    np.testing.assert_array_equal(np.isnan(block.values["speed"]), [False, True, True, False, True, True, False])
    assert [(fault.reason, fault.start, fault.stop) for fault in block.faults] == [
        (Reason.MISSING_FILE, 1, 3),
        (Reason.TRUNCATED, 4, 5),
        (Reason.TRUNCATED, 5, 6),
    ]
    assert block.faults[0].path == "route/measurements/0001.json"


def test_a_missing_field_is_a_fault_of_that_signal_alone(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 3)
    (route / "measurements/0001.json").write_text('{"speed": 5, "steer": "left"}')
    reader = LbcReader(route)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["speed", "steer", "throttle"], np.arange(3))
    np.testing.assert_array_equal(block.values["speed"], [1, 5, 3])
    assert [(fault.stream, fault.start, fault.stop) for fault in block.faults] == [("steer", 1, 2), ("throttle", 1, 2)]


def test_bad_frames_are_faults_that_name_their_file(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 5)
    (route / "rgb/0001.png").unlink()
    (route / "rgb/0002.png").write_bytes(b"")
    (route / "rgb/0003.png").write_bytes((route / "rgb/0003.png").read_bytes()[:45])
    reader = LbcReader(tmp_path)
    (ref,) = reader.index().episodes
    found = list(frames(reader, ref, "rgb", np.arange(5)))
    reasons = [frame.reason if isinstance(frame, Fault) else None for frame in found]
    assert reasons[:3] == [None, Reason.MISSING_FILE, Reason.TRUNCATED]
    assert reasons[3] in (Reason.TRUNCATED, Reason.DECODE)
    assert reasons[4] is None
    fault = found[1]
    assert isinstance(fault, Fault)
    assert (fault.episode, fault.stream, fault.start, fault.stop, fault.path) == (
        "route",
        "rgb",
        1,
        2,
        "route/rgb/0001.png",
    )


def test_repeated_steps_are_decoded_once_and_come_back_in_order(tmp_path: Path) -> None:
    reader = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    (ref,) = reader.index().episodes
    found = list(frames(reader, ref, "rgb_left", np.array([0, 2, 2, 3, 3, 3])))
    assert [int(frame[0, 0, 1]) // 8 for frame in found if isinstance(frame, np.ndarray)] == [0, 2, 2, 3, 3, 3]
    assert found[1] is found[2]
    rows, _ = signals(reader, ref, ["speed"], np.array([0, 2, 2]))
    np.testing.assert_array_equal(rows[:, 0], [1, 3, 3])


def test_a_missing_view_is_declared_and_each_of_its_frames_is_a_fault(tmp_path: Path) -> None:
    import shutil

    route = builders.write_lbc_route(tmp_path / "route")
    shutil.rmtree(route / "rgb_right")
    reader = LbcReader(route)
    (ref,) = reader.index().episodes
    assert not ref.view("rgb_right").present
    found = list(frames(reader, ref, "rgb_right", np.arange(2)))
    assert [frame.reason for frame in found if isinstance(frame, Fault)] == [Reason.MISSING_FILE] * 2


def test_numbers_may_begin_late_and_images_may_be_named_otherwise(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 6)
    for step in range(3):
        (route / f"measurements/{step:04d}.json").unlink()
    (route / "rgb/0004.png").rename(route / "rgb/00004.png")
    reader = LbcReader(route)
    (ref,) = reader.index().episodes
    assert ref.num_steps == 3
    found = [frame for frame in frames(reader, ref, "rgb", np.arange(3)) if isinstance(frame, np.ndarray)]
    assert [int(frame[0, 0, 1]) // 8 for frame in found] == [3, 4, 5]
    rows, _ = signals(reader, ref, ["speed", "timestamp_s"], np.arange(3))
    np.testing.assert_array_equal(rows, [[4, 0], [5, 0.5], [6, 1]])


def test_numbers_that_cannot_be_steps_are_refused(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route")
    (route / "measurements/900000.json").write_text("{}")
    index = LbcReader(tmp_path).index()
    assert index.episodes == ()
    (fault,) = index.faults
    assert (fault.reason, fault.episode) == (Reason.BAD_METADATA, "route")


def test_other_files_are_counted_and_an_empty_route_is_a_fault(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route")
    (route / "measurements/.0001.json.swp").write_text("")
    (route / "measurements/notes.txt").write_text("")
    (tmp_path / "empty/rgb").mkdir(parents=True)
    (tmp_path / "empty/measurements").mkdir()
    index = LbcReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["route"]
    assert [(fault.reason, fault.episode) for fault in index.faults] == [(Reason.EMPTY_EPISODE, "empty")]
    assert index.notes == ("2 files beside the records were ignored",)


def test_files_are_those_that_are_read(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 2)
    (route / "other.txt").write_text("not read")
    reader = LbcReader(tmp_path)
    (ref,) = reader.index().episodes
    expected = {path.relative_to(tmp_path) for path in route.rglob("*.*")} - {Path("route/other.txt")}
    assert set(reader.files(ref)) == expected


def test_time_costs_no_read(tmp_path: Path) -> None:
    route = builders.write_lbc_route(tmp_path / "route", 3)
    reader = LbcReader(route)
    (ref,) = reader.index().episodes
    for path in (route / "measurements").iterdir():
        path.unlink()
    block = reader.read_signals(ref, ["timestamp_s"], np.arange(3))
    np.testing.assert_array_equal(block.values["timestamp_s"], [0, 0.5, 1])
    assert block.faults == ()


def test_an_unknown_signal_or_view_is_named(tmp_path: Path) -> None:
    reader = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    (ref,) = reader.index().episodes
    with pytest.raises(SchemaError, match="found 'nope'"):
        reader.read_signals(ref, ["nope"], np.arange(1))
    with pytest.raises(SchemaError, match="found 'nope'"):
        list(reader.read_frames(ref, "nope", np.arange(1)))


def test_readers_and_references_travel_by_pickle(tmp_path: Path) -> None:
    reader = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    (ref,) = reader.index().episodes
    again = pickle.loads(pickle.dumps((reader, ref)))
    assert again == (reader, ref)
