"""The numbers of a Bench2Drive frame: poses, boxes, sensors, as CARLA's own fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pipeline.demo import props
from pipeline.demo.driving import FIRST_PARKED, LANE_MIDDLE_M, Actor, Drive, Ego
from pipeline.demo.shapes import pose

SEEN_M = 100.0
"""Bench2Drive lists what is nearer than this."""
_GNSS_X_M, _GNSS_STD_M = -1.4, 0.3


ROAD_ID = 12
"""Of the only road, in annotations and in :mod:`pipeline.demo.town`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Where a sensor sits on the car, and what it sees."""

    sensor: str
    x_m: float
    y_m: float
    z_m: float
    yaw_deg: float = 0.0
    pitch_deg: float = 0.0
    fov_deg: float = 70.0


CAMERAS = {
    "rgb_front": Mount(sensor="CAM_FRONT", x_m=0.80, y_m=0.0, z_m=1.60),
    "rgb_front_left": Mount(sensor="CAM_FRONT_LEFT", x_m=0.27, y_m=-0.55, z_m=1.60, yaw_deg=-55.0),
    "rgb_front_right": Mount(sensor="CAM_FRONT_RIGHT", x_m=0.27, y_m=0.55, z_m=1.60, yaw_deg=55.0),
    "rgb_back": Mount(sensor="CAM_BACK", x_m=-2.0, y_m=0.0, z_m=1.60, yaw_deg=180.0, fov_deg=110.0),
    "rgb_back_left": Mount(sensor="CAM_BACK_LEFT", x_m=-0.32, y_m=-0.55, z_m=1.60, yaw_deg=-110.0),
    "rgb_back_right": Mount(sensor="CAM_BACK_RIGHT", x_m=-0.32, y_m=0.55, z_m=1.60, yaw_deg=110.0),
    "rgb_top_down": Mount(sensor="TOP_DOWN", x_m=0.0, y_m=0.0, z_m=50.0, pitch_deg=-90.0, fov_deg=110.0),
}
"""By the name of their folder."""

RADARS = (
    Mount(sensor="RADAR_FRONT", x_m=2.27, y_m=0.0, z_m=0.48),
    Mount(sensor="RADAR_FRONT_LEFT", x_m=1.21, y_m=-0.85, z_m=0.74, yaw_deg=-90.0),
    Mount(sensor="RADAR_FRONT_RIGHT", x_m=1.21, y_m=0.85, z_m=0.74, yaw_deg=90.0),
    Mount(sensor="RADAR_BACK_LEFT", x_m=-2.0, y_m=-0.67, z_m=0.51, yaw_deg=-90.0),
    Mount(sensor="RADAR_BACK_RIGHT", x_m=-2.0, y_m=0.67, z_m=0.51, yaw_deg=-90.0),  # -90 in the published data too
)
LIDAR = Mount(sensor="LIDAR_TOP", x_m=-0.39, y_m=0.0, z_m=1.84)


def carla_matrix(location: Sequence[float], pitch_roll_yaw_deg: Sequence[float]) -> Float[np.ndarray, "4 4"]:
    """Return CARLA's world matrix of a transform (LibCarla, ``carla::geom::Transform::GetMatrix``)."""
    (cp, cr, cy), (sp, sr, sy) = (f(np.radians(pitch_roll_yaw_deg)) for f in (np.cos, np.sin))
    return np.array([
        [cp * cy, cy * sp * sr - sy * cr, -cy * sp * cr - sy * sr, location[0]],
        [cp * sy, sy * sp * sr + cy * cr, -sy * sp * cr + cy * sr, location[1]],
        [sp, -cp * sr, cp * cr, location[2]],
        [0.0, 0.0, 0.0, 1.0],
    ])  # fmt: skip


def camera_pose(mount: Mount) -> Float[np.ndarray, "4 4"]:
    """Return the matrix ``cam2ego`` of a mount."""
    return carla_matrix((mount.x_m, mount.y_m, mount.z_m), (mount.pitch_deg, 0.0, mount.yaw_deg))


def focal_px(mount: Mount, width_px: int) -> float:
    """Return CARLA's focal length for a picture of this width."""
    return float(width_px / (2 * np.tan(np.radians(mount.fov_deg) / 2)))


def world_from_plain(seed: int) -> Float[np.ndarray, "4 4"]:
    """Return where in the town the drive begins: anywhere, in any direction."""
    rng = np.random.default_rng([seed, 2])
    x, y = rng.uniform(80, 220, 2)
    return pose(float(x), float(y), 0.0, float(rng.uniform(-np.pi, np.pi)))


def annotate(
    drive: Drive, time_s: float, *, world: Float[np.ndarray, "4 4"], size: tuple[int, int], seed: Sequence[int]
) -> dict[str, Any]:
    """Return one frame's record."""
    ego = drive.ego_at(time_s)
    placed = world @ pose(ego.x_m, ego.y_m, 0.0, ego.heading_rad)
    yaw = float(np.arctan2(placed[1, 0], placed[0, 0]))
    rng = np.random.default_rng(list(seed))
    gnss = placed[:2, 3] + placed[:2, 0] * _GNSS_X_M + rng.normal(0, _GNSS_STD_M, 2)
    near, far = (_route_point(drive, world, ego.along_m + ahead) for ahead in (7.5, 50.0))
    waiting = bool(drive.light_at(time_s) == props.RED)
    shake = rng.normal(0, 0.01, 6)
    sideways = ego.speed_m_s * ego.yaw_rate_rad_s
    return {
        "x": float(gnss[0]), "y": float(gnss[1]),
        "throttle": ego.throttle, "steer": ego.steer, "brake": ego.brake, "reverse": False,
        "theta": float(np.mod(yaw + np.pi / 2, 2 * np.pi)), "speed": ego.speed_m_s,
        "x_command_far": far[0], "y_command_far": far[1], "command_far": 4,
        "x_command_near": near[0], "y_command_near": near[1], "command_near": 4,
        "should_brake": waiting, "x_target": far[0], "y_target": far[1], "next_command": 4,
        "weather": drive.weather.carla(),
        "acceleration": [ego.acceleration_m_s2 + shake[0], sideways + shake[1], 9.81 + shake[2]],
        "angular_velocity": [shake[3] * 0.1, shake[4] * 0.1, ego.yaw_rate_rad_s + shake[5] * 0.1],
        "bounding_boxes": _boxes(drive, ego, time_s, world),
        "sensors": _sensors(placed, size),
        "only_ap_brake": waiting,
    }  # fmt: skip


def _route_point(drive: Drive, world: np.ndarray, along: float) -> list[float]:
    x, y, _ = drive.road.place(along, LANE_MIDDLE_M)
    return (world @ np.array([x, y, 0.0, 1.0]))[:2].tolist()


def _boxes(drive: Drive, ego: Ego, time_s: float, world: np.ndarray) -> list[dict[str, Any]]:
    placed = world @ pose(ego.x_m, ego.y_m, 0.0, ego.heading_rad)
    first = {
        "class": "ego_vehicle", "id": "109", "type_id": "vehicle.lincoln.mkz_2020", "base_type": "car",
        **_solid(placed, props.CAR_HALF), "semantic_tags": [[14]], "color": "0,0,0", "speed": ego.speed_m_s,
        "brake": ego.brake, **_lane(ego.along_m, 1.0), "world2ego": _inverse(placed),
    }  # fmt: skip
    boxes = [first]
    for actor in drive.actors_at(time_s):
        distance = float(np.hypot(actor.x_m - ego.x_m, actor.y_m - ego.y_m))
        if distance < SEEN_M:
            boxes.append(
                _BOXES[actor.kind](actor, world, time_s)
                | {"distance": distance, **_lane(actor.along_m, actor.across_m)}
            )
    return boxes


def _vehicle(actor: Actor, world: np.ndarray, time_s: float) -> dict[str, Any]:
    placed = _place(actor, world)
    parked = actor.number >= FIRST_PARKED
    record = {
        "class": "vehicle", "state": "dynamic", "id": str(actor.number), **_solid(placed, props.CAR_HALF),
        "semantic_tags": [14], "type_id": "vehicle.lincoln.mkz_2020",
        "color": ",".join(str(round(255 * value)) for value in actor.colour), "base_type": "car",
        "num_points": 40, "speed": actor.speed_m_s, "brake": float(actor.state), "light_state": "None",
        "world2vehicle": _inverse(placed),
    }  # fmt: skip
    # Most published clips have such literals, in parked vehicles; strict JSON parsers refuse them.
    if parked and round(10 * time_s) % 7 == 2:
        record["brake"] = float("nan")
    return record


def _static_vehicle(actor: Actor, world: np.ndarray, time_s: float) -> dict[str, Any]:
    record = _vehicle(actor, world, time_s)
    record |= {"state": "static", "brake": 1.0, "light_state": "NONE"}
    record["type_id"] = "/Game/Carla/Static/Car/4Wheeled/ParkedVehicles/MKZ/SM_MKZParked.SM_MKZParked"
    return {key: value for key, value in record.items() if key not in ("base_type", "color")}


def _walker(actor: Actor, world: np.ndarray, _: float) -> dict[str, Any]:
    placed = _place(actor, world, height_m=props.WALKER_HALF[2])
    return {
        "class": "walker", "id": str(actor.number), **_solid(placed, props.WALKER_HALF, lifted=False),
        "semantic_tags": [12], "type_id": "walker.pedestrian.0012", "gender": "female", "age": "adult",
        "num_points": 12, "speed": 0.0, "bone": [], "world2ped": _inverse(placed),
    }  # fmt: skip


def _traffic_light(actor: Actor, world: np.ndarray, _: float) -> dict[str, Any]:
    post = _place(actor, world)
    head = post @ pose(0.0, -4.4, props.LIGHT_HEIGHTS_M[0])
    trigger = post @ pose(-6.5, -4.85, 1.0)
    return {
        "class": "traffic_light", "id": str(actor.number), **_mark(head, props.LIGHT_HALF),
        "semantic_tags": [7], "type_id": "traffic.traffic_light", "state": actor.state, "affects_ego": True,
        **_trigger(trigger, (2.0, 1.6, 1.0)),
    }  # fmt: skip


def _speed_sign(actor: Actor, world: np.ndarray, _: float) -> dict[str, Any]:
    post = _place(actor, world)
    face = post @ pose(0.0, 0.0, props.SIGN_HEIGHT_M)
    return {
        "class": "traffic_sign", "id": str(actor.number),
        **_mark(face, (0.05, props.SIGN_RADIUS_M, props.SIGN_RADIUS_M)),
        "semantic_tags": [8, 6], "type_id": "traffic.speed_limit.30", "affects_ego": False,
        **_trigger(post @ pose(0.0, -4.95, 1.0), (0.5, 1.6, 1.0)), "world2sign": _inverse(post),
    }  # fmt: skip


def _cone(actor: Actor, world: np.ndarray, _: float) -> dict[str, Any]:
    placed = _place(actor, world)
    return {
        "class": "traffic_sign", "id": str(actor.number), **_solid(placed, (0.24, 0.24, 0.37)), "semantic_tags": [],
        "type_id": "static.prop.trafficcone01", "affects_ego": False, "world2sign": _inverse(placed),
    }  # fmt: skip


_BOXES = {
    "vehicle": _vehicle, "static_vehicle": _static_vehicle, "walker": _walker, "traffic_light": _traffic_light,
    "speed_sign": _speed_sign, "cone": _cone,
}  # fmt: skip


def _sensors(ego: np.ndarray, size: tuple[int, int]) -> dict[str, Any]:
    height, width = size
    sensors: dict[str, Any] = {}
    for mount in CAMERAS.values():
        focal = focal_px(mount, width)
        placed = ego @ camera_pose(mount)
        sensors[mount.sensor] = {
            **_transform(placed), "intrinsic": [[focal, 0.0, width / 2], [0.0, focal, height / 2], [0.0, 0.0, 1.0]],
            "world2cam": _inverse(placed), "cam2ego": camera_pose(mount).tolist(), "fov": mount.fov_deg,
            "image_size_x": width, "image_size_y": height,
        }  # fmt: skip
    for mount in RADARS:
        placed = ego @ camera_pose(mount)
        sensors[mount.sensor] = {
            **_transform(placed), "world2radar": _inverse(placed), "radar2ego": camera_pose(mount).tolist()
        }  # fmt: skip
    placed = ego @ camera_pose(LIDAR)
    sensors[LIDAR.sensor] = {
        **_transform(placed), "world2lidar": _inverse(placed), "lidar2ego": camera_pose(LIDAR).tolist()
    }  # fmt: skip
    return sensors


def _place(actor: Actor, world: np.ndarray, *, height_m: float = 0.0) -> Float[np.ndarray, "4 4"]:
    return world @ pose(actor.x_m, actor.y_m, height_m, actor.heading_rad)


def _transform(placed: np.ndarray) -> dict[str, Any]:
    """Return location and ``[pitch, roll, yaw]``; looking straight down, yaw takes what roll might."""
    pitch = float(np.degrees(np.arcsin(np.clip(placed[2, 0], -1, 1))))
    x, y = (placed[0, 0], placed[1, 0]) if abs(pitch) < 89.9 else (placed[0, 2], placed[1, 2])
    return {"location": placed[:3, 3].tolist(), "rotation": [pitch, 0.0, float(np.degrees(np.arctan2(y, x)))]}


def _solid(placed: np.ndarray, half: tuple[float, float, float], *, lifted: bool = True) -> dict[str, Any]:
    """Return the fields of a box whose actor's origin lies on the ground (``lifted``) or in its middle."""
    middle = np.array([0.0, 0.0, half[2] if lifted else 0.0])
    corners = middle + np.array([[x, y, z] for x in (1, -1) for y in (1, -1) for z in (1, -1)]) * np.array(half)
    world = placed[:3, :3], placed[:3, 3]
    return {
        **_transform(placed), "bbx_loc": middle.tolist(), "center": (world[0] @ middle + world[1]).tolist(),
        "extent": list(half), "world_cord": (corners @ world[0].T + world[1]).tolist(),
    }  # fmt: skip


def _mark(placed: np.ndarray, half: tuple[float, float, float]) -> dict[str, Any]:
    """Return the fields of a light or sign, whose location is its middle."""
    where = _transform(placed)
    return {**where, "center": where["location"], "extent": list(half)}


def _trigger(placed: np.ndarray, half: tuple[float, float, float]) -> dict[str, Any]:
    where = _transform(placed)
    return {
        "trigger_volume_location": where["location"], "trigger_volume_rotation": where["rotation"],
        "trigger_volume_extent": list(half),
    }  # fmt: skip


def _lane(along: float, across: float) -> dict[str, int]:
    """Return lane numbers as OpenDRIVE gives them: negative to the right of the centre line."""
    return {"road_id": ROAD_ID, "lane_id": -1 if across > 0 else 1, "section_id": int(along > 20.0)}


def _inverse(placed: np.ndarray) -> list[list[float]]:
    turn = placed[:3, :3].T
    inverse = np.eye(4)
    inverse[:3, :3], inverse[:3, 3] = turn, -turn @ placed[:3, 3]
    return inverse.tolist()
