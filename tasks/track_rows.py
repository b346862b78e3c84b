"""Tracks of an episode as rows of a dataset, step by step, and back: what samples are computed from, stored once.

A row holds what was where at one step of the grid, in the frame of the map and in float64, so that samples computed from rows are bit for
bit those computed from the tracks. An actor keeps its column, by which parts of a track are told apart and distances that are equal decided.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from schemas.errors import Reason, SourceError
from schemas.planner import PlannerParams
from schemas.tracks import LightState, Tracks
from tasks.kernels.planner_lanes import lights_near
from tasks.planner import Scene, grid_scene
from tasks.planner_lanes import PlannerLanes

_EGO = ("time_s", "ego_position", "ego_rotation", "ego_velocity", "ego_acceleration")
_FLAGS = ("ego_valid", "is_break", "is_interpolated")


def track_rows(
    scene: Scene, steps: Int64[np.ndarray, " n"], is_anchor: Bool[np.ndarray, " n"], max_actors: int
) -> dict[str, np.ndarray]:
    """Return the rows of ``steps``: the ego with its axles, the actors that are there, and the lights of the lanes of a sample.

    Lights are only filled where ``is_anchor``: those of the lanes that the sample at the step has, and no others are ever asked for.

    Raises
    ------
    SourceError
        More actors at a step of the episode than ``max_actors``.
    """
    tracks, params = scene.tracks, scene.params
    found = int(tracks.actor_valid.sum(axis=1).max(initial=0))
    if found > max_actors:
        raise SourceError(
            f"expected at most {max_actors} actors at a step, found {found}; raise max_actors in [planner]",
            Reason.TOO_LARGE,
        )
    axles = np.broadcast_to((params.rear_axle[0], params.wheel_base_m), (len(steps), 2))
    ego = [np.asarray(getattr(tracks, name)[steps]).reshape(len(steps), -1) for name in _EGO]
    rows = {
        "tracks_ego": np.concatenate([*ego, axles], axis=1),
        "tracks_flags": np.stack([getattr(tracks, name)[steps] for name in _FLAGS], axis=1),
        **_actor_rows(scene, steps, max_actors),
        "tracks_lights": np.full((len(steps), params.num_lanes, 2), -1, np.int32),
    }
    anchors = np.ascontiguousarray(steps[is_anchor], np.int64)
    lights = np.empty((len(anchors), params.num_lanes, 2), np.int32)
    poses = (np.ascontiguousarray(scene.poses[:, :3]), np.array(tracks.ego_valid, np.bool_))
    states = (np.ascontiguousarray(tracks.light_state), scene.light_of)
    lights_near(anchors, poses, params.radius_m, scene.lanes.table, states, lights)
    rows["tracks_lights"][is_anchor] = lights
    return rows


def _actor_rows(scene: Scene, steps: np.ndarray, max_actors: int) -> dict[str, np.ndarray]:
    tracks = scene.tracks
    state, number = np.zeros((len(steps), max_actors, 7)), np.full((len(steps), max_actors, 3), -1, np.int64)
    row, column = np.nonzero(tracks.actor_valid[steps])
    slot = np.arange(len(row)) - np.searchsorted(row, row)
    state[row, slot, :5] = scene.by_step[0][steps[row], column]
    state[row, slot, 5] = tracks.actor_width_m[column]
    state[row, slot, 6] = tracks.actor_length_m[column]
    number[row, slot] = np.stack([column, tracks.actor_id[column], tracks.actor_class[column]], axis=1)
    return {"tracks_actors": state, "tracks_actor_numbers": number}


def scene_of_rows(rows: Mapping[str, np.ndarray], lanes: PlannerLanes, params: PlannerParams) -> Scene:
    """Return the scene that :func:`track_rows` was given, as far as samples at its anchors need it.

    ``rows`` are those of all steps of an episode's grid, in order; of the actors' only those that are there, with
    ``tracks_actor_steps`` (int64) naming the row of each.
    """
    ego, flags = rows["tracks_ego"], rows["tracks_flags"]
    num_steps = len(ego)
    parts = np.split(ego, (1, 4, 7, 9, 11), axis=1)
    time_s, position, rotation, velocity, acceleration = (np.ascontiguousarray(part) for part in parts[:5])
    masks: dict[str, Any] = {name: np.ascontiguousarray(flags[:, column]) for column, name in enumerate(_FLAGS)}
    light_state, light_of = _lights(rows["tracks_lights"], lanes)
    num_lights = light_state.shape[1]
    tracks = Tracks(
        town="",
        time_s=time_s[:, 0],
        source_step=np.zeros(num_steps, np.int64),
        ego_length_m=0.0,
        ego_width_m=0.0,
        **masks,
        ego_position=position,
        ego_rotation=rotation,
        ego_velocity=velocity,
        ego_acceleration=acceleration,
        **_actors(rows, num_steps),
        light_id=np.zeros(num_lights, np.int64),
        light_signal=("",) * num_lights,
        light_lane=np.zeros((num_lights, 2), np.int64),
        light_position=np.full((num_lights, 3), np.nan),
        light_trigger=np.full((num_lights, 5), np.nan),
        light_state=light_state,
    )
    return grid_scene(tracks, lanes, params, light_of)


def _actors(rows: Mapping[str, np.ndarray], num_steps: int) -> dict[str, Any]:
    step, state, number = rows["tracks_actor_steps"], rows["tracks_actors"], rows["tracks_actor_numbers"]
    column = number[:, 0]
    num_actors = int(column.max(initial=-1)) + 1
    valid, moving = np.zeros((num_steps, num_actors), np.bool_), np.zeros((num_steps, num_actors, 5))
    valid[step, column] = True
    moving[step, column] = state[:, :5]
    fixed = np.zeros((num_actors, 2))
    fixed[column] = state[:, 5:]
    numbers = np.zeros((num_actors, 3), np.int64)
    numbers[column] = number
    return {
        "actor_id": np.ascontiguousarray(numbers[:, 1]),
        "actor_class": numbers[:, 2].astype(np.int8),
        "actor_width_m": np.ascontiguousarray(fixed[:, 0]),
        "actor_length_m": np.ascontiguousarray(fixed[:, 1]),
        "actor_valid": valid,
        "actor_position": np.concatenate([moving[..., :2], np.zeros((num_steps, num_actors, 1))], axis=2),
        "actor_heading": np.ascontiguousarray(moving[..., 2]),
        "actor_velocity": np.ascontiguousarray(moving[..., 3:]),
    }


def _lights(lights: np.ndarray, lanes: PlannerLanes) -> tuple[np.ndarray, np.ndarray]:
    """Return a light for each lane that has one at a step, unknown where nothing was stored of it, and the light of each lane."""
    step, slot = np.nonzero(lights[..., 0] >= 0)
    lane, state = lights[step, slot, 0], lights[step, slot, 1]
    known, light = np.unique(lane, return_inverse=True)
    states = np.full((len(lights), len(known)), LightState.UNKNOWN, np.int8)
    states[step, light] = state
    light_of = np.full(lanes.num_lanes, -1, np.int64)
    light_of[known] = np.arange(len(known))
    return states, light_of
