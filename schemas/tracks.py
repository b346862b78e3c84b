"""Who was where in one episode: the ego, other actors and traffic lights, in one right-handed frame.

**The frame**: CARLA's map frame with y turned round, which is OpenDRIVE's: x as CARLA's, y = -CARLA's y, z up; metres, seconds, radians.
Headings are counter-clockwise from +x; roll, pitch, yaw are those of ``Rz(yaw) @ Ry(pitch) @ Rx(roll)``, so that of CARLA's own
three only roll keeps its sign. Readers turn what they read into this frame, once.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from schemas.errors import SchemaError
from schemas.source import Fault


class ActorClass(IntEnum):
    """What an actor is; from 3 on it does not move, and is a static object. The order is Diffusion Planner's one-hot."""

    VEHICLE = 0
    """Four or more wheels."""
    PEDESTRIAN = 1
    BICYCLE = 2
    """Two wheels, with or without a motor, as in nuPlan."""
    CZONE_SIGN = 3
    BARRIER = 4
    TRAFFIC_CONE = 5
    GENERIC = 6


NUM_MOVING_CLASSES = 3
NUM_STATIC_CLASSES = 4


class LightState(IntEnum):
    """State of a traffic light; the order is Diffusion Planner's one-hot. CARLA's ``Off`` is unknown."""

    GREEN = 0
    YELLOW = 1
    RED = 2
    UNKNOWN = 3


_SHAPES = {
    "time_s": ("step",),
    "source_step": ("step",),
    "is_interpolated": ("step",),
    "is_break": ("step",),
    "ego_valid": ("step",),
    "ego_position": ("step", 3),
    "ego_rotation": ("step", 3),
    "ego_velocity": ("step", 2),
    "ego_acceleration": ("step", 2),
    "actor_id": ("actor",),
    "actor_class": ("actor",),
    "actor_length_m": ("actor",),
    "actor_width_m": ("actor",),
    "actor_valid": ("step", "actor"),
    "actor_position": ("step", "actor", 3),
    "actor_heading": ("step", "actor"),
    "actor_velocity": ("step", "actor", 2),
    "light_id": ("light",),
    "light_lane": ("light", 2),
    "light_position": ("light", 3),
    "light_trigger": ("light", 5),
    "light_state": ("step", "light"),
}
_KINDS = {
    "source_step": "int64",
    "actor_id": "int64",
    "actor_class": "int8",
    "light_id": "int64",
    "light_lane": "int64",
    "light_state": "int8",
    **dict.fromkeys(("is_interpolated", "is_break", "ego_valid", "actor_valid"), "bool"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tracks:
    """Tracks of one episode: arrays along ``step``, float64 unless said otherwise; where a mask is False the value is 0.

    Equal only to itself: compare arrays, not tracks.
    """

    town: str
    """Name of the map, such as ``Town01``; empty where the recording does not say."""
    ego_model: str = ""
    """CARLA's blueprint of the ego, such as ``vehicle.lincoln.mkz_2020``; empty where the recording does not say."""
    time_s: np.ndarray
    """``[step]``, increasing, from the episode's start."""
    source_step: np.ndarray
    """int64 ``[step]``: the recorded step that is nearest in time."""
    is_interpolated: np.ndarray
    """bool ``[step]``: the step lies between recorded ones, and its poses were mixed from both."""
    is_break: np.ndarray
    """bool ``[step]``: between the previous step and this one the ego jumped or the recording has a gap."""

    ego_length_m: float
    ego_width_m: float
    ego_valid: np.ndarray
    """bool ``[step]``: the ego was recorded. Where it is False, nothing of the step was."""
    ego_position: np.ndarray
    """``[step, 3]``, m: the vehicle's origin (in CARLA on the ground, below the centre of the box)."""
    ego_rotation: np.ndarray
    """``[step, 3]``, rad: roll, pitch, yaw."""
    ego_velocity: np.ndarray
    """``[step, 2]``, m/s, of the origin, along the axes of the map."""
    ego_acceleration: np.ndarray
    """``[step, 2]``, m/s2, of the origin, along the axes of the map, without gravity."""

    actor_id: np.ndarray
    """int64 ``[actor]``: as recorded, where that is a number, else a digest of it. Not unique where a track was split."""
    actor_class: np.ndarray
    """int8 ``[actor]``: :class:`ActorClass`."""
    actor_length_m: np.ndarray
    """``[actor]``: full length of the box, along the heading."""
    actor_width_m: np.ndarray
    """``[actor]``: full width."""
    actor_valid: np.ndarray
    """bool ``[step, actor]``: the actor was there and was recorded."""
    actor_position: np.ndarray
    """``[step, actor, 3]``, m: centre of the box."""
    actor_heading: np.ndarray
    """``[step, actor]``, rad."""
    actor_velocity: np.ndarray
    """``[step, actor, 2]``, m/s, along the axes of the map."""

    light_id: np.ndarray
    """int64 ``[light]``."""
    light_signal: tuple[str, ...]
    """OpenDRIVE's id of each light's signal; empty where the recording does not say."""
    light_lane: np.ndarray
    """int64 ``[light, 2]``: OpenDRIVE's road and lane id where the light stops traffic; 0 as lane id where unknown."""
    light_position: np.ndarray
    """``[light, 3]``, m: where the light stands; NaN where unknown."""
    light_trigger: np.ndarray
    """``[light, 5]``: x, y, heading, half length, half width of the box in which a vehicle heeds the light; NaN where unknown."""
    light_state: np.ndarray
    """int8 ``[step, light]``: :class:`LightState`."""

    faults: tuple[Fault, ...] = ()
    """What could not be read of the recording; the steps concerned are absent or not valid."""

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, shape in _SHAPES.items():
            found = getattr(self, name)
            expected = tuple(sizes.get(side, -1) if isinstance(side, str) else side for side in shape)
            kind = np.dtype(_KINDS.get(name, "float64"))
            if found.ndim != len(shape) or found.dtype != kind or not _fits(found.shape, expected):
                raise SchemaError(
                    f"expected {name} as {kind}{list(shape)} with {sizes}, found {found.dtype}{list(found.shape)}; "
                    "report this as a bug of the reader"
                )
            sizes.update((side, size) for side, size in zip(shape, found.shape) if isinstance(side, str))
        if len(self.light_signal) != sizes["light"]:
            raise SchemaError(
                f"expected {sizes['light']} light signals, found {len(self.light_signal)}; report this as a bug"
            )
        if not np.all(np.diff(self.time_s) > 0):
            raise SchemaError("expected increasing times of tracks, found some that do not; repair or drop the episode")

    @property
    def num_steps(self) -> int:
        """Length in steps."""
        return len(self.time_s)

    @property
    def num_actors(self) -> int:
        """Number of actors other than the ego."""
        return len(self.actor_id)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array by its name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in _SHAPES}


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return all(side in (size, -1) for size, side in zip(found, expected))
