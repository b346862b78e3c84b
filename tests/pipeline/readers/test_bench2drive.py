"""Bench2Drive clips."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.bench2drive import Bench2DriveReader
from schemas.errors import Reason
from schemas.source import Fault
from tests.pipeline.readers import builders

CLIP = "Accident_Town03_Route24816_Weather25"


@pytest.mark.parametrize("root", ["", "v1", f"v1/{CLIP}"])
def test_the_root_may_be_a_clip_a_folder_of_clips_or_a_version(tmp_path: Path, root: str) -> None:
    builders.write_bench2drive_clip(tmp_path / "v1" / CLIP)
    index = open_source(tmp_path / root).index()
    (ref,) = index.episodes
    assert index.format == "bench2drive"
    assert (ref.num_steps, ref.rate_hz) == (4, 10.0)
    assert {key: ref.details[key] for key in ("scenario", "town", "route", "weather")} == {
        "scenario": "Accident",
        "town": "Town03",
        "route": "24816",
        "weather": "25",
    }
    assert [(view.name, view.height_px, view.width_px, view.encoding) for view in ref.views] == [
        (name, 16, 16, "jpeg") for name in builders.CAMERAS
    ]
    assert index.faults == ()


def test_signals_are_what_was_recorded(tmp_path: Path) -> None:
    reader = Bench2DriveReader(builders.write_bench2drive_clip(tmp_path / CLIP))
    (ref,) = reader.index().episodes
    rows, faults = signals(reader, ref, ["ego_location", "ego_rotation", "speed", "steer"], np.arange(4))
    np.testing.assert_array_equal(
        rows, [[94.0 + step, 193.5, 1.0, -1.0, 0.5, 166.0, 2.0 + step, -0.5] for step in range(4)]
    )
    assert ref.signal("ego_rotation").names == ("pitch", "roll", "yaw")
    assert faults == ()
    everything = [signal.name for signal in ref.signals]
    block = reader.read_signals(ref, everything, np.arange(4))
    assert block.faults == ()
    np.testing.assert_array_equal(block.values["timestamp_s"], [0, 0.1, 0.2, 3 / 10])
    np.testing.assert_array_equal(block.values["weather"][0], np.arange(10))
    # theta is NaN on one step, only_ap_brake null: recorded like that, and no fault.
    np.testing.assert_array_equal(np.isnan(block.values["theta"]), [False, True, False, False])
    assert np.isnan(block.values["only_ap_brake"]).all()
    right = ref.instructions.index("Turn right at the next intersection.")
    np.testing.assert_array_equal(block.values["instruction_index"], [right] * 4)


def test_the_real_annotation_is_read(tmp_path: Path, shared_data: Path) -> None:
    (excerpt,) = (shared_data / "bench2drive_anno_excerpt").glob("*.json")
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 1)
    (clip / "anno/00000.json.gz").write_bytes(gzip.compress(excerpt.read_bytes()))
    reader = Bench2DriveReader(clip)
    (ref,) = reader.index().episodes
    block = reader.read_signals(
        ref, ["ego_location", "acceleration", "world2ego", "theta", "ego_rotation"], np.arange(1)
    )
    np.testing.assert_array_equal(
        block.values["ego_location"][0], [94.33071899414062, 193.85667419433594, 1.1712294816970825]
    )
    assert block.values["acceleration"][0, 2] == 9.77698040008545
    # spec: yaw = theta - pi/2, measured 7e-7 rad.
    yaw = np.radians(block.values["ego_rotation"][0, 2])
    assert abs(yaw - (block.values["theta"][0] - np.pi / 2)) < 1e-5
    position = block.values["world2ego"][0] @ [*block.values["ego_location"][0], 1]
    np.testing.assert_allclose(position[:3], 0, atol=1e-4)


def test_half_a_gzip_and_half_a_json_are_faults_of_their_steps(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 6)
    whole = (clip / "anno/00001.json.gz").read_bytes()
    (clip / "anno/00001.json.gz").write_bytes(whole[: len(whole) // 2])
    text = gzip.decompress((clip / "anno/00002.json.gz").read_bytes())
    (clip / "anno/00002.json.gz").write_bytes(gzip.compress(text[: len(text) // 2]))
    (clip / "anno/00003.json.gz").write_bytes(whole[:20] + b"\0\0\0\0" + whole[24:])
    (clip / "anno/00004.json.gz").write_bytes(b"")
    reader = Bench2DriveReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["speed"], np.arange(6))
    np.testing.assert_array_equal(block.values["speed"], [2, np.nan, np.nan, np.nan, np.nan, 7])
    assert [(fault.start, fault.reason) for fault in block.faults] == [
        (1, Reason.TRUNCATED),
        (2, Reason.TRUNCATED),
        (3, Reason.DECODE),
        (4, Reason.TRUNCATED),
    ]


def test_a_gzip_that_unpacks_without_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 1)
    (clip / "anno/00000.json.gz").write_bytes(gzip.compress(b" " * (2**26 + 1)))
    reader = Bench2DriveReader(clip)
    (ref,) = reader.index().episodes
    (fault,) = reader.read_signals(ref, ["speed"], np.arange(1)).faults
    assert fault.reason == Reason.TOO_LARGE


def test_an_annotation_without_its_ego_is_a_fault_of_the_ego_signals(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 2)
    record = builders.annotation(0)
    record["bounding_boxes"] = []
    (clip / "anno/00000.json.gz").write_bytes(gzip.compress(json.dumps(record).encode()))
    reader = Bench2DriveReader(clip)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["speed", "ego_center"], np.arange(2))
    np.testing.assert_array_equal(block.values["speed"], [2, 3])
    assert [(fault.stream, fault.start, fault.stop) for fault in block.faults] == [("ego_center", 0, 1)]


def test_a_lost_step_stays_a_step(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 5)
    (clip / "anno/00002.json.gz").unlink()
    (clip / "camera/rgb_front/00003.jpg").unlink()
    reader = Bench2DriveReader(clip)
    (ref,) = reader.index().episodes
    assert ref.num_steps == 5
    block = reader.read_signals(ref, ["speed", "timestamp_s"], np.arange(5))
    np.testing.assert_array_equal(block.values["speed"], [2, 3, np.nan, 5, 6])
    np.testing.assert_allclose(block.values["timestamp_s"], np.arange(5) / 10)
    found = list(frames(reader, ref, "rgb_front", np.arange(5)))
    assert [isinstance(frame, Fault) for frame in found] == [False, False, False, True, False]


def test_missing_cameras_depth_and_semantics_are_declared(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP)
    shutil.rmtree(clip / "camera/rgb_back")
    for step in range(4):
        builders.write(clip / f"camera/depth_front/{step:05d}.png", builders.image_bytes(np.full((4, 4), 51, np.uint8)))
        builders.write(
            clip / f"camera/semantic_front/{step:05d}.png", builders.image_bytes(np.full((4, 4), 14, np.uint8))
        )
    reader = Bench2DriveReader(clip)
    (ref,) = reader.index().episodes
    kinds = {view.name: (view.kind, view.present) for view in ref.views}
    assert kinds["rgb_back"] == ("rgb", False)
    assert kinds["depth_front"] == ("depth", True)
    assert kinds["semantic_front"] == ("labels", True)
    (depth,) = frames(reader, ref, "depth_front", np.array([1]))
    assert isinstance(depth, np.ndarray)
    np.testing.assert_allclose(depth, 10.0)  # 51 / 255 of 50 m
    (labels,) = frames(reader, ref, "semantic_front", np.array([1]))
    np.testing.assert_array_equal(labels, np.full((4, 4), 14))


def test_an_empty_clip_is_refused_and_not_overlooked(tmp_path: Path) -> None:
    builders.write_bench2drive_clip(tmp_path / CLIP)
    (tmp_path / "VehicleTurningRoutePedestrian_Town15_Route445_Weather11").mkdir()
    (tmp_path / "ControlLoss_Town11_Route401_Weather11/anno").mkdir(parents=True)
    (tmp_path / "ControlLoss_Town11_Route401_Weather11/camera").mkdir(parents=True)
    index = Bench2DriveReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == [CLIP]
    assert [(fault.episode.split("_")[0], fault.reason) for fault in index.faults] == [
        ("ControlLoss", Reason.EMPTY_EPISODE),
        ("VehicleTurningRoutePedestrian", Reason.MISSING_FILE),
    ]


def test_a_clip_unpacked_into_a_folder_of_its_own_name_is_found(tmp_path: Path) -> None:
    builders.write_bench2drive_clip(tmp_path / CLIP / CLIP)
    index = Bench2DriveReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == [f"{CLIP}/{CLIP}"]
    assert index.faults == ()


def test_an_index_opens_no_annotation(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP)
    for path in (clip / "anno").iterdir():
        path.write_bytes(b"broken")
    index = Bench2DriveReader(tmp_path).index()
    assert len(index.episodes) == 1
    assert index.faults == ()


def test_files_are_those_that_are_read(tmp_path: Path) -> None:
    clip = builders.write_bench2drive_clip(tmp_path / CLIP, 2)
    reader = Bench2DriveReader(tmp_path)
    (ref,) = reader.index().episodes
    expected = {path.relative_to(tmp_path) for path in clip.rglob("*.*") if path.suffix in (".gz", ".jpg")}
    assert set(reader.files(ref)) == expected
