"""Weights, moments and exact quantiles against the obvious loops."""

import itertools
import math
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from schemas.errors import DatasetError, SchemaError, UsageError
from tasks import stats
from tests.tasks.test_quantiles import percentiles_of

lengths = st.lists(st.integers(0, 20), min_size=1, max_size=5)
mostly = st.sampled_from([True] * 9 + [False])
tables = hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 3)), elements=st.floats(width=32))


def chunk_of(step, ends, valid, horizon):
    """Return the steps of the chunk at ``step``, one at a time, and whether none of them is a repeat."""
    stop = next(end for end in ends if end > step)
    steps = [step]
    while len(steps) < horizon and steps[-1] + 1 < stop and valid[steps[-1] + 1]:
        steps.append(steps[-1] + 1)
    is_whole = len(steps) == horizon
    return steps + [steps[-1]] * (horizon - len(steps)), is_whole


def draw_valid(data, ends):
    num_steps = int(ends[-1])
    valid = np.array(data.draw(st.lists(mostly, min_size=num_steps, max_size=num_steps)), dtype=bool)
    valid.flags.writeable = False
    return valid


@given(lengths=lengths, horizon=st.integers(1, 15), tail=st.sampled_from(stats.TAILS), data=st.data())
def test_weights_count_the_chunk_entries_of_every_step_in_any_window(lengths, horizon, tail, data):
    ends = np.cumsum(lengths)
    valid = draw_valid(data, ends)
    expected, anchors = np.zeros(len(valid), int), np.zeros(len(valid), int)
    for step in np.flatnonzero(valid):
        steps, is_whole = chunk_of(step, ends, valid, horizon)
        if is_whole or tail == "repeat":
            anchors[step] = 1
            np.add.at(expected, steps, 1)
    runs = stats.valid_runs(ends, valid, horizon=horizon, tail=tail)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(valid))] * 2)))
    weights = stats.chunk_weights(runs, horizon=horizon, start=start, stop=stop)
    np.testing.assert_array_equal(weights, expected[start:stop])
    weights = stats.chunk_weights(runs, horizon=1, start=start, stop=stop)
    np.testing.assert_array_equal(weights, anchors[start:stop])


@given(lengths=lengths, horizon=st.integers(1, 9), tail=st.sampled_from(stats.TAILS), data=st.data())
def test_delta_chunks_match_the_obvious_python(lengths, horizon, tail, data):
    ends = np.cumsum(lengths)
    valid = draw_valid(data, ends)
    actions = np.arange(len(valid) * 3, dtype=np.float32).reshape(-1, 3) ** 2
    states = np.arange(len(valid) * 4, dtype=np.float32).reshape(-1, 4) / 3
    mask = data.draw(st.lists(st.booleans(), max_size=3))
    expected = []
    for step in np.flatnonzero(valid):
        steps, is_whole = chunk_of(step, ends, valid, horizon)
        chunk = actions[steps].copy()
        chunk[:, : len(mask)] -= np.where(mask, states[step, : len(mask)], 0).astype(
            np.float32
        )  # openpi's DeltaActions
        expected += [chunk] if is_whole or tail == "repeat" else []
    runs = stats.valid_runs(ends, valid, horizon=horizon, tail=tail)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(valid))] * 2)))
    rows = []
    for begin, end in ((0, start), (start, stop), (stop, len(valid))):
        anchors, lasts = stats.anchors_between(runs, begin, end)
        offsets = stats.delta_offsets(states[anchors], mask, 3)
        out = np.empty((len(anchors), horizon, 3), np.float32)
        rows.append(stats.delta_chunks(actions, offsets, anchors, lasts, out))
    np.testing.assert_array_equal(np.concatenate(rows), np.reshape(expected, (-1, 3)).astype(np.float32))


def test_a_chunk_ends_before_an_invalid_step_and_the_last_step_weighs_its_repeats():
    valid = np.array([True, True, True, False, True])
    runs = stats.valid_runs(np.array([5]), valid, horizon=4)
    assert stats.chunk_weights(runs, horizon=4, start=0, stop=5).tolist() == [1, 2, 9, 0, 4]


@given(rows=tables, data=st.data())
def test_moments_are_those_of_the_repeated_finite_values(rows, data):
    weights = data.draw(hnp.arrays(np.int64, len(rows), elements=st.integers(0, 4)))
    rows.flags.writeable = weights.flags.writeable = False
    found = stats.moments(rows, weights)
    for dim in range(rows.shape[1]):
        values = np.repeat(rows[:, dim].astype(np.float64), weights)
        kept = values[np.isfinite(values)]
        assert (found.count[dim], found.num_non_finite[dim]) == (len(kept), len(values) - len(kept))
        if len(kept):
            assert (found.low[dim], found.high[dim]) == (kept.min(), kept.max())
            exact = [Fraction(float(value)) for value in kept]
            mean = sum(exact) / len(exact)
            m2 = sum((value - mean) ** 2 for value in exact)
            size = max(abs(kept).max(), 1e-30)
            assert abs(found.mean[dim] - mean) <= 1e-14 * size
            assert abs(found.m2[dim] - m2) <= 1e-12 * max(m2, size**2 * 1e-16)


def test_merged_moments_are_those_of_all_rows_in_several_blocks_and_tiles():
    generator = np.random.default_rng(0)
    rows = (generator.normal(size=(5000, 14)) * 10.0 ** np.arange(-7, 7)).astype(np.float32)
    weights = generator.integers(0, 50, len(rows))
    cuts = [0, 1, 1024, 1500, 1500, 4999, 5000]
    parts = [stats.moments(rows[a:b], weights[a:b]) for a, b in itertools.pairwise(cuts)]
    total = stats.finalize(reduce(stats.merge, parts), {})
    mean = np.average(rows.astype(np.longdouble), axis=0, weights=weights)
    std = np.sqrt(np.average((rows - mean) ** 2, axis=0, weights=weights))
    np.testing.assert_allclose(total.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(total.std, std, rtol=1e-12)


def test_a_small_std_on_a_large_offset_survives_where_the_mean_of_squares_cancels():
    rows = (1000 + 0.01 * np.random.default_rng(0).normal(size=(20000, 1))).astype(np.float32)
    ones = np.ones(len(rows), np.int64)
    expected = rows.astype(np.float64).std()
    cancelled = (rows**2).mean() - rows.mean() ** 2
    assert stats.finalize(stats.moments(rows, ones), {}).std == pytest.approx([expected], rel=1e-12)
    assert not math.isclose(max(cancelled, 0) ** 0.5, expected, rel_tol=0.1)


def test_zeros_of_either_sign_come_out_as_the_same_bits():
    rows = np.array([[-0.0, 0.0], [-0.0, 0.0]], np.float32)
    ones = np.ones(2, np.int64)
    found = stats.finalize(stats.moments(rows, ones), {50: percentiles_of(rows, ones, (50,))[0]})
    assert not any(np.signbit(v).any() for v in (found.mean, found.low, found.high, found.percentiles[50]))


def test_a_column_of_nan_alone_is_refused_by_its_number():
    rows = np.array([[1, np.nan], [2, np.nan]], np.float32)
    with pytest.raises(DatasetError, match=r"columns \[1\]"):
        stats.finalize(stats.moments(rows, np.ones(2, np.int64)), {})


def test_a_mask_is_spelled_as_openpi_spells_it():
    assert stats.delta_mask(6, -1) == (True,) * 6 + (False,)
    assert stats.delta_mask() == ()


def test_a_mask_wider_than_state_or_actions_is_refused():
    with pytest.raises(UsageError, match="at most 2 dimensions"):
        stats.delta_offsets(np.zeros((1, 2), np.float32), [True] * 3, 7)


@pytest.mark.parametrize(("ends", "steps"), [([3], 4), ([], 1), ([3, 2, 4], 4)])
def test_episode_ends_that_do_not_lead_to_the_last_step_are_refused(ends, steps):
    with pytest.raises(SchemaError, match="episode ends"):
        stats.valid_runs(np.array(ends, np.int64), np.ones(steps, bool), horizon=1)


@pytest.mark.parametrize(("horizon", "tail"), [(0, "repeat"), (1, "pad")])
def test_a_horizon_or_tail_out_of_range_is_refused(horizon, tail):
    with pytest.raises(UsageError, match="expected a horizon"):
        stats.valid_runs(np.array([1]), np.ones(1, bool), horizon=horizon, tail=tail)


def summary_of(rows, percentiles=()):
    return stats.finalize(stats.moments(rows, np.ones(len(rows), np.int64)), dict(percentiles))


def test_linear_normalizer_maps_limits_to_one_and_constant_dimensions_to_zero():
    rows = np.array([[-2, 5, 0], [6, 5, 0.00005]], np.float32)
    values = stats.linear_normalizer(summary_of(rows))
    np.testing.assert_allclose(values["scale"], [0.25, 1, 1])
    np.testing.assert_allclose(rows[0] * values["scale"] + values["offset"], [-1, 0, 0], atol=1e-9)
    np.testing.assert_allclose(values["input_stats.max"], rows.max(axis=0))


def test_linear_normalizer_gaussian_takes_the_sample_std_as_torch_does():
    rows = np.array([[1, 7], [2, 7], [6, 7]], np.float32)
    values = stats.linear_normalizer(summary_of(rows), "gaussian")
    np.testing.assert_allclose(values["scale"], [1 / np.std([1, 2, 6], ddof=1), 1])
    np.testing.assert_allclose(values["offset"], [-3 / np.std([1, 2, 6], ddof=1), -7])
    with pytest.raises(UsageError, match="limits or gaussian"):
        stats.linear_normalizer(summary_of(rows), "zscore")
