"""Tracks out of carla_garage measurements and boxes, at 4 Hz; the planner's grid mixes them and flags what it mixed."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.readers.carla_frames import (
    MAX_NUMBER,
    actor_number,
    box_size_m,
    finite_number,
    finite_vector,
    flip_y,
    lane_of,
    light_state,
    matrix_rotation,
    static_class,
    vehicle_class,
)
from pipeline.readers.records import fault_at, join_faults
from pipeline.readers.track_builder import Actor, EgoStep, Light, TrackBuilder
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef
from schemas.tracks import ActorClass, Tracks

Record = Mapping[str, Any]


def parse_boxes(data: bytes) -> list[Record]:
    """Parse the list of boxes of one step; entries that are no objects are refused."""
    try:
        boxes = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"expected a JSON list of boxes, found: {str(error)[:120]}; record it again", Reason.DECODE
        ) from error
    if not isinstance(boxes, list) or not all(isinstance(box, dict) for box in boxes):
        raise SourceError("expected a JSON list of boxes, found something else; record it again", Reason.DECODE)
    return boxes


def route_tracks(
    ref: EpisodeRef, rate_hz: float, load: Callable[[int], Record], load_boxes: Callable[[int], list[Record]]
) -> Tracks:
    """Return the tracks of a route. A step without measurement is a gap, one without boxes has no actors; both are faults."""
    builder = TrackBuilder()
    ego_box: Record = {}
    for step in range(ref.num_steps):
        try:
            record = load(step)
            matrix = _ego_matrix(record)
        except SourceError as error:
            builder.faults.append(fault_at(error, ref, step))
            continue
        speed = record.get("speed")
        builder.ego.append(
            EgoStep(
                step=step,
                position=flip_y(matrix[:3, 3]),
                rotation=matrix_rotation(matrix),
                speed_m_s=finite_number(speed),
            )
        )
        try:
            boxes = load_boxes(step)
        except SourceError as error:
            builder.faults.append(fault_at(error, ref, step, "boxes"))
            continue
        for box in boxes:
            if box.get("class") == "ego_car":
                ego_box = ego_box or box
            else:
                _see(builder, box, matrix)
    builder.faults = join_faults(builder.faults)
    return builder.build(town=str(ref.details.get("town", "")), rate_hz=rate_hz, ego_box=ego_box)


def _matrix(record: Record, key: str) -> np.ndarray | None:
    try:
        matrix = np.array(record.get(key), np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return matrix if matrix.shape == (4, 4) and (np.abs(matrix) < MAX_NUMBER).all() else None


def _ego_matrix(record: Record) -> np.ndarray:
    """Return CARLA's ``world_from_ego``; from position and yaw where a record has no matrix.

    The matrix comes first: it knows no NaN compass, which writers replaced by 0, a turn by a right angle.
    """
    matrix = _matrix(record, "ego_matrix")
    if matrix is not None:
        return matrix
    position, theta = finite_vector(record, "pos_global", 2), finite_number(record.get("theta"))
    if position is None or not np.isfinite(theta):
        raise SourceError("expected ego_matrix, or pos_global and theta, found none that is finite; record it again")
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]]
    matrix[:2, 3] = position
    return matrix


def _box_matrix(box: Record, ego: np.ndarray) -> np.ndarray | None:
    """Return CARLA's ``world_from_box``, from the pose relative to the ego where a box has no matrix."""
    matrix = _matrix(box, "matrix")
    if matrix is not None:
        return matrix
    position, yaw = finite_vector(box, "position", 3), finite_number(box.get("yaw"))
    if position is None or not np.isfinite(yaw):
        return None
    local = np.eye(4)
    local[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    local[:3, 3] = position
    found: np.ndarray = ego @ local
    return found


def _class_of(box: Record) -> ActorClass | None:
    kind, type_id = str(box.get("class", "")), str(box.get("type_id", ""))
    if kind == "car":
        return vehicle_class(
            type_id, wheels=str(box.get("number_of_wheels", "")), base_type=str(box.get("base_type", ""))
        )
    if kind == "static":
        return static_class(type_id or str(box.get("mesh_path", "")))
    return {
        "walker": ActorClass.PEDESTRIAN,
        "static_car": ActorClass.GENERIC,
        "static_trafficwarning": ActorClass.CZONE_SIGN,
    }.get(kind)


def _see(builder: TrackBuilder, box: Record, ego: np.ndarray) -> None:
    kind, name = str(box.get("class", "")), _class_of(box)
    if name is None and not kind.startswith("traffic_light"):
        return  # signs, landmarks, weather: nothing of a planner's
    matrix = _box_matrix(box, ego)
    if name is None:
        _see_light(builder, box, matrix)
    elif matrix is not None:
        position = flip_y(matrix[:3, 3])
        key = (kind, box["id"] if isinstance(box.get("id"), int) else tuple(position.round(1).tolist()))
        length, width = box_size_m(box, name)
        actor = Actor(actor_number(key[1]), name, length, width)
        builder.see_actor(key, actor, position, float(matrix_rotation(matrix)[2]))


def _see_light(builder: TrackBuilder, box: Record, matrix: np.ndarray | None) -> None:
    """Note a light: the older kind has the box at its stop line, the other one the lane."""
    light = Light(actor_number(box.get("id", "")), lane=lane_of(box))
    extent = finite_vector(box, "extent", 3)
    if box.get("class") == "traffic_light" and matrix is not None and extent is not None:
        x, y, _ = flip_y(matrix[:3, 3]).tolist()
        light.trigger = (x, y, float(matrix_rotation(matrix)[2]), float(extent[0]), float(extent[1]))
    # One light has a box on each lane that it governs, and is one light on each.
    key = (box.get("class"), str(box.get("id")), light.lane, str(np.round(light.trigger[:2], 1)))
    builder.see_light(key, light, light_state(box.get("state_str", box.get("state"))))
