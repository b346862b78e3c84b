"""The reference line, against numerical integration of its curvature and against formulas worked out apart."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Reason, SourceError
from tasks.plan_view import ARC, LINE, PARAM_POLY3, POLY3, SPIRAL, Pieces, trace

curvatures = st.floats(-0.5, 0.5) | st.floats(-1e-9, 1e-9) | st.just(0.0)
lengths = st.floats(0.01, 200.0)
poses = st.tuples(st.floats(-5e3, 5e3), st.floats(-5e3, 5e3), st.floats(-7.0, 7.0))


def traced(kind, pose, length, params, ds):
    """Trace one piece at several places."""
    num = len(ds)
    row = np.zeros((num, 9))
    row[:, : len(params)] = params
    return trace(
        Pieces(np.full(num, kind), np.tile(pose, (num, 1)), np.full(num, float(length)), row), np.asarray(ds, float)
    )


def integrated(pose, begin, end, length, num=20001):
    """Integrate a heading of linear curvature by Simpson's rule, which knows nothing of arcs or Fresnel functions."""
    s = np.linspace(0.0, length, num)
    heading = pose[2] + begin * s + (end - begin) * s**2 / (2 * length)
    weights = np.full(num, 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    weights *= length / (num - 1) / 3
    return np.array([pose[0] + np.cos(heading) @ weights, pose[1] + np.sin(heading) @ weights, heading[-1]])


@given(pose=poses, begin=curvatures, end=curvatures, length=lengths)
def test_a_spiral_is_the_integral_of_its_curvature(pose, begin, end, length):
    found = traced(SPIRAL, pose, length, (begin, end), [length])[0]
    np.testing.assert_allclose(found, integrated(pose, begin, end, length), rtol=0, atol=1e-8)


@given(pose=poses, curvature=curvatures, length=lengths)
def test_an_arc_is_the_integral_of_its_curvature_also_where_that_vanishes(pose, curvature, length):
    found = traced(ARC, pose, length, (curvature,), [length])[0]
    np.testing.assert_allclose(found, integrated(pose, curvature, curvature, length), rtol=0, atol=1e-8)


@given(pose=poses, length=lengths, share=st.floats(0.0, 1.0))
def test_a_line_goes_straight(pose, length, share):
    x, y, heading = pose
    at = share * length
    found = traced(LINE, pose, length, (), [at])[0]
    np.testing.assert_allclose(found, [x + at * math.cos(heading), y + at * math.sin(heading), heading], atol=1e-9)


@given(pose=poses, begin=curvatures, end=curvatures, length=lengths)
def test_a_spiral_from_its_middle_goes_on_as_the_whole_one_does(pose, begin, end, length):
    middle, last = traced(SPIRAL, pose, length, (begin, end), [length / 2, length])
    second = traced(SPIRAL, middle, length / 2, ((begin + end) / 2, end), [length / 2])[0]
    np.testing.assert_allclose(second, last, rtol=0, atol=1e-8)


def test_a_known_clothoid_is_met_to_the_last_digits():
    """Abramowitz and Stegun, table 7.7: C(1) = 0.7798934, S(1) = 0.4382591 for the integrals of cos and sin of pi t^2 / 2."""
    found = traced(SPIRAL, (0.0, 0.0, 0.0), 1.0, (0.0, math.pi), [1.0])[0]
    np.testing.assert_allclose(found, [0.7798934004, 0.4382591474, math.pi / 2], atol=5e-11)


def polyline_place(u, v, p_last, length):
    """Walk a finely sampled curve ``length`` metres."""
    p = np.linspace(0.0, p_last, 200_001)
    curve = np.stack([np.polyval(u[::-1], p), np.polyval(v[::-1], p)], axis=1)
    at = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(curve, axis=0), axis=1))])
    return np.array([np.interp(length, at, curve[:, k]) for k in range(2)]), at[-1]


small = st.floats(-0.02, 0.02)


@given(a=st.floats(-1, 1), b=st.floats(-0.5, 0.5), c=small, d=st.floats(-5e-4, 5e-4), length=st.floats(0.1, 40.0))
def test_poly3_goes_as_far_along_its_curve_as_it_is_asked(a, b, c, d, length):
    found = traced(POLY3, (0.0, 0.0, 0.0), 50.0, (a, b, c, d), [length])[0]
    expected, _ = polyline_place((0.0, 1.0, 0.0, 0.0), (a, b, c, d), length, length)
    np.testing.assert_allclose(found[:2], expected, atol=1e-6)
    assert found[2] == pytest.approx(math.atan(b + 2 * c * found[0] + 3 * d * found[0] ** 2), abs=1e-9)


@given(c=st.tuples(small, small), d=st.tuples(small, small), share=st.floats(0.0, 1.0), normalized=st.booleans())
def test_param_poly3_spreads_its_curve_over_the_declared_length(c, d, share, normalized):
    length = 10.0
    u, v = np.array([0.0, 1.0, c[0], d[0] / 10]), np.array([0.0, 0.0, c[1], d[1] / 10])
    if normalized:  # the same curve over a parameter from 0 to 1
        u, v = u * length ** np.arange(4), v * length ** np.arange(4)
    last = 1.0 if normalized else length
    _, total = polyline_place(u, v, last, 0.0)
    expected, _ = polyline_place(u, v, last, share * total)
    found = traced(PARAM_POLY3, (0.0, 0.0, 0.0), length, (*u, *v, last), [share * length])[0]
    np.testing.assert_allclose(found[:2], expected, atol=1e-5)


def test_pieces_of_all_kinds_are_traced_together_and_not_beyond_their_ends():
    kinds = np.array([LINE, ARC, SPIRAL, POLY3, PARAM_POLY3])
    params = np.zeros((5, 9))
    params[4] = [0, 1, 0, 0, 0, 0, 0, 0, 5.0]
    pieces = Pieces(kinds, np.zeros((5, 3)), np.full(5, 5.0), params)
    found = trace(pieces, np.array([1.0, 2.0, 3.0, 4.0, 99.0]))
    np.testing.assert_allclose(found, [[1, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0], [5, 0, 0]], atol=1e-12)


def test_a_spiral_wound_without_end_is_refused():
    with pytest.raises(SourceError, match="turn by at most 1000 rad, found one of 1000000 rad") as caught:
        traced(SPIRAL, (0.0, 0.0, 0.0), 1000.0, (0.0, 1000.0), [1000.0])
    assert caught.value.reason is Reason.TOO_LARGE
