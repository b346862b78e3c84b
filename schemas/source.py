"""What a raw recording is, before anything of it is decoded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schemas.errors import Reason, SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewInfo:
    """A named viewpoint that an episode offers."""

    name: str
    height_px: int
    """Declared height; 0 where the metadata does not say and only decoding would tell."""
    width_px: int
    encoding: str
    """``jpeg``, ``png``, ``video``, ``raw``: how frames cross from the reader."""
    kind: str = "rgb"
    """``rgb``, ``depth`` or ``labels`` (class ids; never resized by interpolation)."""
    present: bool = True
    """False where the source declares the view and this episode does not have it."""


TEXT = "utf-8"
"""Units of a signal whose rows are texts: ``uint8[nbytes]``, zeros after the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalInfo:
    """A named numeric stream of an episode: one row a step."""

    name: str
    shape: tuple[int, ...]
    """Shape of one row; ``()`` for a scalar."""
    dtype: str
    """NumPy name, as recorded."""
    names: tuple[str, ...] = ()
    """Feature names, where the source gives one for each element."""
    units: str = ""

    @property
    def size(self) -> int:
        """Number of elements of one row."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRef:
    """One recorded episode of a source, known from metadata alone."""

    key: str
    """Stable name within the source, with ``/`` between folders; never depends on where the source lies."""
    num_steps: int
    """Length in recorded steps."""
    rate_hz: float
    """Nominal rate of the recording; 0 where it has none and timestamps are irregular."""
    views: tuple[ViewInfo, ...]
    signals: tuple[SignalInfo, ...]
    instructions: tuple[str, ...] = ()
    """Language instructions; the optional signal ``instruction_index`` says which one serves a step (default the first)."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the reader needs to find the files again (JSON values), and facts worth keeping: town, weather, robot."""

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise SchemaError(f"expected a length of 0 or more steps, found {self.num_steps}; check the metadata")

    def view(self, name: str) -> ViewInfo:
        """Return the view called ``name``; SchemaError names those there are."""
        for view in self.views:
            if view.name == name:
                return view
        raise SchemaError(f"expected one of the views {[v.name for v in self.views]}, found {name!r}; see `inspect`")

    def signal(self, name: str) -> SignalInfo:
        """Return the signal called ``name``; SchemaError names those there are."""
        for signal in self.signals:
            if signal.name == name:
                return signal
        found = [s.name for s in self.signals]
        raise SchemaError(f"expected one of the signals {found}, found {name!r}; see `inspect`")


def declare_all_views(episodes: Sequence[EpisodeRef]) -> Iterator[EpisodeRef]:
    """Yield the episodes with the views of all of them, those of others as absent."""
    views = {view.name: replace(view, present=False) for ref in episodes for view in ref.views}
    for ref in episodes:
        own = {view.name: view for view in ref.views}
        yield replace(ref, views=tuple(own.get(name, view) for name, view in views.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A piece of a recording that was refused, left out or found odd: one row of the quarantine table."""

    reason: Reason
    message: str
    episode: str = ""
    """Key of the episode; empty where the fault belongs to the whole source."""
    stream: str = ""
    """View or signal; empty where the fault belongs to the whole step or episode."""
    start: int = 0
    """First recorded step concerned."""
    stop: int = 0
    """One past the last; ``start == stop`` where the whole episode is meant."""
    path: str = ""
    """File, relative to the source."""
    is_warning: bool = False
    """Whether it is served all the same."""

    @property
    def is_refusal(self) -> bool:
        """Whether something that was wanted is not served."""
        return not (self.is_warning or self.reason.is_wish)


Frame = bytes | np.ndarray | Fault
"""One frame as a reader hands it over: encoded bytes, a decoded ``uint8[height, width, 3]``, or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Training samples as a source holds them, one a step."""

    values: Mapping[str, np.ndarray]
    """``name -> [step, *shape]``; zeros where a sample could not be read."""
    is_read: np.ndarray
    """bool ``[step]``."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalBlock:
    """Rows of several signals for the same recorded steps."""

    values: Mapping[str, np.ndarray]
    """``name -> [step, *shape]`` as recorded; floating rows that could not be read are NaN."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """What an index of a source found: all episodes in natural order, and what was refused already."""

    format: str
    """Name of the reader."""
    name: str
    """Folder name of the source."""
    episodes: tuple[EpisodeRef, ...]
    faults: tuple[Fault, ...] = ()
    state: tuple[str, ...] = ()
    """Signals that make ``state`` unless the recipe says otherwise, in order."""
    actions: tuple[str, ...] = ()
    """Signals that make ``actions`` unless the recipe says otherwise, in order."""
    tensors: tuple[SignalInfo, ...] = ()
    """Arrays of training samples that the recordings are, one sample a step, in their order; empty for recordings of anything else."""
    notes: tuple[str, ...] = ()
    """What a person should know and no program must act on."""
