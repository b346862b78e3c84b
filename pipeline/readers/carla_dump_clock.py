"""Which step a simulator frame is, and when: frames are no steps where a camera saves every so many of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.readers.carla_dump_files import read_table
from schemas.errors import Reason, SourceError

JITTER_S = 1e-4
"""Least error of a table's times that is not rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Frames and times of the steps of one recording."""

    num_steps: int
    first: int
    """Frame of step 0."""
    stride: int = 1
    """Frames from a step to the next."""
    rate_hz: float = 0.0
    """0 where steps are not evenly spaced."""
    numbers: tuple[int, ...] = ()
    """Frame of each step, where they are not evenly spaced."""
    seconds: tuple[float, ...] = ()
    """Time of each of ``numbers`` from the first."""

    def details(self) -> dict[str, Any]:
        """Return JSON values; :meth:`of` reads them back."""
        return {
            "first": self.first,
            "stride": self.stride,
            "numbers": list(self.numbers),
            "seconds": list(self.seconds),
        }

    @staticmethod
    def of(details: Mapping[str, Any], rate_hz: float) -> "Clock":
        """Read back what :meth:`details` gave."""
        return Clock(
            num_steps=len(details["numbers"]),
            first=details["first"],
            stride=details["stride"],
            rate_hz=rate_hz,
            numbers=tuple(details["numbers"]),
            seconds=tuple(details["seconds"]),
        )

    def frames(self, steps: np.ndarray) -> np.ndarray:
        """Return the simulator's frame of each step, int64."""
        return np.array(self.numbers, np.int64)[steps] if self.numbers else self.first + self.stride * steps

    def times_s(self, steps: np.ndarray) -> np.ndarray:
        """Return each step's time from the first step's."""
        return np.array(self.seconds)[steps] if self.numbers else np.asarray(steps) / self.rate_hz


def read_clock(frames: np.ndarray, root: Path, tables: Sequence[str], fixed_delta_s: float) -> Clock:
    """Lay recorded ``frames`` (increasing, of all cameras and records together) out in steps.

    Steps are as far apart as all frames allow (their greatest common divisor), so that a frame which was lost is a step
    without it and shifts none of its followers. Where that would leave more than half of the steps empty, as for a camera
    that saves every third or fourth frame by turns, or where frames lasted unequally long, the recorded frames are the steps and have times of their own.

    Raises
    ------
    SourceError
        Where nothing says how long a frame lasts.
    """
    frame_s, seconds, is_even = fixed_delta_s, (frames - frames[0]) * fixed_delta_s, True
    if not fixed_delta_s:
        known, times_s = _recorded_times(frames, root, tables)
        frame_s = float(times_s[-1]) / int(known[-1] - known[0])
        is_even = bool(np.abs((known - known[0]) * frame_s - times_s).max() <= JITTER_S)
        frames, seconds = (frames, (frames - frames[0]) * frame_s) if is_even else (known, times_s)
    if len(frames) < 2 or not np.all(np.diff(seconds) > 0):
        raise SourceError(
            "expected two frames or more, at times that increase, found others; write the times again, or give --reader fixed_delta_s=0.05",
            Reason.TIME_ORDER,
        )
    stride = int(np.gcd.reduce(np.diff(frames)))
    count = int(frames[-1] - frames[0]) // stride + 1
    if is_even and count <= 2 * len(frames) + 10:
        return Clock(
            num_steps=count, first=int(frames[0]), stride=stride, rate_hz=float(f"{1 / (stride * frame_s):.9g}")
        )
    return Clock(
        num_steps=len(frames),
        first=int(frames[0]),
        numbers=tuple(frames.tolist()),
        seconds=tuple(seconds.tolist()),
    )


def _recorded_times(frames: np.ndarray, root: Path, tables: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return those of ``frames`` to which a table gives a time, and these times from the first."""
    for path in tables:
        table = read_table(root, path)
        if len(table.times_s):
            known = np.isfinite(table.times_s)
            both, _, at = np.intersect1d(frames, table.frames[known], assume_unique=True, return_indices=True)
            if len(both) > 1:
                times_s = table.times_s[known][at]
                return both, times_s - times_s[0]
    raise SourceError(
        "expected a table of frames and times, such as timestamps.csv, found none; give --reader fixed_delta_s=0.05",
        Reason.BAD_METADATA,
    )
