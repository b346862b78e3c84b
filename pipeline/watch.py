"""What a running conversion tells whoever watches it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.plan import Estimate, Plan

if TYPE_CHECKING:
    from pipeline.report import ConvertReport
    from pipeline.shard_task import ShardResult


class Watch:
    """Sees a conversion happen; the command line shows a progress bar with it. Every method may be left as it is."""

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Take the plan, before anything runs."""

    def connected(self, client: Any) -> None:
        """Take the client of the cluster that the tasks run on; None when it is there no more."""

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Take the progress."""

    def queued(self, tasks: int) -> None:
        """Take the number of tasks that are submitted and not finished."""

    def read(self, nbytes: int) -> None:
        """Take the size of recordings that were digested."""

    def wrote(self, result: "ShardResult") -> None:
        """Take what a shard task reports."""

    def retried(self, task: str) -> None:
        """Take a task that is tried again, since its worker died or its result was lost."""

    def committed(self, report: "ConvertReport") -> None:
        """Take the report of a generation that is committed, or of a run that found nothing new."""

    def mismatched(self, files: int) -> None:
        """Take a number of finished files that are not what their checksum says: their work is done again."""

    def said(self, text: str) -> None:
        """Take one line of what is going on."""

    def ended(self, exit_code: int, error: BaseException | None) -> None:
        """Take the end of the run, whether it went well or not."""


class Watches(Watch):
    """Several watches, each told everything."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self.watches = list(watches)
        self.exit_code = 0
        """Of the last report."""

    def planned(self, plan: Plan, cost: Estimate, reused: int) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.planned(plan, cost, reused)

    def connected(self, client: Any) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.connected(client)

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.advanced(done_steps, total_steps, frames)

    def queued(self, tasks: int) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.queued(tasks)

    def read(self, nbytes: int) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.read(nbytes)

    def wrote(self, result: "ShardResult") -> None:
        """Tell all."""
        for watch in self.watches:
            watch.wrote(result)

    def retried(self, task: str) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.retried(task)

    def mismatched(self, files: int) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.mismatched(files)

    def ended(self, exit_code: int, error: BaseException | None) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.ended(exit_code, error)

    def committed(self, report: "ConvertReport") -> None:
        """Tell all."""
        self.exit_code = report.exit_code
        for watch in self.watches:
            watch.committed(report)

    def said(self, text: str) -> None:
        """Tell all."""
        for watch in self.watches:
            watch.said(text)
