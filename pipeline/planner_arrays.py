"""The arrays of a planner dataset: Diffusion Planner's names with ``step`` in front, masks and extras beside them."""

from typing import Any

from schemas.dataset import ArraySpec
from schemas.planner import FEATURES, PlannerParams

LARGE = (
    "neighbor_agents_past",
    "neighbor_agents_past_valid",
    "neighbor_agents_future",
    "neighbor_agents_future_valid",
    "lanes",
    "route_lanes",
)
"""Stored a step a chunk, absent where the step is no sample; the others are one plain chunk a shard, and loaders hold them."""

_LONG_NAMES = {
    "ego_current_state": "state of the rear axle at the step, in its own frame",
    "ego_agent_future": "poses of the rear axle after the step",
    "neighbor_agents_past": "neighbours up to the step, nearest first; absent history repeats the earliest state known",
    "neighbor_agents_future": "poses of the same neighbours after the step; rows of zeros are absent",
    "static_objects": "nearest objects that do not move",
    "lanes": "nearest lanes: centre, step to the next point, boundaries from the centre, traffic light",
    "lanes_speed_limit": "speed limit of each lane, 0 where there is none",
    "lanes_has_speed_limit": "whether the lane has a speed limit",
    "route_lanes": "those of the lanes that lie on the route, nearest first",
    "route_lanes_speed_limit": "speed limit of each route lane, 0 where there is none",
    "route_lanes_has_speed_limit": "whether the route lane has a speed limit",
    "ego_agent_future_valid": "whether the future pose was recorded",
    "neighbor_agents_past_valid": "whether the state was recorded, not repeated",
    "neighbor_agents_future_valid": "whether the future pose was recorded",
    "static_objects_valid": "whether the slot holds an object",
    "lanes_valid": "whether the slot holds a lane",
    "route_lanes_valid": "whether the slot holds a lane",
    "neighbor_agents_id": "recorded id of each neighbour, -1 where the slot is empty",
    "neighbor_agents_dropped": "vehicles, pedestrians and bicycles for which there was no slot",
    "planner_interpolated": "whether the step lies between recorded ones",
}
_UNITS = {"lanes_speed_limit": "m/s", "route_lanes_speed_limit": "m/s"}
_FEATURE_UNITS = {
    "heading": "rad",
    "steering": "rad",
    "yaw_rate": "rad/s",
    **dict.fromkeys(("x", "y", "dx", "dy", "left_dx", "left_dy", "right_dx", "right_dy", "width", "length"), "m"),
    **dict.fromkeys(("vx", "vy"), "m/s"),
    **dict.fromkeys(("ax", "ay"), "m/s2"),
}


def planner_shapes(params: PlannerParams) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Return name, dimensions after ``step``, their sizes and dtype of every array of :func:`tasks.planner.planner_block`."""
    past, future = ("past", params.past_steps + 1), ("future", params.future_steps)
    agent, static = ("agent", params.num_agents), ("static_object", params.num_static)
    lane, route, point = (
        ("lane", params.num_lanes),
        ("route_lane", params.num_route_lanes),
        ("point", params.num_points),
    )
    sides: dict[str, tuple[tuple[tuple[str, int], ...], str]] = {
        "ego_current_state": ((), "float32"),
        "ego_agent_future": ((future,), "float32"),
        "ego_agent_future_valid": ((future,), "bool"),
        "neighbor_agents_past": ((agent, past), "float32"),
        "neighbor_agents_past_valid": ((agent, past), "bool"),
        "neighbor_agents_future": ((agent, future), "float32"),
        "neighbor_agents_future_valid": ((agent, future), "bool"),
        "neighbor_agents_id": ((agent,), "int64"),
        "neighbor_agents_dropped": ((("agent_class", 3),), "int16"),
        "static_objects": ((static,), "float32"),
        "static_objects_valid": ((static,), "bool"),
        "lanes": ((lane, point), "float32"),
        "lanes_speed_limit": ((lane, ("one", 1)), "float32"),
        "lanes_has_speed_limit": ((lane, ("one", 1)), "bool"),
        "lanes_valid": ((lane,), "bool"),
        "route_lanes": ((route, point), "float32"),
        "route_lanes_speed_limit": ((route, ("one", 1)), "float32"),
        "route_lanes_has_speed_limit": ((route, ("one", 1)), "bool"),
        "route_lanes_valid": ((route,), "bool"),
        "planner_interpolated": ((), "bool"),
    }
    shapes = {}
    for name, (axes, dtype) in sides.items():
        features = FEATURES.get(_features_of(name), ()) if dtype == "float32" and not name.endswith("limit") else ()
        named = (*axes, (f"{_features_of(name)}_feature", len(features))) if features else axes
        shapes[name] = (tuple(side for side, _ in named), tuple(size for _, size in named), dtype)
    return shapes


def planner_specs(
    params: PlannerParams, shard_steps: int, *, codec: str = "zstd", normalized: bool = False
) -> list[ArraySpec]:
    """Return the specifications of every array of a planner dataset.

    Parameters
    ----------
    params
        Sizes.
    shard_steps
        Steps of a shard of the large tensors, and of the one chunk of a shard of the small ones.
    codec
        Of the large tensors: ``zstd``, ``lz4`` or ``raw``; see :mod:`pipeline.store.chunk_codecs`.
    normalized
        Whether observations are stored normalised: they then have no units.
    """
    return [_spec(name, params, (shard_steps, codec, normalized)) for name in planner_shapes(params)]


def _spec(name: str, params: PlannerParams, storage: tuple[int, str, bool]) -> ArraySpec:
    shard_steps, codec, normalized = storage
    dims, row_shape, dtype = planner_shapes(params)[name]
    is_large = name in LARGE
    return ArraySpec(
        name=name,
        dims=("step", *dims),
        row_shape=row_shape,
        dtype=dtype,
        chunk_steps=1 if is_large else shard_steps,
        shard_steps=shard_steps,
        codec="raw" if codec == "raw" or not is_large else f"blosc:{codec}",
        valid_array="is_anchor" if is_large else "",
        attributes=tuple(_attributes(name, dims, normalized).items()),
    )


def _attributes(name: str, dims: tuple[str, ...], normalized: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {"long_name": _LONG_NAMES[name]}
    is_scaled = normalized and "future" not in name
    if dims and dims[-1].endswith("_feature"):
        features = FEATURES[_features_of(name)]
        attributes["features"] = list(features)
        attributes["feature_units"] = ["1" if is_scaled else _FEATURE_UNITS.get(feature, "1") for feature in features]
        attributes["frame"] = "ego's rear axle at the step: x forward, y left"
    elif name in _UNITS:
        attributes["units"] = "1" if is_scaled else _UNITS[name]
    return attributes


def _features_of(name: str) -> str:
    return "lanes" if name == "route_lanes" else name
