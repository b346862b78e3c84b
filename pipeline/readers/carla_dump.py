"""Folders of images that CARLA scripts wrote with ``save_to_disk``, named by simulator frames.

``docs/formats.md`` describes the layouts and what is read of them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.carla_dump_clock import Clock, read_clock
from pipeline.readers.carla_dump_files import RECORD_SUFFIXES, TABLES, Series, find_images, find_series, read_table
from pipeline.readers.folders import SNIFF_FOLDERS, Folder, source_root, walk_folders
from pipeline.readers.records import Field, fault_at, join_faults, read_records
from pipeline.readers.stepped import StepFiles
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo, declare_all_views

MAX_RECORD_NBYTES = 2**24
MAX_SIGNALS = 256
STATE, ACTIONS = ("speed",), ("steer", "throttle", "brake")
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")
FRAME = SignalInfo(name="simulator_frame", shape=(), dtype="float64")

_TOWN = re.compile(r"(?P<town>Town\d\d(?:HD)?)(?:_Opt)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CarlaDumpReader:
    """Recordings below ``root``: a folder of images, or a folder of folders of images, one folder a camera."""

    name: ClassVar[str] = "carla-dump"

    root: Path
    fixed_delta_s: float = 0.0
    """Simulated time from one frame to the next, as set by ``fixed_delta_seconds``; 0 where a table by frame has times."""
    depth: tuple[str, ...] = ("depth",)
    """Words in the names of views that hold depth in CARLA's 24-bit code."""
    labels: tuple[str, ...] = ("semantic", "instance", "seg")
    """Words in the names of views that hold class ids in red."""

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_delta_s < 3600:
            raise UsageError(f"expected fixed_delta_s of 0 to 3600, found {self.fixed_delta_s}; correct --reader")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if images named by numbers lie below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda _: True), SNIFF_FOLDERS)
        found = any(isinstance(folder, Folder) and find_images(folder) for folder in folders)
        return "" if found else "no folder with images named by frames"

    def index(self) -> SourceIndex:
        """List the recordings: one listing a folder, tables by frame, one image header a view, one record of each kind."""
        root = source_root(self.root)
        recordings, faults = _find_recordings(root)
        episodes: list[EpisodeRef] = []
        for recording in recordings:
            faults += recording.faults()
            try:
                episodes.append(self._describe(recording, faults))
            except SourceError as error:
                path = str(error.where.get("file", recording.path))
                faults.append(Fault(reason=error.reason, message=error.message, episode=recording.key, path=path))
        signals = {signal.name for ref in episodes for signal in ref.signals}
        others = sum(recording.num_others for recording in recordings)
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(declare_all_views(episodes)),
            faults=tuple(faults),
            state=STATE if signals.issuperset(STATE) else (),
            actions=ACTIONS if signals.issuperset(ACTIONS) else (),
            notes=(f"{others} files beside images and records were ignored",) if others else (),
        )

    def _describe(self, recording: "_Recording", faults: list[Fault]) -> EpisodeRef:
        series = recording.named()
        every = [np.fromiter(one.names, np.int64) for one in [*recording.images, *recording.records]]
        frames = np.unique(np.concatenate(every))
        clock = read_clock(frames, self.root, recording.tables, self.fixed_delta_s)
        if clock.numbers and len(clock.numbers) < len(frames):
            message = f"expected a time for each of {len(frames)} frames, found none for {len(frames) - clock.num_steps}; they are left out"
            faults.append(Fault(reason=Reason.COUNT_MISMATCH, message=message, episode=recording.key))
        details: dict[str, Any] = {**clock.details(), "tables": recording.tables, "town": recording.town}
        details["series"] = {name: [one.folder, one.prefix, one.width, one.suffix] for name, one in series.items()}
        views = []
        for name in [name for name, one in series.items() if one in recording.images]:
            height, width = _files(self.root, details, name).size()
            encoding = "png" if series[name].suffix.lower() == ".png" else "jpeg"
            views.append(
                ViewInfo(name=name, height_px=height, width_px=width, encoding=encoding, kind=self._kind(name))
            )
        records = [name for name, one in series.items() if one in recording.records]
        columns = _columns(self.root, details, records)
        if len(columns) > MAX_SIGNALS:
            message = f"expected at most {MAX_SIGNALS} numbers a frame, found {len(columns)}; the first ones are read"
            faults.append(Fault(reason=Reason.TOO_LARGE, message=message, episode=recording.key))
        signals = [signal for signal, _ in columns[:MAX_SIGNALS]]
        details["origin"] = {signal.name: origin for signal, origin in columns[:MAX_SIGNALS]}
        return EpisodeRef(
            key=recording.key,
            num_steps=clock.num_steps,
            rate_hz=clock.rate_hz,
            views=tuple(views),
            signals=(*signals, FRAME, TIME),
            details=details,
        )

    def _kind(self, view: str) -> str:
        for kind, words in (("depth", self.depth), ("labels", self.labels)):
            if any(word and word in view.lower() for word in words):
                return kind
        return "rgb"

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``: NaN and a fault where a record or a row of a table is absent."""
        steps = np.asarray(steps, np.int64)
        clock = Clock.of(ref.details, ref.rate_hz)
        frames = clock.frames(steps)
        values = {TIME.name: clock.times_s(steps), FRAME.name: frames.astype(np.float64)}
        wanted: dict[str, list[SignalInfo]] = {}
        for name in dict.fromkeys(names):
            if name not in values:
                wanted.setdefault(ref.details["origin"][ref.signal(name).name], []).append(ref.signal(name))
        faults: list[Fault] = []
        for origin, signals in wanted.items():
            if origin in ref.details["series"]:
                files = _files(self.root, ref.details, origin)
                fields = [_field(signal, origin) for signal in signals]
                block = read_records(partial(files.read_record, limit_nbytes=MAX_RECORD_NBYTES), fields, ref, steps)
            else:
                block = _read_rows(self.root, origin, ref, [signal.name for signal in signals], (steps, frames))
            values |= block.values
            faults += block.faults
        return SignalBlock(values=values, faults=tuple(faults))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the encoded image of each step, or a fault where the camera skipped that frame."""
        if ref.view(view).present:
            yield from _files(self.root, ref.details, view).read_frames(ref, view, steps)
            return
        message = "expected a folder of this camera, found none; choose another view"
        for step in np.asarray(steps).tolist():
            yield fault_at(SourceError(message, Reason.MISSING_FILE), ref, step, view)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the image of a step."""
        return _files(self.root, ref.details, view).name(step) if ref.view(view).present else ""

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the tables, then records and images, series by series."""
        yield from map(Path, ref.details["tables"])
        for name in ref.details["series"]:
            yield from _files(self.root, ref.details, name).files(ref.num_steps)


@dataclass(slots=True)
class _Recording:
    """What one episode is made of."""

    path: str
    """Its folder, relative to the source."""
    key: str
    images: list[Series] = field(default_factory=list)
    records: list[Series] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    num_others: int = 0
    _faults: list[Fault] = field(default_factory=list)

    @property
    def town(self) -> str:
        """Return the town that a folder or the files are named after."""
        places = [series.prefix for series in self.images] + [self.key]
        found = next((match for place in places if (match := _TOWN.search(place))), None)
        return found["town"] if found else ""

    def faults(self) -> list[Fault]:
        """Return what was refused while the folders were listed."""
        found = [*self._faults, *(fault for series in [*self.images, *self.records] for fault in series.faults)]
        return [replace(fault, episode=self.key) for fault in found]

    def named(self) -> dict[str, Series]:
        """Return the series by name: of the folder, or of what stands before the number, or of both where one is not enough."""
        every = [*self.images, *self.records]
        in_folder = Counter(series.folder for series in every)
        names: dict[str, Series] = {}
        for series in every:
            prefix = _TOWN.sub("", series.prefix).strip("_-. ")
            below = series.folder.removeprefix(self.path).strip("/")
            parts = [below, prefix if not below or in_folder[series.folder] > 1 else ""]
            name = "_".join(part for part in parts if part) or ("rgb" if series in self.images else "record")
            while name in names:
                name += "_"
            names[name] = series
        return names


def _find_recordings(root: Path) -> tuple[list[_Recording], list[Fault]]:
    """Walk the source once. A folder of images is a camera of its parent's recording; the source, and one with such folders in it, its own."""
    folders: dict[str, Folder] = {}
    images: dict[str, list[Series]] = {}
    faults: list[Fault] = []
    for folder in walk_folders(root, lambda _: True):
        if isinstance(folder, Fault):
            faults.append(folder)
            continue
        folders[folder.path] = folder
        if found := find_images(folder):
            images[folder.path] = found
    parents = {path.rpartition("/")[0] for path in images if path}
    recordings: dict[str, _Recording] = {}
    for path, found in images.items():
        home = path if not path or path in parents else path.rpartition("/")[0]
        recording = recordings.setdefault(home, _Recording(home, home or root.name))
        recording.images += found
    for path, folder in folders.items():
        home = path if path in recordings else path.rpartition("/")[0]
        if home in recordings:
            _add_rest(root, recordings[home], folder)
    return list(recordings.values()), faults


def _add_rest(root: Path, recording: _Recording, folder: Folder) -> None:
    """Add records and tables of a folder, and count what is neither."""
    records = find_series(folder, RECORD_SUFFIXES)
    recording.records += records
    known = sum(len(series.names) for series in [*records, *(s for s in recording.images if s.folder == folder.path)])
    if folder.path == recording.path:
        for name in sorted(folder.files):
            if not name.lower().endswith(TABLES):
                continue
            try:
                table = read_table(root, folder.join(name))
            except SourceError as error:
                if name.lower().endswith(".csv") or name.lower().startswith("timestamp"):
                    recording._faults.append(Fault(reason=error.reason, message=error.message, path=folder.join(name)))
                    known += 1
                continue
            known += 1
            recording.tables.append(folder.join(name))
            if table.num_refused:
                message = f"expected one row a frame, found {table.num_refused} rows of no frame or of one that was there; remove them"
                recording._faults.append(Fault(reason=Reason.DUPLICATE, message=message, path=folder.join(name)))
    recording.num_others += len(folder.files) - known


def _files(root: Path, details: Mapping[str, Any], name: str) -> StepFiles:
    folder, prefix, width, suffix = details["series"][name]
    numbers = tuple(details["numbers"])
    return StepFiles(root, folder, details["first"], width, suffix, prefix, details["stride"], numbers)


def _columns(root: Path, details: Mapping[str, Any], records: Sequence[str]) -> list[tuple[SignalInfo, str]]:
    """Return the signals of tables and records, each with where it comes from: the columns of a table, the first sound record."""
    found: dict[str, tuple[SignalInfo, str]] = {}
    for path in details["tables"]:
        for name in read_table(root, path).columns:
            found.setdefault(name, (SignalInfo(name=name, shape=(), dtype="float64"), path))
    for folder in records:
        for name, shape in _first_record(root, details, folder).items():
            unique = f"{folder}.{name}" if name in found else name
            found.setdefault(unique, (SignalInfo(name=unique, shape=shape, dtype="float64"), folder))
    return [column for name, column in found.items() if name not in (FRAME.name, TIME.name)]


def _first_record(root: Path, details: Mapping[str, Any], folder: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the numbers of one of the first four records."""
    files = _files(root, details, folder)
    for step in range(len(files.numbers[:4]) or 4):
        try:
            return dict(_numbers_in(files.read_record(step, MAX_RECORD_NBYTES)))
        except SourceError:
            continue  # refused with its reason when its step is read
    return {}


def _numbers_in(record: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the numbers and plain lists of numbers of a record, objects in it by dotted names."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth:
            yield from _numbers_in(value, f"{name}.", depth - 1)
        elif isinstance(value, int | float):
            yield name, ()
        elif isinstance(value, list) and 0 < len(value) <= 64 and all(isinstance(v, int | float) for v in value):
            yield name, (len(value),)


def _field(signal: SignalInfo, folder: str) -> Field:
    def get(record: Mapping[str, Any]) -> Any:
        found: Any = record
        for key in signal.name.removeprefix(f"{folder}.").split("."):
            found = found[key]
        return found

    return Field(signal.name, shape=signal.shape, get=get)


def _read_rows(
    root: Path, path: str, ref: EpisodeRef, names: Sequence[str], place: tuple[np.ndarray, np.ndarray]
) -> SignalBlock:
    """Return columns of a table at (steps, frames), NaN and a fault where it has no row."""
    steps, frames = place
    try:
        table = read_table(root, path)
        at = np.minimum(np.searchsorted(table.frames, frames), len(table.frames) - 1)
        there = table.frames[at] == frames
        values = {name: np.where(there, table.columns[name][at], np.nan) for name in names}
        error = SourceError(
            "expected a row for the frame, found none; write the table again", Reason.COUNT_MISMATCH, file=path
        )
    except (SourceError, LookupError) as found:  # it changed since it was indexed
        changed = SourceError(
            f"expected the columns {list(names)}, found: {found}; run again", Reason.BAD_METADATA, file=path
        )
        error = found if isinstance(found, SourceError) else changed
        values, there = {name: np.full(len(steps), np.nan) for name in names}, np.zeros(len(steps), np.bool_)
    faults = [fault_at(error, ref, int(step)) for step in np.unique(steps[~there])]
    return SignalBlock(values=values, faults=tuple(join_faults(faults)))
