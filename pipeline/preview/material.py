"""Everything that a page shows, read once: which episodes, steps and features, and their frames and rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.preview.subject import Episode, Picture, Refusals, Signal, Subject
from schemas.errors import UsageError
from tasks.chart import Spread, evenly, spread_of

MAX_VIEWS = 12
MAX_TILES = 288
"""Frames on the contact sheets of a page."""
MAX_FEATURES = 128
LINE_STEPS = 240
"""Steps of an episode from which its lines are drawn."""
TIMING_STEPS = 2000
"""Steps of an episode whose times are looked at, from its first."""
LINE_EPISODES = 4
"""Episodes drawn into the chart of a feature."""
REFUSED_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOptions:
    """How much a preview shows, and of what."""

    episode: int | None = None
    """The only episode to show, by its number; None spreads over all."""
    episodes: int = 12
    """Episodes on a page, at most."""
    samples: int = 6
    """Planner samples, at most."""
    columns: int = 8
    """Frames of an episode on a contact sheet, at most."""

    def __post_init__(self) -> None:
        if min(self.episodes, self.samples, self.columns) < 1:
            raise UsageError("expected 1 or more episodes and samples, found fewer; correct --episodes or --samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Frames of one episode: instants and, for each view, its pictures."""

    steps: np.ndarray
    times_s: np.ndarray
    pictures: Mapping[str, Sequence[Picture]]


class Material:
    """What a page shows of a subject, read when it is first asked for, and kept."""

    def __init__(self, subject: Subject, options: PreviewOptions) -> None:
        self.subject, self.options = subject, options
        self.chosen = choose_episodes(subject.episodes, options)

    def episode(self, number: int) -> Episode:
        """Return an episode by its number."""
        return self.subject.episodes[number]

    @cached_property
    def views(self) -> list[str]:
        """Views on the contact sheets."""
        return list(self.subject.views)[:MAX_VIEWS]

    @cached_property
    def sheet_episodes(self) -> list[int]:
        """Episodes on the contact sheets: as many as MAX_TILES allows."""
        per_episode = max(len(self.views), 1) * self.options.columns
        most = max(1, MAX_TILES // per_episode)
        return [self.chosen[k] for k in evenly(len(self.chosen), most).tolist()]

    @cached_property
    def sheets(self) -> dict[int, Sheet]:
        """Contact sheets, by episode."""
        return {
            number: read_sheet(self.subject, number, self.views, self.options.columns) for number in self.sheet_episodes
        }

    @cached_property
    def signals(self) -> list[tuple[Signal, int]]:
        """Signals that are drawn, state and actions first, and how many of each one's features."""
        shown, left = [], MAX_FEATURES
        for signal in sorted(self.subject.signals, key=lambda signal: not signal.is_main):
            count = min(len(signal.features), left)
            if count:
                shown.append((signal, count))
            left -= count
        return shown

    @cached_property
    def lines(self) -> dict[int, tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Times and rows of each chosen episode at a few hundred steps."""
        names = [signal.name for signal, _ in self.signals]
        found = {}
        for number in self.chosen:
            steps = evenly(self.episode(number).num_steps, LINE_STEPS)
            found[number] = (
                self.subject.times(number, steps),
                self.subject.rows(number, names, steps) if names else {},
            )
        return found

    @cached_property
    def pool(self) -> dict[str, np.ndarray]:
        """Rows of each signal from which its distribution is drawn."""
        names = [signal.name for signal, _ in self.signals]
        pool = self.subject.sample(names)
        return pool or {name: np.concatenate([rows[name] for _, rows in self.lines.values()]) for name in names}

    @cached_property
    def spreads(self) -> dict[tuple[str, int], Spread]:
        """Distribution of each drawn feature."""
        return {
            (signal.name, k): spread_of(self.pool[signal.name][:, k])
            for signal, count in self.signals
            for k in range(count)
        }

    @cached_property
    def refusals(self) -> Refusals:
        """What was refused; asked for last, since reading finds more."""
        return self.subject.refusals(REFUSED_ROWS)

    def frames_of(self, view: str, episode: int | None = None) -> list[np.ndarray]:
        """Return the frames of a view that the contact sheets show: of one episode, or of all."""
        sheets = self.sheets.values() if episode is None else [self.sheets[episode]]
        found = (picture for sheet in sheets for picture in sheet.pictures.get(view, ()))
        return [picture for picture in found if not isinstance(picture, str)]


def choose_episodes(episodes: Sequence[Episode], options: PreviewOptions) -> list[int]:
    """Return the numbers of the episodes to show, of those that are served; UsageError where the one asked for is not there."""
    if options.episode is None:
        served = [k for k, episode in enumerate(episodes) if episode.is_served] or range(len(episodes))
        return [served[k] for k in evenly(len(served), options.episodes).tolist()]
    if not 0 <= options.episode < len(episodes):
        raise UsageError(
            f"expected an --episode of 0 to {len(episodes) - 1}, found {options.episode}; choose one that there is"
        )
    return [options.episode]


def read_sheet(subject: Subject, number: int, views: Sequence[str], columns: int) -> Sheet:
    """Read evenly spread frames of an episode."""
    steps = evenly(subject.episodes[number].num_steps, columns)
    return Sheet(
        steps=steps,
        times_s=subject.times(number, steps),
        pictures={view: subject.frames(number, view, steps) for view in views},
    )


def open_subject(path: Path, format: str = "", reader: Mapping[str, str] | None = None) -> Subject:
    """Open a dataset, or raw recordings: whichever ``path`` is.

    Raises
    ------
    UsageError
        Options of a reader are given for a dataset.
    SourceError, DatasetError
        Neither can be opened.
    """
    from pipeline.preview.dataset_subject import DatasetSubject
    from pipeline.preview.raw_subject import RawSubject

    work = path.parent / f"{path.name}.work" / "plan.json"
    is_dataset = work.exists() or (path / "_tables").is_dir() or _is_dataset_root(path / "zarr.json")
    if is_dataset and not format:
        if reader:
            raise UsageError("expected no --reader for a dataset, found one; leave it out")
        return DatasetSubject(path)
    return RawSubject(path, format, reader)


def _is_dataset_root(document: Path) -> bool:
    return document.is_file() and b'"headrace"' in document.read_bytes()
