"""CARLA's conventions, turned into those of :mod:`schemas.tracks`: axes, angles, names of actors, states of lights.

CARLA is left-handed (x forward, y right, z up) and counts in degrees. Turning y round makes it right-handed: positions and
velocities change the sign of y; yaw and pitch change theirs, and roll keeps its own.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from schemas.tracks import ActorClass, LightState
from schemas.vehicles import vehicle_size

GRAVITY_M_S2 = 9.81
IMU_POSITION = (-1.4, 0.0, 0.0)
"""Where Bench2Drive and the leaderboard agents mount IMU and GNSS, from the vehicle's origin."""

LIGHT_STATES = (LightState.RED, LightState.YELLOW, LightState.GREEN, LightState.UNKNOWN, LightState.UNKNOWN)
"""By ``carla.TrafficLightState``: Red, Yellow, Green, Off, Unknown."""

TWO_WHEELED = (
    "vehicle.bh.crossbike",
    "vehicle.diamondback.century",
    "vehicle.gazelle.omafiets",
    "vehicle.harley-davidson.low_rider",
    "vehicle.kawasaki.ninja",
    "vehicle.vespa.zx125",
    "vehicle.yamaha.yzf",
)
"""CARLA's blueprints with two wheels, for recordings that do not say how many."""

DEFAULT_SIZE_M = {ActorClass.VEHICLE: (4.9, 1.84), ActorClass.PEDESTRIAN: (0.38, 0.38), ActorClass.BICYCLE: (1.8, 0.6)}
"""Length and width where a recording has no box of an actor: the MKZ 2020's, and CARLA's walkers and bicycles, rounded."""


def flip_y(vectors: np.ndarray) -> np.ndarray:
    """Return positions or velocities of CARLA in the right-handed frame, and the other way round (last axis x, y, ...)."""
    flipped = np.array(vectors, np.float64)
    flipped[..., 1] *= -1.0
    return flipped


def rotation_rad(roll_deg: Any, pitch_deg: Any, yaw_deg: Any) -> np.ndarray:
    """Return roll, pitch, yaw in the right-handed frame, rad, on the last axis."""
    return np.radians(np.stack([roll_deg, np.negative(pitch_deg), np.negative(yaw_deg)], axis=-1).astype(np.float64))


def matrix_rotation(matrix: np.ndarray) -> np.ndarray:
    """Return roll, pitch, yaw in the right-handed frame of CARLA's ``world_from_actor`` matrices ``[..., 4, 4]``."""
    pitch = np.arcsin(np.clip(matrix[..., 2, 0], -1.0, 1.0))
    yaw = np.arctan2(matrix[..., 1, 0], matrix[..., 0, 0])
    roll = np.arctan2(-matrix[..., 2, 1], matrix[..., 2, 2])
    return np.stack([roll, -pitch, -yaw], axis=-1)


def vehicle_class(type_id: str, *, wheels: str = "", base_type: str = "") -> ActorClass:
    """Return VEHICLE, or BICYCLE for anything on two wheels, which is where nuPlan puts motorcycles."""
    is_two_wheeled = wheels == "2" or base_type in ("bicycle", "motorcycle") or type_id in TWO_WHEELED
    return ActorClass.BICYCLE if is_two_wheeled else ActorClass.VEHICLE


def static_class(name: str) -> ActorClass:
    """Return the class of an object that does not move, by its blueprint or mesh."""
    words = name.lower()
    if "cone" in words:
        return ActorClass.TRAFFIC_CONE
    if "barrier" in words or "fence" in words:
        return ActorClass.BARRIER
    if "warning" in words or "sign" in words:
        return ActorClass.CZONE_SIGN
    return ActorClass.GENERIC


def light_state(value: Any) -> LightState:
    """Return the state that a record spells as CARLA's number or name; anything else is unknown."""
    if isinstance(value, str):
        return getattr(LightState, value.rpartition(".")[2].upper(), LightState.UNKNOWN)
    if isinstance(value, int) and 0 <= value < len(LIGHT_STATES):
        return LIGHT_STATES[value]
    return LightState.UNKNOWN


def actor_number(name: Any) -> int:
    """Return an actor's id as int64: the number itself where it is one, else a digest of what it is called."""
    text = str(name) if not isinstance(name, int) or abs(name) < 2**62 else "too large"
    if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little") >> 1


def lane_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return ``road_id`` and ``lane_id`` of a record, (0, 0) where they are no numbers of a map."""
    road, lane = record.get("road_id"), record.get("lane_id")
    is_lane = isinstance(road, int) and isinstance(lane, int) and max(abs(road), abs(lane)) < 2**31
    return (road, lane) if is_lane else (0, 0)  # type: ignore[return-value]


MAX_NUMBER = 1e9
"""No place, speed or size of a recording is larger: what is was not recorded, and would overflow where it is squared."""


def finite_number(value: Any) -> float:
    """Return a number of a record, NaN where it is none, or larger than :data:`MAX_NUMBER`."""
    is_number = isinstance(value, int | float) and abs(value) < MAX_NUMBER
    return float(value) if is_number else float("nan")


def finite_vector(record: Mapping[str, Any], key: str, size: int) -> np.ndarray | None:
    """Return ``size`` finite numbers of a record, of bounded size, or None."""
    value = record.get(key)
    if not isinstance(value, list | tuple) or len(value) != size:
        return None
    try:
        vector = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return vector if vector.shape == (size,) and (np.abs(vector) < MAX_NUMBER).all() else None


def size_m(extent: np.ndarray | None, kind: ActorClass, blueprint: str = "") -> tuple[float, float]:
    """Return full length and width by half of them, m; the blueprint's, else a usual one, where a recording has no sound box."""
    if extent is not None and np.isfinite(extent[:2]).all() and (extent[:2] > 0).all():
        return 2.0 * float(extent[0]), 2.0 * float(extent[1])
    return vehicle_size(blueprint) or DEFAULT_SIZE_M.get(kind, (0.5, 0.5))


def box_size_m(box: Mapping[str, Any], kind: ActorClass) -> tuple[float, float]:
    """Return full length and width of a box with ``extent`` and ``type_id``, as Bench2Drive and carla_garage write them."""
    return size_m(finite_vector(box, "extent", 3), kind, str(box.get("type_id", "")))
