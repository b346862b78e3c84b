"""Drawing arithmetic: no peak is lost, ticks are round, samples are spread."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.chart import evenly, histogram, padded, positions, spread_of, thin, ticks

numbers = st.floats(-1e6, 1e6, width=32)


@given(st.lists(numbers | st.just(math.nan), min_size=1, max_size=300), st.integers(2, 40))
def test_a_thinned_line_keeps_its_least_and_greatest_value_and_its_order(values, max_points):
    kept = thin(np.array(values), max_points)
    assert len(kept) <= max(max_points, 2)
    assert kept.tolist() == sorted(set(kept.tolist()))
    finite = [value for value in values if not math.isnan(value)]
    shown = [values[k] for k in kept.tolist()]
    assert not finite or (min(finite) in shown and max(finite) in shown)


@given(st.integers(1, 5000), st.integers(1, 60))
def test_samples_are_distinct_and_reach_from_first_to_last(length, count):
    chosen = evenly(length, count).tolist()
    assert len(chosen) == len(set(chosen)) == min(length, count)
    assert chosen == sorted(chosen)
    assert chosen[0] == 0 and (count == 1 or chosen[-1] == length - 1)
    gaps = np.diff(chosen)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


@given(numbers, st.floats(1e-3, 1e6))
def test_ticks_lie_in_the_range_at_multiples_of_a_round_step(low, width):
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 4 or width < abs(low) * 1e-9
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in found)
    for step in np.diff(found):
        digits = float(f"{step:.3g}") / 10 ** math.floor(math.log10(step) + 1e-9)
        assert round(digits, 2) in (1, 2, 5, 10)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (3, 3), (-5, 7), (math.nan, 1), (-1.7e308, 1.7e308), (math.inf, math.inf)]
)
def test_an_axis_is_never_empty_or_endless(low, high):
    left, right = padded(low, high)
    assert math.isfinite(left) and math.isfinite(right) and left < right


@given(st.lists(numbers | st.sampled_from([math.nan, math.inf]), max_size=80))
def test_a_histogram_counts_every_finite_value_once(values):
    counts, low, high = histogram(np.array(values, np.float64))
    finite = [value for value in values if math.isfinite(value)]
    assert counts.sum() == len(finite)
    if finite:
        assert low <= min(finite) and max(finite) <= high and low < high


def test_values_at_the_limits_of_float_are_counted_too():
    counts, _, _ = histogram(np.array([-1.7e308, 0.0, 1.7e308]))
    assert counts.sum() == 3
    counts, _, _ = histogram(np.array([1.0, np.nextafter(1.0, 2.0)]))
    assert counts.sum() == 2


def test_quantiles_leave_out_and_count_what_is_not_finite():
    spread = spread_of(np.array([math.nan, *range(101), math.inf]))
    assert spread[:7] == (0, 1, 25, 50, 75, 99, 100)
    assert spread.num_non_finite == 2
    assert math.isnan(spread_of(np.array([math.nan])).median)


@pytest.mark.parametrize(
    ("features", "pairs"),
    [
        (["ego_location.x", "ego_location.y", "ego_location.z"], [(0, 1)]),
        (["state.eef_position[0]", "state.eef_position[1]"], [(0, 1)]),
        (["y", "theta", "x"], [(2, 0)]),
        (["Agent_X", "Agent_Y"], [(0, 1)]),
        (["acceleration.x", "acceleration.y", "ego_extent.x", "ego_extent.y"], []),
        (["ax", "ay", "flux", "fluy"], []),
        (["x"], []),
    ],
)
def test_positions_are_told_by_their_names(features, pairs):
    assert positions(features) == pairs
