"""A two-lane road: straight, a bend, straight. Where a point lies along it, and what the ground looks like there.

Road coordinates: ``along`` (metres from the start) and ``across`` (metres to the right of the centre line). Plain
coordinates are CARLA's, left-handed: x along the first straight, y to its right.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pipeline.demo.scene import Camera, Colour
from pipeline.demo.texture import band, stack, stripes

LANE_M, BAY_M, KERB_M, WALK_M = 3.5, 5.8, 0.25, 2.6
"""Width of a lane, right edge of the parking bays, widths of the kerb stones and of the pavements."""

ASPHALT, BAY, PAINT, KERB = (0.30, 0.31, 0.33), (0.40, 0.39, 0.39), (0.93, 0.93, 0.90), (0.72, 0.71, 0.69)
WALK, GRASS = (0.62, 0.59, 0.56), (0.36, 0.50, 0.24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """The centre line, and where the crossing is."""

    bend_start_m: float
    bend_radius_m: float
    bend_rad: float
    turn: float
    """1 for a bend to the right, -1 to the left."""
    stop_line_m: float
    crossing_m: tuple[float, float]
    """Where along the road the zebra crossing starts and stops."""

    @property
    def bend_stop_m(self) -> float:
        """Where along the road the bend ends."""
        return self.bend_start_m + self.bend_radius_m * self.bend_rad

    def place(self, along: np.ndarray | float, across: np.ndarray | float) -> Float[np.ndarray, "... 3"]:
        """Return x, y and the road's heading (from x towards y) for road coordinates."""
        angle = np.clip((np.asarray(along, np.float64) - self.bend_start_m) / self.bend_radius_m, 0.0, self.bend_rad)
        radius = self.bend_radius_m - self.turn * np.asarray(across)
        x = np.minimum(along, self.bend_start_m) + radius * np.sin(angle)
        y = self.bend_radius_m - radius * np.cos(angle)
        beyond = np.maximum(along - self.bend_stop_m, 0.0)
        x, y = x + beyond * np.cos(angle), y + beyond * np.sin(angle)
        return np.stack(np.broadcast_arrays(x, self.turn * y, self.turn * angle), axis=-1)

    def locate(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return along, across and the road's heading for points; the inverse of :meth:`place`."""
        x, y = x - np.float32(self.bend_start_m), y * np.float32(self.turn)
        down = np.float32(self.bend_radius_m) - y
        angle = np.where(x <= 0, 0, np.clip(np.arctan2(x, down), 0, self.bend_rad)).astype(np.float32)
        cos, sin = np.cos(angle), np.sin(angle)
        forward, inward = cos * x - sin * down, sin * x + cos * down
        along = self.bend_start_m + self.bend_radius_m * angle + forward
        across = (self.bend_radius_m - inward) * np.float32(self.turn)
        return along, across, angle * np.float32(self.turn)


class Ground:
    """The ground as one camera sees it from a car: pixels below the horizon, and where in the car's frame they lie."""

    def __init__(self, camera: Camera, haze_m: float, seed: int) -> None:
        """Prepare for a camera given in the ego's frame (``view_from_world`` is ``view_from_ego``)."""
        rays = camera.rays()
        below = rays[..., 2] < -1e-4
        self.first_row = int(np.argmax(below.all(axis=1))) if below.all(axis=1).any() else camera.height_px
        rays = rays[self.first_row :]
        x, y, z = camera.position_m
        steps = -z / rays[..., 2]
        self.x, self.y = (x + steps * rays[..., 0]).astype(np.float32), (y + steps * rays[..., 1]).astype(np.float32)
        hidden = 1 - np.exp(-steps * np.hypot(rays[..., 0], rays[..., 1]) / haze_m)
        self.hidden = hidden.astype(np.float32)[..., None]
        self.per_row, self.per_column = (
            np.stack([np.gradient(v, axis=axis) if v.shape[axis] > 1 else v * 0 for v in (self.x, self.y)])
            for axis in (0, 1)
        )
        self.noise = np.random.default_rng([seed, 7]).normal(0, 1, (256, 256)).astype(np.float32)

    def paint(self, road: Road, ego: tuple[float, float, float], haze: Colour) -> np.ndarray:
        """Return uint8[row, column, 3] of the rows from the horizon down, for a car at x, y, heading."""
        x, y, heading = (np.float32(value) for value in ego)
        cos, sin = np.cos(heading), np.sin(heading)
        world_x, world_y = x + cos * self.x - sin * self.y, y + sin * self.x + cos * self.y
        along, across, road_heading = road.locate(world_x, world_y)
        turn = road_heading - heading
        along_px, across_px = self._footprints(np.cos(turn), np.sin(turn))
        colours = _surface(road, along, across, along_px, across_px)
        colours *= self._grain(world_x, world_y, np.maximum(along_px, across_px))[..., None]
        colours += self.hidden * (np.asarray(haze, np.float32) - colours)
        return np.rint(np.clip(colours, 0, 1) * 255).astype(np.uint8)

    def _footprints(self, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many metres a pixel covers along and across the road."""
        along = sum(np.abs(step[0] * cos + step[1] * sin) for step in (self.per_row, self.per_column))
        across = sum(np.abs(step[1] * cos - step[0] * sin) for step in (self.per_row, self.per_column))
        return np.maximum(along, np.float32(1e-3)), np.maximum(across, np.float32(1e-3))

    def _grain(self, x: np.ndarray, y: np.ndarray, footprint: np.ndarray) -> np.ndarray:
        """Return brightness around 1 that lies still in the world: fine grain near, broad patches far."""
        grain = 1 + np.float32(0.05) * np.sin(0.23 * x + np.sin(0.17 * y)) * np.sin(0.19 * y - np.sin(0.21 * x))
        for pitch_m, strength in ((0.07, 0.05), (0.9, 0.025)):
            cells = (np.floor(v / np.float32(pitch_m)).astype(np.int32) & 255 for v in (x, y))
            fade = np.clip(pitch_m / footprint - np.float32(0.3), 0, 1)
            grain += np.float32(strength) * fade * self.noise[tuple(cells)]
        return grain


def _surface(
    road: Road, along: np.ndarray, across: np.ndarray, along_px: np.ndarray, across_px: np.ndarray
) -> np.ndarray:
    """Return float32[row, column, 3] of the bare surface. The first layer that covers a pixel has it."""
    start, stop = road.crossing_m
    dashes = stripes(along, 6.0, 3.0, along_px) * (1 - band(along, road.stop_line_m - 4, stop + 4, along_px))
    no_bay = band(along, road.stop_line_m - 5, stop + 5, along_px)
    layers = [
        (band(along, start, stop, along_px) * band(across, -LANE_M, LANE_M, across_px)
         * stripes(across + 0.2, 1.0, 0.5, across_px), PAINT),
        (band(along, road.stop_line_m - 0.4, road.stop_line_m, along_px) * band(across, 0.1, LANE_M, across_px), PAINT),
        (band(across, -0.08, 0.08, across_px) * dashes, PAINT),
        (band(np.abs(across), LANE_M - 0.28, LANE_M - 0.14, across_px) * (1 - no_bay), PAINT),
        (band(across, LANE_M, BAY_M, across_px) * stripes(along, 6.5, 0.14, along_px) * (1 - no_bay), PAINT),
        (band(across, -LANE_M, LANE_M, across_px), ASPHALT),
        (band(across, -LANE_M - KERB_M, LANE_M + KERB_M, across_px) * no_bay, KERB),
        (band(across, LANE_M, BAY_M, across_px) * (1 - no_bay), BAY),
        (band(across, -LANE_M - KERB_M, BAY_M + KERB_M, across_px), KERB),
        (band(across, -LANE_M - WALK_M, BAY_M + WALK_M, across_px), WALK),
    ]  # fmt: skip
    return stack(layers, GRASS)
