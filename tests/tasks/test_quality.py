"""Runs, distances and turns are what plain loops say they are."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.quality import repeats, runs, travelled, turned

CODES = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30)


@given(CODES, st.integers(2, 5))
def test_repeats_are_the_longest_runs_of_equal_present_values(codes, least):
    expected, start = [], 0
    for stop in range(1, len(codes) + 1):
        if stop == len(codes) or codes[stop] != codes[start] or not codes[stop][1]:
            if stop - start >= least and codes[start][1]:
                expected.append((start, stop))
            start = stop
    values = np.array([value for value, _ in codes], np.uint32)
    present = np.array([is_present for _, is_present in codes], np.bool_)
    assert repeats(values, present, least) == expected


@given(st.lists(st.booleans(), max_size=20))
def test_runs_cover_exactly_what_is_true(mask):
    covered = [step for start, stop in runs(np.array(mask, np.bool_)) for step in range(start, stop)]
    assert covered == [step for step, is_true in enumerate(mask) if is_true]


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=12))
def test_a_turn_is_the_angle_between_two_directions(headings):
    found = turned(np.array(headings))
    assert math.isnan(found[0])
    for step in range(1, len(headings)):
        before, now = headings[step - 1 : step + 1]
        cosine = math.cos(before) * math.cos(now) + math.sin(before) * math.sin(now)
        assert math.isclose(math.cos(found[step]), cosine, abs_tol=1e-9) and 0 <= found[step] <= math.pi


def test_distances_are_from_the_step_before_and_unknown_beside_gaps():
    found = travelled(np.array([[0.0, 0.0], [3.0, 4.0], [np.nan, 0.0], [1.0, 1.0], [1.0, 2.0]]))
    np.testing.assert_array_equal(found, [np.nan, 5.0, np.nan, np.nan, 1.0])
    assert travelled(np.zeros((0, 2))).shape == (0,)
