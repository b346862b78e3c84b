"""Tracks out of Bench2Drive annotations: the ego, boxes within about 100 m, and traffic lights, at 10 Hz.

The ego is ``bounding_boxes[0]`` by class, never the noisy pose at the record's top. CARLA's left-handed frame is left here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.readers.carla_frames import (
    IMU_POSITION,
    actor_number,
    box_size_m,
    finite_number,
    finite_vector,
    flip_y,
    lane_of,
    light_state,
    rotation_rad,
    static_class,
    vehicle_class,
)
from pipeline.readers.records import fault_at, join_faults
from pipeline.readers.track_builder import Actor, EgoStep, Light, TrackBuilder
from schemas.errors import SourceError
from schemas.source import EpisodeRef
from schemas.tracks import ActorClass, Tracks

RATE_HZ = 10.0
Record = Mapping[str, Any]


def annotation_tracks(ref: EpisodeRef, load: Callable[[int], Record]) -> Tracks:
    """Return the tracks of a clip, ``load`` giving the record of each step; a step that cannot be read is a fault and a gap."""
    builder = TrackBuilder()
    first: Record = {}
    for step in range(ref.num_steps):
        try:
            record = load(step)
            ego = _ego_box(record)
            builder.ego.append(_ego_step(step, record, ego))
        except SourceError as error:
            builder.faults.append(fault_at(error, ref, step))
            continue
        first = first or ego
        for box in record["bounding_boxes"]:
            _see(builder, box)
    builder.faults = join_faults(builder.faults)
    return builder.build(town=str(ref.details.get("town", "")), rate_hz=RATE_HZ, ego_box=first, imu=IMU_POSITION)


def _ego_box(record: Record) -> Record:
    boxes = record.get("bounding_boxes")
    for box in boxes if isinstance(boxes, list) else []:
        if isinstance(box, dict) and box.get("class") == "ego_vehicle":
            return box
    raise SourceError("expected a box of class ego_vehicle, found none; record the clip again")


def _rotation(box: Record, key: str = "rotation") -> np.ndarray | None:
    """Return a box's rotation, which Bench2Drive lists as pitch, roll, yaw in degrees."""
    found = finite_vector(box, key, 3)
    return None if found is None else rotation_rad(found[1], found[0], found[2])


def _ego_step(step: int, record: Record, ego: Record) -> EgoStep:
    location, rotation = finite_vector(ego, "location", 3), _rotation(ego)
    if location is None or rotation is None:
        raise SourceError("expected location and rotation of the ego, found none or NaN; record the clip again")
    imu = finite_vector(record, "acceleration", 3)
    turning = finite_vector(record, "angular_velocity", 3)
    speed = ego.get("speed", record.get("speed"))
    return EgoStep(
        step=step,
        position=flip_y(location),
        rotation=rotation,
        speed_m_s=finite_number(speed),
        imu_m_s2=None if imu is None else flip_y(imu),
        turning_rad_s=0.0 if turning is None else -float(turning[2]),
    )


def _see(builder: TrackBuilder, box: object) -> None:
    if not isinstance(box, dict):
        return
    kind, type_id = str(box.get("class", "")), str(box.get("type_id", ""))
    if kind == "traffic_light":
        _see_light(builder, box)
    elif kind == "walker":
        _see_actor(builder, box, ActorClass.PEDESTRIAN)
    elif kind == "vehicle" and box.get("state") == "static":
        _see_actor(builder, box, ActorClass.GENERIC)  # a parked mesh of the map
    elif kind == "vehicle":
        _see_actor(builder, box, vehicle_class(type_id, base_type=str(box.get("base_type", ""))))
    elif kind == "traffic_sign" and type_id.startswith("static.prop"):
        _see_actor(builder, box, static_class(type_id))


def _see_actor(builder: TrackBuilder, box: Record, kind: ActorClass) -> None:
    center = finite_vector(box, "center", 3)
    center = finite_vector(box, "location", 3) if center is None else center
    heading = _heading(box)
    if center is None or heading is None:
        return  # nothing of it can be said; a later step may know it
    length, width = box_size_m(box, kind)
    key = (box.get("class"), box.get("state"), str(box.get("id", center.round(2).tolist())))
    builder.see_actor(key, Actor(actor_number(key[-1]), kind, length, width), flip_y(center), heading)


def _heading(box: Record) -> float | None:
    """Return the heading of a box; a parked mesh's rotation is wrong, so that its corners tell: the first is in front of the fifth."""
    rotation = _rotation(box)
    corners = box.get("world_cord") if box.get("state") == "static" else None
    if isinstance(corners, list) and len(corners) == 8:
        front, rear = np.array(corners[0], np.float64), np.array(corners[4], np.float64)
        if np.isfinite(front).all() and np.isfinite(rear).all() and np.hypot(*(front - rear)[:2]) > 0.1:
            return float(np.arctan2(rear[1] - front[1], front[0] - rear[0]))
    return None if rotation is None else float(rotation[2])


def _see_light(builder: TrackBuilder, box: Record) -> None:
    position = finite_vector(box, "center", 3)
    center = finite_vector(box, "trigger_volume_location", 3)
    extent = finite_vector(box, "trigger_volume_extent", 3)
    rotation = _rotation(box, "trigger_volume_rotation")
    light = Light(actor_number(box.get("id", "")), lane=lane_of(box))
    if position is not None:
        light.position = tuple(flip_y(position).tolist())
    if center is not None and extent is not None and rotation is not None:
        center = flip_y(center)
        light.trigger = (float(center[0]), float(center[1]), float(rotation[2]), float(extent[0]), float(extent[1]))
    builder.see_light(str(box.get("id", "")), light, light_state(box.get("state")))
