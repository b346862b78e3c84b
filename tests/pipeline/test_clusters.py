"""Clusters by file: what the file may say, workers that are late, missing or of other versions, and a scheduler that dies."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, Scheduler, SchedulerPlugin, SpecCluster, Worker

from pipeline import cluster_file, crew
from pipeline.cluster import ClusterOptions, cluster_options
from pipeline.cluster_file import ClusterFile, cluster_class, load_cluster, with_environment, with_free_ports
from pipeline.conversion import convert
from schemas.errors import HeadraceError, MissingExtraError, UsageError
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import tree, write_recipe, write_route


def run(folder: Path, out: str = "out", **options):
    return convert(folder / "raw", folder / out, folder / "tiny.toml", shard_steps=4, **options)


@pytest.fixture
def raw(tmp_path):
    write_route(tmp_path / "raw", 1, 12)
    write_recipe(tmp_path)
    return tmp_path


def test_a_cluster_file_is_read_whole(tmp_path):
    (tmp_path / "slurm.toml").write_text("""
cluster = "SLURMCluster"
timeout_s = 7200
[adaptive]
minimum = 2
maximum = 40
[resources]
decode = 1
[options]
queue = "short"
cores = 8
""")
    read = load_cluster(tmp_path / "slurm.toml")
    assert read == ClusterFile(
        cluster="SLURMCluster",
        timeout_s=7200,
        adaptive={"minimum": 2, "maximum": 40},
        resources={"decode": 1},
        options={"queue": "short", "cores": 8},
    )
    assert cluster_options(str(tmp_path / "slurm.toml")).num_workers == 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster = 'SlurmCluster'\nworkers = 1", "expected one of the clusters local, scheduler, HTCondorCluster"),
        ("cluster = 'SLURMCluster'", "expected `workers` or [adaptive], found neither"),
        ("cluster = 'SLURMCluster'\nworkers = 1\n[adaptive]\nmaximum = 2", "found both"),
        ("cluster = 'SLURMCluster'\n[adaptive]\nmaximum = 2\nminimum = 3", "expected 1 <= minimum <= maximum"),
        ("cluster = 'SLURMCluster'\n[adaptive]\nmaximun = 2", "did you mean 'maximum'?"),
        ("cluster = 'SLURMCluster'\nworker = 2", "did you mean 'workers'?"),
        ("cluster = 'SLURMCluster'\nworkers = '2'", "expected a whole number for workers in the cluster file, found '2'"),
        ("cluster = 'SLURMCluster'\nworkers = 2\n[resources]\ndecode = 'a'", "expected amounts above 0"),
        ("cluster = 'local'\n[adaptive]\nmaximum = 2", "expected a fixed number of workers of a local cluster"),
        ("cluster = 'local'\n[options]\nthread = 2", "did you mean 'threads'?"),
        ("cluster = 'scheduler'", "add `address` to [options]"),
        ("workers = 2", "expected cluster in the cluster file, found none"),
        ("cluster = ", "expected TOML in"),
    ],
)  # fmt: skip
def test_a_cluster_file_that_does_not_fit_is_wrong_usage(tmp_path, text, message):
    (tmp_path / "it.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_cluster(tmp_path / "it.toml")
    assert message in str(caught.value)


def test_a_class_whose_package_is_absent_names_the_extra(monkeypatch):
    monkeypatch.setitem(cluster_file.HOMES, "PBSCluster", ("no_such_package", "jobqueue"))
    with pytest.raises(MissingExtraError, match=r"pip install 'headrace\[jobqueue\]'"):
        cluster_class("PBSCluster")


def test_workers_elsewhere_get_the_environment_and_the_file_has_the_last_word():
    slurm = ClusterFile(cluster="SLURMCluster", workers=1, options={"job_script_prologue": ["module load x"]})
    assert with_environment(slurm, {"A": "1"})["job_script_prologue"] == ["export A=1", "module load x"]
    kube = ClusterFile(cluster="KubeCluster", workers=1, options={"env": {"A": "2"}})
    assert with_environment(kube, {"A": "1", "B": "3"})["env"] == {"A": "2", "B": "3"}


def test_the_job_script_of_a_real_job_queue_holds_what_the_file_says():
    jobqueue = pytest.importorskip("dask_jobqueue", reason="needs the extra jobqueue")
    options = {"cores": 2, "memory": "2GiB", "queue": "short", "scheduler_options": {"dashboard_address": ":0"}}
    file = ClusterFile(cluster="SLURMCluster", workers=1, options=options)
    with jobqueue.SLURMCluster(**with_environment(file, {"OMP_NUM_THREADS": "1"})) as cluster:
        lines = cluster.job_script().splitlines()
    assert lines.index("export OMP_NUM_THREADS=1") < next(at for at, line in enumerate(lines) if "dask_worker" in line)
    assert {"#SBATCH -p short", "#SBATCH --cpus-per-task=2"} <= set(lines)


def test_a_conversion_on_a_local_cluster_by_file_whose_port_is_taken(raw):
    """With a resource that every local worker offers."""
    said = []

    from pipeline.watch import Watch

    class Listener(Watch):
        def said(self, text):
            said.append(text)

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = ClusterFile(cluster="local", workers=1, resources={"decode": 1}, options={"scheduler_port": port})
        report = run(raw, cluster=ClusterOptions(file=file), watch=Listener())
    run(raw, "threads", cluster=ClusterOptions(workers=0))
    assert (report.exit_code, report.total_steps) == (0, 12)
    assert tree(raw / "out") == tree(raw / "threads")
    assert said[0] == f"port {port} (scheduler_port) is taken; another is used"
    assert (used := re.match(r"scheduler at tcp://127.0.0.1:(\d+), ", said[1])) and int(used.group(1)) != port


def test_a_free_port_is_kept():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"port": port, "dashboard_address": f"127.0.0.1:{port}", "interface": "lo"}
    assert with_free_ports(options, pytest.fail) == options


def test_a_worker_of_other_versions_is_named_with_both_sides(raw, monkeypatch):
    ours = tuple((name, "0.1" if name == "numpy" else version) for name, version in crew.own_versions())
    monkeypatch.setattr(crew, "own_versions", lambda: ours)
    import numpy

    message = f"expected numpy 0.1 on every worker, as here, found numpy {numpy.__version__} on worker tcp://.*:[0-9]+; install"
    with pytest.raises(HeadraceError, match=message):
        run(raw, cluster=ClusterOptions(workers=1))


def test_a_worker_of_other_versions_that_comes_late_does_no_task():
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
        assert client.submit(crew.checked, crew.own_versions(), len, "abc").result() == 3
        with pytest.raises(HeadraceError, match="expected zarr 9 on every worker, as here, found zarr "):
            client.submit(crew.checked, (("zarr", "9"),), len, "abc").result()


def scheduler_file(cluster, **more) -> ClusterOptions:
    options = {"address": cluster.scheduler_address}
    return ClusterOptions(file=ClusterFile(cluster="scheduler", options=options, **more))


def test_workers_that_never_come_are_said_in_time(raw):
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        with pytest.raises(HeadraceError, match="expected 3 workers of scheduler, found 0 after 0.2 s; start some"):
            run(raw, cluster=scheduler_file(cluster, workers=3, timeout_s=0.2))


class Places(SchedulerPlugin):
    """Which worker ran what."""

    def __init__(self):
        self.names = {}

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        if (start, finish) == ("processing", "memory"):
            self.names.setdefault(key.partition("-")[0], set()).add(worker)


def test_shards_are_made_only_where_the_resource_is_offered(raw):
    workers = {
        name: {"cls": Worker, "options": {"nthreads": 2, "dashboard": False, "resources": offered}}
        for name, offered in (("plain", {}), ("strong", {"decode": 2}))
    }
    scheduler = {"cls": Scheduler, "options": {"protocol": "inproc://", "dashboard": False}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster:
        strong = cluster.workers["strong"].address
        places = Places()
        cluster.scheduler.add_plugin(places)
        assert run(raw, cluster=scheduler_file(cluster, resources={"decode": 1})).exit_code == 0
        assert places.names["shard"] == {strong}
        with pytest.raises(
            HeadraceError, match=r"expected a worker that offers gpu=1, found 2 workers without after 0.3 s"
        ):
            run(raw, "other", cluster=scheduler_file(cluster, resources={"gpu": 1}, timeout_s=0.3))


def start(*words: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.soak
def test_a_scheduler_that_dies_ends_the_run_and_the_same_command_resumes(tmp_path):
    write_route(tmp_path / "raw", 1, 200)
    write_recipe(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = ("pipeline", "convert", f"{tmp_path}/raw", f"{tmp_path}/out", "--recipe", f"{tmp_path}/tiny.toml")
    command = (*command, "--shard-steps", "1", "--scheduler", f"tcp://127.0.0.1:{port}")

    def serve():
        scheduler = ("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        worker = ("distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-dashboard")
        return [start(*scheduler), start(*worker)]

    servers = serve()
    journal = tmp_path / "out.work" / "journal"
    try:
        time.sleep(3)
        process = start(*command)
        while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        servers[0].kill()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "expected the scheduler at tcp://" in said and "found it gone" in said and "Traceback" not in said
        servers += serve()  # the worker too: one that lost its scheduler ends
        again = start(*command)
        _, said = again.communicate(timeout=120)
        assert again.returncode == 0 and "are finished already" in said
    finally:
        for server in servers:
            server.send_signal(signal.SIGKILL)
            server.communicate()
    convert(
        tmp_path / "raw", tmp_path / "whole", tmp_path / "tiny.toml", shard_steps=1, cluster=ClusterOptions(workers=0)
    )
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_cluster_that_cannot_start_is_said_with_its_own_words(raw, monkeypatch):
    class Refusing:
        def __init__(self, **options):
            raise ConnectionError(f"no queue {options['queue']}")

    monkeypatch.setattr("pipeline.cluster_file.cluster_class", lambda name: Refusing)
    file = ClusterFile(cluster="PBSCluster", workers=1, options={"queue": "short"})
    with pytest.raises(UsageError, match="expected PBSCluster to start with these .*, found: no queue short; correct"):
        run(raw, cluster=ClusterOptions(file=file))


def test_a_report_that_cannot_be_drawn_is_said_before_anything_starts(raw, monkeypatch):
    monkeypatch.setattr("pipeline.cluster.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'headrace\[dashboard\]'"):
        run(raw, cluster=ClusterOptions(scheduler="tcp://127.0.0.1:1", performance_report="report.html"))
