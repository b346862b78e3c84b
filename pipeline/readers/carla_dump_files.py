"""What a folder of CARLA's ``save_to_disk`` files holds: series of files that are named by simulator frames, and tables by frame."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from pipeline.readers.folders import Folder, read_inside
from pipeline.readers.stepped import IMAGE_SUFFIXES
from schemas.errors import Reason, SourceError
from schemas.source import Fault

RECORD_SUFFIXES = (".json",)
TABLES = (".csv", ".txt")
MAX_TABLE_NBYTES = 2**26
FRAME_COLUMNS = ("frame", "frame_id", "frame_number", "simulator_frame")
TIME_COLUMNS = ("timestamp_s", "timestamp", "elapsed_seconds", "elapsed_s", "sim_time", "time_s", "time")

_NUMBERED = re.compile(r"(?P<prefix>(?:.*\D)?)(?P<digits>\d{1,9})(?P<suffix>\.[A-Za-z]+)", re.ASCII | re.DOTALL)


@dataclass(slots=True)
class Series:
    """Files of one folder whose names differ in one number, the simulator's frame."""

    folder: str
    """Relative to the source."""
    prefix: str
    suffix: str = ""
    width: int = 0
    """Digits of the first one's name."""
    names: dict[int, str] = field(default_factory=dict)
    """``frame -> name``."""
    faults: list[Fault] = field(default_factory=list)

    def path(self, name: str) -> str:
        """Return the path of a file, relative to the source."""
        return f"{self.folder}/{name}" if self.folder else name


def find_series(folder: Folder, suffixes: Sequence[str]) -> list[Series]:
    """Return the series of two files or more in a folder, by prefix; a frame that is there twice is kept once and is a fault."""
    found: dict[str, Series] = {}
    for name in sorted(folder.files):
        match = _NUMBERED.fullmatch(name)
        if match is None or match["suffix"].lower() not in suffixes:
            continue
        series = found.setdefault(match["prefix"], Series(folder.path, match["prefix"]))
        kept = series.names.setdefault(int(match["digits"]), name)
        if kept != name:
            message = f"expected each frame once, found it as {kept} too, which is read; remove one"
            series.faults.append(Fault(reason=Reason.DUPLICATE, message=message, path=series.path(name)))
    several = [series for series in found.values() if len(series.names) > 1]
    for series in several:
        first = _NUMBERED.fullmatch(series.names[min(series.names)])
        if first is not None:
            series.suffix, series.width = first["suffix"], len(first["digits"])
    return several


def find_images(folder: Folder) -> list[Series]:
    """Return the series of images in a folder."""
    return find_series(folder, IMAGE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers by simulator frame."""

    columns: Mapping[str, np.ndarray]
    """``name -> float64[row]``; cells that hold no number are NaN. Without frames and times."""
    frames: np.ndarray
    """int64 ``[row]``, increasing."""
    times_s: np.ndarray
    """float64 ``[row]``, empty where no column is a time."""
    num_refused: int
    """Rows without a frame number, or whose frame an earlier row has."""


def read_table(root: Path, path: str) -> Table:
    """Read a table of numbers: ``.csv`` with a header, or two columns, frame and time, without one.

    Raises
    ------
    SourceError
        Where there is no column of frames, or no row.
    """
    try:
        status = os.lstat(root / path)
    except OSError as error:
        raise SourceError(
            f"expected a table, found: {error.strerror}; check it", Reason.MISSING_FILE, file=path
        ) from error
    return _read_table(root, path, (status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=16)
def _read_table(root: Path, path: str, version: tuple[int, int]) -> Table:
    """Parse a table; kept by process, since each block of an episode asks for it."""
    lines = read_inside(root, path, MAX_TABLE_NBYTES).decode("utf-8-sig", "replace").splitlines()
    rows = list(_cells(lines))
    names = [cell.strip().lower() for cell in rows[0]] if rows else []
    if len(names) == 2 and all(np.isfinite(_number(cell)) for cell in names):
        names = [FRAME_COLUMNS[0], TIME_COLUMNS[0]]
    else:
        rows = rows[1:]
    frame_at = next((names.index(name) for name in FRAME_COLUMNS if name in names), None)
    if frame_at is None or not rows:
        raise SourceError(
            f"expected rows with a column {FRAME_COLUMNS[0]!r}, found the columns {names[:8]}; name the column, or remove the file",
            Reason.BAD_METADATA,
            file=path,
        )
    values = np.full((len(rows), len(names)), np.nan)
    for row, cells in zip(values, rows, strict=True):
        row[: len(cells)] = [_number(cell) for cell in cells[: len(names)]]
    frames = values[:, frame_at]
    is_frame = np.isfinite(frames) & (frames == np.round(frames)) & (np.abs(frames) < 2**53)
    kept, first = np.unique(frames[is_frame].astype(np.int64), return_index=True)
    values = values[is_frame][first]
    time_at = next((names.index(name) for name in TIME_COLUMNS if name in names), None)
    return Table(
        columns={
            name: values[:, k] for k, name in enumerate(names) if name and k not in (frame_at, time_at)
            if np.isfinite(values[:, k]).any()
        },
        frames=kept,
        times_s=np.zeros(0) if time_at is None else values[:, time_at],
        num_refused=len(rows) - len(kept),
    )  # fmt: skip


def _cells(lines: Sequence[str]) -> Iterator[list[str]]:
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    separator = next((mark for mark in ",;\t" if lines and mark in lines[0]), None)
    for line in lines:
        yield [cell.strip().strip('"') for cell in line.split(separator)]


def _number(cell: str) -> float:
    words = {"true": 1.0, "false": 0.0}
    try:
        return words.get(cell.lower(), np.nan) if cell.lower() in words else float(cell)
    except ValueError:
        return float("nan")
