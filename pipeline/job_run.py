"""One run of a job: its hooks before, the conversion, its hooks after, and a notification by exit code."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.conversion import convert
from pipeline.job_file import Argv, Job
from pipeline.monitor import new_run_id
from pipeline.report import ConvertReport
from pipeline.watch import Watch
from pipeline.workspace import Lock, Workspace
from schemas.errors import HeadraceError, LockedError, Stopped

HOOK_TIMEOUT_S = 3600.0
"""A hook that takes longer is ended: one that hangs would hold the job's lock until somebody looks."""

STOP_TIMEOUT_S = 4.0
"""And less after a signal: whoever sent it kills soon."""

STDERR = 2
"""Where hooks write: standard output is the report's."""


@dataclass(slots=True)
class JobRun:
    """One run, and what its hooks are told of it."""

    job: Job
    run_id: str = field(default_factory=new_run_id)
    generation: int = 0
    exit_code: int = 0
    message: str = ""
    new_episodes: int = 0
    timeout_s: float = HOOK_TIMEOUT_S

    def __call__(self, watch: Watch) -> ConvertReport:
        """Run the job; the same call again finds nothing new, and ends at once.

        Raises
        ------
        LockedError
            Another run of it is under way.
        HeadraceError
            As the conversion raised it, after the hooks; or a hook failed.
        """
        try:
            with Lock(Workspace(self.job.dataset.resolve()), "run"):
                report = self._convert(watch)
        except LockedError as error:
            self._failed(error, error.exit_code)
            self._notify()
            raise
        return report

    def _convert(self, watch: Watch) -> ConvertReport:
        try:
            self._hooks("before")
            report = convert(self.job.folders(), self.job.dataset, self.job.recipe, watch=watch, **self.job.options())
            self.generation, self.exit_code, self.new_episodes = (
                report.generation,
                report.exit_code,
                report.num_episodes,
            )
            self._hooks("after")
        except LockedError:
            raise
        except BaseException as error:  # of a signal too: it is told to the hooks, and raised again
            code = error.exit_code if isinstance(error, HeadraceError | Stopped) else 1
            self._failed(error, code)
            self.timeout_s = STOP_TIMEOUT_S if isinstance(error, Stopped) else HOOK_TIMEOUT_S
            self._hooks("on_failure", may_fail=True)
            self._notify()
            raise
        self._notify()
        return report

    def _failed(self, error: BaseException, code: int) -> None:
        self.exit_code, self.message = code, str(error)

    def _hooks(self, moment: str, *, may_fail: bool = False) -> None:
        self._call(self.job.hooks.get(moment, ()), moment, may_fail=may_fail)

    def _notify(self) -> None:
        self._call(self.job.notify.get(self.exit_code, ()), f"notify {self.exit_code}", may_fail=True)

    def _call(self, commands: Sequence[Argv], moment: str, *, may_fail: bool) -> None:
        """Run commands one after another; one that fails stops the run, or where that has ended is said."""
        for words in commands:
            problem = self._problem_of(words)
            if not problem:
                continue
            kept = f"; generation {self.generation} is committed" if moment == "after" else ""
            said = f"expected the hook {words[0]!r} ({moment}) to succeed, found {problem}{kept}; correct it and run the job again"
            if not may_fail:
                raise HeadraceError(said)
            sys.stderr.write(f"headrace: {said}\n")

    def _problem_of(self, words: Argv) -> str:
        try:
            done = subprocess.run(
                words,
                env={**os.environ, **self.environment()},
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                cwd=self.job.path.parent,
                timeout=self.timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return f"exit code {done.returncode}" if done.returncode else ""

    def environment(self) -> dict[str, str]:
        """Return what hooks are told, as environment variables."""
        told = {
            "JOB": Path(self.job.path),
            "DATASET": self.job.dataset,
            "GENERATION": self.generation,
            "EXIT_CODE": self.exit_code,
            "NEW_EPISODES": self.new_episodes,
            "MESSAGE": self.message,
            "RUN_ID": self.run_id,
        }
        return {f"HEADRACE_{name}": str(value).replace("\0", "") for name, value in told.items()}
