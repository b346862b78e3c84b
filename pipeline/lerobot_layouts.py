"""How LeRobot lays files out: each episode in files of its own (v2.1), or many in a file (v3.0)."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.lerobot_episode import Frames, Outputs, PictureCounts, open_table, open_video, write_episode
from pipeline.readers.lerobot_meta import CHUNKS_SIZE, DATA_PATH, SHARED_DATA_PATH, SHARED_VIDEO_PATH, VIDEO_PATH
from pipeline.stats_export import LEROBOT_PERCENTILES
from pipeline.video_file import VideoFile

EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_MB, VIDEO_MB = 100, 200
"""A file of v3.0 that has grown to so many MiB gets no further episode; LeRobot's own limits."""
MAX_VIDEO_S = 1000.0
"""Nor does a video of so many seconds: from 1024 s on, LeRobot's float32 times are coarser than its tolerance of 1e-4 s."""
EPISODES_AT_ONCE = 256
"""Rows of v3.0's table of episodes that are held before they are written."""

Stats = Mapping[str, Mapping[str, Any]]
"""``feature -> statistic -> value``."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What every layout needs to know."""

    folder: Path
    features: Mapping[str, Any]
    """Of info.json."""
    images: str
    rate_hz: float

    @property
    def videos(self) -> list[str]:
        """Features that are videos."""
        return [name for name, feature in self.features.items() if feature["dtype"] == "video"]


class Layout(Protocol):
    """A LeRobot set that is being written, episode by episode; a context manager, which closes its files."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close what is open, after an error too."""

    def add(
        self, line: dict[str, Any], columns: Mapping[str, np.ndarray], frames: Iterator[Frames], stats: Stats
    ) -> None:
        """Append an episode: what is said of it, its rows, its frames, and the statistics of its rows."""

    def finish(self, info: Mapping[str, Any], tasks: list[str], stats: Stats) -> None:
        """Write what is known at the end: info.json, the tasks, and the statistics of all rows."""


class OwnFiles:
    """v2.1: a table and videos for each episode, and lines of JSON."""

    percentiles: tuple[int, ...] = ()

    def __init__(self, target: Target) -> None:
        self._target, self._num_episodes = target, 0

    def __enter__(self) -> Self:
        meta = self._target.folder / "meta"
        meta.mkdir()
        with ExitStack() as stack:
            names = ("episodes", "episodes_stats")
            self._lines = {name: stack.enter_context((meta / f"{name}.jsonl").open("w")) for name in names}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(
        self, line: dict[str, Any], columns: Mapping[str, np.ndarray], frames: Iterator[Frames], stats: Stats
    ) -> None:
        """Write the episode's files and lines."""
        target, number = self._target, line["episode_index"]
        at = {"episode_chunk": number // CHUNKS_SIZE, "episode_index": number}
        with ExitStack() as stack:
            videos = {}
            for name in target.videos:
                path = target.folder / VIDEO_PATH.format(**at, video_key=name)
                videos[name] = stack.enter_context(open_video(path, target.features[name], target.rate_hz))
            table = stack.enter_context(open_table(target.folder / DATA_PATH.format(**at), target.features))
            found = write_episode(Outputs(table=table, videos=videos, images=target.images), columns, frames)
        entry = {"episode_index": number, "stats": {**stats, **found.entries()}}
        for name, value in (("episodes", line), ("episodes_stats", entry)):
            self._lines[name].write(_json_line(value))
        self._num_episodes += 1

    def finish(self, info: Mapping[str, Any], tasks: list[str], stats: Stats) -> None:
        """Write info.json and the tasks; v2.1 has no statistics of all rows."""
        meta, videos = self._target.folder / "meta", self._target.videos
        with (meta / "tasks.jsonl").open("w") as file:
            file.writelines(_json_line({"task_index": index, "task": task}) for index, task in enumerate(tasks))
        own = {
            "codebase_version": "v2.1",
            "total_videos": self._num_episodes * len(videos),
            "total_chunks": -(-self._num_episodes // CHUNKS_SIZE),
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if videos else None,
        }
        (meta / "info.json").write_text(json.dumps({**info, **own}, indent=4))


class SharedFiles:
    """v3.0: episodes one after the other in tables and videos, and a table that says where each one lies."""

    percentiles = LEROBOT_PERCENTILES

    def __init__(self, target: Target) -> None:
        self._target, self._num_steps = target, 0
        self._pictures = PictureCounts()
        self._rows: list[dict[str, Any]] = []

        def open_episodes(path: Path) -> pq.ParquetWriter:
            path.parent.mkdir(parents=True, exist_ok=True)
            return pq.ParquetWriter(path, _episode_schema(target), compression="snappy")

        self._episodes = _Series(target.folder, EPISODES_PATH, open_episodes, DATA_MB)
        self._data = _Series(target.folder, SHARED_DATA_PATH, lambda path: open_table(path, target.features), DATA_MB)
        self._videos = {name: self._video_series(name) for name in target.videos}

    def _video_series(self, name: str) -> "_Series[VideoFile]":
        target = self._target
        template = SHARED_VIDEO_PATH.replace("{video_key}", name.replace("{", "{{").replace("}", "}}"))

        def open_one(path: Path) -> VideoFile:
            return open_video(path, target.features[name], target.rate_hz)

        return _Series(target.folder, template, open_one, VIDEO_MB, max_rows=int(MAX_VIDEO_S * target.rate_hz))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for series in (self._episodes, self._data, *self._videos.values()):
                stack.callback(series.close)

    def add(
        self, line: dict[str, Any], columns: Mapping[str, np.ndarray], frames: Iterator[Frames], stats: Stats
    ) -> None:
        """Append the episode to the files, and hold its row."""
        num_steps = line["length"]
        table = self._data.take(num_steps)
        videos = {name: series.take(num_steps) for name, series in self._videos.items()}
        found = write_episode(Outputs(table=table, videos=videos, images=self._target.images), columns, frames)
        self._pictures.merge(found)
        row = {**line, **_place("data", self._data)}
        row.update(dataset_from_index=self._num_steps, dataset_to_index=self._num_steps + num_steps)
        for name, series in self._videos.items():
            row.update(_place(f"videos/{name}", series))
            row[f"videos/{name}/from_timestamp"] = (series.num_rows - num_steps) / self._target.rate_hz
            row[f"videos/{name}/to_timestamp"] = series.num_rows / self._target.rate_hz
        for name, entry in {**stats, **found.entries(self.percentiles)}.items():
            row.update({f"stats/{name}/{key}": value for key, value in entry.items()})
        self._rows.append(row)
        self._num_steps += num_steps
        if len(self._rows) == EPISODES_AT_ONCE:
            self._write_rows()

    def finish(self, info: Mapping[str, Any], tasks: list[str], stats: Stats) -> None:
        """Write the last rows, info.json, the tasks and the statistics of all steps."""
        self._write_rows()
        meta = self._target.folder / "meta"
        all_stats = {**stats, **self._pictures.entries(self.percentiles)}
        (meta / "stats.json").write_text(json.dumps(all_stats, indent=4, allow_nan=False))
        _write_tasks(meta / "tasks.parquet", tasks)
        own = {
            "codebase_version": "v3.0",
            "data_files_size_in_mb": DATA_MB,
            "video_files_size_in_mb": VIDEO_MB,
            "data_path": SHARED_DATA_PATH,
            "video_path": SHARED_VIDEO_PATH if self._videos else None,
        }
        (meta / "info.json").write_text(json.dumps({**info, **own}, indent=4))

    def _write_rows(self) -> None:
        if self._rows:
            table = self._episodes.take(len(self._rows))
            place = _place("meta/episodes", self._episodes)
            rows = [{**row, **place} for row in self._rows]
            table.write_table(pa.Table.from_pylist(rows, schema=table.schema))
            self._rows = []


LAYOUTS: dict[str, Callable[[Target], OwnFiles | SharedFiles]] = {"2.1": OwnFiles, "3.0": SharedFiles}
"""By LeRobot's version."""


@dataclass(slots=True)
class _Series(Generic[T]):
    """Files of one kind that follow each other: one that has grown large is closed, and the next begun."""

    folder: Path
    template: str
    open_file: Callable[[Path], AbstractContextManager[T]]
    max_mb: int
    max_rows: int | None = None
    """Rows of a file, unless it has one episode alone."""
    number: int = -1
    num_rows: int = 0
    """Of the open file."""
    stack: ExitStack = field(default_factory=ExitStack)
    opened: list[T] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        """Chunk and number of the open file."""
        return divmod(self.number, CHUNKS_SIZE)

    def take(self, num_rows: int) -> T:
        """Return the open file, in which there is room for another episode, and count its rows."""
        if not self.opened or self._is_full(num_rows):
            self.close()
            self.number, self.num_rows = self.number + 1, 0
            self.opened.append(self.stack.enter_context(self.open_file(self._path())))
        self.num_rows += num_rows
        return self.opened[0]

    def close(self) -> None:
        """Finish the open file."""
        self.opened.clear()
        self.stack.close()

    def _is_full(self, num_rows: int) -> bool:
        is_long = self.max_rows is not None and self.num_rows + num_rows > self.max_rows
        path = self._path()
        nbytes = (
            path.stat().st_size if path.is_file() else 0
        )  # an encoder that holds frames back has not begun the file
        return is_long or nbytes >= self.max_mb << 20

    def _path(self) -> Path:
        chunk, number = self.place
        return self.folder / self.template.format(chunk_index=chunk, file_index=number)


def _place(prefix: str, series: _Series[Any]) -> dict[str, int]:
    return dict(zip((f"{prefix}/chunk_index", f"{prefix}/file_index"), series.place, strict=True))


def _episode_schema(target: Target) -> pa.Schema:
    whole, number, texts = pa.int64(), pa.float64(), pa.list_(pa.string())
    kinds: dict[str, pa.DataType] = {"episode_index": whole, "tasks": texts, "length": whole}
    for prefix in ("data", *(f"videos/{name}" for name in target.videos), "meta/episodes"):
        kinds.update({f"{prefix}/chunk_index": whole, f"{prefix}/file_index": whole})
        if prefix.startswith("videos/"):
            kinds.update({f"{prefix}/from_timestamp": number, f"{prefix}/to_timestamp": number})
    kinds.update(dataset_from_index=whole, dataset_to_index=whole, source=pa.string(), source_episode=pa.string())
    kinds.update(source_steps=pa.list_(whole), instructions=texts)
    keys = ("min", "max", "mean", "std", *(f"q{percent:02d}" for percent in SharedFiles.percentiles))
    for name, feature in target.features.items():
        is_picture = feature["dtype"] in ("image", "video")
        kind = pa.list_(pa.list_(pa.list_(number))) if is_picture else pa.list_(number)
        kinds.update({f"stats/{name}/{key}": kind for key in keys})
        kinds[f"stats/{name}/count"] = pa.list_(whole)
    return pa.schema(list(kinds.items()))


def _write_tasks(path: Path, tasks: Iterable[str]) -> None:
    """Write the table of tasks as pandas does, which LeRobot reads it with: the task is the index of its row."""
    import pandas as pd

    index = pd.Index(list(tasks), name="task", dtype=object)
    pd.DataFrame({"task_index": np.arange(len(index), dtype=np.int64)}, index=index).to_parquet(path)


def _json_line(value: Any) -> str:
    return json.dumps(value, allow_nan=False) + "\n"
