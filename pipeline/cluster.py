"""Where the work runs: threads of this process, processes of this machine, or a Dask cluster that is there already."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from schemas.errors import UsageError

if TYPE_CHECKING:
    from distributed import Client

WORKER_ENVIRONMENT = {
    # One task a core: libraries that start threads of their own would only fight over the cores.
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # glibc keeps freed decode buffers otherwise, and the nanny takes them for a leak (distributed#5971).
    "MALLOC_TRIM_THRESHOLD_": "65536",
    # Tasks return a manifest row, so there is nothing to spill; a worker that still grows is paused, then restarted.
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "False",
    "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "False",
    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "error",
}

MIN_WORKER_NBYTES = 256 * 2**20
"""What a worker needs for its imports alone."""

ANY_PORT = "127.0.0.1:0"
"""A free port of this machine: two runs, or a user's own cluster, never fight over 8787."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where and how widely to run."""

    workers: int | None = None
    """Worker processes; None takes one a core, 0 runs in threads of this process."""
    threads: int = 1
    """Threads of each worker."""
    memory: str = "auto"
    """Memory limit of each worker, such as ``2GiB``; ``auto`` shares the machine's."""
    scheduler: str = ""
    """Address of a running Dask scheduler; then the rest does not apply."""
    reserve_cores: int = 0
    """Cores to leave free when ``workers`` is None."""

    def __post_init__(self) -> None:
        if (self.workers is not None and self.workers < 0) or self.threads < 1 or self.reserve_cores < 0:
            raise UsageError(
                f"expected 0 or more workers and reserved cores and 1 or more threads, found {self.workers}, "
                f"{self.reserve_cores} and {self.threads}; correct the flags"
            )

    @property
    def num_workers(self) -> int:
        """Worker processes to start."""
        return self.workers if self.workers is not None else max(1, num_cores() - self.reserve_cores)


def memory_nbytes(text: str) -> int:
    """Return a worker's memory limit in bytes, 0 for ``auto``; UsageError where it is none, or too small to start in."""
    if text == "auto":
        return 0
    from dask.utils import parse_bytes

    try:
        nbytes = int(parse_bytes(text))
    except ValueError:
        nbytes = -1
    if nbytes < MIN_WORKER_NBYTES:
        raise UsageError(
            f"expected --memory of {MIN_WORKER_NBYTES >> 20} MiB or more, found {text!r}; for example 2GiB"
        )
    return nbytes


def num_cores() -> int:
    """Return the cores that this process may use: affinity and cgroup, as Dask counts them."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)


@contextmanager
def open_client(options: ClusterOptions) -> Iterator["Client"]:
    """Connect to a cluster, starting a local one unless an address is given, and stop what was started.

    Local workers are separate programs, not children that import the calling script again: it works from an unguarded
    script and from a notebook, where a plain LocalCluster dies.
    """
    import dask
    from distributed import Client

    settings = {
        "distributed.scheduler.no-workers-timeout": "120s",  # null waits for ever once every worker has died
        # A task whose worker died comes back at once, to be tried again alone: repeats among others blame innocents.
        "distributed.scheduler.allowed-failures": 0,
        "distributed.comm.timeouts.connect": "30s",
        "distributed.admin.log-length": 1000,
    }
    with dask.config.set(settings):
        if options.scheduler:
            with _connect(options.scheduler) as client:
                yield client
            return
        with _local_cluster(options) as cluster, Client(cluster) as client:
            yield client


def _connect(address: str) -> "Client":
    from distributed import Client

    try:
        return Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"expected a Dask scheduler at {address}, found none ({error}); check --scheduler") from error


@contextmanager
def _local_cluster(options: ClusterOptions) -> Iterator[Any]:
    from distributed import LocalCluster

    threads = options.num_workers == 0
    with LocalCluster(
        n_workers=1 if threads else 0,
        threads_per_worker=options.threads,
        processes=not threads,
        host=None if threads else "127.0.0.1",
        dashboard_address=ANY_PORT,
        worker_dashboard_address=ANY_PORT,
        silence_logs=50,
    ) as cluster:
        if threads:
            yield cluster
            return
        with WorkerProcesses(cluster.scheduler_address, options):
            yield cluster


class WorkerProcesses:
    """Dask workers as programs of their own, each under a nanny; one whose nanny gives up is replaced.

    A nanny ends when its worker dies again while it still starts, which a task that kills every worker brings about
    within seconds: without replacement the cluster would stand empty and wait for ever (seen with distributed 2026.8).
    """

    def __init__(self, scheduler: str, options: ClusterOptions) -> None:
        from distributed.system import MEMORY_LIMIT

        limit = memory_nbytes(options.memory) or MEMORY_LIMIT // options.num_workers
        settings = {
            "nthreads": options.threads,
            "memory_limit": limit,
            "dashboard_address": ANY_PORT,
            "silence_logs": 50,
            "host": "127.0.0.1",
        }
        spec = json.dumps({"cls": "distributed.Nanny", "opts": settings})
        self._command = [sys.executable, "-P", "-m", "pipeline.worker_process", scheduler, "--spec", spec]
        # -P keeps the folder one happens to stand in off the workers' module path: a numpy.py there is not ours to run.
        home = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**WORKER_ENVIRONMENT, **os.environ, "PYTHONPATH": path}
        self._count = options.num_workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="headrace-workers", daemon=True)

    def __enter__(self) -> "WorkerProcesses":
        self._processes = [self._start() for _ in range(self._count)]
        self._watcher.start()
        return self

    def _start(self) -> "subprocess.Popen[bytes]":
        # stderr is dropped: a nanny that gives up prints a traceback about its worker, which the driver reports in one line
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,  # closes with this process, and ends the worker
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _watch(self) -> None:
        while not self._closing.wait(0.5):
            for index, process in enumerate(self._processes):
                if process.poll() is not None and not self._closing.is_set():
                    self._processes[index] = self._start()

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._watcher.join()
        families = [member for process in self._processes for member in _family(process.pid)]
        for member in families:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _family(pid: int) -> "list[psutil.Process]":
    """Return a process and its descendants: killing a nanny alone would leave its worker to notice."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
