"""What a reader is: two questions about one raw format."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from schemas.source import EpisodeRef, Frame, SignalBlock, SourceIndex


class Reader(Protocol):
    """One raw format below one root folder.

    An instance is small, immutable and picklable: options and the root are its fields, open files are not.
    ``steps`` are recorded step numbers, sorted, repeats allowed (a resampled grid asks for one step twice).

    A format whose streams come at rates of their own has one more method, ``on_own_clock(ref, name) -> EpisodeRef``: the episode as
    one stream's messages step through it, for the same questions (:mod:`pipeline.stream_clocks`).
    """

    name: str
    root: Path

    def index(self) -> SourceIndex:
        """List what is here from metadata alone: no pixel is decoded, no column of a table is loaded.

        A broken episode becomes a fault of the index, never an exception; an unusable root raises SourceError.
        """

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. ``timestamp_s`` (float64, from the episode's start) is always offered."""

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield exactly one frame, or fault, for each of ``steps``, in order. A view that is not present yields faults."""

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the file that holds a frame, relative to ``root``: a frame that cannot be decoded is quarantined with it."""

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name every file that reading this episode would touch, relative to ``root``."""
