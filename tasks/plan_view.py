"""Geometry of OpenDRIVE's plan view: where the reference line is, ``ds`` metres into a piece of it.

Formulas: ASAM OpenDRIVE 1.7, section 8 (``<planView>``). All functions are vectorised over samples of many pieces, so that a
map of thirty thousand pieces costs a handful of NumPy calls.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from schemas.errors import Reason, SourceError

LINE, ARC, SPIRAL, POLY3, PARAM_POLY3 = range(5)
MAX_TURN_RAD = 1000.0
"""A spiral that winds further is refused; ones of real roads turn less than 10 rad."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_NODES, _WEIGHTS = (_NODES + 1.0) / 2.0, _WEIGHTS / 2.0  # on [0, 1]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of reference lines, one row each."""

    kind: Int64[np.ndarray, " piece"]
    """LINE, ARC, ..."""
    pose: Float64[np.ndarray, "piece 3"]
    """x, y in metres and heading in radians of the beginning."""
    length_m: Float64[np.ndarray, " piece"]
    params: Float64[np.ndarray, "piece 9"]
    """Arc: curvature. Spiral: curvature at both ends. Poly3: a, b, c, d. ParamPoly3: aU, ..., dU, aV, ..., dV, and
    the value of its parameter at the end."""

    def take(self, rows: np.ndarray) -> "Pieces":
        """Return some of the rows."""
        return Pieces(self.kind[rows], self.pose[rows], self.length_m[rows], self.params[rows])


def trace(pieces: Pieces, ds_m: Float64[np.ndarray, " piece"]) -> Float64[np.ndarray, "piece 3"]:
    """Return x, y and heading ``ds_m[i]`` metres into piece ``i``.

    Raises
    ------
    SourceError
        A spiral turns by more than MAX_TURN_RAD (too-large).
    """
    ds_m = np.clip(ds_m, 0.0, pieces.length_m)
    local = np.empty((len(ds_m), 3))
    for kinds, shape in ((LINE, ARC), _arc), ((SPIRAL,), _spiral), ((POLY3,), _poly3), ((PARAM_POLY3,), _param_poly3):
        (rows,) = np.nonzero(np.isin(pieces.kind, kinds))
        if len(rows):
            local[rows] = shape(pieces.take(rows), ds_m[rows])
    x, y, heading = pieces.pose.T
    cos, sin = np.cos(heading), np.sin(heading)
    u, v, turn = local.T
    return np.stack([x + cos * u - sin * v, y + sin * u + cos * v, heading + turn], axis=1)


def _arc(pieces: Pieces, ds: np.ndarray) -> np.ndarray:
    """Return u, v and turn of arcs, and of lines, whose curvature is 0.

    ``sin(x)/x`` instead of ``sin(k s)/k`` keeps its digits where the curvature vanishes.
    """
    turn = pieces.params[:, 0] * ds
    u = ds * np.sinc(turn / np.pi)
    v = ds * np.sin(turn / 2) * np.sinc(turn / (2 * np.pi))
    return np.stack([u, v, turn], axis=1)


def _spiral(pieces: Pieces, ds: np.ndarray) -> np.ndarray:
    """Integrate cos and sin of the heading of a clothoid, whose curvature is linear in ``s``.

    Gauss-Legendre with 16 nodes over panels that turn by at most 1 rad: exact to rounding for any curvatures, where
    Fresnel functions cancel if both are nearly equal.
    """
    begin = pieces.params[:, 0]
    rate = (pieces.params[:, 1] - begin) / np.where(pieces.length_m > 0, pieces.length_m, 1.0)
    turns = np.maximum(np.abs(begin), np.abs(begin + rate * ds)) * ds
    if turns.max() > MAX_TURN_RAD:
        raise SourceError(
            f"expected spirals that turn by at most {MAX_TURN_RAD:.0f} rad, found one of {turns.max():.0f} rad; "
            "correct its curvature",
            Reason.TOO_LARGE,
        )
    num_panels = np.maximum(np.ceil(turns), 1.0)
    panel_m = ds / num_panels
    uv = np.zeros((len(ds), 2))
    for panel in range(int(num_panels.max())):
        rows = np.nonzero(num_panels > panel)[0]
        at = panel_m[rows, None] * (panel + _NODES)
        heading = begin[rows, None] * at + rate[rows, None] * at**2 / 2
        uv[rows, 0] += panel_m[rows] * (np.cos(heading) @ _WEIGHTS)
        uv[rows, 1] += panel_m[rows] * (np.sin(heading) @ _WEIGHTS)
    return np.column_stack([uv, begin * ds + rate * ds**2 / 2])


def _poly3(pieces: Pieces, ds: np.ndarray) -> np.ndarray:
    """Return u, v and turn of ``v = a + b u + c u^2 + d u^3``, ``ds`` being the length of the curve."""
    u = np.zeros((len(ds), 4))
    u[:, 1] = 1.0
    v = pieces.params[:, :4]
    return _curve(u, v, _parameter(u, v, ds, ds))


def _param_poly3(pieces: Pieces, ds: np.ndarray) -> np.ndarray:
    """Return u, v and turn of two cubics of a parameter.

    The length of the curve is spread over the declared length of the piece, since writers round the one or the other
    and since a normalised parameter is not proportional to length.
    """
    u, v, last = pieces.params[:, :4], pieces.params[:, 4:8], pieces.params[:, 8]
    share = ds / np.where(pieces.length_m > 0, pieces.length_m, 1.0)
    return _curve(u, v, _parameter(u, v, share * _curve_length(u, v, last), last))


def _curve(u: np.ndarray, v: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Evaluate two cubics and the direction of their curve at parameter ``p``."""
    return np.stack([_cubic(u, p), _cubic(v, p), np.arctan2(_slope(v, p), _slope(u, p))], axis=1)


def _cubic(row: np.ndarray, p: np.ndarray) -> np.ndarray:
    a, b, c, d = (row[:, i] for i in range(4))
    value: np.ndarray = a + p * (b + p * (c + p * d))
    return value


def _slope(row: np.ndarray, p: np.ndarray) -> np.ndarray:
    b, c, d = (row[:, i] for i in range(1, 4))
    value: np.ndarray = b + p * (2 * c + p * 3 * d)
    return value


def _curve_length(u: np.ndarray, v: np.ndarray, p: np.ndarray, num_panels: int = 8) -> np.ndarray:
    """Return the length of the curve between 0 and ``p``, by Gauss-Legendre over equal panels."""
    total = np.zeros(len(p))
    for panel in range(num_panels):
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            at = p * ((panel + node) / num_panels)
            total += weight * np.hypot(_slope(u, at), _slope(v, at))
    return np.asarray(total * p / num_panels)


def _parameter(u: np.ndarray, v: np.ndarray, length: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the parameter in ``[0, last]`` at which the curve is ``length`` long: Newton, kept inside a bracket."""
    low, high = np.zeros(len(length)), last.astype(np.float64)
    p = high / 2
    for _ in range(60):
        excess = _curve_length(u, v, p) - length
        low, high = np.where(excess <= 0, p, low), np.where(excess >= 0, p, high)
        speed = np.hypot(_slope(u, p), _slope(v, p))
        newton = p - excess / np.where(speed > 0, speed, 1.0)
        following = np.where((newton >= low) & (newton <= high) & (speed > 0), newton, (low + high) / 2)
        if np.abs(following - p).max() <= 1e-13 * max(float(np.abs(last).max()), 1.0):
            return following
        p = following
    return p
