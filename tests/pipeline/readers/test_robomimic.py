"""robomimic, LIBERO and raw robosuite demonstrations."""

import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.graph import frames, signals
from pipeline.loaders import MultiViewLoader
from pipeline.readers import open_source
from pipeline.readers.robomimic import RobomimicReader
from pipeline.readers.video import read_video_frames
from pipeline.verification import verify
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import Fault
from tests.pipeline.readers import hdf5_builders as builders
from tests.pipeline.readers.builders import colour


def test_demonstrations_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    reader = open_source(builders.write_robomimic(tmp_path / "lift/low.hdf5", (0, 2, 10)).parent)
    index = reader.index()
    assert (index.format, index.faults) == ("robomimic", ())
    assert [(ref.key, ref.num_steps, ref.rate_hz) for ref in index.episodes] == [
        ("low/demo_0", 4, 25.0),
        ("low/demo_2", 4, 25.0),
        ("low/demo_10", 4, 25.0),
    ]
    assert index.state == ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
    assert index.actions == ("actions",)
    ref = index.episodes[2]
    assert (ref.details["env"], ref.details["orientation"]) == ("Lift", "recorded")
    rows, faults = signals(reader, ref, ["robot0_eef_quat", "actions", "rewards", "timestamp_s"], np.array([0, 3, 3]))
    assert faults == ()
    expected = builders.robomimic_demo(4, 10)
    parts = [expected["obs/robot0_eef_quat"], expected["actions"], [[0]] * 3 + [[1]], [[0], [0.04], [0.08], [0.12]]]
    np.testing.assert_allclose(rows, np.hstack(parts)[[0, 3, 3]])
    for step, frame in zip((0, 2), frames(reader, ref, "robot0_eye_in_hand_image", np.array([0, 2])), strict=True):
        np.testing.assert_array_equal(frame, colour(1, step))
    assert any("next_obs was left alone" in note for note in index.notes)
    assert not any("next" in signal.name for signal in ref.signals)


def test_a_filter_mask_chooses_demonstrations(tmp_path: Path) -> None:
    masks = {"train": ["demo_10", "demo_0"], "valid": ["demo_2"], "20_percent": ["demo_0"]}
    builders.write_robomimic(tmp_path / "a.hdf5", masks=masks)
    everything = RobomimicReader(tmp_path).index()
    assert [ref.details["masks"] for ref in everything.episodes] == [["20_percent", "train"], ["valid"], ["train"]]
    index = RobomimicReader(tmp_path, mask="train").index()
    assert [ref.key for ref in index.episodes] == ["a/demo_0", "a/demo_10"]
    assert "1 demonstrations outside the mask were left alone" in index.notes
    with pytest.raises(UsageError, match="expected a mask of 20_percent, train, valid, found 'test'"):
        RobomimicReader(tmp_path, mask="test").index()


def test_a_mask_that_names_what_is_not_there_is_said(tmp_path: Path) -> None:
    builders.write_robomimic(tmp_path / "a.hdf5", (0, 1), masks={"train": ["demo_0", "demo_7"]})
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["mask/numbers"] = np.arange(3)
        file["mask/texts"] = ["demo_1"]  # of free length, which other writers use
    index = RobomimicReader(tmp_path, mask="train").index()
    assert [ref.key for ref in index.episodes] == ["a/demo_0"]
    assert [(fault.stream, fault.reason) for fault in index.faults] == [
        ("mask/numbers", Reason.UNSUPPORTED),
        ("mask/train", Reason.COUNT_MISMATCH),
    ]
    assert [ref.key for ref in RobomimicReader(tmp_path, mask="texts").index().episodes] == ["a/demo_1"]


def test_libero_says_its_instruction_state_and_which_way_is_up(tmp_path: Path) -> None:
    reader = RobomimicReader(builders.write_libero(tmp_path / "bowl_demo.hdf5", (3, 4)).parent)
    index = reader.index()
    assert [(ref.key, ref.rate_hz) for ref in index.episodes] == [
        ("bowl_demo/demo_0", 20.0),
        ("bowl_demo/demo_1", 20.0),
    ]
    ref = index.episodes[1]
    assert ref.instructions == ("put the bowl on the plate",)
    assert (index.state, index.actions) == (("ee_states", "gripper_states"), ("actions",))
    rows, _ = signals(reader, ref, [*index.state, *index.actions], np.arange(4))
    assert rows.shape == (4, 8 + 7)
    demo = builders.libero_demo(4, 1)
    np.testing.assert_array_equal(rows, np.hstack([demo["obs/ee_states"], demo["obs/gripper_states"], demo["actions"]]))
    y, x = np.mgrid[:6, :8]
    for view, name in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
        (frame,) = frames(reader, ref, name, np.array([2]))
        np.testing.assert_array_equal(frame, np.stack([y, x, np.full((6, 8), 40 * view + 2)], axis=2))
    assert any("upside down (opengl)" in note for note in index.notes)


@pytest.mark.parametrize(
    ("convention", "orientation", "top_left"),
    [
        ("opengl", "auto", (0, 0)),
        ("opencv", "auto", (5, 0)),
        ("", "auto", (5, 0)),
        ("opengl", "recorded", (5, 0)),
        ("opencv", "flipped", (0, 0)),
        ("opengl", "rotated", (0, 7)),  # as OpenVLA's regenerated sets: img[::-1, ::-1]
    ],
)
def test_images_are_turned_by_one_rule(
    tmp_path: Path, convention: str, orientation: str, top_left: tuple[int, int]
) -> None:
    builders.write_libero(tmp_path / "a.hdf5", (2,), macros_image_convention=convention)
    reader = RobomimicReader(tmp_path, orientation=orientation)
    (ref,) = reader.index().episodes
    (frame,) = frames(reader, ref, "agentview_rgb", np.array([0]))
    assert isinstance(frame, np.ndarray)
    assert frame.flags.c_contiguous
    assert tuple(frame[0, 0, :2]) == top_left
    assert ref.details["orientation"] in ("recorded", "flipped", "rotated")


def test_an_orientation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="orientation of auto, recorded, flipped, rotated, found 'up'"):
        RobomimicReader(tmp_path, orientation="up")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("open the drawer", "open the drawer"),
        ('"open the drawer"', "open the drawer"),
        (["open the ", "drawer"], "open the drawer"),
        (list("open the drawer"), "open the drawer"),
        (None, ""),
        (3, ""),
    ],
)
def test_instructions_are_read_however_libero_writes_them(tmp_path: Path, written: object, found: str) -> None:
    builders.write_libero(tmp_path / "a.hdf5", (2,), problem_info={"language_instruction": written})
    (ref,) = RobomimicReader(tmp_path).index().episodes
    assert ref.instructions == ((found,) if found else ())


def test_a_demonstrations_own_instruction_comes_first(tmp_path: Path) -> None:
    path = builders.write_robomimic(tmp_path / "a.hdf5", (0, 1))
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["ep_meta"] = json.dumps({"lang": "close the left door"})
        file["data/demo_0"].attrs["ep_meta"] = "{"
    index = RobomimicReader(tmp_path).index()
    assert [ref.instructions for ref in index.episodes] == [(), ("close the left door",)]
    assert [(fault.episode, fault.reason) for fault in index.faults] == [("a/demo_0", Reason.BAD_METADATA)]


def test_raw_robosuite_files_have_states_and_actions_alone(tmp_path: Path) -> None:
    demo = {"states": builders.rows(5, 32), "actions": builders.rows(5, 7), "controller_info": builders.rows(11, 3)}
    env_info = {"env_name": "TwoArmHandover", "control_freq": 30}
    builders.write_demos(tmp_path / "demo.hdf5", {"demo_1": demo}, env="TwoArmHandover", env_info=env_info)
    index = RobomimicReader(tmp_path).index()
    (ref,) = index.episodes
    assert (ref.num_steps, ref.rate_hz, ref.details["env"]) == (5, 30.0, "TwoArmHandover")
    assert (index.state, index.actions) == (("states",), ("actions",))
    assert [(f.stream, f.reason, f.start, f.stop) for f in index.faults] == [
        ("controller_info", Reason.COUNT_MISMATCH, 5, 11)
    ]


def test_what_cannot_be_read_is_refused_or_named(tmp_path: Path) -> None:
    good = builders.robomimic_demo(2)
    demos = {
        "demo_0": {**good, "obs/depth": np.zeros((2, 6, 8, 1), np.float32), "obs/word": np.array([b"a", b"b"])},
        "demo_1": {"obs/robot0_eef_pos": builders.rows(2, 3)},
        "demo_2": {**good, "actions": np.zeros((0, 7))},
        "demo_x": good,
    }
    path = builders.write_demos(tmp_path / "a.hdf5", demos)
    with h5py.File(path, "a") as file:
        file["data/demo_0"].attrs["num_samples"] = "7"
        file["data"].attrs["env_args"] = "not JSON"
    index = RobomimicReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["a/demo_0"]
    assert sorted((fault.episode, fault.stream, fault.reason) for fault in index.faults) == [
        ("", "", Reason.BAD_METADATA),
        ("a/demo_0", "", Reason.COUNT_MISMATCH),
        ("a/demo_0", "word", Reason.UNSUPPORTED),
        ("a/demo_1", "", Reason.BAD_METADATA),
        ("a/demo_2", "", Reason.EMPTY_EPISODE),
    ]
    assert any("demo_x, depth" in note for note in index.notes)


def test_what_policies_are_trained_on_is_what_every_demonstration_offers(tmp_path: Path) -> None:
    one = builders.robomimic_demo(2)
    two = {**one, **{name.replace("robot0", "robot1"): rows for name, rows in one.items() if "robot0" in name}}
    builders.write_demos(tmp_path / "a.hdf5", {"demo_0": two})
    arm = ("eef_pos", "eef_quat", "gripper_qpos")
    assert RobomimicReader(tmp_path).index().state == tuple(f"robot{k}_{part}" for k in (0, 1) for part in arm)
    builders.write_demos(tmp_path / "b.hdf5", {"demo_0": one})
    assert RobomimicReader(tmp_path).index().state == tuple(f"robot0_{part}" for part in arm)
    builders.write_demos(tmp_path / "b.hdf5", {"demo_0": {k: v for k, v in one.items() if "gripper" not in k}})
    assert RobomimicReader(tmp_path).index().state == ("object", "robot0_eef_pos", "robot0_eef_quat")


def test_readers_and_references_travel_by_pickle(tmp_path: Path) -> None:
    reader = RobomimicReader(builders.write_robomimic(tmp_path / "a.hdf5").parent, orientation="flipped")
    ref = reader.index().episodes[0]
    assert pickle.loads(pickle.dumps((reader, ref))) == (reader, ref)
    json.dumps(ref.details)


# -- real recordings ---------------------------------------------------------------------------------------------------


def test_the_real_robosuite_recording_is_read(shared_data: Path) -> None:
    reader = open_source(shared_data / "robosuite_hdf5")
    index = reader.index()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [
        ("lift_demo/demo_1", 482),
        ("lift_demo/demo_2", 510),
        ("lift_demo/demo_3", 392),
    ]
    assert index.faults == ()
    rows, faults = signals(reader, index.episodes[1], [*index.state, *index.actions], np.arange(510))
    with h5py.File(shared_data / "robosuite_hdf5/lift_demo.hdf5") as file:
        demo = file["data/demo_2"]
        np.testing.assert_array_equal(rows, np.hstack([demo["states"][:], demo["actions"][:]]))
    assert faults == ()


def test_the_truncated_file_is_refused_and_its_neighbour_converts(shared_data: Path, tmp_path: Path) -> None:
    report = convert(shared_data / "robomimic", tmp_path / "out", "pi0", cluster=ClusterOptions(workers=0))
    assert (report.exit_code, report.total_episodes, report.total_steps) == (3, 1, 10)
    (fault,) = RobomimicReader(shared_data / "robomimic").index().faults
    assert (fault.episode, fault.reason) == ("torq_corrupt", Reason.TRUNCATED)
    assert verify(tmp_path / "out").ok
    with pytest.raises(SourceError, match="truncated file"):
        alone = tmp_path / "alone"
        alone.mkdir()
        (alone / "torq_corrupt.hdf5").write_bytes((shared_data / "robomimic/torq_corrupt.hdf5").read_bytes())
        open_source(alone)


@pytest.fixture(scope="module")
def real_libero(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rebuild real pixels and motions of PushT in LIBERO's container: 128 x 128 and upside down, gzip as robomimic packs."""
    source = shared_data / "lerobot_v1/pusht"
    if not source.exists():
        pytest.skip("needs the real recordings")
    with pa.OSFile(str(source / "train/data-00000-of-00001.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all().slice(0, 30)
    video = list(read_video_frames(source / "videos/observation.image_episode_000000.mp4", np.arange(30)))
    scenes = np.stack([np.asarray(Image.fromarray(frame).resize((128, 128))) for frame in video])
    state = np.array(table["observation.state"].to_pylist())
    demo = {
        "actions": np.pad(np.array(table["action"].to_pylist()), ((0, 0), (0, 5))),
        "states": state,
        "obs/ee_states": np.pad(state, ((0, 0), (0, 4))),
        "obs/gripper_states": state,
        "obs/agentview_rgb": scenes[:, ::-1],
        "obs/eye_in_hand_rgb": scenes[::-1, ::-1],
    }
    root = tmp_path_factory.mktemp("libero")
    problem = {"language_instruction": "push the T"}
    attributes = {"macros_image_convention": "opengl", "problem_info": problem}
    other = {**demo, "actions": demo["actions"] + 1.0}  # the same demonstration twice would be a duplicate
    builders.write_demos(root / "push_demo.hdf5", {"demo_0": demo, "demo_1": other}, compression="gzip", **attributes)
    np.save(root / "scenes.npy", scenes)
    return root


def test_real_pixels_in_libero_convert_verify_and_load(real_libero: Path, tmp_path: Path) -> None:
    report = convert(real_libero, tmp_path / "out", "pi0", cluster=ClusterOptions(workers=0))
    assert (report.exit_code, report.total_episodes, report.total_steps) == (0, 2, 60)
    assert verify(tmp_path / "out").ok
    (batch,) = list(MultiViewLoader(tmp_path / "out", 60, shuffle=False, horizon=10))
    assert {view: bool(mask.all()) for view, mask in batch["image_mask"].items()} == {
        "base_0_rgb": True,
        "left_wrist_0_rgb": True,
        "right_wrist_0_rgb": False,
    }
    assert batch["prompt"] == ["push the T"] * 60
    scenes = np.load(real_libero / "scenes.npy", allow_pickle=False)
    expected = np.asarray(Image.fromarray(scenes[7]).resize((224, 224), Image.BILINEAR))
    np.testing.assert_array_equal(batch["image"]["base_0_rgb"][37], expected)
    np.testing.assert_array_equal(batch["image"]["left_wrist_0_rgb"][29 - 7], expected)
    assert np.abs(batch["state"][:, :8]).max() > 0 and not batch["state"][:, 8:].any()


def test_a_packed_view_is_read_chunk_by_chunk(tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    demo = {"actions": builders.rows(40, 7), "obs/front": pixels}
    path = builders.write_demos(tmp_path / "a.hdf5", {"demo_0": demo})
    with h5py.File(path, "a") as file:
        del file["data/demo_0/obs/front"]
        file.create_dataset(
            "data/demo_0/obs/front", data=pixels, chunks=(7, 5, 16, 2), compression="gzip", shuffle=True
        )
    reader = RobomimicReader(tmp_path)
    (ref,) = reader.index().episodes
    steps = np.array([0, 6, 7, 7, 20, 39])
    for step, frame in zip(steps, reader.read_frames(ref, "front", steps), strict=True):
        assert not isinstance(frame, Fault)
        np.testing.assert_array_equal(frame, pixels[step])
