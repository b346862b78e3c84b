"""Norm stats against enumeration of every sample that training sees, whatever the blocks; and the exported files."""

import json
import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.stats import Partial, Samples, norm_stats, reduce_tiles, samples_stats, summarize
from pipeline.stats_export import (
    DatasetRows,
    dataset_norm_stats,
    lerobot_episode_stats,
    lerobot_stats,
    normalizer_values,
    stats_file,
)
from schemas.errors import ChecksumError, DatasetError, SchemaError, UsageError
from tasks.quantiles import guess
from tests.pipeline.store_builder import build_dataset

lengths = st.lists(st.integers(0, 20), min_size=1, max_size=5)
mostly = st.sampled_from([True] * 9 + [False])
values = st.floats(-1e6, 1e6, width=32) | st.sampled_from([np.nan, np.inf, 0.0])


def reader(arrays):
    def read(array, start, stop):
        rows = arrays[array][start:stop].copy()  # of its own, so that nothing lies behind its end
        rows.flags.writeable = False
        return rows

    return read


def enumerate_samples(states, actions, ends, valid, horizon, tail, mask):
    """Return the states and the rows of all chunks that training sees, one step at a time."""
    seen_states, seen_actions = [], []
    for step in np.flatnonzero(valid):
        stop = next(end for end in ends if end > step)
        steps = [step]
        while len(steps) < horizon and steps[-1] + 1 < stop and valid[steps[-1] + 1]:
            steps.append(steps[-1] + 1)
        if len(steps) < horizon and tail == "drop":
            continue
        chunk = actions[steps + [steps[-1]] * (horizon - len(steps))].copy()
        chunk[:, : len(mask)] -= np.where(mask, states[step, : len(mask)], np.float32(0))
        seen_states.append(states[step])
        seen_actions.extend(chunk)
    return {"state": np.array(seen_states), "actions": np.array(seen_actions)}


def assert_equals_enumeration(found, seen):
    for name, rows in seen.items():
        entry, record = found["norm_stats"][name], found["headrace"]["arrays"][name]
        for dim, column in enumerate(rows.astype(np.float64).T):
            kept = np.sort(column[np.isfinite(column)])
            size = max(abs(kept).max(), 1e-30)
            assert entry["mean"][dim] == pytest.approx(kept.mean(), abs=1e-12 * size)
            assert entry["std"][dim] == pytest.approx(kept.std(), abs=1e-7 * size, rel=1e-9)
            assert entry["q01"][dim] == kept[math.ceil(len(kept) / 100) - 1]
            assert entry["q99"][dim] == kept[math.ceil(len(kept) * 99 / 100) - 1]
            assert (record["min"][dim], record["max"][dim]) == (kept[0], kept[-1])
            assert (record["count"][dim], record["num_non_finite"][dim]) == (len(kept), len(column) - len(kept))


@given(
    lengths=lengths,
    horizon=st.integers(1, 9),
    tail=st.sampled_from(["repeat", "drop"]),
    mask=st.none() | st.lists(st.booleans(), max_size=2),
    data=st.data(),
)
def test_norm_stats_equal_the_enumeration_of_all_samples(lengths, horizon, tail, mask, data):
    ends = np.cumsum(lengths)
    num_steps = int(ends[-1])
    states = data.draw(hnp.arrays(np.float32, (num_steps, 3), elements=values))
    actions = data.draw(hnp.arrays(np.float32, (num_steps, 2), elements=values))
    valid = data.draw(hnp.arrays(bool, num_steps, elements=mostly))
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        seen = enumerate_samples(states, actions, ends, valid, horizon, tail, mask or [])
    read = reader({"state": states, "actions": actions})

    def run():
        return norm_stats(read, ends, valid, horizon=horizon, delta_mask=mask, tail=tail)

    if not len(seen["state"]) or any((~np.isfinite(rows)).all(axis=0).any() for rows in seen.values()):
        with pytest.raises((DatasetError, SchemaError), match=r"valid step|finite|numbers"):
            run()
    else:
        assert_equals_enumeration(run(), seen)


def walk(num_steps, num_dims, seed=0):
    steps = np.random.default_rng(seed).normal(size=(num_steps, num_dims)).astype(np.float32)
    return np.cumsum(steps, axis=0, dtype=np.float32)


@pytest.fixture(scope="module", name="samples")
def _samples():
    """Return 150,000 steps: three tiles, runs and chunks that cross them, and some invalid steps and NaN."""
    num_steps = 150_000
    states, actions = walk(num_steps, 4, seed=1), walk(num_steps, 3, seed=2)
    states[::977, 1] = actions[::991, 2] = np.nan
    valid = np.random.default_rng(3).random(num_steps) > 0.002
    ends = np.append(np.arange(700, num_steps, 700), num_steps)
    return Samples(
        read_rows=reader({"state": states, "actions": actions}),
        episode_ends=ends,
        valid=valid,
        horizon=5,
        delta_mask=(True, True, False),
    )


@pytest.mark.parametrize("mask", [None, (True, True, False)])
def test_the_bits_do_not_depend_on_the_number_of_threads(samples, mask):
    chosen = Samples(**{**{name: getattr(samples, name) for name in samples.__slots__}, "delta_mask": mask})
    one, two, seven = (json.dumps(samples_stats(chosen, threads=threads)) for threads in (1, 2, 7))
    assert one == two == seven


def test_the_bits_do_not_depend_on_blocks_of_tiles_or_the_order_in_which_they_are_merged(samples):
    seen = samples.seen("actions")
    brackets = guess(*seen.sample(), (1, 99))
    whole = reduce_tiles(seen, range(3), brackets)
    for blocks in ([[2], [0], [1]], [[1, 2], [0]], [[2, 0], [1], []]):
        merged = reduce(Partial.merge, [reduce_tiles(seen, tiles, brackets) for tiles in blocks])
        assert [part.tolist() for part in vars_of(merged.total())] == [part.tolist() for part in vars_of(whole.total())]
        np.testing.assert_array_equal(merged.counts.inside, whole.counts.inside)
        np.testing.assert_array_equal(merged.counts.outside, whole.counts.outside)
    assert whole.counts.inside.any() and whole.counts.outside.any()


def vars_of(moments):
    return [getattr(moments, name) for name in moments.__slots__]


def test_several_tiles_equal_the_enumeration(samples):
    arrays = {name: samples.read_rows(name, 0, len(samples.valid)) for name in ("state", "actions")}
    seen = enumerate_samples(
        arrays["state"], arrays["actions"], samples.episode_ends, samples.valid, 5, "repeat", samples.delta_mask
    )
    assert_equals_enumeration(samples_stats(samples), seen)


def test_statistics_of_pusht_are_those_measured_by_enumerating_its_chunks(shared_data):
    zarr = pytest.importorskip("zarr")
    root = shared_data / "diffusion_policy_zarr" / "pusht_cchi_v7_replay.zarr"
    if not root.exists():
        pytest.skip("needs the PushT replay buffer")
    group = zarr.open_group(root, mode="r")
    arrays = {"actions": group["data/action"][:], "state": group["data/state"][:]}
    ends = group["meta/episode_ends"][:]
    read, valid = reader(arrays), np.ones(25_650, dtype=bool)
    absolute = norm_stats(read, ends, valid, horizon=50)
    entry = absolute["norm_stats"]["actions"]
    np.testing.assert_allclose(entry["mean"], [219.655, 297.794], atol=5e-4)
    np.testing.assert_allclose(entry["std"], [88.476, 83.888], atol=5e-4)
    assert (entry["q01"][0], entry["q99"][0]) == (47, 434)
    assert absolute["headrace"]["arrays"]["actions"]["count"] == [1_282_500] * 2
    once = norm_stats(read, ends, valid, horizon=1)["norm_stats"]["actions"]
    np.testing.assert_allclose(once["std"], [101.6, 96.0], atol=0.05)
    assert (once["q01"][0], once["q99"][0]) == (42, 450)
    for tail, std in (("repeat", [90.5, 92.3]), ("drop", [103.6, 107.3])):
        delta = norm_stats(read, ends, valid, horizon=50, delta_mask=(True, True), tail=tail)
        np.testing.assert_allclose(delta["norm_stats"]["actions"]["std"], std, atol=0.05)
    assert delta["headrace"]["num_anchors"] / 25_650 == pytest.approx(0.606, abs=5e-4)


def test_constant_dimensions_have_exactly_their_value_and_no_spread():
    constant = np.full((5000, 2), 0.1, np.float32)
    found = norm_stats(reader({"actions": constant}), [5000], np.ones(5000, bool), horizon=50, arrays=["actions"])
    value = float(np.float32(0.1))
    entry = found["norm_stats"]["actions"]
    np.testing.assert_allclose(entry["mean"], [value] * 2, rtol=1e-14)
    np.testing.assert_allclose(entry["std"], [0, 0], atol=1e-14)
    assert entry["q01"] == entry["q99"] == [value] * 2


def test_episodes_of_one_step_repeat_it():
    rows = np.array([[1], [2], [6]], np.float32)
    read = reader({"state": rows, "actions": rows + 1})
    found = norm_stats(read, np.array([1, 2, 3]), np.ones(3, bool), horizon=50, delta_mask=[True])
    assert found["norm_stats"]["actions"] == {"mean": [1.0], "std": [0.0], "q01": [1.0], "q99": [1.0]}
    assert found["norm_stats"]["state"]["mean"] == [3.0]


def test_the_record_says_what_the_numbers_were_computed_over():
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    valid = np.array([True, True, True, False, True, True])
    read = reader({"state": rows, "actions": rows})
    found = norm_stats(read, np.array([6]), valid, horizon=3, delta_mask=[True], tail="drop")
    record = found["headrace"]
    arrays = record.pop("arrays")
    assert arrays["actions"].pop("near_constant") == {}
    assert record == {
        "stats_version": 3,
        "horizon": 3,
        "tail": "drop",
        "delta_mask": [True],
        "quantile_method": "inverted_cdf",
        "num_episodes": 1,
        "num_steps": 6,
        "num_valid_steps": 5,
        "num_anchors": 1,
    }
    assert arrays["actions"] == {"min": [0, 1], "max": [4, 5], "count": [3, 3], "num_non_finite": [0, 0]}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(("ends", "valid"), [([], []), ([0], []), ([2], [False, False])])
def test_a_dataset_without_a_valid_step_is_refused(ends, valid):
    read = reader({"state": np.zeros((len(valid), 1)), "actions": np.zeros((len(valid), 1))})
    with pytest.raises(DatasetError, match="expected at least one valid step"):
        norm_stats(read, np.array(ends, np.int64), np.array(valid, bool), horizon=5)


def test_dropping_every_tail_of_short_episodes_is_refused_and_says_why():
    read = reader({"state": np.zeros((4, 1)), "actions": np.zeros((4, 1))})
    with pytest.raises(DatasetError, match=r"enough others for a whole chunk \(horizon 5, tail drop\)"):
        norm_stats(read, np.array([4]), np.ones(4, bool), horizon=5, tail="drop")


def test_rows_of_another_shape_are_refused_with_their_place():
    arrays = {"state": np.zeros((4, 1)), "actions": np.zeros((3, 2))}
    with pytest.raises(SchemaError, match="array actions, steps 0:4: expected 4 rows of 2 numbers"):
        norm_stats(reader(arrays), np.array([4]), np.ones(4, bool), horizon=5)


def test_a_column_of_nan_is_refused_by_array_and_number():
    rows = np.array([[1, np.nan]], np.float32)
    with pytest.raises(DatasetError, match=r"array state: .* columns \[1\]"):
        norm_stats(reader({"state": rows, "actions": rows}), np.array([1]), np.ones(1, bool), horizon=1)


def test_rows_beyond_float32_are_counted_as_infinite():
    rows = np.array([[1e300], [2.0]])
    found = norm_stats(reader({"actions": rows}), np.array([2]), np.ones(2, bool), horizon=1, arrays=["actions"])
    assert found["headrace"]["arrays"]["actions"]["num_non_finite"] == [1]


@pytest.fixture(scope="module", name="built")
def _built(tmp_path_factory):
    return build_dataset(tmp_path_factory.mktemp("stats") / "set.zarr", episode_lengths=(5, 40, 1), invalid=(6, 45))


def test_a_dataset_gives_the_norm_stats_of_its_arrays_over_all_its_shards(built):
    arrays, ends = {name: built.arrays[name] for name in ("state", "actions")}, np.array([5, 45, 46])
    for mask in (None, (True, False)):
        expected = norm_stats(reader(arrays), ends, built.arrays["valid"], horizon=4, delta_mask=mask)
        expected["headrace"]["generation"] = 1
        assert dataset_norm_stats(built.root, delta_mask=mask, threads=2) == expected
    assert json.loads(stats_file(built.root, "openpi", horizon=4, delta_mask=mask)) == expected


def test_damaged_rows_are_refused(built, tmp_path):
    copy = build_dataset(tmp_path / "set.zarr")
    path = copy.root / "actions" / "c.0.0"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="array actions"):
        dataset_norm_stats(copy.root)


def test_lerobot_statistics_count_every_valid_step_once(built):
    kept = built.arrays["state"][built.arrays["valid"]]
    rows = DatasetRows(built.root)
    found = lerobot_stats(rows.samples())
    entry = found["observation.state"]
    assert list(found) == ["observation.state", "action"]
    assert entry["count"] == [44]
    np.testing.assert_allclose(entry["std"], kept.astype(np.float64).std(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(entry["q50"], np.quantile(kept, 0.5, axis=0, method="inverted_cdf"))
    assert json.loads(stats_file(built.root, "lerobot")) == found


def test_lerobot_episode_statistics_are_lines_of_the_episodes_that_have_a_valid_step(built):
    lines = [json.loads(line) for line in stats_file(built.root, "lerobot-episodes").splitlines()]
    assert [(line["episode_index"], line["stats"]["action"]["count"]) for line in lines] == [(0, [5]), (1, [39])]
    assert set(lines[0]["stats"]["action"]) == {"min", "max", "mean", "std", "count"}
    kept = np.delete(built.arrays["actions"][5:45], 1, axis=0)
    np.testing.assert_allclose(lines[1]["stats"]["action"]["mean"], kept.mean(axis=0, dtype=np.float64), rtol=1e-12)


def test_an_episode_of_nan_alone_is_named():
    rows = np.array([[1], [np.nan]], np.float32)
    samples = Samples(read_rows=reader({"state": rows}), episode_ends=np.array([1, 2]), valid=np.ones(2, bool))
    with pytest.raises(DatasetError, match="array state, episode 1"):
        list(lerobot_episode_stats(samples, ["state"]))


def test_normalizer_values_are_named_as_the_state_dict_of_linear_normalizer(built):
    rows = DatasetRows(built.root)
    found = normalizer_values(rows.samples(), {"state": "agent_pos"})
    prefix = "params_dict.agent_pos"
    inputs = [f"{prefix}.input_stats.{name}" for name in ("min", "max", "mean", "std")]
    assert list(found) == [f"{prefix}.scale", f"{prefix}.offset", *inputs]
    kept = built.arrays["state"][built.arrays["valid"]].astype(np.float64)
    scaled = kept * found[f"{prefix}.scale"] + found[f"{prefix}.offset"]
    np.testing.assert_allclose([scaled.min(axis=0), scaled.max(axis=0)], [[-1] * 3, [1] * 3], atol=1e-12)
    assert "params_dict.action.scale" in json.loads(stats_file(built.root, "diffusion-policy"))


def test_flags_that_a_format_does_not_know_are_refused(built):
    with pytest.raises(UsageError, match="with openpi alone"):
        stats_file(built.root, "lerobot", horizon=5)
    with pytest.raises(UsageError, match="expected a format of openpi"):
        stats_file(built.root, "tfds")


def test_percentiles_are_left_out_where_none_is_asked(samples):
    assert summarize(samples.seen("state"), ()).percentiles == {}
