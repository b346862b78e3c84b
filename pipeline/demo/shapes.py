"""Boxes, prisms and the like, of which the demo's worlds are built."""

import numpy as np
from jaxtyping import Float

from pipeline.demo.scene import Colour, Mesh, merge, patch

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_BOX_FACES = np.array([[0, 1, 3, 2], [4, 5, 7, 6], [0, 1, 5, 4], [2, 3, 7, 6], [0, 2, 6, 4], [1, 3, 7, 5]])
"""Corners of the faces -x, +x, -y, +y, -z, +z."""


def dimmed(colour: Colour, share: float) -> Colour:
    """Return a colour times ``share``, at most white."""
    red, green, blue = (min(1.0, share * value) for value in colour)
    return red, green, blue


def pose(x: float, y: float, z: float = 0.0, yaw_rad: float = 0.0) -> Float[np.ndarray, "4 4"]:
    """Return the matrix that places a mesh: a turn about z, from x towards y, then a shift in metres."""
    cos, sin = np.cos(yaw_rad), np.sin(yaw_rad)
    return np.array([[cos, -sin, 0, x], [sin, cos, 0, y], [0, 0, 1, z], [0, 0, 0, 1]], np.float64)


def faces(quads: Float[np.ndarray, "face 4 3"], colour: Colour, *, glow: float = 0.0) -> Mesh:
    """Make one convex part: outwards is away from its middle."""
    middles = quads.mean(axis=1)
    normals = np.cross(quads[:, 2] - quads[:, 0], quads[:, 3] - quads[:, 1])
    inwards = np.einsum("fi,fi->f", normals, middles - quads.mean(axis=(0, 1))) < 0
    return patch(quads, np.where(inwards[:, None], -normals, normals), colour, glow=glow)


def box(
    centre: tuple[float, float, float],
    half: tuple[float, float, float],
    colour: Colour,
    *,
    glow: float = 0.0,
    taper: tuple[float, float] = (1.0, 1.0),
    lean_m: float = 0.0,
) -> Mesh:
    """Make a box from its middle and half sizes; its top may be narrower by ``taper`` (x, y) and shifted along x."""
    corners = _SIGNS * np.asarray(half)
    top = _SIGNS[:, 2] > 0
    corners[top, :2] *= taper
    corners[top, 0] += lean_m
    return faces((corners + np.asarray(centre))[_BOX_FACES], colour, glow=glow)


def prism(outline: Float[np.ndarray, "corner 2"], low_m: float, high_m: float, colour: Colour) -> Mesh:
    """Make an upright prism from a convex outline with an even number of corners."""
    ring = np.asarray(outline, np.float64)
    low, high = (np.column_stack([ring, np.full(len(ring), z)]) for z in (low_m, high_m))
    sides = np.stack([low, np.roll(low, -1, axis=0), np.roll(high, -1, axis=0), high], axis=1)
    return faces(np.concatenate([sides, fan(low), fan(high)]), colour)


def fan(ring: Float[np.ndarray, "corner 3"]) -> Float[np.ndarray, "face 4 3"]:
    """Cut a flat convex ring with an even number of corners into quads."""
    return np.stack([ring[[0, start, start + 1, start + 2]] for start in range(1, len(ring) - 2, 2)])


def circle(radius_m: float, num_corners: int = 12) -> Float[np.ndarray, "corner 2"]:
    """Return the corners of a regular polygon around the origin."""
    angles = (np.arange(num_corners) + 0.5) * (2 * np.pi / num_corners)
    return radius_m * np.column_stack([np.cos(angles), np.sin(angles)])


def disc(radius_m: float, colour: Colour, *, facing: str, num_corners: int = 12, glow: float = 0.0) -> Mesh:
    """Make a flat round plate at the origin that looks along ``facing``: ``-x``, ``+y``, ``-y`` or ``+z``."""
    ring, flat = circle(radius_m, num_corners), np.zeros(num_corners)
    axis, sign = "xyz".index(facing[1]), -1.0 if facing[0] == "-" else 1.0
    quads = fan(np.insert(ring, axis, flat, axis=1))
    normal = sign * np.eye(3)[axis]
    return patch(quads, np.tile(normal, (len(quads), 1)), colour, glow=glow)


def lump(centre: tuple[float, float, float], half: tuple[float, float, float], colour: Colour, *, bumps: int) -> Mesh:
    """Make a low-poly ball, roughened by a pattern numbered ``bumps``: a tree's crown, a head, a bush."""
    heights, radii = np.array([-0.95, -0.45, 0.3, 0.9, 1.0]), np.array([0.45, 0.92, 1.0, 0.55, 0.05])
    angles = np.arange(8) * (np.pi / 4)
    wobble = 1 + (0.14 * np.sin(np.outer(np.arange(1, 6), np.arange(8)) * 2.3 + bumps) if bumps else 0)
    rings = np.stack([np.cos(angles) * radii[:, None], np.sin(angles) * radii[:, None]], axis=-1) * np.dstack([wobble])
    points = np.concatenate([rings, np.broadcast_to(heights[:, None, None], (5, 8, 1))], axis=-1)
    points = points * np.asarray(half) + np.asarray(centre)
    turned = np.roll(points, -1, axis=1)
    bands = np.stack([points[:-1], turned[:-1], turned[1:], points[1:]], axis=2).reshape(-1, 4, 3)
    return faces(np.concatenate([bands, fan(points[0])]), colour)


def decal(
    quads: Float[np.ndarray, "face 4 3"], normal: tuple[float, float, float], colour: Colour, *, glow: float = 0.0
) -> Mesh:
    """Make flat quads that lie on a face and look the way it does: windows, plates, lamps."""
    return patch(
        np.asarray(quads, np.float64), np.tile(np.asarray(normal, np.float64), (len(quads), 1)), colour, glow=glow
    )


def shadow(outline: Float[np.ndarray, "corner 2"], height_m: float, towards_sun: tuple[float, float, float]) -> Mesh:
    """Make what an upright prism takes from the sun: a dark patch on the ground, a little shorter than in truth."""
    reach = -0.75 * height_m / max(towards_sun[2], 0.2)
    ring = _hull(np.concatenate([outline, outline + reach * np.asarray(towards_sun[:2])]))
    quads = fan(np.column_stack([ring, np.zeros(len(ring))]))
    up = np.tile(np.array([0.0, 0.0, 1.0]), (len(quads), 1))
    return patch(quads, up, (0.02, 0.02, 0.05), opacity=0.4, glow=1.0, ground=True)


def rectangle(half_x: float, half_y: float) -> Float[np.ndarray, "corner 2"]:
    """Return the corners of a rectangle around the origin."""
    return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * np.array([half_x, half_y])


def _hull(points: Float[np.ndarray, "point 2"]) -> Float[np.ndarray, "corner 2"]:
    """Return the convex hull, its first corner once more where that makes their number even (Andrew, 1979)."""
    order = points[np.lexsort(points.T[::-1])]
    ring: list[np.ndarray] = []
    for side in (order, order[::-1]):
        start = len(ring)
        for point in side:
            while len(ring) >= start + 2 and _area(ring[-2], ring[-1], point) <= 1e-12:
                ring.pop()
            ring.append(point)
        ring.pop()
    return np.array(ring if len(ring) % 2 == 0 else [*ring, ring[0]])


def _area(first: np.ndarray, second: np.ndarray, third: np.ndarray) -> float:
    """Return twice the area of a triangle, positive where it turns from x towards y."""
    (ax, ay), (bx, by) = second - first, third - first
    return float(ax * by - ay * bx)


def one_part(*meshes: Mesh) -> Mesh:
    """Join meshes into one part, painted in this order."""
    return merge(meshes).as_one_part()
