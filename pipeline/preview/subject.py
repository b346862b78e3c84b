"""What a preview is made of: the same questions to raw recordings and to a dataset, each answered with a bounded read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from schemas.source import Fault

Picture = UInt8[np.ndarray, "height width 3"] | str
"""A frame, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode, as its row of the preview says it."""

    key: str
    num_steps: int
    rate_hz: float
    """Nominal rate; 0 where it has none."""
    instructions: tuple[str, ...] = ()
    views: frozenset[str] = frozenset()
    """Views that it has."""
    source: str = ""
    start: int = 0
    """Its first step in the dataset."""
    num_invalid: int = 0
    is_served: bool = True
    """False where it was dropped, or another recording took its place."""
    rate_measured_hz: float = float("nan")
    jitter_s: float = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A numeric stream: one row of features a step."""

    name: str
    features: tuple[str, ...]
    units: tuple[str, ...]
    """One a feature; empty where it is not said."""
    is_main: bool = True
    """Whether it is, or makes, state or actions."""
    mean: tuple[float, ...] = ()
    """By which training normalises it; empty where nothing says."""
    std: tuple[float, ...] = ()

    def whole_name(self, k: int) -> str:
        """Return a feature's name with that of its signal, since many a signal's features are called just x and y."""
        feature = self.features[k]
        return feature if feature.startswith(self.name) or "." in feature else f"{self.name}.{feature}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What was refused: how much, and the first of it."""

    counts: Mapping[str, int]
    """``reason -> pieces of input``."""
    shown: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactTable:
    """A table of facts."""

    caption: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    numeric: tuple[int, ...] = ()
    """Columns of numbers, which stand to the right."""


TO_UNIT_RANGE = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Frames in [-1, 1], as openpi normalises them."""


class Subject(Protocol):
    """What a preview shows."""

    path: Path
    kind: str
    """``raw recordings`` or ``dataset``."""
    num_steps: int
    episodes: Sequence[Episode]
    views: Mapping[str, str]
    """``view -> what it is``: size, encoding, where it comes from."""
    signals: Sequence[Signal]
    frame_scaling: tuple[Sequence[float], Sequence[float]]
    """Mean and standard deviation of red, green and blue in [0, 1] by which training normalises frames."""

    def frames(self, episode: int, view: str, steps: Int64[np.ndarray, " n"]) -> list[Picture]:
        """Return the frames of ``steps`` (sorted) of an episode, for each that is absent the reason."""

    def rows(
        self, episode: int, names: Sequence[str], steps: Int64[np.ndarray, " n"]
    ) -> dict[str, Float64[np.ndarray, "n features"]]:
        """Return rows of signals; NaN where they could not be read."""

    def times(self, episode: int, steps: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Return seconds from the start of the episode."""

    def lateness(self, episode: int, steps: Int64[np.ndarray, " n"]) -> tuple[str, Float64[np.ndarray, " n"]]:
        """Return a title and, for each step, how far in seconds it is from where it should be."""

    def sample(self, names: Sequence[str]) -> dict[str, Float64[np.ndarray, "n features"]]:
        """Return rows of signals from all over, at most SAMPLE_ROWS; nothing where that would take long."""

    def refusals(self, count: int) -> Refusals:
        """Return what was refused."""

    def near(self, fault: Fault) -> tuple[Picture, str]:
        """Return a frame from just before what was refused, and what it is; or why there is none, and nothing."""

    def facts(self) -> list[tuple[str, object]]:
        """Return what else a person should know at once: name and value."""

    def provenance(self, episodes: Sequence[int]) -> list[FactTable]:
        """Return where it comes from, checksums and sizes; what must be looked up by episode, for ``episodes``."""


SAMPLE_ROWS = 24_576
"""Rows of a signal from which distributions are drawn."""
