"""Export a dataset to LeRobot, v2.1, which openpi reads, or v3.0, so that nobody is locked in.

What LeRobot cannot say is left out, counted and reported, never made up. Its episodes have no holes: one with steps that
may not be served becomes several, one for each run of good steps. A step without a frame of an exported view counts as
a hole, since a black image would be trained on; give ``views`` to leave a view out instead.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.lerobot_episode import BLOCK_STEPS, IMAGES, Frames
from pipeline.lerobot_layouts import LAYOUTS, Target
from pipeline.loaders.frames import FRAMES, View, view_names
from pipeline.loaders.reader import DatasetReader
from pipeline.readers.lerobot_meta import CHUNKS_SIZE
from pipeline.stats import Samples
from pipeline.stats_export import LEROBOT_FEATURES, lerobot_episode_stats, lerobot_stats
from pipeline.store.atomic import sync_folder
from pipeline.video_file import CODEC_NAME, PIXEL_FORMAT
from schemas.errors import DatasetError, UsageError

IMAGE_FEATURE = "observation.images."
_SCALARS = {"timestamp": "float32", **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was exported, and what was not."""

    target: str
    version: str
    num_episodes: int
    num_steps: int
    features: tuple[str, ...]
    """Columns and videos, by LeRobot's names."""
    num_split: int
    """Episodes of the dataset that became several, since they have holes."""
    num_empty: int
    """Episodes of the dataset that have no step to export."""
    left_out: Mapping[str, int]
    """``why -> steps``: ``invalid``, or the view that has no frame."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps ``[start, stop)`` of the dataset that become one episode."""

    episode: int
    start: int
    stop: int


def export_lerobot(
    out: str | Path, target: str | Path, *, images: str = "png", version: str = "2.1", views: Sequence[str] = ()
) -> ExportReport:
    """Export the dataset ``out`` into the new folder ``target``, which appears whole or not at all.

    Parameters
    ----------
    images
        ``png`` and ``jpeg`` (quality 95) are embedded in the tables, ``video`` is an mp4 a view and episode (H.264).
    version
        LeRobot's version: ``2.1``, an episode a file, or ``3.0``, many in a file.
    views
        Views to export; by default every one that has a frame.

    Raises
    ------
    UsageError
        ``target`` is there already, or an option is not known.
    DatasetError
        Nothing to export, a damaged dataset, or one that LeRobot cannot express: episodes of several rates or of none.
    """
    if images not in IMAGES or version not in LAYOUTS:
        raise UsageError(
            f"expected images of {', '.join(IMAGES)} and a version of {', '.join(LAYOUTS)}, found {images!r} and {version!r}"
        )
    place = Path(target).expanduser().absolute()
    source = _Source.open(Path(out).expanduser(), views, images)
    _refuse_target(place, source.reader.info.root)
    with _new_folder(place) as folder:
        source.write(folder, version)
    return source.report(place, version)


def _refuse_target(target: Path, root: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UsageError(f"expected a new folder, found {target} there already; remove it, or choose another place")
    if root.resolve() in target.resolve().parents:
        raise UsageError(f"expected a folder outside the dataset, found {target}; choose another place")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside ``target`` to write into; it gets the name of ``target`` once all is on disk, or is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=target.parent))
    try:
        yield folder
        for parent, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(parent, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(parent))
        folder.chmod(0o777 & ~_umask())
        os.rename(folder, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@dataclass(frozen=True, slots=True)
class _Source:
    """The dataset, and what of it is exported."""

    reader: DatasetReader
    images: str
    views: dict[str, View]
    """``feature -> view``."""
    signals: dict[str, str]
    """``feature -> array``."""
    runs: list[_Run]
    rate_hz: float
    episodes: list[dict[str, Any]]
    left_out: dict[str, int]
    notes: tuple[str, ...]

    @classmethod
    def open(cls, out: Path, names: Sequence[str], images: str) -> "_Source":
        """Find what can be exported, reading no frame."""
        reader = DatasetReader(out)
        views, notes = _views(reader, names)
        if images == "video":
            _refuse_odd_sizes(views)
        kept, left_out = _kept(reader.rows("valid"), views)
        runs = find_runs(reader.rows("episode_ends"), kept)
        if not runs:
            raise DatasetError(f"expected a step to export, found none of {reader.num_steps}: {left_out}; give `views`")
        episodes = reader.table("episodes", ["key", "source", "rate_hz", "instructions", "details"]).to_pylist()
        rate_hz = _rate([episodes[run.episode]["rate_hz"] for run in runs])
        signals = _signals(reader)
        return cls(reader, images, views, signals, runs, rate_hz, episodes, left_out, notes)

    def write(self, folder: Path, version: str) -> None:
        """Write the set into ``folder``."""
        tasks, task_index = _tasks(self.reader, self.runs)
        target = Target(folder=folder, features=self._features(), images=self.images, rate_hz=self.rate_hz)
        first = 0
        with LAYOUTS[version](target) as layout:
            stats = self._row_stats(layout.percentiles)
            for number, run in enumerate(self.runs):
                scalars = dict(self._scalars([run], number, first, task_index))
                rows = {name: self.reader.rows(array)[run.start : run.stop] for name, array in self.signals.items()}
                told = list(dict.fromkeys(tasks[index] for index in scalars["task_index"].tolist()))
                entries = {name: _scalar_stats(values, layout.percentiles) for name, values in scalars.items()}
                line = self._line(run, number, told)
                layout.add(line, {**rows, **scalars}, self._frames(run), {**next(stats), **entries})
                first += run.stop - run.start
            layout.finish(
                self._info(target.features, len(tasks)), tasks, self._all_stats(task_index, layout.percentiles)
            )

    def report(self, target: Path, version: str) -> ExportReport:
        """Say what was exported."""
        parts = np.bincount([run.episode for run in self.runs], minlength=len(self.episodes))
        return ExportReport(
            target=str(target),
            version=version,
            num_episodes=len(self.runs),
            num_steps=sum(run.stop - run.start for run in self.runs),
            features=(*self.signals, *self.views),
            num_split=int((parts > 1).sum()),
            num_empty=int((parts == 0).sum()),
            left_out=self.left_out,
            notes=self.notes,
        )

    def _scalars(
        self, runs: Sequence[_Run], number: int, first: int, task_index: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the columns that say where a row stands; ``number`` and ``first`` are those of the first run."""
        lengths = np.array([run.stop - run.start for run in runs])
        frame = np.arange(lengths.sum(), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        yield "timestamp", (frame / self.rate_hz).astype(np.float32)
        yield "frame_index", frame
        yield "episode_index", np.repeat(np.arange(number, number + len(runs), dtype=np.int64), lengths)
        yield "index", first + np.arange(lengths.sum(), dtype=np.int64)
        yield "task_index", np.concatenate([task_index[run.start : run.stop] for run in runs])

    def _frames(self, run: _Run) -> Iterator[Frames]:
        for start in range(run.start, run.stop, BLOCK_STEPS):
            steps = np.arange(start, min(start + BLOCK_STEPS, run.stop))
            block = {}
            for name, view in self.views.items():
                block[name] = np.empty((len(steps), *view.shape), np.uint8)
                view.fill(self.reader, steps, block[name])
            yield block

    def _samples(self) -> Samples:
        """Return the dataset, cut so that every run has an episode of its own."""
        kept = np.zeros(self.reader.num_steps, np.bool_)
        for run in self.runs:
            kept[run.start : run.stop] = True
        ends = np.array([*(run.stop for run in self.runs[:-1]), self.reader.num_steps], np.int64)
        arrays = {array: self.reader.rows(array) for array in self.signals.values()}
        return Samples(read_rows=lambda array, start, stop: arrays[array][start:stop], episode_ends=ends, valid=kept)

    def _row_stats(self, percentiles: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield LeRobot's statistics of the rows of each run."""
        for line in lerobot_episode_stats(self._samples(), tuple(self.signals.values()), percentiles):
            yield self._named(line["stats"])

    def _all_stats(self, task_index: np.ndarray, percentiles: Sequence[int]) -> dict[str, Any]:
        """Return LeRobot's statistics of the rows of all runs, where the layout has room for them."""
        if not percentiles:
            return {}
        scalars = self._scalars(self.runs, 0, 0, task_index)
        found = self._named(lerobot_stats(self._samples(), tuple(self.signals.values())))
        return {**found, **{name: _scalar_stats(values, percentiles) for name, values in scalars}}

    def _named(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        names = {LEROBOT_FEATURES.get(array, array): name for name, array in self.signals.items()}
        return {names[name]: entry for name, entry in stats.items()}

    def _features(self) -> dict[str, Any]:
        features: dict[str, Any] = {}
        for name, array in self.signals.items():
            spec = self.reader.spec(array)
            names = dict(spec.attributes).get("features") or []
            if all(text.startswith(f"{name}.") for text in names):  # as our reader put it before LeRobot's own names
                names = [text.removeprefix(f"{name}.") for text in names]
            features[name] = {"dtype": spec.dtype, "shape": list(spec.row_shape), "names": names or None}
        for name, view in self.views.items():
            feature = {"shape": list(view.shape), "names": ["height", "width", "channels"]}
            is_video = self.images == "video"
            features[name] = {"dtype": "video" if is_video else "image", **feature}
            if is_video:
                features[name]["info"] = {
                    "video.fps": self.rate_hz, "video.height": view.shape[0], "video.width": view.shape[1],
                    "video.channels": 3, "video.codec": CODEC_NAME, "video.pix_fmt": PIXEL_FORMAT,
                    "video.is_depth_map": False, "has_audio": False,
                }  # fmt: skip
        scalars = {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _SCALARS.items()}
        return {**features, **scalars}

    def _line(self, run: _Run, number: int, tasks: list[str]) -> dict[str, Any]:
        """Return what is said of an episode; what LeRobot does not know, it passes over."""
        episode, begin = self.episodes[run.episode], self._begin(run.episode)
        return {
            "episode_index": number,
            "tasks": tasks,
            "length": run.stop - run.start,
            "source": episode["source"],
            "source_episode": episode["key"],
            "source_steps": [run.start - begin, run.stop - begin],
            "instructions": episode["instructions"] or [],
        }

    def _begin(self, episode: int) -> int:
        return int(self.reader.rows("episode_ends")[episode - 1]) if episode else 0

    def _info(self, features: Mapping[str, Any], num_tasks: int) -> dict[str, Any]:
        """Return what info.json says in every layout."""
        num_episodes = len(self.runs)
        robots = {json.loads(episode["details"] or "{}").get("robot_type") for episode in self.episodes}
        attributes = self.reader.info.attributes
        return {
            "codebase_version": "",
            "robot_type": robots.pop() if len(robots) == 1 and all(robots) else "unknown",
            "total_episodes": num_episodes,
            "total_frames": sum(run.stop - run.start for run in self.runs),
            "total_tasks": num_tasks,
            "chunks_size": CHUNKS_SIZE,
            "fps": int(self.rate_hz) if self.rate_hz.is_integer() else self.rate_hz,
            "splits": {"train": f"0:{num_episodes}"},
            "features": features,
            "headrace": {"generation": self.reader.info.generation, "metadata_xxh3": attributes["metadata_xxh3"]},
        }


def find_runs(episode_ends: Int64[np.ndarray, " episode"], kept: Bool[np.ndarray, " step"]) -> list[_Run]:
    """Return the runs of kept steps that follow each other in one episode.

    >>> [(run.episode, run.start, run.stop) for run in find_runs(np.array([3, 5]), np.array([1, 0, 1, 1, 1], bool))]
    [(0, 0, 1), (0, 2, 3), (1, 3, 5)]
    """
    runs = []
    for episode, (start, stop) in enumerate(pairwise([0, *episode_ends.tolist()])):
        edges = np.flatnonzero(np.diff(kept[start:stop].astype(np.int8), prepend=0, append=0)) + start
        runs += [_Run(episode, *edges[k : k + 2].tolist()) for k in range(0, len(edges), 2)]
    return runs


def _views(reader: DatasetReader, names: Sequence[str]) -> tuple[dict[str, View], tuple[str, ...]]:
    """Return the views asked for, or all that have a frame at some valid step."""
    has_frames = any(spec.name.startswith(FRAMES) and len(spec.dims) == 4 for spec in reader.info.arrays.values())
    wanted = names or (view_names(reader) if has_frames else ())
    views = {name: View.of(reader, name, convert="pixels") for name in wanted}
    empty = [name for name, view in views.items() if not (view.mask & reader.rows("valid")).any()]
    if names and empty:
        raise DatasetError(f"expected frames of the views {list(names)}, found none of {empty}; leave them out")
    notes = tuple(f"the view {name} has no frame and is left out" for name in empty)
    return {IMAGE_FEATURE + name: view for name, view in views.items() if name not in empty}, notes


def _refuse_odd_sizes(views: Mapping[str, View]) -> None:
    odd = {name: list(view.shape[:2]) for name, view in views.items() if view.shape[0] % 2 or view.shape[1] % 2}
    if odd:
        raise UsageError(
            f"expected frames of even height and width for {PIXEL_FORMAT}, found {odd}; export images='png'"
        )


def _kept(valid: np.ndarray, views: Mapping[str, View]) -> tuple[np.ndarray, dict[str, int]]:
    kept, left_out = valid.copy(), {"invalid": int((~valid).sum())}
    for view in views.values():
        left_out[view.name] = int((kept & ~view.mask).sum())
        kept &= view.mask
    return kept, {why: num for why, num in left_out.items() if num}


def _rate(rates_hz: Sequence[float]) -> float:
    distinct = sorted(set(rates_hz))
    if len(distinct) != 1 or not distinct[0] > 0:
        raise DatasetError(
            f"expected episodes of one rate, as LeRobot has one `fps` a set, found {distinct[:5]} Hz; convert with --rate"
        )
    return float(distinct[0])


def _signals(reader: DatasetReader) -> dict[str, str]:
    """Return ``feature -> array`` of state, actions and whatever else the recipe took: vectors of floats, step by step."""
    arrays = reader.info.arrays.values()
    vectors = sorted(
        spec.name for spec in arrays
        if spec.dims[0] == "step" and len(spec.row_shape) == 1 and spec.dtype in ("float32", "float64")
    )  # fmt: skip
    if not vectors:
        raise DatasetError("expected state or actions to export, found neither; see `headrace info`")
    order = sorted(vectors, key=lambda name: (name not in LEROBOT_FEATURES, name))
    return {LEROBOT_FEATURES.get(name, f"observation.{name}"): name for name in order}


def _tasks(reader: DatasetReader, runs: Sequence[_Run]) -> tuple[list[str], Int64[np.ndarray, " step"]]:
    """Return the instructions that are used, and each step's place among them; an empty one serves steps without any."""
    index = np.asarray(reader.rows("task_index"), np.int64)
    table = reader.table("tasks")
    known = dict(zip(table["task_index"].to_pylist(), table["task"].to_pylist(), strict=True))
    used = np.unique(np.concatenate([np.unique(index[run.start : run.stop]) for run in runs])).tolist()
    texts = list(dict.fromkeys(known.get(task) or "" for task in used))
    places = np.zeros(max([*known, *used, 0]) + 2, np.int64)  # the last place serves -1
    for task in used:
        places[task] = texts.index(known.get(task) or "")
    return texts, places[index]


def _scalar_stats(values: np.ndarray, percentiles: Sequence[int]) -> dict[str, list[float]]:
    quantiles = np.quantile(values, [percent / 100 for percent in percentiles], method="inverted_cdf")
    return {
        "min": [values.min().item()], "max": [values.max().item()], "mean": [float(values.mean(dtype=np.float64))],
        "std": [float(values.std(dtype=np.float64))], "count": [len(values)],
        **{f"q{percent:02d}": [float(value)] for percent, value in zip(percentiles, quantiles)},
    }  # fmt: skip
