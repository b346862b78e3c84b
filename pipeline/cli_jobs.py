"""The part of the command line that concerns jobs and clusters, and how any command prints JSON."""

import json as json_format
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from schemas.errors import UsageError

if TYPE_CHECKING:
    from pipeline.monitor import MonitorOptions
    from pipeline.report import ConvertReport
    from pipeline.watch import Watch

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
ClusterFileName = Annotated[
    str, typer.Option("--cluster", metavar="FILE", help="A TOML file that names a cluster and its size.")
]
ReservedCores = Annotated[
    int, typer.Option("--reserve-cores", help="Cores to leave free, for training beside it.", min=0)
]

MetricsFile = Annotated[
    str, typer.Option("--metrics-file", metavar="FILE.prom", help="Prometheus text file, replaced as the run goes on.")
]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", help="Port on which Prometheus can scrape the run.", min=0, max=65535)
]
LogJson = Annotated[bool, typer.Option("--log-json", help="A log of JSON lines on standard error.")]
MemoryProfilePage = Annotated[
    str, typer.Option("--memory-profile", metavar="FILE.html", help="A page with memory over time.")
]
PerformanceReport = Annotated[
    str, typer.Option("--performance-report", metavar="FILE.html", help="Dask's report of what its workers did.")
]


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json_format.dumps(value, indent=2, default=str, ensure_ascii=False, allow_nan=False))


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Sources, recipe, dataset, cluster, hooks.")],
    check: Annotated[bool, typer.Option("--check", help="Look at everything the job names, and run nothing.")] = False,
    metrics_file: MetricsFile = "",
    metrics_port: MetricsPort = None,
    log_json: LogJson = False,
    memory_profile: MemoryProfilePage = "",
    json: Json = False,
) -> None:
    """Run a job: convert what is new, and tell who should know. The same command again finds nothing to do."""
    from dataclasses import asdict, replace

    from pipeline.job_file import check_job, load_job
    from pipeline.job_run import JobRun
    from pipeline.monitor import MonitorOptions

    if check:
        found, problems = check_job(job)
        if problems:
            raise UsageError("\n".join(problems), job=found.path.name)
        print_json({"ok": True, "job": str(found.path)}) if json else print(f"sound: {found.path}")
        return
    ready = JobRun(load_job(job))
    flags = MonitorOptions(
        metrics_file=metrics_file, metrics_port=metrics_port, log_json=log_json, memory_profile=memory_profile
    )
    given = {key: value for key, value in asdict(flags).items() if value not in ("", None, False)}
    perform(ready, ready.job.dataset, replace(ready.job.monitor, **given), json=json, run_id=ready.run_id)


def perform(
    work: "Callable[[Watch], ConvertReport]",
    dataset: Path,
    monitor: "MonitorOptions",
    *,
    json: bool,
    run_id: str = "",
) -> NoReturn:
    """Do the work with a progress bar and whatever else watches it, print its report, and end."""
    from pipeline import screens
    from pipeline.monitor import monitored, new_run_id
    from pipeline.report import report_to_json

    screen = screens.ConvertScreen(quiet=json or monitor.log_json)
    with screen, monitored(monitor, screen, dataset.expanduser().absolute(), run_id or new_run_id()) as watch:
        report = work(watch)
    if json:
        print_json(report_to_json(report))
    elif not monitor.log_json:
        screens.print_report(report)
    raise typer.Exit(report.exit_code)
