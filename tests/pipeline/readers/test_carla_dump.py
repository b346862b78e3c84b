"""Folders written with save_to_disk: frame numbers with gaps, cameras that differ, clocks, tables and records."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.carla_dump import CarlaDumpReader
from pipeline.readers.carla_dump_clock import read_clock
from pipeline.readers.carla_dump_files import read_table
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import Fault
from tests.conftest import shared_data
from tests.pipeline.readers.builders import image_bytes, write

SIZE = (6, 8)


def picture(frame, view=0):
    """A picture that says its frame and view."""
    return np.broadcast_to(np.array([frame // 256, frame % 256, view], np.uint8), (*SIZE, 3)).copy()


def write_camera(folder, numbers, view=0, name="{:06d}.png"):
    for number in numbers:
        write(folder / name.format(number), image_bytes(picture(number, view)))


def the_episode(root, **options):
    reader = CarlaDumpReader(root, **{"fixed_delta_s": 0.05, **options})
    index = reader.index()
    (ref,) = index.episodes
    return reader, index, ref


def seen(reader, ref, view):
    """Return the simulator frame that each step of a view shows, None where it shows none."""
    found = frames(reader, ref, view, np.arange(ref.num_steps))
    return [None if isinstance(f, Fault) else 256 * int(f[0, 0, 0]) + int(f[0, 0, 1]) for f in found]


@pytest.mark.parametrize("name", ["{:08d}.png", "{:06d}.png", "{}.png", "Town05_{:06d}.png"])
def test_a_folder_of_pictures_is_one_camera(tmp_path, name):
    write_camera(tmp_path / "_out", range(997, 1003), name=name)
    _, _, whole = the_episode(tmp_path)
    reader, index, ref = the_episode(tmp_path / "_out")
    assert (index.format, ref.key, ref.num_steps, ref.rate_hz, index.faults) == ("carla-dump", "_out", 6, 20.0, ())
    assert [(view.name, view.height_px, view.width_px, view.kind) for view in ref.views] == [("rgb", *SIZE, "rgb")]
    assert [view.name for view in whole.views] == ["_out"]  # given from above, the folder is one of several cameras
    assert seen(reader, ref, "rgb") == list(range(997, 1003))
    assert ref.details["town"] == ("Town05" if "Town05" in name else "")


def test_a_lost_frame_is_a_step_without_it_and_shifts_no_other(tmp_path):
    write_camera(tmp_path / "front", [100, 102, 104, 108, 110])
    write_camera(tmp_path / "rear", [102, 104, 106, 108])
    reader, _, ref = the_episode(tmp_path)
    assert (ref.num_steps, ref.rate_hz) == (6, 10.0)
    assert seen(reader, ref, "front") == [100, 102, 104, None, 108, 110]
    assert seen(reader, ref, "rear") == [None, 102, 104, 106, 108, None]
    rows, faults = signals(reader, ref, ["timestamp_s", "simulator_frame"], np.arange(6))
    np.testing.assert_allclose(rows, np.stack([0.1 * np.arange(6), 100 + 2 * np.arange(6)], 1))
    assert faults == ()
    (lost,) = (f for f in frames(reader, ref, "front", np.arange(6)) if isinstance(f, Fault))
    assert (lost.reason, lost.start, lost.stop, lost.path) == (Reason.MISSING_FILE, 3, 4, "front/000106.png")


def test_a_camera_that_drifts_has_times_of_its_own(tmp_path):
    numbers = [100, 103, 106, 110, 113, 116, 120, 123, 126, 130, 133, 136, 140]
    write_camera(tmp_path / "front", [*numbers, *range(10_000, 10_004)])
    reader, _, ref = the_episode(tmp_path)
    assert (ref.num_steps, ref.rate_hz) == (17, 0.0)
    assert seen(reader, ref, "front") == [*numbers, *range(10_000, 10_004)]
    rows, _ = signals(reader, ref, ["timestamp_s"], np.arange(17))
    np.testing.assert_allclose(rows[:13, 0], (np.array(numbers) - 100) * 0.05)


def test_how_long_a_frame_lasts_must_be_said(tmp_path):
    write_camera(tmp_path / "run/front", range(4))
    index = open_source(tmp_path).index()
    assert index.episodes == ()
    (fault,) = index.faults
    assert (fault.reason, fault.episode) == (Reason.BAD_METADATA, "run")
    assert fault.message.endswith("give --reader fixed_delta_s=0.05")
    assert open_source(tmp_path, options={"fixed_delta_s": "0.1"}).index().episodes[0].rate_hz == 10.0
    with pytest.raises(UsageError, match="fixed_delta_s of 0 to 3600"):
        CarlaDumpReader(tmp_path, -1.0)


@pytest.mark.parametrize("text", ["frame,timestamp\n{}", "frame;elapsed_seconds;x\n{}", "# times\n{}"])
def test_times_come_from_a_table_by_frame(tmp_path, text):
    write_camera(tmp_path / "front", [10, 20, 30, 50])
    separator = ";" if ";" in text else ","
    lines = [separator.join([str(frame), f"{7 + frame / 100:.3f}"]) for frame in range(0, 60, 5)]
    (tmp_path / "timestamps.txt").write_text(text.format("\n".join(lines)))
    _, _, ref = the_episode(tmp_path, fixed_delta_s=0.0)
    assert (ref.num_steps, ref.rate_hz) == (5, 10.0)


def test_uneven_times_are_kept_and_frames_without_one_are_left_out_and_said(tmp_path):
    write_camera(tmp_path / "front", range(20, 26))
    (tmp_path / "timestamps.csv").write_text("frame,timestamp\n20,1.0\n21,1.04\n22,1.1\n24,1.15\n25,1.3\n")
    reader, index, ref = the_episode(tmp_path, fixed_delta_s=0.0)
    assert (ref.num_steps, ref.rate_hz) == (5, 0.0)
    rows, _ = signals(reader, ref, ["timestamp_s", "simulator_frame"], np.arange(5))
    np.testing.assert_allclose(rows, [[0, 20], [0.04, 21], [0.1, 22], [0.15, 24], [0.3, 25]])
    assert [(fault.reason, fault.episode) for fault in index.faults] == [(Reason.COUNT_MISMATCH, tmp_path.name)]
    assert seen(reader, ref, "front") == [20, 21, 22, 24, 25]


def test_times_that_go_back_are_refused(tmp_path):
    write_camera(tmp_path / "front", range(3))
    (tmp_path / "timestamps.csv").write_text("frame,timestamp\n0,1.0\n1,0.5\n2,2.0\n")
    index = CarlaDumpReader(tmp_path).index()
    assert [fault.reason for fault in index.faults] == [Reason.TIME_ORDER]


@given(
    numbers=st.lists(st.integers(0, 10**6), min_size=2, max_size=30, unique=True),
    frame_s=st.sampled_from([0.05, 0.1, 1 / 30]),
)
def test_every_frame_that_was_recorded_is_a_step_at_its_time(numbers, frame_s):
    recorded = np.array(sorted(numbers))
    clock = read_clock(recorded, None, (), frame_s)
    steps = np.arange(clock.num_steps)
    place = {int(frame): step for step, frame in zip(steps, clock.frames(steps))}
    times_s = clock.times_s(steps)
    for frame in recorded.tolist():
        np.testing.assert_allclose(times_s[place[frame]], (frame - recorded[0]) * frame_s, rtol=1e-4, atol=1e-9)
    assert clock.num_steps <= 2 * len(recorded) + 10
    assert bool(clock.rate_hz) == (not clock.numbers)


def test_records_and_tables_are_signals(tmp_path):
    write_camera(tmp_path / "front", range(5, 9))
    for frame in range(5, 9):
        ego = {
            "speed": frame / 2,
            "location": {"x": frame, "y": -1.5},
            "velocity": [1, 2, frame],
            "name": "hero",
            "ok": True,
        }
        if frame != 7:
            write(tmp_path / f"ego/{frame}.json", json.dumps(ego).encode())
    (tmp_path / "control.csv").write_text(
        "frame,steer,throttle,brake,note\n5,0.5,1,0,a\n6,0.25,1,False,b\n8,-1,0,True,c\n8,9,9,9,d"
    )
    reader, index, ref = the_episode(tmp_path)
    assert (index.state, index.actions) == (("speed",), ("steer", "throttle", "brake"))
    assert [(fault.reason, fault.path) for fault in index.faults] == [(Reason.DUPLICATE, "control.csv")]
    assert {signal.name: signal.shape for signal in ref.signals} == {
        "steer": (), "throttle": (), "brake": (), "speed": (), "location.x": (), "location.y": (), "velocity": (3,), "ok": (),
        "simulator_frame": (), "timestamp_s": (),
    }  # fmt: skip
    rows, faults = signals(reader, ref, ["speed", "location.x", "velocity", "steer", "brake"], np.arange(4))
    expected = [[2.5, 5, 1, 2, 5, 0.5, 0], [3, 6, 1, 2, 6, 0.25, 0], [np.nan] * 7, [4, 8, 1, 2, 8, -1, 1]]
    np.testing.assert_array_equal(rows, expected)
    assert sorted((fault.reason, fault.start, fault.stop, fault.path) for fault in faults) == [
        (Reason.COUNT_MISMATCH, 2, 3, "control.csv"),
        (Reason.MISSING_FILE, 2, 3, "ego/7.json"),
    ]
    assert {str(path) for path in reader.files(ref)} >= {"control.csv", "ego/5.json", "front/000005.png"}


def test_depth_is_in_metres_and_labels_are_class_ids_unless_they_were_coloured(tmp_path):
    code = np.zeros((*SIZE, 3), np.uint8)
    code[0, 0], code[0, 1] = (1, 2, 3), (255, 255, 255)
    for frame in range(3):
        write(tmp_path / f"depth/{frame}.png", image_bytes(code))
        write(tmp_path / f"semantic_front/{frame}.png", image_bytes(code))
    reader, _, ref = the_episode(tmp_path)
    assert {view.name: view.kind for view in ref.views} == {"depth": "depth", "semantic_front": "labels"}
    (depth,) = frames(reader, ref, "depth", np.array([1]))
    np.testing.assert_allclose(depth[0, :2], [1000 * (1 + 256 * 2 + 65536 * 3) / (2**24 - 1), 1000], rtol=1e-6)
    (labels,) = frames(reader, ref, "semantic_front", np.array([2]))
    np.testing.assert_array_equal(labels[0, :2], [1, 255])
    coloured = open_source(tmp_path, options={"fixed_delta_s": "0.05", "labels": "", "depth": ""}).index().episodes[0]
    assert {view.kind for view in coloured.views} == {"rgb"}


def test_several_cameras_in_one_folder_are_told_by_their_names(tmp_path):
    for view, name in enumerate(("left_{:04d}.png", "right_{:04d}.png")):
        write_camera(tmp_path / "images", range(3), view, name)
    write(tmp_path / "images/cover1.png", image_bytes(picture(0)))
    write(tmp_path / "images/1700000000000000000.png", image_bytes(picture(0)))  # a time, and no frame
    write(tmp_path / "lidar/000001.ply", b"ply")
    reader, index, ref = the_episode(tmp_path)
    assert [view.name for view in ref.views] == ["images_left", "images_right"]
    assert seen(reader, ref, "images_right") == [0, 1, 2]
    assert index.notes == ("3 files beside images and records were ignored",)


def test_recordings_in_folders_are_episodes_and_declare_each_others_cameras(tmp_path):
    write_camera(tmp_path / "a/Town01_run/front", range(3))
    write_camera(tmp_path / "a/Town02_run/front", range(4))
    write_camera(tmp_path / "a/Town02_run/rear", range(4), 1)
    reader = CarlaDumpReader(tmp_path, 0.05)
    one, two = reader.index().episodes
    assert (one.key, two.key) == ("a/Town01_run", "a/Town02_run")
    assert (one.details["town"], two.details["town"]) == ("Town01", "Town02")
    assert [(view.name, view.present) for view in one.views] == [("front", True), ("rear", False)]
    assert all(isinstance(frame, Fault) for frame in frames(reader, one, "rear", np.arange(3)))
    assert seen(reader, two, "rear") == [0, 1, 2, 3]


def test_a_damaged_recording_is_converted_with_masks_and_a_quarantine(tmp_path):
    raw = tmp_path / "raw"
    write_camera(raw / "front", range(100, 110))
    (raw / "front/000102.png").unlink()
    (raw / "front/000104.png").write_bytes(b"")
    whole = (raw / "front/000106.png").read_bytes()
    (raw / "front/000106.png").write_bytes(whole[: len(whole) // 2])
    write(raw / "front/108.png", image_bytes(picture(1)))
    (raw / "ego.csv").write_text("frame,speed\n" + "\n".join(f"{frame},{frame / 4}" for frame in range(100, 110)))
    recipe = tmp_path / "dump.toml"
    recipe.write_text(
        '[views.main]\nfrom = ["front"]\nsize = [6, 8]\nresize = "stretch"\n[signals.state]\nfrom = ["speed"]\n'
    )
    report = convert(raw, tmp_path / "out", recipe, reader={"fixed_delta_s": "0.05"}, cluster=ClusterOptions(workers=0))
    assert report.total_steps == 10
    group = zarr.open_group(tmp_path / "out", mode="r")
    shown = group["rgb_main"][:, 0, 0].astype(int)
    lost = [2, 4, 6]
    np.testing.assert_array_equal(np.flatnonzero(~group["rgb_main_valid"][:]), lost)
    kept = np.setdiff1d(np.arange(10), lost)
    np.testing.assert_array_equal(256 * shown[kept, 0] + shown[kept, 1], 100 + kept)
    np.testing.assert_array_equal(group["state"][:, 0], (100 + np.arange(10)) / 4)
    rows = pq.read_table(next((tmp_path / "out").rglob("quarantine*.parquet"))).to_pylist()
    assert sorted((row["path"], row["reason"]) for row in rows) == [
        ("front/000102.png", "missing-file"),
        ("front/000104.png", "truncated"),
        ("front/000106.png", "truncated"),
        ("front/108.png", "duplicate"),
    ]


def test_a_table_without_frames_is_refused_or_ignored(tmp_path):
    write_camera(tmp_path / "front", range(3))
    (tmp_path / "summary.csv").write_text("route,score\n1,2\n")
    (tmp_path / "notes.txt").write_text("weather: rain\n")
    _, index, _ = the_episode(tmp_path)
    assert [(fault.path, fault.reason) for fault in index.faults] == [("summary.csv", Reason.BAD_METADATA)]
    with pytest.raises(SourceError, match="expected rows with a column 'frame'"):
        read_table(tmp_path, "notes.txt")


def test_real_frames_sixty_apart_are_seven_steps():
    folder = shared_data("carla_frames_png")
    reader, index, ref = the_episode(folder)
    assert (ref.num_steps, ref.details["town"], index.faults) == (7, "Town05", ())
    np.testing.assert_allclose(ref.rate_hz, 1 / 3, atol=1e-6)
    for step, frame in enumerate(frames(reader, ref, "rgb", np.arange(7))):
        with Image.open(folder / f"Town05_{1920 + 60 * step:06d}.png") as image:
            np.testing.assert_array_equal(frame, np.asarray(image.convert("RGB")))
