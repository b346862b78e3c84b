"""Exact order statistics, however wrong the guess that the search begins with."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tasks import stats
from tasks.quantiles import (
    GREATEST_KEY,
    LEAST_KEY,
    NUM_BINS,
    Brackets,
    Counts,
    guess,
    keys_of_values,
    narrow,
    search,
    values_of_keys,
)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
tables = hnp.arrays(np.float32, st.tuples(st.integers(1, 40), st.integers(1, 3)), elements=st.floats(width=32))


def percentiles_of(rows, weights, percentiles, brackets=None):
    """Search as the statistics do, pass by pass, the rows counted in two parts."""
    brackets = guess(rows, weights, percentiles) if brackets is None else brackets
    total = np.array([weights[np.isfinite(column)].sum() for column in rows.T], np.int64)
    passes = 0
    while passes == 0 or not brackets.is_found.all():
        parts = []
        for part in (slice(0, 3), slice(3, None)):
            parts.append(Counts.of(brackets))
            stats.row_moments(rows[part], weights[part], search(brackets, parts[-1]), with_moments=False)
        brackets = narrow(brackets, parts[0] + parts[1], total)
        passes += 1
        assert passes < 12
    return brackets.values()


def assert_order_statistics(found, rows, weights, percentiles):
    for dim in range(rows.shape[1]):
        values = np.sort(np.repeat(rows[:, dim], weights))
        values = values[np.isfinite(values)]
        for row, percent in enumerate(percentiles):
            if len(values):
                assert found[row, dim] == values[max(math.ceil(Fraction(percent * len(values), 100)), 1) - 1]


@given(rows=tables, percentiles=st.lists(st.integers(0, 100), max_size=5).map(sorted), data=st.data())
def test_a_percentile_is_the_exact_order_statistic(rows, percentiles, data):
    weights = data.draw(hnp.arrays(np.int64, len(rows), elements=st.integers(0, 4)))
    assert_order_statistics(percentiles_of(rows, weights, percentiles), rows, weights, percentiles)


@given(rows=tables, percentiles=st.lists(st.integers(0, 100), min_size=1, max_size=3).map(sorted), data=st.data())
def test_a_wrong_guess_costs_passes_but_changes_nothing(rows, percentiles, data):
    weights = data.draw(hnp.arrays(np.int64, len(rows), elements=st.integers(0, 4)))
    shape = (rows.shape[1], len(percentiles))
    ends = data.draw(hnp.arrays(np.int64, (2, *shape), elements=st.integers(LEAST_KEY, GREATEST_KEY)))
    low, high = np.sort(ends, axis=0).astype(np.uint32)
    brackets = Brackets(percentiles=tuple(percentiles), low=low, high=high, is_found=np.zeros(shape, bool))
    assert_order_statistics(percentiles_of(rows, weights, percentiles, brackets), rows, weights, percentiles)


def test_percentiles_are_numpys_inverted_cdf_on_values_that_share_their_upper_bits():
    rows = (1000 + np.random.default_rng(1).normal(size=(10007, 3)) * 1e-2).astype(np.float32)
    found = percentiles_of(rows, np.ones(len(rows), np.int64), (1, 10, 50, 90, 99))
    expected = np.quantile(rows, [0.01, 0.1, 0.5, 0.9, 0.99], axis=0, method="inverted_cdf")
    np.testing.assert_array_equal(found, expected)


@given(hnp.arrays(np.float32, 20, elements=finite))
def test_keys_sort_like_their_values_and_come_back(values):
    keys = keys_of_values(values)
    np.testing.assert_array_equal(values_of_keys(keys), values)
    np.testing.assert_array_equal(np.sort(values), values[np.argsort(keys)])
    assert keys.min() >= LEAST_KEY and keys.max() <= GREATEST_KEY


@given(low=st.integers(0, 2**32 - 1), width=st.integers(0, 2**32 - 1))
def test_the_bins_of_a_bracket_hold_all_its_keys_and_are_as_narrow_as_they_can_be(low, width):
    high = min(low + width, 2**32 - 1)
    ends = [np.array([[key]], np.uint32) for key in (low, high)]
    shift = int(Brackets(percentiles=(1,), low=ends[0], high=ends[1], is_found=np.zeros((1, 1), bool)).shift[0, 0])
    assert (high - low) >> shift < NUM_BINS
    assert shift == 0 or (high - low) >> (shift - 1) >= NUM_BINS
