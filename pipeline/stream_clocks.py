"""Sources whose streams have clocks of their own: each view and signal aligned to the output grid by its own recorded times.

A reader of such a format has a method ``on_own_clock(ref, name)`` that returns the episode as the messages of one stream step through it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from pipeline.readers.protocol import Reader
from schemas.errors import Reason, SourceError, locate
from schemas.recipe import ALIGNMENTS
from schemas.source import EpisodeRef, Fault
from tasks.align import Alignment, align
from tasks.quality import runs


@dataclass(frozen=True, slots=True)
class StreamClock:
    """One stream's steps, and which of them serve the steps of a segment."""

    ref: EpisodeRef
    """The episode in the stream's own steps."""
    alignment: dict[str, Alignment]
    """By method."""
    period_s: float
    """Usual time between its steps; 0 where there is one alone."""

    def gaps(self, method: str, tolerance_s: float, default_period_s: float) -> tuple[Bool[np.ndarray, " step"], float]:
        """Return which steps nothing recorded serves, and the tolerance in s by which that was judged.

        ``previous`` holds the last one as long as it takes, unless a tolerance was asked for; before the first one there is none.
        """
        error_s = self.alignment[method].error_s
        if method == "previous":
            limit_s = (tolerance_s or np.inf) + 1e-6
            return (error_s > 1e-6) | (-error_s > limit_s), limit_s
        limit_s = (tolerance_s or 0.75 * (self.period_s or default_period_s)) + 1e-6
        return np.abs(error_s) > limit_s, limit_s


def own_clock(
    reader: Reader,
    ref: EpisodeRef,
    name: str,
    grid_s: Float64[np.ndarray, " step"],
    known: Iterable[StreamClock],
) -> StreamClock | None:
    """Align a stream to times in seconds from the episode's start; None where it has the episode's own steps.

    One of the ``known`` clocks is taken where it is the stream's too.
    """
    if not hasattr(reader, "on_own_clock"):
        return None
    own: EpisodeRef = reader.on_own_clock(ref, name)
    if own is ref:
        return None
    for clock in known:
        if clock.ref == own:
            return clock
    with locate(stream=name):
        times_s = np.asarray(reader.read_signals(own, ["timestamp_s"], np.arange(own.num_steps)).values["timestamp_s"])
        if not len(times_s):
            raise SourceError("expected messages, found none; leave the stream out", Reason.EMPTY_EPISODE)
        alignment = {method: align(times_s, grid_s, method) for method in ALIGNMENTS}
    return StreamClock(own, alignment, float(np.median(np.diff(times_s))) if len(times_s) > 1 else 0.0)


def gap_faults(
    clock: StreamClock, name: str, method: str, gaps: np.ndarray, limit_s: float
) -> list[tuple[slice, Fault]]:
    """Return runs of steps that nothing recorded serves, each with its fault, which counts in the stream's own steps."""
    found = []
    aligned = clock.alignment[method]
    for start, stop in runs(gaps):
        error_s = float(np.abs(aligned.error_s[start:stop]).max())
        within = f"within {limit_s:.4f} s of each step" if np.isfinite(limit_s) else "at or before each step"
        message = f"expected a message on {name} {within}, found none for {stop - start} steps, up to {error_s:.4f} s; raise tolerance_s"
        first, last = int(aligned.lower[start]), int(aligned.lower[stop - 1])
        fault = Fault(
            reason=Reason.TIME_GAP, message=message, episode=clock.ref.key, stream=name, start=first, stop=last + 1
        )
        found.append((slice(start, stop), fault))
    return found
