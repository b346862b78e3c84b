"""The workers of a cluster: that they came, offer what tasks take, and run the versions that this process runs."""

import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from distributed import WorkerPlugin, get_worker

from pipeline import __version__
from pipeline.cluster_file import ClusterFile, Say
from schemas.errors import HeadraceError

if TYPE_CHECKING:
    from distributed import Client, Worker

DECISIVE = ("numpy", "numba", "zarr", "dask")
"""Packages whose version may decide the bytes that are written, or whether a task can be sent at all."""


@lru_cache(maxsize=1)
def own_versions() -> tuple[tuple[str, str], ...]:
    """Return ``(name, version)`` of what must be the same on every worker; Python's without its last part."""
    found = {"headrace": __version__, "python": ".".join(map(str, sys.version_info[:2]))}
    for name in DECISIVE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return tuple(sorted(found.items()))


def refuse_other_versions(
    driver: tuple[tuple[str, str], ...], worker: tuple[tuple[str, str], ...], address: str
) -> None:
    """Raise HeadraceError where a worker's versions are not the driver's."""
    theirs = dict(worker)
    differing = [name for name, ours in driver if theirs.get(name) != ours]
    if differing:
        expected = ", ".join(f"{name} {dict(driver)[name]}" for name in differing)
        found = ", ".join(f"{name} {theirs.get(name, 'none')}" for name in differing)
        raise HeadraceError(
            f"expected {expected} on every worker, as here, found {found} on worker {address}; install the same on both"
        )


def checked(versions: tuple[tuple[str, str], ...], function: Callable[..., Any], *arguments: Any) -> Any:
    """Task: call ``function`` where the worker's versions are the driver's, also on one that came late."""
    if versions != own_versions():
        refuse_other_versions(versions, own_versions(), str(get_worker().address))
    return function(*arguments)


def worker_facts(dask_worker: "Worker") -> dict[str, Any]:
    """Return a worker's versions and the resources it offers."""
    return {"versions": own_versions(), "resources": dict(dask_worker.state.total_resources)}


def wait_for_crew(client: "Client", file: ClusterFile, say: Say) -> None:
    """Wait for a worker that offers what tasks take; all that are there by then have the driver's versions.

    Raises
    ------
    HeadraceError
        No such worker within ``file.timeout_s``, or one of other versions.
    """
    until = time.monotonic() + file.timeout_s
    _wait_for_first(client, file)
    while True:
        found = client.run(worker_facts, on_error="return")
        for address, facts in found.items():
            if isinstance(facts, BaseException):
                raise HeadraceError(
                    f"expected headrace {__version__} on every worker, found on worker {address}: {facts}; install the same on both"
                ) from facts
            refuse_other_versions(own_versions(), facts["versions"], address)
        if any(_offers(facts["resources"], file.resources) for facts in found.values()):
            return
        if time.monotonic() > until:
            wanted = ", ".join(f"{name}={amount:g}" for name, amount in file.resources.items())
            raise HeadraceError(
                f"expected a worker that offers {wanted}, found {len(found)} workers without after {file.timeout_s:g} s; "
                f"start workers with --resources {wanted.replace(', ', ' ')!r}, or drop [resources]"
            )
        time.sleep(0.2)


def _wait_for_first(client: "Client", file: ClusterFile) -> None:
    try:
        client.wait_for_workers(1, timeout=file.timeout_s)
    except TimeoutError as error:
        count = f"{file.most_workers} worker{'s' * (file.most_workers != 1)}" if file.most_workers else "workers"
        hint = {
            "local": "try --workers 0, which shows why they do not start",
            "scheduler": "start some, or see their logs",
        }.get(file.cluster, "see the queue and the logs of the jobs, or give a longer timeout_s")
        raise HeadraceError(
            f"expected {count} of {file.cluster}, found 0 after {file.timeout_s:g} s; {hint}"
        ) from error


def _offers(offered: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(offered.get(name, 0) >= amount for name, amount in wanted.items())


class WarmKernels(WorkerPlugin):
    """Compile the kernels of resizing when a worker starts, while it reads its first recording."""

    name = "headrace-kernels"

    def setup(self, worker: "Worker") -> None:
        """Begin, in a thread: compiling frees nobody's event loop."""
        from threading import Thread

        from tasks.resize import warm

        Thread(target=warm, name="headrace-kernels", daemon=True).start()
