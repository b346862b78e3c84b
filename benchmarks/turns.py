"""Systems measured in turns: A B C A B C ..., so that whatever else the machine does falls on all alike."""

import time
from collections.abc import Callable

import numpy as np

Run = Callable[[], int]
"""Reads or computes some samples; returns how many."""


def measure(runs: dict[str, Run], rounds: int) -> dict[str, np.ndarray]:
    """Return microseconds of wall and CPU time per sample, ``float64[round, 2]`` by system."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            num = run()
            spent = (time.perf_counter() - wall) / num * 1e6, (time.process_time() - cpu) / num * 1e6
            if number:  # the first round compiles, opens and fills the page cache
                times[name].append(spent)
    return {name: np.array(spent) for name, spent in times.items()}
