"""Reading rows: what was written, wherever it lies, and never anything else."""

import multiprocessing
import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.loaders.handles import FileHandles
from pipeline.loaders.reader import CHECKS, DatasetReader
from pipeline.store.metadata import read_info
from schemas.errors import ChecksumError, DatasetError, SchemaError, UsageError
from tests.pipeline.store_builder import Built, build_dataset

NUM_STEPS = 21
ROW = 6 * 4 * 3 + 4
"""Bytes of a stored frame with its checksum."""


@pytest.fixture(name="built", scope="module", params=["raw", "zstd", "blosc:lz4", "jpeg:95"])
def _built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("reader") / "out", codec=request.param, size=(16, 8))


@pytest.fixture(name="raw")
def _raw(tmp_path: Path) -> Built:
    """A raw dataset that a test may damage."""
    return build_dataset(tmp_path / "out")


def gather(reader: DatasetReader, name: str, steps: list[int]) -> np.ndarray:
    spec = reader.spec(name)
    out = np.full((len(steps), *spec.row_shape), 77, spec.dtype)
    reader.gather(name, np.array(steps, dtype=np.int64), out)
    return out


@given(steps=st.lists(st.integers(0, NUM_STEPS - 1), max_size=30), check=st.sampled_from(CHECKS))
def test_any_steps_in_any_order_are_the_rows_that_were_written(built, steps, check):
    reader = DatasetReader(built.root, check=check)
    for name in ("rgb_main", "rgb_side"):
        np.testing.assert_array_equal(gather(reader, name, steps), built.arrays[name][steps])


def test_rows_of_small_arrays_come_whole_and_read_only(built):
    reader = DatasetReader(built.root)
    for name, spec in built.specs.items():
        if not spec.valid_array:
            np.testing.assert_array_equal(reader.rows(name), built.arrays[name])
    assert not reader.rows("state").flags.writeable


def test_normalised_frames_come_as_stored(tmp_path):
    built = build_dataset(tmp_path / "out", dtype="float16")
    np.testing.assert_array_equal(
        gather(DatasetReader(built.root), "rgb_main", [20, 0]), built.arrays["rgb_main"][[20, 0]]
    )


def test_long_runs_are_read_in_pieces(tmp_path, monkeypatch):
    built = build_dataset(tmp_path / "out")
    monkeypatch.setattr("pipeline.loaders.reader._RUN_NBYTES", 3 * ROW)
    np.testing.assert_array_equal(
        gather(DatasetReader(built.root), "rgb_side", list(range(21))), built.arrays["rgb_side"]
    )


def test_reads_that_the_kernel_cuts_short_are_finished(built, monkeypatch):
    preadv = os.preadv

    def stingy(descriptor, buffers, offset):
        return preadv(descriptor, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    reader = DatasetReader(built.root)
    np.testing.assert_array_equal(gather(reader, "rgb_main", [4, 5, 6, 1]), built.arrays["rgb_main"][[4, 5, 6, 1]])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def refused(built: Built, step: int, check: str = "always") -> ChecksumError:
    with pytest.raises(ChecksumError) as caught:
        gather(DatasetReader(built.root, check=check), "rgb_main", [step, 20])
    return caught.value


@pytest.mark.parametrize("check", ["always", "first"])
def test_one_flipped_bit_of_a_frame_is_refused_with_its_place(raw, check):
    flip(raw.root / "rgb_main" / "c.1.0.0.0", 2 * ROW + 30)
    error = refused(raw, 10, check)
    assert error.where == {"episode": "episode_1", "array": "rgb_main", "steps": 10, "file": "rgb_main/c.1.0.0.0"}
    assert "expected crc32c" in error.message
    assert "damaged bytes" in error.message
    gather(DatasetReader(raw.root), "rgb_main", [8, 9, 11])  # its neighbours are sound


@pytest.mark.parametrize("check", CHECKS)
def test_a_flipped_bit_of_a_stored_checksum_is_refused(raw, check):
    flip(raw.root / "rgb_main" / "c.1.0.0.0", 3 * ROW - 1)
    assert refused(raw, 10, check).where["steps"] == 10


@pytest.mark.parametrize("check", CHECKS)
def test_two_swapped_shards_are_refused_though_each_is_sound(raw, check):
    first, second = (raw.root / "rgb_main" / f"c.{shard}.0.0.0" for shard in (0, 1))
    first.rename(first.with_suffix(".away"))
    second.rename(first)
    first.with_suffix(".away").rename(second)
    error = refused(raw, 10, check)
    assert error.where["file"] == "rgb_main/c.1.0.0.0"
    assert check == "never" or "swapped" in error.message


def test_first_trusts_what_it_has_read_once(raw):
    reader = DatasetReader(raw.root, check="first")
    gather(reader, "rgb_main", [10])
    flip(raw.root / "rgb_main" / "c.1.0.0.0", 2 * ROW + 30)
    gather(reader, "rgb_main", [10])
    reader.check = "always"
    with pytest.raises(ChecksumError):
        gather(reader, "rgb_main", [10])


def test_a_shard_cut_short_while_it_is_open_is_refused(raw):
    reader = DatasetReader(raw.root)
    gather(reader, "rgb_main", [8])
    os.truncate(raw.root / "rgb_main" / "c.1.0.0.0", 3 * ROW - 10)
    with pytest.raises(ChecksumError, match="cut short") as caught:
        gather(reader, "rgb_main", [10])
    assert caught.value.where["steps"] == 10


def test_a_shard_cut_short_before_is_refused(raw):
    os.truncate(raw.root / "rgb_main" / "c.1.0.0.0", 3 * ROW - 10)
    assert refused(raw, 10).where["file"] == "rgb_main/c.1.0.0.0"


def test_a_missing_shard_is_refused(raw):
    (raw.root / "rgb_main" / "c.1.0.0.0").unlink()
    with pytest.raises(DatasetError, match="expected a shard file, found none") as caught:
        gather(DatasetReader(raw.root), "rgb_main", [10])
    assert caught.value.where == {
        "episode": "episode_1",
        "array": "rgb_main",
        "steps": 10,
        "file": "rgb_main/c.1.0.0.0",
    }


def test_a_chunk_that_was_not_committed_is_never_handed_out(tmp_path):
    raw, encoded = build_dataset(tmp_path / "raw"), build_dataset(tmp_path / "zstd", codec="zstd")
    for built in (raw, encoded):  # of `side` all chunks of shard 1 are absent
        shutil.copy(built.root / "rgb_main" / "c.1.0.0.0", built.root / "rgb_side" / "c.1.0.0.0")
    assert not gather(DatasetReader(raw.root), "rgb_side", [10]).any()
    with pytest.raises(ChecksumError, match="expected no chunk, found one") as caught:
        gather(DatasetReader(encoded.root), "rgb_side", [10])
    assert caught.value.where == {"episode": "episode_1", "array": "rgb_side", "steps": 8, "file": "rgb_side/c.1.0.0.0"}


def test_chunks_that_lie_elsewhere_than_they_should_are_refused(raw):
    path = raw.root / "rgb_main" / "c.1.0.0.0"
    path.write_bytes(bytes(ROW) + path.read_bytes())
    assert refused(raw, 10).where["steps"] == 10


def test_damaged_small_rows_are_refused(raw):
    flip(raw.root / "state" / "c.0.0", 5)
    with pytest.raises(ChecksumError) as caught:
        DatasetReader(raw.root).rows("state")
    assert caught.value.where["array"] == "state"


def test_bytes_that_do_not_decode_are_refused_with_their_place(tmp_path):
    built = build_dataset(tmp_path / "out", codec="zstd")
    reader = DatasetReader(built.root, check="never")
    flip(built.root / "rgb_main" / "c.1.0.0.0", 20)
    with pytest.raises(DatasetError) as caught:
        gather(reader, "rgb_main", [8])
    assert caught.value.where["steps"] == 8


@pytest.mark.parametrize("steps", [[-1], [NUM_STEPS]])
def test_steps_outside_the_dataset_are_refused(built, steps):
    with pytest.raises(UsageError, match=r"expected steps in \[0, 21\)"):
        gather(DatasetReader(built.root), "rgb_main", steps)


def test_wrong_buffers_and_names_are_refused(built):
    reader = DatasetReader(built.root)
    with pytest.raises(SchemaError):
        reader.gather("rgb_main", np.array([0]), np.empty((1, 6, 4, 3), "f4"))
    with pytest.raises(SchemaError, match="contiguous"):
        reader.gather("rgb_main", np.array([0]), np.empty((2, 16, 8, 3), "u1"))
    with pytest.raises(SchemaError, match="contiguous"):
        reader.gather("rgb_main", np.array([0]), np.empty((1, 16, 8, 3), "u1")[:, ::-1])
    with pytest.raises(DatasetError, match="expected one of the arrays"):
        reader.rows("rgb_top")
    with pytest.raises(UsageError, match="chunks of one step"):
        reader.gather("state", np.array([0]), np.empty((1, 3), "f4"))
    with pytest.raises(UsageError, match="expected check one of"):
        DatasetReader(built.root, check="sometimes")


def test_an_unfinished_conversion_is_refused(raw):
    (raw.root / "zarr.json").unlink()
    (raw.root.parent / "out.work").mkdir()
    with pytest.raises(DatasetError, match="unfinished"):
        DatasetReader(raw.root)


def test_a_pickled_reader_reads_on_and_refuses_another_dataset(built, tmp_path):
    reader = DatasetReader(built.root, check="first")
    gather(reader, "rgb_main", [3])
    again = pickle.loads(pickle.dumps(reader))
    assert again.check == "first"
    np.testing.assert_array_equal(gather(again, "rgb_main", [3]), built.arrays["rgb_main"][[3]])
    other = build_dataset(tmp_path / "other")
    foreign = pickle.dumps(reader).replace(reader.info.attributes["metadata_xxh3"].encode(), b"0" * 32)
    with pytest.raises(DatasetError, match="generation that was pickled"):
        pickle.loads(foreign)
    assert other.root.exists()


def test_the_episode_of_a_step_is_named(built):
    reader = DatasetReader(built.root)
    assert [reader.episode_of(step) for step in (0, 4, 5, 13, 14, 20)] == [f"episode_{k}" for k in (0, 0, 1, 1, 2, 2)]


def test_few_files_stay_open_and_many_threads_share_them(built):
    reader = DatasetReader(built.root)
    reader._handles = handles = FileHandles(built.root, limit=2)
    order = np.random.default_rng(0).integers(0, NUM_STEPS, (40, 9))

    def check(steps: np.ndarray) -> None:
        for name in ("rgb_main", "rgb_side"):
            np.testing.assert_array_equal(gather(reader, name, steps.tolist()), built.arrays[name][steps])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, order))
    assert len(handles) <= 2
    reader.close()
    assert len(handles) == 0
    check(order[0])


def test_an_open_file_is_not_closed_while_it_is_held(built):
    paths = [f"rgb_main/c.{shard}.0.0.0" for shard in range(3)]
    handles = FileHandles(built.root, limit=1)
    held = handles.acquire(paths[:2])
    handles.acquire(paths[2:])
    handles.release(paths[2:])
    assert all(os.fstat(descriptor).st_size for descriptor in held)
    handles.release(paths[:2])
    assert len(handles) == 1
    with pytest.raises(DatasetError, match="found none"):
        handles.acquire([paths[0], "rgb_main/c.9.0.0.0"])
    handles.close()
    assert len(handles) == 0


def _read_in_child(reader: DatasetReader, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(gather(reader, "rgb_main", list(range(NUM_STEPS))), expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_process_reads_with_files_of_its_own(raw, method):
    reader = DatasetReader(raw.root)
    gather(reader, "rgb_main", [0, 10])
    context = multiprocessing.get_context(method)
    if method == "fork":
        reader._handles._lock.acquire()  # as if a thread held it that does not exist in the child
    try:
        child = context.Process(target=_read_in_child, args=(reader, raw.arrays["rgb_main"]))
        child.start()
    finally:
        if method == "fork":
            reader._handles._lock.release()
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(gather(reader, "rgb_main", [0, 10]), raw.arrays["rgb_main"][[0, 10]])


def test_readers_leave_no_descriptor_behind(raw):
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    reader = DatasetReader(raw.root)
    gather(reader, "rgb_main", list(range(NUM_STEPS)))
    del reader
    after = set(os.listdir("/proc/self/fd")) if before else set()
    assert len(after) <= len(before)


def test_threads_that_meet_an_array_for_the_first_time_agree_on_it(raw):
    reader, barrier = DatasetReader(raw.root), threading.Barrier(4)

    def first(_: int) -> int:
        barrier.wait()
        gather(reader, "rgb_main", [0])
        return id(reader._chunks["rgb_main"])

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(first, range(4)))) == 1


def test_a_manifest_that_does_not_reach_the_last_step_is_refused(tmp_path, monkeypatch):
    built = build_dataset(tmp_path / "out")
    info = read_info(built.root)
    reader = DatasetReader(built.root)
    with pytest.raises(DatasetError, match="expected 8 checksums of shard 2"):
        reader._manifest.chunks(built.specs["rgb_main"], info.num_steps + 3)


@pytest.mark.parametrize("codec", ["raw", "zstd", "blosc:zstd"])
def test_the_first_of_each_row_are_read_into_a_shorter_batch(tmp_path: Path, codec: str) -> None:
    built = build_dataset(tmp_path / "out", codec=codec, dtype="float32")
    reader, steps = DatasetReader(built.root), np.array([5, 0, 20, 1])
    out = np.full((4, 2, 4, 3), -1, np.float32)
    reader.gather("rgb_main", steps, out)
    np.testing.assert_array_equal(out, built.arrays["rgb_main"][steps, :2])
    for wrong in (np.empty((4, 7, 4, 3), np.float32), np.empty((4, 2, 3, 3), np.float32)):
        with pytest.raises(SchemaError, match="rgb_main"):
            reader.gather("rgb_main", steps, wrong)
