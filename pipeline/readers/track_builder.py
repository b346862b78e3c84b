"""Tracks out of records that list, step by step, what was seen: Bench2Drive's and carla_garage's boxes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.readers.carla_frames import box_size_m
from schemas.errors import Reason, SourceError
from schemas.source import Fault
from schemas.tracks import ActorClass, LightState, Tracks
from tasks.planner_tracks import differentiate, turn_vectors, wrap_angle

SLOW_M_S = 0.5
"""Below it, the direction of a change of position is noise."""


@dataclass(slots=True)
class EgoStep:
    """The ego at one recorded step, in the frame of :mod:`schemas.tracks`."""

    step: int
    position: np.ndarray
    rotation: np.ndarray
    speed_m_s: float = float("nan")
    """As recorded, without direction."""
    imu_m_s2: np.ndarray | None = None
    """Acceleration in the ego's own axes, gravity included."""
    turning_rad_s: float = 0.0


@dataclass(slots=True)
class Actor:
    """An actor that was seen at least once."""

    number: int
    kind: ActorClass
    length_m: float
    width_m: float


@dataclass(slots=True)
class Light:
    """A traffic light that was seen at least once; NaN and 0 where nothing was said."""

    number: int
    lane: tuple[int, int] = (0, 0)
    position: tuple[float, ...] = (float("nan"),) * 3
    trigger: tuple[float, ...] = (float("nan"),) * 5


@dataclass(slots=True)
class TrackBuilder:
    """Collects what was seen; :meth:`build` makes the tracks."""

    ego: list[EgoStep] = field(default_factory=list)
    actors: dict[Hashable, Actor] = field(default_factory=dict)
    lights: dict[Hashable, Light] = field(default_factory=dict)
    seen: list[tuple[int, int, float, float, float, float]] = field(default_factory=list)
    """(row of the ego, actor, x, y, z, heading)."""
    states: list[tuple[int, int, LightState]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _columns: dict[Hashable, int] = field(default_factory=dict)
    _rows: dict[Hashable, int] = field(default_factory=dict)

    def see_actor(self, key: Hashable, actor: Actor, position: np.ndarray, heading: float) -> None:
        """Note an actor at the ego's last step; its class and size are those it had first."""
        column = self._columns.setdefault(key, len(self._columns))
        self.actors.setdefault(key, actor)
        self.seen.append((len(self.ego) - 1, column, *position.tolist(), float(heading)))

    def see_light(self, key: Hashable, light: Light, state: LightState) -> None:
        """Note a light at the ego's last step."""
        row = self._rows.setdefault(key, len(self._rows))
        self.lights.setdefault(key, light)
        self.states.append((len(self.ego) - 1, row, state))

    def build(
        self, *, town: str, rate_hz: float, ego_box: Mapping[str, Any], imu: tuple[float, ...] = (0.0, 0.0, 0.0)
    ) -> Tracks:
        """Make the tracks; velocities and, without an IMU at ``imu``, accelerations come by difference.

        Model and size of the ego are those of ``ego_box``, which may be empty.
        """
        if not self.ego:
            raise SourceError(
                "expected a step with the ego's pose, found none; record the episode again", Reason.EMPTY_EPISODE
            )
        source_step = np.array([ego.step for ego in self.ego], np.int64)
        time_s = source_step / rate_hz
        everywhere = np.ones(len(time_s), np.bool_)
        velocity = self._ego_velocity(time_s)
        length_m, width_m = box_size_m(ego_box, ActorClass.VEHICLE)
        return Tracks(
            town=town,
            ego_model=str(ego_box.get("type_id", "")),
            time_s=time_s,
            source_step=source_step,
            is_interpolated=np.zeros(len(time_s), np.bool_),
            is_break=np.zeros(len(time_s), np.bool_),
            ego_length_m=length_m,
            ego_width_m=width_m,
            ego_valid=everywhere,
            ego_position=np.array([ego.position for ego in self.ego], np.float64),
            ego_rotation=np.array([ego.rotation for ego in self.ego], np.float64),
            ego_velocity=velocity,
            ego_acceleration=self._ego_acceleration(differentiate(velocity, time_s, everywhere), imu),
            **self._actor_arrays(time_s),
            **self._light_arrays(len(time_s)),
            faults=tuple(self.faults),
        )

    def _ego_velocity(self, time_s: np.ndarray) -> np.ndarray:
        """Return the recorded speed in the direction of motion, or of the heading where the ego stands; else the difference."""
        position = np.array([ego.position[:2] for ego in self.ego])
        by_difference = differentiate(position, time_s, np.ones(len(time_s), np.bool_))
        moved = np.hypot(by_difference[:, 0], by_difference[:, 1])
        speed = np.array([ego.speed_m_s for ego in self.ego])
        yaw = np.array([ego.rotation[2] for ego in self.ego])
        ahead = np.stack([np.cos(yaw), np.sin(yaw)], axis=1)
        is_slow = (moved < SLOW_M_S)[:, None]
        direction = np.where(is_slow, ahead, by_difference / np.maximum(moved, SLOW_M_S)[:, None])
        return np.where(np.isfinite(speed)[:, None], np.nan_to_num(np.abs(speed))[:, None] * direction, by_difference)

    def _ego_acceleration(self, by_difference: np.ndarray, imu: tuple[float, ...]) -> np.ndarray:
        """Return the IMU's acceleration without gravity, at the vehicle's origin, or the difference where there is none."""
        rows = by_difference.copy()
        for row, ego in enumerate(self.ego):
            if ego.imu_m_s2 is not None:
                # Gravity is vertical, so that in the plane nothing of it is left once the axes are the map's.
                # The IMU sits on a rigid body: it is drawn towards the origin by the turning.
                offset = turn_vectors(ego.rotation, np.array(imu))
                rows[row] = (turn_vectors(ego.rotation, ego.imu_m_s2) + ego.turning_rad_s**2 * offset)[:2]
        return rows

    def _actor_arrays(self, time_s: np.ndarray) -> dict[str, Any]:
        actors = list(self.actors.values())
        valid = np.zeros((len(time_s), len(actors)), np.bool_)
        pose = np.zeros((*valid.shape, 4))
        if self.seen:
            table = np.array(self.seen, np.float64)
            rows, columns = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
            valid[rows, columns] = True
            pose[rows, columns] = table[:, 2:]
        kinds = np.array([actor.kind for actor in actors], np.int8)
        moving = valid & (kinds < ActorClass.CZONE_SIGN)
        return {
            "actor_id": np.array([actor.number for actor in actors], np.int64),
            "actor_class": kinds,
            "actor_length_m": np.array([actor.length_m for actor in actors], np.float64),
            "actor_width_m": np.array([actor.width_m for actor in actors], np.float64),
            "actor_valid": valid,
            "actor_position": pose[:, :, :3],
            "actor_heading": wrap_angle(pose[:, :, 3]) * valid,
            "actor_velocity": differentiate(pose[:, :, :2], time_s, moving),
        }

    def _light_arrays(self, num_steps: int) -> dict[str, Any]:
        lights = list(self.lights.values())
        state = np.full((num_steps, len(lights)), LightState.UNKNOWN, np.int8)
        for row, column, found in self.states:
            state[row, column] = found
        return {
            "light_id": np.array([light.number for light in lights], np.int64),
            "light_signal": ("",) * len(lights),
            "light_lane": np.array([light.lane for light in lights], np.int64).reshape(-1, 2),
            "light_position": np.array([light.position for light in lights], np.float64).reshape(-1, 3),
            "light_trigger": np.array([light.trigger for light in lights], np.float64).reshape(-1, 5),
            "light_state": state,
        }
