"""Folders of large .npy arrays."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.npy import NpyReader
from pipeline.readers.npy_files import mapped, read_header
from schemas.errors import Reason, SourceError
from schemas.source import Fault
from tests.pipeline.readers import builders


def test_one_folder_is_one_recording(tmp_path: Path) -> None:
    builders.write_npy(tmp_path / "run", 5)
    (tmp_path / "run/meta.json").write_text('{"rate_hz": 20, "instructions": ["push the T"]}')
    reader = open_source(tmp_path / "run")
    index = reader.index()
    (ref,) = index.episodes
    assert (index.format, ref.key, ref.num_steps, ref.rate_hz) == ("npy", "run", 5, 20.0)
    assert [(view.name, view.height_px, view.width_px, view.encoding) for view in ref.views] == [("front", 6, 8, "raw")]
    assert (index.state, index.actions, ref.instructions) == (("state",), ("action",), ("push the T",))
    rows, faults = signals(reader, ref, ["state", "action", "timestamp_s"], np.array([0, 4, 4]))
    np.testing.assert_allclose(rows, [[0, 100, 200, 0, 0, 0], [4, 104, 204, 4, -4, 0.2], [4, 104, 204, 4, -4, 0.2]])
    assert faults == ()
    for step, frame in zip((1, 3), frames(reader, ref, "front", np.array([1, 3])), strict=True):
        np.testing.assert_array_equal(frame, builders.colour(1, step))
    assert set(reader.files(ref)) == {Path("front.npy"), Path("state.npy"), Path("action.npy")}


def test_folders_below_the_root_are_recordings_in_natural_order(tmp_path: Path) -> None:
    for name in ("episode_10", "episode_2"):
        builders.write_npy(tmp_path / name, 3)
    index = NpyReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["episode_2", "episode_10"]
    assert any("one step counts as one second" in note for note in index.notes)


def test_episode_ends_cut_a_folder_into_episodes(tmp_path: Path) -> None:
    builders.write_npy(tmp_path, 7, episode_ends=np.array([3, 7]), timestamp_s=np.arange(7) * 0.5 + 100)
    reader = NpyReader(tmp_path)
    index = reader.index()
    assert [(ref.key, ref.num_steps, ref.rate_hz) for ref in index.episodes] == [
        ("episode_000000", 3, 0.0),
        ("episode_000001", 4, 0.0),
    ]
    rows, faults = signals(reader, index.episodes[1], ["state", "timestamp_s"], np.arange(4))
    np.testing.assert_array_equal(rows, [[3 + k, 103 + k, 203 + k, 0.5 * k] for k in range(4)])
    assert faults == ()
    (frame,) = frames(reader, index.episodes[1], "front", np.array([2]))
    np.testing.assert_array_equal(frame, builders.colour(1, 5))


@pytest.mark.parametrize(
    ("ends", "reason", "count"),
    [
        (np.array([3, 3]), Reason.BAD_METADATA, 0),
        (np.array([-1, 5]), Reason.BAD_METADATA, 0),
        (np.array([1.5, 5]), Reason.BAD_METADATA, 0),
        (np.array([], np.int64), Reason.BAD_METADATA, 0),
        (np.array([2, 4]), Reason.COUNT_MISMATCH, 2),
        (np.array([2, 9, 12]), Reason.COUNT_MISMATCH, 2),
    ],
)
def test_ends_that_cannot_be_are_refused(tmp_path: Path, ends: np.ndarray, reason: Reason, count: int) -> None:
    builders.write_npy(tmp_path, 5, episode_ends=ends)
    index = NpyReader(tmp_path).index()
    assert [fault.reason for fault in index.faults] == [reason]
    assert len(index.episodes) == count


def test_counts_that_disagree_are_said_and_cost_their_own_steps(tmp_path: Path) -> None:
    builders.write_npy(tmp_path, 5, state=np.ones((4, 3), np.float32), action=np.arange(12.0).reshape(6, 2))
    reader = NpyReader(tmp_path)
    index = reader.index()
    (ref,) = index.episodes
    assert ref.num_steps == 5  # what the frames have
    assert [(f.reason, f.stream, f.start, f.stop) for f in index.faults] == [
        (Reason.COUNT_MISMATCH, "action", 5, 6),
        (Reason.COUNT_MISMATCH, "state", 4, 5),
    ]
    block = reader.read_signals(ref, ["state", "action"], np.arange(5))
    np.testing.assert_array_equal(np.isnan(block.values["state"][:, 0]), [False] * 4 + [True])
    np.testing.assert_array_equal(block.values["action"], np.arange(10.0).reshape(5, 2))
    assert [(f.stream, f.reason, f.start, f.stop) for f in block.faults] == [("state", Reason.COUNT_MISMATCH, 4, 5)]


def test_without_frames_most_arrays_say_the_length(tmp_path: Path) -> None:
    builders.write_npy(tmp_path, 5, camera=np.eye(3))
    (tmp_path / "front.npy").unlink()
    index = NpyReader(tmp_path).index()
    assert index.episodes[0].num_steps == 5
    assert [(f.stream, f.reason) for f in index.faults] == [("camera", Reason.COUNT_MISMATCH)]


def test_truncated_and_pickled_arrays_are_refused_before_they_are_mapped(tmp_path: Path) -> None:
    builders.write_npy(
        tmp_path, 5, names=np.array(["a", None], object), text=np.array(["a", "b"]), number=np.array(3.0)
    )
    path = tmp_path / "state.npy"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "other.npy").write_bytes(b"PK\x03\x04 an archive")
    index = NpyReader(tmp_path).index()
    assert {fault.stream: fault.reason for fault in index.faults} == {
        "names": Reason.UNSUPPORTED,
        "number": Reason.UNSUPPORTED,
        "other": Reason.DECODE,
        "short": Reason.TRUNCATED,
        "state": Reason.TRUNCATED,
        "text": Reason.UNSUPPORTED,
    }
    (fault,) = [fault for fault in index.faults if fault.stream == "state"]
    assert "188 bytes" in fault.message  # 128 of header and 5 * 3 * 4
    assert [signal.name for signal in index.episodes[0].signals] == ["action", "timestamp_s"]


def test_an_array_cut_after_indexing_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    builders.write_npy(tmp_path, 5)
    reader = NpyReader(tmp_path)
    (ref,) = reader.index().episodes
    for name in ("front", "state"):
        path = tmp_path / f"{name}.npy"
        path.write_bytes(path.read_bytes()[:-7])
    block = reader.read_signals(ref, ["state"], np.arange(5))
    assert [(f.reason, f.start, f.stop) for f in block.faults] == [(Reason.TRUNCATED, 0, 5)]
    found = list(frames(reader, ref, "front", np.arange(5)))
    assert [frame.reason for frame in found if isinstance(frame, Fault)] == [Reason.TRUNCATED] * 5


@given(
    array=hnp.arrays(
        st.sampled_from(["<f4", ">f8", "|u1", "<i8", ">u2", "?", "<f2"]), hnp.array_shapes(max_dims=4), fill=st.just(0)
    )
)
def test_headers_and_rows_are_what_numpy_loads(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    root = tmp_path_factory.mktemp("npy")
    for name, ordered in (("c", array), ("f", np.asfortranarray(array))):
        np.save(root / f"{name}.npy", ordered)
        expected = np.load(root / f"{name}.npy", allow_pickle=False)
        header = read_header(root, f"{name}.npy")
        assert (header.shape, header.dtype) == (expected.shape, expected.dtype)
        with mapped(root, f"{name}.npy") as rows:
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_the_header_are_read(tmp_path: Path, version: tuple[int, int]) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, np.arange(6.0).reshape(3, 2), version=version)
    with mapped(tmp_path, "a.npy") as rows:
        np.testing.assert_array_equal(rows, np.arange(6.0).reshape(3, 2))


def test_a_fortran_view_is_read_frame_by_frame(tmp_path: Path) -> None:
    front = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    builders.write_npy(tmp_path, 4, front=np.asfortranarray(front))
    reader = NpyReader(tmp_path)
    (ref,) = reader.index().episodes
    for step, frame in enumerate(frames(reader, ref, "front", np.arange(4))):
        assert isinstance(frame, np.ndarray)
        assert frame.flags.c_contiguous
        np.testing.assert_array_equal(frame, front[step])


def test_no_step_is_no_episode(tmp_path: Path) -> None:
    builders.write_npy(tmp_path, 0)
    index = NpyReader(tmp_path).index()
    assert index.episodes == ()
    assert [fault.reason for fault in index.faults] == [Reason.EMPTY_EPISODE]


def test_files_numbered_by_step_are_no_arrays_over_steps(tmp_path: Path) -> None:
    for step in range(3):
        builders.write(tmp_path / f"lidar/{step:04d}.npy", b"")
    with pytest.raises(SourceError, match="npy: no folder with named"):
        open_source(tmp_path)


def test_broken_metadata_is_a_fault_and_costs_no_array(tmp_path: Path) -> None:
    builders.write_npy(tmp_path / "a", 2)
    (tmp_path / "meta.json").write_text('{"rate_hz": 5, "instructions": "push"}')
    (tmp_path / "a/meta.json").write_text("{")
    index = NpyReader(tmp_path).index()
    assert [(ref.rate_hz, ref.instructions) for ref in index.episodes] == [(5.0, ("push",))]
    assert [(fault.reason, fault.path) for fault in index.faults] == [(Reason.BAD_METADATA, "a/meta.json")]


def test_readers_and_references_travel_by_pickle(tmp_path: Path) -> None:
    reader = NpyReader(builders.write_npy(tmp_path))
    (ref,) = reader.index().episodes
    assert pickle.loads(pickle.dumps((reader, ref))) == (reader, ref)
    json.dumps(ref.details)
