"""The part of the command line that concerns jobs and clusters, and how any command prints JSON."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
ClusterFileName = Annotated[
    str, typer.Option("--cluster", metavar="FILE", help="A TOML file that names a cluster and its size.")
]
ReservedCores = Annotated[
    int, typer.Option("--reserve-cores", help="Cores to leave free, for training beside it.", min=0)
]


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json_format.dumps(value, indent=2, default=str, ensure_ascii=False, allow_nan=False))


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Sources, recipe, dataset, cluster, hooks.")],
    check: Annotated[bool, typer.Option("--check", help="Look at everything the job names, and run nothing.")] = False,
    json: Json = False,
) -> None:
    """Run a job: convert what is new, and tell who should know. The same command again finds nothing to do."""
    from pipeline import screens
    from pipeline.job_file import check_job, load_job
    from pipeline.report import report_to_json

    if check:
        found, problems = check_job(job)
        if problems:
            raise UsageError("\n".join(problems), job=found.path.name)
        print_json({"ok": True, "job": str(found.path)}) if json else print(f"sound: {found.path}")
        return
    from pipeline.job_run import JobRun

    with screens.ConvertScreen(quiet=json) as screen:
        report = JobRun(load_job(job))(screen)
    if json:
        print_json(report_to_json(report))
    else:
        screens.print_report(report)
    raise typer.Exit(report.exit_code)
