"""Alignment of recorded times to the output grid, against the obvious loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Reason, SourceError
from tasks.align import align, grid_length

gaps = st.lists(st.integers(1, 50), min_size=1, max_size=40)
"""Recorded periods in ms: integers keep the expected values exact."""


def recorded_times(gaps_ms):
    return np.concatenate([[0], np.cumsum(gaps_ms)]) / 1000.0


@given(gaps_ms=gaps, rate_hz=st.integers(1, 200))
def test_nearest_is_the_closest_step_and_previous_the_last_one_not_later(gaps_ms, rate_hz):
    recorded_ms = np.concatenate([[0], np.cumsum(gaps_ms)])
    grid_ms = np.arange(0, recorded_ms[-1] + 1) * 1000 / rate_hz
    grid_ms = grid_ms[grid_ms <= recorded_ms[-1]]
    nearest = align(recorded_ms / 1000, grid_ms / 1000, "nearest")
    previous = align(recorded_ms / 1000, grid_ms / 1000, "previous")
    for row, at_ms in enumerate(grid_ms):
        distances = [abs(int(t) - at_ms) for t in recorded_ms]
        assert distances[nearest.lower[row]] <= min(distances) + 1e-6
        not_later = [k for k, t in enumerate(recorded_ms) if t <= at_ms + 1e-3]
        assert previous.lower[row] == not_later[-1]
        assert abs(nearest.error_s[row] - (recorded_ms[nearest.lower[row]] - at_ms) / 1000) < 1e-9


@given(gaps_ms=gaps, rate_hz=st.integers(1, 200))
def test_linear_alignment_is_numpy_interpolation(gaps_ms, rate_hz):
    recorded_s = recorded_times(gaps_ms)
    grid_s = np.arange(grid_length(recorded_s[-1], rate_hz)) / rate_hz
    values = np.random.default_rng(0).normal(size=(len(recorded_s), 2))
    found = align(recorded_s, grid_s, "linear")
    mixed = found.mix(values[found.lower], values[found.upper])
    expected = np.stack([np.interp(grid_s, recorded_s, values[:, k]) for k in range(2)], axis=1)
    # a grid step within 1 us of a recorded one takes that one: half a microsecond of slope
    np.testing.assert_allclose(mixed, expected, atol=1e-6 * np.abs(np.diff(values, axis=0)).max() / 1e-3 + 1e-9)


def test_the_own_grid_takes_every_step_once_whatever_the_last_bits():
    recorded_s = np.cumsum(np.full(1000, 0.1)) - 0.1  # 99.9 comes out as 99.89999999999859
    for method in ("nearest", "previous", "linear"):
        found = align(recorded_s, np.arange(1000) / 10, method)
        np.testing.assert_array_equal(found.lower + np.round(found.weight), np.arange(1000))


def test_times_beyond_the_recording_hold_its_ends_and_say_how_far():
    found = align(np.array([1.0, 2.0]), np.array([0.0, 3.5]), "linear")
    assert (found.lower.tolist(), found.error_s.tolist()) == ([0, 1], [1.0, -1.5])
    assert found.mix(np.array([[5.0], [7.0]]), np.array([[5.0], [7.0]])).tolist() == [[5.0], [7.0]]


@pytest.mark.parametrize("times", [[0.0, 0.0], [0.0, 1.0, 0.5], [0.0, float("nan"), 1.0]])
def test_times_that_do_not_increase_are_refused(times):
    with pytest.raises(SourceError) as refused:
        align(np.array(times), np.array([0.0]), "nearest")
    assert refused.value.reason is Reason.TIME_ORDER


def test_no_recorded_step_is_refused():
    with pytest.raises(SourceError) as refused:
        align(np.zeros(0), np.array([0.0]), "nearest")
    assert refused.value.reason is Reason.EMPTY_EPISODE


@pytest.mark.parametrize(
    ("duration_s", "rate_hz", "count"), [(0.0, 10, 1), (1.0, 10, 11), (0.99, 10, 10), (0.3, 10, 4), (2.9, 30, 88)]
)
def test_a_grid_counts_both_ends(duration_s, rate_hz, count):
    assert grid_length(duration_s, rate_hz) == count
