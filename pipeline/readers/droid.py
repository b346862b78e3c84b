"""DROID as it was recorded: a folder an episode, with ``trajectory.h5``, ``metadata_<uuid>.json`` and an MP4 a camera.

``docs/formats.md`` describes the layout and what is read of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, list_folder, natural_key, source_root, walk_folders
from pipeline.readers.hdf5_episodes import TIME, Arrays, place_faults, read_signals
from pipeline.readers.hdf5_files import Hdf5File, open_hdf5, require_h5py
from pipeline.readers.metadata import as_text, read_json
from pipeline.readers.records import fault_at
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SourceIndex, ViewInfo, declare_all_views

TRAJECTORY, VIDEOS, SVOS = "trajectory.h5", "recordings/MP4", "recordings/SVO"
RATE_HZ = 15.0
CLOCK = "observation/timestamp/control/step_start"
"""When each step began, in ms of Unix time."""
STATE = ("observation/robot_state/joint_positions", "observation/robot_state/gripper_position")
ACTIONS = ("action/joint_position", "action/gripper_position")
LEFT_ALONE = ("action/robot_state", "observation/image", "observation/videos", "observations")
"""Groups that hold again what others hold, or encoded pictures."""
ROLES = {"wrist": "wrist_image", "ext1": "exterior_image_1", "ext2": "exterior_image_2"}
"""Cameras as the metadata names them, and as DROID's RLDS release does."""
MAX_DEPTH = 4
FACTS = ("uuid", "lab", "user", "scene_id", "building", "robot_serial", "droid_version", "current_task", "date")
_METADATA = re.compile(r"metadata_(?P<uuid>.+)\.json")
_ANNOTATIONS = re.compile(r"(aggregated-annotations|droid_language_annotations).*\.json")
_CLOCKS = ("nominal", "recorded")


@dataclass(frozen=True, slots=True)
class DroidReader:
    """Episodes at or below ``root``, in whatever folders of laboratories, outcomes and days."""

    name: ClassVar[str] = "droid"

    root: Path
    time: str = "nominal"
    """``nominal``: steps at 15 Hz, as DROID's other releases count them; ``recorded``: when each step began."""

    def __post_init__(self) -> None:
        if self.time not in _CLOCKS:
            raise UsageError(f"expected a time of {', '.join(_CLOCKS)}, found {self.time!r}; correct it")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if an episode lies at or below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_episode(folder)), SNIFF_FOLDERS)
        found = any(isinstance(folder, Folder) and _is_episode(folder) for folder in folders)
        return "" if found else f"no folder with {TRAJECTORY} and metadata_*.json or recordings/"

    def index(self) -> SourceIndex:
        """List the episodes by their metadata, the shapes of their arrays and the headers of their videos."""
        root = source_root(self.root)
        require_h5py()
        episodes: list[EpisodeRef] = []
        folders, found = list[Folder](), _Found()
        for folder in walk_folders(root, lambda folder: not _is_episode(folder)):
            if isinstance(folder, Fault):
                found.faults.append(folder)
                continue
            found.read_annotations(root, folder)
            folders += [folder] if _is_episode(folder) else []
        for folder in folders:
            key = as_text(folder.path or root.name)
            try:
                episodes.append(_Episode(root, folder, key, found).describe())
            except SourceError as error:
                path = str(error.where.get("file", folder.join(TRAJECTORY)))
                found.fault(error.reason, error.message, key, path=path)
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(declare_all_views(episodes)),
            faults=tuple(found.faults),
            state=STATE,
            actions=ACTIONS,
            notes=found.notes(),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, reading those rows alone."""
        steps = np.asarray(steps, np.int64)
        block = read_signals(self.root, ref, names, steps, ("",))
        if self.time == "nominal" or not any(signal.name == CLOCK for signal in ref.signals):
            return block
        times = read_signals(self.root, ref, [CLOCK], np.concatenate([[0], steps]), ("",))
        ms = times.values[CLOCK].reshape(-1).astype(np.float64)
        faults = block.faults + tuple(fault for fault in times.faults if fault not in block.faults)
        return SignalBlock(values={**block.values, TIME.name: (ms[1:] - ms[0]) / 1e3}, faults=faults)

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield each step's frame, decoded in one pass; of a video of both eyes its own half."""
        from pipeline.readers.video import read_source_video  # PyAV takes long to import

        steps = np.asarray(steps, np.int64)
        if not ref.view(view).present:
            error = SourceError("expected an MP4 of this camera, found none; choose another view", Reason.MISSING_FILE)
            yield from (fault_at(error, ref, step, view) for step in steps.tolist())
            return
        path, side = ref.details["videos"][view]
        for step, frame in zip(steps.tolist(), read_source_video(self.root, path, steps), strict=True):
            if isinstance(frame, Fault):
                yield replace(frame, episode=ref.key, stream=view, start=step, stop=step + 1, path=path)
            else:
                yield _half(frame, side)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the video; the trajectory where there is none."""
        return str(ref.details["videos"].get(view, [ref.details["file"]])[0])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name trajectory, metadata and videos. Annotations are left out: they are of all episodes."""
        paths = [ref.details["file"], ref.details["metadata"], *(path for path, _ in ref.details["videos"].values())]
        yield from map(Path, dict.fromkeys(path for path in paths if path))


def _is_episode(folder: Folder) -> bool:
    """Return whether a folder is an episode, or what is left of one: two of trajectory, metadata and recordings are there."""
    parts = (
        TRAJECTORY in folder.names,
        "recordings" in folder.folders,
        any(map(_METADATA.fullmatch, folder.names)),
    )
    return sum(parts) > 1


def _half(frame: np.ndarray, side: str) -> np.ndarray:
    middle = frame.shape[1] // 2
    if side == "whole":
        return frame
    return np.ascontiguousarray(frame[:, :middle] if side == "left" else frame[:, middle:])


@dataclass(slots=True)
class _Found:
    """What an index has found so far."""

    faults: list[Fault] = field(default_factory=list)
    annotations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """``uuid -> instructions``."""
    others: dict[str, None] = field(default_factory=dict)
    num_svos: int = 0

    def fault(
        self, reason: Reason, message: str, key: str = "", *, path: str = "", stream: str = "", is_warning: bool = False
    ) -> None:
        """Keep a fault."""
        found = Fault(reason=reason, message=message, episode=key, stream=stream, path=path, is_warning=is_warning)
        self.faults.append(found)

    def read_annotations(self, root: Path, folder: Folder) -> None:
        """Read the instructions that lie in a folder, of episodes anywhere."""
        for name in sorted(filter(_ANNOTATIONS.fullmatch, folder.names)):
            try:
                data = read_json(root, folder.join(name))
            except SourceError as error:
                self.fault(error.reason, error.message, path=folder.join(name))
                continue
            for uuid, texts in data.items():
                if isinstance(texts, dict):
                    said = [
                        texts[key] for key in sorted(texts, key=natural_key) if key.startswith("language_instruction")
                    ]
                    found = (as_text(text).strip() for text in said if isinstance(text, str))
                    self.annotations[uuid] = tuple(dict.fromkeys(text for text in found if text))

    def notes(self) -> tuple[str, ...]:
        """Say what was left alone."""
        notes = []
        if self.num_svos:
            notes.append(
                f"{self.num_svos} recordings are in SVO alone, which only ZED's SDK reads; make MP4 of them with DROID's svo_to_mp4.py"
            )
        if self.others:
            notes.append(f"neither videos nor rows of numbers, left alone: {', '.join(islice(self.others, 8))}")
        return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Episode:
    """One folder."""

    root: Path
    folder: Folder
    key: str
    found: _Found

    def describe(self) -> EpisodeRef:
        """Return the episode; SourceError where it has no trajectory that can be read."""
        path, facts = self.folder.join(TRAJECTORY), self._metadata()
        arrays = Arrays()
        with open_hdf5(self.root, path) as file:
            self._add(file, "", arrays, 0)
            arrays.require(ACTIONS[0], path)
            types = {serial: _camera_type(file, serial) for serial in file.names("observation/camera_type")}
        num_steps = arrays.count_steps(ACTIONS[0], path)
        if num_steps == 0:
            raise SourceError("expected 1 step or more, found none; drop the folder", Reason.EMPTY_EPISODE, file=path)
        self._check_length(facts, num_steps)
        self.found.faults += place_faults(arrays.faults, self.key)
        self.found.others.update(dict.fromkeys(arrays.others))
        views, videos = self._views(facts, types)
        uuid = str(facts.get("uuid", ""))
        return EpisodeRef(
            key=self.key,
            num_steps=num_steps,
            rate_hz=RATE_HZ,
            views=tuple(views),
            signals=(*arrays.signals, TIME),
            instructions=self.found.annotations.get(uuid, ()),
            details={
                **{name: as_text(facts[name]) for name in FACTS if isinstance(facts.get(name), str | int | float)},
                **self._success(facts),
                "folder": self.folder.path,
                "file": path,
                "metadata": facts.get("path", ""),
                "videos": videos,
            },
        )

    def _metadata(self) -> dict[str, Any]:
        names = sorted(filter(_METADATA.fullmatch, self.folder.names))
        if not names:
            message = (
                "expected metadata_<uuid>.json, found none; cameras are told by the trajectory, instructions are not"
            )
            self.found.fault(Reason.MISSING_FILE, message, self.key, path=self.folder.path, is_warning=True)
            return {}
        path = self.folder.join(names[0])
        try:
            facts = read_json(self.root, path)
        except SourceError as error:
            self.found.fault(error.reason, error.message, self.key, path=path, is_warning=True)
            facts = {}
        match = _METADATA.fullmatch(names[0])
        uuid = facts.get("uuid") if isinstance(facts.get("uuid"), str) else match["uuid"] if match else ""
        return {**facts, "uuid": uuid, "path": path}

    def _add(self, file: Hdf5File, group: str, arrays: Arrays, depth: int) -> None:
        """Take the arrays of a group and of those in it, each by its whole path."""
        if group in LEFT_ALONE or depth > MAX_DEPTH:
            arrays.others.append(group)
            return
        for name in file.names(group):
            path = f"{group}/{name}" if group else name
            if file.is_array(path):
                arrays.add(file, path, path)
            else:
                self._add(file, path, arrays, depth + 1)
        arrays.views.clear()  # pictures in the trajectory are those of the videos, smaller

    def _check_length(self, facts: Mapping[str, Any], num_steps: int) -> None:
        declared = facts.get("trajectory_length")
        if isinstance(declared, int) and not isinstance(declared, bool) and declared != num_steps:
            message = f"expected {declared} steps as the metadata says, found {num_steps}; check the copy"
            self.found.fault(Reason.COUNT_MISMATCH, message[:300], self.key, path=facts["path"], is_warning=True)

    def _success(self, facts: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether it succeeded, as the metadata says, or the folders; what contradicts itself is said."""
        parts = self.folder.path.split("/")
        placed = True if "success" in parts else False if "failure" in parts else None
        told = facts["success"] if isinstance(facts.get("success"), bool) else None
        if placed is not None and told is not None and placed != told:
            message = f"expected success {told} as the metadata says, found the episode in the other folder; the metadata counts"
            self.found.fault(Reason.BAD_METADATA, message, self.key, path=facts["path"], is_warning=True)
        answer = placed if told is None else told
        return {} if answer is None else {"success": answer}

    def _views(self, facts: Mapping[str, Any], types: Mapping[str, int]) -> tuple[list[ViewInfo], dict[str, list[str]]]:
        """Return the views, and of each its video and which part of the picture it is."""
        names = [name for name in self._files(VIDEOS) if name.lower().endswith(".mp4")]
        serials = [name[:-4].removesuffix("-stereo") for name in names]
        svos = {name.partition(".")[0] for name in self._files(SVOS) if name.lower().endswith((".svo", ".svo2"))}
        self.found.num_svos += len(svos - set(serials))
        roles = _roles(facts, types, sorted({*serials, *svos}, key=natural_key))
        views: dict[str, ViewInfo] = {}
        videos: dict[str, list[str]] = {}
        for serial, name in sorted(zip(serials, names), key=lambda pair: "-stereo" in pair[1]):  # one eye's own first
            path = self.folder.join(f"{VIDEOS}/{name}")
            for view, side in self._parts(path, roles[serial]):
                if view.name not in views:
                    views[view.name], videos[view.name] = view, [path, side]
        for role in roles.values():
            absent = ViewInfo(name=f"{role}_left", height_px=0, width_px=0, encoding="video", present=False)
            views.setdefault(absent.name, absent)
        order = [*ROLES.values()]
        key = partial(_view_order, order)
        return sorted(views.values(), key=key), videos

    def _parts(self, path: str, role: str) -> Iterator[tuple[ViewInfo, str]]:
        """Yield the left eye's view of a video, or both where they lie side by side: a picture of more than 5 to 2."""
        from pipeline.readers.video import probe_source_video

        try:
            info = probe_source_video(self.root, path)
        except SourceError as error:
            self.found.fault(error.reason, error.message, self.key, path=path, stream=f"{role}_left")
            return
        is_stereo = info.width_px > 2.5 * info.height_px
        for side in ("left", "right") if is_stereo else ("whole",):
            name = f"{role}_{'right' if side == 'right' else 'left'}"
            width = info.width_px // 2 if is_stereo else info.width_px
            yield ViewInfo(name=name, height_px=info.height_px, width_px=width, encoding="video"), side

    def _files(self, folder: str) -> list[str]:
        try:
            return sorted(list_folder(self.root, self.folder.join(folder)).names, key=natural_key)
        except SourceError:
            return []  # its cameras are views without frames


def _view_order(order: Sequence[str], view: ViewInfo) -> tuple[int, str]:
    role = view.name.rpartition("_")[0]
    return (order.index(role) if role in order else len(order)), view.name


def _roles(facts: Mapping[str, Any], types: Mapping[str, int], serials: Sequence[str]) -> dict[str, str]:
    """Return what each camera looks at: by the metadata, else by the trajectory (type 0 is the hand's), else by its number alone."""
    told = {str(facts.get(f"{role}_cam_serial", "")): name for role, name in ROLES.items()}
    wrists = [serial for serial in serials if types.get(serial) == 0]
    outside = [serial for serial in types if types[serial] != 0]
    guessed = {serial: ROLES[f"ext{number}"] for number, serial in enumerate(outside[:2], 1)}
    guessed |= dict.fromkeys(wrists[:1], ROLES["wrist"])
    taken = set(told.values()) if any(serial in told for serial in serials) else set()
    roles = {}
    for serial in serials:
        guess = guessed.get(serial, "")
        roles[serial] = told.get(serial) or (guess if guess and guess not in taken else f"camera_{as_text(serial)}")
    return roles


def _camera_type(file: Hdf5File, serial: str) -> int:
    """Return what the first step says of a camera's kind; -1 where it says nothing."""
    try:
        rows = file.rows(f"observation/camera_type/{serial}")
        return int(rows.read(*rows.block(0, 1)).reshape(-1)[0]) if rows.num_steps else -1
    except (SourceError, ValueError, IndexError, OverflowError):
        return -1  # a guess less
