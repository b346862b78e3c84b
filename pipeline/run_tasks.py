"""Tasks in a sliding window over a Dask cluster: bounded on the driver and the scheduler, whatever the plan's size."""

import asyncio
import queue
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker
from distributed.scheduler import NoWorkerError

from pipeline.cluster import ClusterOptions, open_client
from pipeline.jobs import Tasks
from pipeline.shard_task import ShardResult, write_shard
from pipeline.sources import write_provenance
from pipeline.watch import Watch
from pipeline.workspace import Journal, Lock
from schemas.errors import HeadraceError

if TYPE_CHECKING:
    from distributed import Client, Future

WINDOW = 3
"""Tasks in flight for each thread: enough that none waits for the driver, few enough that the scheduler stays small."""

LOST_TRIES = 10
"""Times a finished task may lose its result with its worker."""

LONELY_TRIES = 2
"""Times a task whose worker died is tried again by itself before it is blamed: another's crash kills innocents too."""


def run_tasks(
    tasks: Tasks,
    results: dict[int, ShardResult],
    sources: set[int],
    *,
    journal: Journal,
    lock: Lock,
    options: ClusterOptions,
    watch: Watch,
) -> None:
    """Run every task that is not done yet; ``results`` and ``sources`` grow, and the journal with them.

    Raises
    ------
    HeadraceError
        As a task raised it; what was journalled before stays done.
    """
    waiting = _waiting(tasks, results, sources)
    first = next(waiting, None)
    if first is None:
        return
    with open_client(options) as client:
        _Window(client, tasks, results, sources, journal=journal, lock=lock, watch=watch).run(_chain(first, waiting))


def _waiting(tasks: Tasks, results: dict[int, ShardResult], sources: set[int]) -> Iterator[tuple[str, int]]:
    """Yield what is left: an episode's digest just before its first shard, since reading it warms the page cache."""
    begun = set(sources)
    for shard in tasks.plan.shards:
        for number, _ in tasks.episodes(shard):
            if number not in begun:
                begun.add(number)
                yield "source", number
        if shard not in results:
            yield "shard", shard


def _chain(first: tuple[str, int], rest: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    yield first
    yield from rest


class _Window:
    """Futures in flight and what becomes of them."""

    def __init__(
        self,
        client: "Client",
        tasks: Tasks,
        results: dict[int, ShardResult],
        sources: set[int],
        *,
        journal: Journal,
        lock: Lock,
        watch: Watch,
    ) -> None:
        self.client, self.tasks, self.results, self.sources = client, tasks, results, sources
        self.journal, self.lock, self.watch = journal, lock, watch
        self.done: queue.SimpleQueue[tuple[tuple[str, int], Future]] = queue.SimpleQueue()
        self.in_flight: dict[tuple[str, int], Future] = {}
        self.suspects: list[tuple[str, int]] = []
        self.lost: Counter[tuple[str, int]] = Counter()
        self.total = tasks.plan.num_steps - tasks.plan.first_step
        self.steps = sum(result.num_steps for result in results.values())
        self.frames = 0

    def run(self, waiting: Iterator[tuple[str, int]]) -> None:
        try:
            exhausted = False
            while True:
                while not exhausted and len(self.in_flight) < self._width():
                    task = next(waiting, None)
                    exhausted = task is None
                    if task is not None:
                        self._submit(task)
                if not self.in_flight:
                    break
                self._collect()
            alone, self.suspects = self.suspects, []
            for task in alone:
                self._run_alone(task)
        finally:
            for future in self.in_flight.values():
                future.release()

    def _width(self) -> int:
        threads = sum(self.client.nthreads().values())
        return max(WINDOW * threads, 4)

    def _submit(self, task: tuple[str, int], refused: str = "") -> None:
        kind, number = task
        key = f"{kind}-{number}-{time.monotonic_ns()}"
        root = str(self.tasks.root.resolve())
        if kind == "source":
            episode = self.tasks.plan.episodes[number]
            reader = self.tasks.readers[episode.source]
            future: Future = self.client.submit(write_provenance, root, reader, episode, number, key=key, priority=1)
        else:
            future = self.client.submit(write_shard, self.tasks.job(number, refused), key=key)
        self.in_flight[task] = future
        future.add_done_callback(lambda found: self.done.put((task, found)))

    def _collect(self) -> None:
        """Take one finished task; beat the lock while waiting."""
        self.lock.beat()
        try:
            task, future = self.done.get(timeout=1.0)
        except queue.Empty:
            return
        if self.in_flight.get(task) is not future:
            return
        del self.in_flight[task]
        try:
            value = future.result()
        except KilledWorker:
            self.watch.said(f"a worker died during {task[0]} {task[1]}; it will be tried again alone")
            self.suspects.append(task)
        except NoWorkerError as error:
            raise HeadraceError(
                "expected workers, found none for two minutes; try --workers 0, which shows why they do not start"
            ) from error
        except (asyncio.CancelledError, CancelledError) as error:
            self._submit_lost(task, error)
        else:
            self._record(task, value)

    def _submit_lost(self, task: tuple[str, int], error: BaseException) -> None:
        """Submit a task again whose result died with its worker after it was finished: nobody is to blame for that."""
        self.lost[task] += 1
        if self.lost[task] > LOST_TRIES:
            raise HeadraceError(
                f"expected the result of {task[0]} {task[1]}, found it lost {LOST_TRIES} times; run the same command again"
            ) from error
        self._submit(task)

    def _run_alone(self, task: tuple[str, int]) -> None:
        for _ in range(LONELY_TRIES):
            self._submit(task)
            while self.in_flight:
                self._collect()
            if not self.suspects:
                return
            self.suspects.clear()
        if task[0] == "source":
            raise HeadraceError(
                f"expected to digest the files of episode {task[1]}, found that it kills every worker; see its files"
            )
        message = "expected to convert these steps, found that they kill every worker that tries; see the files, or give --memory"
        self._submit(task, refused=message)
        while self.in_flight:
            self._collect()

    def _record(self, task: tuple[str, int], value: Any) -> None:
        kind, number = task
        if kind == "source":
            self.sources.add(number)
            self.journal.append({"kind": "source", "number": number})
            return
        self.journal.append({"kind": "shard", "result": value.to_json()})
        self.results[number] = value
        self.steps += value.num_steps
        self.frames += value.num_frames
        self.watch.advanced(self.steps, self.total, self.frames)
