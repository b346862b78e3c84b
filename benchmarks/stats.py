"""How long norm stats take, and how exact they are, against openpi's RunningStats over the same chunks.

    python -m benchmarks.stats [--steps 10000000] [--delta-steps 1000000] [--baseline-steps 10000] [--rounds 3]

Rows come from memory, so that this measures the reduction alone. openpi is timed on the first ``--baseline-steps``
anchors, its chunks already in memory as well (it decodes every image besides), and is scaled to the same number of
steps: its cost a batch is constant. Everything runs once before it is timed, so that no compilation is in the times, and then
in turns (A B C A B C ...). Times are medians of wall time, with the least and the greatest beside; errors are the greatest of any
dimension, in standard deviations. Asked is what issue 5 asks for: absolute actions of 10 million steps in a second, delta actions in
40 s per million steps and core, 50 times as fast as openpi.
"""

import argparse
import os
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


def chunks_of(samples: Samples) -> np.ndarray:
    """Return all chunks, ``[anchor, horizon, dim]``, as openpi's data loader hands them over."""
    actions = samples.read_rows(ACTIONS, 0, len(samples.valid))
    anchors, lasts = stats.anchors_between(samples.runs(), 0, len(samples.valid))
    chunks = actions[np.minimum(anchors[:, None] + np.arange(HORIZON), lasts[:, None])]
    return chunks - stats.delta_offsets(actions, samples.delta_mask or (), NUM_DIMS)[:, None]


def baseline(chunks: np.ndarray) -> dict[str, np.ndarray]:
    """Run RunningStats over chunks in batches of openpi's default size."""
    running = RunningStats()
    for start in range(0, len(chunks), BATCH):
        running.update(chunks[start : start + BATCH].reshape(-1, NUM_DIMS))
    return running.result()


def errors(found: dict[str, np.ndarray], rows: np.ndarray) -> str:
    """Return the greatest error of each statistic, in standard deviations."""
    values = rows.astype(np.float64)
    true = {"mean": values.mean(axis=0), "std": values.std(axis=0)}
    for name, share in (("q01", 0.01), ("q99", 0.99)):
        true[name] = np.quantile(rows, share, axis=0, method="inverted_cdf")
    return ", ".join(f"{name} {np.max(np.abs(found[name] - true[name]) / true['std']):.0e}" for name in true)


def named(summary: stats.Summary) -> dict[str, np.ndarray]:
    return {"mean": summary.mean, "std": summary.std, "q01": summary.percentiles[1], "q99": summary.percentiles[99]}


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of each run in each round, taken in turns."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            spent[name].append(time.perf_counter() - start)
    return {name: np.array(times) for name, times in spent.items()}


def print_rows(label: str, actions: np.ndarray, mask: tuple[bool, ...] | None, options: argparse.Namespace) -> None:
    """Measure one kind of actions, and print its rows of the table."""
    samples, few = samples_of(actions, mask), samples_of(actions[: options.baseline_steps], mask)
    chunks = chunks_of(few)
    ours, theirs = named(summarize(few.seen(ACTIONS))), baseline(chunks)
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, options.threads or cores})
    runs: dict[str, Callable[[], Any]] = {
        f"{label}, {num} thread{'s' * (num > 1)}": lambda num=num: summarize(samples.seen(ACTIONS), threads=num)
        for num in threads
    }
    if mask is None:
        summarize(few.seen(ACTIONS), ())
        runs["of these moments alone, 1 thread"] = lambda: summarize(samples.seen(ACTIONS), ())
    runs[f"openpi's RunningStats, {label}"] = lambda: baseline(chunks)
    times = timed(runs, options.rounds)
    *_, openpi = times.values()
    asked = ["at most 1.0 s of 10 M" if mask is None else "at most 40 s a million a core", "50 times openpi"]
    for name, spent in times.items():
        is_openpi = spent is openpi
        num_steps = len(chunks) if is_openpi else len(actions)
        ratio = np.median(openpi / len(chunks) / (spent / num_steps))  # of the same round
        error = errors(theirs if is_openpi else ours, chunks.reshape(-1, NUM_DIMS))
        goal = "; ".join(asked) if name.startswith(label) else ""
        print(
            f"| {name} | {num_steps:,} | {np.median(spent):.2f} ({spent.min():.2f} to {spent.max():.2f}) | "
            f"{np.median(spent) / num_steps * 1e6:.3f} | {ratio:,.0f} | {'' if 'alone' in name else error} | {goal} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000_000, help="steps of absolute actions")
    parser.add_argument("--delta-steps", type=int, default=1_000_000, help="steps of delta actions")
    parser.add_argument("--baseline-steps", type=int, default=10_000, help="anchors that openpi is timed on")
    parser.add_argument("--threads", type=int, default=0, help="beside one; the machine's cores unless given")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    actions = walk(max(options.steps, options.delta_steps))
    load = os.getloadavg()[0]
    print(
        f"{NUM_DIMS} dimensions, horizon {HORIZON}, episodes of {EPISODE_STEPS} steps, {options.rounds} rounds, "
        f"{os.cpu_count()} CPUs ({platform.processor() or platform.machine()}), load {load:.1f} before\n"
    )
    print("| system | steps | seconds | s / million steps | times openpi | greatest error, std | asked |")
    print("|---|--:|--:|--:|--:|---|---|")
    print_rows("absolute", actions[: options.steps], None, options)
    print_rows("delta", actions[: options.delta_steps], MASK, options)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory {peak_mb:,.0f} MB, rows included; load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
