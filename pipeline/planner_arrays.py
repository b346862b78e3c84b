"""The arrays of a planner dataset: Diffusion Planner's names with ``step`` in front, masks and extras beside them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from schemas.dataset import ArraySpec
from schemas.planner import FEATURES, PlannerParams
from schemas.recipe import PlannerRecipe
from schemas.source import TEXT, SignalInfo
from schemas.vehicles import Axles, vehicle_axles

MAX_SMALL_NBYTES = 4096
"""Rows of other names than the contract's are large above this."""

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


def planner_params(recipe: PlannerRecipe, rate_hz: float, ego_model: str = "") -> PlannerParams:
    """Return the sizes and constants that a recipe asks for, with the axles of the ego's model where it leaves them open."""
    usual = PlannerParams()
    axles = vehicle_axles(ego_model) or Axles(rear_m=usual.rear_axle[0], wheel_base_m=usual.wheel_base_m)
    return PlannerParams(
        rate_hz=rate_hz,
        past_steps=recipe.past_steps,
        future_steps=recipe.future_steps,
        num_agents=recipe.num_agents,
        num_static=recipe.num_static,
        num_lanes=recipe.num_lanes,
        num_route_lanes=recipe.num_route_lanes,
        rear_axle=(recipe.rear_axle_m or axles.rear_m, 0.0, usual.rear_axle[2]),
        wheel_base_m=recipe.wheel_base_m or axles.wheel_base_m,
    )


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
    params: PlannerParams, shard_steps: int, *, codec: str = "zstd", scaled: Collection[str] = ()
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
    scaled
        Names of those that are stored normalised: they have no units.
    """
    return [
        _spec(name, dims, (row_shape, dtype), (shard_steps, codec, name in LARGE), is_scaled=name in scaled)
        for name, (dims, row_shape, dtype) in planner_shapes(params).items()
    ]


def packed_specs(tensors: Sequence[SignalInfo], shard_steps: int, *, codec: str = "zstd") -> list[ArraySpec]:
    """Return the specifications of samples as a source holds them, with the contract's names of dimensions where they fit."""
    usual = planner_shapes(PlannerParams())
    sizes: dict[str, int] = {}
    specs = []
    for tensor in tensors:
        dims = usual[tensor.name][0] if tensor.name in usual else ()
        pairs = list(zip(dims, tensor.shape, strict=False))
        if len(dims) != len(tensor.shape) or any(sizes.setdefault(side, size) != size for side, size in pairs):
            dims = tuple(f"{tensor.name}_{k}" for k in range(len(tensor.shape)))
        is_large = tensor.name in LARGE or tensor.size * np.dtype(tensor.dtype).itemsize > MAX_SMALL_NBYTES
        spec = _spec(tensor.name, dims, (tensor.shape, tensor.dtype), (shard_steps, codec, is_large))
        attributes = (("long_name", tensor.name), ("encoding", TEXT)) if tensor.units == TEXT else spec.attributes
        if spec.codec != "raw" and spec.dtype == "float16":
            spec = replace(spec, codec="zstd")  # Numba, which puts features together, has no float16 on CPUs (0.68)
        specs.append(replace(spec, attributes=attributes))
    return specs


def _spec(
    name: str,
    dims: tuple[str, ...],
    rows: tuple[tuple[int, ...], str],
    storage: tuple[int, str, bool],
    *,
    is_scaled: bool = False,
) -> ArraySpec:
    row_shape, dtype = rows
    shard_steps, codec, is_large = storage
    return ArraySpec(
        name=name,
        dims=("step", *dims),
        row_shape=row_shape,
        dtype=dtype,
        chunk_steps=1 if is_large else shard_steps,
        shard_steps=shard_steps,
        codec="raw" if codec == "raw" or not is_large else f"blosc:{codec}",
        valid_array="is_anchor" if is_large else "",
        attributes=tuple(_attributes(name, dims, row_shape, is_scaled=is_scaled).items()),
    )


def _attributes(name: str, dims: tuple[str, ...], row_shape: tuple[int, ...], *, is_scaled: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {"long_name": _LONG_NAMES.get(name, name)}
    features = FEATURES.get(_features_of(name), ())
    if dims and dims[-1].endswith("_feature") and row_shape[-1] == len(features):
        attributes["features"] = list(features)
        attributes["feature_units"] = ["1" if is_scaled else _FEATURE_UNITS.get(feature, "1") for feature in features]
        attributes["frame"] = "ego's rear axle at the step: x forward, y left"
    elif name in _UNITS:
        attributes["units"] = "1" if is_scaled else _UNITS[name]
    return attributes


def _features_of(name: str) -> str:
    return "lanes" if name == "route_lanes" else name
