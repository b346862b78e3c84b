"""A real SLURM of one node, started here: a job file converts through dask-jobqueue. Needs slurm-wlm, munge, root and the extra jobqueue."""

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.demo.lerobot import write_lerobot_set
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import tree

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

CONFIGURATION = """
ClusterName=headrace
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=2000 State=UNKNOWN
PartitionName=short Nodes={host} Default=YES MaxTime=60 State=UP
"""

JOB = """
sources = ["recordings"]
dataset = "out"
[convert]
shard_steps = 8
[cluster]
file = "slurm.toml"
"""

CLUSTER = """
cluster = "SLURMCluster"
workers = 1
timeout_s = 120
[resources]
decode = 1
[options]
queue = "short"
cores = 1
processes = 1
memory = "1GiB"
walltime = "00:10:00"
interface = "lo"
log_directory = "{folder}/logs"
local_directory = "{folder}/scratch"
worker_extra_args = ["--resources", "decode=1"]
"""


@contextmanager
def daemon(*command):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Start munged, slurmctld and slurmd of our own, on ports and in folders of our own."""
    pytest.importorskip("dask_jobqueue", reason="needs the extra jobqueue")
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.skip(f"needs slurm-wlm and munge, and root: missing {missing or 'root'}")
    folder = tmp_path / "slurm"
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True, mode=0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, ports=free_ports(2), cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge/{name}" for option, name in files.items()]
    with ExitStack() as stack:
        stack.enter_context(daemon("munged", "--foreground", "--force", *options))
        stack.enter_context(daemon("slurmctld", "-D"))
        stack.enter_context(daemon("slurmd", "-D"))
        until = time.monotonic() + 60
        while "idle" not in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout:
            if time.monotonic() > until:
                pytest.skip("SLURM does not start here")
            time.sleep(0.5)
        yield folder


def test_slurm_accepts_the_example_of_a_batch_script(slurm):
    script = REPOSITORY / "examples" / "schedules" / "night.sbatch"
    smaller = ["--cpus-per-task=1", "--mem=100", "--time=10"]  # than this node
    done = subprocess.run(["sbatch", "--test-only", *smaller, str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and "to start at" in done.stderr


def test_a_job_converts_through_slurm_and_leaves_no_job_behind(slurm, tmp_path):
    write_lerobot_set(tmp_path / "recordings", num_episodes=2, num_steps=24, size=(48, 64))
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "slurm.toml").write_text(CLUSTER.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "run", str(tmp_path / "job.toml")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "scheduler at tcp://127.0.0.1:" in done.stderr
    accepted = list((tmp_path / "logs").iterdir())
    assert accepted, "no job of SLURM's wrote a log"
    convert(tmp_path / "recordings", tmp_path / "here", shard_steps=8, cluster=ClusterOptions(workers=0))
    assert tree(tmp_path / "out") == tree(tmp_path / "here")
    until = time.monotonic() + 60
    while subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip():
        assert time.monotonic() < until
        time.sleep(0.5)
