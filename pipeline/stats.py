"""Statistics of what training sees, without touching a pixel and in bounded memory: openpi's ``norm_stats.json``.

An array is reduced tile by tile, :data:`TILE_STEPS` steps each, and the tiles' moments are merged in step order, so that the
result has the same bits however the tiles were shared out; counts are integers and add in any order. Memory is a few
tiles of rows and the counts of :mod:`tasks.quantiles` a thread.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int64

from schemas.errors import DatasetError, SchemaError, locate
from tasks import stats
from tasks.drift import near_constant
from tasks.kernels.quantiles import Chunks
from tasks.quantiles import Brackets, Counts, guess, narrow, search

STATS_VERSION = 3
"""Of the ``headrace`` record; raised when the same data would give other numbers."""

TILE_STEPS = 65536
"""Steps whose moments are reduced together: 3.7 MB of 14 float32 columns. Part of the result's last bits."""

SAMPLE_WINDOWS, SAMPLE_STEPS = 512, 64
"""What the quantiles are guessed from: so many windows, evenly spread, of so many steps."""

STATE, ACTIONS = "state", "actions"

ReadRows = Callable[[str, int, int], np.ndarray]
"""``(array, start, stop) -> rows [start, stop)``; called from several threads unless ``threads`` is 1."""

Batch = tuple[Float32[np.ndarray, "row dim"], Int64[np.ndarray, "row"]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What training samples: which steps are anchors, and what an anchor sees."""

    read_rows: ReadRows
    episode_ends: Int64[np.ndarray, "episode"]
    valid: Bool[np.ndarray, "step"]
    horizon: int = 1
    """Actions of a chunk; 1 weighs every valid step once."""
    tail: str = "repeat"
    delta_mask: tuple[bool, ...] | None = None
    """Action dimensions that are relative to the state at the anchor; dimensions beyond its end are absolute."""

    def runs(self) -> stats.Runs:
        """Find the runs of valid steps; DatasetError where there is no anchor."""
        runs = stats.valid_runs(self.episode_ends, self.valid, horizon=self.horizon, tail=self.tail)
        if not runs.num_anchors.any():
            hint = "" if self.tail == "repeat" else " followed by enough others for a whole chunk"
            raise DatasetError(
                f"expected at least one valid step{hint} (horizon {self.horizon}, tail {self.tail}), found none in "
                f"{len(self.valid)} steps of {len(self.episode_ends)} episodes; see the quarantine table"
            )
        return runs

    def seen(self, array: str) -> "SeenRows":
        """Return ``array`` as training sees it: ``actions`` by chunks, any other array by anchors."""
        is_chunked = array == ACTIONS
        return SeenRows(
            samples=self,
            array=array,
            num_dims=self.num_dims(array),
            runs=self.runs(),
            horizon=self.horizon if is_chunked else 1,
            deltas=tuple(np.flatnonzero(self.delta_mask or ()).tolist()) if is_chunked else (),
        )

    def rows(self, array: str, start: int, stop: int, *, num_dims: int) -> Float32[np.ndarray, "step dim"]:
        """Read rows ``[start, stop)`` and check that they are numbers of the expected shape."""
        rows = np.asarray(self.read_rows(array, start, stop))
        if rows.shape != (stop - start, num_dims) or rows.dtype.kind not in "fiub":
            raise SchemaError(
                f"expected {stop - start} rows of {num_dims} numbers, found {rows.dtype}{list(rows.shape)}; "
                "check `read_rows`",
                array=array,
                steps=f"{start}:{stop}",
            )
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is counted as such
            return np.ascontiguousarray(rows, dtype=np.float32)

    def num_dims(self, array: str) -> int:
        """Return the width of an array's rows."""
        shape = np.asarray(self.read_rows(array, 0, 1)).shape
        if len(shape) != 2 or not shape[1]:
            raise SchemaError(
                f"expected rows of one or more numbers, found shape {list(shape)}; leave {array} out", array=array
            )
        return int(shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRows:
    """One array as training sees it, tile by tile."""

    samples: Samples
    array: str
    num_dims: int
    runs: stats.Runs
    horizon: int
    deltas: tuple[int, ...] = ()
    """Columns that are relative to the state at the anchor, so that every chunk must be looked at."""
    tile_steps: int = TILE_STEPS

    @property
    def num_tiles(self) -> int:
        """Number of tiles, the last of which may be short."""
        return -(-len(self.samples.valid) // self.tile_steps)

    def reduce(self, tile: int, brackets: Brackets, counts: Counts, *, with_moments: bool) -> stats.Moments | None:
        """Count a tile's values in ``brackets`` and return their moments, or None where nothing of it is seen or wanted."""
        start, stop = self._bounds(tile)
        weights = stats.chunk_weights(self.runs, horizon=self.horizon, start=start, stop=stop)
        anchors, lasts = stats.anchors_between(self.runs, start, stop)
        if not weights.any() and not len(anchors):
            return None
        end = int(min(stop + self.horizon - 1, lasts[-1] + 1)) if self.deltas and len(anchors) else stop
        actions = self.samples.rows(self.array, start, max(end, stop), num_dims=self.num_dims)
        rows = actions[: stop - start]
        wanted = search(brackets, counts, skip=self.deltas)
        found = stats.row_moments(rows, weights, wanted, with_moments=with_moments)
        moments = found if with_moments else None
        columns = [column for column in self.deltas if with_moments or not brackets.is_found[column].all()]
        if columns:
            chunks = Chunks(
                actions=np.ascontiguousarray(actions.T),
                offsets=np.ascontiguousarray(self._offsets(start, stop)[anchors - start].T),
                anchors=anchors - start,
                lasts=lasts - start,
                horizon=self.horizon,
            )
            found = stats.delta_moments(chunks, columns, search(brackets, counts), with_moments=with_moments)
            moments = stats.replace_columns(moments, found, columns) if moments else None
        return moments

    def sample(self) -> Batch:
        """Return some of the rows with their weights, spread over all steps; of delta chunks every 32nd."""
        windows = [self._window(start) for start in self._sample_starts()]
        return tuple(map(np.concatenate, zip(*windows)))  # type: ignore[return-value]

    def _sample_starts(self) -> range:
        num_steps = len(self.samples.valid)
        return range(0, num_steps, max(SAMPLE_STEPS, num_steps // SAMPLE_WINDOWS // SAMPLE_STEPS * SAMPLE_STEPS))

    def _window(self, start: int) -> Batch:
        stop = min(start + SAMPLE_STEPS, len(self.samples.valid))
        if not self.deltas:
            weights = stats.chunk_weights(self.runs, horizon=self.horizon, start=start, stop=stop)
            return self.samples.rows(self.array, start, stop, num_dims=self.num_dims), weights
        anchors, lasts = (values[::32] for values in stats.anchors_between(self.runs, start, stop))
        end = int(min(stop + self.horizon - 1, lasts[-1] + 1)) if len(lasts) else stop
        actions = self.samples.rows(self.array, start, max(end, stop), num_dims=self.num_dims)
        out = np.empty((len(anchors), self.horizon, self.num_dims), dtype=np.float32)
        near = anchors - start
        rows = stats.delta_chunks(actions, self._offsets(start, stop)[near], near, lasts - start, out)
        return rows, np.ones(len(rows), dtype=np.int64)

    def _offsets(self, start: int, stop: int) -> Float32[np.ndarray, "step dim"]:
        states = self.samples.rows(STATE, start, stop, num_dims=self.samples.num_dims(STATE))
        return stats.delta_offsets(states, self.samples.delta_mask or (), self.num_dims)

    def _bounds(self, tile: int) -> tuple[int, int]:
        start = tile * self.tile_steps
        return start, min(start + self.tile_steps, len(self.samples.valid))


@dataclass(frozen=True, slots=True)
class Partial:
    """What a pass over some tiles gives: merges with others in any order, to the same bits."""

    tiles: dict[int, stats.Moments]
    counts: Counts

    def merge(self, other: "Partial") -> "Partial":
        """Join two passes over different tiles."""
        return Partial({**self.tiles, **other.tiles}, self.counts + other.counts)

    def total(self) -> stats.Moments:
        """Merge the tiles' moments in their canonical order."""
        return functools.reduce(stats.merge, (self.tiles[tile] for tile in sorted(self.tiles)))


def reduce_tiles(seen: SeenRows, tiles: Iterable[int], brackets: Brackets, *, with_moments: bool = True) -> Partial:
    """Run one pass over some tiles."""
    counts = Counts.of(brackets)
    found = {tile: seen.reduce(tile, brackets, counts, with_moments=with_moments) for tile in tiles}
    return Partial({tile: moments for tile, moments in found.items() if moments is not None}, counts)


def summarize(
    seen: SeenRows, percentiles: Sequence[int] = stats.PERCENTILES, *, threads: int | None = None
) -> stats.Summary:
    """Reduce one array to its statistics, mostly in two passes over its rows.

    ``threads`` are the machine's unless given; their number changes no bit.
    """
    threads = min(threads or len(os.sched_getaffinity(0)), max(seen.num_tiles, 1))
    blocks = [range(block, seen.num_tiles, threads) for block in range(threads)]
    brackets = guess(*seen.sample(), percentiles)
    partial = functools.reduce(Partial.merge, _map(lambda tiles: reduce_tiles(seen, tiles, brackets), blocks))
    total, counts = partial.total(), partial.counts
    while not (brackets := narrow(brackets, counts, total.count.astype(np.int64))).is_found.all():

        def count(tiles: Iterable[int], brackets: Brackets = brackets) -> Counts:
            return reduce_tiles(seen, tiles, brackets, with_moments=False).counts

        counts = functools.reduce(Counts.__add__, _map(count, blocks))
    with locate(array=seen.array):
        return stats.finalize(total, dict(zip(percentiles, brackets.values(), strict=True)))


def norm_stats(
    read_rows: ReadRows,
    episode_ends: Int64[np.ndarray, "episode"],
    valid: Bool[np.ndarray, "step"],
    *,
    horizon: int,
    arrays: Sequence[str] = (STATE, ACTIONS),
    delta_mask: Sequence[bool] | None = None,
    tail: str = "repeat",
) -> dict[str, Any]:
    """Return the content of openpi's ``norm_stats.json``, over exactly the values that training sees.

    Parameters
    ----------
    read_rows
        ``(array, start, stop)`` to rows ``[stop - start, dim]``; taken as float32, as training takes them.
    episode_ends
        One past the last step of each episode.
    valid
        Whether a step may be served.
    horizon
        Actions of a chunk.
    arrays
        What to reduce: ``actions`` by chunks, any other by anchors.
    delta_mask
        Action dimensions relative to the state at the chunk's anchor, as openpi's ``DeltaActions`` takes it.
    tail
        ``repeat`` pads chunks with their last action, as openpi does; ``drop`` leaves out anchors that have less.

    Returns
    -------
    dict
        ``norm_stats`` in openpi's schema, and ``headrace``, which openpi ignores: what the numbers were computed over.

    Raises
    ------
    DatasetError
        No step is an anchor, or a column has no finite value.
    UsageError
        The horizon, tail or mask does not fit.
    """
    mask = None if delta_mask is None else tuple(bool(is_delta) for is_delta in delta_mask)
    samples = Samples(
        read_rows=read_rows, episode_ends=episode_ends, valid=valid, horizon=horizon, tail=tail, delta_mask=mask
    )
    return samples_stats(samples, arrays, threads=1)


def samples_stats(
    samples: Samples, arrays: Sequence[str] = (STATE, ACTIONS), *, threads: int | None = None
) -> dict[str, Any]:
    """Return what :func:`norm_stats` does, computed by ``threads`` threads, the machine's unless given."""
    summaries = {array: summarize(samples.seen(array), threads=threads) for array in arrays}
    return {
        "norm_stats": {array: _openpi_entry(summary) for array, summary in summaries.items()},
        "headrace": {
            "stats_version": STATS_VERSION,
            "horizon": samples.horizon,
            "tail": samples.tail,
            "delta_mask": None if samples.delta_mask is None else list(samples.delta_mask),
            "quantile_method": "inverted_cdf",
            "num_episodes": len(samples.episode_ends),
            "num_steps": len(samples.valid),
            "num_valid_steps": int(samples.valid.sum()),
            "num_anchors": int(samples.runs().num_anchors.sum()),
            "arrays": {array: _record(summary) for array, summary in summaries.items()},
        },
    }


def _openpi_entry(summary: stats.Summary) -> dict[str, list[float]]:
    q01, q99 = (summary.percentiles[percent] for percent in stats.PERCENTILES)
    named = {"mean": summary.mean, "std": summary.std, "q01": q01, "q99": q99}
    return {name: values.tolist() for name, values in named.items()}


def _record(summary: stats.Summary) -> dict[str, Any]:
    named = {"min": summary.low, "max": summary.high, "count": summary.count, "num_non_finite": summary.num_non_finite}
    reasons = {str(dim): reason for dim, reason in near_constant(summary).items()}
    return {**{name: values.tolist() for name, values in named.items()}, "near_constant": reasons}


def _map(function: Callable[[Iterable[int]], T], blocks: Sequence[Iterable[int]]) -> list[T]:
    if len(blocks) == 1:
        return [function(blocks[0])]
    with ThreadPoolExecutor(len(blocks), thread_name_prefix="headrace-stats") as pool:
        return list(pool.map(function, blocks))
