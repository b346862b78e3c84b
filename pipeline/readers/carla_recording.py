"""What a recorder log holds, gathered into arrays, and the tracks that follow from it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from pipeline.readers import carla_log as log
from pipeline.readers.carla_frames import LIGHT_STATES, flip_y, rotation_rad, size_m, static_class, vehicle_class
from pipeline.readers.carla_log import Added
from schemas.errors import Reason, SourceError
from schemas.tracks import ActorClass, LightState, Tracks
from tasks.planner_tracks import differentiate, turn_vectors

MAX_TRACKS_NBYTES = 2**32
"""Greatest size of the tracks of one log in memory."""
_NBYTES_A_ROW = 7 * 8

_KEPT = (log.POSITION, log.KINEMATICS, log.STATE, log.ANIM_VEHICLE)
_WANTED = frozenset(
    (*_KEPT, log.FRAME_START, log.FRAME_END, log.EVENT_ADD, log.EVENT_DEL, log.BOUNDING_BOX, log.TRIGGER_VOLUME)
)
_CLASSES = {log.VEHICLE, log.WALKER, log.OTHER}


@dataclass(slots=True)
class Life:
    """One actor from its spawning on; an id that is given again is another life."""

    actor: Added
    box: np.ndarray | None = None
    """Origin and half extent, cm."""
    trigger: np.ndarray | None = None
    is_over: bool = False


@dataclass(slots=True)
class Recording:
    """Frames of a log, as recorded: CARLA's axes and units."""

    frame: list[int] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    of_id: dict[int, int] = field(default_factory=dict)
    """The life that an id means now."""
    rows: dict[int, list[tuple[int, np.ndarray, np.ndarray]]] = field(
        default_factory=lambda: {kind: [] for kind in _KEPT}
    )
    """By kind of packet: (step, life of each row, rows)."""

    def add(self, actors: Iterable[Added]) -> None:
        """Begin the lives of ``actors``; one that is announced again goes on."""
        for actor in actors:
            if actor.id not in self.of_id or self.lives[self.of_id[actor.id]].is_over:
                self.of_id[actor.id] = len(self.lives)
                self.lives.append(Life(actor))

    def take(self, kind: int, content: bytes) -> None:
        """Take one packet."""
        if kind == log.EVENT_ADD:
            return self.add(log.added_actors(content))
        rows = log.rows_of(kind, content)
        if kind in _KEPT:
            lives = np.array([self.of_id.get(number, -1) for number in rows["id"].tolist()], np.int64)
            self.rows[kind].append((len(self.time_s) - 1, lives[lives >= 0], rows[lives >= 0]))
            return None
        for row in rows:
            life = self.of_id.get(int(row["id"]))
            if life is not None:
                self._note(self.lives[life], kind, row)
        return None

    def _note(self, life: Life, kind: int, row: np.void) -> None:
        if kind == log.EVENT_DEL:
            life.is_over = True
        elif kind == log.BOUNDING_BOX:
            life.box = np.concatenate([row["origin"], row["extent"]]).astype(np.float64)
        else:
            life.trigger = np.concatenate([row["origin"], row["extent"]]).astype(np.float64)

    def dense(self, kind: int, names: tuple[str, ...], lives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``float64[step, life, columns]`` of these lives' rows, 0 where there is no finite one, and where there is one."""
        slot = np.full(len(self.lives) + 1, -1, np.int64)
        slot[lives] = np.arange(len(lives))
        width = sum(log.ROWS[kind][name].shape[0] if log.ROWS[kind][name].shape else 1 for name in names)
        values = np.zeros((len(self.time_s), len(lives), width))
        present = np.zeros(values.shape[:2], np.bool_)
        for step, of, rows in self.rows[kind]:
            slots = slot[of]
            kept = slots >= 0
            chosen = rows[kept]
            columns = [chosen[name] if chosen[name].ndim == 2 else chosen[name][:, None] for name in names]
            found = np.concatenate(columns, axis=1).astype(np.float64)
            is_finite = np.isfinite(found).all(axis=1)
            values[step, slots[kept][is_finite]] = found[is_finite]
            present[step, slots[kept][is_finite]] = True
        return values, present

    def ego_signals(self, ego_id: int) -> dict[str, np.ndarray]:
        """Return the reader's signals at every frame, NaN where the ego was not there."""
        ego = np.array([self.ego(ego_id)])
        position, there = (part[:, 0] for part in self.dense(log.POSITION, ("location", "rotation"), ego))
        motion, moving = (part[:, 0] for part in self.dense(log.KINEMATICS, ("velocity", "angular_velocity"), ego))
        names = ("steer", "throttle", "brake", "hand_brake", "gear")
        control, driven = (part[:, 0] for part in self.dense(log.ANIM_VEHICLE, names, ego))
        position[~there], motion[~moving], control[~driven] = np.nan, np.nan, np.nan
        velocity = flip_y(motion[:, :3])
        return {
            "ego_position": flip_y(position[:, :3]) / 100.0,
            "ego_rotation": rotation_rad(position[:, 3], position[:, 4], position[:, 5]),
            "ego_velocity": velocity,
            "ego_angular_velocity": np.radians(-flip_y(motion[:, 3:])),  # an axial vector: what y keeps, x and z change
            "speed": np.linalg.norm(velocity, axis=1),
            **{name: control[:, column] for column, name in enumerate(names)},
            "simulator_frame": np.array(self.frame, np.float64),
            "timestamp_s": np.array(self.time_s) - self.time_s[0] if self.time_s else np.zeros(0),
        }

    def ego(self, ego_id: int) -> int:
        """Return the ego's first life."""
        for number, life in enumerate(self.lives):
            if life.actor.id == ego_id and life.actor.kind == log.VEHICLE:
                return number
        raise SourceError(
            f"expected the vehicle {ego_id}, found none before the last step asked for; index the log again"
        )


def read_recording(file: BinaryIO, nbytes: int, num_steps: int) -> Recording:
    """Read ``num_steps`` whole frames from ``file``, which stands at its first packet."""
    recording = Recording()
    if num_steps == 0:
        return recording
    for kind, content in log.packets(file, nbytes, _WANTED):
        if kind == log.FRAME_START:
            number, _, elapsed_s = log.frame_start(content)
            recording.frame.append(number)
            recording.time_s.append(elapsed_s)
        elif kind == log.FRAME_END:
            if len(recording.time_s) >= num_steps:
                break
        elif recording.time_s:
            recording.take(kind, content)
    return recording


def recording_tracks(recording: Recording, ego_id: int, town: str) -> Tracks:
    """Turn a recording into tracks: right-handed, m, s, rad; box centres; velocities as recorded, accelerations by difference."""
    lives = recording.lives
    ego = recording.ego(ego_id)
    moving = [n for n, life in enumerate(lives) if n != ego and _is_tracked(life)]
    time_s = np.array(recording.time_s) - recording.time_s[0]
    if len(time_s) * (len(moving) + 1) * _NBYTES_A_ROW > MAX_TRACKS_NBYTES:
        raise SourceError(
            f"expected tracks of at most {MAX_TRACKS_NBYTES} bytes, found {len(time_s)} frames of {len(moving)} actors; record shorter logs",
            Reason.TOO_LARGE,
        )
    if not np.all(np.diff(time_s) > 0):
        raise SourceError(
            "expected frames in the order of their time, found others; record it again", Reason.TIME_ORDER
        )
    every = np.array([ego, *moving])
    pose, present = recording.dense(log.POSITION, ("location", "rotation"), every)
    position, rotation = flip_y(pose[..., :3]) / 100.0, rotation_rad(pose[..., 3], pose[..., 4], pose[..., 5])
    velocity = _velocity(recording, every, position, present, time_s)
    classes = [_class_of(lives[n]) for n in moving]
    (ego_length, ego_width), *sizes = [
        size_m(_box_extent(lives[n]), kind, lives[n].actor.blueprint)
        for n, kind in zip(every.tolist(), [ActorClass.VEHICLE, *classes])
    ]
    size = np.array(sizes, np.float64).reshape(-1, 2)
    shift = np.array([_box_origin(lives[n]) for n in moving]).reshape(-1, 3)
    center = position[:, 1:] + turn_vectors(rotation[:, 1:], np.broadcast_to(shift, position[:, 1:].shape))
    return Tracks(
        town=town,
        ego_model=lives[ego].actor.blueprint,
        time_s=time_s,
        source_step=np.arange(len(time_s)),
        is_interpolated=np.zeros(len(time_s), np.bool_),
        is_break=np.zeros(len(time_s), np.bool_),
        ego_length_m=float(ego_length),
        ego_width_m=float(ego_width),
        ego_valid=present[:, 0].copy(),
        ego_position=position[:, 0],
        ego_rotation=rotation[:, 0] * present[:, :1],
        ego_velocity=velocity[:, 0],
        ego_acceleration=differentiate(velocity[:, 0], time_s, present[:, 0]),
        actor_id=np.array([lives[n].actor.id for n in moving], np.int64),
        actor_class=np.array(classes, np.int8),
        actor_length_m=size[:, 0],
        actor_width_m=size[:, 1],
        actor_valid=present[:, 1:],
        actor_position=center * present[:, 1:, None],
        actor_heading=rotation[:, 1:, 2] * present[:, 1:],
        actor_velocity=velocity[:, 1:],
        **_lights(recording),
    )


def _is_tracked(life: Life) -> bool:
    return life.actor.kind in _CLASSES - {log.OTHER} or life.actor.blueprint.startswith("static.prop")


def _class_of(life: Life) -> ActorClass:
    actor = life.actor
    if actor.kind == log.WALKER:
        return ActorClass.PEDESTRIAN
    if actor.kind == log.VEHICLE:
        return vehicle_class(actor.blueprint, wheels=actor.attributes.get("number_of_wheels", ""))
    return static_class(actor.attributes.get("mesh_path", "") or actor.blueprint)


def _box_extent(life: Life) -> np.ndarray | None:
    """Return half of length, width and height, m; None where the log has no sound box."""
    if life.box is None or not np.isfinite(life.box).all() or not (life.box[3:5] > 0).all():
        return None
    return life.box[3:] / 100.0


def _box_origin(life: Life) -> np.ndarray:
    """Return the box's centre from the actor's origin, m; the origin itself where the log has no sound box."""
    known = _box_extent(life) is not None and life.box is not None
    return flip_y(life.box[:3]) / 100.0 if known and life.box is not None else np.zeros(3)


def _velocity(
    recording: Recording, lives: np.ndarray, position: np.ndarray, present: np.ndarray, time_s: np.ndarray
) -> np.ndarray:
    """Return velocities in the plane as recorded; where a frame has none, as the first has not, by difference."""
    motion, known = recording.dense(log.KINEMATICS, ("velocity",), lives)
    by_difference = differentiate(position[..., :2], time_s, present)
    return np.where(known[..., None], flip_y(motion)[..., :2], by_difference) * present[..., None]


def _lights(recording: Recording) -> dict[str, Any]:
    lives = recording.lives
    lights = np.array([n for n, life in enumerate(lives) if life.actor.kind == log.LIGHT], np.int64)
    state, known = recording.dense(log.STATE, ("state",), lights)
    table = np.array([*LIGHT_STATES, LightState.UNKNOWN], np.int8)
    names = table[np.minimum(state[..., 0].astype(np.int64), len(LIGHT_STATES))]
    # A light keeps its last recorded state; before the first one it is unknown.
    last = np.maximum.accumulate(np.where(known, np.arange(len(known))[:, None], -1), axis=0)
    held = np.take_along_axis(names, np.maximum(last, 0), axis=0)
    poses = [(lives[n].actor.location_cm, lives[n].actor.rotation_deg) for n in lights.tolist()]
    location = flip_y(np.array([pose[0] for pose in poses]).reshape(-1, 3)) / 100.0
    rotation = rotation_rad(*np.array([pose[1] for pose in poses]).reshape(-1, 3).T)
    return {
        "light_id": np.array([lives[n].actor.id for n in lights.tolist()], np.int64),
        "light_signal": ("",) * len(lights),
        "light_lane": np.zeros((len(lights), 2), np.int64),
        "light_position": location,
        "light_trigger": _triggers([lives[n].trigger for n in lights.tolist()], location, rotation),
        "light_state": np.where(last >= 0, held, np.int8(LightState.UNKNOWN)).astype(np.int8),
    }


def _triggers(volumes: list[np.ndarray | None], location: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    rows = np.full((len(volumes), 5), np.nan)
    for row, volume in enumerate(volumes):
        if volume is not None and np.isfinite(volume).all() and (volume[3:5] > 0).all():
            center = location[row] + turn_vectors(rotation[row], flip_y(volume[:3]) / 100.0)
            rows[row] = (*center[:2], rotation[row, 2], volume[3] / 100.0, volume[4] / 100.0)
    return rows
