"""Tasks in a sliding window over a Dask cluster: bounded on the driver and the scheduler, whatever the plan's size."""

import asyncio
import queue
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed import KilledWorker
from distributed.comm.core import CommClosedError
from distributed.scheduler import NoWorkerError

from pipeline import __version__
from pipeline.cluster import ClusterOptions, open_client
from pipeline.crew import WarmKernels, checked, own_versions
from pipeline.jobs import Tasks
from pipeline.plan import Plan
from pipeline.shard_task import ShardResult, write_shard
from pipeline.sources import write_provenance
from pipeline.watch import Watch
from pipeline.workspace import Journal, Lock
from schemas.errors import HeadraceError

if TYPE_CHECKING:
    from distributed import Client, Future

WINDOW = 3
"""Tasks in flight for each thread: enough that none waits for the driver, few enough that the scheduler stays small."""

WIDTH_S = 1.0
"""How long the number of workers is taken for unchanged: asking for it with every task would cost as much as the task costs Dask."""

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
    with open_client(options, watch.said) as client:
        watch.connected(client)
        try:
            if needs_resizing(tasks.plan):
                client.register_plugin(WarmKernels())
            window = _Window(client, tasks, results, sources, journal=journal, lock=lock, watch=watch)
            window.resources = dict(options.file.resources) if options.file is not None else {}
            window.run(_chain(first, waiting))
        finally:
            watch.connected(None)


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


def needs_resizing(plan: Plan) -> bool:
    """Whether frames of the first episode come in another size than the recipe's."""
    bindings, ref = plan.bindings, plan.episodes[0].ref
    views = [(view, bindings.view(ref, view.name)) for view in plan.recipe.views]
    infos = [(view, ref.view(source)) for view, source in views if source]
    return any((info.height_px, info.width_px) != (view.height_px, view.width_px) for view, info in infos)


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
        self.resources: dict[str, float] = {}
        """What a shard task takes of a worker that offers it."""
        self.versions = own_versions()
        self.root = tasks.place
        self.width, self.width_until_s = 0, 0.0

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
        now_s = time.monotonic()
        if now_s > self.width_until_s:
            with self._scheduler():
                threads = sum(self.client.nthreads().values())
            self.width, self.width_until_s = max(WINDOW * threads, 4), now_s + WIDTH_S
        return self.width

    @contextmanager
    def _scheduler(self) -> Iterator[None]:
        """Raise HeadraceError where the scheduler is gone while it is asked for something."""
        try:
            yield
        except (OSError, TimeoutError, RuntimeError) as error:
            raise self._lost(error) from error
        self._require_scheduler()

    def _require_scheduler(self) -> None:
        """Raise HeadraceError where the scheduler is gone: all futures are lost with it."""
        if self.client.status != "running":
            raise self._lost(self.client.status)

    def _lost(self, why: object) -> HeadraceError:
        return HeadraceError(
            f"expected the scheduler at {self.client.scheduler.address if self.client.scheduler else 'its address'} to answer, found it gone ({why}); "
            "what was finished is kept: run the same command again, with a scheduler that runs"
        )

    def _submit(self, task: tuple[str, int], refused: str = "") -> None:
        kind, number = task
        key = f"{kind}-{number}-{time.monotonic_ns()}"
        if kind == "source":
            episode = self.tasks.plan.episodes[number]
            reader = self.tasks.readers[episode.source]
            call: tuple[Any, ...] = (write_provenance, self.root, reader, episode, number)
        else:
            call = (write_shard, self.tasks.job(number, refused))
        with self._scheduler():
            future: Future = self.client.submit(
                checked,
                self.versions,
                *call,
                key=key,
                priority=int(kind == "source"),
                resources=self.resources if kind == "shard" else None,
                pure=False,
            )
        self.in_flight[task] = future
        future.add_done_callback(lambda found: self.done.put((task, found)))

    def _collect(self) -> None:
        """Take one finished task; beat the lock while waiting."""
        self.lock.beat()
        self.watch.queued(len(self.in_flight))
        try:
            task, future = self.done.get(timeout=1.0)
        except queue.Empty:
            self._require_scheduler()
            return
        if self.in_flight.get(task) is not future:
            return
        del self.in_flight[task]
        try:
            value = future.result()
        except KilledWorker:
            self.watch.said(f"a worker died during {task[0]} {task[1]}; it will be tried again alone")
            self.watch.retried(f"{task[0]} {task[1]}")
            self.suspects.append(task)
        except NoWorkerError as error:
            raise HeadraceError(
                "expected workers, found none for two minutes; try --workers 0, which shows why they do not start"
            ) from error
        except CommClosedError as error:
            raise self._lost(error) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in ("pipeline", "tasks", "schemas"):
                raise
            raise HeadraceError(
                f"expected headrace {__version__} on every worker, found one without it ({error}); install it there"
            ) from error
        except (asyncio.CancelledError, CancelledError) as error:
            self._submit_lost(task, error)
        else:
            self._record(task, value)

    def _submit_lost(self, task: tuple[str, int], error: BaseException) -> None:
        """Submit a task again whose result died with its worker after it was finished: nobody is to blame for that."""
        self._require_scheduler()
        self.lost[task] += 1
        if self.lost[task] > LOST_TRIES:
            raise HeadraceError(
                f"expected the result of {task[0]} {task[1]}, found it lost {LOST_TRIES} times; run the same command again"
            ) from error
        self.watch.retried(f"{task[0]} {task[1]}")
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
            self.watch.read(value)
            return
        self.journal.append({"kind": "shard", "result": value.to_json()})
        self.results[number] = value
        self.steps += value.num_steps
        self.frames += value.num_frames
        self.watch.wrote(value)
        self.watch.advanced(self.steps, self.total, self.frames)
