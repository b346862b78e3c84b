"""Raw recordings as a preview sees them: through the node of the conversion's graph, so that what it shows is what is written."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.graph import frames, signals
from pipeline.preview.subject import TO_UNIT_RANGE, Episode, FactTable, Picture, Refusals, Signal
from pipeline.readers import open_source
from pipeline.summaries import nbytes_text
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, SignalInfo

MAX_FILES = 2000
"""Files of the sampled episodes that are looked up for their size."""


class RawSubject:
    """A source, opened and indexed."""

    kind = "raw recordings"
    frame_scaling: tuple[Sequence[float], Sequence[float]] = TO_UNIT_RANGE

    def __init__(self, path: Path, format: str = "", options: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.reader = open_source(path, format, options)
        self.index = self.reader.index()
        self.refs = self.index.episodes
        if not self.refs:
            why = f": {self.index.faults[0].message}" if self.index.faults else ""
            raise SourceError(
                f"expected an episode, found none that can be read{why}; see `headrace inspect`",
                Reason.EMPTY_EPISODE,
                source=self.index.name,
            )
        self.episodes: Sequence[Episode] = [_episode(ref) for ref in self.refs]
        self.num_steps = sum(ref.num_steps for ref in self.refs)
        self.views: Mapping[str, str] = _views(self.refs)
        self._offered: dict[str, SignalInfo] = {}
        for ref in self.refs:
            for signal in ref.signals:
                if np.dtype(signal.dtype).kind in "fiub" and signal.size:
                    self._offered.setdefault(signal.name, signal)
        main = {*self.index.state, *self.index.actions}
        named = [_signal(info, info.name in main) for name, info in self._offered.items() if name != "timestamp_s"]
        self.signals: Sequence[Signal] = sorted(named, key=lambda signal: not signal.is_main)
        self._met: dict[tuple[str, str, int], Fault] = {}

    def frames(self, episode: int, view: str, steps: np.ndarray) -> list[Picture]:
        """Return frames as they were recorded; depth and labels as pictures."""
        ref = self.refs[episode]
        if view not in self.episodes[episode].views:
            return ["the episode lacks this view"] * len(steps)
        found: list[Picture] = []
        try:
            for frame in frames(self.reader, ref, view, steps):
                if isinstance(frame, Fault):
                    self._met[ref.key, view, frame.start] = frame
                    found.append(f"{frame.reason}: {frame.message}")
                else:
                    found.append(as_picture(frame))
        except SourceError as error:
            self._note(error, ref, view)
            found += [f"{error.reason}: {error.message}"] * (len(steps) - len(found))
        return found

    def rows(self, episode: int, names: Sequence[str], steps: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows as recorded, flattened."""
        ref = self.refs[episode]
        offered = {signal.name: signal for signal in ref.signals}
        asked = [name for name in names if name in offered and offered[name].shape == self._offered[name].shape]
        out = {name: np.full((len(steps), self._offered[name].size), np.nan) for name in names}
        try:
            values, faults = signals(self.reader, ref, asked, steps)
        except SourceError as error:
            self._note(error, ref, asked[0] if asked else "")
            return out
        self._met.update({(ref.key, fault.stream, fault.start): fault for fault in faults})
        ends = np.cumsum([self._offered[name].size for name in asked]).tolist()
        out.update(zip(asked, np.split(values, ends[:-1], axis=1), strict=True) if asked else ())
        return out

    def times(self, episode: int, steps: np.ndarray) -> np.ndarray:
        """Return the recorded times."""
        try:
            values, _ = signals(self.reader, self.refs[episode], ["timestamp_s"], steps)
        except SourceError as error:
            self._note(error, self.refs[episode], "timestamp_s")
            return np.full(len(steps), np.nan)
        return values[:, 0]

    def lateness(self, episode: int, steps: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the time since the step before, less the usual period."""
        time_s = self.times(episode, steps)
        periods = np.diff(time_s, prepend=np.nan)
        usual = float(np.nanmedian(periods)) if np.isfinite(periods).any() else np.nan
        return "time since the step before, less the median", periods - usual

    def sample(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return nothing: what was read of the episodes shown is all that a format of one file a step gives quickly."""
        return {}

    def refusals(self, count: int) -> Refusals:
        """Return the faults of the index, then those met while the preview was made."""
        faults = [*self.index.faults, *self._met.values()]
        return Refusals(counts=dict(Counter(str(fault.reason) for fault in faults)), shown=tuple(faults[:count]))

    def near(self, fault: Fault) -> tuple[Picture, str]:
        """Return the frame before the fault."""
        places = [k for k, ref in enumerate(self.refs) if ref.key == fault.episode]
        views = [view for view in self.views if places and view in self.episodes[places[0]].views]
        if not views or not self.refs[places[0]].num_steps:
            return "no frame of it can be read", ""
        view = fault.stream if fault.stream in views else views[0]
        step = max(0, min(fault.start, self.refs[places[0]].num_steps) - 1)
        return self.frames(places[0], view, np.array([step]))[0], f"{view}, step {step:,}"

    def facts(self) -> list[tuple[str, object]]:
        """Return format, state and actions."""
        makes = [("state", self.index.state), ("actions", self.index.actions)]
        return [
            ("Format", self.index.format),
            *((f"Makes {name}", ", ".join(columns)) for name, columns in makes if columns),
            *(("Note", note) for note in self.index.notes),
        ]

    def provenance(self, episodes: Sequence[int]) -> list[FactTable]:
        """Return the files of the sampled episodes."""
        rows: list[tuple[object, ...]] = []
        num_files = 0
        for episode in episodes:
            nbytes, files = 0, list(self.reader.files(self.refs[episode]))
            num_files += len(files)
            if num_files > MAX_FILES and rows:
                break
            for file in files:
                nbytes += _nbytes(self.reader.root / file)
            per_step = nbytes / max(self.refs[episode].num_steps, 1)
            rows.append((self.refs[episode].key, f"{len(files):,}", nbytes_text(nbytes), nbytes_text(per_step)))
        caption = (
            f"Files of {len(rows):,} of {len(self.refs):,} episodes; recordings carry no checksums, a dataset does"
        )
        return [
            FactTable(caption=caption, headers=("Episode", "Files", "Size", "A step"), rows=rows, numeric=(1, 2, 3))
        ]

    def _note(self, error: SourceError, ref: EpisodeRef, stream: str) -> None:
        fault = Fault(reason=error.reason, message=error.message, episode=ref.key, stream=stream)
        self._met[ref.key, stream, -1] = fault


def as_picture(frame: np.ndarray) -> np.ndarray:
    """Return a frame of any kind as ``uint8[height, width, 3]``: depth by the logarithm of its distance, labels by a colour each."""
    if frame.ndim == 3:
        return frame
    if frame.dtype.kind == "f":
        near = np.log10(np.clip(frame, 1.0, 1000.0)) / 3.0
        return np.repeat((255 * (1.0 - near)).astype(np.uint8)[..., None], 3, axis=2)
    palette = np.random.default_rng(0).integers(40, 256, (256, 3), dtype=np.uint8)
    palette[0] = 0
    return palette[frame & 255]


def _episode(ref: EpisodeRef) -> Episode:
    return Episode(
        key=ref.key,
        num_steps=ref.num_steps,
        rate_hz=ref.rate_hz,
        instructions=ref.instructions,
        views=frozenset(view.name for view in ref.views if view.present),
    )


def _views(refs: Sequence[EpisodeRef]) -> dict[str, str]:
    said: dict[str, dict[str, None]] = {}
    for ref in refs:
        for view in ref.views:
            sizes = said.setdefault(view.name, {})
            if view.present:
                size = f"{view.width_px} x {view.height_px} px" if view.width_px else "size unknown"
                sizes[f"{size}, {view.encoding}" + ("" if view.kind == "rgb" else f", {view.kind}")] = None
    return {view: "; ".join(list(sizes)[:3]) or "in no episode" for view, sizes in said.items()}


def _signal(info: SignalInfo, is_main: bool) -> Signal:
    features = info.names if len(info.names) == info.size else tuple(f"{info.name}[{k}]" for k in range(info.size))
    if not info.shape:
        features = (info.name,)
    return Signal(name=info.name, features=features, units=(info.units,) * info.size, is_main=is_main)


def _nbytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
