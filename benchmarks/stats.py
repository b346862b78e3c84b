"""How long norm stats take, and how exact they are, against openpi's RunningStats over the same chunks.

    python benchmarks/stats.py [--steps 10000000] [--delta-steps 1000000] [--baseline-steps 10000] [--threads 1]

Rows come from memory, so that this measures the reduction alone. openpi is timed on the first ``--baseline-steps``
anchors, its chunks already in memory as well (it decodes every image besides), and is scaled to the same number of
steps: its cost a batch is constant. Each of ours runs once before it is timed, so that no compilation is in the times.
Prints one JSON document.
"""

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.stats import ACTIONS, STATE, Samples, summarize
from tasks import stats

NUM_DIMS, HORIZON, EPISODE_STEPS, BATCH = 14, 50, 500, 32
MASK = stats.delta_mask(6, -1, 6, -1)


class RunningStats:
    """openpi's running statistics, written from its contract: moments of squares, 5,000 bins, re-binned as they grow."""

    def __init__(self, num_bins: int = 5000) -> None:
        self.num_bins, self.count = num_bins, 0

    def update(self, rows: np.ndarray) -> None:
        low, high = rows.min(axis=0), rows.max(axis=0)
        if self.count == 0:
            self.mean, self.square = np.zeros_like(low), np.zeros_like(low)
            self.low, self.high = low, high
            self.edges = np.linspace(low - 1e-10, high + 1e-10, self.num_bins + 1).T
            self.bins = np.zeros((rows.shape[1], self.num_bins))
        grown = (low < self.low).any() or (high > self.high).any()
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        if grown:
            self._widen()
        self.count += len(rows)
        share = len(rows) / self.count
        self.mean = self.mean + (rows.mean(axis=0) - self.mean) * share
        self.square = self.square + ((rows**2).mean(axis=0) - self.square) * share
        for dim in range(rows.shape[1]):
            self.bins[dim] += np.histogram(rows[:, dim], bins=self.edges[dim])[0]

    def result(self) -> dict[str, np.ndarray]:
        def quantile(share: float) -> np.ndarray:
            found = [np.searchsorted(np.cumsum(bins), share * self.count) for bins in self.bins]
            return np.array([edges[index] for edges, index in zip(self.edges, found, strict=True)])

        std = np.sqrt(np.maximum(0, self.square - self.mean**2))
        return {"mean": self.mean, "std": std, "q01": quantile(0.01), "q99": quantile(0.99)}

    def _widen(self) -> None:
        edges = np.linspace(self.low, self.high, self.num_bins + 1).T
        for dim, new in enumerate(edges):
            self.bins[dim] = np.histogram(self.edges[dim][:-1], bins=new, weights=self.bins[dim])[0]
        self.edges = edges


def walk(num_steps: int) -> np.ndarray:
    """Return joint-like float32 rows: smooth walks about an offset, and two grippers that open and close."""
    generator = np.random.default_rng(0)
    rows = np.empty((num_steps, NUM_DIMS), np.float32)
    for dim in range(NUM_DIMS):
        steps = generator.normal(scale=0.01, size=num_steps).astype(np.float32)
        rows[:, dim] = dim / 4 + np.sin(np.cumsum(steps))
    rows[:, [6, 13]] = np.round(rows[:, [6, 13]])
    return rows


def samples_of(actions: np.ndarray, mask: tuple[bool, ...] | None = None) -> Samples:
    num_steps = len(actions)
    ends = np.append(np.arange(EPISODE_STEPS, num_steps, EPISODE_STEPS), num_steps)
    arrays = {ACTIONS: actions, STATE: actions}
    return Samples(
        read_rows=lambda array, start, stop: arrays[array][start:stop],
        episode_ends=ends,
        valid=np.ones(num_steps, bool),
        horizon=HORIZON,
        delta_mask=mask,
    )


def moments_alone(samples: Samples) -> stats.Summary:
    """Reduce absolute actions to moments without counting for quantiles."""
    return summarize(samples.seen(ACTIONS), ())


def chunks_of(samples: Samples) -> np.ndarray:
    """Return all chunks, ``[anchor, horizon, dim]``, as openpi's data loader hands them over."""
    actions = samples.read_rows(ACTIONS, 0, len(samples.valid))
    anchors, lasts = stats.anchors_between(samples.runs(), 0, len(samples.valid))
    chunks = actions[np.minimum(anchors[:, None] + np.arange(HORIZON), lasts[:, None])]
    return chunks - stats.delta_offsets(actions, samples.delta_mask or (), NUM_DIMS)[:, None]


def seconds(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return best, result


def baseline(chunks: np.ndarray, repeats: int) -> tuple[float, dict[str, np.ndarray]]:
    """Time RunningStats over chunks in batches of openpi's default size."""

    def run() -> dict[str, np.ndarray]:
        running = RunningStats()
        for start in range(0, len(chunks), BATCH):
            running.update(chunks[start : start + BATCH].reshape(-1, NUM_DIMS))
        return running.result()

    return seconds(run, repeats)


def errors(found: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, float]:
    """Return the greatest error of each statistic, in standard deviations."""
    values = rows.astype(np.float64)
    true = {"mean": values.mean(axis=0), "std": values.std(axis=0)}
    for name, share in (("q01", 0.01), ("q99", 0.99)):
        true[name] = np.quantile(rows, share, axis=0, method="inverted_cdf")
    return {name: float(np.max(np.abs(found[name] - true[name]) / true["std"])) for name in true}


def named(summary: stats.Summary) -> dict[str, np.ndarray]:
    return {"mean": summary.mean, "std": summary.std, "q01": summary.percentiles[1], "q99": summary.percentiles[99]}


def measure(actions: np.ndarray, mask: tuple[bool, ...] | None, options: argparse.Namespace) -> dict[str, Any]:
    samples, few = samples_of(actions, mask), samples_of(actions[: options.baseline_steps], mask)
    chunks = chunks_of(few)
    warm = summarize(few.seen(ACTIONS))
    ours, _ = seconds(lambda: summarize(samples.seen(ACTIONS), threads=options.threads), options.repeats)
    theirs, found = baseline(chunks, options.repeats)
    report = {
        "num_steps": len(actions),
        "exact_s": ours,
        "exact_s_per_million_steps": ours / len(actions) * 1e6,
        "openpi_s_per_million_steps": theirs / len(chunks) * 1e6,
        "times_faster": theirs / len(chunks) / (ours / len(actions)),
        "error_std": errors(named(warm), chunks.reshape(-1, NUM_DIMS)),
        "openpi_error_std": errors(found, chunks.reshape(-1, NUM_DIMS)),
    }
    if mask is None:
        moments_alone(few)
        moments_s, _ = seconds(lambda: moments_alone(samples), options.repeats)
        report.update(moments_s=moments_s, quantiles_add_s=ours - moments_s)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000, help="steps of absolute actions")
    parser.add_argument("--delta-steps", type=int, default=1_000_000, help="steps of delta actions")
    parser.add_argument("--baseline-steps", type=int, default=10_000, help="anchors that openpi is timed on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="the best is reported")
    options = parser.parse_args()
    actions = walk(max(options.steps, options.delta_steps))
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "threads": options.threads},
        "shape": {"num_dims": NUM_DIMS, "horizon": HORIZON, "episode_steps": EPISODE_STEPS, "batch": BATCH},
        "absolute": measure(actions[: options.steps], None, options),
        "delta": measure(actions[: options.delta_steps], MASK, options),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
