"""A cluster described by a file: a class of dask-jobqueue or dask-kubernetes, a scheduler that runs, or this machine."""

import socket
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from schemas.errors import MissingExtraError, UsageError
from schemas.recipe import unknown_key

JOB_QUEUES = (
    "HTCondorCluster", "LSFCluster", "MoabCluster", "OARCluster", "PBSCluster", "SGECluster", "SLURMCluster",
)  # fmt: skip
"""Classes of dask-jobqueue."""

HOMES = {
    **dict.fromkeys(JOB_QUEUES, ("dask_jobqueue", "jobqueue")),
    "KubeCluster": ("dask_kubernetes.operator", "kubernetes"),
}
"""``class -> (module, extra)``."""

KINDS = ("local", "scheduler", *HOMES)

LOCAL_OPTIONS = ("threads", "memory", "scheduler_port", "dashboard_address")
SCHEDULER_OPTIONS = ("address", "tls_ca_file", "tls_client_cert", "tls_client_key")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """What a cluster file says; ``docs/operations.md`` has the keys."""

    cluster: str
    """``local``, ``scheduler`` (one that runs), or a class of dask-jobqueue or dask-kubernetes."""
    workers: int = 0
    """Workers to start, a number that stays; 0 where ``adaptive`` says how many, or where they are there already."""
    adaptive: Mapping[str, int] = field(default_factory=dict)
    """``minimum`` and ``maximum`` of workers, where the number follows the work."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each shard task takes of a worker, such as ``{"decode": 1}``: workers that do not offer it get none."""
    timeout_s: float = 60.0
    """How long to wait for the first worker, and for another when all are lost."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    def __post_init__(self) -> None:
        if self.cluster not in KINDS:
            raise UsageError(
                f"expected one of the clusters {', '.join(KINDS)}, found {self.cluster!r}; correct `cluster`"
            )
        if self.adaptive and self.workers:
            raise UsageError("expected `workers` or [adaptive], found both; leave one out")
        if self.cluster in HOMES and not (self.adaptive or self.workers):
            raise UsageError("expected `workers` or [adaptive], found neither; say how many workers to start")
        if self.adaptive:
            self._check_adaptive()
        if any(type(amount) not in (int, float) or not amount > 0 for amount in self.resources.values()):
            raise UsageError(f"expected amounts above 0 in [resources], found {dict(self.resources)}; correct them")
        if self.workers < 0 or not 0 < self.timeout_s < 1e7:
            raise UsageError(
                f"expected workers and timeout_s above 0, found {self.workers} and {self.timeout_s:g}; correct them"
            )
        known = {"local": LOCAL_OPTIONS, "scheduler": SCHEDULER_OPTIONS}.get(self.cluster, tuple(self.options))
        for key in self.options:
            if key not in known:
                raise UsageError(unknown_key(key, known, f"[options] of a {self.cluster} cluster"))
        if self.cluster == "scheduler" and not isinstance(self.options.get("address"), str):
            raise UsageError("expected the address of the scheduler, found none; add `address` to [options]")

    def _check_adaptive(self) -> None:
        if self.cluster not in HOMES:
            raise UsageError(
                f"expected a fixed number of workers of a {self.cluster} cluster, found [adaptive]; drop it"
            )
        for key in self.adaptive:
            if key not in ("minimum", "maximum"):
                raise UsageError(unknown_key(key, ("minimum", "maximum"), "[adaptive]"))
        numbers = (1, self.adaptive.get("minimum", 1), self.adaptive.get("maximum", 0))
        if any(type(number) is not int for number in numbers) or list(numbers) != sorted(numbers):
            raise UsageError(
                f"expected 1 <= minimum <= maximum in [adaptive], found {dict(self.adaptive)}; correct them"
            )

    @property
    def most_workers(self) -> int:
        """Workers that there are at most, as far as the file says; 0 where it does not."""
        return self.adaptive.get("maximum", self.workers)


def load_cluster(path: str | Path) -> ClusterFile:
    """Read a cluster file; UsageError says what is wrong with it."""
    file = Path(path).expanduser()
    data = read_toml(file, "a cluster file")
    try:
        return ClusterFile(**checked_table(ClusterFile, data, "the cluster file"))
    except UsageError as error:
        error.where = {"cluster": file.name, **error.where}
        raise


def read_toml(file: Path, what: str) -> dict[str, Any]:
    """Parse a TOML file; UsageError where it is none."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"expected TOML in {file}, found {error}; correct the file") from error
    except OSError as error:
        raise UsageError(f"expected {what} at {file}, found: {error.strerror}; check the path") from error


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "Mapping": ((Mapping,), "a table"),
    "Sequence": ((list,), "a list"),
}


def checked_table(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a table whose keys and kinds of values are those of a dataclass; UsageError names the nearest known key."""
    known = {each.name: str(getattr(each.type, "__name__", each.type)) for each in fields(kind)}  # such as "int | None"
    for key, value in table.items():
        if key not in known:
            raise UsageError(unknown_key(key, tuple(known), where))
        kinds, said = _KINDS[known[key].partition("[")[0].partition(" ")[0]]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UsageError(f"expected {said} for {key} in {where}, found {value!r}; correct it")
    required = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    for key in required:
        if key not in table:
            raise UsageError(f"expected {key} in {where}, found none; add it")
    return dict(table)


@contextmanager
def start_cluster(file: ClusterFile, environment: Mapping[str, str], say: Say) -> Iterator[Any]:
    """Start a cluster of dask-jobqueue or dask-kubernetes, with ``environment`` on its workers, and end it with all its jobs."""
    options = with_environment(file, environment)
    if file.cluster in JOB_QUEUES:
        scheduler = {"dashboard_address": ":8787", **options.get("scheduler_options", {})}
        options["scheduler_options"] = with_free_ports(scheduler, say)
    try:
        cluster = cluster_class(file.cluster)(**options)
    except Exception as error:  # of whatever kind: of options that it does not take, or of what it could not reach
        raise UsageError(
            f"expected {file.cluster} to start with these [options], found: {error}; correct the cluster file, or its access"
        ) from error
    with cluster:
        if file.adaptive:
            cluster.adapt(minimum=file.adaptive.get("minimum", 1), maximum=file.adaptive["maximum"])
        else:
            cluster.scale(file.workers)
        yield cluster


def cluster_class(name: str) -> Any:
    """Return a class of dask-jobqueue or dask-kubernetes; MissingExtraError where that is not installed."""
    module, extra = HOMES[name]
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise MissingExtraError(
            f"expected {module.partition('.')[0].replace('_', '-')} for {name}, found it missing ({error}); "
            f"run: pip install 'headrace[{extra}]'"
        ) from error


def with_environment(file: ClusterFile, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options with environment variables for the workers; what the file sets itself comes after, and wins."""
    options = dict(file.options)
    if file.cluster in JOB_QUEUES:
        exports = [f"export {name}={value}" for name, value in environment.items()]
        options["job_script_prologue"] = [*exports, *options.get("job_script_prologue", [])]
    elif isinstance(options.get("env", {}), Mapping):  # else the list that Kubernetes itself takes
        options["env"] = {**environment, **options.get("env", {})}
    if file.cluster == "KubeCluster":  # it would start three, and end the surplus again
        options.setdefault("n_workers", file.workers or file.adaptive.get("minimum", 1))
    return options


def with_free_ports(options: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Return options of a scheduler in which a port that is taken is left to be chosen, which is said.

    >>> with_free_ports({"dashboard_address": ":0", "port": 0}, print)
    {'dashboard_address': ':0', 'port': 0}
    """
    found = dict(options)
    for key in ("port", "scheduler_port", "dashboard_address"):
        text = str(found.get(key, ""))
        host, _, port = text.rpartition(":")
        if port.isdigit() and int(port) and _is_taken(host, int(port)):
            say(f"port {port} ({key}) is taken; another is used")
            found[key] = f"{host}:0" if ":" in text else 0
    return found


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
