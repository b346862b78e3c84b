"""A job by file: what a scheduler runs every night with one command, and how that file is checked before it does."""

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.cluster import ClusterOptions, memory_nbytes
from pipeline.cluster_file import checked_table, cluster_class, load_cluster, read_toml
from pipeline.conversion import ConvertOptions
from pipeline.monitor import MonitorOptions
from pipeline.readers import open_source
from pipeline.recipes import load_recipe
from schemas.errors import HeadraceError, Reason, SourceError, UsageError
from schemas.recipe import unknown_key

HOOKS = ("before", "after", "on_failure")
OWN_KEYS = ("sources", "dataset", "recipe", "convert", "cluster", "hooks", "notify", "monitor")
EXIT_CODES = ("0", "1", "2", "3", "75", "130", "143")
"""What ``[notify]`` may name: the exit codes of ``docs/operations.md``."""

Argv = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a job file says; ``docs/operations.md`` has the keys."""

    path: Path
    sources: tuple[str, ...]
    """Folders, patterns such as ``/data/drives/*``, or ``file://`` URLs."""
    dataset: Path
    recipe: str = "pi0"
    convert: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`~pipeline.conversion.ConvertOptions`: policies, views, filters."""
    cluster: ClusterOptions = ClusterOptions()
    hooks: Mapping[str, tuple[Argv, ...]] = field(default_factory=dict)
    """Commands by moment, each a list of words: no shell reads them."""
    notify: Mapping[int, tuple[Argv, ...]] = field(default_factory=dict)
    """Commands by exit code."""
    monitor: MonitorOptions = field(default_factory=MonitorOptions)

    def folders(self) -> list[Path]:
        """Return the folders of recordings that there are now, in order; SourceError where a source names none."""
        found = [folder for source in self.sources for folder in _folders(source, self.path.parent)]
        return list(dict.fromkeys(found))

    def options(self) -> dict[str, Any]:
        """Return the options of :func:`~pipeline.conversion.convert`."""
        return {**self.convert, "cluster": self.cluster}


def load_job(path: str | Path) -> Job:
    """Read a job file; paths in it are relative to its folder. UsageError says what is wrong with it."""
    file = Path(path).expanduser().absolute()
    data = read_toml(file, "a job file")
    try:
        for key in data:
            if key not in OWN_KEYS:
                raise UsageError(unknown_key(key, OWN_KEYS, "the job file"))
        return _job(file, data)
    except UsageError as error:
        error.where = {"job": file.name, **error.where}
        raise


def _job(file: Path, data: Mapping[str, Any]) -> Job:
    sources, dataset, recipe = data.get("sources"), data.get("dataset"), data.get("recipe", "pi0")
    sources = [sources] if isinstance(sources, str) else sources
    if not (isinstance(sources, list) and sources and all(isinstance(source, str) and source for source in sources)):
        raise UsageError(f"expected sources, a list of folders, found {sources!r}; name at least one")
    if not (isinstance(dataset, str) and dataset and isinstance(recipe, str)):
        raise UsageError(f"expected texts for dataset and recipe, found {dataset!r} and {recipe!r}; correct them")
    beside = file.parent / recipe
    return Job(
        path=file,
        sources=tuple(sources),
        dataset=(file.parent / Path(dataset).expanduser()).absolute(),
        recipe=str(beside) if beside.is_file() else recipe,
        convert=_convert_options(_table(data, "convert"), file.parent),
        cluster=_cluster(_table(data, "cluster"), file.parent),
        hooks={name: _commands(value, f"hooks.{name}") for name, value in _hooks(_table(data, "hooks"))},
        monitor=_monitor(_table(data, "monitor"), file.parent),
        notify={int(code): _commands(value, f"notify.{code}") for code, value in _notices(_table(data, "notify"))},
    )


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"expected a table [{key}], found {table!r}; correct the job file")
    return table


def _convert_options(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if "cluster" in table:
        raise UsageError("expected the cluster in [cluster], found it in [convert]; move it")
    options = checked_table(ConvertOptions, table, "[convert]")
    if options.get("map"):
        options["map"] = str(folder / Path(options["map"]).expanduser())
    ConvertOptions(**options)
    return options


def _cluster(table: Mapping[str, Any], folder: Path) -> ClusterOptions:
    """Return ``[cluster]``: the flags of convert, or ``file`` with the name of a cluster file."""
    table = dict(table)
    file = table.pop("file", None)
    if file is not None and not isinstance(file, str):
        raise UsageError(f"expected the name of a cluster file, found {file!r}; correct [cluster]")
    options = ClusterOptions(**checked_table(ClusterOptions, table, "[cluster]"))
    memory_nbytes(options.memory)
    return options if file is None else replace(options, file=load_cluster(folder / Path(file).expanduser()))


def _monitor(table: Mapping[str, Any], folder: Path) -> MonitorOptions:
    """Return ``[monitor]``, with files from the folder of the job file."""
    options = MonitorOptions(**checked_table(MonitorOptions, table, "[monitor]"))
    metrics, memory = (
        str(folder / Path(name).expanduser()) if name else "" for name in (options.metrics_file, options.memory_profile)
    )
    return replace(options, metrics_file=metrics, memory_profile=memory)


def _hooks(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name not in HOOKS:
            raise UsageError(unknown_key(name, HOOKS, "[hooks]"))
        yield name, value


def _notices(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for code, value in table.items():
        if code not in EXIT_CODES:
            raise UsageError(
                f"expected one of the exit codes {', '.join(EXIT_CODES)} in [notify], found {code!r}; correct it"
            )
        yield code, value


def _commands(value: Any, where: str) -> tuple[Argv, ...]:
    """Return one command, or several: lists of words, the first of which names the program."""
    commands = [value] if isinstance(value, list) and value and isinstance(value[0], str) else value
    if not (isinstance(commands, list) and all(_is_command(command) for command in commands)):
        raise UsageError(
            f'expected a command as a list of words, such as ["rsync", "-a", "x", "y"], in {where}, found {value!r}'
        )
    return tuple(tuple(command) for command in commands)


def _is_command(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value) and bool(value[0])


def _folders(source: str, folder: Path) -> list[Path]:
    """Return what a source names now, sorted."""
    if "://" in source:
        parts = urlsplit(source)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise UsageError(
                f"expected a path or a file:// URL, found {source!r}; mount the store, and name the folder where it is mounted"
            )
        source = unquote(parts.path)
    pattern = str(folder / Path(source).expanduser())
    found = [Path(path) for path in sorted(glob.glob(pattern))] if glob.has_magic(pattern) else [Path(pattern)]
    found = [path for path in found if path.exists()]
    if not found:
        raise SourceError(f"expected recordings at {source}, found nothing; check `sources`", Reason.MISSING_FILE)
    return found


def check_job(path: str | Path) -> tuple[Job, list[str]]:
    """Look at everything that a job names, without running it: the job, and what is wrong, a line each."""
    job = load_job(path)
    problems: list[str] = []
    for look in (_check_recipe, _check_sources, _check_dataset, _check_programs, _check_cluster):
        try:
            problems += look(job)
        except (HeadraceError, OSError) as error:
            problems.append(str(error))
    return job, problems


def _check_recipe(job: Job) -> Sequence[str]:
    ConvertOptions(**job.options()).apply(load_recipe(job.recipe))
    return ()


def _check_sources(job: Job) -> Sequence[str]:
    asked = ConvertOptions(**job.options())
    for folder in job.folders():
        open_source(folder, asked.format, asked.reader)
    return ()


def _check_dataset(job: Job) -> Sequence[str]:
    place = job.dataset
    if place.exists() and not place.is_dir():
        return [f"expected a folder for the dataset, found a file at {place}; choose another place"]
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        return [f"expected to write into {place}, found that this user may not; correct its permissions"]
    while not place.exists() or place == job.dataset:  # the workspace lies beside it
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return [f"expected to write into {place}, found that this user may not; choose another place"]
    return ()


def _check_programs(job: Job) -> Sequence[str]:
    commands = [command for group in (job.hooks, job.notify) for found in group.values() for command in found]
    missing = dict.fromkeys(words[0] for words in commands if shutil.which(words[0]) is None)
    return [
        f"expected the program {name!r} of a hook, found none; install it, or give its whole path" for name in missing
    ]


def _check_cluster(job: Job) -> Sequence[str]:
    if job.cluster.file is not None and job.cluster.file.cluster not in ("local", "scheduler"):
        cluster_class(job.cluster.file.cluster)
    return ()
