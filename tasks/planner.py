"""Diffusion Planner's training tensors, for any steps of an episode's tracks, from tracks and lane graph alone.

``Scene`` is an episode made ready; :func:`planner_block` computes rows of it. All maths is float64, and what leaves is float32.
"""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from schemas.lanes import LaneGraph
from schemas.planner import PlannerParams
from schemas.tracks import Tracks
from tasks.kernels.planner import agent_rows, ego_rows, static_rows
from tasks.kernels.planner_lanes import lane_rows
from tasks.planner_lanes import PlannerLanes, lane_lights, prepare_lanes
from tasks.planner_routes import DrivenPath, driven_path, routes_at
from tasks.planner_tracks import resample_tracks, turn_vectors, wrap_angle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """One episode on the planner's grid, with its map: everything that rows are computed from."""

    params: PlannerParams
    tracks: Tracks
    """On the grid."""
    lanes: PlannerLanes
    poses: Float64[np.ndarray, "step 4"]
    """Rear axle on the map: x, y, heading, z."""
    velocity: Float64[np.ndarray, "step 2"]
    """Of the rear axle, along the axes of the map."""
    acceleration: Float64[np.ndarray, "step 2"]
    yaw_rate: Float64[np.ndarray, " step"]
    """By the difference to the previous step; 0 where there is none."""
    segment: Int64[np.ndarray, " step"]
    """Number of breaks up to and including the step: the ego drives on between steps of one number."""
    by_step: tuple[Float64[np.ndarray, "step actor 5"], Bool[np.ndarray, "step actor"]]
    by_actor: tuple[Float64[np.ndarray, "actor step 5"], Bool[np.ndarray, "actor step"]]
    light_of: Int64[np.ndarray, " lane"]
    path: DrivenPath


def prepare_scene(
    tracks: Tracks, graph: LaneGraph, params: PlannerParams, *, lanes: PlannerLanes | None = None
) -> Scene:
    """Resample an episode, find its rear axle, and match its driven path to the map; ``lanes`` saves preparing the map again."""
    lanes = prepare_lanes(graph, params) if lanes is None else lanes
    tracks = resample_tracks(tracks, params)
    return grid_scene(tracks, lanes, params, lane_lights(tracks, graph, lanes))


def grid_scene(
    tracks: Tracks, lanes: PlannerLanes, params: PlannerParams, light_of: Int64[np.ndarray, " lane"]
) -> Scene:
    """Return the scene of tracks that are on the planner's grid, with the light of each lane or -1."""
    offset = turn_vectors(tracks.ego_rotation, np.broadcast_to(params.rear_axle, tracks.ego_rotation.shape))
    position = (tracks.ego_position + offset) * tracks.ego_valid[:, None]
    poses = np.concatenate([position[:, :2], tracks.ego_rotation[:, 2:], tracks.ego_position[:, 2:]], axis=1)
    yaw_rate = _yaw_rate(tracks)
    turned = np.stack([-offset[:, 1], offset[:, 0]], axis=1)
    state = np.concatenate(
        [tracks.actor_position[:, :, :2], tracks.actor_heading[:, :, None], tracks.actor_velocity], axis=2
    )
    valid = np.array(tracks.actor_valid, np.bool_)
    return Scene(
        params=params,
        tracks=tracks,
        lanes=lanes,
        poses=poses,
        # A rigid body: its points differ in velocity by the turning, and in acceleration towards the centre of the turn.
        velocity=tracks.ego_velocity + yaw_rate[:, None] * turned,
        acceleration=tracks.ego_acceleration - yaw_rate[:, None] ** 2 * offset[:, :2],
        yaw_rate=yaw_rate,
        segment=np.cumsum(tracks.is_break).astype(np.int64),
        by_step=(np.ascontiguousarray(state), np.ascontiguousarray(valid)),
        by_actor=(np.ascontiguousarray(state.transpose(1, 0, 2)), np.ascontiguousarray(valid.T)),
        light_of=light_of,
        path=driven_path(poses, tracks.ego_valid, tracks.is_break, lanes),
    )


def _yaw_rate(tracks: Tracks) -> Float64[np.ndarray, " step"]:
    rate = np.zeros(tracks.num_steps)
    linked = tracks.ego_valid[1:] & tracks.ego_valid[:-1] & ~tracks.is_break[1:]
    change = wrap_angle(np.diff(tracks.ego_rotation[:, 2])) / np.diff(tracks.time_s)
    rate[1:][linked] = change[linked]
    return rate


def scene_block(scene: Scene, steps: Int64[np.ndarray, " n"]) -> dict[str, np.ndarray]:
    """Return every tensor, mask and extra at ``steps`` (in any order); rows of a step without ego are zero and not valid."""
    anchors = np.ascontiguousarray(steps, np.int64)
    if len(anchors) and not 0 <= anchors.min() <= anchors.max() < scene.tracks.num_steps:
        raise IndexError(f"expected steps in [0, {scene.tracks.num_steps}), found {anchors.min()} to {anchors.max()}")
    usable = np.array(scene.tracks.ego_valid, np.bool_)
    ego = (np.ascontiguousarray(scene.poses[:, :3]), usable)
    return {
        "ego_current_state": _ego_current(scene, anchors),
        **_ego_future(scene, anchors, ego),
        **_agents(scene, anchors, ego),
        **_statics(scene, anchors, ego),
        **_lanes(scene, anchors, ego),
        "planner_interpolated": scene.tracks.is_interpolated[anchors],
    }


def _ego_current(scene: Scene, anchors: np.ndarray) -> np.ndarray:
    """Return x, y, cos, sin (0, 0, 1, 0 by construction), velocity, acceleration, steering, yaw rate."""
    params = scene.params
    heading = scene.poses[anchors, 2]
    c, s = np.cos(heading), np.sin(heading)
    velocity, acceleration = scene.velocity[anchors], scene.acceleration[anchors]
    rows = np.zeros((len(anchors), 10))
    rows[:, 2] = 1.0
    for column, vector in ((4, velocity), (6, acceleration)):
        rows[:, column] = c * vector[:, 0] + s * vector[:, 1]
        rows[:, column + 1] = c * vector[:, 1] - s * vector[:, 0]
    is_moving = np.abs(rows[:, 4]) >= params.min_speed_m_s
    speed = np.where(is_moving, np.abs(rows[:, 4]), 1.0)
    yaw_rate = scene.yaw_rate[anchors]
    # Steering comes from the yaw rate as it is, before that is limited.
    steering = np.clip(
        np.arctan(yaw_rate * params.wheel_base_m / speed), -params.max_steering_rad, params.max_steering_rad
    )
    rows[:, 8] = np.where(is_moving, steering, 0.0)
    limit = params.max_yaw_rate_rad_s
    rows[:, 9] = np.where(is_moving, np.clip(yaw_rate, -limit, limit), 0.0)
    rows[~scene.tracks.ego_valid[anchors]] = 0.0
    return rows.astype(np.float32)


def _ego_future(scene: Scene, anchors: np.ndarray, ego: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    future = np.empty((len(anchors), scene.params.future_steps, 3), np.float32)
    valid = np.empty(future.shape[:2], np.bool_)
    ego_rows(anchors, ego[0], ego[1], scene.segment, future, valid)
    return {"ego_agent_future": future, "ego_agent_future_valid": valid}


def _actors(scene: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tracks = scene.tracks
    sizes = np.stack([tracks.actor_width_m, tracks.actor_length_m], axis=1)
    return np.array(tracks.actor_id), np.array(tracks.actor_class), np.ascontiguousarray(sizes)


def _agents(scene: Scene, anchors: np.ndarray, ego: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    params, shape = scene.params, (len(anchors), scene.params.num_agents)
    out: dict[str, Any] = {
        "neighbor_agents_past": np.empty((*shape, params.past_steps + 1, 11), np.float32),
        "neighbor_agents_past_valid": np.empty((*shape, params.past_steps + 1), np.bool_),
        "neighbor_agents_future": np.empty((*shape, params.future_steps, 3), np.float32),
        "neighbor_agents_future_valid": np.empty((*shape, params.future_steps), np.bool_),
        "neighbor_agents_id": np.empty(shape, np.int64),
        "neighbor_agents_dropped": np.empty((len(anchors), 3), np.int16),
    }
    limits = (params.num_vulnerable, params.agent_radius_m)
    agent_rows(anchors, ego, scene.by_step, scene.by_actor, _actors(scene), limits, _rows(out))
    return out


def _rows(out: dict[str, Any]) -> Any:
    return tuple(out.values())


def _statics(scene: Scene, anchors: np.ndarray, ego: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    rows = np.empty((len(anchors), scene.params.num_static, 10), np.float32)
    valid = np.empty(rows.shape[:2], np.bool_)
    static_rows(anchors, ego, scene.by_step, _actors(scene), scene.params.agent_radius_m, rows, valid)
    return {"static_objects": rows, "static_objects_valid": valid}


def _lanes(scene: Scene, anchors: np.ndarray, ego: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    lanes, params = scene.lanes, scene.params
    numbers, routes = routes_at(anchors, scene.poses, scene.path, lanes)
    out = _lane_arrays("lanes", len(anchors), params.num_lanes, params.num_points)
    out_route = _lane_arrays("route_lanes", len(anchors), params.num_route_lanes, params.num_points)
    lane_rows(
        anchors,
        ego,
        params.radius_m,
        lanes.table,
        (np.ascontiguousarray(scene.tracks.light_state), scene.light_of, params.marks_yellow),
        (numbers, routes.offsets, routes.values),
        (_rows(out), _rows(out_route)),
    )
    return {**out, **out_route}


def _lane_arrays(name: str, num_rows: int, num_lanes: int, num_points: int) -> dict[str, Any]:
    return {
        name: np.empty((num_rows, num_lanes, num_points, 12), np.float32),
        f"{name}_speed_limit": np.empty((num_rows, num_lanes, 1), np.float32),
        f"{name}_has_speed_limit": np.empty((num_rows, num_lanes, 1), np.bool_),
        f"{name}_valid": np.empty((num_rows, num_lanes), np.bool_),
    }


class _Recent:
    """The last few prepared values, so that the shards of an episode, and the episodes of a map, share one preparation.

    A key holds its objects, hence their ``id`` cannot come to mean another one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = Lock()
        self.values: OrderedDict[tuple[object, ...], tuple[tuple[object, ...], Any]] = OrderedDict()

    def get(self, held: tuple[object, ...], params: PlannerParams, make: Any) -> Any:
        key = (*(id(one) for one in held), params)
        with self.lock:  # a second thread that asks for the same waits for the first
            if key not in self.values:
                self.values[key] = (held, make())
            self.values.move_to_end(key)
            while len(self.values) > self.size:
                self.values.popitem(last=False)
            return self.values[key][1]


_LANES = _Recent(4)
_SCENES = _Recent(2)


def planner_scene(tracks: Tracks, graph: LaneGraph, params: PlannerParams) -> Scene:
    """Return the prepared episode, from memory where the same tracks, graph and parameters were asked for just before."""
    lanes = _LANES.get((graph,), params, lambda: prepare_lanes(graph, params))
    scene: Scene = _SCENES.get((tracks, graph), params, lambda: prepare_scene(tracks, graph, params, lanes=lanes))
    return scene


def planner_block(
    tracks: Tracks, graph: LaneGraph, steps: Int64[np.ndarray, " n"], params: PlannerParams
) -> dict[str, np.ndarray]:
    """Return every tensor of Diffusion Planner, its masks and extras, for ``steps`` of the planner's grid.

    Parameters
    ----------
    tracks
        As a reader gave them; they are resampled to ``params.rate_hz`` here, once an episode.
    graph
        Map of the town.
    steps
        Steps of the grid, such as :func:`tasks.planner_tracks.planner_anchors` names.
    params
        Sizes and constants.

    Returns
    -------
    dict
        Name to array with ``step`` in front; ``schemas.planner`` has the names and :mod:`pipeline.planner_arrays` the specifications.
    """
    return scene_block(planner_scene(tracks, graph, params), steps)
