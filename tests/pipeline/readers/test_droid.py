"""DROID's own folders, written in its layout: cameras by role, both eyes of a video, outcome, instructions, what is missing."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.droid import ACTIONS, STATE, DroidReader
from pipeline.selection import success_of
from schemas.errors import Reason, UsageError
from schemas.source import Fault
from tests.pipeline.readers import droid_builder
from tests.pipeline.readers.builders import colour
from tests.pipeline.readers.droid_builder import SERIALS, write_droid, write_metadata, write_mp4


@pytest.fixture
def root(tmp_path) -> Path:
    return write_droid(tmp_path / "raw")


def folder_of(root: Path, number: int = 0) -> Path:
    return sorted(root.glob("TRI/*/*/*"), key=lambda path: path.parts[-3] != "success")[number]


def test_episodes_are_found_below_laboratory_outcome_and_day(root):
    reader = open_source(root)
    index = reader.index()
    assert (reader.name, index.state, index.actions, index.faults) == ("droid", STATE, ACTIONS, ())
    # Natural order: the folder failure comes before success.
    assert [(ref.num_steps, ref.details["success"]) for ref in index.episodes] == [(3, False), (4, True)]
    assert [success_of(ref, ["success"], reader) for ref in index.episodes] == [False, True]
    assert [ref.instructions for ref in index.episodes] == [(), ("lift the cup", "raise the cup")]
    assert index.episodes[1].details["current_task"] == "Use cup"
    assert {ref.rate_hz for ref in index.episodes} == {15.0}


def test_rows_come_from_their_own_groups(root):
    reader = DroidReader(root)
    ref = reader.index().episodes[1]
    arrays = droid_builder.trajectory(4)
    names = [name for name in arrays if not name.startswith("action/robot_state")]
    assert {signal.name for signal in ref.signals} == {*names, "timestamp_s"}
    for name in names:
        found, faults = signals(reader, ref, [name], np.array([1, 3]))
        assert faults == ()
        np.testing.assert_array_equal(found, arrays[name].reshape(4, -1)[[1, 3]])


def test_cameras_are_known_by_their_role_and_both_eyes_of_a_video_apart(root):
    reader = DroidReader(root)
    ref = reader.index().episodes[1]
    names = ["wrist_image_left", "exterior_image_1_left", "exterior_image_2_left", "exterior_image_2_right"]
    assert [view.name for view in ref.views] == names
    assert {(view.height_px, view.width_px) for view in ref.views} == {(16, 32)}
    for camera, name in enumerate(names):
        for step, frame in zip([0, 2, 3], frames(reader, ref, name, np.array([0, 2, 3])), strict=True):
            expected = colour(min(camera, 2), step, (16, 32))
            np.testing.assert_array_equal(frame, 255 - expected if camera == 3 else expected)


def test_without_metadata_the_trajectory_tells_the_cameras_and_the_folder_the_outcome(root):
    for path in root.rglob("metadata_*.json"):
        path.unlink()
    index = DroidReader(root).index()
    assert [(fault.reason, fault.is_warning) for fault in index.faults] == [(Reason.MISSING_FILE, True)] * 2
    assert [ref.details["success"] for ref in index.episodes] == [False, True]
    # camera types in HDF5's key order: the wrist's is 0, the others follow by number
    videos = {name: path.rpartition("/")[2] for name, (path, _) in index.episodes[1].details["videos"].items()}
    assert videos["wrist_image_left"] == f"{SERIALS['wrist']}.mp4"
    assert videos["exterior_image_1_left"] == f"{SERIALS['ext2']}-stereo.mp4"


def test_seconds_are_nominal_unless_the_recorded_ones_are_asked_for(root):
    for time, expected in (("nominal", np.arange(4) / 15), ("recorded", [0, 0.066, 0.137, 0.2])):
        reader = DroidReader(root, time=time)
        found, _ = signals(reader, reader.index().episodes[1], ["timestamp_s"], np.arange(4))
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-9)
    with pytest.raises(UsageError, match="time of nominal, recorded"):
        DroidReader(root, time="wall")


def test_a_video_one_frame_short_costs_that_frame(root):
    path = folder_of(root) / f"recordings/MP4/{SERIALS['wrist']}.mp4"
    write_mp4(path, [colour(0, step, (16, 32)) for step in range(3)])
    reader = DroidReader(root)
    ref = reader.index().episodes[1]
    found = list(frames(reader, ref, "wrist_image_left", np.arange(4)))
    assert [isinstance(frame, np.ndarray) for frame in found] == [True, True, True, False]
    assert isinstance(found[3], Fault)
    assert (found[3].reason, found[3].start, found[3].stop) == (Reason.COUNT_MISMATCH, 3, 4)


def test_a_camera_that_is_in_svo_alone_is_a_view_without_frames_and_said(root):
    (folder_of(root) / f"recordings/MP4/{SERIALS['ext1']}.mp4").unlink()
    index = DroidReader(root).index()
    view = index.episodes[1].view("exterior_image_1_left")
    assert not view.present and any("1 recordings are in SVO alone" in note for note in index.notes)
    (frame,) = frames(DroidReader(root), index.episodes[1], "exterior_image_1_left", np.array([0]))
    assert isinstance(frame, Fault) and frame.reason is Reason.MISSING_FILE


def test_what_contradicts_itself_is_said(root):
    write_metadata(folder_of(root), "TRI+0+run0", success=False, trajectory_length=9)
    index = DroidReader(root).index()
    assert [(fault.reason, fault.is_warning) for fault in index.faults] == [
        (Reason.COUNT_MISMATCH, True),
        (Reason.BAD_METADATA, True),
    ]
    assert index.episodes[1].details["success"] is False


def test_a_trajectory_that_is_cut_refuses_its_episode_alone(root):
    path = folder_of(root) / "trajectory.h5"
    path.write_bytes(path.read_bytes()[:2000])
    index = DroidReader(root).index()
    assert len(index.episodes) == 1
    assert [(fault.reason, fault.is_warning) for fault in index.faults] == [(Reason.TRUNCATED, False)]


@pytest.mark.parametrize(("old", "new"), [(b"png ", b"zzzz"), (b"isom", b"\xff\xff\xff\xff"), (b"moov", b"\0\0\0\0")])
def test_a_video_of_an_unknown_codec_or_with_damaged_names_costs_that_view_at_most(root, old, new):
    path = folder_of(root) / f"recordings/MP4/{SERIALS['wrist']}.mp4"
    path.write_bytes(path.read_bytes().replace(old, new))
    index = DroidReader(root).index()
    assert len(index.episodes) == 2
    assert {fault.stream for fault in index.faults} <= {"wrist_image_left"}
    assert index.episodes[1].view("exterior_image_1_left").present


def test_annotations_of_another_form_are_refused_or_left_alone(root):
    (root / "aggregated-annotations-030724.json").write_text(
        json.dumps({"TRI+0+run0": {"language_instruction1": 3}, "x": []})
    )
    assert DroidReader(root).index().episodes[1].instructions == ()
    (root / "aggregated-annotations-030724.json").write_text("{")
    assert [fault.reason for fault in DroidReader(root).index().faults] == [Reason.BAD_METADATA]
