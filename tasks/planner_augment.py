"""Perturbation of the ego's state as in Diffusion Planner's training: a seeded push aside, and a smooth way back to the future.

In physical units, before normalisation. Section 1.5 of the contract; nothing but the batch and a generator comes in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64

from schemas.errors import SchemaError
from tasks.kernels.planner_rows import recenter_rows

_LAYOUTS = {
    "ego_agent_future": (0, 1, 2),
    "neighbor_agents_past": (6, 3, -1),
    "neighbor_agents_future": (2, 1, 2),
    "lanes": (8, 4, -1),
    "route_lanes": (8, 4, -1),
    "static_objects": (10, 2, -1),
}
"""Name: features that are 0 where a row is absent, vectors from column 0 on, column of a heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """How far, how often, and over which time the way leads back."""

    half_widths: tuple[float, ...] = (0.0, 0.75, 0.35, 1.0, 0.5, 0.2, 0.1, 0.0, 0.0)
    """Of x, y, heading, vx, vy, ax, ay, steering, yaw rate: noise is uniform in twice of it."""
    probability: float = 0.5
    min_speed_m_s: float = 2.0
    """A slower ego is left where it is."""
    max_yaw_rate_rad_s: float = 0.85
    min_steering_speed_m_s: float = 0.2
    max_steering_rad: float = 2.0 * math.pi / 3.0
    wheel_base_m: float = 3.089
    num_steps: int = 20
    """Steps of the future that are replaced."""
    step_s: float = 0.1

    def __post_init__(self) -> None:
        if len(self.half_widths) != 9 or not 0 <= self.probability <= 1 or self.num_steps < 2:
            raise SchemaError(
                "expected 9 half widths, a probability in [0, 1] and 2 steps or more; correct the perturbation"
            )


def perturb(
    batch: Mapping[str, np.ndarray], generator: np.random.Generator, perturbation: Perturbation | None = None
) -> dict[str, np.ndarray]:
    """Return the batch with the ego of some rows pushed aside and everything seen from there; arrays that do not change are shared.

    A row whose ``ego_agent_future_valid`` (where the batch has it) is False at the step to which the way would lead stays as it is.

    Parameters
    ----------
    batch
        Tensors by Diffusion Planner's names, ``[batch, ...]``, physical units.
    generator
        Two draws: whether a row is perturbed, and by how much.
    perturbation
        Constants; the published ones by default.
    """
    count = len(batch["ego_current_state"])
    uniform = np.concatenate([generator.random((count, 1)), generator.random((count, 9))], axis=1)
    return perturb_by(batch, uniform, Perturbation() if perturbation is None else perturbation)


def perturb_by(
    batch: Mapping[str, np.ndarray], uniform: Float64[np.ndarray, "batch 10"], perturbation: Perturbation
) -> dict[str, np.ndarray]:
    """Return what :func:`perturb` does, the draws given: numbers in [0, 1), first whether, then by how much."""
    current = np.asarray(batch["ego_current_state"], np.float64)
    future = np.asarray(batch["ego_agent_future"])
    if future.shape[1] <= perturbation.num_steps:
        raise SchemaError(
            f"expected a future of more than {perturbation.num_steps} steps, found {future.shape[1]}; lengthen it"
        )
    chosen = perturbed_rows(batch, uniform, perturbation)
    state = perturbed_state(current, uniform[:, 1:], perturbation)
    joined = future.copy()
    joined[chosen, : perturbation.num_steps] = way_back(state[chosen], future[chosen].astype(np.float64), perturbation)
    return _recentered({**batch, "ego_agent_future": joined}, state[chosen], chosen)


def perturbed_rows(
    batch: Mapping[str, np.ndarray], uniform: Float64[np.ndarray, "batch 10"], perturbation: Perturbation
) -> Bool[np.ndarray, " batch"]:
    """Return which rows :func:`perturb_by` changes; of the batch it needs ``ego_current_state`` and, where there is one, ``ego_agent_future_valid``."""
    chosen = uniform[:, 0] >= 1.0 - perturbation.probability
    chosen &= np.abs(np.asarray(batch["ego_current_state"])[:, 4].astype(np.float64)) >= perturbation.min_speed_m_s
    valid = batch.get("ego_agent_future_valid")
    if valid is not None:
        chosen &= valid[:, : perturbation.num_steps + 1].all(axis=1)
    found: np.ndarray = chosen
    return found


def perturbed_state(
    current: Float64[np.ndarray, "batch 10"], uniform: Float64[np.ndarray, "batch 9"], perturbation: Perturbation
) -> Float64[np.ndarray, "batch 10"]:
    """Return the ego's row after noise, still in the frame of the unperturbed ego; ``uniform`` is in [0, 1)."""
    width = np.array(perturbation.half_widths)
    noise = width * (2.0 * uniform - 1.0)
    vx = np.maximum(current[:, 4] + noise[:, 3], 0.0)
    limit = perturbation.max_yaw_rate_rad_s
    yaw_rate = np.clip(current[:, 9] + noise[:, 8], -limit, limit)
    is_moving = vx >= perturbation.min_steering_speed_m_s
    steering = np.arctan(yaw_rate * perturbation.wheel_base_m / np.where(is_moving, vx, 1.0))
    steering = np.clip(steering, -perturbation.max_steering_rad, perturbation.max_steering_rad)
    columns = (
        noise[:, 0],
        noise[:, 1],
        np.cos(noise[:, 2]),
        np.sin(noise[:, 2]),
        vx,
        *(current[:, 5:8] + noise[:, 4:7]).T,
        np.where(is_moving, steering, 0.0),
        yaw_rate,
    )
    return np.stack(columns, axis=1)


def way_back(
    state: Float64[np.ndarray, "batch 10"], future: Float64[np.ndarray, "batch future 3"], perturbation: Perturbation
) -> Float64[np.ndarray, "batch steps 3"]:
    """Return the first steps of the future anew: a quintic in x and in y from the perturbed state to the step after them.

    It begins towards the middle of these steps, with speed and acceleration as long as the state's, and ends as the recorded
    future moves there.
    """
    count, step_s = perturbation.num_steps, perturbation.step_s
    before, last = future[:, count - 1], future[:, count]
    toward = future[:, count // 2, :2] - state[:, :2]
    change = last[:, :2] - before[:, :2]
    bend = change - (before[:, :2] - future[:, count - 2, :2])
    turn = last[:, 2] - before[:, 2]
    turn = np.arctan2(np.sin(turn), np.cos(turn))
    start = _boundary(
        state[:, :2], np.arctan2(toward[:, 1], toward[:, 0]), _norm(state[:, 4:6]), _norm(state[:, 6:8]), state[:, 9]
    )
    end = _boundary(last[:, :2], last[:, 2], _norm(change) / step_s, _norm(bend) / step_s**2, turn / step_s)
    conditions = np.concatenate([start, end], axis=1)
    span_s = (count + 1) * step_s
    times_s = np.arange(1, count + 1) * step_s
    samples = times_s[:, None] ** np.arange(6) @ np.linalg.inv(_quintic(span_s)) @ conditions
    moved = np.diff(samples, axis=1, prepend=state[:, None, :2])
    return np.concatenate([samples, np.arctan2(moved[..., 1:], moved[..., :1])], axis=2)


def _norm(vectors: np.ndarray) -> np.ndarray:
    length: np.ndarray = np.hypot(vectors[:, 0], vectors[:, 1])
    return length


def _boundary(
    position: np.ndarray, heading: np.ndarray, speed: np.ndarray, acceleration: np.ndarray, yaw_rate: np.ndarray
) -> Float64[np.ndarray, "batch 3 2"]:
    """Return position, velocity and acceleration of a point that moves along its heading and turns."""
    ahead = np.stack([np.cos(heading), np.sin(heading)], axis=1)
    left = np.stack([-np.sin(heading), np.cos(heading)], axis=1)
    velocity = speed[:, None] * ahead
    return np.stack([position, velocity, acceleration[:, None] * ahead + (speed * yaw_rate)[:, None] * left], axis=1)


def _quintic(span_s: float) -> Float64[np.ndarray, "6 6"]:
    """Return the rows that turn coefficients into value, slope and curvature at 0 and at ``span_s``."""
    power = np.arange(6)
    rows = []
    for time_s in (0.0, span_s):
        for order in range(3):
            factor = np.prod([power - k for k in range(order)], axis=0) if order else np.ones(6)
            rows.append(factor * np.where(power >= order, time_s ** np.maximum(power - order, 0), 0.0))
    return np.array(rows)


def _recentered(
    batch: Mapping[str, np.ndarray], state: Float[np.ndarray, "chosen 10"], chosen: Bool[np.ndarray, " batch"]
) -> dict[str, np.ndarray]:
    """See the chosen rows from the ego of ``state``, which becomes (0, 0, 1, 0, ...)."""
    heading = np.arctan2(state[:, 3], state[:, 2])
    centers = np.ascontiguousarray(np.stack([state[:, 0], state[:, 1], heading], axis=1))
    out = dict(batch)
    for name, layout in _LAYOUTS.items():
        if name in batch:
            rows = np.asarray(batch[name], np.float32)
            flat = np.ascontiguousarray(rows[chosen]).reshape(
                len(state), int(np.prod(rows.shape[1:-1])), rows.shape[-1]
            )
            seen = np.empty_like(flat)
            recenter_rows(flat, centers, layout, seen)
            out[name] = rows.copy()
            out[name][chosen] = seen.reshape(len(state), *rows.shape[1:])
    valid = batch.get("ego_agent_future_valid")
    if valid is not None:
        out["ego_agent_future"][~valid] = 0.0
    c, s = np.cos(heading), np.sin(heading)
    row = state.copy()
    row[:, :4] = (0.0, 0.0, 1.0, 0.0)
    for column in (4, 6):
        u, v = state[:, column], state[:, column + 1]
        row[:, column], row[:, column + 1] = c * u + s * v, c * v - s * u
    out["ego_current_state"] = np.array(batch["ego_current_state"], np.float32)
    out["ego_current_state"][chosen] = row
    return out
