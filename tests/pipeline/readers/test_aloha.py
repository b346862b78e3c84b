"""ALOHA, ACT and Mobile ALOHA episodes."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.graph import frames, signals
from pipeline.loaders import MultiViewLoader
from pipeline.readers import open_source
from pipeline.readers.aloha import AlohaReader, image_bytes
from pipeline.readers.video import read_video_frames
from pipeline.verification import verify
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import Fault
from tests.pipeline.readers import hdf5_builders as builders
from tests.pipeline.readers.builders import colour


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def textured(seed: int) -> np.ndarray:
    ramp = np.arange(8)[:, None] * 9 + np.arange(12) * 5
    return np.stack([ramp + seed, 255 - ramp, np.full_like(ramp, 40 * seed)], axis=2).astype(np.uint8)


def test_a_plain_episode_is_read_as_recorded(tmp_path: Path) -> None:
    reader = open_source(builders.write_aloha(tmp_path, (3, 4)))
    index = reader.index()
    assert (index.format, index.state, index.actions) == ("aloha", ("qpos",), ("action",))
    assert [(ref.key, ref.num_steps, ref.rate_hz) for ref in index.episodes] == [
        ("episode_0", 3, 50.0),
        ("episode_1", 4, 50.0),
    ]
    ref = index.episodes[1]
    assert [(v.name, v.height_px, v.width_px, v.encoding) for v in ref.views] == [
        (camera, 6, 8, "raw") for camera in builders.CAMERAS
    ]
    assert ref.signal("qpos").names[:2] == ("left_waist", "left_shoulder")
    assert (ref.signal("qpos").names[6], ref.signal("qpos").names[13]) == ("left_gripper", "right_gripper")
    block = reader.read_signals(ref, ["qpos", "qvel", "effort", "action", "timestamp_s"], np.array([0, 2, 2]))
    assert block.faults == ()
    for name, expected in builders.aloha_signals(4, 1).items():
        np.testing.assert_array_equal(block.values[name.rpartition("/")[2]], expected[[0, 2, 2]])
    np.testing.assert_array_equal(block.values["timestamp_s"], [0, 0.04, 0.04])
    for view, camera in enumerate(builders.CAMERAS):
        for step, frame in zip((1, 3), reader.read_frames(ref, camera, np.array([1, 3])), strict=True):
            np.testing.assert_array_equal(frame, colour(view, step))
    assert list(reader.files(ref)) == [Path("episode_1.hdf5")]


def test_a_compressed_episode_crosses_as_the_jpeg_that_was_recorded(tmp_path: Path) -> None:
    images = [builders.jpeg(textured(step)) for step in range(3)]
    stacks = {"cam_high": builders.padded(images, 4000), "cam_low": builders.padded(images[::-1])}
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(3), stacks)  # no attribute says so
    reader = AlohaReader(tmp_path)
    (ref,) = reader.index().episodes
    assert [(v.height_px, v.width_px, v.encoding) for v in ref.views] == [(8, 12, "jpeg")] * 2
    assert list(reader.read_frames(ref, "cam_high", np.arange(3))) == images
    assert list(reader.read_frames(ref, "cam_low", np.array([0, 0, 2]))) == [images[2], images[2], images[0]]


@pytest.mark.parametrize(("says", "width"), [(True, 4), (False, 3)])
def test_the_number_of_axes_says_what_is_compressed_and_not_the_attribute(
    tmp_path: Path, says: bool, width: int
) -> None:
    images = [builders.jpeg(textured(step)) for step in range(2)]
    stack = builders.padded(images) if width == 3 else np.stack([textured(0), textured(1)])
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(2), {"top": stack}, compress=says)
    reader = AlohaReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.views[0].encoding == ("jpeg" if width == 3 else "raw")
    for step, frame in enumerate(frames(reader, ref, "top", np.arange(2))):
        np.testing.assert_array_equal(frame, decoded(images[step]) if width == 3 else textured(step))


# What a policy sees must be the scene: red is 200 here. `memory` is what the recorder had in memory and handed to
# cv2.imencode, which takes it for BGR, or wrote as it was.
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("memory", ["rgb", "bgr"])
def test_either_channel_order_is_shown_as_the_scene_was(tmp_path: Path, compressed: bool, memory: str) -> None:
    scene = np.full((8, 8, 3), (200, 100, 20), np.uint8)
    in_memory = scene if memory == "rgb" else scene[..., ::-1]
    stack = builders.padded([builders.jpeg(in_memory[..., ::-1], 100)]) if compressed else in_memory[None]
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(1), {"cam_high": stack})
    for order in ("rgb", "bgr", "openpi"):
        reader = AlohaReader(tmp_path, channel_order=order)
        (ref,) = reader.index().episodes
        (frame,) = frames(reader, ref, "cam_high", np.arange(1))
        # examples/aloha_real/convert_aloha_data_to_lerobot.py: cv2.imdecode and COLOR_BGR2RGB, or the array as it is
        taken = order if order != "openpi" else "bgr" if compressed else "rgb"
        expected = (200, 100, 20) if taken == memory else (20, 100, 200)
        np.testing.assert_allclose(frame, np.broadcast_to(expected, (8, 8, 3)), atol=2)
        assert ref.details["channel_order"] == order
    assert any("channel_order" in note for note in AlohaReader(tmp_path).index().notes)


def test_an_option_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="channel_order of openpi, rgb, bgr, found 'gbr'"):
        AlohaReader(tmp_path, channel_order="gbr")
    with pytest.raises(UsageError, match="rate_hz above 0"):
        AlohaReader(tmp_path, rate_hz=0)


@given(data=st.binary(min_size=1, max_size=60), pad=st.integers(0, 9), guesses=st.lists(st.floats(), max_size=4))
def test_padding_is_taken_off_whatever_it_is(data: bytes, pad: int, guesses: list[float]) -> None:
    image = b"\xff\xd8" + data.replace(b"\xff\xd9", b"") + b"\xff\xd9"
    lengths = np.array([*guesses, len(image), np.nan])
    assert image_bytes(image + b"\0" * pad, lambda: lengths) == image
    filled = image + b"\xff\xd9\x07" * pad  # that may end like an image, or not
    found = image_bytes(filled, lambda: np.array([np.nan, 1e30, -1.0, len(image)]))
    assert found == image or pad == 0


@pytest.mark.parametrize("order", ["list", "sorted", "with depth", "steps first", "nonsense", "absent"])
def test_compress_len_is_believed_only_where_an_image_ends(tmp_path: Path, order: str) -> None:
    stacks = {
        name: [builders.jpeg(textured(k + 3 * step)) for step in range(4)] for k, name in enumerate(("high", "low"))
    }
    lengths = np.array([[len(image) for image in stack] for stack in stacks.values()], np.float32)
    lengths = {
        "list": lengths[::-1],
        "sorted": lengths,
        "with depth": np.concatenate([np.full((1, 4), 7.0), lengths]),
        "steps first": lengths.T,
        "nonsense": lengths * 0 + np.nan,
        "absent": None,
    }[order]
    written = {} if lengths is None else {"compress_len": lengths}
    images = {name: builders.padded(stack, 3000, filler=7) for name, stack in stacks.items()}
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(4) | written, images)
    reader = AlohaReader(tmp_path)
    (ref,) = reader.index().episodes
    assert "compress_len" not in [signal.name for signal in ref.signals]
    for name, stack in stacks.items():
        assert list(reader.read_frames(ref, name, np.arange(4))) == stack


def test_rows_that_hold_no_whole_image_cost_their_own_step(tmp_path: Path) -> None:
    good = builders.jpeg(textured(1))
    stack = builders.padded([good, good[:-40], b"", b"GIF89a", good], len(good))
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(5), {"cam_high": stack})
    reader = AlohaReader(tmp_path)
    (ref,) = reader.index().episodes
    found = list(reader.read_frames(ref, "cam_high", np.arange(5)))
    assert [frame.reason if isinstance(frame, Fault) else frame for frame in found] == [
        good,
        Reason.TRUNCATED,
        Reason.TRUNCATED,
        Reason.DECODE,
        good,
    ]
    assert isinstance(found[2], Fault)
    assert (found[2].episode, found[2].stream, found[2].start, found[2].stop) == ("episode_0", "cam_high", 2, 3)
    assert found[2].path == reader.frame_path(ref, "cam_high", 2) == "episode_0.hdf5"


def test_episodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        builders.write_aloha_arrays(tmp_path / f"task/episode_{number}.hdf5", builders.aloha_signals(1), {})
    assert [ref.key for ref in AlohaReader(tmp_path).index().episodes] == [
        "task/episode_0",
        "task/episode_2",
        "task/episode_10",
    ]


def test_simulated_and_mobile_episodes_differ_in_what_they_have(tmp_path: Path) -> None:
    simulated = {name: rows for name, rows in builders.aloha_signals(2).items() if "effort" not in name}
    builders.write_aloha_arrays(tmp_path / "sim/episode_0.hdf5", simulated, {}, sim=True)
    mobile = {**builders.aloha_signals(2), "base_action": builders.rows(2, 2)}
    builders.write_aloha_arrays(tmp_path / "mobile/episode_0.hdf5", mobile, {})
    reader = AlohaReader(tmp_path)
    by_key = {ref.key: ref for ref in reader.index().episodes}
    assert [s.name for s in by_key["sim/episode_0"].signals] == ["action", "qpos", "qvel", "timestamp_s"]
    assert by_key["sim/episode_0"].details["sim"] == "True"
    ref = by_key["mobile/episode_0"]
    rows, _ = signals(reader, ref, ["action", "base_action"], np.arange(2))
    np.testing.assert_allclose(rows, np.hstack([mobile["action"], mobile["base_action"]]))


def test_depth_and_other_arrays_are_left_alone_and_named(tmp_path: Path) -> None:
    images = {"cam_high": np.zeros((2, 4, 4, 3), np.uint8), "cam_high_depth": np.zeros((2, 4, 4), np.uint16)}
    images["cam_four"] = np.zeros((2, 4, 4, 4), np.uint8)
    path = builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", builders.aloha_signals(2), images)
    with h5py.File(path, "a") as file:
        file["notes"] = ["of free length", "and so objects"]
        file["observations/images/bytes"] = np.array([b"ab", b"cd"]).view("V2")
        ragged = file.create_dataset("observations/images/ragged", (2,), h5py.vlen_dtype(np.uint8))
        ragged[0] = [1, 2]
    index = AlohaReader(tmp_path).index()
    assert [view.name for view in index.episodes[0].views] == ["cam_high"]
    assert {fault.stream: fault.reason for fault in index.faults} == dict.fromkeys(
        ["notes", "bytes", "ragged"], Reason.UNSUPPORTED
    )
    assert any("cam_four, cam_high_depth" in note for note in index.notes)


def test_lengths_that_disagree_are_said_and_cost_their_own_steps(tmp_path: Path) -> None:
    arrays = builders.aloha_signals(4) | {"observations/qpos": builders.rows(3, 14)}
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", arrays, {"cam_high": np.zeros((2, 4, 4, 3), np.uint8)})
    reader = AlohaReader(tmp_path)
    index = reader.index()
    (ref,) = index.episodes
    assert [(f.episode, f.stream, f.reason, f.start, f.stop) for f in index.faults] == [
        ("episode_0", "qpos", Reason.COUNT_MISMATCH, 3, 4),
        ("episode_0", "cam_high", Reason.COUNT_MISMATCH, 2, 4),
    ]
    block = reader.read_signals(ref, ["qpos"], np.arange(4))
    np.testing.assert_array_equal(np.isnan(block.values["qpos"][:, 0]), [False, False, False, True])
    assert [(f.reason, f.start, f.stop) for f in block.faults] == [(Reason.COUNT_MISMATCH, 3, 4)]
    found = list(reader.read_frames(ref, "cam_high", np.arange(1, 4)))
    assert [isinstance(frame, Fault) for frame in found] == [False, True, True]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"action": np.zeros((0, 14))}, Reason.EMPTY_EPISODE),
        ({"action": np.array([b"a", b"b"])}, Reason.UNSUPPORTED),
        ({"action": np.zeros((2, 3, 4, 5))}, Reason.BAD_METADATA),
    ],
)
def test_an_episode_without_actions_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], reason: Reason) -> None:
    builders.write_aloha_arrays(tmp_path / "episode_0.hdf5", {"observations/qpos": np.zeros((2, 14)), **arrays}, {})
    index = AlohaReader(tmp_path).index()
    assert index.episodes == ()
    assert [(fault.episode, fault.reason) for fault in index.faults] == [("episode_0", reason)]


def test_files_cut_anywhere_are_refused_with_a_reason_and_cost_no_other(tmp_path: Path) -> None:
    builders.write_aloha(tmp_path, (3, 3))
    whole = (tmp_path / "episode_0.hdf5").read_bytes()
    for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "episode_0.hdf5").write_bytes(whole[:length])
        index = open_source(tmp_path).index()
        assert [ref.key for ref in index.episodes] == ["episode_1"]
        (fault,) = index.faults
        assert (fault.episode, fault.path) == ("episode_0", "episode_0.hdf5")
        assert fault.reason in (Reason.TRUNCATED, Reason.DECODE)
    assert fault.reason == Reason.TRUNCATED
    (tmp_path / "episode_1.hdf5").unlink()
    with pytest.raises(
        SourceError, match=r"aloha: episode_0.hdf5: expected a sound HDF5 file, found: .*truncated file"
    ):
        open_source(tmp_path)


def test_a_file_that_went_after_indexing_is_a_fault_for_each_step(tmp_path: Path) -> None:
    reader = AlohaReader(builders.write_aloha(tmp_path, (3,)))
    (ref,) = reader.index().episodes
    (tmp_path / "episode_0.hdf5").unlink()
    found = list(reader.read_frames(ref, "cam_high", np.array([0, 2, 2])))
    assert [(f.reason, f.start) for f in found if isinstance(f, Fault)] == [(Reason.MISSING_FILE, k) for k in (0, 2, 2)]
    block = reader.read_signals(ref, ["qpos"], np.arange(3))
    assert np.isnan(block.values["qpos"]).all()
    assert [(f.reason, f.start, f.stop) for f in block.faults] == [(Reason.MISSING_FILE, 0, 3)]


def test_an_index_reads_no_array_but_the_head_of_each_views_first_image(tmp_path: Path, monkeypatch) -> None:
    builders.write_aloha(tmp_path / "jpeg", (3,), compressed=True)
    builders.write_aloha(tmp_path / "plain", (3,))
    read: list[tuple[str, int]] = []
    getitem = h5py.Dataset.__getitem__

    def spy(self: h5py.Dataset, args: object) -> object:
        found = getitem(self, args)
        read.append((str(self.name), len(found)))
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    assert len(AlohaReader(tmp_path).index().episodes) == 2
    assert read == [(f"/observations/images/{camera}", 1) for camera in builders.CAMERAS]


def test_readers_and_references_travel_by_pickle(tmp_path: Path) -> None:
    reader = AlohaReader(builders.write_aloha(tmp_path), channel_order="bgr")
    (ref, _) = reader.index().episodes
    assert pickle.loads(pickle.dumps((reader, ref))) == (reader, ref)
    json.dumps(ref.details)


# -- from end to end, with real pixels and motions in the container that ACT writes -------------------------------------


@pytest.fixture(scope="module")
def real_episode(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rebuild 24 steps of a real aloha_sim episode: real pixels, reconstructed container."""
    source = shared_data / "lerobot_v1/aloha_sim_insertion_human"
    if not source.exists():
        pytest.skip("needs the real recordings")
    with pa.OSFile(str(source / "train/data-00000-of-00001.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all().slice(0, 24)
    video = source / "videos/observation.images.top_episode_000000.mp4"
    top = np.stack(list(read_video_frames(video, np.arange(24))))
    signals_ = {
        "observations/qpos": np.array(table["observation.state"].to_pylist(), np.float32),
        "action": np.array(table["action"].to_pylist(), np.float32),
    }
    root = tmp_path_factory.mktemp("aloha")
    images = [builders.jpeg(frame, 50) for frame in top]
    stacks = {"cam_high": builders.padded(images, 60_000), "cam_left_wrist": builders.padded(images[::-1], 60_000)}
    builders.write_aloha_arrays(root / "episode_0.hdf5", signals_, stacks, compress=True)
    builders.write_aloha_arrays(root / "episode_1.hdf5", signals_, {"cam_high": top, "cam_left_wrist": top[::-1]})
    return root


def test_real_episodes_convert_verify_and_load(real_episode: Path, tmp_path: Path) -> None:
    report = convert(real_episode, tmp_path / "out", "pi0", cluster=ClusterOptions(workers=0))
    assert (report.exit_code, report.total_episodes, report.total_steps) == (0, 2, 48)
    assert verify(tmp_path / "out").ok
    loader = MultiViewLoader(tmp_path / "out", 48, shuffle=False, horizon=4, tail="pad")
    (batch,) = list(loader)
    masks = {view: mask.tolist() for view, mask in batch["image_mask"].items()}
    assert masks == {
        "base_0_rgb": [True] * 48,
        "left_wrist_0_rgb": [True] * 48,
        "right_wrist_0_rgb": [False] * 48,
    }
    with h5py.File(real_episode / "episode_1.hdf5") as file:
        np.testing.assert_array_equal(batch["state"][24:, :14], file["observations/qpos"][:])
        np.testing.assert_array_equal(batch["actions"][24:, 0, :14], file["action"][:])
        first = np.asarray(Image.fromarray(file["observations/images/cam_high"][0]).resize((224, 168), Image.BILINEAR))
    np.testing.assert_array_equal(batch["image"]["base_0_rgb"][24, 28:196], first)
    assert np.abs(batch["image"]["base_0_rgb"][0].astype(int) - batch["image"]["base_0_rgb"][24]).mean() < 3  # q50
    np.testing.assert_array_equal(batch["image"]["left_wrist_0_rgb"][0], batch["image"]["base_0_rgb"][23])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_reads_what_its_parent_had_open(tmp_path: Path) -> None:
    reader = AlohaReader(builders.write_aloha(tmp_path, (3,)))
    (ref,) = reader.index().episodes
    opened = reader.read_frames(ref, "cam_high", np.arange(3))
    next(opened)
    child = os.fork()
    if child == 0:
        good = all(isinstance(frame, np.ndarray) for frame in reader.read_frames(ref, "cam_high", np.arange(3)))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(next(opened), colour(0, 1))
    shutil.rmtree(tmp_path)
