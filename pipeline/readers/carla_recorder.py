"""CARLA's binary recorder logs: every actor and light of the simulation at every frame, no images.

``docs/formats.md`` describes the layout and what is read of it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from pipeline.readers.carla_log import (
    EVENT_ADD,
    FRAME_END,
    FRAME_START,
    VEHICLE,
    Added,
    added_actors,
    frame_start,
    packets,
    read_header,
)
from pipeline.readers.carla_recording import Recording, read_recording, recording_tracks
from pipeline.readers.folders import (
    SNIFF_FOLDERS,
    Folder,
    misplaced,
    natural_key,
    open_inside,
    source_root,
    walk_folders,
)
from schemas.errors import Reason, SourceError, locate
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex
from schemas.tracks import Tracks

SUFFIXES = (".log", ".rec")
MAX_LOG_NBYTES = 2**34
_XYZ = ("x", "y", "z")

SIGNALS = (
    SignalInfo(name="ego_position", shape=(3,), dtype="float64", names=_XYZ, units="m"),
    SignalInfo(name="ego_rotation", shape=(3,), dtype="float64", names=("roll", "pitch", "yaw"), units="rad"),
    SignalInfo(name="ego_velocity", shape=(3,), dtype="float64", names=_XYZ, units="m/s"),
    SignalInfo(name="ego_angular_velocity", shape=(3,), dtype="float64", names=_XYZ, units="rad/s"),
    SignalInfo(name="speed", shape=(), dtype="float64", units="m/s"),
    SignalInfo(name="steer", shape=(), dtype="float64"),
    SignalInfo(name="throttle", shape=(), dtype="float64"),
    SignalInfo(name="brake", shape=(), dtype="float64"),
    SignalInfo(name="hand_brake", shape=(), dtype="float64"),
    SignalInfo(name="gear", shape=(), dtype="float64"),
    SignalInfo(name="simulator_frame", shape=(), dtype="float64"),
    SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s"),
)
"""Of the ego, in the frame of :mod:`schemas.tracks`; float64, so that a frame without it is NaN."""


@dataclass(frozen=True, slots=True)
class CarlaRecorderReader:
    """Recorder logs below ``root``; one log is one episode, seen from the vehicle whose role is the first of ``roles`` there is."""

    name: ClassVar[str] = "carla-recorder"

    root: Path
    roles: tuple[str, ...] = ("hero", "ego_vehicle")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a recorder log lies below ``root``, else what is missing."""
        for folder in islice(walk_folders(root, lambda _: True), SNIFF_FOLDERS):
            if isinstance(folder, Folder) and any(_is_log(root, path) for path in _candidates(folder)):
                return ""
        return "no .log or .rec file that begins as CARLA's recorder writes it"

    def index(self) -> SourceIndex:
        """List the logs: one pass from packet to packet, of which only frame starts and new actors are looked into."""
        root = source_root(self.root)
        episodes: list[EpisodeRef] = []
        faults: list[Fault] = []
        for folder in walk_folders(root, lambda _: True):
            if isinstance(folder, Fault):
                faults.append(folder)
                continue
            faults += misplaced(folder, SUFFIXES)
            for path in _candidates(folder):
                if not _is_log(root, path):
                    continue  # a text log beside the recordings
                try:
                    episodes.append(self._describe(path, faults))
                except SourceError as error:
                    faults.append(Fault(reason=error.reason, message=error.message, episode=_key(path), path=path))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(episodes),
            faults=tuple(faults),
            state=("speed", "ego_velocity", "ego_angular_velocity"),
            actions=("steer", "throttle", "brake"),
        )

    def _describe(self, path: str, faults: list[Fault]) -> EpisodeRef:
        times_s: list[float] = []
        num_steps = 0
        heroes: dict[str, Added] = {}
        with _open_log(self.root, path) as (file, nbytes):
            header = read_header(file)
            for kind, content in packets(file, nbytes, frozenset((FRAME_START, FRAME_END, EVENT_ADD))):
                if kind == FRAME_START:
                    times_s.append(frame_start(content)[2])
                elif kind == FRAME_END:
                    num_steps = len(times_s)  # a frame without an end was cut off
                else:
                    for actor in added_actors(content):
                        if actor.kind == VEHICLE:
                            heroes.setdefault(actor.attributes.get("role_name", ""), actor)
            is_cut = len(times_s) > num_steps or file.tell() != nbytes
        if num_steps == 0:
            raise SourceError("expected frames, found none that is whole; record it again", Reason.EMPTY_EPISODE)
        hero = next((heroes[role] for role in self.roles if role in heroes), None)
        if hero is None:
            found = sorted(role for role in heroes if role)
            raise SourceError(
                f"expected a vehicle with role {' or '.join(self.roles)}, found {found}; name the ego's role",
                Reason.BAD_METADATA,
            )
        if is_cut:
            message = f"expected a log that ends with a whole frame, found it cut off after {num_steps}; these are read"
            faults.append(
                Fault(reason=Reason.TRUNCATED, message=message, episode=_key(path), path=path, is_warning=True)
            )
        return EpisodeRef(
            key=_key(path),
            num_steps=num_steps,
            rate_hz=_rate_hz(np.array(times_s[:num_steps])),
            views=(),
            signals=SIGNALS,
            details={
                "file": path,
                "town": header.town,
                "version": header.version,
                "ego_id": hero.id,
                "ego_type": hero.blueprint,
            },
        )

    def read_recording(self, ref: EpisodeRef, stop: int) -> Recording:
        """Parse the first ``stop`` frames of a log."""
        return _parse(self.root, ref.details["file"], min(stop, ref.num_steps))

    def read_tracks(self, ref: EpisodeRef) -> Tracks:
        """Return the tracks of all vehicles, walkers and props, and the states of all lights, at the recorded frames."""
        with locate(episode=ref.key):
            return recording_tracks(self.read_recording(ref, ref.num_steps), ref.details["ego_id"], ref.details["town"])

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. A log is parsed once a process, a damaged one up to the last of ``steps``."""
        wanted = [ref.signal(name).name for name in names]
        steps = np.asarray(steps, np.int64)
        rows = self._ego_rows(ref, int(steps.max()) + 1 if len(steps) else 0)
        values = {name: rows[name][steps] for name in {*wanted, "timestamp_s"}}
        absent = np.unique(steps[np.isnan(rows["ego_position"][steps, 0])])
        faults = tuple(
            Fault(reason=Reason.NON_FINITE, message="expected the ego in the frame, found none; it was not spawned yet, or destroyed",
                  episode=ref.key, start=int(run[0]), stop=int(run[-1]) + 1, path=ref.details["file"])
            for run in np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1) if len(run) and set(wanted) - {"timestamp_s", "simulator_frame"}
        )  # fmt: skip
        return SignalBlock(values=values, faults=faults)

    def _ego_rows(self, ref: EpisodeRef, stop: int) -> Mapping[str, np.ndarray]:
        path = ref.details["file"]
        with _open_log(self.root, path) as (file, nbytes):
            version = nbytes, os.fstat(file.fileno()).st_mtime_ns
        try:
            return _whole_ego_rows(self, path, (ref.num_steps, ref.details["ego_id"]), version)
        except SourceError:  # what lies before the damage is served
            return self.read_recording(ref, stop).ego_signals(ref.details["ego_id"])

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Refuse: a recorder log has no views."""
        ref.view(view)
        return iter(())

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the log."""
        return str(ref.details["file"])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the log."""
        yield Path(ref.details["file"])


def _parse(root: Path, path: str, num_steps: int) -> Recording:
    with _open_log(root, path) as (file, nbytes):
        read_header(file)
        return read_recording(file, nbytes, num_steps)


@lru_cache(maxsize=8)
def _whole_ego_rows(
    reader: CarlaRecorderReader, path: str, ego: tuple[int, int], version: tuple[int, int]
) -> Mapping[str, np.ndarray]:
    """Return the signals of a whole log; kept by process, since each block of an episode asks for them. 0.2 kB a frame."""
    num_steps, ego_id = ego
    rows = _parse(reader.root, path, num_steps).ego_signals(ego_id)
    for values in rows.values():
        values.setflags(write=False)
    return rows


def _key(path: str) -> str:
    return os.path.splitext(path)[0]


def _candidates(folder: Folder) -> list[str]:
    names = [name for name in folder.files if name.lower().endswith(SUFFIXES)]
    return [folder.join(name) for name in sorted(names, key=natural_key)]


def _is_log(root: Path, path: str) -> bool:
    try:
        with _open_log(root, path) as (file, _):
            return file.read(18)[4:] == b"CARLA_RECORDER"
    except SourceError:
        return False


@contextmanager
def _open_log(root: Path, path: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a log, place errors at it, and close it."""
    with locate(file=path), os.fdopen(open_inside(root, path), "rb", buffering=2**20) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MAX_LOG_NBYTES:
            raise SourceError(
                f"expected at most {MAX_LOG_NBYTES} bytes, found {nbytes}; record shorter logs", Reason.TOO_LARGE
            )
        try:
            yield file, nbytes
        except OSError as error:
            raise SourceError(
                f"expected a readable file, found: {error.strerror}; check the disk", Reason.IO
            ) from error


def _rate_hz(times_s: np.ndarray) -> float:
    """Return the rate of evenly spaced frames, 0 where the simulator's step varied."""
    steps_s = np.diff(times_s)
    if len(steps_s) == 0 or not steps_s.min() > 0 or np.ptp(steps_s) > 1e-4:
        return 0.0
    return float(round(1.0 / np.median(steps_s), 6))
