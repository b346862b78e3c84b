"""What the ``meta/`` folder of a LeRobot dataset says, read with the tolerance that foreign writers need."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from pipeline.readers.metadata import as_rate, as_text, line_fault, read_json, read_lines
from schemas.errors import Reason, SourceError
from schemas.source import Fault, SignalInfo, ViewInfo

INFO = "meta/info.json"
MAX_ROW_SIZE = 2**16
"""Greatest number of elements of one row of a signal."""
MAX_STEPS = 2**31
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
SHARED_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
"""From v3.0 on, many episodes share a file."""
SHARED_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CHUNKS_SIZE = 1000

OWN_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index", "timestamp_s", "instruction_index")
"""Columns that say where a row stands, and names that every reader offers itself: no signals."""

_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_SHARED_FIELDS = {"chunk_index", "file_index"}
_FIELDS = {"episode_chunk", "episode_index", "video_key"} | _SHARED_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """``meta/info.json``, checked."""

    version: str
    rate_hz: float
    """0 where the file gives none."""
    total_episodes: int
    """0 where the file gives none."""
    chunks_size: int
    data_path: str
    video_path: str
    robot_type: str
    views: tuple[ViewInfo, ...]
    signals: tuple[SignalInfo, ...]
    notes: tuple[str, ...]

    def path(self, template: str, episode_index: int, video_key: str = "", *, file: tuple[int, int] = (0, 0)) -> str:
        """Fill a path template of this dataset; ``file`` is the chunk and number of a file that episodes share."""
        return template.format(
            episode_chunk=episode_index // self.chunks_size,
            episode_index=episode_index,
            chunk_index=file[0],
            file_index=file[1],
            video_key=video_key,
        )

    @property
    def shares_files(self) -> bool:
        """Whether the path of a table names a file of many episodes, and not an episode."""
        return any(field in _SHARED_FIELDS for _, field, _, _ in Formatter().parse(self.data_path))


def find_version(root: Path) -> str:
    """Return ``codebase_version``, "" where info.json does not say, "v1" for that layout; LookupError where it is none."""
    if os.path.isfile(root / "meta_data" / "info.json"):
        return "v1"
    if not os.path.isfile(root / INFO):
        raise LookupError(f"no {INFO}{_hint(root)}")
    version = read_json(root, INFO).get("codebase_version")
    return version if isinstance(version, str) else ""


def _hint(root: Path) -> str:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if os.path.isfile(os.path.join(entry.path, INFO)))
    except OSError:
        return ""  # an unreadable root has been refused before
    return f", but one in {names[0]!a}: open that folder" if names else ""


def refuse_foreign_version(version: str) -> None:
    """Raise SourceError unless ``version`` is 2.0, 2.1, 3.0 or unsaid."""
    if version and not re.fullmatch(r"v?([23]|(2\.[01]|3\.0)(\.\d+)?)", version):
        raise SourceError(
            f"expected LeRobot v2.0, v2.1 or v3.0, found {version[:20]}, which is not read yet; convert it meanwhile",
            Reason.UNSUPPORTED,
        )


def read_info(root: Path) -> Info:
    """Read and check ``meta/info.json``; SourceError only where nothing can be read without it."""
    data = read_json(root, INFO)
    version = data.get("codebase_version")
    refuse_foreign_version(version if isinstance(version, str) else "")
    notes = [] if isinstance(version, str) else ["info.json names no codebase_version; read as LeRobot v2"]
    features = data.get("features")
    if not isinstance(features, dict):
        raise SourceError(f"expected `features` in {INFO}, found {str(features)[:40]}; restore the file", file=INFO)
    views, signals, others = _features(features)
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        notes.append(
            f"{len(others)} columns that are neither numeric nor images were left alone, never unpickled: {shown}"
        )
    rate_hz = as_rate(data.get("fps"))
    if not rate_hz:
        found = str(data.get("fps"))[:20]
        notes.append(f"expected a positive fps in info.json, found {found}; times come from the timestamp column alone")
    total = data.get("total_episodes")
    is_shared = isinstance(version, str) and version.removeprefix("v").startswith("3")
    data_path, video_path = (SHARED_DATA_PATH, SHARED_VIDEO_PATH) if is_shared else (DATA_PATH, VIDEO_PATH)
    chunks_size = data.get("chunks_size", CHUNKS_SIZE)
    if type(chunks_size) is not int or chunks_size < 1:
        notes.append(f"expected a positive chunks_size in info.json, found {str(chunks_size)[:20]}; took {CHUNKS_SIZE}")
        chunks_size = CHUNKS_SIZE
    return Info(
        version=version if isinstance(version, str) else "",
        rate_hz=rate_hz,
        total_episodes=total if type(total) is int and total > 0 else 0,
        chunks_size=chunks_size,
        data_path=_template(data.get("data_path"), data_path, "data_path", notes),
        video_path=_template(data.get("video_path"), video_path, "video_path", notes if views else []),
        robot_type=as_text(data.get("robot_type") or ""),
        views=views,
        signals=signals,
        notes=tuple(notes),
    )


def _template(value: Any, default: str, key: str, notes: list[str]) -> str:
    """Return a path template that only names what a path may name: a format string can do more than that."""
    if value is None:
        notes.append(f"info.json has no {key}; took {default}")
        return default
    try:
        parts = list(Formatter().parse(value))
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"expected a path template in {key}, found {str(value)[:80]!r}; restore {INFO}", file=INFO
        ) from error
    for _, name, spec, conversion in parts:
        if name is not None and (
            name not in _FIELDS or conversion or not re.fullmatch(r"(0?\d{1,2}d?)?", spec or "", re.ASCII)
        ):
            message = f"expected only {sorted(_FIELDS)} in {key}, found {str(value)[:80]!r}; restore {INFO}"
            raise SourceError(message, file=INFO)
        if name == "video_key" and spec:
            raise SourceError(
                f"expected a plain {{video_key}} in {key}, found {str(value)[:80]!r}; restore {INFO}", file=INFO
            )
    return str(value)


def _features(features: Mapping[str, Any]) -> tuple[tuple[ViewInfo, ...], tuple[SignalInfo, ...], list[str]]:
    views, signals, others = [], [], []
    for key, feature in features.items():
        dtype = str(feature.get("dtype")) if isinstance(feature, dict) else ""
        shape = _shape(feature) if isinstance(feature, dict) else None
        if as_text(key) != key:
            others.append(as_text(key))
        elif dtype in ("video", "image"):
            views.append(_view(key, feature, shape or ()))
        elif dtype in _DTYPES and shape is not None and math.prod(shape) <= MAX_ROW_SIZE:
            if key not in OWN_COLUMNS:
                signals.append(_signal(key, feature, shape))
        else:
            others.append(key)
    return tuple(views), tuple(signals), others


def _shape(feature: Mapping[str, Any]) -> tuple[int, ...] | None:
    shape = feature.get("shape")
    shape = [shape] if type(shape) is int else shape
    if not isinstance(shape, list) or any(type(side) is not int or side < 0 for side in shape):
        return None
    return tuple(shape)


def _view(key: str, feature: Mapping[str, Any], shape: tuple[int, ...]) -> ViewInfo:
    """Find height and width by the names of the axes, else by the axis that has the size of channels."""
    info = feature.get("info") or feature.get("video_info") or {}
    info = info if isinstance(info, dict) else {}
    names = [name.lower() for name in flat_names(feature.get("names"))]
    height = width = 0
    if len(shape) == 2:
        height, width = shape
    elif len(shape) == 3:
        axis = next((axis for axis, name in enumerate(names) if name.startswith("channel") and len(names) == 3), -1)
        if axis < 0:
            axis = next((axis for axis in (2, 0, 1) if shape[axis] in (1, 3, 4)), 2)
        height, width = (side for k, side in enumerate(shape) if k != axis)
        if "width" in names and "height" in names and names.index("width") < names.index("height"):
            height, width = width, height
    is_depth = info.get("video.is_depth_map") is True or info.get("is_depth_map") is True
    encoding = "video" if feature["dtype"] == "video" else "png"
    return ViewInfo(name=key, height_px=height, width_px=width, encoding=encoding, kind="depth" if is_depth else "rgb")


def _signal(key: str, feature: Mapping[str, Any], shape: tuple[int, ...]) -> SignalInfo:
    shape = () if shape in ((), (1,)) else shape
    names = flat_names(feature.get("names"))
    return SignalInfo(
        name=key, shape=shape, dtype=str(feature["dtype"]), names=names if len(names) == math.prod(shape) else ()
    )


def flat_names(names: Any) -> tuple[str, ...]:
    """Flatten ``names`` of any shape that writers use: a list, a list of lists, a dict of lists, or nothing.

    >>> flat_names({"motors": ["shoulder", "elbow"]}), flat_names([["a", "b"]]), flat_names(None)
    (('shoulder', 'elbow'), ('a', 'b'), ())
    """
    found: list[str] = []
    pending = [names]
    while pending:
        value = pending.pop(0)
        if isinstance(value, str):
            found.append(as_text(value))
        elif isinstance(value, dict):
            pending = (
                [*value.values(), *pending] if any(isinstance(v, list) for v in value.values()) else [*value, *pending]
            )
        elif isinstance(value, list):
            pending = [*value, *pending]
    return tuple(found)


def read_tasks(root: Path, faults: list[Fault]) -> dict[int, str]:
    """Read ``task_index -> task`` of ``tasks.jsonl``; empty where there is no such file."""
    path = "meta/tasks.jsonl"
    tasks: dict[int, str] = {}
    if not os.path.lexists(root / path):
        return tasks
    for number, line in read_lines(root, path, faults):
        index, task = line.get("task_index"), line.get("task")
        if type(index) is int and isinstance(task, str):
            tasks[index] = as_text(task)
        else:
            faults.append(line_fault(path, number, "expected task_index and task"))
    return tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlace:
    """Where an episode lies in a video that it shares with others."""

    file: tuple[int, int]
    """Chunk and number of the file."""
    start: int
    """Number of its first frame in the video."""
    stop: int
    """One past its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFiles:
    """Where an episode of v3.0 lies in files that it shares with others."""

    data: tuple[int, int]
    """Chunk and number of the table."""
    first_row: int
    """Its first row in the table by ``dataset_from_index``, -1 where that does not say: the table's own ``episode_index`` counts."""
    videos: Mapping[str, VideoPlace]
    """By the name of the view; one that is absent has no video."""


@dataclass(frozen=True, slots=True)
class EpisodeLine:
    """What ``meta/`` says of one episode."""

    index: int
    num_steps: int
    tasks: tuple[str, ...] | None
    """None where the line has none."""
    shared: SharedFiles | None = None
    """None where the episode has files of its own."""
    facts: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """What else is said of it, such as ``success``."""


MAX_FACT_LENGTH = 200
SUCCESS = ("success", "is_success", "is_episode_successful")
"""Columns of shared tables that are read as facts."""


def as_facts(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the plain values of a line of ``meta/`` that are about the episode as a whole."""
    return {name: value for name, value in values.items() if name not in _NO_FACTS and _is_plain(value)}


_NO_FACTS = (
    "episode_index",
    "length",
    "tasks",
    "data",
    "videos",
    "task_indices",
    "version",
    "first_row",
    "video_frames",
)
"""Columns with a meaning of their own, and the names under which the reader keeps what it needs itself."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FACT_LENGTH
    return isinstance(value, bool | int | float) and abs(value) < 2**53


def read_episodes(root: Path, faults: list[Fault]) -> list[EpisodeLine]:
    """Read ``meta/episodes.jsonl``, in order of ``episode_index``; doubles and broken lines are faults."""
    path = "meta/episodes.jsonl"
    found: dict[int, EpisodeLine] = {}
    for number, line in read_lines(root, path, faults):
        index, length = line.get("episode_index"), line.get("length")
        if type(index) is not int or not 0 <= index < MAX_STEPS:
            faults.append(line_fault(path, number, f"expected an episode_index, found {str(index)[:20]}"))
        elif type(length) is not int or not 0 <= length < MAX_STEPS:
            faults.append(line_fault(path, number, f"expected the length of episode {index}, found {str(length)[:20]}"))
        elif index in found:
            message = f"expected episode {index} once, found it again"
            faults.append(line_fault(path, number, message, Reason.DUPLICATE))
        else:
            found[index] = EpisodeLine(index, length, as_tasks(line.get("tasks")), facts=as_facts(line))
    return [found[index] for index in sorted(found)]


def as_tasks(value: Any) -> tuple[str, ...] | None:
    """Return the distinct tasks of an episode, None where it has none to speak of."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list):
        return None
    return tuple(dict.fromkeys(as_text(task) for task in value if isinstance(task, str)))


def default_columns(root: Path, signals: Sequence[SignalInfo], notes: list[str]) -> dict[str, tuple[str, ...]]:
    """Return which columns make ``state`` and ``actions``: by modality.json, else by LeRobot's names, else by prefix."""
    offered = [signal.name for signal in signals]
    modality: Mapping[str, Any] = {}
    if os.path.isfile(root / "meta/modality.json"):
        try:
            modality = read_json(root, "meta/modality.json")
        except SourceError as error:
            notes.append(f"modality.json was ignored: {error.message}")
    named = {"state": ("observation.state", "state"), "action": ("action", "actions")}
    found = {}
    for key, standard in named.items():
        table = modality.get(key)
        wanted = [_original(value, standard[0]) for value in table.values()] if isinstance(table, dict) else []
        columns = tuple(dict.fromkeys(name for name in wanted if name in offered))
        columns = columns or tuple(name for name in standard if name in offered)[:1]
        prefixes = tuple(f"{name}." for name in standard)
        found[key] = columns or tuple(name for name in offered if name.startswith(prefixes))
    return {"state": found["state"], "actions": found["action"]}


def _original(value: Any, default: str) -> str:
    name = value.get("original_key") if isinstance(value, dict) else None
    return name if isinstance(name, str) else default
