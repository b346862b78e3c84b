"""Paint what three cameras see of the arm at its table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFilter

from pipeline.demo import arm
from pipeline.demo.arm import Pose, Task, shift, turn
from pipeline.demo.scene import Camera, Colour, Light, Mesh, in_front, merge, outlines, paint
from pipeline.demo.shapes import box, circle, dimmed, one_part, prism
from pipeline.demo.texture import band, stack, stripes

VIEWS = ("cam_high", "cam_left_wrist", "cam_right_wrist")

LIGHT = Light(towards_sun=(0.35, -0.45, 1.0), ambient=0.60, diffuse=0.50, haze=(0.9, 0.9, 0.9), haze_m=60.0)
COLOURS: Mapping[str, Colour] = {
    "red": (0.86, 0.15, 0.13), "green": (0.20, 0.62, 0.27), "yellow": (0.95, 0.76, 0.14),
    "blue": (0.16, 0.38, 0.80), "white": (0.93, 0.93, 0.91),
}  # fmt: skip
_SHELL, _ACCENT, _JOINT = (0.88, 0.88, 0.90), (0.98, 0.55, 0.12), (0.25, 0.27, 0.31)
_TABLE_X_M, _TABLE_Y_M, _FLOOR_M = (-0.22, 0.62), (-0.46, 0.46), -0.75
_WALL_COLOURS = np.array([[0.80, 0.86, 0.88], [0.90, 0.87, 0.80]], np.float32)
_ROOM_M = np.array([[-1.6, 2.2], [-2.0, 2.0], [_FLOOR_M, 2.0]], np.float32)


def look(eye: Sequence[float], target: Sequence[float], up: Sequence[float]) -> Float[np.ndarray, "4 4"]:
    """Return ``view_from_world`` of a camera that looks from a point at another in a right-handed world."""
    forwards = np.subtract(target, eye)
    forwards = forwards / np.linalg.norm(forwards)
    right = np.cross(forwards, up)
    right = right / np.linalg.norm(right)
    matrix = np.eye(4)
    matrix[:3, :3] = forwards, right, np.cross(right, forwards)
    matrix[:3, 3] = -matrix[:3, :3] @ np.asarray(eye, np.float64)
    return matrix


def camera(view: str, state: Float[np.ndarray, "7"], size: tuple[int, int]) -> Camera:
    """Return a camera of the set: one that stands before the table, two that the hand carries."""
    height, width = size
    if view == "cam_high":
        pose, focal = look((0.96, -0.44, 0.62), (0.22, 0.01, 0.15), (0, 0, 1)), 0.98
    else:
        side = 1.0 if view == "cam_left_wrist" else -1.0
        hand_from_world = np.linalg.inv(arm.links(state[:6])[-1])
        # Left and right behind the palm; upwards in the picture is away from the robot.
        pose, focal = look((0.09, 0.075 * side, -0.10), (-0.015, 0.0, 0.01), (0, 0, -1)) @ hand_from_world, 0.60
    return Camera(view_from_world=pose, focal_px=focal * width, height_px=height, width_px=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The things on the table of one episode, ready to be painted."""

    task: Task

    def paint(self, view: str, state: Float[np.ndarray, "7"], block: Pose, size: tuple[int, int]) -> Image.Image:
        """Return one view of one step."""
        eye = camera(view, state, size)
        solids = merge([arm_mesh(state), *self._blocks(block)])
        backdrop = _still_backdrop(size) if view == VIEWS[0] else _backdrop(eye)
        picture = _darken(backdrop, eye, solids)
        flat = merge([_plate(colour, *place) for colour, place in self.task.plates.items()])
        return paint(picture, eye, merge([flat, solids]), LIGHT)

    def _blocks(self, moved: Pose) -> list[Mesh]:
        half = (arm.BLOCK_HALF_M,) * 3
        blocks = []
        for colour, (x, y, yaw) in self.task.blocks.items():
            where = moved if colour == self.task.block else shift(x, y, arm.BLOCK_HALF_M) @ turn("z", yaw)
            blocks.append(box((0, 0, 0), half, COLOURS[colour]).placed(where))
        return blocks


def arm_mesh(state: Float[np.ndarray, "7"]) -> Mesh:
    """Return the arm in a state, its fingers as far apart as the gripper says."""
    frames = (np.eye(4), *arm.links(state[:6]))
    open_m = 0.0145 + 0.013 * float(state[6]) / arm.HOLDING
    parts = [mesh.placed(frame) for frame, meshes in zip(frames, _links(), strict=True) for mesh in meshes]
    return merge([*parts, *(_finger().placed(frames[-1] @ shift(0, side * open_m, 0)) for side in (-1, 1))])


@lru_cache(maxsize=1)
def _links() -> tuple[tuple[Mesh, ...], ...]:
    """Return what moves with the table, the turret, the upper arm, the forearm, the hand and the tool."""
    across = turn("x", np.pi / 2)
    return (
        (prism(circle(0.085, 12), 0.0, 0.035, _JOINT), prism(circle(0.06, 12), 0.035, arm.BASE_M - 0.045, _SHELL)),
        (box((0, 0, 0.0), (0.05, 0.055, 0.05), _JOINT), prism(circle(0.048, 10), -0.062, 0.062, _ACCENT).placed(across)),
        (_beam(arm.UPPER_M, 0.036, 0.028, _SHELL),
         prism(circle(0.040, 10), -0.050, 0.050, _ACCENT).placed(shift(0, 0, arm.UPPER_M) @ across)),
        (_beam(arm.FORE_M, 0.030, 0.023, _SHELL),
         prism(circle(0.030, 10), -0.040, 0.040, _ACCENT).placed(shift(0, 0, arm.FORE_M) @ across)),
        (box((0, 0, 0.045), (0.022, 0.022, 0.045), _SHELL), box((0, 0, 0.092), (0.020, 0.056, 0.010), _JOINT)),
        (),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _finger() -> Mesh:
    stem = box((0, 0, -0.025), (0.010, 0.0055, 0.034), _JOINT)
    return one_part(stem, box((0, 0, 0.0), (0.0105, 0.006, 0.012), _ACCENT))


def _beam(length_m: float, half_x: float, half_y: float, colour: Colour) -> Mesh:
    return box((0, 0, length_m / 2), (half_x, half_y, length_m / 2), colour, taper=(0.8, 0.85))


def _plate(colour: str, x: float, y: float) -> Mesh:
    rim = prism(circle(0.068, 20), 0.0, arm.PLATE_TOP_M, COLOURS[colour])
    well = prism(circle(0.050, 20), arm.PLATE_TOP_M, arm.PLATE_TOP_M + 0.0004, dimmed(COLOURS[colour], 0.82))
    plate = one_part(rim, well).placed(shift(x, y, 0))
    return replace(plate, grounds=np.ones(len(plate.parts), bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backdrop:
    """What a camera sees behind the arm."""

    colours: Float[np.ndarray, "row column 3"]
    on_table: Float[np.ndarray, "row column"]
    """Which part of each pixel shows the table."""


def _darken(backdrop: _Backdrop, eye: Camera, solids: Mesh) -> Image.Image:
    """Cast one soft shadow of everything onto the table."""
    sun = np.asarray(LIGHT.towards_sun)
    flat = solids.quads - np.maximum(solids.quads[..., 2:], 0.0) / sun[2] * sun
    flat[..., 2] = 0.0005
    mask = Image.new("L", (eye.width_px, eye.height_px))
    draw = ImageDraw.Draw(mask)
    seen = eye.see(flat)
    for outline in outlines(seen[in_front(seen, eye)], eye, 1):
        if len(outline) >= 6:
            draw.polygon(outline, 255)
    soft = np.asarray(mask.filter(ImageFilter.GaussianBlur(eye.height_px / 160)), np.float32)
    pixels = backdrop.colours * (255 - np.float32(0.42) * soft * backdrop.on_table)[..., None]
    return Image.fromarray(np.clip(pixels + np.float32(0.5), 0, 255).astype(np.uint8))


@lru_cache(maxsize=4)
def _still_backdrop(size: tuple[int, int]) -> _Backdrop:
    return _backdrop(camera(VIEWS[0], np.zeros(7), size))


def _backdrop(eye: Camera) -> _Backdrop:
    """Look at the table, the floor and the walls, pixel by pixel."""
    position, rays = eye.position_m.astype(np.float32), eye.rays().astype(np.float32)
    down = rays[..., 2]
    steps = np.where(down < -1e-4, -position[2] / np.minimum(down, np.float32(-1e-4)), np.float32(1e4))
    x, y = position[0] + steps * rays[..., 0], position[1] + steps * rays[..., 1]
    pixel_x, pixel_y = (
        np.maximum(np.abs(np.gradient(v, axis=0)) + np.abs(np.gradient(v, axis=1)), np.float32(1e-4)) for v in (x, y)
    )
    on_table = band(x, *_TABLE_X_M, pixel_x) * band(y, *_TABLE_Y_M, pixel_y)
    colours = np.zeros((x.size, 3), np.float32)
    seen, hidden = np.flatnonzero(on_table > 0), np.flatnonzero(on_table < 1)
    colours[seen] = _wood(*(v.ravel()[seen] for v in (x, y, pixel_x, pixel_y)))
    share = on_table.ravel()[hidden, None]
    colours[hidden] = colours[hidden] * share + (1 - share) * _walls(position, rays.reshape(-1, 3)[hidden])
    return _Backdrop(colours=colours.reshape(*x.shape, 3), on_table=on_table)


def _wood(x: np.ndarray, y: np.ndarray, pixel: np.ndarray, pixel_y: np.ndarray) -> np.ndarray:
    """Return the table's colours: planks along y with a grain, and a mat under the work space."""
    edge = 0.012
    mat = band(x, 0.17, 0.56, pixel) * band(y, -0.32, 0.32, pixel_y)
    inner = band(x, 0.17 + edge, 0.56 - edge, pixel) * band(y, -0.32 + edge, 0.32 - edge, pixel_y)
    seams = stripes(x, 0.14, 0.003, pixel)
    layers = [(inner, (0.37, 0.42, 0.46)), (mat, (0.80, 0.82, 0.83)), (seams, (0.42, 0.29, 0.18))]
    colours = stack(layers, (0.72, 0.54, 0.36))
    plank = np.floor(x / 0.14 + 0.5)
    grain = 0.035 * np.sin(60 * x + 2.2 * np.sin(9 * y + 2 * plank) + 5 * plank) + 0.05 * np.sin(12.9 * plank)
    return colours * (1 + grain * (1 - mat))[..., None].astype(np.float32)


def _walls(position: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """Return the colours of the inside of a box-shaped room, float32[pixel, 3]."""
    steps = []
    for axis, (low, high) in enumerate(_ROOM_M):
        along = np.where(np.abs(rays[:, axis]) < 1e-6, np.float32(1e-6), rays[:, axis])
        steps.append((np.where(along > 0, high, low) - position[axis]) / along)
    nearest = np.minimum(np.minimum(steps[0], steps[1]), steps[2])
    x, y, z = (position[axis] + rays[:, axis] * nearest for axis in range(3))
    height = (z - _FLOOR_M) / 2.75
    bright = (0.80 + 0.12 * height) * np.where(height < 0.033, np.float32(0.72), np.float32(1))
    level = np.where(rays[:, 2] > 0, 0.93, 0.50 + 0.06 * ((np.floor(x / 0.4) + np.floor(y / 0.4)) % 2))
    horizontal, facing = (steps[2] <= nearest)[:, None], (steps[0] <= nearest)[:, None]
    wall = np.where(facing, _WALL_COLOURS[0], _WALL_COLOURS[1]) * bright[:, None]
    return np.where(horizontal, level[:, None], wall).astype(np.float32)
