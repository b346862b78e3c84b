"""Paint what the car's cameras see of a drive."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from PIL import Image

from pipeline.demo import props
from pipeline.demo.driving import Actor, Drive, Ego
from pipeline.demo.road import Ground, Road
from pipeline.demo.scene import Camera, Light, Mesh, merge, paint
from pipeline.demo.shapes import circle, pose, rectangle, shadow
from pipeline.demo.sky import Sky, panorama

_WALLS = ((0.80, 0.62, 0.50), (0.66, 0.36, 0.30), (0.86, 0.80, 0.68), (0.60, 0.66, 0.70), (0.76, 0.70, 0.54))
_AWNINGS = ((0.70, 0.25, 0.22), (0.20, 0.40, 0.36), (0.85, 0.70, 0.40), (0.25, 0.34, 0.55))
_LEAVES = ((0.24, 0.42, 0.16), (0.32, 0.46, 0.15), (0.20, 0.36, 0.20))


class Street:
    """The cameras of one car, ready to paint any instant of one drive."""

    def __init__(self, drive: Drive, cameras: Sequence[Camera], seed: int) -> None:
        """Prepare cameras given in the ego's frame."""
        self._drive, self._cameras = drive, tuple(cameras)
        self._grounds = [Ground(camera, drive.weather.light.haze_m, seed) for camera in cameras]
        self._skies = [Sky(camera, ground.first_row) for camera, ground in zip(cameras, self._grounds, strict=True)]
        self._panorama = panorama(drive.weather, seed)
        self._scenery = scenery(drive.road, drive.weather.light, seed)

    def paint(self, time_s: float) -> list[Image.Image]:
        """Return one picture for each camera."""
        if not self._cameras:
            return []
        ego, light = self._drive.ego_at(time_s), self._drive.weather.light
        things = merge([self._scenery, *(actor_mesh(actor, light) for actor in self._drive.actors_at(time_s))])
        own = _own_car(ego, light)
        pictures = []
        for camera, ground, sky in zip(self._cameras, self._grounds, self._skies, strict=True):
            moved = replace(camera, view_from_world=camera.view_from_world @ _ego_from_plain(ego))
            low = ground.paint(self._drive.road, (ego.x_m, ego.y_m, ego.heading_rad), light.haze)
            high = sky.paint(self._panorama, ego.heading_rad)
            backdrop = Image.fromarray(np.concatenate([high, low]))
            from_above = camera.position_m[2] > 2 * props.CAR_HALF[2] + 1
            pictures.append(paint(backdrop, moved, merge([things, own]) if from_above else things, light))
        return pictures


@lru_cache(maxsize=128)  # most things stand still
def actor_mesh(actor: Actor, light: Light) -> Mesh:
    """Return an actor where it stands, with its shadow."""
    moved = pose(actor.x_m, actor.y_m, 0.0, actor.heading_rad)
    cos, sin, (x, y, z) = np.cos(actor.heading_rad), np.sin(actor.heading_rad), light.towards_sun
    sun = (cos * x + sin * y, cos * y - sin * x, z)
    match actor.kind:
        case "vehicle" | "static_vehicle":
            half_x, half_y, half_z = props.CAR_HALF
            mesh = props.car(actor.colour, bool(actor.state))
            dark = shadow(rectangle(half_x, half_y), 1.7 * half_z, sun)
        case "walker":
            mesh = props.walker(actor.colour, (0.20, 0.23, 0.34), actor.phase_rad)
            dark = shadow(rectangle(0.14, 0.22), 1.7, sun)
        case "traffic_light":
            mesh, dark = props.traffic_light(actor.state), shadow(circle(0.12, 8), 5.0, sun)
        case "speed_sign":
            mesh, dark = props.speed_sign(), shadow(rectangle(0.04, 0.2), 2.4, sun)
        case _:
            mesh, dark = props.cone(), shadow(circle(0.2, 8), 0.6, sun)
    return merge([dark, mesh]).placed(moved)


def scenery(road: Road, light: Light, seed: int) -> Mesh:
    """Return what never moves: houses on the left, trees on the right, lamps on the left pavement."""
    rng = np.random.default_rng([seed, 5])
    lamps = [props.lamp_post().placed(_beside(road, along, -5.7)) for along in np.arange(-42.0, 150.0, 24.0)]
    return merge([*_houses(road, rng), *_trees(road, light, rng), *lamps])


def _houses(road: Road, rng: np.random.Generator) -> list[Mesh]:
    houses, along = [], -70.0
    while along < 180.0:
        half_x, half_y = rng.uniform(4.0, 6.5), rng.uniform(3.5, 5.0)
        height = 3.0 * rng.integers(2, 5) + 1.6
        wall = _WALLS[rng.integers(len(_WALLS))]
        inside = road.turn < 0 and road.bend_start_m - 8 < along < road.bend_stop_m + 8
        if not inside:
            mesh = props.house((half_x, half_y), height, wall, awning=_AWNINGS[rng.integers(len(_AWNINGS))])
            houses.append(mesh.placed(_beside(road, along, -7.6 - half_y)))
        along += 2 * half_x + rng.uniform(0.6, 3.0)
    return houses


def _trees(road: Road, light: Light, rng: np.random.Generator) -> list[Mesh]:
    trees = []
    for place, along in enumerate(np.arange(-60.0, 170.0, 7.5)):
        for across, share in ((9.4, 1.0), (16.0, 0.8), (24.0, 0.55)):
            beyond = across > road.bend_radius_m - 6 and road.turn > 0 and along > road.bend_start_m - 10
            if rng.uniform() > share or beyond:
                continue
            height = rng.uniform(4.6, 7.2)
            mesh = props.tree(height, _LEAVES[rng.integers(len(_LEAVES))], place + int(across))
            moved = _beside(road, along + rng.uniform(-1.5, 1.5), across + rng.uniform(0, 0.8))
            dark = shadow(circle(0.27 * height, 10), 0.8 * height, light.towards_sun)
            x, y = moved[:2, 3]
            trees += [dark.placed(pose(x, y)), mesh.placed(moved)]
    return trees


def _beside(road: Road, along: float, across: float) -> Float[np.ndarray, "4 4"]:
    x, y, heading = road.place(along, across)
    return pose(x, y, 0.0, heading)


def _own_car(ego: Ego, light: Light) -> Mesh:
    braking = int(ego.brake > 0)
    return actor_mesh(
        Actor(kind="vehicle", number=0, x_m=ego.x_m, y_m=ego.y_m, heading_rad=ego.heading_rad, along_m=ego.along_m,
              across_m=0.0, colour=(0.04, 0.05, 0.06), state=braking),
        light,
    )  # fmt: skip


def _ego_from_plain(ego: Ego) -> Float[np.ndarray, "4 4"]:
    return np.linalg.inv(pose(ego.x_m, ego.y_m, 0.0, ego.heading_rad))
