"""Statistics of what training sees: weighted moments that merge, and exact quantiles from counts.

Training draws a valid step ``t`` (an anchor) and sees its state and the chunk of actions ``a[min(t + k, last)]`` for
``k < horizon``, where ``last`` ends the run of valid steps, within the episode, that ``t`` lies in. Of absolute actions
every step is therefore seen a number of times that only its place in the run decides (:func:`chunk_weights`), and no
chunk need be built. Of delta actions the values differ from chunk to chunk, so all are looked at
(:func:`delta_moments`).

Moments are float64, each around its own mean. The tempting ``mean(x**2) - mean(x)**2`` cancels: at mean 1e3 and
std 1e-2 in float32 it keeps no correct digit.

Quantiles are exact (:mod:`tasks.quantiles`). All values are those that training sees, in float32; NaN and infinity are left
out and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from schemas.errors import DatasetError, SchemaError, UsageError
from tasks.kernels.quantiles import Chunks, Search, reduce_chunks
from tasks.kernels.rows import reduce_rows
from tasks.kernels.stats import (
    HIGH,
    LOW,
    fill_delta,
    fill_weights,
    merge_moments,
)

TAILS = ("repeat", "drop")
"""Of anchors fewer than ``horizon`` steps before their run's end: the last action is repeated, or they are left out."""

PERCENTILES = (1, 99)
"""What openpi's ``norm_stats.json`` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Maximal runs of valid steps, none across an episode's end, in order. Their first steps are the anchors."""

    starts: Int64[np.ndarray, "run"]
    stops: Int64[np.ndarray, "run"]
    num_anchors: Int64[np.ndarray, "run"]
    """Steps of each run, from its first, that are anchors."""

    def overlapping(self, start: int, stop: int) -> "Runs":
        """Return the runs of which a step lies in ``[start, stop)``."""
        kept = slice(np.searchsorted(self.stops, start, side="right"), np.searchsorted(self.starts, stop, side="left"))
        return Runs(starts=self.starts[kept], stops=self.stops[kept], num_anchors=self.num_anchors[kept])


@dataclass(frozen=True, slots=True)
class Moments:
    """Mergeable reduction of weighted rows, per dimension, over the finite values."""

    count: Float64[np.ndarray, "dim"]
    """Sum of weights; an integer, exact to 2**53."""
    mean: Float64[np.ndarray, "dim"]
    m2: Float64[np.ndarray, "dim"]
    """Weighted sum of squared distances from ``mean``."""
    low: Float64[np.ndarray, "dim"]
    high: Float64[np.ndarray, "dim"]
    num_non_finite: Float64[np.ndarray, "dim"]
    """Sum of the weights of NaN and infinite values, which nothing else includes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics per dimension; ``std`` is the population's (divided by ``count``)."""

    count: Int64[np.ndarray, "dim"]
    num_non_finite: Int64[np.ndarray, "dim"]
    mean: Float64[np.ndarray, "dim"]
    std: Float64[np.ndarray, "dim"]
    low: Float64[np.ndarray, "dim"]
    high: Float64[np.ndarray, "dim"]
    percentiles: dict[int, Float64[np.ndarray, "dim"]]
    """By percent."""


def delta_mask(*lengths: int) -> tuple[bool, ...]:
    """Spell a mask as openpi's ``make_bool_mask`` does: positive lengths are delta dimensions, negative absolute ones.

    >>> delta_mask(2, -1, 1)
    (True, True, False, True)
    """
    return tuple(length > 0 for length in lengths for _ in range(abs(length)))


def valid_runs(
    episode_ends: Int64[np.ndarray, "episode"], valid: Bool[np.ndarray, "step"], *, horizon: int, tail: str = "repeat"
) -> Runs:
    """Find the runs of valid steps and their anchors.

    With ``tail="drop"`` a run has an anchor only where the whole chunk lies in it.
    """
    _check_steps(episode_ends, valid)
    if horizon < 1 or tail not in TAILS:
        raise UsageError(
            f"expected a horizon of 1 or more and a tail of {' or '.join(TAILS)}, found {horizon} and {tail!r}; "
            "correct --horizon or --tail"
        )
    begins = np.zeros(len(valid) + 1, dtype=bool)
    begins[0] = True
    begins[episode_ends] = True
    starts = np.flatnonzero(valid & (begins[:-1] | np.concatenate(([True], ~valid[:-1]))[: len(valid)]))
    stops = np.flatnonzero(valid & (begins[1:] | np.concatenate((~valid[1:], [True]))[: len(valid)])) + 1
    num_anchors = stops - starts if tail == "repeat" else np.maximum(stops - starts - horizon + 1, 0)
    return Runs(starts=starts, stops=stops, num_anchors=num_anchors)


def chunk_weights(runs: Runs, *, horizon: int, start: int, stop: int) -> Int64[np.ndarray, "step"]:
    """Count for each step of ``[start, stop)`` how many entries of all chunks it is. Exact, in closed form.

    With ``horizon=1`` that is 1 for an anchor and 0 for any other step, whatever horizon ``runs`` were found with.
    """
    weights = np.empty(stop - start, dtype=np.int64)
    near = runs.overlapping(start, stop)
    fill_weights(near.starts, near.stops, near.num_anchors, horizon, start, weights)
    return weights


def anchors_between(
    runs: Runs, start: int, stop: int
) -> tuple[Int64[np.ndarray, "anchor"], Int64[np.ndarray, "anchor"]]:
    """Return the anchors of ``[start, stop)`` and, for each, the last step that its chunk may name."""
    near = runs.overlapping(start, stop)
    begins = np.maximum(near.starts, start)
    lengths = np.maximum(np.minimum(near.starts + near.num_anchors, stop) - begins, 0)
    firsts = np.cumsum(lengths) - lengths
    anchors = np.arange(lengths.sum()) + np.repeat(begins - firsts, lengths)
    return anchors, np.repeat(near.stops - 1, lengths)


def delta_chunks(
    actions: Float32[np.ndarray, "step dim"],
    states: Float32[np.ndarray, "anchor dim"],
    anchors: Int64[np.ndarray, "anchor"],
    lasts: Int64[np.ndarray, "anchor"],
    out: Float32[np.ndarray, "anchor horizon dim"],
) -> Float32[np.ndarray, "row dim"]:
    """Fill ``out`` with the chunks relative to the state at their anchor, and return it as rows.

    Parameters
    ----------
    actions
        Actions of consecutive steps.
    states
        What to subtract at each anchor: the state, zero in dimensions that stay absolute (:func:`delta_offsets`).
    anchors, lasts
        Rows of ``actions``: a chunk's first, and the last that it may name.
    """
    fill_delta(actions, states, anchors, lasts, out)
    return out.reshape(-1, out.shape[2])


def delta_offsets(
    states: Float32[np.ndarray, "anchor state_dim"], mask: Sequence[bool], num_dims: int
) -> Float32[np.ndarray, "anchor dim"]:
    """Return what openpi's ``DeltaActions(mask)`` subtracts from actions of ``num_dims`` dimensions."""
    if len(mask) > min(states.shape[1], num_dims):
        raise UsageError(
            f"expected a delta mask of at most {min(states.shape[1], num_dims)} dimensions, as many as state "
            f"({states.shape[1]}) and actions ({num_dims}) share, found {len(mask)}; correct --delta"
        )
    offsets = np.zeros((len(states), num_dims), dtype=np.float32)
    offsets[:, : len(mask)] = np.where(np.asarray(mask, dtype=bool), states[:, : len(mask)], np.float32(0))
    return offsets


def delta_moments(chunks: Chunks, columns: Sequence[int], search: Search, *, with_moments: bool) -> Moments:
    """Reduce ``columns`` of the chunks that :func:`delta_chunks` would build, without building them.

    Their values are counted in ``search`` (see :func:`tasks.quantiles.search`); the moments are those of nothing unless
    ``with_moments``.
    """
    state = _no_moments(len(chunks.actions))
    reduce_chunks(chunks, np.asarray(columns, dtype=np.int64), with_moments, search, state)
    return Moments(*state)


def replace_columns(first: Moments, second: Moments, columns: Sequence[int]) -> Moments:
    """Return ``first`` with some columns of ``second``."""
    state = np.stack(_rows_of(first))
    state[:, list(columns)] = np.stack(_rows_of(second))[:, list(columns)]
    return Moments(*state)


def row_moments(
    rows: Float32[np.ndarray, "row dim"], weights: Int64[np.ndarray, "row"], search: Search, *, with_moments: bool
) -> Moments:
    """Reduce one block of rows and count its values in ``search``, in one pass. Rows of weight 0 may hold anything.

    The moments are float64, each block of :data:`tasks.kernels.rows.BLOCK_ROWS` around a value of its own; those of nothing
    unless ``with_moments``.
    """
    state = _no_moments(rows.shape[1])
    reduce_rows(rows, weights, search, with_moments, state)
    return Moments(*state)


def moments(rows: Float32[np.ndarray, "row dim"], weights: Int64[np.ndarray, "row"]) -> Moments:
    """Reduce one block to moments alone."""
    num_dims = rows.shape[1]
    nothing = np.empty((num_dims, 0), np.uint32)
    search = Search(
        inner_low=np.full(num_dims, -np.inf, np.float32),
        inner_high=np.full(num_dims, np.inf, np.float32),
        low=nothing,
        high=nothing,
        shift=nothing,
        is_top=np.empty(0, np.bool_),
        outside=np.empty((num_dims, 0), np.int64),
        inside=np.empty((num_dims, 0, 0), np.int64),
    )
    return row_moments(rows, weights, search, with_moments=True)


def merge(first: Moments, second: Moments) -> Moments:
    """Merge two reductions. Exact up to rounding, so for equal bits merge in one canonical order."""
    state = np.stack(_rows_of(first))
    merge_moments(np.stack(_rows_of(second)), state)
    return Moments(*state)


def finalize(total: Moments, percentiles: dict[int, Float64[np.ndarray, "dim"]]) -> Summary:
    """Turn the merged moments and percentiles into statistics.

    Raises
    ------
    DatasetError
        A dimension has no finite value.
    """
    if not total.count.all():
        raise DatasetError(
            "expected a finite value in every column, found NaN and infinity alone in columns "
            f"{np.flatnonzero(total.count == 0).tolist()}; leave them out of the recipe's signal"
        )
    return Summary(
        count=total.count.astype(np.int64),
        num_non_finite=total.num_non_finite.astype(np.int64),
        mean=total.mean + 0.0,
        std=np.sqrt(total.m2 / total.count),
        low=total.low + 0.0,  # adding zero makes -0.0 and 0.0, which compare equal, the same bits
        high=total.high + 0.0,
        percentiles=percentiles,
    )


def linear_normalizer(summary: Summary, mode: str = "limits", *, min_range: float = 1e-4) -> dict[str, np.ndarray]:
    """Return scale, offset and input statistics as diffusion_policy's ``LinearNormalizer.fit`` makes them.

    ``limits`` maps [min, max] to [-1, 1], and a dimension that varies by less than ``min_range`` to 0 by its offset
    alone; ``gaussian`` subtracts the mean and divides by the std, or by 1 where that is less than ``min_range``.
    ``fit`` takes torch's sample std (divided by ``n - 1``), so that is what ``std`` is here. Source:
    ``diffusion_policy/model/common/normalizer.py``, commit 5ba07ac6.
    """
    std = summary.std * np.sqrt(summary.count / np.maximum(summary.count - 1, 1))
    if mode == "limits":
        spread = summary.high - summary.low
        constant = spread < min_range
        scale = 2.0 / np.where(constant, 2.0, spread)
        offset = np.where(constant, -summary.low, -1.0 - scale * summary.low)
    elif mode == "gaussian":
        scale = 1.0 / np.where(std < min_range, 1.0, std)
        offset = -summary.mean * scale
    else:
        raise UsageError(f"expected mode limits or gaussian, found {mode!r}; correct --mode")
    values = {"scale": scale, "offset": offset}
    inputs = {"min": summary.low, "max": summary.high, "mean": summary.mean, "std": std}
    return {**values, **{f"input_stats.{name}": value for name, value in inputs.items()}}


def _check_steps(episode_ends: np.ndarray, valid: np.ndarray) -> None:
    end = int(episode_ends[-1]) if len(episode_ends) else 0
    if valid.dtype != np.bool_ or end != len(valid) or (np.diff(episode_ends, prepend=0) < 0).any():
        raise SchemaError(
            f"expected episode ends that increase to the {len(valid)} steps of a bool `valid`, "
            f"found {valid.dtype} and a last end of {end}; run `headrace verify`"
        )


def _no_moments(num_dims: int) -> Float64[np.ndarray, "6 dim"]:
    state = np.zeros((6, num_dims))
    state[LOW], state[HIGH] = np.inf, -np.inf
    return state


def _rows_of(part: Moments) -> tuple[np.ndarray, ...]:
    return part.count, part.mean, part.m2, part.low, part.high, part.num_non_finite
