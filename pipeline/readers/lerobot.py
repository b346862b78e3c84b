"""LeRobot datasets: v2.0 and v2.1, with a table and a video of each view for every episode, and v3.0, whose episodes share files.

``docs/formats.md`` describes the layout and what is read of it.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.readers.folders import Folder, inside, list_folder, source_root
from pipeline.readers.lerobot_meta import (
    INFO,
    EpisodeLine,
    Info,
    SharedFiles,
    default_columns,
    find_version,
    read_episodes,
    read_info,
    read_tasks,
    refuse_foreign_version,
)
from pipeline.readers.lerobot_rows import read_images, read_rows
from pipeline.readers.lerobot_shared import EPISODES, read_shared_episodes, read_shared_tasks
from pipeline.readers.parquet_rows import open_parquet, require_footer
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo

_NO_STOP = 2**62
MAX_TASKS = 1000
"""Tasks that an episode without tasks of its own may have one of."""
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")
INSTRUCTION = SignalInfo(name="instruction_index", shape=(), dtype="int64")


@dataclass(frozen=True, slots=True)
class LeRobotReader:
    """The dataset whose ``meta/info.json`` lies in ``root``."""

    name: ClassVar[str] = "lerobot"

    root: Path

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string for LeRobot v2 and v3, else what is missing; SourceError for a version not read yet."""
        try:
            version = find_version(root)
        except LookupError as error:
            return str(error.args[0])
        refuse_foreign_version(version)
        return ""

    def index(self) -> SourceIndex:
        """List the episodes by ``meta/`` and the names of files; a table is opened only where meta/ gives no lengths."""
        root = source_root(self.root)
        missing = self.sniff(root)
        if missing:
            raise SourceError(f"expected a LeRobot dataset, found {missing}; check the path", Reason.BAD_METADATA)
        info = read_info(root)
        faults: list[Fault] = []
        notes = list(info.notes)
        lines, tasks = _read_lines(root, info, faults, notes)
        faults += _count_fault(info, lines)
        columns = default_columns(root, info.signals, notes)
        maker = _EpisodeMaker(root, info, tasks, {}, {})
        episodes = [maker.make(line, faults) for line in lines]
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(episode for episode in episodes if episode is not None),
            faults=tuple(faults),
            state=columns["state"],
            actions=columns["actions"],
            notes=tuple(notes),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, reading those columns of the row groups that hold them."""
        return read_rows(self.root, ref, names, np.asarray(steps, np.int64))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield each step's frame: decoded from a video in one pass, or as the encoded image of a column."""
        if ref.view(view).encoding != "video":
            return read_images(self.root, ref, view, np.asarray(steps, np.int64))
        if view in ref.details["videos"]:
            return self._video_frames(ref, view, np.asarray(steps, np.int64))
        message = f"expected a video of {view!r}, found that {EPISODES} places none in a file; use another view"
        fault = Fault(reason=Reason.MISSING_FILE, message=message)
        return (_placed(fault, ref, view, int(step), EPISODES) for step in steps)

    def _video_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        from pipeline.readers.video import read_source_video  # PyAV takes long to import, and indexing needs none of it

        path = ref.details["videos"][view]
        first, stop = ref.details.get("video_frames", {}).get(view, (0, _NO_STOP))
        own = steps[: int(np.searchsorted(steps, stop - first))]
        for step, frame in zip(own.tolist(), read_source_video(self.root, path, own + first), strict=True):
            yield _placed(frame, ref, view, step, path) if isinstance(frame, Fault) else frame
        message = (
            f"expected frame {{}}, found that meta/ gives the episode {stop - first} frames of the video; check it"
        )
        for step in steps[len(own) :].tolist():  # what follows in the file is the next episode
            yield _placed(Fault(reason=Reason.COUNT_MISMATCH, message=message.format(step)), ref, view, step, path)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the video, or the table that holds the images."""
        return str(ref.details["videos"].get(view, ref.details["data"]))

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the table and the videos. ``meta/`` is left out: a new episode changes it, and no other episode with it."""
        yield Path(ref.details["data"])
        for view in ref.views:
            if view.present and view.name in ref.details["videos"]:
                yield Path(ref.details["videos"][view.name])


def _placed(fault: Fault, ref: EpisodeRef, view: str, step: int, path: str) -> Fault:
    return replace(fault, episode=ref.key, stream=view, start=step, stop=step + 1, path=path)


@dataclass(frozen=True, slots=True)
class _EpisodeMaker:
    """Makes episodes of one dataset; each folder of files is listed once, however many episodes share it."""

    root: Path
    info: Info
    tasks: Mapping[int, str]
    listed: dict[str, frozenset[str]]
    unfinished: dict[str, SourceError | None]
    """Shared tables whose ends were looked at, and what is wrong with them."""

    def make(self, line: EpisodeLine, faults: list[Fault]) -> EpisodeRef | None:
        """Return the episode of a line of ``meta/``, or None and a fault."""
        key, shared = f"episode_{line.index:06d}", line.shared
        data = self.info.path(self.info.data_path, line.index, file=shared.data if shared else (0, 0))
        refused = self._refusal(line, data)
        if refused is not None:
            faults.append(Fault(reason=refused.reason, message=refused.message, episode=key, path=data))
            return None
        videos = self._videos(line)
        instructions, task_indices = self._instructions(line)
        return EpisodeRef(
            key=key,
            num_steps=line.num_steps,
            rate_hz=self.info.rate_hz,
            views=tuple(self._view(view, videos) for view in self.info.views),
            signals=(*self.info.signals, TIME, *([INSTRUCTION] if task_indices else [])),
            instructions=instructions,
            details={
                **line.facts,
                "episode_index": line.index,
                "data": data,
                "videos": videos,
                "task_indices": task_indices,
                "robot_type": self.info.robot_type,
                "version": self.info.version,
                **({} if shared is None else _shared_details(shared)),
            },
        )

    def _refusal(self, line: EpisodeLine, data: str) -> SourceError | None:
        if line.num_steps == 0:
            message = "expected an episode of 1 step or more, found length 0 in meta/; drop it"
            return SourceError(message, Reason.EMPTY_EPISODE)
        if not self._exists(data):
            message = (
                "expected the data file of an episode in meta/, found none; complete the download, or drop the episode"
            )
            return SourceError(message, Reason.MISSING_FILE)
        if line.shared is None:
            return None  # its only episode says so when it is read
        if data not in self.unfinished:
            try:
                require_footer(self.root, data)
                self.unfinished[data] = None
            except SourceError as error:
                self.unfinished[data] = error
        return self.unfinished[data]

    def _videos(self, line: EpisodeLine) -> dict[str, str]:
        names = [view.name for view in self.info.views if view.encoding == "video"]
        if line.shared is None:
            return {name: self.info.path(self.info.video_path, line.index, name) for name in names}
        places = line.shared.videos
        return {
            name: self.info.path(self.info.video_path, line.index, name, file=places[name].file)
            for name in names
            if name in places
        }

    def _view(self, view: ViewInfo, videos: Mapping[str, str]) -> ViewInfo:
        present = self._exists(videos[view.name]) if view.name in videos else view.encoding != "video"
        return view if present else replace(view, present=False)

    def _instructions(self, line: EpisodeLine) -> tuple[tuple[str, ...], list[int]]:
        """Return the episode's tasks and, at the same places, their task_index; no indices where they cannot be told."""
        if line.tasks:
            index_of = {task: index for index, task in self.tasks.items()}
            known = all(task in index_of for task in line.tasks)
            return line.tasks, [index_of[task] for task in line.tasks] if known else []
        if 0 < len(self.tasks) <= MAX_TASKS:
            return tuple(self.tasks.values()), list(self.tasks)
        return (), []

    def _exists(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        if folder not in self.listed:
            try:
                inside(self.root, folder)
                self.listed[folder] = list_folder(self.root, folder).files
            except SourceError:
                self.listed[folder] = frozenset()
        return name in self.listed[folder]


def _shared_details(shared: SharedFiles) -> dict[str, object]:
    frames = {name: [place.start, place.stop] for name, place in shared.videos.items()}
    return {"first_row": shared.first_row, "video_frames": frames}


def _read_lines(
    root: Path, info: Info, faults: list[Fault], notes: list[str]
) -> tuple[list[EpisodeLine], dict[int, str]]:
    """Return what ``meta/`` says of each episode, and the tasks; the layout is the one found, whatever version is declared."""
    views = [view.name for view in info.views if view.encoding == "video"]
    if os.path.isdir(root / EPISODES):
        lines = read_shared_episodes(root, views, info.rate_hz, faults)
        return lines, read_shared_tasks(root, faults)
    if info.shares_files:
        raise SourceError(
            f"expected {EPISODES}, which says where episodes lie in shared files, found none; complete the download",
            Reason.MISSING_FILE,
            file=EPISODES,
        )
    if os.path.lexists(root / "meta/episodes.jsonl"):
        lines = read_episodes(root, faults)
        faults += _unnamed(root, {line.index for line in lines})
        return lines, read_tasks(root, faults)
    notes.append("meta/episodes.jsonl is missing; episodes and lengths come from the data files")
    return _lines_from_data(root, faults), read_tasks(root, faults)


def _count_fault(info: Info, lines: Sequence[EpisodeLine]) -> list[Fault]:
    """Say that episodes are missing altogether: those that even ``meta/`` does not name."""
    if len(lines) >= info.total_episodes:
        return []
    message = f"expected {info.total_episodes} episodes as info.json says, found {len(lines)}; complete the download"
    return [Fault(reason=Reason.MISSING_FILE, message=message, path=INFO)]


def _key(index: int) -> str:
    return f"episode_{index:06d}"


def _data_files(root: Path, faults: list[Fault]) -> Iterator[tuple[str, int]]:
    """Yield ``data/*/episode_*.parquet`` with the numbers of their episodes."""
    for chunk in sorted(_list(root, "data", faults).folders):
        for name in sorted(_list(root, f"data/{chunk}", faults).files):
            if match := re.fullmatch(r"episode_(\d{1,9})\.parquet", name, re.ASCII):
                yield f"data/{chunk}/{name}", int(match[1])


def _unnamed(root: Path, named: Set[int]) -> list[Fault]:
    """Say which data files are of episodes that ``meta/episodes.jsonl`` does not name, as where it was cut at the end of a line."""
    message = "expected a line of meta/episodes.jsonl for each data file, found none for this one; restore the file"
    return [
        Fault(reason=Reason.BAD_METADATA, message=message, episode=_key(index), path=path)
        for path, index in _data_files(root, [])
        if index not in named
    ]


def _lines_from_data(root: Path, faults: list[Fault]) -> list[EpisodeLine]:
    """List ``data/*/episode_*.parquet`` and ask each footer for its length."""
    lines = []
    for path, index in _data_files(root, faults):
        try:
            with open_parquet(root, path) as file:
                lines.append(EpisodeLine(index, file.metadata.num_rows, None))
        except SourceError as error:
            faults.append(Fault(reason=error.reason, message=error.message, episode=_key(index), path=path))
    return sorted(lines, key=lambda line: line.index)


def _list(root: Path, path: str, faults: list[Fault]) -> Folder:
    try:
        inside(root, path)
        return list_folder(root, path)
    except SourceError as error:
        faults.append(Fault(reason=error.reason, message=error.message, path=path))
        return Folder(path, frozenset(), frozenset())
