"""LeRobot v3.0's ``meta/``: which rows of a shared table, and which frames of a shared video, are an episode's."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.readers.folders import list_folder, natural_key
from pipeline.readers.lerobot_meta import MAX_STEPS, SUCCESS, EpisodeLine, SharedFiles, VideoPlace, as_facts, as_tasks
from pipeline.readers.metadata import as_text
from pipeline.readers.parquet_rows import open_parquet, refusals
from schemas.errors import Reason, SourceError
from schemas.source import Fault

EPISODES = "meta/episodes"
TASKS = "meta/tasks.parquet"
TASK_COLUMNS = ("task", "__index_level_0__")
"""The index of a pandas frame, as newer and older writers call it. Its place says nothing: ``task_index`` is a column."""

_OWN = ("episode_index", "tasks", "length", "data/chunk_index", "data/file_index", "dataset_from_index")
_VIDEO = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
_GRID_TOLERANCE = 0.25
"""Share of a frame by which a time may lie off the grid of frames: far above float drift, far below a wrong frame."""


def read_shared_tasks(root: Path, faults: list[Fault]) -> dict[int, str]:
    """Read ``task_index -> task`` of ``tasks.parquet``, by the names of its columns; empty and a fault where it has none."""
    try:
        with open_parquet(root, TASKS) as file, refusals(TASKS):
            names = [name for name in TASK_COLUMNS if name in file.schema_arrow.names][:1]
            if not names or "task_index" not in file.schema_arrow.names:
                raise SourceError(
                    f"expected the columns task_index and task, found {file.schema_arrow.names}; restore the file"
                )
            columns = _columns(file.read(columns=[*names, "task_index"], use_threads=False))
    except SourceError as error:
        faults.append(Fault(reason=error.reason, message=error.message, path=TASKS))
        return {}
    pairs = zip(columns["task_index"], columns[names[0]], strict=True)
    return {index: as_text(task) for index, task in pairs if type(index) is int and isinstance(task, str)}


def read_shared_episodes(root: Path, views: Sequence[str], rate_hz: float, faults: list[Fault]) -> list[EpisodeLine]:
    """Read ``meta/episodes/*/*.parquet``, in order of ``episode_index``, and those columns alone that say where episodes lie.

    A file that cannot be read is a fault, and costs the episodes that only it names.
    """
    rows: dict[int, dict[str, Any]] = {}
    for path in _tables(root, faults):
        try:
            for number, row in enumerate(_rows(root, path, views)):
                _take(rows, row, f"row {number}", path, faults)
        except SourceError as error:
            faults.append(Fault(reason=error.reason, message=error.message, path=path))
    ordered = [rows[index] for index in sorted(rows)]
    lines = [_line(row, first_row) for row, first_row in zip(ordered, _first_rows(ordered), strict=True)]
    for view in views:
        _place_videos(lines, ordered, view, rate_hz, faults)
    return lines


def _tables(root: Path, faults: list[Fault]) -> Iterator[str]:
    folder = list_folder(root, EPISODES)
    faults += folder.refused
    for chunk in sorted(folder.folders, key=natural_key):
        inner = list_folder(root, f"{EPISODES}/{chunk}")
        faults += inner.refused
        yield from (inner.join(name) for name in sorted(inner.files, key=natural_key) if name.endswith(".parquet"))


def _rows(root: Path, path: str, views: Sequence[str]) -> Iterator[dict[str, Any]]:
    wanted = [*_OWN, *SUCCESS, *(f"videos/{view}/{name}" for view in views for name in _VIDEO)]
    with open_parquet(root, path) as file, refusals(path):
        present = set(file.schema_arrow.names)
        columns = _columns(file.read(columns=[name for name in wanted if name in present], use_threads=False))
    names = list(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _columns(table: pa.Table) -> dict[str, list[Any]]:
    return {name: table.column(name).to_pylist() for name in table.schema.names}


def _take(rows: dict[int, dict[str, Any]], row: dict[str, Any], at: str, path: str, faults: list[Fault]) -> None:
    index: Any = row.get("episode_index")
    length = row.get("length")
    reason = Reason.BAD_METADATA
    if not _is_count(index):
        message = f"{at}: expected an episode_index, found {str(index)[:20]}; restore the file"
    elif not _is_count(length):
        message = f"{at}: expected the length of episode {index}, found {str(length)[:20]}; restore the file"
    elif not (_is_count(row.get("data/chunk_index")) and _is_count(row.get("data/file_index"))):
        message = f"{at}: expected the data file of episode {index}, found none named; restore the file"
    elif index in rows:
        reason = Reason.DUPLICATE
        message = f"{at}: expected episode {index} once, found it again; drop one"
    else:
        rows[index] = row
        return
    faults.append(Fault(reason=reason, message=message, path=path))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_STEPS


def _line(row: Mapping[str, Any], first_row: int) -> EpisodeLine:
    shared = SharedFiles(data=_file(row, "data"), first_row=first_row, videos={})
    facts = as_facts({name: row.get(name) for name in SUCCESS})
    return EpisodeLine(row["episode_index"], row["length"], as_tasks(row.get("tasks")), shared, facts)


def _file(row: Mapping[str, Any], prefix: str) -> tuple[int, int]:
    return row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]


def _first_rows(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return each episode's first row by ``dataset_from_index``, which counts from the dataset's first row, not the file's."""
    begins: dict[tuple[int, int], int] = {}
    starts = [row.get("dataset_from_index") for row in rows]
    for row, start in zip(rows, starts, strict=True):
        if type(start) is int:
            begins[_file(row, "data")] = min(begins.get(_file(row, "data"), start), start)
    return [
        start - begins[_file(row, "data")] if type(start) is int else -1
        for row, start in zip(rows, starts, strict=True)
    ]


def _place_videos(
    lines: list[EpisodeLine], rows: Sequence[Mapping[str, Any]], view: str, rate_hz: float, faults: list[Fault]
) -> None:
    """Give every line the place of its video of ``view``; one whose times cannot be told to a frame is a fault instead."""
    prefix = f"videos/{view}"
    files: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        if _is_count(row.get(f"{prefix}/chunk_index")) and _is_count(row.get(f"{prefix}/file_index")):
            files.setdefault(_file(row, prefix), []).append(number)
    for file, numbers in files.items():
        spans = [(_seconds(rows[n], prefix, "from"), _seconds(rows[n], prefix, "to")) for n in numbers]
        places = first_frames(spans, [lines[n].num_steps for n in numbers], rate_hz)
        for number, place in zip(numbers, places, strict=True):
            line, shared = lines[number], lines[number].shared
            if place is None:
                message = (
                    f"expected from_timestamp of {view!r} on the grid of its frames at {rate_hz:g} Hz, "
                    f"found {rows[number].get(f'{prefix}/from_timestamp')} s; restore {EPISODES}"
                )
                key = f"episode_{line.index:06d}"
                faults.append(
                    Fault(reason=Reason.BAD_METADATA, message=message, episode=key, stream=view, path=EPISODES)
                )
            elif shared is not None:
                video = VideoPlace(file=file, start=place[0], stop=place[1])
                lines[number] = replace(line, shared=replace(shared, videos={**shared.videos, view: video}))


def _seconds(row: Mapping[str, Any], prefix: str, side: str) -> float:
    value = row.get(f"{prefix}/{side}_timestamp")
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_STEPS else math.nan


def first_frames(
    spans_s: Sequence[tuple[float, float]], lengths: Sequence[int], rate_hz: float
) -> list[tuple[int, int] | None]:
    """Return which frames ``[start, stop)`` of one video file are each episode's; None where its times do not say.

    ``start`` is ``round(from_timestamp * rate)``, an integer, and no seconds are used after this. But an episode that
    begins where the one before it ended begins with the frame after that one's last: ``from_timestamp`` is a running sum
    of encoded durations, whose drift thus cannot add up to a frame (lerobot issue 3177). A stop that is not declared
    comes from the length.

    Parameters
    ----------
    spans_s
        ``from_timestamp`` and ``to_timestamp``, NaN where they are not declared.
    lengths
        Steps of each episode.

    Examples
    --------
    >>> first_frames([(0.0, 2.0), (2.00002, 3.5), (9.0, math.nan)], [20, 15, 5], 10.0)
    [(0, 20), (20, 35), (90, 95)]
    """
    out: list[tuple[int, int] | None] = [None] * len(spans_s)
    before = (math.nan, 0)
    for number in sorted(range(len(spans_s)), key=lambda n: (spans_s[n][0], n)):
        start_s, stop_s = (second * rate_hz if rate_hz > 0 else math.nan for second in spans_s[number])
        if abs(start_s - before[0]) <= _GRID_TOLERANCE:
            start = before[1]
        elif start_s >= -_GRID_TOLERANCE and abs(start_s - round(start_s)) <= _GRID_TOLERANCE:
            start = round(start_s)
        else:
            before = (math.nan, 0)
            continue
        stop = start + (round(stop_s - start_s) if stop_s >= start_s else lengths[number])
        out[number] = (start, stop)
        before = (stop_s, stop)
    return out


def count_rows(episode_index: np.ndarray) -> dict[int, tuple[int, int]]:
    """Return ``episode -> (first row, number of rows)``; one whose rows lie apart has ``(-1, rows)``.

    >>> count_rows(np.array([7, 7, 3, 3, 3, 7, 5]))
    {7: (-1, 3), 3: (2, 3), 5: (6, 1)}
    """
    edges = np.flatnonzero(np.diff(episode_index, prepend=np.int64(-1) - episode_index[:1]))
    found: dict[int, tuple[int, int]] = {}
    for start, stop in itertools.pairwise([*edges.tolist(), len(episode_index)]):
        episode = int(episode_index[start])
        found[episode] = (-1, found[episode][1] + stop - start) if episode in found else (start, stop - start)
    return found
