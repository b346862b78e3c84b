"""Does an ego pose jump? Looked at while a shard's rows are read, on the recorded steps that serve it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schemas.errors import Reason
from schemas.quality import CheckRecipe
from schemas.source import EpisodeRef, Fault, SignalInfo
from tasks.quality import travelled, turned

if TYPE_CHECKING:
    from pipeline.shard_rows import Rows

TRAVEL = "travel_m"
"""Row column of a part: distance from the step before, NaN where the format says no place."""

POSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("ego_location",), "ego_rotation"),
    (("ego_position",), "ego_rotation"),
    (("pos_global",), "theta"),
    (("x", "y"), "theta"),
)
"""Signals with the ego's place and heading, as the driving formats call them; the first that an episode has serve."""

LEAST_JUMP_M, LEAST_JUMP_RAD = 1.0, np.radians(30.0)
"""Below these nothing is a jump, however short the step: clocks and satellites are noisy."""


def pose_columns(ref: EpisodeRef, checks: CheckRecipe) -> tuple[tuple[str, ...], str]:
    """Return the signals of place and heading to look at; empty where there are none, or nobody wants to know."""
    if checks.pose_jump == "off" and checks.frozen == "off":
        return (), ""
    offered = {signal.name: signal for signal in ref.signals}
    none: tuple[tuple[str, ...], str] = (), ""
    places, heading = next((pose for pose in POSES if all(name in offered for name in pose[0])), none)
    places = tuple(name for name in checks.position if name in offered) or places
    heading = checks.heading or heading
    return places, heading if heading in offered and _heading_index(offered[heading]) >= 0 else ""


def check_motion(part: "Rows", columns: Mapping[str, np.ndarray], checks: CheckRecipe) -> None:
    """Note how far each step is from the one before, and what is done about steps that are too far.

    Parameters
    ----------
    part
        Rows of a segment, whose times are there.
    columns
        Values of the pose's signals at the segment's steps.
    """
    ref = part.segment.episode.ref
    places, heading = pose_columns(ref, checks)
    names = [*places, *([heading] if heading else [])]
    if not names or not len(part.steps):
        return
    first = 0
    values = {name: columns[name] for name in names}
    times_s = part.columns["timestamp_s"] + part.columns["align_error_s"]
    if part.before is not None:
        step, time_s = part.before
        block = part.segment.reader.read_signals(ref, names, np.array([step]))
        rows = {name: np.asarray(block.values[name], np.float64).reshape(1, -1) for name in names}
        values = {name: np.concatenate([rows[name], values[name]]) for name in names}
        times_s, first = np.concatenate([[time_s], times_s]), 1
    periods_s = np.diff(times_s, prepend=np.nan)
    if places:
        moved_m = travelled(np.concatenate([values[name] for name in places], axis=1))
        part.columns[TRAVEL][:] = moved_m[first:]
        found = (moved_m > LEAST_JUMP_M) & (periods_s > 0) & (moved_m > checks.max_speed_m_s * periods_s)
        _refuse(part, found[first:], moved_m[first:], "m", checks)
    if heading:
        info = ref.signal(heading)
        scale = 1.0 if info.units.startswith("rad") else np.pi / 180
        turns = turned(values[heading][:, _heading_index(info)] * scale)
        limits = np.radians(checks.max_turn_deg_s) * periods_s
        found = (turns > LEAST_JUMP_RAD) & (periods_s > 0) & (turns > limits)
        _refuse(part, found[first:], np.degrees(turns[first:]), "degrees", checks, stream=heading)


def _refuse(
    part: "Rows", found: np.ndarray, amounts: np.ndarray, unit: str, checks: CheckRecipe, *, stream: str = ""
) -> None:
    if checks.pose_jump == "off":
        return
    for row in np.flatnonzero(found).tolist():
        step = int(part.columns["source_step"][row])
        limit = f"{checks.max_turn_deg_s:g} degrees/s" if unit == "degrees" else f"{checks.max_speed_m_s:g} m/s"
        fault = Fault(
            reason=Reason.POSE_JUMP,
            message=f"expected at most {limit}, found {amounts[row]:.1f} {unit} in one step; see [checks] of the recipe",
            episode=part.segment.episode.ref.key,
            stream=stream or "position",
            start=step,
            stop=step + 1,
            is_warning=checks.pose_jump == "warn",
        )
        part.note(np.array([row]), fault)


def _heading_index(info: SignalInfo) -> int:
    """Return which value of a signal is the heading, or -1."""
    return info.names.index("yaw") if "yaw" in info.names else 0 if info.size == 1 else -1
