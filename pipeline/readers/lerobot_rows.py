"""Numeric rows and embedded images of one LeRobot episode, out of its Parquet file or one that many episodes share."""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.readers.folders import inside, read_inside
from pipeline.readers.lerobot_shared import count_rows
from pipeline.readers.parquet_rows import open_parquet, read_columns, refusals, to_rows
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo

IMAGE_ROWS = 8
"""Rows of an image column held at once."""


def read_rows(root: Path, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
    """Read ``names`` at ``steps``; what cannot be read is NaN (0 in integers), and a fault that says which rows and why."""
    values = {name: _unread(ref.signal(name), len(steps)) for name in names}
    faults: list[Fault] = []
    path = ref.details["data"]
    try:
        with open_parquet(root, path) as file:
            first, num_rows = _extent(root, file, ref)
            faults += _count_faults(ref, num_rows, steps)
            known = steps < num_rows
            for name in values if known.any() else ():
                start, stop = int(steps[known].min()), int(steps[known].max()) + 1
                try:
                    with refusals(path):
                        rows, good = _rows(file, ref, ref.signal(name), (first, first + start, first + stop))
                except SourceError as error:
                    faults.append(_fault(ref, error.reason, error.message, name, start, stop))
                    continue
                values[name][known] = rows[steps[known] - start]
                faults += _bad_rows(ref, name, good, start)
    except SourceError as error:
        faults.append(_fault(ref, error.reason, error.message, "", 0, ref.num_steps))
    return SignalBlock(values=values, faults=tuple(faults))


def _extent(root: Path, file: pq.ParquetFile, ref: EpisodeRef) -> tuple[int, int]:
    """Return the first row of the episode in its table, and how many rows are its own."""
    path, first = ref.details["data"], ref.details.get("first_row")
    if first is None:
        return 0, file.metadata.num_rows
    if "episode_index" not in file.schema_arrow.names:
        if first < 0:
            raise SourceError(
                "expected episode_index in the table or dataset_from_index in meta/, found neither; restore it"
            )
        return first, max(0, min(ref.num_steps, file.metadata.num_rows - first))
    status = os.stat(inside(root, path))
    first, num_rows = _shared_rows(root, path, status.st_size, status.st_mtime_ns).get(
        ref.details["episode_index"], (0, 0)
    )
    if first < 0:
        raise SourceError(
            f"expected the {num_rows} rows of an episode one after the other, found rows of others among them; sort the table"
        )
    return first, num_rows


@lru_cache(maxsize=16)
def _shared_rows(root: Path, path: str, nbytes: int, mtime_ns: int) -> dict[int, tuple[int, int]]:
    """Find every episode of a shared table. Size and time are there for the cache, so that a replaced file is read again."""
    with open_parquet(root, path) as file, refusals(path):
        column = read_columns(file, ["episode_index"], 0, file.metadata.num_rows).column(0)
        return count_rows(to_rows(column, (), np.dtype(np.int64))[0])


def _unread(signal: SignalInfo, count: int) -> np.ndarray:
    dtype = np.dtype(signal.dtype)
    return np.full((count, *signal.shape), np.nan if dtype.kind == "f" else 0, dtype)


def _fault(ref: EpisodeRef, reason: Reason, message: str, stream: str, start: int, stop: int) -> Fault:
    path = ref.details["data"]
    return Fault(reason=reason, message=message, episode=ref.key, stream=stream, start=start, stop=stop, path=path)


def _count_faults(ref: EpisodeRef, num_rows: int, steps: np.ndarray) -> list[Fault]:
    """Compare the table with ``meta/``, once: in the read that touches the rows concerned, or the last row."""
    last = int(steps.max(initial=-1))
    if num_rows == ref.num_steps or last < min(num_rows, ref.num_steps - 1):
        return []
    message = f"expected {ref.num_steps} rows as meta/ says, found {num_rows}; check the recording"
    bounds = sorted((num_rows, ref.num_steps))
    return [_fault(ref, Reason.COUNT_MISMATCH, message, "", bounds[0], bounds[1])]


def _bad_rows(ref: EpisodeRef, name: str, good: np.ndarray, start: int) -> Iterator[Fault]:
    edges = np.flatnonzero(np.diff(np.concatenate([[True], good, [True]]).astype(np.int8)))
    for first, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        message = f"expected {list(ref.signal(name).shape)} numbers in {name!r}, found null or another count; check the recording"
        yield _fault(ref, Reason.WRONG_SHAPE, message, name, start + first, start + stop)


def _rows(
    file: pq.ParquetFile, ref: EpisodeRef, signal: SignalInfo, span: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Read rows ``[span[1], span[2])`` of the table; the episode begins with row ``span[0]``."""
    _, start, stop = span
    if signal.name == "timestamp_s":
        return _times(file, ref, span)
    if signal.name == "instruction_index":
        task_index, good = _column(file, SignalInfo(name="task_index", shape=(), dtype="int64"), start, stop)
        return _instruction_index(task_index, good, ref.details["task_indices"])
    return _column(file, signal, start, stop)


def _column(file: pq.ParquetFile, signal: SignalInfo, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a signal's column, or its elements from ``name_0``, ``name_1``, ..., into which some writers split it."""
    columns, dtype = set(file.schema_arrow.names), np.dtype(signal.dtype)
    if signal.name in columns:
        return to_rows(read_columns(file, [signal.name], start, stop).column(0), signal.shape, dtype)
    split = [f"{signal.name}_{k}" for k in range(signal.size)]
    if not columns.issuperset(split):
        raise SourceError(
            f"expected the column {signal.name!r}, which info.json declares, found none; check the recording"
        )
    parts = [to_rows(column, (), dtype) for column in read_columns(file, split, start, stop).columns]
    rows = np.stack([values for values, _ in parts], axis=1)
    return rows.reshape(len(rows), *signal.shape), np.all([good for _, good in parts], axis=0)


def _times(file: pq.ParquetFile, ref: EpisodeRef, span: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``timestamp`` column from its first row on, or ``step / fps`` where the table has none."""
    first, start, stop = span
    if "timestamp" in file.schema_arrow.names:
        time = SignalInfo(name="timestamp", shape=(), dtype="float64")
        times_s, good = _column(file, time, first, stop)
        return times_s[start - first :] - (times_s[0] if np.isfinite(times_s[0]) else 0), good[start - first :]
    if ref.rate_hz > 0:
        return np.arange(start - first, stop - first) / ref.rate_hz, np.ones(stop - start, np.bool_)
    raise SourceError("expected a timestamp column or fps in info.json, found neither; add one")


def _instruction_index(
    task_index: np.ndarray, good: np.ndarray, task_indices: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Turn each row's task_index into the place of that task among the episode's instructions."""
    order = np.argsort(task_indices, kind="stable")
    known = np.asarray(task_indices, np.int64)[order]
    place = np.minimum(np.searchsorted(known, task_index), len(known) - 1)
    found = known[place] == task_index
    return np.where(found, order[place], 0), good & found


def read_images(root: Path, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
    """Yield the encoded image of each step from a ``struct<bytes, path>`` or binary column, a few rows in memory at a time."""
    done, path = 0, ref.details["data"]
    try:
        with open_parquet(root, path) as file:
            if view not in file.schema_arrow.names:
                raise SourceError(
                    f"expected the column {view!r}, which info.json declares, found none; check the recording"
                )
            first, num_rows = _extent(root, file, ref)
            for row, cell in _cells(file, view, path, first + steps[steps < num_rows]):
                while done < len(steps) and first + steps[done] == row:
                    yield _image(root, ref, view, row - first, cell)
                    done += 1
            message = f"expected {ref.num_steps} rows as meta/ says, found {num_rows}; check the recording"
            reason = Reason.COUNT_MISMATCH
    except SourceError as error:
        message, reason = error.message, error.reason
    for step in steps[done:].tolist():
        yield _fault(ref, reason, message, view, step, step + 1)


def _cells(file: pq.ParquetFile, view: str, path: str, rows: np.ndarray) -> Iterator[tuple[int, object]]:
    """Yield ``(row, cell)`` of the distinct rows, streaming only the row groups that hold some."""
    first = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        wanted = np.unique(rows[(rows >= first) & (rows < first + num_rows)]) - first
        if len(wanted):
            offset = 0
            batches = iter(file.iter_batches(IMAGE_ROWS, row_groups=[group], columns=[view], use_threads=False))
            while offset <= wanted[-1]:
                with refusals(path):
                    batch = next(batches, None)
                    if batch is None or not len(batch):
                        raise SourceError(
                            "expected the rows that the footer declares, found fewer", Reason.TRUNCATED, file=path
                        )
                    cells = batch.column(view)
                    found = [
                        (int(row), cells[int(row) - offset].as_py()) for row in wanted if 0 <= row - offset < len(cells)
                    ]
                yield from ((first + row, cell) for row, cell in found)
                offset += len(cells)
        first += num_rows


def _image(root: Path, ref: EpisodeRef, view: str, step: int, cell: object) -> Frame:
    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if isinstance(data, bytes):
        return data
    if data is None and isinstance(path, str):
        try:
            return read_inside(root, path)
        except SourceError as error:
            return _fault(ref, error.reason, error.message, view, step, step + 1)
    message = f"expected the bytes or path of an image, found {type(data).__name__}; check the recording"
    return _fault(ref, Reason.MISSING_FILE, message, view, step, step + 1)
