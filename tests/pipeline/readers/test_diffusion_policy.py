"""Replay buffers of Diffusion Policy and UMI: what is read, exactly, and what is refused."""

import contextlib
import json
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.diffusion_policy import DiffusionPolicyReader
from pipeline.readers.zarr_files import FolderFiles, ZipFiles
from pipeline.readers.zarr_v2 import MAX_CHUNK_NBYTES, read_array, read_rows
from schemas.errors import MissingExtraError, Reason, SourceError
from schemas.source import EpisodeRef, Fault
from tests.conftest import shared_data
from tests.pipeline.readers.builders import colour, write
from tests.pipeline.readers.replay_builder import (
    CODECS,
    array_files,
    buffer_files,
    pusht_arrays,
    write_folder,
    write_pusht,
    write_zip,
)

ENDS = (3, 7, 9)


@pytest.fixture(name="store", params=["folder", "zip", "deflated zip"])
def _store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same recording in every form; returns the source."""
    files = buffer_files(ENDS, pusht_arrays(9))
    if request.param == "folder":
        write_folder(tmp_path / "pusht.zarr", files)
    else:
        method = zipfile.ZIP_STORED if request.param == "zip" else zipfile.ZIP_DEFLATED
        write_zip(tmp_path / "pusht.zarr.zip", files, method)
    return tmp_path


def only(root: Path, number: int = 0) -> tuple[DiffusionPolicyReader, EpisodeRef]:
    reader = DiffusionPolicyReader(root)
    return reader, reader.index().episodes[number]


def set_meta(path: Path, **changes: object) -> None:
    write(path, json.dumps({**json.loads(path.read_bytes()), **changes}).encode())


def test_episodes_lie_end_to_end(store):
    index = open_source(store).index()
    assert index.format == "diffusion-policy" and index.faults == ()
    assert [ref.num_steps for ref in index.episodes] == [3, 4, 2]
    assert [ref.key.rpartition("/")[2] for ref in index.episodes] == [f"episode_00000{k}" for k in range(3)]


def test_rows_are_those_of_the_step_across_chunks(store):
    reader = DiffusionPolicyReader(store)
    for ref, start in zip(reader.index().episodes, (0, 3, 7), strict=True):
        steps = np.array([0, 1, 1, ref.num_steps - 1])
        block = reader.read_signals(ref, ["state", "agent_pos", "action", "n_contacts", "timestamp_s"], steps)
        expected = 10 * (start + steps)[:, None] + np.arange(5)
        assert block.faults == ()
        np.testing.assert_array_equal(block.values["state"], expected)
        np.testing.assert_array_equal(block.values["agent_pos"], expected[:, :2])
        np.testing.assert_array_equal(block.values["action"], -expected[:, :2])
        np.testing.assert_array_equal(block.values["timestamp_s"], steps / 10.0)
        assert block.values["n_contacts"].shape == (4,) and block.values["agent_pos"].dtype == np.float32


def test_float_frames_become_uint8_exactly(store):
    reader = DiffusionPolicyReader(store)
    ref = reader.index().episodes[1]
    found = list(frames(reader, ref, "img", np.arange(4)))
    assert all(frame.dtype == np.uint8 for frame in found)
    for step, frame in enumerate(found):
        np.testing.assert_array_equal(frame, colour(0, 3 + step, (16, 20)))


def test_each_chunk_is_unpacked_once_in_a_pass(tmp_path, monkeypatch):
    write_pusht(tmp_path, (9,))
    reader, ref = only(tmp_path)
    opened = []
    read = FolderFiles.read
    monkeypatch.setattr(FolderFiles, "read", lambda files, name, limit: opened.append(name) or read(files, name, limit))
    assert len(list(reader.read_frames(ref, "img", np.arange(9).repeat(2)))) == 18
    assert [name for name in opened if ".zarray" not in name] == [f"data/img/{k}.0.0.0" for k in range(3)]


def test_pusht_is_known_by_its_arrays(tmp_path):
    write_pusht(tmp_path)
    index = DiffusionPolicyReader(tmp_path).index()
    assert (index.state, index.actions) == (("agent_pos",), ("action",))
    assert index.episodes[0].rate_hz == 10.0 and "PushT's 10 Hz" in index.notes[0]
    assert index.episodes[0].signal("agent_pos").units == "px"


def umi_arrays(num_steps: int, robots: int = 2) -> dict[str, np.ndarray]:
    arrays = {}
    for robot in range(robots):
        for name, width in (("eef_pos", 3), ("eef_rot_axis_angle", 3), ("gripper_width", 1), ("demo_start_pose", 6)):
            arrays[f"robot{robot}_{name}"] = np.arange(num_steps * width, dtype=np.float32).reshape(num_steps, width)
        arrays[f"camera{robot}_rgb"] = np.stack([colour(robot, step) for step in range(num_steps)])
    return arrays


def test_umi_takes_the_poses_of_all_robots_for_state_and_actions(tmp_path):
    write_zip(tmp_path / "dataset.zarr.zip", buffer_files((4, 6), umi_arrays(6), chunk_steps=1))
    reader = open_source(tmp_path)
    index = reader.index()
    names = [f"robot{k}_{name}" for k in range(2) for name in ("eef_pos", "eef_rot_axis_angle", "gripper_width")]
    assert index.state == index.actions == tuple(names)
    ref = index.episodes[1]
    assert ref.rate_hz == 60.0 and ref.key == "dataset.zarr.zip/episode_000001"
    rows, faults = signals(reader, ref, names, np.arange(2))
    assert rows.shape == (2, 14) and faults == ()
    (frame,) = frames(reader, ref, "camera1_rgb", np.array([1]))
    np.testing.assert_array_equal(frame, colour(1, 5))
    assert [str(path) for path in reader.files(ref)] == ["dataset.zarr.zip"]


def test_recorded_times_count_from_the_episode_start(tmp_path):
    arrays = {"timestamp": 100 + np.arange(6) / 8, "action": np.zeros((6, 2), np.float32)}
    write_folder(tmp_path / "real.zarr", buffer_files((2, 6), arrays))
    reader, ref = only(tmp_path, 1)
    assert ref.rate_hz == 0
    block = reader.read_signals(ref, ["timestamp_s"], np.array([0, 2, 3]))
    assert block.values["timestamp_s"].tolist() == [0, 0.25, 0.375]
    with pytest.raises(Exception, match="timestamp"):
        ref.signal("timestamp")


def test_without_a_rate_a_step_is_a_second_and_meta_json_gives_rate_and_instructions(tmp_path):
    write_folder(tmp_path / "a.zarr", buffer_files((2,), {"action": np.zeros((2, 2), np.float32)}))
    index = DiffusionPolicyReader(tmp_path).index()
    assert index.episodes[0].rate_hz == 1.0 and "one second" in index.notes[0]
    write(tmp_path / "meta.json", b'{"rate_hz": 20, "instructions": "push"}')
    (ref,) = DiffusionPolicyReader(tmp_path).index().episodes
    assert (ref.rate_hz, ref.instructions) == (20.0, ("push",))
    assert DiffusionPolicyReader(tmp_path, rate_hz=5).index().episodes[0].rate_hz == 5


def test_the_root_may_be_the_buffer_itself(tmp_path):
    reader, ref = only(write_pusht(tmp_path))
    assert ref.key == "episode_000000"
    assert "data/img/0.0.0.0" in [str(path) for path in reader.files(ref)]
    assert all((reader.root / path).is_file() for path in reader.files(ref))


# -- Zarr v2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("order", "separator"), [("C", "."), ("F", "/")])
def test_arrays_of_every_codec_order_and_separator_come_back(tmp_path, codec, order, separator):
    values = np.arange(7 * 5 * 3, dtype=">i4").reshape(7, 5, 3)
    codec = "none" if order == "F" and codec in ("zstd", "lz4", "blosc") else codec  # those would copy to C order
    files = array_files("data/a", values, (3, 2, 3), codec=codec, order=order, separator=separator)
    write_folder(tmp_path, files)
    store = FolderFiles(tmp_path, "")
    array = read_array(store, "data/a")
    np.testing.assert_array_equal(np.concatenate([read_rows(store, array, k) for k in range(3)]), values)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_any_cut_into_chunks_comes_back(shape, data):
    chunks = [data.draw(st.integers(1, 7)) for _ in shape]
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    files = array_files("a", values, chunks, codec="none")

    class Memory:
        def read(self, name: str, limit_nbytes: int) -> bytes:
            return files[name]

        def path(self, name: str) -> str:
            return name

    array = read_array(Memory(), "a")
    rows = [read_rows(Memory(), array, k) for k in range(-(-shape[0] // chunks[0]))]
    np.testing.assert_array_equal(np.concatenate(rows), values)


def test_zarr_python_agrees(tmp_path):
    zarr = pytest.importorskip("zarr")
    values = np.random.default_rng(0).normal(size=(11, 4, 3)).astype(np.float32)
    array = zarr.create_array(
        str(tmp_path / "data/a"), shape=values.shape, chunks=(3, 4, 2), dtype="f4", zarr_format=2, compressors="auto"
    )
    array[:] = values
    store = FolderFiles(tmp_path, "")
    found = read_array(store, "data/a")
    np.testing.assert_array_equal(np.concatenate([read_rows(store, found, k) for k in range(4)]), values)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_frames_that_are_no_whole_numbers_are_refused_and_their_neighbours_served(tmp_path):
    arrays = pusht_arrays(4)
    arrays["img"][1, 0, 0, 0] = 12.5
    arrays["img"][2, 0, 0, 0] = np.nan
    arrays["img"][3, 0, 0, 0] = 256
    write_folder(tmp_path / "a.zarr", buffer_files((4,), arrays))
    reader, ref = only(tmp_path)
    found = list(frames(reader, ref, "img", np.arange(4)))
    assert isinstance(found[0], np.ndarray)
    assert [(fault.reason, fault.start) for fault in found[1:]] == [(Reason.UNSUPPORTED, step) for step in (1, 2, 3)]


def test_a_missing_chunk_is_refused_and_never_a_black_frame(store):
    reader = DiffusionPolicyReader(store)
    ref = reader.index().episodes[1]  # steps 3 to 6: chunks 0 and 1
    folder = store / "pusht.zarr"
    if folder.exists():
        (folder / "data/img/1.0.0.0").unlink()
        (folder / "data/action/1.0").unlink()
    else:
        files = buffer_files(ENDS, pusht_arrays(9))
        del files["data/img/1.0.0.0"], files["data/action/1.0"]
        write_zip(store / "pusht.zarr.zip", files)
    found = list(reader.read_frames(ref, "img", np.arange(4)))
    assert isinstance(found[0], np.ndarray)
    assert [frame.reason for frame in found[1:]] == [Reason.MISSING_FILE] * 3
    block = reader.read_signals(ref, ["action", "state"], np.arange(4))
    assert [(fault.reason, fault.stream, fault.start, fault.stop) for fault in block.faults] == [
        (Reason.MISSING_FILE, "action", 1, 4)
    ]
    assert np.isnan(block.values["action"][1:]).all() and np.isfinite(block.values["action"][0]).all()


@pytest.mark.parametrize("codec", ["blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "none"])
def test_damaged_chunks_are_values_or_one_source_error(tmp_path, codec):
    random = np.random.default_rng(0)
    values = random.integers(0, 255, (8, 50), dtype=np.uint8)
    write_folder(tmp_path, array_files("a", values, (8, 50), codec=codec))
    store = FolderFiles(tmp_path, "")
    array = read_array(store, "a")
    whole = (tmp_path / "a/0.0").read_bytes()
    for trial in range(60):
        damaged = bytearray(whole)
        if trial % 3:
            damaged[random.integers(len(damaged) if trial % 2 else 20)] ^= 1 << random.integers(8)
        else:
            del damaged[random.integers(1, len(damaged)) :]
        (tmp_path / "a/0.0").write_bytes(damaged)
        with contextlib.suppress(SourceError):
            assert read_rows(store, array, 0).shape == (8, 50)


def test_a_chunk_that_unpacks_to_more_than_it_may_is_refused(tmp_path):
    for codec in ("zlib", "gzip", "bz2", "zstd", "lz4", "blosc"):
        bomb = array_files("a", np.zeros((1, 5_000_000), np.uint8), (1, 5_000_000), codec=codec)["a/0.0"]
        files = array_files("a", np.zeros((1, 10), np.uint8), (1, 10), codec=codec)
        write_folder(tmp_path / codec, {**files, "a/0.0": bomb})
        store = FolderFiles(tmp_path / codec, "")
        with pytest.raises(SourceError) as caught:
            read_rows(store, read_array(store, "a"), 0)
        assert caught.value.reason in (Reason.TOO_LARGE, Reason.DECODE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "|O", "filters": [{"id": "pickle"}]}, Reason.UNSUPPORTED),
        ({"dtype": [["a", "<f4"]]}, Reason.UNSUPPORTED),
        ({"dtype": "<U8"}, Reason.UNSUPPORTED),
        ({"dtype": "<c8"}, Reason.UNSUPPORTED),
        ({"filters": [{"id": "delta"}]}, Reason.UNSUPPORTED),
        ({"compressor": {"id": "pickle"}}, Reason.UNSUPPORTED),
        ({"compressor": "blosc"}, Reason.BAD_METADATA),
        ({"zarr_format": 3}, Reason.UNSUPPORTED),
        ({"chunks": [0, 2]}, Reason.BAD_METADATA),
        ({"chunks": [2]}, Reason.BAD_METADATA),
        ({"shape": [-1, 2]}, Reason.BAD_METADATA),
        ({"shape": [9, 2.5]}, Reason.BAD_METADATA),
        ({"chunks": [MAX_CHUNK_NBYTES, 2]}, Reason.TOO_LARGE),
        ({"shape": [9, 2**40]}, Reason.TOO_LARGE),
    ],
)
def test_arrays_that_cannot_be_read_are_one_fault_and_the_others_are_served(tmp_path, changes, reason):
    store = write_pusht(tmp_path)
    set_meta(store / "data/action/.zarray", **changes)
    index = DiffusionPolicyReader(tmp_path).index()
    assert [(fault.reason, fault.stream) for fault in index.faults] == [(reason, "action")]
    assert len(index.episodes) == 3 and index.actions == index.state


def test_lengths_that_disagree_are_faults_and_what_is_there_is_served(tmp_path):
    arrays = pusht_arrays(9)
    arrays["action"] = arrays["action"][:5]
    write_folder(tmp_path / "a.zarr", buffer_files(ENDS, arrays))
    reader, ref = only(tmp_path, 1)
    assert [(fault.reason, fault.stream) for fault in reader.index().faults] == [(Reason.COUNT_MISMATCH, "action")]
    block = reader.read_signals(ref, ["action"], np.arange(4))
    assert {fault.reason for fault in block.faults} == {Reason.COUNT_MISMATCH}
    assert np.isfinite(block.values["action"]).all(axis=1).tolist() == [True, False, False, False]


@pytest.mark.parametrize("ends", [(3, 2), (-1, 4), (0,)])
def test_ends_that_cannot_be_are_refused(tmp_path, ends):
    write_folder(tmp_path / "a.zarr", buffer_files(ends, pusht_arrays(4)))
    index = DiffusionPolicyReader(tmp_path).index()
    assert index.episodes == () and [fault.reason for fault in index.faults] == [Reason.BAD_METADATA]


def test_empty_episodes_are_refused_and_ends_beyond_the_arrays_cut(tmp_path):
    write_folder(tmp_path / "a.zarr", buffer_files((2, 2, 6, 9), pusht_arrays(4)))
    index = DiffusionPolicyReader(tmp_path).index()
    assert [(ref.key[-1], ref.num_steps) for ref in index.episodes] == [("0", 2), ("2", 2)]
    assert {fault.reason for fault in index.faults} == {Reason.EMPTY_EPISODE, Reason.COUNT_MISMATCH}


# -- archives ----------------------------------------------------------------------------------------------------------


def test_names_in_an_archive_lead_nowhere(tmp_path):
    files = buffer_files((2,), {"action": np.zeros((2, 2), np.float32)})
    write(tmp_path / "secret/.zarray", b"{}")
    files["data/../../secret/.zarray"] = b"{}"
    files["/data/x/.zarray"] = b"{}"
    write_zip(tmp_path / "raw/a.zarr.zip", files)
    index = DiffusionPolicyReader(tmp_path / "raw").index()
    assert {signal.name for signal in index.episodes[0].signals} == {"action", "timestamp_s"}
    assert [fault.stream for fault in index.faults] == [".."]


def test_a_member_that_claims_to_be_small_is_not_unpacked_further(tmp_path):
    path = write_zip(tmp_path / "a.zarr.zip", {"a": bytes(10_000_000)}, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    for at in (data.index(b"PK\x03\x04") + 22, data.index(b"PK\x01\x02") + 24):
        data[at : at + 4] = struct.pack("<I", 100)
    path.write_bytes(data)
    with pytest.raises(SourceError, match="with crc32") as caught:
        ZipFiles(tmp_path, "a.zarr.zip").read("a", 2**20)
    assert caught.value.reason == Reason.DECODE
    with pytest.raises(SourceError, match="at most 50 bytes"):
        ZipFiles(tmp_path, "a.zarr.zip").read("a", 50)


def test_a_flipped_bit_in_an_archive_is_found_by_its_crc32(tmp_path):
    path = write_zip(tmp_path / "a.zarr.zip", {"a": b"0123456789"})
    data = bytearray(path.read_bytes())
    data[data.index(b"0123456789")] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=f"crc32 {zlib.crc32(b'0123456789'):08x}"):
        ZipFiles(tmp_path, "a.zarr.zip").read("a", 100)


@pytest.mark.parametrize("data", [b"", b"junk", b"PK\x03\x04" + bytes(100), b"PK\x05\x06" + b"\xff" * 18])
def test_what_is_no_whole_archive_is_one_fault(tmp_path, data):
    write(tmp_path / "a.zarr.zip", data)
    index = DiffusionPolicyReader(tmp_path).index()
    assert index.episodes == () and len(index.faults) == 1


def test_an_archive_that_was_replaced_is_read_anew(tmp_path):
    path = write_zip(tmp_path / "a.zarr.zip", {"a": b"first"})
    assert ZipFiles(tmp_path, "a.zarr.zip").read("a", 100) == b"first"
    path.unlink()
    write_zip(path, {"b": bytes(7), "a": b"second"})
    assert ZipFiles(tmp_path, "a.zarr.zip").read("a", 100) == b"second"


# -- images packed as images -------------------------------------------------------------------------------------------


def image_store(root: Path, codec: str, frames: np.ndarray, encode) -> Path:
    files = buffer_files(
        (len(frames),), {"camera0_rgb": frames, "action": np.zeros((len(frames), 1), np.float32)}, chunk_steps=1
    )
    for step, frame in enumerate(frames):
        files[f"data/camera0_rgb/{step}.0.0.0"] = encode(frame)
    meta = json.loads(files["data/camera0_rgb/.zarray"])
    files["data/camera0_rgb/.zarray"] = json.dumps({**meta, "compressor": {"id": codec, "level": 99}}).encode()
    return write_zip(root / "dataset.zarr.zip", files)


def test_without_imagecodecs_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "imagecodecs", None)
    image_store(tmp_path, "imagecodecs_jpegxl", np.zeros((1, 8, 8, 3), np.uint8), lambda frame: b"\xff\x0a")
    reader, ref = only(tmp_path)
    with pytest.raises(MissingExtraError, match=r"headrace\[umi\]"):
        list(reader.read_frames(ref, "camera0_rgb", np.arange(1)))


@pytest.mark.parametrize("kind", ["jpegxl", "jpeg2k"])
def test_images_packed_by_imagecodecs_are_decoded(tmp_path, kind):
    imagecodecs = pytest.importorskip("imagecodecs")
    random = np.random.default_rng(0)
    originals = random.integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)
    encode = {"jpegxl": imagecodecs.jpegxl_encode, "jpeg2k": imagecodecs.jpeg2k_encode}[kind]
    image_store(tmp_path, f"imagecodecs_{kind}", originals, lambda frame: encode(frame, level=0, **LOSSLESS[kind]))
    reader, ref = only(tmp_path)
    found = list(reader.read_frames(ref, "camera0_rgb", np.arange(3)))
    np.testing.assert_array_equal(np.stack(found), originals)


LOSSLESS = {"jpegxl": {"lossless": True}, "jpeg2k": {"reversible": True}}


@pytest.mark.parametrize("kind", ["jpegxl", "jpeg2k"])
def test_an_image_of_another_size_than_its_chunk_is_refused(tmp_path, kind):
    imagecodecs = pytest.importorskip("imagecodecs")
    encode = {"jpegxl": imagecodecs.jpegxl_encode, "jpeg2k": imagecodecs.jpeg2k_encode}[kind]
    large = bytes(encode(np.zeros((3000, 3000, 3), np.uint8)))
    image_store(tmp_path, f"imagecodecs_{kind}", np.zeros((2, 8, 8, 3), np.uint8), lambda frame: large)
    reader, ref = only(tmp_path)
    for fault in reader.read_frames(ref, "camera0_rgb", np.arange(2)):
        assert isinstance(fault, Fault) and fault.reason == Reason.DECODE


# -- real recordings ---------------------------------------------------------------------------------------------------


def test_the_replay_buffer_of_pusht_is_read():
    reader = DiffusionPolicyReader(shared_data("diffusion_policy_zarr"))
    index = reader.index()
    assert len(index.episodes) == 206 and sum(ref.num_steps for ref in index.episodes) == 25_650
    assert index.faults == () and (index.state, index.actions) == (("agent_pos",), ("action",))
    ref = index.episodes[1]
    actions, faults = signals(reader, ref, ["action"], np.arange(ref.num_steps))
    assert faults == () and actions.shape == (118, 2) and 0 <= actions.min() <= actions.max() <= 512
    (frame,) = frames(reader, ref, "img", np.array([0]))
    assert frame.shape == (96, 96, 3) and frame.dtype == np.uint8 and frame.std() > 10
