"""Rotations in the representations that robot data uses; the name says the order of the elements, and all share the matrix.

============== ===== =================================================================================================
name           size  elements
============== ===== =================================================================================================
quat_xyzw      4     x, y, z, w: ROS, SciPy, robosuite, PyBullet
quat_wxyz      4     w, x, y, z: MuJoCo, Eigen's constructor, pytorch3d
matrix         9     row by row
rot6d_rows     6     first two rows: pytorch3d's ``matrix_to_rotation_6d``, and so diffusion_policy, robomimic, UMI
rot6d_columns  6     first two columns, one after the other: Zhou et al. 2019 (arXiv 1812.07035), equation 15
axis_angle     3     unit axis times angle in radians: robosuite, LIBERO, OpenCV's ``Rodrigues``
============== ===== =================================================================================================

Computed in float64 and rounded once to the dtype of the input. Of the two quaternions of a rotation the one with ``w >= 0``
is returned, of the axis angles the one of at most pi, so that a round trip returns these.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from schemas.errors import SchemaError

SIZES = {"quat_xyzw": 4, "quat_wxyz": 4, "matrix": 9, "rot6d_rows": 6, "rot6d_columns": 6, "axis_angle": 3}
"""Representations, and how many elements each has."""

_TINY = 1e-12
"""Squared length below which a vector has no direction: no recorder writes one on purpose."""


def convert_rotation(
    values: Float[np.ndarray, "*batch size"], source: str, target: str
) -> Float[np.ndarray, "*batch _"]:
    """Return rotations in another representation.

    SchemaError where a quaternion is zero or the vectors of a rot6d have no plane: such a row is no rotation.

    >>> convert_rotation(np.array([0.0, 0.0, 0.0, 1.0]), "quat_xyzw", "axis_angle").tolist()
    [0.0, 0.0, 0.0]
    """
    for name in (source, target):
        if name not in SIZES:
            raise SchemaError(f"expected a representation of {', '.join(SIZES)}, found {name!r}; correct the name")
    if values.shape[-1:] != (SIZES[source],) or values.dtype.kind != "f":
        raise SchemaError(
            f"expected float[..., {SIZES[source]}] as {source}, found {values.dtype}{list(values.shape)}; name the right columns"
        )
    if {source, target} == {"quat_xyzw", "quat_wxyz"}:  # only a change of order: nothing is computed
        return quat_wxyz_from_xyzw(values) if source == "quat_xyzw" else quat_xyzw_from_wxyz(values)
    if source == target:
        return values
    matrix = _TO_MATRIX[source](values.astype(np.float64))
    return _FROM_MATRIX[target](matrix).astype(values.dtype)


def quat_wxyz_from_xyzw(quat_xyzw: Float[np.ndarray, "*batch 4"]) -> Float[np.ndarray, "*batch 4"]:
    """Put w first."""
    return quat_xyzw[..., [3, 0, 1, 2]]


def quat_xyzw_from_wxyz(quat_wxyz: Float[np.ndarray, "*batch 4"]) -> Float[np.ndarray, "*batch 4"]:
    """Put w last."""
    return quat_wxyz[..., [1, 2, 3, 0]]


def matrix_from_quat_xyzw(quat_xyzw: Float[np.ndarray, "*batch 4"]) -> Float[np.ndarray, "*batch 3 3"]:
    """Return the matrix of a quaternion of any length but zero."""
    x, y, z, w = np.moveaxis(_unit(quat_xyzw, "quaternion"), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def quat_xyzw_from_matrix(matrix: Float[np.ndarray, "*batch 3 3"]) -> Float[np.ndarray, "*batch 4"]:
    """Return the quaternion with ``w >= 0``.

    All four elements are found from the greatest of them (Shepperd 1978), since dividing by a small one loses digits.
    """
    m = matrix
    diagonal = np.stack([m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]], axis=-1)
    trace = diagonal.sum(axis=-1)
    # row k holds the products of element k with all four, times 4
    products = np.empty((*m.shape[:-2], 4, 4))
    for k in range(3):
        i, j = (k + 1) % 3, (k + 2) % 3
        products[..., k, k] = 1 + 2 * diagonal[..., k] - trace
        products[..., k, i] = products[..., i, k] = m[..., i, k] + m[..., k, i]
        products[..., k, 3] = products[..., 3, k] = m[..., j, i] - m[..., i, j]
    products[..., 3, 3] = 1 + trace
    greatest = np.argmax(np.einsum("...kk->...k", products), axis=-1)
    quat = np.take_along_axis(products, greatest[..., None, None], axis=-2)[..., 0, :]
    quat = _unit(quat, "matrix")
    return np.where(quat[..., 3:] < 0, -quat, quat)


def matrix_from_rot6d_rows(rot6d_rows: Float[np.ndarray, "*batch 6"]) -> Float[np.ndarray, "*batch 3 3"]:
    """Return the matrix whose first two rows are nearest by Gram-Schmidt: a policy predicts rows that are not quite orthonormal."""
    first = _unit(rot6d_rows[..., :3], "rot6d")
    second = rot6d_rows[..., 3:]
    second = _unit(second - (first * second).sum(axis=-1, keepdims=True) * first, "rot6d")
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def rot6d_rows_from_matrix(matrix: Float[np.ndarray, "*batch 3 3"]) -> Float[np.ndarray, "*batch 6"]:
    """Return the first two rows."""
    return matrix[..., :2, :].reshape(*matrix.shape[:-2], 6)


def matrix_from_axis_angle(axis_angle: Float[np.ndarray, "*batch 3"]) -> Float[np.ndarray, "*batch 3 3"]:
    """Return the matrix; of half an angle the sine over the angle stays exact down to zero."""
    angle_rad = np.linalg.norm(axis_angle, axis=-1, keepdims=True)
    vector = axis_angle * (0.5 * np.sinc(angle_rad / (2 * np.pi)))  # sin(a / 2) / a
    return matrix_from_quat_xyzw(np.concatenate([vector, np.cos(angle_rad / 2)], axis=-1))


def axis_angle_from_matrix(matrix: Float[np.ndarray, "*batch 3 3"]) -> Float[np.ndarray, "*batch 3"]:
    """Return the axis times an angle in [0, pi]."""
    quat = quat_xyzw_from_matrix(matrix)
    sine = np.linalg.norm(quat[..., :3], axis=-1, keepdims=True)
    angle_rad = 2 * np.arctan2(sine, quat[..., 3:])
    scale = np.divide(angle_rad, sine, out=np.full_like(sine, 2.0), where=sine > 0)
    vector: np.ndarray = quat[..., :3] * scale
    return vector


def _unit(vectors: np.ndarray, what: str) -> np.ndarray:
    squared = (vectors * vectors).sum(axis=-1, keepdims=True)
    if not np.all(squared > _TINY):
        raise SchemaError(
            f"expected a {what} that is a rotation, found zeros, NaN or parallel vectors; drop such steps"
        )
    unit: np.ndarray = vectors / np.sqrt(squared)
    return unit


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return np.swapaxes(matrix, -1, -2)


_TO_MATRIX: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "quat_xyzw": matrix_from_quat_xyzw,
    "quat_wxyz": lambda values: matrix_from_quat_xyzw(quat_xyzw_from_wxyz(values)),
    "matrix": lambda values: values.reshape(*values.shape[:-1], 3, 3),
    "rot6d_rows": matrix_from_rot6d_rows,
    "rot6d_columns": lambda values: _transposed(matrix_from_rot6d_rows(values)),
    "axis_angle": matrix_from_axis_angle,
}
_FROM_MATRIX: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "quat_xyzw": quat_xyzw_from_matrix,
    "quat_wxyz": lambda matrix: quat_wxyz_from_xyzw(quat_xyzw_from_matrix(matrix)),
    "matrix": lambda matrix: matrix.reshape(*matrix.shape[:-2], 9),
    "rot6d_rows": rot6d_rows_from_matrix,
    "rot6d_columns": lambda matrix: rot6d_rows_from_matrix(_transposed(matrix)),
    "axis_angle": axis_angle_from_matrix,
}


def slerp(
    lower: Float[np.ndarray, "n 4"], upper: Float[np.ndarray, "n 4"], weight: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n 4"]:
    """Turn from one unit quaternion towards another at constant speed, the shorter way; ``weight`` 0 returns ``lower`` as it is.

    ``(sin((1 - w) a) lower + sin(w a) upper) / sin(a)`` with the angle ``a`` between them (Shoemake, SIGGRAPH 1985). The same whether w comes
    first or last. Lengths are made 1; a quaternion of no length gives NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        start = lower / np.linalg.norm(lower, axis=1, keepdims=True)
        stop = upper / np.linalg.norm(upper, axis=1, keepdims=True)
    stop = np.where((start * stop).sum(axis=1, keepdims=True) < 0, -stop, stop)
    # By the chord: near 0, where the arc cosine of a dot product keeps half the digits, it keeps all.
    angle = 2 * np.arcsin(np.clip(np.linalg.norm(stop - start, axis=1) / 2, 0, 1))
    sine = np.sin(angle)
    is_small = sine < 1e-12
    safe = np.where(is_small, 1.0, sine)
    first = np.where(is_small, 1 - weight, np.sin((1 - weight) * angle) / safe)
    second = np.where(is_small, weight, np.sin(weight * angle) / safe)
    return np.where(weight[:, None] == 0, lower, first[:, None] * start + second[:, None] * stop)
