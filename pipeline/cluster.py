"""Where the work runs: threads of this process, processes of this machine, or a Dask cluster that is there already."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        "distributed.scheduler.allowed-failures": 2,
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

    if options.num_workers == 0:
        with LocalCluster(
            n_workers=1,
            threads_per_worker=options.threads,
            processes=False,
            dashboard_address=ANY_PORT,
            worker_dashboard_address=ANY_PORT,
            silence_logs=50,
        ) as cluster:
            yield cluster
        return
    kept = {name: os.environ.get(name) for name in WORKER_ENVIRONMENT}
    os.environ.update({name: value for name, value in WORKER_ENVIRONMENT.items() if kept[name] is None})
    try:
        with _subprocess_cluster(options) as cluster:
            yield cluster
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)


def _subprocess_cluster(options: ClusterOptions) -> Any:
    from distributed import Scheduler, SpecCluster
    from distributed.deploy.subprocess import SubprocessWorker
    from distributed.system import MEMORY_LIMIT

    limit = MEMORY_LIMIT // options.num_workers if options.memory == "auto" else options.memory
    worker = {
        "cls": SubprocessWorker,
        "options": {
            "worker_kwargs": {
                "nthreads": options.threads,
                "memory_limit": limit,
                "dashboard_address": ANY_PORT,
                "silence_logs": 50,
                "host": "127.0.0.1",
                "death_timeout": 30,
            }
        },
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": ANY_PORT}}
    return SpecCluster(
        workers=dict.fromkeys(range(options.num_workers), worker), scheduler=scheduler, worker=worker, silence_logs=50
    )
