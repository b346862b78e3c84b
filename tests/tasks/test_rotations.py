"""Rotations: every representation against hand-worked ones, and every way back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tasks.rotations import SIZES, convert_rotation, matrix_from_quat_xyzw, slerp

S = math.sqrt(0.5)
QUARTER_ABOUT_Z = {
    "quat_xyzw": [0, 0, S, S],
    "quat_wxyz": [S, 0, 0, S],
    "matrix": [0, -1, 0, 1, 0, 0, 0, 0, 1],
    "rot6d_rows": [0, -1, 0, 1, 0, 0],
    "rot6d_columns": [0, 1, 0, -1, 0, 0],
    "axis_angle": [0, 0, math.pi / 2],
}
# x -> y -> z -> x: a third of a turn about (1, 1, 1)
THIRD_ABOUT_DIAGONAL = {
    "quat_xyzw": [0.5, 0.5, 0.5, 0.5],
    "quat_wxyz": [0.5, 0.5, 0.5, 0.5],
    "matrix": [0, 0, 1, 1, 0, 0, 0, 1, 0],
    "rot6d_rows": [0, 0, 1, 1, 0, 0],
    "rot6d_columns": [0, 1, 0, 0, 0, 1],
    "axis_angle": [2 * math.pi / 3 / math.sqrt(3)] * 3,
}
HALF_ABOUT_X = {
    "quat_xyzw": [1, 0, 0, 0],
    "quat_wxyz": [0, 1, 0, 0],
    "matrix": [1, 0, 0, 0, -1, 0, 0, 0, -1],
    "rot6d_rows": [1, 0, 0, 0, -1, 0],
    "rot6d_columns": [1, 0, 0, 0, -1, 0],
    "axis_angle": [math.pi, 0, 0],
}


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("rotation", [QUARTER_ABOUT_Z, THIRD_ABOUT_DIAGONAL, HALF_ABOUT_X])
def test_known_rotations_in_every_representation(rotation: dict[str, list[float]], source: str, target: str) -> None:
    values = np.array(rotation[source], np.float64)
    values.flags.writeable = False
    found = convert_rotation(values, source, target)
    np.testing.assert_allclose(found, rotation[target], atol=1e-12)
    assert found.dtype == np.float64


def quaternions() -> st.SearchStrategy[np.ndarray]:
    parts = st.lists(st.floats(-1, 1), min_size=4, max_size=4).map(np.array)
    return parts.filter(lambda q: np.linalg.norm(q) > 1e-3).map(lambda q: q / np.linalg.norm(q))


@given(quaternions(), st.sampled_from(sorted(SIZES)))
def test_there_and_back_is_the_same_rotation(quat_xyzw: np.ndarray, target: str) -> None:
    there = convert_rotation(quat_xyzw[None], "quat_xyzw", target)
    back = convert_rotation(there, target, "quat_xyzw")[0]
    assert abs(back @ quat_xyzw) == pytest.approx(1, abs=1e-12)  # q and -q are one rotation
    sign = np.sign(back @ quat_xyzw)
    np.testing.assert_allclose(back, sign * quat_xyzw, atol=1e-7 if target == "axis_angle" else 1e-9)


@given(quaternions(), quaternions())
def test_matrices_multiply_as_quaternions_do(left: np.ndarray, right: np.ndarray) -> None:
    (x1, y1, z1, w1), (x2, y2, z2, w2) = left, right
    product = np.array(  # Hamilton's
        [
            w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
            w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
            w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
            w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
        ]
    )
    expected = matrix_from_quat_xyzw(left) @ matrix_from_quat_xyzw(right)
    np.testing.assert_allclose(matrix_from_quat_xyzw(product), expected, atol=1e-12)


@given(st.floats(-3.1, 3.1), st.sampled_from([0, 1, 2]))
def test_an_axis_angle_comes_back_down_to_the_smallest_angle(angle: float, axis: int) -> None:
    vector = np.zeros(3)
    vector[axis] = angle
    for scale in (1.0, 1e-4, 1e-9, 1e-300):
        back = convert_rotation(convert_rotation(vector * scale, "axis_angle", "quat_wxyz"), "quat_wxyz", "axis_angle")
        np.testing.assert_allclose(back, vector * scale, rtol=1e-9, atol=1e-15)


def test_a_quaternion_of_another_length_is_the_same_rotation_and_only_reordering_keeps_it() -> None:
    quat = np.array([[0.0, 0.0, 2.0, 2.0]], np.float32)
    np.testing.assert_array_equal(convert_rotation(quat, "quat_xyzw", "quat_wxyz"), [[2, 0, 0, 2]])
    found = convert_rotation(quat, "quat_xyzw", "matrix")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], QUARTER_ABOUT_Z["matrix"], atol=1e-6)


def test_a_predicted_rot6d_is_made_orthonormal() -> None:
    rows = np.array([0.0, -2.0, 0.0, 3.0, -0.5, 0.0])  # longer, and not at a right angle
    np.testing.assert_allclose(convert_rotation(rows, "rot6d_rows", "matrix"), QUARTER_ABOUT_Z["matrix"], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "source"),
    [([0.0] * 4, "quat_xyzw"), ([np.nan] * 4, "quat_wxyz"), ([1.0, 0, 0, 2.0, 0, 0], "rot6d_rows"), ([0.0] * 9, "rot6d_rows")],
)  # fmt: skip
def test_what_is_no_rotation_is_refused(values: list[float], source: str) -> None:
    with pytest.raises(SchemaError):
        convert_rotation(np.array(values), source, "matrix")
    with pytest.raises(SchemaError, match="expected a representation"):
        convert_rotation(np.zeros(4), "quat", "matrix")


def multiplied(first, second):
    """Hamilton's product, x first."""
    x, y, z, w = first
    a, b, c, d = second
    return np.array(
        [
            w * a + x * d + y * c - z * b,
            w * b - x * c + y * d + z * a,
            w * c + x * b - y * a + z * d,
            w * d - x * a - y * b - z * c,
        ]
    )


@given(
    start=st.tuples(*[st.floats(-1, 1)] * 4).filter(lambda q: sum(v * v for v in q) > 0.01),
    axis=st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: sum(x * x for x in v) > 0.01),
    angle=st.floats(1e-9, math.pi - 1e-3),
    weight=st.floats(0, 1),
    sign=st.sampled_from([1, -1]),
    length=st.floats(0.5, 2),
)
def test_slerp_turns_a_share_of_the_angle_about_the_same_axis_the_shorter_way(start, axis, angle, weight, sign, length):
    begin = np.array(start) / np.linalg.norm(start)
    unit = np.array(axis) / np.linalg.norm(axis)

    def turned(share):
        return multiplied(begin, [*(unit * math.sin(share * angle / 2)), math.cos(share * angle / 2)])

    (found,) = slerp(begin[None], sign * length * turned(1)[None], np.array([weight]))
    np.testing.assert_allclose(found, turned(weight), atol=1e-9)
    wxyz = slerp(begin[None, [3, 0, 1, 2]], sign * turned(1)[None, [3, 0, 1, 2]], np.array([weight]))
    np.testing.assert_allclose(wxyz[0, [1, 2, 3, 0]], found, atol=1e-12)


def test_slerp_leaves_a_recorded_quaternion_as_it_is_and_makes_none_of_zeros():
    rows = np.array([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(slerp(rows, rows[::-1], np.zeros(2)), rows)
    assert np.isnan(slerp(rows, rows[::-1], np.full(2, 0.5))).all()
