"""Where the work runs: threads of this process, processes of this machine, or a Dask cluster that is there already."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.cluster_file import ClusterFile, Say, load_cluster, start_cluster, with_free_ports
from schemas.errors import MissingExtraError, UsageError

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
    file: ClusterFile | None = None
    """A cluster described by a file, in the place of the rest."""
    performance_report: str = ""
    """HTML file for Dask's own report of what its workers did."""

    def __post_init__(self) -> None:
        if self.scheduler and self.file is not None:
            raise UsageError("expected --scheduler or --cluster, found both; leave one out")
        if (self.workers is not None and self.workers < 0) or self.threads < 1 or self.reserve_cores < 0:
            raise UsageError(
                f"expected 0 or more workers and reserved cores and 1 or more threads, found {self.workers}, "
                f"{self.reserve_cores} and {self.threads}; correct the flags"
            )

    @property
    def num_workers(self) -> int:
        """Worker processes to start, or that there are at most."""
        if self.file is not None and self.file.most_workers:
            return self.file.most_workers
        return self.workers if self.workers is not None else max(1, num_cores() - self.reserve_cores)


def cluster_options(file: str, **flags: Any) -> ClusterOptions:
    """Return options from flags, and from a cluster file where one is named."""
    return ClusterOptions(**flags, file=load_cluster(file) if file else None)


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
def open_client(options: ClusterOptions, say: Say = lambda text: None) -> Iterator["Client"]:
    """Connect to a cluster, starting one unless an address is given, wait for a worker, and stop what was started.

    Local workers are separate programs, not children that import the calling script again: it works from an unguarded
    script and from a notebook, where a plain LocalCluster dies. ``say`` is told what is going on.

    Raises
    ------
    HeadraceError
        No worker came in time, or one has other versions of what decides the bytes written.
    """
    import dask
    from distributed.utils import silence_logging_cmgr

    if options.performance_report and find_spec("bokeh") is None:  # said before anything starts
        raise MissingExtraError(
            "expected bokeh for --performance-report, found it missing; run: pip install 'headrace[dashboard]'"
        )

    settings = {
        # null waits for ever once every worker has died
        "distributed.scheduler.no-workers-timeout": f"{max(120.0, _timeout_s(options)):g}s",
        # A task whose worker died comes back at once, to be tried again alone: repeats among others blame innocents.
        "distributed.scheduler.allowed-failures": 0,
        "distributed.comm.timeouts.connect": "30s",
        "distributed.admin.log-length": 1000,
    }
    # What Dask logs of a lost scheduler or worker is a traceback; the errors raised here say it in one line.
    with silence_logging_cmgr(logging.CRITICAL), dask.config.set(settings), _client(options, say) as client:
        if options.num_workers or _is_elsewhere(options):
            from pipeline.crew import wait_for_crew

            wait_for_crew(client, options.file or _described(options), say)
        with _performance_report(options.performance_report, client):
            yield client


def _timeout_s(options: ClusterOptions) -> float:
    return options.file.timeout_s if options.file is not None else ClusterFile(cluster="local").timeout_s


def _is_elsewhere(options: ClusterOptions) -> bool:
    """Whether the scheduler is another program than this."""
    return bool(options.scheduler) or (options.file is not None and options.file.cluster != "local")


def _described(options: ClusterOptions) -> ClusterFile:
    """Return flags as the file that says the same."""
    if options.scheduler:
        return ClusterFile(cluster="scheduler", options={"address": options.scheduler})
    return ClusterFile(cluster="local", workers=options.num_workers)


@contextmanager
def _client(options: ClusterOptions, say: Say) -> Iterator["Client"]:
    from distributed import Client

    file = options.file or _described(options)
    if file.cluster == "scheduler":
        with _connect(file) as client:
            yield client
    elif file.cluster == "local":
        chosen = replace(
            options,
            workers=file.workers or options.workers,
            threads=file.options.get("threads", options.threads),
            memory=file.options.get("memory", options.memory),
        )
        with _local_cluster(chosen, say) as cluster, Client(cluster) as client:
            yield client
    else:
        with start_cluster(file, WORKER_ENVIRONMENT, say) as cluster, Client(cluster) as client:
            say(f"scheduler at {cluster.scheduler_address}, dashboard at {client.dashboard_link}")
            yield client


def _connect(file: ClusterFile) -> "Client":
    from distributed import Client
    from distributed.security import Security

    address = file.options["address"]
    tls = {key: value for key, value in file.options.items() if key != "address"}
    try:
        return Client(address, timeout="10s", security=Security(require_encryption=True, **tls) if tls else None)
    except (OSError, ValueError, TypeError, TimeoutError) as error:
        raise UsageError(f"expected a Dask scheduler at {address}, found none ({error}); check the address") from error


@contextmanager
def _performance_report(file: str, client: "Client") -> Iterator[None]:
    if not file:
        yield
        return
    from distributed import performance_report

    with client.as_current(), performance_report(filename=file):
        yield


@contextmanager
def _local_cluster(options: ClusterOptions, say: Say) -> Iterator[Any]:
    from distributed import LocalCluster

    threads = options.num_workers == 0
    asked = options.file.options if options.file is not None else {}
    wanted = {
        "scheduler_port": asked.get("scheduler_port", 0),
        "dashboard_address": asked.get("dashboard_address", ANY_PORT),
    }
    with LocalCluster(
        n_workers=1 if threads else 0,
        threads_per_worker=options.threads,
        processes=not threads,
        host=None if threads else "127.0.0.1",
        worker_dashboard_address=ANY_PORT,
        silence_logs=50,
        **with_free_ports(wanted, say),
    ) as cluster:
        if asked:
            say(f"scheduler at {cluster.scheduler_address}, dashboard at {cluster.dashboard_link}")
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
            "resources": {
                name: amount * options.threads
                for name, amount in (options.file.resources if options.file else {}).items()
            },
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
