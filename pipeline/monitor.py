"""Who else is told what a run does: Prometheus, a log of JSON lines, a page about memory."""

import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.plan import Estimate, Plan
from pipeline.report import fault_line
from pipeline.watch import Watch, Watches
from schemas.errors import HeadraceError, Stopped

if TYPE_CHECKING:
    from pipeline.report import ConvertReport
    from pipeline.shard_task import ShardResult

PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """Who else is told what a run does, beside the terminal."""

    metrics_file: str = ""
    """Text file for the node exporter of Prometheus, replaced atomically."""
    metrics_port: int | None = None
    """Port on which Prometheus can scrape the run while it lasts."""
    log_json: bool = False
    """One JSON object a line on standard error."""
    memory_profile: str = ""
    """HTML page with memory over time."""


def new_run_id() -> str:
    """Return what tells this run from all others."""
    return uuid.uuid4().hex[:12]


@contextmanager
def monitored(options: MonitorOptions, screen: Watch, dataset: Path, run_id: str) -> Iterator[Watch]:
    """Yield a watch that tells the screen and all whom the options name; they see the end of the run too, and its error."""
    watches = Watches([screen])
    with ExitStack() as stack:
        if options.log_json:
            watches.watches.append(JsonLog(run_id, dataset))
        if options.metrics_file or options.metrics_port is not None:
            from pipeline.metrics import Metrics

            metrics = Metrics(dataset, run_id, options.metrics_file)
            watches.watches.append(metrics)
            if options.metrics_port is not None:
                port = stack.enter_context(metrics.served(options.metrics_port))
                watches.said(f"metrics on port {port}")
        if options.memory_profile:
            from pipeline.memory_profile import MemoryProfile

            watches.watches.append(stack.enter_context(MemoryProfile(Path(options.memory_profile))))
        try:
            yield watches
        except BaseException as error:
            watches.ended(error.exit_code if isinstance(error, HeadraceError | Stopped) else 1, error)
            raise
        watches.ended(watches.exit_code, None)


class JsonLog(Watch):
    """One JSON object a line on standard error: time, run, dataset, event, and what belongs to it."""

    def __init__(self, run_id: str, dataset: Path) -> None:
        self._facts = {"run_id": run_id, "dataset": str(dataset)}
        self._told_s = 0.0

    def _log(self, event: str, level: str = "info", **facts: Any) -> None:
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1000):03d}Z"
        line: Mapping[str, Any] = {"time": stamp, "level": level, "event": event, **self._facts, **facts}
        sys.stderr.write(json.dumps(line, ensure_ascii=False) + "\n")

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Log the size of the plan, and what it leaves out for a fault."""
        self._log(
            "planned",
            generation=plan.generation,
            episodes=cost.num_episodes,
            steps=cost.num_steps,
            shards=cost.num_shards,
            shards_reused=reused,
        )
        self._refused(plan.faults)

    def connected(self, client: Any) -> None:
        """Log the workers."""
        if client is not None:
            self._log("connected", scheduler=str(client.scheduler.address), workers=len(client.nthreads()))

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Log the progress, now and then."""
        if time.monotonic() - self._told_s > PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            self._log("progress", done_steps=done_steps, total_steps=total_steps, frames=frames)

    def wrote(self, result: "ShardResult") -> None:
        """Log what was refused."""
        self._refused(result.faults)

    def _refused(self, faults: Any) -> None:
        for source, fault in faults:
            if fault.is_refusal:
                self._log("refused", "warning", reason=str(fault.reason), message=fault_line(source, fault))

    def retried(self, task: str) -> None:
        """Log a task that is tried again."""
        self._log("retried", "warning", task=task)

    def mismatched(self, files: int) -> None:
        """Log finished work that is not what its checksum says."""
        self._log("mismatched", "warning", files=files)

    def committed(self, report: "ConvertReport") -> None:
        """Log what the run came to."""
        self._log(
            "committed",
            generation=report.generation,
            episodes=report.num_episodes,
            steps=report.num_steps,
            frames=report.num_frames,
            nbytes=report.nbytes,
            seconds=round(report.seconds, 3),
            quarantined=dict(report.quarantined),
        )

    def said(self, text: str) -> None:
        """Log one line."""
        self._log("said", message=text)

    def ended(self, exit_code: int, error: BaseException | None) -> None:
        """Log the end."""
        said = {} if error is None else {"message": str(error), "kind": type(error).__name__}
        self._log("ended", "info" if error is None else "error", exit_code=exit_code, **said)
