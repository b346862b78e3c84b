"""Statistics of what training sees, without touching a pixel and in bounded memory: openpi's ``norm_stats.json``.

An array is reduced tile by tile, :data:`TILE_STEPS` steps each, and the tiles' moments are merged in step order, so that the
result has the same bits however the tiles were shared out; counts are integers and add in any order. Memory is two
tiles of rows and the counts (65,536 x dimensions x 8 bytes a thread, three times that in the second pass).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int64

from schemas.errors import DatasetError, SchemaError, locate
from tasks import stats

STATS_VERSION = 1
"""Of the ``headrace`` record; raised when the same data would give other numbers."""

TILE_STEPS = 65536
"""Steps whose moments are reduced together: 3.7 MB of 14 float32 columns. Part of the result's last bits."""

BATCH_ROWS = 16384
"""Rows of delta chunks built at a time, so that they stay in a core's cache. Part of the result's last bits."""

STATE, ACTIONS = "state", "actions"

ReadRows = Callable[[str, int, int], np.ndarray]
"""``(array, start, stop) -> rows [start, stop)``; called from several threads where ``threads`` is above 1."""

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
            is_delta=is_chunked and any(self.delta_mask or ()),
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
    is_delta: bool
    tile_steps: int = TILE_STEPS

    @property
    def num_tiles(self) -> int:
        """Number of tiles, the last of which may be short."""
        return -(-len(self.samples.valid) // self.tile_steps)

    def batches(self, tile: int) -> Iterator[Batch]:
        """Yield the rows of a tile with their weights; the next batch may reuse their memory."""
        start = tile * self.tile_steps
        stop = min(start + self.tile_steps, len(self.samples.valid))
        yield from self._enumerated(start, stop) if self.is_delta else self._weighted(start, stop)

    def _weighted(self, start: int, stop: int) -> Iterator[Batch]:
        weights = stats.chunk_weights(self.runs, horizon=self.horizon, start=start, stop=stop)
        if weights.any():
            yield self.samples.rows(self.array, start, stop, num_dims=self.num_dims), weights

    def _enumerated(self, start: int, stop: int) -> Iterator[Batch]:
        anchors, lasts = stats.anchors_between(self.runs, start, stop)
        if not len(anchors):
            return
        end = int(min(stop + self.horizon - 1, lasts[-1] + 1))
        actions = self.samples.rows(self.array, start, end, num_dims=self.num_dims)
        states = self.samples.rows(STATE, start, stop, num_dims=self.samples.num_dims(STATE))
        offsets = stats.delta_offsets(states, self.samples.delta_mask or (), self.num_dims)
        step = max(1, BATCH_ROWS // self.horizon)
        out = np.empty((min(step, len(anchors)), self.horizon, self.num_dims), dtype=np.float32)
        weights = np.ones(out.shape[0] * self.horizon, dtype=np.int64)
        for first in range(0, len(anchors), step):
            near, far = anchors[first : first + step] - start, lasts[first : first + step] - start
            rows = stats.delta_chunks(actions, offsets[near], near, far, out[: len(near)])
            yield rows, weights[: len(rows)]


@dataclass(frozen=True, slots=True)
class Partial:
    """What a pass over some tiles gives: merges with others in any order, to the same bits."""

    tiles: dict[int, stats.Moments]
    counts: Int64[np.ndarray, "65536 dim"]

    def merge(self, other: "Partial") -> "Partial":
        """Join two passes over different tiles."""
        return Partial({**self.tiles, **other.tiles}, self.counts + other.counts)

    def total(self) -> stats.Moments:
        """Merge the tiles' moments in their canonical order."""
        return functools.reduce(stats.merge, (self.tiles[tile] for tile in sorted(self.tiles)))


def reduce_tiles(seen: SeenRows, tiles: Iterable[int]) -> Partial:
    """Run the first pass over some tiles: moments, and counts by the upper half of each value."""
    counts = stats.new_high_counts(seen.num_dims)
    moments: dict[int, stats.Moments] = {}
    for tile in tiles:
        parts = []
        for rows, weights in seen.batches(tile):
            parts.append(stats.moments(rows, weights))
            stats.add_high_counts(rows, weights, counts)
        if parts:
            moments[tile] = functools.reduce(stats.merge, parts)
    return Partial(moments, counts)


def summarize(seen: SeenRows, percentiles: Sequence[int] = stats.PERCENTILES, *, threads: int = 1) -> stats.Summary:
    """Reduce one array to its statistics, in two passes over its rows; the same bits for any number of threads."""
    blocks = [range(block, seen.num_tiles, threads) for block in range(threads)]
    partial = functools.reduce(Partial.merge, _map(lambda tiles: reduce_tiles(seen, tiles), blocks))
    bins, ranks = stats.find_bins(partial.counts, percentiles)

    def refine(tiles: Iterable[int]) -> np.ndarray:
        counts = stats.new_low_counts(bins)
        for rows, weights in itertools.chain.from_iterable(map(seen.batches, tiles)):
            stats.add_low_counts(rows, weights, bins, counts)
        return counts

    low_counts = functools.reduce(np.add, _map(refine, blocks if percentiles else [()]))
    values = stats.find_percentiles(low_counts, bins, ranks)
    with locate(array=seen.array):
        return stats.finalize(partial.total(), dict(zip(percentiles, values, strict=True)))


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
    return samples_stats(samples, arrays)


def samples_stats(samples: Samples, arrays: Sequence[str] = (STATE, ACTIONS), *, threads: int = 1) -> dict[str, Any]:
    """Return what :func:`norm_stats` does, computed by ``threads`` threads: their number changes no bit."""
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


def _record(summary: stats.Summary) -> dict[str, list[float]]:
    named = {"min": summary.low, "max": summary.high, "count": summary.count, "num_non_finite": summary.num_non_finite}
    return {name: values.tolist() for name, values in named.items()}


def _map(function: Callable[[Iterable[int]], T], blocks: Sequence[Iterable[int]]) -> list[T]:
    if len(blocks) == 1:
        return [function(blocks[0])]
    with ThreadPoolExecutor(len(blocks), thread_name_prefix="headrace-stats") as pool:
        return list(pool.map(function, blocks))
