"""The multi-view loader: the right batches, in the right order, whatever happens in between."""

import gc
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.loaders import MultiViewDataset, MultiViewLoader, to_torch
from pipeline.store import tables
from pipeline.store.atomic import write_atomic
from pipeline.store.metadata import read_info, root_document
from schemas.errors import ChecksumError, DatasetError, UsageError
from tests.conftest import REPOSITORY
from tests.pipeline.loaders.test_reader import flip
from tests.pipeline.store_builder import Built, build_dataset

NUM_STEPS, INVALID = 21, 6
ANCHORS = [step for step in range(NUM_STEPS) if step != INVALID]
ROW = 6 * 4 * 3 + 4


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("multiview") / "out")


@pytest.fixture(name="fresh")
def _fresh(tmp_path: Path) -> Built:
    """A dataset that a test may damage."""
    return build_dataset(tmp_path / "out")


def loader(built: Built, batch_size: int = 4, **options: Any) -> MultiViewLoader:
    return MultiViewLoader(built.root, batch_size, **{"horizon": 3, "action_dim": 5, "tail": "keep", **options})


def indices(batches: Iterator[dict[str, Any]]) -> list[int]:
    return [step for batch in batches for step in batch["index"].tolist()]


def test_a_batch_is_what_openpi_takes(built):
    batch = next(iter(loader(built, shuffle=False, batch_size=21)))
    steps = np.array(ANCHORS)
    assert list(batch) == ["image", "image_mask", "state", "actions", "prompt", "actions_is_pad", "index"]
    np.testing.assert_array_equal(batch["index"], steps)
    assert batch["index"].dtype == np.int64
    for view in ("main", "side"):
        np.testing.assert_array_equal(batch["image"][view], built.arrays[f"rgb_{view}"][steps])
        np.testing.assert_array_equal(batch["image_mask"][view], built.arrays[f"rgb_{view}_valid"][steps])
        assert batch["image"][view].dtype == np.uint8
        assert batch["image_mask"][view].dtype == np.bool_
    assert batch["state"].dtype == batch["actions"].dtype == np.float32
    np.testing.assert_array_equal(batch["state"][:, :3], built.arrays["state"][steps])
    assert not batch["state"][:, 3:].any()
    assert batch["state"].shape == (20, 5)
    assert batch["prompt"] == [f"task {0 if step < 5 or step >= 14 else 1}" for step in ANCHORS]
    for row, step in enumerate(ANCHORS):
        stop = 5 if step < 5 else INVALID if step < INVALID else 14 if step < 14 else 21
        chunk = [built.arrays["actions"][min(step + k, stop - 1)] for k in range(3)]
        np.testing.assert_array_equal(batch["actions"][row, :, :2], chunk)
        assert batch["actions_is_pad"][row].tolist() == [step + k >= stop for k in range(3)]
    assert not batch["actions"][:, :, 2:].any()


def test_a_step_that_is_not_valid_is_never_served_and_its_action_never_taken(built):
    for _ in range(2):
        for batch in loader(built, horizon=30):
            assert INVALID not in batch["index"]
            assert not np.any(batch["actions"][:, :, 0] == built.arrays["actions"][INVALID, 0])


def test_only_anchors_are_served_where_the_dataset_says_which(tmp_path):
    from tests.pipeline import store_builder

    built = build_dataset(tmp_path / "plain")
    is_anchor = np.zeros(NUM_STEPS, bool)
    is_anchor[[2, INVALID, 9]] = True
    spec = store_builder.row_spec("is_anchor", "bool", (), chunk_steps=4, shard_steps=16)
    again = store_builder.write_dataset(
        tmp_path / "out",
        {**built.specs, "is_anchor": spec},
        {**built.arrays, "is_anchor": is_anchor},
        (5, 9, 7),
        shard_steps=8,
    )
    assert indices(iter(loader(again, shuffle=False))) == [2, 9]


def test_a_dataset_without_a_step_to_serve_is_refused(tmp_path):
    built = build_dataset(tmp_path / "out", episode_lengths=(2, 1), invalid=(0, 1, 2))
    with pytest.raises(DatasetError, match="expected at least one step to serve"):
        loader(built)
    empty = build_dataset(tmp_path / "empty", episode_lengths=(), invalid=())
    with pytest.raises(DatasetError, match="expected at least one step to serve"):
        loader(empty)


@given(batch_size=st.integers(1, 8), threads=st.integers(1, 4), prefetch=st.integers(0, 3), seed=st.integers(0, 3))
def test_the_sequence_does_not_depend_on_batches_threads_or_prefetch(built, batch_size, threads, prefetch, seed):
    expected = indices(iter(loader(built, batch_size=1, threads=1, prefetch=0, seed=seed)))
    assert sorted(expected) == ANCHORS
    assert indices(iter(loader(built, batch_size, threads=threads, prefetch=prefetch, seed=seed))) == expected


@pytest.mark.parametrize("world_size", range(1, 18))
def test_the_ranks_together_are_the_epoch(built, world_size):
    batch_size = 1 + world_size % 3
    whole = indices(iter(loader(built, batch_size=1)))
    loaders = [loader(built, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    ranks = [list(stream) for stream in loaders]
    assert [len(stream) for stream in loaders] == [len(batches) for batches in ranks]
    together = [batch for batches in itertools.zip_longest(*ranks) for batch in batches if batch is not None]
    assert indices(iter(together)) == whole


def run(
    built: Built, state: dict[str, Any] | None, world_size: int, num_batches: int | None
) -> tuple[list[int], dict[str, Any]]:
    """Run all ranks for some batches, or to the end; return what they saw, in global order, and the state of rank 0."""
    ranks = [loader(built, 1, rank=rank, world_size=world_size, seed=5) for rank in range(world_size)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(json.loads(json.dumps(state)))
    streams = [itertools.islice(rank, num_batches) for rank in ranks]
    seen = [batch for batches in itertools.zip_longest(*streams) for batch in batches if batch is not None]
    return indices(iter(seen)), ranks[0].state_dict()


def test_a_run_stopped_anywhere_goes_on_exactly_there_on_another_number_of_ranks(built):
    whole = indices(iter(loader(built, batch_size=1, seed=5)))
    for first in range(11):
        for second in range((20 - 2 * first + 3) // 4 + 1):
            one, state = run(built, None, 2, first)
            two, state = run(built, state, 4, second)
            three, _ = run(built, state, 3, None)
            assert state["samples_seen"] == len(one) + len(two)
            assert one + two + three == whole


def test_the_state_is_small_and_says_what_it_belongs_to(built):
    stream = loader(built)
    next(iter(stream))
    state = stream.state_dict()
    assert len(json.dumps(state)) < 300
    assert {**state, "fingerprint": ""} == {
        "version": 1,
        "epoch": 0,
        "samples_seen": 4,
        "num_samples": 20,
        "order": "shuffle 0",
        "fingerprint": "",
    }
    assert state == stream.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"order": "shuffle 1"},
        {"num_samples": 19},
        {"fingerprint": "0"},
        {"samples_seen": 21},
        {"samples_seen": -1},
        {"epoch": "0"},
        {"epoch": None},
    ],
)
def test_a_state_of_another_order_or_dataset_is_refused(built, wrong):
    stream = loader(built)
    with pytest.raises(UsageError, match="expected"):
        stream.load_state_dict({**stream.state_dict(), **wrong})


def test_batches_that_were_filled_ahead_and_not_handed_out_come_again(built):
    whole = indices(iter(loader(built)))
    stream = loader(built, prefetch=4)
    running = iter(stream)
    seen = indices(iter([next(running)]))
    other = loader(built)
    other.load_state_dict(stream.state_dict())
    assert seen + indices(iter(other)) == whole


def test_every_iteration_is_another_epoch(built):
    stream = loader(built)
    epochs = [indices(iter(stream)) for _ in range(3)]
    assert all(sorted(epoch) == ANCHORS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[1] == indices(iter(_placed(built, 1)))
    for batch in stream:
        left = batch["index"].tolist()
        break
    assert left == indices(iter(_placed(built, 3)))[:4]
    assert indices(iter(stream)) == indices(iter(_placed(built, 4)))


def _placed(built: Built, epoch: int) -> MultiViewLoader:
    stream = loader(built)
    stream.set_epoch(epoch)
    return stream


def test_set_epoch_keeps_a_position_that_was_loaded_for_it_and_only_that(built):
    whole = indices(iter(_placed(built, 2)))
    stream = _placed(built, 2)
    next(iter(stream))
    state = stream.state_dict()
    for epoch, expected in ((2, whole[4:]), (3, indices(iter(_placed(built, 3))))):
        other = loader(built)
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert indices(iter(other)) == expected
    stream.set_epoch(2)
    assert indices(iter(stream)) == whole
    with pytest.raises(UsageError):
        stream.set_epoch(-1)


def test_recorded_order_is_kept_on_request(built):
    stream = loader(built, shuffle=False)
    assert indices(iter(stream)) == indices(iter(stream)) == ANCHORS


def test_a_short_tail_is_dropped_kept_or_padded(built):
    shapes = {tail: [len(batch["index"]) for batch in loader(built, 6, tail=tail)] for tail in ("drop", "keep", "pad")}
    assert shapes == {"drop": [6, 6, 6], "keep": [6, 6, 6, 2], "pad": [6, 6, 6, 6]}
    assert [len(loader(built, 6, tail=tail)) for tail in shapes] == [3, 4, 4]
    *_, last = loader(built, 6, tail="pad")
    assert last["is_repeat"].tolist() == [False, False, True, True, True, True]
    assert last["index"][2:].tolist() == indices(iter(loader(built, 6)))[:4]


def test_a_global_batch_larger_than_the_dataset_is_refused(built):
    with pytest.raises(UsageError, match="global batch of at most 20 samples, found 6 x 4 ranks"):
        loader(built, 6, tail="drop", rank=0, world_size=4)


def test_a_batch_may_be_kept_while_the_loader_goes_on(built):
    kept = list(loader(built, 2))
    slices = [batch["image"]["main"][1:] for batch in loader(built, 2)]
    for batch in kept:
        np.testing.assert_array_equal(batch["image"]["main"], built.arrays["rgb_main"][batch["index"]])
    for batch, part in zip(kept, slices, strict=False):
        assert part.shape == (1, 6, 4, 3)
        assert batch is not None


def test_a_loop_that_keeps_nothing_reuses_its_memory(built):
    stream = loader(built, 2, prefetch=1)
    addresses = set()
    for _ in range(3):
        for batch in stream:
            addresses.add(batch["image"]["main"].ctypes.data)
            del batch
    assert len(addresses) <= 3


def test_state_and_actions_wider_than_asked_stay_as_they_are_and_say_so_once(built, caplog):
    with caplog.at_level(logging.WARNING, "headrace.loaders"):
        batch = next(iter(loader(built, action_dim=2)))
    assert batch["state"].shape == (4, 3)
    assert batch["actions"].shape == (4, 3, 2)
    assert [record.message for record in caplog.records] == [
        "state or actions are wider than action_dim 2 and stay as they are: [3, 2]"
    ]


def test_frames_in_minus_one_to_one_are_openpis_to_the_bit(built):
    stored = loader(built, 20, shuffle=False)
    scaled = loader(built, 20, shuffle=False, normalize_images=True)
    for batch, other in zip(stored, scaled, strict=True):
        for view, frames in batch["image"].items():
            expected = frames.astype(np.float32) / 255.0 * 2.0 - 1.0
            assert expected.dtype == other["image"][view].dtype == np.float32
            np.testing.assert_array_equal(other["image"][view], expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_frames_normalised_at_write_come_as_stored_or_as_pixels(tmp_path, dtype):
    built = _normalised(tmp_path, dtype)
    stored = next(iter(loader(built, 20, shuffle=False)))["image"]["side"]
    np.testing.assert_array_equal(stored, built.arrays["rgb_side"][ANCHORS])
    pixels = next(iter(loader(built, 20, shuffle=False, physical=True)))["image"]["side"]
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.25, 0.3])
    expected = np.rint((stored.astype(np.float64) * std + mean) * 255).astype(np.uint8)
    expected[~built.arrays["rgb_side_valid"][ANCHORS]] = 0
    np.testing.assert_array_equal(pixels, expected)
    scaled = next(iter(loader(built, 20, shuffle=False, normalize_images=True)))["image"]["side"]
    np.testing.assert_array_equal(scaled, expected.astype(np.float32) / 255.0 * 2.0 - 1.0)


def _normalised(tmp_path: Path, dtype: str) -> Built:
    """Float frames within what pixels normalise to: the builder's hold ``pixel / 255``."""
    return build_dataset(tmp_path / "out", dtype=dtype)


def with_stats(built: Built, content: dict[str, Any]) -> None:
    """Give a dataset other norm_stats, as a commit would."""
    info, tmp = read_info(built.root), built.root.parent / "tmp"
    ref = tables.write_document(built.root / "_tables" / "norm_stats-1.json", json.dumps(content).encode(), tmp)
    lengths = {name: (spec, info.lengths[name]) for name, spec in info.arrays.items()}
    attributes = {
        key: value for key, value in info.attributes.items() if key not in ("format_version", "metadata_xxh3")
    }
    document = root_document(lengths, {**attributes, "tables": {**info.tables, "norm_stats": ref}})
    write_atomic(built.root / "zarr.json", document, tmp)


STATS = {
    "state": {
        "mean": [1.0, 2.0, 3.0, 9.0],
        "std": [4.0, 0.5, 0.0, 9.0],
        "q01": [0.0, 1.0, 2.0],
        "q99": [10.0, 3.0, 2.0],
    },
    "actions": {"mean": [5.0, 6.0], "std": [7.0, 8.0], "q01": None, "q99": None},
}


def test_norm_stats_are_applied_by_openpis_formulas_when_asked(fresh):
    with_stats(fresh, {"norm_stats": STATS, "headrace": {"delta_mask": None}})
    plain = next(iter(loader(fresh)))
    batch = next(iter(loader(fresh, normalize="zscore")))
    rows, chunks = plain["state"][:, :3], plain["actions"][:, :, :2]
    expected = (rows - np.array([1.0, 2.0, 3.0])) / (np.array([4.0, 0.5, 0.0]) + 1e-6)
    np.testing.assert_array_max_ulp(batch["state"][:, :3], expected.astype(np.float32))
    expected = (chunks - np.array([5.0, 6.0])) / (np.array([7.0, 8.0]) + 1e-6)
    np.testing.assert_array_max_ulp(batch["actions"][:, :, :2], expected.astype(np.float32))
    assert not batch["state"][:, 3:].any()
    assert not batch["actions"][:, :, 2:].any()
    with pytest.raises(DatasetError, match="q01 and q99 of 2 dimensions"):
        loader(fresh, normalize="quantile")
    with_stats(fresh, {"norm_stats": {**STATS, "actions": {**STATS["actions"], "q01": [0.0, 0.0], "q99": [2.0, 4.0]}}})
    batch = next(iter(loader(fresh, normalize="quantile")))
    low, high = np.array([0.0, 1.0, 2.0]), np.array([10.0, 3.0, 2.0])
    expected = (rows - low) / (high - low + 1e-6) * 2 - 1
    np.testing.assert_array_max_ulp(batch["state"][:, :3], expected.astype(np.float32))


def test_norm_stats_that_do_not_fit_are_refused(fresh):
    with pytest.raises(DatasetError, match="expected norm_stats of state, found none"):
        loader(fresh, normalize="zscore")
    with_stats(fresh, {"norm_stats": STATS, "headrace": {"delta_mask": [True, False]}})
    with pytest.raises(DatasetError, match="relative to the state"):
        loader(fresh, normalize="zscore")
    with_stats(fresh, {"norm_stats": {**STATS, "actions": {"mean": [0.0], "std": [1.0]}}})
    with pytest.raises(DatasetError, match="mean and std of 2 dimensions"):
        loader(fresh, normalize="zscore")


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon": 0},
        {"action_dim": -1},
        {"normalize": "minmax"},
        {"normalize_images": True, "physical": True},
        {"views": ["top"]},
        {"threads": 0},
        {"prefetch": -1},
        {"on_error": "ignore"},
        {"tail": "wrap"},
        {"batch_size": 0},
        {"seed": -1},
    ],
)
def test_impossible_options_are_refused(built, wrong):
    with pytest.raises(UsageError, match="expected .* found"):
        next(iter(loader(built, **wrong)))


def test_views_may_be_chosen(built):
    batch = next(iter(loader(built, views=["side"])))
    assert list(batch["image"]) == list(batch["image_mask"]) == ["side"]


def test_steps_without_an_instruction_get_the_default(tmp_path):
    built = build_dataset(tmp_path / "plain")
    from tests.pipeline import store_builder

    task = built.arrays["task_index"].copy()
    task[:5] = -1
    again = store_builder.write_dataset(
        tmp_path / "out", built.specs, {**built.arrays, "task_index": task}, (5, 9, 7), shard_steps=8
    )
    prompts = next(iter(loader(again, 7, shuffle=False, default_prompt="be useful")))["prompt"]
    assert prompts == ["be useful"] * 5 + ["task 1"] * 2
    task[:5] = 2
    foreign = store_builder.write_dataset(
        tmp_path / "foreign", built.specs, {**built.arrays, "task_index": task}, (5, 9, 7), shard_steps=8
    )
    with pytest.raises(DatasetError, match=r"task_index in \[-1, 2\), found 0 to 2"):
        loader(foreign)


def test_a_damaged_frame_raises_with_the_samples_identity_and_ends_the_threads(fresh):
    flip(fresh.root / "rgb_main" / "c.1.0.0.0", 2 * ROW + 30)
    with pytest.raises(ChecksumError) as caught:
        list(loader(fresh))
    assert caught.value.where == {
        "episode": "episode_1",
        "array": "rgb_main",
        "steps": 10,
        "file": "rgb_main/c.1.0.0.0",
    }
    assert not _loader_threads()


def test_damaged_frames_are_skipped_and_counted_on_request(fresh, caplog):
    expected = [[step for step in batch["index"].tolist() if step not in (10, 12)] for batch in loader(fresh)]
    flip(fresh.root / "rgb_main" / "c.1.0.0.0", 2 * ROW + 30)
    flip(fresh.root / "rgb_main" / "c.1.0.0.0", 4 * ROW + 30)
    stream = loader(fresh, on_error="skip")
    with caplog.at_level(logging.WARNING, "headrace.loaders"):
        batches = list(stream)
    assert [batch["index"].tolist() for batch in batches] == expected
    assert stream.num_skipped == 2
    assert sorted("steps 10" in record.message for record in caplog.records) == [False, True]
    for batch in batches:
        np.testing.assert_array_equal(batch["image"]["main"], fresh.arrays["rgb_main"][batch["index"]])
        np.testing.assert_array_equal(batch["state"][:, :3], fresh.arrays["state"][batch["index"]])
        assert len(batch["prompt"]) == len(batch["index"])


def test_a_batch_of_damaged_frames_alone_is_left_out_whole(fresh):
    (fresh.root / "rgb_main" / "c.1.0.0.0").unlink()
    stream = loader(fresh, 1, on_error="skip")
    assert sorted(indices(iter(stream))) == [step for step in ANCHORS if not 8 <= step < 16]
    assert stream.num_skipped == 8
    assert stream.state_dict()["epoch"] == 1


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("headrace-loader")]


def test_threads_end_with_the_iteration_however_it_ends(built):
    stream = loader(built, 1)
    for _ in stream:
        assert _loader_threads()
        break
    assert not _loader_threads()
    running = iter(stream)
    next(running)
    assert _loader_threads()
    del running
    gc.collect()
    assert not _loader_threads()
    running = iter(stream)
    next(running)
    stream.close()
    assert not _loader_threads()
    with pytest.raises(StopIteration):
        next(running)


def test_a_new_iteration_ends_the_one_that_runs(built):
    stream = loader(built, 1)
    first = iter(stream)
    next(first)
    second = iter(stream)
    with pytest.raises(StopIteration):
        next(first)
    next(second)
    assert stream.state_dict()["samples_seen"] == 1
    stream.close()


def test_a_pickled_loader_goes_on_where_it_was(built):
    whole = indices(iter(loader(built)))
    stream = loader(built)
    running = iter(stream)
    seen = indices(iter([next(running)]))
    again = pickle.loads(pickle.dumps(stream))
    assert seen + indices(iter(again)) == whole
    stream.close()


def _load_in_child(stream: MultiViewLoader, epoch: int, expected: list[int]) -> None:
    stream.set_epoch(epoch)
    assert indices(iter(stream)) == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_iterate_while_its_parent_does(built):
    stream = loader(built, 2)
    running = iter(stream)
    seen = indices(iter([next(running)]))
    expected = indices(iter(_placed(built, 7)))
    child = multiprocessing.get_context("fork").Process(target=_load_in_child, args=(stream, 7, expected))
    child.start()
    rest = indices(running)
    child.join(60)
    assert child.exitcode == 0
    assert seen + rest == indices(iter(loader(built, 2)))


def test_opening_reads_files_and_not_chunks_and_holds_no_object_a_step(tmp_path, monkeypatch):
    counts = []
    for lengths in ((40,), (400, 400)):
        build_dataset(
            tmp_path / str(len(lengths)), episode_lengths=lengths, size=(1, 1), shard_steps=8192, row_shard_steps=8192
        )
        reads, preadv = itertools.count(), os.preadv
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *arguments: (next(reads), preadv(*arguments))[1])
            gc.collect()
            before = len(gc.get_objects())
            stream = loader(Built(root=tmp_path / str(len(lengths)), specs={}, arrays={}, episode_lengths=lengths))
            gc.collect()
            counts.append((next(reads), len(gc.get_objects()) - before))
        stream.close()
    (few_reads, few_objects), (reads, objects) = counts
    assert reads == few_reads
    assert objects < few_objects + 200


LARGE = (500,) * 2000


@pytest.mark.soak
def test_memory_and_open_files_stay_flat_over_ten_epochs_of_a_million_steps(tmp_path, monkeypatch):
    psutil = pytest.importorskip("psutil")
    from tests.pipeline import store_builder

    # every frame and digest alike: a million distinct ones take minutes to make
    monkeypatch.setattr(store_builder, "frame_value", lambda step, view, shape: np.full(shape, view, np.uint8))
    monkeypatch.setattr(store_builder, "episode_digest", lambda *arguments: "0" * 32)
    built = build_dataset(
        tmp_path / "out",
        episode_lengths=LARGE,
        size=(2, 2),
        shard_steps=16384,
        row_chunk_steps=1024,
        row_shard_steps=262144,
    )
    stream, process = loader(built, 256, horizon=10, check="first"), psutil.Process()
    levels = []
    for _ in range(11):
        assert sum(len(batch["index"]) for batch in stream) == sum(LARGE) - 1
        gc.collect()
        levels.append((process.memory_full_info().uss, process.num_fds()))
    assert levels[-1][0] - levels[1][0] < 2_000_000
    assert levels[-1][1] == levels[1][1]


def test_samples_one_by_one_are_the_batches(built):
    dataset = MultiViewDataset(built.root, horizon=3, action_dim=5)
    batch = next(iter(loader(built, 20, shuffle=False)))
    assert len(dataset) == 20
    for row in (0, 19, -1):
        sample = dataset[row]
        np.testing.assert_array_equal(sample["image"]["side"], batch["image"]["side"][row])
        np.testing.assert_array_equal(sample["actions"], batch["actions"][row])
        assert sample["prompt"] == batch["prompt"][row]
        assert sample["index"] == batch["index"][row]
    several = dataset.__getitems__([3, 1, 1])
    assert [sample["index"] for sample in several] == batch["index"][[3, 1, 1]].tolist()
    assert [sample["index"] for sample in several[1:]] == batch["index"][[1, 1]].tolist()
    assert len(several) == 3
    np.testing.assert_array_equal(several.batch["state"], batch["state"][[3, 1, 1]])
    for wrong in (20, -21):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(IndexError):
        several[3]
    again = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(again[5]["state"], dataset[5]["state"])


def test_torch_takes_the_batches_without_a_copy(built):
    torch = pytest.importorskip("torch")
    dataset = MultiViewDataset(built.root, horizon=3, action_dim=5)
    for workers in (0, 2):
        data = torch.utils.data.DataLoader(dataset, 4, num_workers=workers, collate_fn=dataset.collate)
        seen = [step for batch in data for step in batch["index"].tolist()]
        assert seen == ANCHORS
    tensors = [(to_torch(batch)["image"]["main"], batch["index"].tolist()) for batch in loader(built, 2)]
    for frames, steps in tensors:  # kept while the loader went on
        np.testing.assert_array_equal(frames.numpy(), built.arrays["rgb_main"][steps])
    batch = next(iter(torch.utils.data.DataLoader(dataset, 4)))
    assert batch["image"]["main"].shape == (4, 6, 4, 3)
    assert batch["prompt"] == ["task 0"] * 4


BLOCKED = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"dask", "distributed", "zarr", "xarray", "typer", "pandas", "av", "torch", "h5py"}:
            raise ImportError(f"{name} is not installed on a training host")
sys.meta_path.insert(0, Blocker())
from pipeline.loaders import MultiViewDataset, MultiViewLoader
for path in sys.argv[1:]:
    steps = [step for batch in MultiViewLoader(path, 4, tail="keep") for step in batch["index"].tolist()]
    print(len(steps), len(MultiViewDataset(path)[0]["state"]))
"""


def test_a_training_host_needs_neither_dask_nor_zarr(tmp_path):
    codecs = ("raw", "zstd", "jpeg:95")
    roots = [str(build_dataset(tmp_path / codec, codec=codec, size=(16, 8)).root) for codec in codecs]
    command = [sys.executable, "-c", BLOCKED, *roots]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20 32\n" * 3, "")
