"""What this machine reads from a dataset, beside what it can copy, and what stands between the two."""

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.loaders.dataset_loader import DatasetLoader
from pipeline.loaders.multiview import MultiViewLoader
from pipeline.loaders.planner import PlannerLoader
from pipeline.loaders.windows import WindowLoader
from pipeline.store.metadata import read_info
from schemas.errors import DatasetError, UsageError

LOADERS: Mapping[str, type[DatasetLoader]] = {
    "MultiViewLoader": MultiViewLoader,
    "PlannerLoader": PlannerLoader,
    "WindowLoader": WindowLoader,
}
ROUNDS = 3

_SOURCE_NBYTES = 1 << 28
"""What the copies that are the limit are taken from: more than any cache holds."""


def bench_dataset(
    path: str | Path, *, batch_size: int = 32, max_threads: int = 0, seconds: float = 0.5
) -> dict[str, Any]:
    """Measure every loader that the dataset has samples for, in random order, with 1 to ``max_threads`` threads.

    All are measured in turns, :data:`ROUNDS` times, and the median is reported, so that what else the machine does falls on
    all alike. What is read again and again comes from the page cache, as far as it fits in there.

    Parameters
    ----------
    batch_size
        Samples of a batch; fewer where the dataset has not as many.
    max_threads
        0 for one a core.
    seconds
        Of each single measurement.

    Raises
    ------
    DatasetError
        Not a finished dataset, or one without samples for any loader.
    """
    if batch_size < 1 or max_threads < 0 or seconds <= 0:
        raise UsageError(f"expected positive sizes, found {batch_size}, {max_threads} and {seconds}; correct the call")
    read_info(path)  # what is no dataset is refused here
    cores = len(os.sched_getaffinity(0))
    counts = _thread_counts(max_threads or cores)
    found = {name: _batch_size(kind, path, batch_size) for name, kind in LOADERS.items()}
    fitting = {name: size for name, size in found.items() if isinstance(size, int)}
    if not fitting:
        raise DatasetError(f"expected samples for one of {', '.join(LOADERS)}, found none; see `headrace info`")
    return {
        "path": str(path),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "load": os.getloadavg()[0],
        "loaders": {name: _bench_loader(LOADERS[name], path, size, counts, seconds) for name, size in fitting.items()},
        "not_measured": {name: reason for name, reason in found.items() if isinstance(reason, str)},
    }


def _thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most``."""
    return sorted({most, *itertools.takewhile(lambda count: count < most, (1 << k for k in range(16)))})


def _batch_size(kind: type[DatasetLoader], path: str | Path, wanted: int) -> int | str:
    """Return how many samples a batch can have, or why this loader has none."""
    try:
        return min(wanted, kind(path, 1, tail="keep", rank=0, world_size=1).samples.num)
    except (DatasetError, UsageError) as error:
        return str(error)


def _bench_loader(
    kind: type[DatasetLoader], path: str | Path, batch_size: int, counts: list[int], seconds: float
) -> dict[str, Any]:
    loaders = {
        (count, check): _make(kind, path, batch_size, count, check) for count in counts for check in _checks(count)
    }
    first = loaders[1, "always"].samples
    nbytes = sum(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in first.layout.values()
    )
    runs: dict[Any, Callable[[float], tuple[float, float]]] = {
        key: _reader(loader) for key, loader in loaders.items()
    } | {("copy", count): _copier(nbytes, batch_size, count) for count in counts}
    for run in runs.values():
        run(0.0)  # compiles, opens and fills the page cache
    measured = [{key: run(seconds) for key, run in runs.items()} for _ in range(ROUNDS)]
    rate, busy = (
        {key: statistics.median(taken[key][which] for taken in measured) for key in runs} for which in range(2)
    )
    rows = [
        {
            "threads": count,
            "samples_per_s": rate[count, "always"],
            "nbytes_per_s": rate[count, "always"] * nbytes,
            "copy_samples_per_s": rate["copy", count],
            "copy_nbytes_per_s": rate["copy", count] * nbytes,
            "of_copy": rate[count, "always"] / rate["copy", count],
            "busy_cores": busy[count, "always"],
            "copy_busy_cores": busy["copy", count],
        }
        for count in counts
    ]
    codecs = {spec.codec.partition(":")[0] for spec in read_info(path).arrays.values()} - {"raw"}
    unchecked = rate[1, "never"] / rate[1, "always"]
    return {
        "num_samples": first.num,
        "batch_size": batch_size,
        "sample_nbytes": nbytes,
        "threads": rows,
        "without_checksums": unchecked,
        "verdict": verdict(rows, unchecked, codecs, len(os.sched_getaffinity(0))),
    }


def verdict(rows: list[dict[str, Any]], without_checksums: float, codecs: set[str], cores: int) -> str:
    """Say in one sentence what bounds the fastest of ``rows``.

    Parameters
    ----------
    rows
        A measurement for each number of threads, as :func:`bench_dataset` returns them.
    without_checksums
        How many times faster one thread reads when it computes no checksum.
    codecs
        Of the dataset's arrays, but ``raw``.
    cores
        That this process may use.
    """
    best = max(rows, key=lambda row: row["samples_per_s"])
    share = f"{100 * best['of_copy']:.0f} % of copying the same bytes"
    if best["of_copy"] >= 0.5:
        return f"memory bandwidth: {share}"
    if best["busy_cores"] < 0.6 * min(best["threads"], cores):
        return (
            f"the disk: threads wait for it, {best['busy_cores']:.1f} of {min(best['threads'], cores)} cores are busy"
        )
    if best["threads"] == rows[-1]["threads"] < cores and best["samples_per_s"] > 1.3 * rows[0]["samples_per_s"]:
        return f"the number of threads: {share}, and more threads have made it faster so far"
    if codecs:
        return f"decoding {' and '.join(sorted(codecs))}: {share}"
    if without_checksums >= 1.25:
        return (
            f"checksums: {share}; check='first' computes each once, {without_checksums:.1f} times as fast on one thread"
        )
    return f"the CPU, at what a sample costs beside its bytes: {share}"


def _checks(count: int) -> tuple[str, ...]:
    return ("always", "never") if count == 1 else ("always",)


def _make(kind: type[DatasetLoader], path: str | Path, batch_size: int, threads: int, check: str) -> DatasetLoader:
    return kind(path, batch_size, rank=0, world_size=1, threads=threads, check=check)


def _reader(loader: DatasetLoader) -> Callable[[float], tuple[float, float]]:
    def run(seconds: float) -> tuple[float, float]:
        return _timed(itertools.chain.from_iterable(itertools.repeat(loader)), loader.batch_size, seconds)

    return run


def _copier(sample_nbytes: int, batch_size: int, threads: int) -> Callable[[float], tuple[float, float]]:
    """Return what copies batches as large from random places, in as many threads."""
    nbytes = sample_nbytes * batch_size
    source = np.ones(max(_SOURCE_NBYTES, nbytes), np.uint8)
    ring = np.zeros((4, nbytes), np.uint8)  # as many as a loader holds, or a cache would keep the only one
    edges = np.linspace(0, nbytes, threads + 1).astype(int).tolist()
    starts = np.random.default_rng(0).integers(0, len(source) - nbytes + 1, 1024).tolist()

    def run(seconds: float) -> tuple[float, float]:
        with ThreadPoolExecutor(threads) as pool:

            def copy(number: int) -> None:
                start, target = starts[number % len(starts)], ring[number % len(ring)]
                parts = [
                    pool.submit(np.copyto, target[low:high], source[start + low : start + high])
                    for low, high in itertools.pairwise(edges)
                ]
                for part in parts:
                    part.result()

            return _timed(map(copy, itertools.count()), batch_size, seconds)

    return run


def _timed(batches: Iterator[Any], batch_size: int, seconds: float) -> tuple[float, float]:
    """Take batches for some seconds, the first one before; return samples a second, and the cores that were busy."""
    next(batches)
    begin, cpu = time.perf_counter(), time.process_time()
    num, spent = 0, -1.0
    while spent < seconds:
        next(batches)
        num, spent = num + 1, time.perf_counter() - begin
    return num * batch_size / spent, (time.process_time() - cpu) / spent
