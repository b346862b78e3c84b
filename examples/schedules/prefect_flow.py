"""Prefect 2.10 or newer: ``python prefect_flow.py`` serves a flow that converts what is new, every night."""

import json
import subprocess

from prefect import flow, get_run_logger, task

DONE, REFUSED, BUSY = 0, 3, 75
"""Exit codes: done; done, and some recordings were refused; another run is at it."""


@task(retries=2, retry_delay_seconds=600)
def convert(job: str) -> dict:
    """Run the job and return its report."""
    done = subprocess.run(["headrace", "run", job, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(done.stdout)
    if done.returncode not in (DONE, REFUSED, BUSY):
        raise RuntimeError(report["error"])
    return report


@flow(name="headrace")
def nightly(job: str = "/etc/headrace/night.toml") -> None:
    """Convert, and log what was done."""
    report = convert(job)
    get_run_logger().info("generation %s, %s new steps", report.get("generation"), report.get("num_steps"))


if __name__ == "__main__":
    nightly.serve(name="nightly", cron="15 2 * * *")
