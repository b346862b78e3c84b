"""Recordings in HDF5 files: which files there are, what their arrays are, and how steps are read out of them.

A reader of one layout says where the arrays lie; the rest is here. ``docs/formats.md`` shows one in full.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, misplaced, natural_key, walk_folders
from pipeline.readers.hdf5_files import Hdf5File, open_hdf5, require_h5py
from pipeline.readers.hdf5_rows import Rows
from pipeline.readers.metadata import as_text
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, ViewInfo

SUFFIXES = (".hdf5", ".h5")
SNIFF_FILES = 8
MAX_ROW_SIZE = 2**16
"""Greatest number of elements of one row of a signal."""
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")


def hdf5_files(root: Path, limit_folders: int | None = None) -> Iterator[str | Fault]:
    """Yield the HDF5 files at or below ``root`` in natural order, and what could not be followed."""
    for folder in islice(walk_folders(root, lambda folder: True), limit_folders):
        if isinstance(folder, Folder):
            names = (name for name in folder.files if name.lower().endswith(SUFFIXES))
            yield from (folder.join(name) for name in sorted(names, key=natural_key))
            yield from misplaced(folder, SUFFIXES)
        else:
            yield folder


def sniff_files(root: Path, miss: Callable[[Hdf5File], str]) -> str:
    """Return an empty string if ``miss`` finds nothing missing in one of the first files, else what the first one misses.

    MissingExtraError where there are such files and no h5py to look into them: another format would be a guess.
    """
    missed = []
    found = (path for path in hdf5_files(root, SNIFF_FOLDERS) if isinstance(path, str))
    for path in islice(found, SNIFF_FILES):
        require_h5py()
        try:
            with open_hdf5(root, path) as file:
                missed.append(miss(file))
        except SourceError as error:
            missed.append(f"{path}: {error.message}")
        if not missed[-1]:
            return ""
    return missed[0] if missed else "no .hdf5 or .h5 file"


def file_key(path: str) -> str:
    """Return a file's name in keys: its path without the suffix."""
    return as_text(path).rpartition(".")[0]


@dataclass(slots=True)
class Arrays:
    """What the arrays of one episode are."""

    views: list[ViewInfo] = field(default_factory=list)
    signals: list[SignalInfo] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Length of each along steps."""
    faults: list[Fault] = field(default_factory=list)
    """Arrays that are refused."""
    others: list[str] = field(default_factory=list)
    """Arrays that are left alone."""

    def add_all(self, file: Hdf5File, folders: Sequence[str], *, but: Sequence[str] = ()) -> None:
        """Take the arrays of ``folders`` of the file but those called ``but``; of one name, that of the first folder alone."""
        taken = set(but)
        for folder in folders:
            for name in file.names(folder):
                if name not in but and file.is_array(path := f"{folder}/{name}"):
                    if name in taken:
                        self.others.append(path)
                    else:
                        self.add(file, name, path)
                    taken.add(name)

    def add(self, file: Hdf5File, name: str, path: str) -> None:
        """Take the array at ``path`` for a view, a signal, or neither; nothing of it is read."""
        if as_text(name) != name or name == TIME.name:
            self.others.append(as_text(name))
            return
        try:
            rows = file.rows(path)
        except SourceError as error:
            self.faults.append(Fault(reason=error.reason, message=error.message, stream=name, path=file.path))
            return
        shape = rows.row_shape
        if rows.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3 and 0 not in shape:
            self.views.append(ViewInfo(name=name, height_px=shape[0], width_px=shape[1], encoding="raw"))
        elif 0 < int(np.prod(shape, dtype=np.int64)) <= MAX_ROW_SIZE and len(shape) < 3:
            self.signals.append(SignalInfo(name=name, shape=shape, dtype=rows.dtype.name))
        else:
            self.others.append(name)
            return
        self.counts[name] = rows.num_steps

    def require(self, name: str, path: str) -> None:
        """Raise SourceError, with the reason if there is one, unless ``name`` is a signal."""
        if any(signal.name == name for signal in self.signals):
            return
        for fault in self.faults:
            if fault.stream == name:
                raise SourceError(fault.message, fault.reason, file=path)
        message = f"expected rows of numbers in {name!r}, found none; record it again"
        raise SourceError(message, Reason.BAD_METADATA, file=path)

    def count_steps(self, first: str, path: str) -> int:
        """Return the episode's length, that of ``first`` or of most arrays; others of another length are faults."""
        most = Counter(self.counts.values())
        num_steps = self.counts.get(first, max(most, key=lambda count: (most[count], count), default=0))
        for name, count in self.counts.items():
            if count != num_steps:
                start, stop = sorted((count, num_steps))
                message = (
                    f"expected {num_steps} steps as {first} or most arrays have, found {count}; check the recording"
                )
                self.faults.append(
                    Fault(reason=Reason.COUNT_MISMATCH, message=message, stream=name, start=start, stop=stop, path=path)
                )
        return num_steps


def place_faults(faults: Sequence[Fault], key: str) -> list[Fault]:
    """Return faults as those of one episode."""
    return [replace(fault, episode=key) for fault in faults]


def read_signals(
    root: Path, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray, folders: Sequence[str]
) -> SignalBlock:
    """Read arrays at ``steps``, each in the first of ``folders`` of the file that has it, and ``timestamp_s`` by the rate.

    What cannot be read is NaN (0 in integers), and a fault that says which rows and why.
    """
    steps = np.asarray(steps, np.int64)
    wanted = [ref.signal(name) for name in dict.fromkeys(names) if name != TIME.name]
    values = {signal.name: _unread(signal, len(steps)) for signal in wanted}
    faults: list[Fault] = []
    times = {TIME.name: steps / ref.rate_hz}
    if not values:
        return SignalBlock(values=times)
    try:
        with open_hdf5(root, ref.details["file"]) as file:
            for name, out in values.items():
                try:
                    rows = _indexed(file, ref, name, folders)
                    faults += _fill(rows, ref, name, steps, out)
                except SourceError as error:
                    faults.append(_fault(ref, error, name, 0, ref.num_steps))
    except SourceError as error:
        faults.append(_fault(ref, error, "", 0, ref.num_steps))
    return SignalBlock(values={**values, **times}, faults=tuple(faults))


def _unread(signal: SignalInfo, count: int) -> np.ndarray:
    dtype = np.dtype(signal.dtype)
    return np.full((count, *signal.shape), np.nan if dtype.kind == "f" else 0, dtype)


def _fault(ref: EpisodeRef, error: SourceError, stream: str, start: int, stop: int) -> Fault:
    path = ref.details["file"]
    return Fault(
        reason=error.reason, message=error.message, episode=ref.key, stream=stream, start=start, stop=stop, path=path
    )


def _indexed(file: Hdf5File, ref: EpisodeRef, name: str, folders: Sequence[str]) -> Rows:
    paths = [f"{folder}/{name}" for folder in folders]
    rows = file.rows(next((path for path in paths if file.is_array(path)), paths[0]))
    signal = ref.signal(name)
    if (rows.row_shape, rows.dtype.name) != (signal.shape, signal.dtype):
        raise SourceError(
            f"expected {signal.dtype}{list(signal.shape)} in {name!r} as indexed, found {rows.dtype}{list(rows.row_shape)}; "
            "run again",
            Reason.WRONG_SHAPE,
        )
    return rows


def _fill(rows: Rows, ref: EpisodeRef, name: str, steps: np.ndarray, out: np.ndarray) -> Iterator[Fault]:
    """Fill ``out`` block by block, so that a damaged chunk costs its own rows."""
    done = 0
    while done < len(steps):
        step = int(steps[done])
        if step >= rows.num_steps:
            yield _fault(ref, _short(ref, rows), name, rows.num_steps, ref.num_steps)
            return
        first, last = rows.block(step, int(steps[-1]) + 1)
        stop = int(np.searchsorted(steps, last))
        try:
            out[done:stop] = rows.read(first, last)[steps[done:stop] - first]
        except SourceError as error:
            yield _fault(ref, error, name, first, min(last, ref.num_steps))
        done = stop


def _short(ref: EpisodeRef, rows: Rows) -> SourceError:
    message = f"expected {ref.num_steps} steps in {rows.name!r}, found {rows.num_steps}; check the recording"
    return SourceError(message, Reason.COUNT_MISMATCH)


def read_rows(file: Hdf5File, ref: EpisodeRef, rows: Rows, steps: np.ndarray) -> Iterator[np.ndarray | SourceError]:
    """Yield the row of each of ``steps``, or why it cannot be had. Held in memory: one row, or those that share its chunk."""
    held: tuple[int, int, np.ndarray | SourceError] = (0, 0, np.zeros(0))
    for step in np.asarray(steps, np.int64).tolist():
        if step >= rows.num_steps:
            yield _short(ref, rows)
            continue
        if not held[0] <= step < held[1]:
            first, last = rows.block(step, step + 1)
            held = (first, last, np.zeros(0))  # before the next ones are unpacked
            try:
                held = (first, last, rows.read(first, last))
            except SourceError as error:
                held = (first, last, error)
        yield held[2] if isinstance(held[2], SourceError) else held[2][step - held[0]]


def read_frames(
    root: Path,
    ref: EpisodeRef,
    view: str,
    steps: np.ndarray,
    *,
    path: str,
    convert: Callable[[np.ndarray, int], Frame] | None = None,
    kinds: str = "biuf",
) -> Iterator[Frame]:
    """Yield the frame of each step: its row of ``path``, through ``convert(row, step)`` where that is given; or a fault."""
    done = 0
    try:
        with open_hdf5(root, ref.details["file"]) as file:
            for row in read_rows(file, ref, file.rows(path, kinds), steps):
                yield _frame(ref, view, int(steps[done]), row, convert)
                done += 1
    except SourceError as error:
        yield from (_fault(ref, error, view, step, step + 1) for step in np.asarray(steps)[done:].tolist())


def _frame(
    ref: EpisodeRef,
    view: str,
    step: int,
    row: np.ndarray | SourceError,
    convert: Callable[[np.ndarray, int], Frame] | None,
) -> Frame:
    if isinstance(row, SourceError):
        return _fault(ref, row, view, step, step + 1)
    try:
        return convert(row, step) if convert else np.array(row, order="C")
    except SourceError as error:
        return _fault(ref, error, view, step, step + 1)
