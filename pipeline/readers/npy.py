"""Folders of large ``.npy`` arrays whose first axis is the step, read through memory maps.

``docs/formats.md`` describes the layout and what is read of it.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, misplaced, natural_key, source_root, walk_folders
from pipeline.readers.metadata import as_rate, as_text, read_json
from pipeline.readers.npy_files import NpyHeader, mapped, read_header
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo

ENDS = "episode_ends"
"""Array that cuts one folder into episodes."""
TIMES = ("timestamp_s", "timestamps", "timestamp")
"""Names of an array of times in seconds."""
MAX_ARRAYS = 256
MAX_EPISODES = 2**20
DEFAULT_RATE_HZ = 1.0
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")


@dataclass(frozen=True, slots=True)
class NpyReader:
    """Arrays in ``root`` (one recording) or in folders below it (one recording each)."""

    name: ClassVar[str] = "npy"

    root: Path

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a folder of arrays lies at or below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _arrays(folder)), SNIFF_FOLDERS)
        return (
            ""
            if any(isinstance(folder, Folder) and _arrays(folder) for folder in folders)
            else "no folder with named .npy arrays"
        )

    def index(self) -> SourceIndex:
        """List the recordings by the headers of their arrays."""
        root = source_root(self.root)
        found = _Index(root, [], [], [])
        for folder in walk_folders(root, lambda folder: not _arrays(folder)):
            if isinstance(folder, Fault):
                found.faults.append(folder)
            elif _arrays(folder):
                found.add(folder)
                found.faults += misplaced(folder, (".npy",))
        offered = list(dict.fromkeys(signal.name for episode in found.episodes for signal in episode.signals))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=_default_columns(offered, "state"),
            actions=_default_columns(offered, "action"),
            notes=tuple(dict.fromkeys(found.notes)),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, copied out of the maps."""
        steps = np.asarray(steps, np.int64)
        values: dict[str, np.ndarray] = {}
        faults: list[Fault] = []
        for name in dict.fromkeys(names):
            signal = ref.signal(name)
            values[name] = np.full(
                (len(steps), *signal.shape), np.nan if signal.dtype.startswith("f") else 0, signal.dtype
            )
            try:
                if name == TIME.name:
                    values[name] = self._times(ref, steps)
                else:
                    self._fill(ref, name, steps, values[name], faults)
            except SourceError as error:
                faults.append(_fault(ref, name, error.reason, error.message, 0, ref.num_steps))
        return SignalBlock(values=values, faults=tuple(faults))

    def _fill(self, ref: EpisodeRef, name: str, steps: np.ndarray, out: np.ndarray, faults: list[Fault]) -> None:
        with mapped(self.root, _path(ref, name)) as rows:
            if rows.shape[1:] != out.shape[1:]:
                raise SourceError(
                    f"expected rows of shape {out.shape[1:]} as indexed, found {rows.shape[1:]}; run again",
                    Reason.WRONG_SHAPE,
                )
            at = steps + ref.details["start"]
            there = at < len(rows)
            out[there] = rows[at[there]]
            if not there.all():
                first = max(len(rows) - ref.details["start"], 0)
                faults.append(_fault(ref, name, Reason.COUNT_MISMATCH, _short(ref, len(rows)), first, ref.num_steps))

    def _times(self, ref: EpisodeRef, steps: np.ndarray) -> np.ndarray:
        name = ref.details["times"]
        if not name:
            return steps / ref.rate_hz
        with mapped(self.root, _path(ref, name)) as rows:
            at = steps + ref.details["start"]
            times_s = np.full(len(steps), np.nan)
            times_s[at < len(rows)] = rows[at[at < len(rows)]]
            return times_s - float(rows[ref.details["start"]]) if ref.details["start"] < len(rows) else times_s

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield each step's frame, copied out of the map one at a time, or a fault."""
        info = ref.view(view)
        steps, done = np.asarray(steps, np.int64), 0
        try:
            with mapped(self.root, _path(ref, view)) as rows:
                if rows.shape[1:] != (info.height_px, info.width_px, 3) or rows.dtype != np.uint8:
                    raise SourceError(
                        f"expected frames as indexed, found {rows.dtype}{rows.shape[1:]}; run again", Reason.WRONG_SHAPE
                    )
                for step in steps.tolist():
                    at = step + ref.details["start"]
                    if at < len(rows):
                        yield np.array(rows[at], order="C")
                    else:
                        yield _fault(ref, view, Reason.COUNT_MISMATCH, _short(ref, len(rows)), step, step + 1)
                    done += 1
        except SourceError as error:
            yield from (
                _fault(ref, view, error.reason, error.message, step, step + 1) for step in steps[done:].tolist()
            )

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the array of a view."""
        return _path(ref, view)

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the arrays, views first."""
        names = [view.name for view in ref.views if view.present]
        names += [signal.name for signal in ref.signals if signal.name != TIME.name]
        for name in [*names, ref.details["times"]]:
            if name:
                yield Path(_path(ref, name))


def _path(ref: EpisodeRef, name: str) -> str:
    folder = ref.details["folder"]
    return f"{folder}/{name}.npy" if folder else f"{name}.npy"


def _fault(ref: EpisodeRef, name: str, reason: Reason, message: str, start: int, stop: int) -> Fault:
    path = _path(ref, ref.details["times"] if name == TIME.name else name)
    return Fault(reason=reason, message=message, episode=ref.key, stream=name, start=start, stop=stop, path=path)


def _short(ref: EpisodeRef, count: int) -> str:
    return f"expected {ref.details['start'] + ref.num_steps} steps as the other arrays have, found {count}; check the recording"


def _arrays(folder: Folder | Fault) -> list[str]:
    """Return the arrays in a folder by name. Files named by number are one step each, not arrays over steps."""
    if isinstance(folder, Fault):
        return []
    names = [name[:-4] for name in folder.files if name.endswith(".npy")]
    return sorted((name for name in names if not name.lstrip("-").isdecimal()), key=natural_key)


def _default_columns(offered: Sequence[str], word: str) -> tuple[str, ...]:
    """Return the array called ``word`` or its plural, else ``observation.word``, else all whose name begins with it."""
    for name in (f"{word}s" if word == "action" else word, word, f"observation.{word}"):
        if name in offered:
            return (name,)
    return tuple(name for name in offered if name.startswith((f"{word}_", f"{word}.", f"observation.{word}")))


@dataclass(slots=True)
class _Index:
    """An index as it grows."""

    root: Path
    episodes: list[EpisodeRef]
    faults: list[Fault]
    notes: list[str]

    def add(self, folder: Folder) -> None:
        """Add the recording or recordings of one folder."""
        key = folder.path or self.root.name
        names = _arrays(folder)
        others = len(folder.files) - len(names) - ("meta.json" in folder.files)
        if others:
            self.notes.append(f"{others} files beside the arrays of {key} were ignored")
        if len(names) > MAX_ARRAYS:
            message = f"expected at most {MAX_ARRAYS} arrays in a folder, found {len(names)}; give another folder"
            self._refuse(Reason.UNSUPPORTED, message, key, folder.path)
            return
        headers = self._headers(folder, [name for name in names if name != ENDS], key)
        if not headers:
            self._refuse(
                Reason.EMPTY_EPISODE, "expected an array along steps, found none that can be read", key, folder.path
            )
            return
        num_steps = self._count(headers, key, folder)
        if num_steps == 0:
            self._refuse(
                Reason.EMPTY_EPISODE,
                "expected 1 step or more, found arrays of length 0; drop the folder",
                key,
                folder.path,
            )
            return
        for name, (start, stop) in self._episodes(folder, key, num_steps).items():
            self.episodes.append(self._episode(folder, name, headers, (start, stop)))

    def _refuse(self, reason: Reason, message: str, key: str, path: str) -> None:
        self.faults.append(Fault(reason=reason, message=message, episode=key, path=path))

    def _headers(self, folder: Folder, names: Sequence[str], key: str) -> Mapping[str, NpyHeader]:
        headers = {}
        for name in names:
            try:
                header = read_header(self.root, folder.join(f"{name}.npy"))
            except SourceError as error:
                path = folder.join(f"{name}.npy")
                self.faults.append(
                    Fault(reason=error.reason, message=error.message, episode=key, stream=name, path=path)
                )
                continue
            if math.prod(header.shape[1:]):
                headers[name] = header
        return headers

    def _count(self, headers: Mapping[str, NpyHeader], key: str, folder: Folder) -> int:
        """Return how many steps a folder has: as many as its longest view, else as most arrays, and the longer of equals."""
        views = [header.num_steps for header in headers.values() if _is_view(header)]
        counts = Counter(header.num_steps for header in headers.values())
        num_steps = max(views) if views else max(counts, key=lambda count: (counts[count], count))
        for name, header in headers.items():
            if header.num_steps != num_steps:
                message = f"expected {num_steps} steps as the other arrays have, found {header.num_steps}; check the recording"
                start, stop = sorted((num_steps, header.num_steps))
                path = folder.join(f"{name}.npy")
                self.faults.append(
                    Fault(
                        reason=Reason.COUNT_MISMATCH,
                        message=message,
                        episode=key,
                        stream=name,
                        start=start,
                        stop=stop,
                        path=path,
                    )
                )
        return num_steps

    def _episodes(self, folder: Folder, key: str, num_steps: int) -> Mapping[str, tuple[int, int]]:
        """Return ``key -> [start, stop)`` by episode_ends.npy, or the whole folder as one."""
        if f"{ENDS}.npy" not in folder.files:
            return {key: (0, num_steps)}
        path = folder.join(f"{ENDS}.npy")
        try:
            with mapped(self.root, path) as rows:
                if rows.ndim != 1 or rows.dtype.kind not in "iu" or not 0 < len(rows) <= MAX_EPISODES:
                    raise SourceError(
                        f"expected whole numbers in {ENDS}, found {rows.dtype}{list(rows.shape)}; write it again"
                    )
                ends = np.array(rows, np.int64)
        except SourceError as error:
            self._refuse(error.reason, error.message, key, path)
            return {}
        if (np.diff(ends, prepend=0) <= 0).any():
            self._refuse(
                Reason.BAD_METADATA,
                f"expected {ENDS} that increase from above 0, found others; write it again",
                key,
                path,
            )
            return {}
        if ends[-1] != num_steps:
            message = f"expected {ENDS} up to {num_steps} steps, found {ends[-1]}; check the recording"
            self._refuse(Reason.COUNT_MISMATCH, message, key, path)
        starts = np.append(0, ends[:-1])
        prefix = f"{folder.path}/" if folder.path else ""
        pairs = zip(starts.tolist(), np.minimum(ends, num_steps).tolist(), strict=True)
        return {f"{prefix}episode_{k:06d}": pair for k, pair in enumerate(pairs) if pair[0] < pair[1]}

    def _episode(
        self, folder: Folder, key: str, headers: Mapping[str, NpyHeader], bounds: tuple[int, int]
    ) -> EpisodeRef:
        times = next((name for name in TIMES if name in headers and _is_time(headers[name])), "")
        rate_hz, instructions = self._meta(folder, has_times=bool(times))
        views, signals = [], []
        for name, header in headers.items():
            if as_text(name) != name or name == times:
                continue
            if _is_view(header):
                views.append(ViewInfo(name=name, height_px=header.shape[1], width_px=header.shape[2], encoding="raw"))
            elif name != TIME.name:
                signals.append(SignalInfo(name=name, shape=header.shape[1:], dtype=header.dtype.name))
        return EpisodeRef(
            key=key,
            num_steps=bounds[1] - bounds[0],
            rate_hz=rate_hz,
            views=tuple(views),
            signals=(*signals, TIME),
            instructions=instructions,
            details={"folder": folder.path, "start": bounds[0], "times": times},
        )

    def _meta(self, folder: Folder, *, has_times: bool) -> tuple[float, tuple[str, ...]]:
        """Return rate and instructions of meta.json, of the folder before the root's."""
        data: dict[str, Any] = {}
        for path in dict.fromkeys(("meta.json", folder.join("meta.json"))):
            if os.path.lexists(self.root / path):
                try:
                    data.update(read_json(self.root, path))
                except SourceError as error:
                    fault = Fault(reason=error.reason, message=error.message, path=path)
                    self.faults += [fault] if fault not in self.faults else []
        rate_hz, instructions = as_rate(data.get("rate_hz")), data.get("instructions", [])
        if not rate_hz:
            if not has_times:
                self.notes.append("no rate_hz in meta.json and no timestamp_s.npy: one step counts as one second")
            rate_hz = 0.0 if has_times else DEFAULT_RATE_HZ
        texts = (
            [instructions] if isinstance(instructions, str) else instructions if isinstance(instructions, list) else []
        )
        return rate_hz, tuple(as_text(text) for text in texts if isinstance(text, str))


def _is_view(header: NpyHeader) -> bool:
    return header.dtype == np.uint8 and len(header.shape) == 4 and header.shape[3] == 3


def _is_time(header: NpyHeader) -> bool:
    return header.dtype.kind == "f" and len(header.shape) == 1
