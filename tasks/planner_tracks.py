"""Tracks as recorded to tracks on the planner's grid: parked actors hidden, jumps cut, everything mixed in time."""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from schemas.errors import Reason, SourceError
from schemas.planner import PlannerParams
from schemas.tracks import Tracks
from tasks.align import align, grid_length

JUMP_M = 2.0
"""A change of position below it is no jump, however short the time: recorded times have their own error."""

_EXACT = 1e-6
"""Share of a recorded period by which a grid step may miss a recorded step and still be that step."""

_ON_STEPS = ("actor_valid", "actor_position", "actor_heading", "actor_velocity")
_ON_ACTORS = ("actor_id", "actor_class", "actor_length_m", "actor_width_m")


def wrap_angle(angle: Float[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """Return the same angle in (-pi, pi].

    >>> wrap_angle(np.array([3 * np.pi, -np.pi / 2])) / np.pi
    array([ 1. , -0.5])
    """
    return np.pi - (np.pi - np.asarray(angle, np.float64)) % (2.0 * np.pi)


def turn_vectors(
    rotation: Float64[np.ndarray, "*rows 3"], vectors: Float64[np.ndarray, "*rows 3"]
) -> Float64[np.ndarray, "*rows 3"]:
    """Return ``Rz(yaw) @ Ry(pitch) @ Rx(roll) @ vector`` for each row, ``rotation`` being roll, pitch, yaw."""
    (cr, sr), (cp, sp), (cy, sy) = ((np.cos(rotation[..., k]), np.sin(rotation[..., k])) for k in range(3))
    x, y, z = (vectors[..., k] for k in range(3))
    turned = (
        cy * cp * x + (cy * sp * sr - sy * cr) * y + (cy * sp * cr + sy * sr) * z,
        sy * cp * x + (sy * sp * sr + cy * cr) * y + (sy * sp * cr - cy * sr) * z,
        -sp * x + cp * sr * y + cp * cr * z,
    )
    return np.stack(turned, axis=-1)


def differentiate(
    values: Float64[np.ndarray, "step ..."],
    time_s: Float64[np.ndarray, " step"],
    valid: Bool[np.ndarray, "step ..."],
    max_gap_s: float = 0.5,
) -> Float64[np.ndarray, "step ..."]:
    """Return the change of ``values`` by second: central where both neighbours are valid, one-sided at ends, else 0.

    ``valid`` has the leading axes of ``values``. A neighbour more than ``max_gap_s`` away is none.
    """
    num_steps = len(time_s)
    rate = np.zeros_like(values)
    if num_steps < 2:
        return rate
    steps_s = np.diff(time_s).reshape(-1, *(1,) * (valid.ndim - 1))
    linked = valid[1:] & valid[:-1] & (steps_s <= max_gap_s + 1e-9)
    none = np.zeros((1, *valid.shape[1:]), np.bool_)
    before, after = np.concatenate([none, linked]), np.concatenate([linked, none])
    index = np.arange(num_steps).reshape(-1, *(1,) * (valid.ndim - 1))
    lower, upper = index - before, index + after
    span_s = time_s[upper] - time_s[lower]
    columns = np.indices(valid.shape, sparse=True)[1:]
    change = values[(upper, *columns)] - values[(lower, *columns)]
    shape = (*valid.shape, *(1,) * (values.ndim - valid.ndim))
    np.divide(change, span_s.reshape(shape), out=rate, where=(span_s > 0).reshape(shape))
    return rate


def clean_tracks(tracks: Tracks, params: PlannerParams) -> Tracks:
    """Hide actors that are parked far below the map or fly above it, and end tracks where they jump.

    An actor's part after a jump becomes a track of its own with the same id, so that nothing is mixed across it and no history
    runs through it. Where the ego jumps, or the recording has a gap, ``is_break`` is set.
    """
    height_m = np.abs(tracks.actor_position[:, :, 2] - tracks.ego_position[:, None, 2])
    valid = tracks.actor_valid & (height_m <= params.max_height_m)
    steps_s = np.diff(tracks.time_s)
    ego = tracks.ego_valid
    is_break = tracks.is_break.copy()
    is_break[1:] |= (steps_s > params.max_gap_s + 1e-9) | (ego[1:] != ego[:-1])
    is_break[1:] |= ego[1:] & ego[:-1] & _is_far(tracks.ego_position, steps_s, params.max_speed_m_s)
    jumps = valid[1:] & valid[:-1] & _is_far(tracks.actor_position, steps_s[:, None], params.max_speed_m_s)
    return _split(replace(tracks, actor_valid=valid, is_break=is_break), jumps)


def _is_far(position: Float64[np.ndarray, "step ... 3"], steps_s: np.ndarray, max_speed_m_s: float) -> np.ndarray:
    change = np.diff(position[..., :2], axis=0)
    moved_m: np.ndarray = np.hypot(change[..., 0], change[..., 1])
    return moved_m > np.maximum(max_speed_m_s * steps_s, JUMP_M)


def _split(tracks: Tracks, jumps: Bool[np.ndarray, "step_pair actor"]) -> Tracks:
    """Give each part between jumps a column of its own; the first part keeps the actor's."""
    steps, actors = np.nonzero(jumps)
    if len(steps) == 0:
        return tracks
    order = np.lexsort((steps, actors))
    source = np.concatenate([np.arange(tracks.num_actors), actors[order]])
    starts = np.concatenate([np.zeros(tracks.num_actors, np.int64), steps[order] + 1])
    stops = np.full(len(source), tracks.num_steps)
    for column in range(tracks.num_actors, len(source)):  # a part ends where the next one of its actor begins
        later = [
            c
            for c in range(tracks.num_actors, len(source))
            if source[c] == source[column] and starts[c] > starts[column]
        ]
        stops[column] = min((starts[c] for c in later), default=tracks.num_steps)
        first = source[column]
        stops[first] = min(stops[first], starts[column])
    index = np.arange(tracks.num_steps)[:, None]
    columns = {name: getattr(tracks, name)[:, source] for name in _ON_STEPS}
    columns["actor_valid"] &= (index >= starts) & (index < stops)
    return replace(tracks, **columns, **{name: getattr(tracks, name)[source] for name in _ON_ACTORS})


def resample_tracks(tracks: Tracks, params: PlannerParams) -> Tracks:
    """Return the tracks, cleaned, on a grid of ``params.rate_hz`` that begins at the first recorded step.

    Positions and velocities are mixed linearly and angles along the shorter arc, only between recorded steps that both have the
    actor, that lie no more than ``max_gap_s`` apart, and between which the ego does not jump; such steps are
    ``is_interpolated``. A grid step inside a gap or a jump is not valid. A light keeps its recorded state until the next one.
    """
    if tracks.num_steps == 0:
        raise SourceError("expected tracks of one step or more, found none; drop the episode", Reason.EMPTY_EPISODE)
    tracks = clean_tracks(tracks, params)
    num_steps = grid_length(tracks.time_s[-1] - tracks.time_s[0], params.rate_hz)
    grid_s = tracks.time_s[0] + np.arange(num_steps) / params.rate_hz
    found = align(tracks.time_s, grid_s, "linear")
    weight = np.where(found.weight < _EXACT, 0.0, np.where(found.weight > 1 - _EXACT, 1.0, found.weight))
    is_cut = tracks.is_break[found.upper] & (found.upper > found.lower) & (weight > 0) & (weight < 1)
    lower = np.where(weight == 1, found.upper, found.lower)
    upper = np.where(weight == 0, found.lower, found.upper)
    weight = np.where(lower == upper, 0.0, weight)
    return _mixed(tracks, _Mix(lower, upper, weight), grid_s, is_cut)


class _Mix:
    """``lower + weight * (upper - lower)`` along the first axis."""

    def __init__(
        self, lower: Int64[np.ndarray, " grid"], upper: Int64[np.ndarray, " grid"], weight: np.ndarray
    ) -> None:
        self.lower, self.upper, self.weight = lower, upper, weight
        self.position = lower + weight

    def linear(self, values: np.ndarray) -> np.ndarray:
        low = values[self.lower]
        weight = self.weight.reshape(-1, *(1,) * (values.ndim - 1))
        mixed: np.ndarray = low + weight * (values[self.upper] - low)
        return mixed

    def angle(self, values: np.ndarray) -> np.ndarray:
        low = values[self.lower]
        weight = self.weight.reshape(-1, *(1,) * (values.ndim - 1))
        return wrap_angle(low + weight * wrap_angle(values[self.upper] - low))

    def both(self, mask: np.ndarray) -> np.ndarray:
        true: np.ndarray = mask[self.lower] & mask[self.upper]
        return true


def _mixed(tracks: Tracks, mix: _Mix, grid_s: np.ndarray, is_cut: np.ndarray) -> Tracks:
    ego_valid = mix.both(tracks.ego_valid) & ~is_cut
    actor_valid = mix.both(tracks.actor_valid) & ~is_cut[:, None]
    # A recorded break at step b falls on the first grid step whose place between recorded steps is b or later.
    breaks = np.searchsorted(mix.position, np.flatnonzero(tracks.is_break))
    is_break = np.zeros(len(grid_s), np.bool_)
    is_break[breaks[breaks < len(grid_s)]] = True
    is_break[1:] |= ego_valid[1:] != ego_valid[:-1]
    nearest = np.where(mix.weight > 0.5, mix.upper, mix.lower)
    return replace(
        tracks,
        time_s=grid_s,
        source_step=tracks.source_step[nearest],
        is_interpolated=(mix.weight > 0) & ego_valid,
        is_break=is_break,
        ego_valid=ego_valid,
        ego_position=mix.linear(tracks.ego_position) * ego_valid[:, None],
        ego_rotation=mix.angle(tracks.ego_rotation) * ego_valid[:, None],
        ego_velocity=mix.linear(tracks.ego_velocity) * ego_valid[:, None],
        ego_acceleration=mix.linear(tracks.ego_acceleration) * ego_valid[:, None],
        actor_valid=actor_valid,
        actor_position=mix.linear(tracks.actor_position) * actor_valid[:, :, None],
        actor_heading=mix.angle(tracks.actor_heading) * actor_valid,
        actor_velocity=mix.linear(tracks.actor_velocity) * actor_valid[:, :, None],
        light_state=tracks.light_state[mix.lower],
    )


def planner_anchors(
    tracks: Tracks, params: PlannerParams, *, stride: int = 1, min_future_steps: int = -1, min_distance_m: float = 0.0
) -> Int64[np.ndarray, " anchor"]:
    """Return the steps of resampled tracks with a whole history and a future of ``min_future_steps`` (-1: all of them).

    Between the first and the last step of such a window the ego is recorded throughout and never jumps.

    Parameters
    ----------
    tracks
        On the planner's grid.
    params
        Lengths of history and future.
    stride
        Keep every so many of the steps that qualify in a row.
    min_future_steps
        Shorter than ``params.future_steps`` lets windows reach past the end; their rows there are zero and not valid.
    min_distance_m
        Least length of the way that the ego drives in that future.
    """
    future = params.future_steps if min_future_steps < 0 else min_future_steps
    steps = np.arange(params.past_steps, max(tracks.num_steps - future, params.past_steps))
    # Number of faults up to and including a step: none between two steps if both have the same number.
    faults = np.cumsum(tracks.is_break | ~tracks.ego_valid)
    first, last = steps - params.past_steps, steps + future
    whole = tracks.ego_valid[first] & (faults[first] == faults[last])
    moved_m = np.hypot(*np.diff(tracks.ego_position[:, :2], axis=0).T)
    way_m = np.concatenate([[0.0], np.cumsum(moved_m)])
    kept: np.ndarray = steps[whole & (way_m[last] - way_m[steps] >= min_distance_m)]
    runs = np.flatnonzero(np.diff(kept, prepend=-2) != 1)
    place = np.arange(len(kept)) - np.repeat(runs, np.diff([*runs, len(kept)]))
    chosen: np.ndarray = kept[place % stride == 0]
    return chosen
