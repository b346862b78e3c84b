"""The examples of schedules: each is accepted by what reads it as far as that is here, and runs the job that lies beside it."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from pipeline.cluster_file import load_cluster
from pipeline.job_file import load_job
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "examples" / "schedules"
COMMAND = r"headrace run /etc/headrace/night\.toml( --json| --log-json)"
NIGHTLY = "15 2 * * *"


def text(name):
    return (FOLDER / name).read_text("utf-8")


def test_the_job_and_its_cluster_are_accepted():
    job = load_job(FOLDER / "night.toml")
    assert (str(job.dataset), job.monitor.metrics_file) == (
        "/data/dataset.zarr",
        "/var/lib/node_exporter/headrace.prom",
    )
    assert set(job.notify) == {1, 3}
    assert load_cluster(FOLDER / "slurm.toml").most_workers == 32


@pytest.mark.parametrize(
    "name",
    ["headrace.crontab", "headrace.service", "night.sbatch", "night.scrontab", "cronjob.yaml", "airflow_dag.py"],
)
def test_every_schedule_runs_that_job(name):
    assert len(re.findall(COMMAND, text(name))) == 1


@pytest.mark.parametrize("name", ["headrace.crontab", "night.scrontab"])
def test_crontabs_have_five_fields_and_a_command(name):
    (line,) = [line for line in text(name).splitlines() if not line.startswith("#")]
    assert line.split(None, 5)[:5] == NIGHTLY.split() and re.match(COMMAND, line.split(None, 5)[5])


def test_systemd_accepts_the_units(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    for name in ("headrace.service", "headrace.timer"):
        shutil.copy(FOLDER / name, tmp_path / name)
    units = [str(tmp_path / name) for name in ("headrace.service", "headrace.timer")]
    done = subprocess.run([program, "verify", "--man=no", *units], capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "headrace" in line]
    assert ours == []
    assert "SuccessExitStatus=3 75\n" in text("headrace.service")


def test_the_batch_script_is_bash_and_gets_its_signal():
    assert subprocess.run(["bash", "-n", str(FOLDER / "night.sbatch")]).returncode == 0
    assert "#SBATCH --signal=TERM@60\n" in text("night.sbatch")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (75, 1), (1, 1)])
def test_the_cron_job_of_kubernetes_takes_refused_recordings_for_no_failure(code, expected, tmp_path):
    job = yaml.safe_load(text("cronjob.yaml"))
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["kind"], job["spec"]["schedule"], job["spec"]["concurrencyPolicy"]) == ("CronJob", NIGHTLY, "Forbid")
    assert container["image"].endswith(f":{__import__('pipeline').__version__}")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert exit_code_of(container["command"] + container["args"], code, tmp_path) == expected


def exit_code_of(command, code, folder):
    """Run a command whose `headrace` ends with ``code``."""
    (folder / "headrace").write_text(f"#!/bin/sh\nexit {code}\n")
    (folder / "headrace").chmod(0o755)
    return subprocess.run(command, env={"PATH": f"{folder}:/usr/bin:/bin"}).returncode


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (75, 75), (1, 1)])
def test_airflow_is_told_what_the_exit_codes_mean(code, expected, tmp_path):
    calls = {
        node.func.id: {each.arg: each.value for each in node.keywords}
        for node in ast.walk(ast.parse(text("airflow_dag.py")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert ast.literal_eval(calls["DAG"]["schedule"]) == NIGHTLY
    operator = calls["BashOperator"]
    assert ast.literal_eval(operator["skip_on_exit_code"]) == 75
    assert exit_code_of(["bash", "-c", ast.literal_eval(operator["bash_command"])], code, tmp_path) == expected


@pytest.mark.parametrize(
    ("code", "printed"), [(0, '{"generation": 2}'), (3, '{"generation": 2}'), (1, '{"error": "x"}')]
)
def test_the_flow_of_prefect_raises_where_the_job_fails(code, printed, tmp_path, monkeypatch):
    (tmp_path / "headrace").write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
    (tmp_path / "headrace").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    prefect = ModuleType("prefect")  # with decorators that leave a function as it is
    prefect.task = prefect.flow = lambda **_: lambda function: function
    prefect.get_run_logger = lambda: SimpleNamespace(info=lambda *_: None)
    monkeypatch.setitem(sys.modules, "prefect", prefect)
    scope = runpy.run_path(str(FOLDER / "prefect_flow.py"))
    if code == 1:
        with pytest.raises(RuntimeError, match="x"):
            scope["nightly"]()
    else:
        scope["nightly"]()
