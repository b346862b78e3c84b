"""Windows of a fixed length over episodes, as Diffusion Policy and Diffuser cut them: which there are, and their rows.

Nothing is listed: the window of any number is computed from the episodes alone, so that an index of 20 million windows
costs no memory and no time. :func:`create_indices` lists them all as Diffusion Policy does.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64

from schemas.errors import SchemaError, UsageError
from tasks.kernels.windows import gather_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """All windows of a dataset, numbered from 0, episode by episode, each one step after the one before."""

    starts: Int64[np.ndarray, " episode"]
    """First step of each episode."""
    stops: Int64[np.ndarray, " episode"]
    """One past its last."""
    ends: Int64[np.ndarray, " episode"]
    """One past the number of each episode's last window."""
    lead: int
    """Steps by which an episode's first window begins before the episode."""

    @property
    def num(self) -> int:
        """Number of windows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def at(
        self, numbers: Int64[np.ndarray, " batch"]
    ) -> tuple[Int64[np.ndarray, " batch"], Int64[np.ndarray, " batch"], Int64[np.ndarray, " batch"]]:
        """Return the first step of each window, which may lie before its episode, and the episode's bounds."""
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.num):
            raise UsageError(
                f"expected windows in [0, {self.num}), found {numbers.min()} to {numbers.max()}; correct the call"
            )
        episodes = np.searchsorted(self.ends, numbers, side="right")
        before = np.where(episodes > 0, self.ends[episodes - 1], 0)
        firsts = self.starts[episodes] - self.lead + numbers - before
        return firsts, self.starts[episodes], self.stops[episodes]


def split_at_invalid(
    episode_ends: Int64[np.ndarray, " episode"], valid: Bool[np.ndarray, " step"]
) -> tuple[Int64[np.ndarray, " piece"], Int64[np.ndarray, " piece"]]:
    """Return ``[start, stop)`` of the longest pieces of episodes whose steps are all valid.

    A window never crosses a step that must not be served: what lies on either side is an episode of its own.
    """
    if len(valid) != (int(episode_ends[-1]) if len(episode_ends) else 0):
        raise SchemaError(
            f"expected episode ends up to {len(valid)} steps, found {episode_ends[-1:]}; run `headrace verify`"
        )
    begins = np.zeros(len(valid) + 1, np.bool_)
    begins[np.concatenate([[0], episode_ends]).astype(np.int64)] = True
    before = np.concatenate([[False], valid])
    after = np.concatenate([valid, [False]])
    starts = np.flatnonzero(after & (begins | ~before))
    stops = np.flatnonzero(before & (begins | ~after))
    return starts, stops


def padded_windows(
    bounds: tuple[Int64[np.ndarray, " episode"], Int64[np.ndarray, " episode"]],
    horizon: int,
    *,
    pad_before: int = 0,
    pad_after: int = 0,
) -> Windows:
    """Return Diffusion Policy's windows: ``max(0, length - horizon + pad_before + pad_after + 1)`` of each episode.

    ``create_indices`` of diffusion_policy/common/sampler.py at 5ba07ac6, which clamps both paddings to ``horizon - 1``.

    Parameters
    ----------
    bounds
        First and one past the last step of each episode.
    horizon
        Steps of a window.
    pad_before, pad_after
        Steps by which a window may begin before its episode and end after it.
    """
    starts, stops = bounds
    _check_horizon(horizon)
    before, after = (min(max(pad, 0), horizon - 1) for pad in (pad_before, pad_after))
    counts = np.maximum(stops - starts - horizon + before + after + 1, 0)
    return Windows(starts=starts, stops=stops, ends=np.cumsum(counts), lead=before)


def diffuser_windows(
    bounds: tuple[Int64[np.ndarray, " episode"], Int64[np.ndarray, " episode"]],
    horizon: int,
    *,
    max_steps: int = 0,
    use_padding: bool = True,
) -> Windows:
    """Return Diffuser's windows: those that begin at each of an episode's steps but the last.

    ``make_indices`` of diffuser/datasets/sequence.py at 7ea42286: ``min(length - 1, max_path_length - horizon)`` of each
    episode, without padding also at most ``length - horizon``: its range excludes the last window that would fit.

    Parameters
    ----------
    max_steps
        Diffuser's ``max_path_length``; 0 for episodes of any length.
    use_padding
        Whether a window may end after its episode.
    """
    starts, stops = bounds
    _check_horizon(horizon)
    lengths = stops - starts
    counts = lengths - 1
    if max_steps:
        counts = np.minimum(counts, max_steps - horizon)
    if not use_padding:
        counts = np.minimum(counts, lengths - horizon)
    return Windows(starts=starts, stops=stops, ends=np.cumsum(np.maximum(counts, 0)), lead=0)


def _check_horizon(horizon: int) -> None:
    if horizon < 1:
        raise UsageError(f"expected a horizon of 1 or more, found {horizon}; correct the call")


def create_indices(
    episode_ends: Int64[np.ndarray, " episode"], horizon: int, *, pad_before: int = 0, pad_after: int = 0
) -> Int64[np.ndarray, "window 4"]:
    """List Diffusion Policy's windows as its ``create_indices`` does: buffer start and end, sample start and end.

    >>> create_indices(np.array([3]), 2, pad_after=1).tolist()
    [[0, 2, 0, 2], [1, 3, 0, 2], [2, 3, 0, 1]]
    """
    ends = np.asarray(episode_ends, np.int64)
    windows = padded_windows(
        (np.concatenate([[0], ends])[:-1], ends), horizon, pad_before=pad_before, pad_after=pad_after
    )
    firsts, starts, stops = windows.at(np.arange(windows.num))
    buffer_starts, buffer_stops = np.maximum(firsts, starts), np.minimum(firsts + horizon, stops)
    return np.stack([buffer_starts, buffer_stops, buffer_starts - firsts, buffer_stops - firsts], axis=1)


def window_steps(
    firsts: Int64[np.ndarray, " batch"],
    lows: Int64[np.ndarray, " batch"],
    highs: Int64[np.ndarray, " batch"],
    *,
    count: int,
) -> Int64[np.ndarray, "batch count"]:
    """Return the steps of each window, those beyond its episode replaced by the episode's first or last."""
    steps = firsts[:, None] + np.arange(count)
    return np.clip(steps, lows[:, None], highs[:, None] - 1)


def window_rows(
    rows: Float32[np.ndarray, "step dim"],
    places: tuple[Int64[np.ndarray, " batch"], Int64[np.ndarray, " batch"], Int64[np.ndarray, " batch"]],
    *,
    is_zero: bool,
    is_pad: Bool[np.ndarray, "batch horizon"],
    out: Float32[np.ndarray, "batch horizon dim"],
) -> None:
    """Fill the rows of each window; beyond its episode the nearest one again, or zeros.

    Parameters
    ----------
    places
        What :meth:`Windows.at` returned.
    is_zero
        Zeros beyond the episode, as Diffuser's buffer has; else its first and last row, as Diffusion Policy's sampler fills.
    is_pad
        Receives which rows lie beyond.
    out
        Receives the rows.
    """
    firsts, lows, highs = places
    if out.shape[:2] != is_pad.shape or out.shape[0] != len(firsts) or out.shape[2] != rows.shape[1]:
        raise SchemaError(
            f"expected windows of {len(firsts)} x horizon x {rows.shape[1]}, found {list(out.shape)} and a mask of "
            f"{list(is_pad.shape)}; correct the call"
        )
    if len(firsts) and not (lows.min() >= 0 and highs.max() <= len(rows) and (highs > lows).all()):
        raise SchemaError(f"expected windows of episodes in [0, {len(rows)}), found others; correct the call")
    gather_windows(rows, firsts, lows, highs, is_zero, is_pad, out)
