"""A small painter of shaded polygons: enough perspective to tell forwards from backwards and left from right.

Points are world points; a camera looks along its own x axis, y is to the right of its picture and z is up, as CARLA
has it. A face says itself which way is outwards, so that left-handed and right-handed worlds are painted alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int
from PIL import Image, ImageDraw

NEAR_M = 0.02
"""Faces are cut at this distance in front of the camera."""
_TINY_PX2, _FAR_PX = 3.0, 1e5

Colour = tuple[float, float, float]
"""Red, green, blue in 0 .. 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Camera:
    """A pinhole camera with square pixels and its centre in the middle of the picture."""

    view_from_world: Float[np.ndarray, "4 4"]
    """Metres; into axes x forwards, y right, z up."""
    focal_px: float
    height_px: int
    width_px: int

    @property
    def position_m(self) -> Float[np.ndarray, "3"]:
        """Where the camera is in the world; also right where the world is left-handed and the matrix mirrors."""
        return -np.linalg.solve(self.view_from_world[:3, :3], self.view_from_world[:3, 3])

    def see(self, points: Float[np.ndarray, "*n 3"]) -> Float[np.ndarray, "*n 3"]:
        """Return world points in the camera's axes."""
        return points @ self.view_from_world[:3, :3].T + self.view_from_world[:3, 3]

    def project(self, seen: Float[np.ndarray, "*n 3"]) -> Float[np.ndarray, "*n 2"]:
        """Return column and row in pixels (a pixel's centre is at .5) of points in the camera's axes, x > 0."""
        plane = seen[..., 1:] / seen[..., :1] * np.array([self.focal_px, -self.focal_px])
        return plane + np.array([self.width_px / 2, self.height_px / 2])

    def rays(self) -> Float[np.ndarray, "row column 3"]:
        """Return the world direction of every pixel's centre, with a length of 1 along the camera's axis."""
        columns = (np.arange(self.width_px) + 0.5 - self.width_px / 2) / self.focal_px
        rows = -(np.arange(self.height_px) + 0.5 - self.height_px / 2) / self.focal_px
        right, up = np.meshgrid(columns, rows)
        seen = np.stack([np.ones_like(right), right, up], axis=-1)
        return seen @ np.linalg.inv(self.view_from_world[:3, :3]).T


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """A sun, the sky's fill, and haze that takes over with distance."""

    towards_sun: tuple[float, float, float] = (0.3, -0.5, 0.8)
    ambient: float = 0.55
    diffuse: float = 0.55
    haze: Colour = (0.80, 0.85, 0.90)
    haze_m: float = 180.0
    """Distance at which haze has taken 63 percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Coloured quads (a triangle repeats a corner). Faces of one part are painted in the order they are listed."""

    quads: Float[np.ndarray, "face 4 3"]
    normals: Float[np.ndarray, "face 3"]
    """Unit vectors outwards; a face whose back is seen is not painted."""
    colours: Float[np.ndarray, "face 4"]
    """Red, green, blue, opacity in 0 .. 1."""
    glows: Float[np.ndarray, "face"]
    """1 for a lamp, which no sun shades and less haze hides."""
    parts: Int[np.ndarray, "face"]
    """Faces of one number are painted together, farther parts first."""
    grounds: Bool[np.ndarray, "face"]
    """True for shadows and paint on the ground: painted before everything that stands."""

    def placed(self, world_from_mesh: Float[np.ndarray, "4 4"]) -> "Mesh":
        """Return the mesh moved by a rigid transform."""
        turn = world_from_mesh[:3, :3].T
        return replace(self, quads=self.quads @ turn + world_from_mesh[:3, 3], normals=self.normals @ turn)

    def as_one_part(self) -> "Mesh":
        """Return the mesh as one thing, painted in its listed order."""
        return replace(self, parts=np.zeros(len(self.parts), np.int64))


def merge(meshes: Sequence[Mesh]) -> Mesh:
    """Join meshes; the parts of one stay apart from those of another."""
    counts = [0, *np.cumsum([mesh.parts.max(initial=-1) + 1 for mesh in meshes])]
    return Mesh(
        quads=np.concatenate([mesh.quads for mesh in meshes]),
        normals=np.concatenate([mesh.normals for mesh in meshes]),
        colours=np.concatenate([mesh.colours for mesh in meshes]),
        glows=np.concatenate([mesh.glows for mesh in meshes]),
        parts=np.concatenate([mesh.parts + start for mesh, start in zip(meshes, counts[:-1], strict=True)]),
        grounds=np.concatenate([mesh.grounds for mesh in meshes]),
    )


def patch(
    quads: Float[np.ndarray, "face 4 3"],
    normals: Float[np.ndarray, "face 3"],
    colour: Colour | Float[np.ndarray, "face 3"],
    *,
    opacity: float = 1.0,
    glow: float = 0.0,
    ground: bool = False,
) -> Mesh:
    """Make one part of quads whose outward normals are known."""
    num_faces = len(quads)
    colours = np.full((num_faces, 4), opacity)
    colours[:, :3] = colour
    lengths = np.linalg.norm(normals, axis=-1, keepdims=True)
    return Mesh(
        quads=np.asarray(quads, np.float64),
        normals=normals / np.maximum(lengths, 1e-12),
        colours=colours,
        glows=np.full(num_faces, glow),
        parts=np.zeros(num_faces, np.int64),
        grounds=np.full(num_faces, ground),
    )


def paint(backdrop: Image.Image, camera: Camera, mesh: Mesh, light: Light, *, supersample: int = 2) -> Image.Image:
    """Paint what the camera sees of ``mesh`` over a picture of the camera's size (painter's algorithm)."""
    middles = mesh.quads.mean(axis=1)
    outwards = np.einsum("fi,fi->f", mesh.normals, camera.position_m - middles) > 0
    shown = np.flatnonzero(outwards)
    seen = camera.see(mesh.quads[shown])
    inside = in_front(seen, camera)
    shown, seen = shown[inside], seen[inside]
    order = np.argsort(_paint_keys(mesh, camera.see(middles))[shown], kind="stable")
    shown, seen = shown[order], seen[order]
    colours = _shade(mesh, shown, light, middles[shown] - camera.position_m)
    canvas = backdrop.resize((camera.width_px * supersample, camera.height_px * supersample), Image.Resampling.NEAREST)
    _fill(canvas, outlines(seen, camera, supersample), colours.tolist())
    return canvas.reduce(supersample) if supersample > 1 else canvas


def _fill(canvas: Image.Image, outlines: list[list[float]], colours: list[list[int]]) -> None:
    """Fill polygons in order; the translucent ones are blended."""
    solid, glass = ImageDraw.Draw(canvas), ImageDraw.Draw(canvas, "RGBA")
    for outline, (red, green, blue, opacity) in zip(outlines, colours, strict=True):
        if len(outline) < 6:
            continue
        if opacity == 255:
            solid.polygon(outline, (red, green, blue))
        else:
            glass.polygon(outline, (red, green, blue, opacity))


def outlines(seen: Float[np.ndarray, "face 4 3"], camera: Camera, supersample: int) -> list[list[float]]:
    """Return x, y, x, y, ... of each face on the canvas; nothing for one too small to be seen."""
    whole = np.all(seen[..., 0] >= NEAR_M, axis=1)
    corners = camera.project(np.where(whole[:, None, None], seen, 1.0)) * supersample
    across, up = corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1]
    tiny = np.abs(across[:, 0] * up[:, 1] - across[:, 1] * up[:, 0]) < _TINY_PX2
    outlines: list[list[float]] = np.clip(corners, -_FAR_PX, _FAR_PX).reshape(-1, 8).tolist()
    for face in np.flatnonzero(whole & tiny):
        outlines[face] = []
    for face in np.flatnonzero(~whole):
        cut = camera.project(_clip_near(seen[face])) * supersample
        outlines[face] = np.clip(cut, -_FAR_PX, _FAR_PX).ravel().tolist()
    return outlines


def in_front(seen: Float[np.ndarray, "face 4 3"], camera: Camera) -> Bool[np.ndarray, "face"]:
    """Tell which faces may reach into the picture: a test of the view's pyramid that is never wrongly False."""
    depth = np.maximum(seen[..., 0], NEAR_M)
    wide, high = camera.width_px / 2 / camera.focal_px, camera.height_px / 2 / camera.focal_px
    inside = np.any(seen[..., 0] > NEAR_M, axis=1)
    for axis, limit in ((1, wide), (2, high)):
        inside &= np.any(seen[..., axis] < limit * depth, axis=1) & np.any(seen[..., axis] > -limit * depth, axis=1)
    return inside


def _paint_keys(mesh: Mesh, middles: Float[np.ndarray, "face 3"]) -> Float[np.ndarray, "face"]:
    """Return the order of painting: the ground, then parts from the farthest middle to the nearest."""
    faces_of = np.maximum(np.bincount(mesh.parts), 1)
    centres = np.stack([np.bincount(mesh.parts, middles[:, axis]) / faces_of for axis in range(3)], axis=-1)
    nearness = -np.linalg.norm(centres, axis=-1)[mesh.parts]
    return np.where(mesh.grounds, nearness - 1e6, nearness)


def _shade(
    mesh: Mesh, shown: Int[np.ndarray, "shown"], light: Light, away: Float[np.ndarray, "shown 3"]
) -> Int[np.ndarray, "shown 4"]:
    """Return colours 0 .. 255 of some faces after sun, sky and haze; haze lies low, so that height does not thicken it."""
    normals, glows = mesh.normals[shown], mesh.glows[shown, None]
    sun = np.asarray(light.towards_sun) / np.linalg.norm(light.towards_sun)
    brightness = light.ambient * (0.85 + 0.15 * normals[:, 2]) + light.diffuse * np.maximum(normals @ sun, 0.0)
    brightness = np.where(glows > 0, glows, brightness[:, None])
    hidden = 1 - np.exp(-np.hypot(away[:, 0], away[:, 1]) / light.haze_m)[:, None]
    hidden = np.where(glows > 0, hidden * 0.4, hidden)
    rgb = np.minimum(mesh.colours[shown, :3] * brightness, 1.0) * (1 - hidden) + np.asarray(light.haze) * hidden
    return np.rint(255 * np.concatenate([rgb, mesh.colours[shown, 3:]], axis=1)).astype(np.int64)


def _clip_near(corners: Float[np.ndarray, "4 3"]) -> Float[np.ndarray, "corner 3"]:
    """Cut a polygon in the camera's axes at the near plane (Sutherland and Hodgman, 1974)."""
    if (corners[:, 0] >= NEAR_M).all():
        return corners
    kept: list[np.ndarray] = []
    for corner, following in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if corner[0] >= NEAR_M:
            kept.append(corner)
        if (corner[0] >= NEAR_M) != (following[0] >= NEAR_M):
            share = (NEAR_M - corner[0]) / (following[0] - corner[0])
            kept.append(corner + share * (following - corner))
    return np.array(kept).reshape(-1, 3)
