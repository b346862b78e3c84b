"""Prometheus metrics of a run: on a port while it lasts, or in a text file that outlives it."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.plan import Estimate, Plan
from pipeline.store.metadata import ROOT_DOCUMENT
from pipeline.watch import Watch
from schemas.errors import ChecksumError, HeadraceError, MissingExtraError
from schemas.source import Fault

if TYPE_CHECKING:
    from pipeline.report import ConvertReport
    from pipeline.shard_task import ShardResult
    from pipeline.verification import VerifyReport

WRITE_EVERY_S = 5.0
"""A text file is written at most so often while a run lasts, and once when it ends."""

STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""From a shard of thumbnails to one of large videos."""


class Metrics(Watch):
    """What a run tells Prometheus; ``docs/operations.md`` lists the metrics.

    Parameters
    ----------
    dataset
        The label that tells runs of one machine apart.
    run_id
        Of this run.
    file
        Text file to write; none where empty.
    """

    def __init__(self, dataset: Path, run_id: str, file: str = "") -> None:
        self._client, self._root, self._file = _prometheus_client(), dataset, file
        self.registry = self._client.CollectorRegistry()
        self._labels = {"dataset": str(dataset)}
        self._quarantined: Counter[str] = Counter()
        self._known: set[tuple[str, Fault]] = set()
        self._began_s, self._wrote_s = 0.0, -WRITE_EVERY_S
        self._first_steps: int | None = None
        self._last_steps = 0
        self._define(run_id)
        self._commit_time()
        self._write(force=True)  # a place that cannot be written is found now, not after the work

    def _define(self, run_id: str) -> None:
        self.steps = self._counter("steps_converted", "Steps that this run converted.")
        self.frames = self._counter("frames_converted", "Frames that this run converted.")
        self.source_bytes = self._counter("source_read_bytes", "Bytes of recordings that this run read.")
        self.dataset_bytes = self._counter("dataset_written_bytes", "Bytes of shards that this run wrote.")
        self.quarantined = self._counter("quarantined", "Pieces of input that were refused, by reason.", "reason")
        self.retries = self._counter("retries", "Tasks tried again: a worker died, or a result was lost.")
        self.checksums = self._counter("checksum_failures", "Files that were not what their checksum says.")
        self.queue = self._gauge("queue_tasks", "Tasks that are submitted and not finished.")
        self.planned_steps = self._gauge("planned_steps", "Steps of the plan.")
        self.eta = self._gauge("eta_seconds", "Time until all steps are converted, at the rate of this run.")
        self.workers = self._gauge("workers", "Workers that are connected.")
        self.generation = self._gauge("generation", "Generation that is committed.")
        self.commit_time = self._gauge("last_commit_timestamp_seconds", "When the dataset was last committed.")
        self.success_time = self._gauge(
            "last_success_timestamp_seconds", "When a run last ended well, new data or none."
        )
        self.exit_code = self._gauge("exit_code", "Exit code of the run; -1 while it lasts.")
        self.stages = self._client.Histogram(
            "headrace_stage_seconds", "Seconds of a shard task by stage.", ("dataset", "stage"),
            buckets=STAGE_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        info = self._client.Info("headrace_run", "The run.", ("dataset",), registry=self.registry)
        info.labels(**self._labels).info({"run_id": run_id})
        self.exit_code.set(-1)

    def _counter(self, name: str, said: str, *more: str) -> Any:
        made = self._client.Counter(f"headrace_{name}", said, ("dataset", *more), registry=self.registry)
        return made if more else made.labels(**self._labels)

    def _gauge(self, name: str, said: str) -> Any:
        return self._client.Gauge(f"headrace_{name}", said, ("dataset",), registry=self.registry).labels(**self._labels)

    @contextmanager
    def served(self, port: int) -> Iterator[int]:
        """Answer Prometheus; the port is another where that one is taken."""
        try:
            server, thread = self._client.start_http_server(port, registry=self.registry)
        except OSError:
            server, thread = self._client.start_http_server(0, registry=self.registry)
        try:
            yield int(server.server_port)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Take the plan."""
        self.planned_steps.set(plan.num_steps - plan.first_step)
        self._refuse(plan.faults)
        self._began_s, self._first_steps = time.monotonic(), None

    def connected(self, client: Any) -> None:
        """Take the cluster."""
        self.workers.set(len(client.nthreads()) if client is not None else 0)
        if client is None:
            self.queue.set(0)

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Take the progress, and say how long the rest will last."""
        if self._first_steps is None:  # what an interrupted run had done is no part of the rate
            self._first_steps = done_steps - self._last_steps
        done = done_steps - self._first_steps
        elapsed_s = time.monotonic() - self._began_s
        self.eta.set((total_steps - done_steps) * elapsed_s / done if done else 0.0)
        self._write()

    def queued(self, tasks: int) -> None:
        """Take the depth of the queue."""
        self.queue.set(tasks)

    def read(self, nbytes: int) -> None:
        """Count recordings."""
        self.source_bytes.inc(nbytes)

    def wrote(self, result: "ShardResult") -> None:
        """Count a shard."""
        self._last_steps = result.num_steps
        self.steps.inc(result.num_steps)
        self.frames.inc(result.num_frames)
        self.dataset_bytes.inc(sum(row.nbytes for row in result.rows) + result.part_nbytes)
        for stage, seconds in result.seconds.items():
            self.stages.labels(stage=stage, **self._labels).observe(seconds)
        self._refuse(result.faults)

    def retried(self, task: str) -> None:
        """Count a task that is tried again."""
        self.retries.inc()

    def mismatched(self, files: int) -> None:
        """Count finished work that is not what its checksum says."""
        self.checksums.inc(files)

    def committed(self, report: "ConvertReport") -> None:
        """Take what the run came to; of reasons that are known only at its end, the rest is counted now."""
        for reason, count in report.quarantined.items():
            self._count(reason, max(0, count - self._quarantined[reason]))
        self.generation.set(report.generation)
        self._commit_time()
        self.success_time.set(time.time())
        self.eta.set(0)

    def ended(self, exit_code: int, error: BaseException | None) -> None:
        """Take the end of the run, and write the file."""
        if isinstance(error, ChecksumError):
            self.checksums.inc()
        self.exit_code.set(exit_code)
        self._write(force=True)

    def _refuse(self, faults: Any) -> None:
        for fault in faults:
            if fault[1].is_refusal and fault not in self._known:
                self._known.add(fault)
                self._count(str(fault[1].reason), 1)

    def _count(self, reason: str, count: int) -> None:
        self._quarantined[reason] += count
        self.quarantined.labels(reason=reason, **self._labels).inc(count)

    def _commit_time(self) -> None:
        """Take the time of the commit pointer, so that a run that finds nothing new says when the last commit was."""
        root = self._root / ROOT_DOCUMENT
        if root.is_file():
            self.commit_time.set(root.stat().st_mtime)

    def _write(self, *, force: bool = False) -> None:
        if not self._file or not (force or time.monotonic() - self._wrote_s > WRITE_EVERY_S):
            return
        self._wrote_s = time.monotonic()
        _write_text(self._file, self.registry)


def verify_registry(report: "VerifyReport", dataset: Path) -> Any:
    """Return what a verification tells Prometheus."""
    client = _prometheus_client()
    registry = client.CollectorRegistry()
    values = {
        "verify_problems": ("Problems that the last verification found.", len(report.problems)),
        "last_verify_timestamp_seconds": ("When the dataset was last verified.", time.time()),
        "verified_bytes": ("Bytes of the files that were verified.", report.nbytes),
    }
    for name, (said, value) in values.items():
        gauge = client.Gauge(f"headrace_{name}", said, ("dataset",), registry=registry)
        gauge.labels(dataset=str(dataset)).set(value)
    return registry


def write_verify_metrics(file: str, report: "VerifyReport", dataset: Path) -> None:
    """Write a text file about a verification."""
    _write_text(file, verify_registry(report, dataset))


def _prometheus_client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingExtraError(
            "expected prometheus-client for metrics, found it missing; run: pip install 'headrace[metrics]'"
        ) from error
    return prometheus_client


def _write_text(file: str, registry: Any) -> None:
    try:
        _prometheus_client().write_to_textfile(file, registry)
    except OSError as error:
        raise HeadraceError(
            f"expected to write metrics to {file}, found: {error.strerror}; choose another --metrics-file"
        ) from error
