"""Sizes and constants of Diffusion Planner's training tensors, as parameters; the defaults are the published ones.

Paper: Zheng et al., "Diffusion-Based Planning for Autonomous Driving with Flexible Guidance", ICLR 2025, arXiv:2501.15564.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerParams:
    """How many of what, how far, and the ego vehicle's geometry."""

    rate_hz: float = 10.0
    past_steps: int = 20
    """Steps of history before the current one: arrays of the past hold one more."""
    future_steps: int = 80
    num_agents: int = 32
    num_vulnerable: int = 10
    """Pedestrians and bicycles that are preferred over vehicles beyond ``num_agents``; more take part where slots are left."""
    num_static: int = 5
    num_lanes: int = 70
    num_route_lanes: int = 25
    num_points: int = 20
    """Points to which each lane's centre and boundaries are resampled."""
    radius_m: float = 100.0
    """Lanes whose area comes closer to the ego than this."""
    agent_radius_m: float = math.inf
    """Agents and static objects farther away are left out. The contract knows no such limit, and a recording has its own;
    CARLA's recorder logs have none."""
    rear_axle: tuple[float, float, float] = (-1.389, 0.0, 0.36)
    """Rear axle of the ego, from the vehicle's origin, m: x forward, y left, z up. The default is LEAD's for CARLA's Lincoln MKZ 2020
    (autonomousvision/lead); py123d takes -1.649 for the same car, by its box."""
    wheel_base_m: float = 3.089
    """For the steering angle. The default is the contract's, nuPlan's Chrysler Pacifica; CARLA's MKZ 2020 has 2.860 (py123d)."""
    min_speed_m_s: float = 0.2
    """Below it, steering and yaw rate are 0."""
    max_steering_rad: float = 2.0 * math.pi / 3.0
    max_yaw_rate_rad_s: float = 0.95
    marks_yellow: bool = False
    """Whether a yellow light sets its own flag. nuPlan's encoder never sets it: a yellow lane is ``unknown`` there."""
    max_height_m: float = 50.0
    """Actors farther above or below the ego are absent: scenario_runner parks actors 500 m below the map."""
    max_speed_m_s: float = 100.0
    """A faster change of position is a jump, and ends a track."""
    max_gap_s: float = 0.5
    """Recorded steps farther apart are not mixed: the steps between are not valid."""

    def __post_init__(self) -> None:
        counts = (self.future_steps, self.num_agents, self.num_static, self.num_lanes, self.num_route_lanes)
        if min(counts) < 1 or self.past_steps < 0 or self.num_vulnerable < 0 or self.num_points < 2:
            raise SchemaError(
                "expected sizes of 1 or more (num_points 2), found one below; correct the planner parameters"
            )
        if not (self.rate_hz > 0 and self.radius_m > 0 and self.agent_radius_m > 0 and self.wheel_base_m > 0):
            raise SchemaError(
                "expected rate, radii and wheel base above 0, found one that is not; correct the planner parameters"
            )


TENSORS = (
    "ego_current_state",
    "ego_agent_future",
    "neighbor_agents_past",
    "neighbor_agents_future",
    "lanes",
    "lanes_speed_limit",
    "lanes_has_speed_limit",
    "route_lanes",
    "route_lanes_speed_limit",
    "route_lanes_has_speed_limit",
    "static_objects",
)
"""In the order in which Diffusion Planner's dataset returns them."""

MASKS = (
    "ego_agent_future_valid",
    "neighbor_agents_past_valid",
    "neighbor_agents_future_valid",
    "static_objects_valid",
    "lanes_valid",
    "route_lanes_valid",
)
"""Explicit validity beside the zero rows; a back-filled row of the past is not valid."""

EXTRAS = ("neighbor_agents_id", "neighbor_agents_dropped", "planner_interpolated")

FEATURES: Mapping[str, tuple[str, ...]] = {
    "ego_current_state": ("x", "y", "cos_heading", "sin_heading", "vx", "vy", "ax", "ay", "steering", "yaw_rate"),
    "ego_agent_future": ("x", "y", "heading"),
    "neighbor_agents_past": (
        *("x", "y", "cos_heading", "sin_heading", "vx", "vy", "width", "length"),
        *("is_vehicle", "is_pedestrian", "is_bicycle"),
    ),
    "neighbor_agents_future": ("x", "y", "heading"),
    "static_objects": (
        *("x", "y", "cos_heading", "sin_heading", "width", "length"),
        *("is_czone_sign", "is_barrier", "is_traffic_cone", "is_generic"),
    ),
    "lanes": (
        *("x", "y", "dx", "dy", "left_dx", "left_dy", "right_dx", "right_dy"),
        *("is_green", "is_yellow", "is_red", "is_unknown"),
    ),
}
"""Names of the last axis, in order. Width stands before length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """``(value - mean) / std`` on the last axis."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise SchemaError("expected as many means as standard deviations, all above 0; correct the normalisation")


def _scaling(size: int, *std: float) -> Scaling:
    return Scaling(mean=(10.0,) + (0.0,) * (size - 1), std=tuple(std))


_LANES = _scaling(12, *(20.0,) * 8, *(1.0,) * 4)
_POSE = _scaling(4, 20.0, 20.0, 1.0, 1.0)
_LIMIT = Scaling(mean=(0.0,), std=(20.0,))

NORMALIZATION: Mapping[str, Scaling] = {
    "ego_current_state": _scaling(10, 20.0, 20.0, 1.0, 1.0, 20.0, 20.0, 20.0, 20.0, 1.0, 1.0),
    "neighbor_agents_past": _scaling(11, 20.0, 20.0, 1.0, 1.0, 20.0, 20.0, 20.0, 20.0, 1.0, 1.0, 1.0),
    "static_objects": _scaling(10, 20.0, 20.0, 1.0, 1.0, 20.0, 20.0, 1.0, 1.0, 1.0, 1.0),
    "lanes": _LANES,
    "lanes_speed_limit": _LIMIT,
    "route_lanes": _LANES,
    "route_lanes_speed_limit": _LIMIT,
}
"""Diffusion Planner's published constants for what its encoder observes."""

TARGET_NORMALIZATION: Mapping[str, Scaling] = {"ego": _POSE, "neighbor": _POSE}
"""The same for the targets: x, y, cos, sin."""
