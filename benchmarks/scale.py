"""What Dask and the driver cost for each shard, and whether their memory grows, with tasks that do nothing.

    python -m benchmarks.scale                  # 1,000 to 10,000 shards
    python -m benchmarks.scale 1000 1000000     # the whole range; more than half an hour

The window of ``convert`` runs as it is: planning order, submission, worker, result, journal. Only the task is empty. The share of a
shard's work is taken for the default size, a task of two seconds.
"""

import gc
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

from pipeline import run_tasks as module
from pipeline.cluster import ClusterOptions
from pipeline.shard_task import ShardResult
from pipeline.watch import Watch
from pipeline.workspace import Journal, Lock, Workspace
from schemas.dataset import ShardRow

SHARD_S = 2.0
"""Work of a shard of the default 64 MiB, on one core."""
VIEWS = ("rgb_main", "rgb_left", "rgb_right")
CHUNKS = 64


def empty_shard(shard: int) -> ShardResult:
    """Report what a shard task of three views and 64 steps reports."""
    rows = tuple(
        ShardRow(
            array=view,
            shard=shard,
            start=shard * CHUNKS,
            stop=(shard + 1) * CHUNKS,
            path=f"{view}/c.{shard}.0.0.0",
            nbytes=9_633_792,
            xxh3=f"{shard:032x}",
            chunk_crc32c=tuple(range(shard, shard + CHUNKS)),
        )
        for view in VIEWS
    )
    return ShardResult(
        shard=shard,
        rows=rows,
        part_nbytes=20_000,
        part_xxh3=f"{shard:032x}",
        faults=(),
        num_steps=CHUNKS,
        num_frames=3 * CHUNKS,
        seconds={"decode": 1.0},
    )


class EmptyTasks:
    """Tasks of a plan of so many shards and no episode to digest."""

    def __init__(self, root: Path, shards: int) -> None:
        self.root, self.place = root, str(root)
        self.plan = SimpleNamespace(shards=range(shards), num_steps=shards * CHUNKS, first_step=0, episodes=())

    def episodes(self, shard: int) -> tuple[()]:
        return ()

    def job(self, shard: int, refused: str = "") -> int:
        return shard


class NoJournal(Journal):
    """Writes nothing, to tell the journal's share."""

    def append(self, record: object) -> None:
        return


class Forgetful(dict):
    """Keeps no result: what is left is the memory of Dask and of the window."""

    def __setitem__(self, key: int, value: ShardResult) -> None:
        return


def rss_nbytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(shards: int, *, journal: type[Journal], results: dict[int, ShardResult]) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and bytes of memory of the program, driver and scheduler in one, for each shard."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "out"
        with Lock(Workspace(root)) as lock:
            kept = journal(Workspace(root).journal)
            kept.open()
            before, began, cpu = rss_nbytes(), time.perf_counter(), time.process_time()
            module.run_tasks(
                EmptyTasks(root, shards),
                results,
                set(),
                journal=kept,
                lock=lock,
                options=ClusterOptions(workers=1),
                watch=Watch(),
            )
            elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            grown = rss_nbytes() - before
            kept.close()
    return elapsed_s / shards, cpu_s / shards, grown / shards


def main() -> None:
    module.write_shard, module.needs_resizing = empty_shard, lambda plan: False
    sizes = [int(word) for word in sys.argv[1:]] or [1_000, 3_000, 10_000]
    measure(100, journal=NoJournal, results={})  # imports, first connection
    titles = f"{'elapsed':>11} {'CPU':>9} {'of a shard':>11} {'memory':>10} {'with results':>13} {'journal':>9}"
    print(f"{'shards':>9} {titles}")
    for shards in sizes:
        elapsed_s, cpu_s, nbytes = measure(shards, journal=NoJournal, results=Forgetful())
        whole_s, _, whole_nbytes = measure(shards, journal=Journal, results={})
        print(
            f"{shards:>9,} {elapsed_s * 1e3:>8.2f} ms {cpu_s * 1e3:>6.2f} ms {cpu_s / SHARD_S:>11.2%} {nbytes / 1e3:>7.2f} kB "
            f"{whole_nbytes / 1e3:>10.2f} kB {(whole_s - elapsed_s) * 1e3:>6.2f} ms"
        )


if __name__ == "__main__":
    main()
