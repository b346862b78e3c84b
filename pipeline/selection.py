"""Which episodes are wanted: by name, length and success, as the recipe's ``[filter]`` says, and by what this run alone takes."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from pipeline.readers.protocol import Reader
from pipeline.sources import Source
from schemas.errors import Reason, SourceError, UsageError
from schemas.quality import FilterRecipe
from schemas.recipe import Recipe
from schemas.source import EpisodeRef, Fault, SourceIndex

Found = tuple[str, EpisodeRef, str]
"""``(source, episode, fingerprint)``."""


def split_wanted(
    episodes: Sequence[Found], recipe: Recipe, readers: Mapping[str, Reader]
) -> tuple[list[Found], list[tuple[str, Fault]]]:
    """Return the episodes that the recipe's filter lets pass, and ``(source, fault)`` of the others."""
    kept: list[Found] = []
    left_out: list[tuple[str, Fault]] = []
    for source, ref, mark in episodes:
        fault = _left_out(source, ref, recipe, readers[source])
        if fault is None:
            kept.append((source, ref, mark))
        else:
            left_out.append((source, fault))
    return kept, left_out


def take(episodes: Sequence[Found], known: Sequence[str], patterns: Sequence[str], limit: int | None) -> list[Found]:
    """Return the episodes that this run takes: those that ``patterns`` name, and ``limit`` of them at most.

    Parameters
    ----------
    known
        ``source/key`` of everything there is, by which a pattern that names nothing is found out.

    Raises
    ------
    UsageError
        A pattern matches nothing there is, or a file of patterns cannot be read.
    """
    wanted = [name for pattern in patterns for name in read_names(pattern)]
    for pattern in wanted:
        if not any(_matches(name, [pattern]) for name in known):
            near = difflib.get_close_matches(pattern, [name.partition("/")[2] for name in known], n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `headrace inspect`"
            raise UsageError(f"expected --episodes that name an episode, found {pattern!r}, which names none; {hint}")
    taken = [row for row in episodes if not wanted or _matches(f"{row[0]}/{row[1].key}", wanted)]
    return taken if limit is None else taken[:limit]


def indexes_of(sources: Sequence[Source], taken: Sequence[Found]) -> list[SourceIndex]:
    """Return what the sources hold of the episodes that are taken: the others have no say in what views and signals mean."""
    names = {(source, ref.key) for source, ref, _ in taken}
    return [
        replace(source.index, episodes=tuple(ref for ref in source.index.episodes if (source.name, ref.key) in names))
        for source in sources
    ]


def read_names(pattern: str, folder: Path | None = None) -> list[str]:
    """Return a pattern, or for ``@FILE`` the lines of that file, empty ones and those that begin with ``#`` left out."""
    if not pattern.startswith("@"):
        return [pattern]
    path = (folder or Path()) / Path(pattern[1:]).expanduser()
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected a list of episodes in {path}, found: {error}; correct the path") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a pattern is, or matches, ``source/key`` or the key."""
    key = name.partition("/")[2]
    return any(
        pattern in (name, key) or fnmatchcase(name, pattern) or fnmatchcase(key, pattern) for pattern in patterns
    )


def _left_out(source: str, ref: EpisodeRef, recipe: Recipe, reader: Reader) -> Fault | None:
    wishes: tuple[tuple[Reason, Callable[[], str]], ...] = (
        (Reason.LEFT_OUT_NAME, lambda: _by_name(f"{source}/{ref.key}", recipe.filter)),
        (Reason.LEFT_OUT_LENGTH, lambda: _by_length(ref, recipe)),
        (Reason.LEFT_OUT_SUCCESS, lambda: _by_success(ref, recipe.filter, reader)),
    )
    for reason, find in wishes:
        message = find()
        if message:
            return Fault(reason=reason, message=message, episode=ref.key)
    return None


def _by_name(name: str, wanted: FilterRecipe) -> str:
    if wanted.include and not _matches(name, wanted.include):
        return "expected an episode that `include` names, found another; it was left out"
    if _matches(name, wanted.exclude):
        return "expected an episode that `exclude` does not name, found one; it was left out"
    return ""


def _by_length(ref: EpisodeRef, recipe: Recipe) -> str:
    if 0 < ref.num_steps < recipe.min_steps:
        return f"expected at least {recipe.min_steps} steps, found {ref.num_steps}; it was left out"
    seconds = ref.num_steps / ref.rate_hz if ref.rate_hz else np.inf
    if seconds < recipe.filter.min_duration_s:
        return f"expected at least {recipe.filter.min_duration_s:g} s, found {seconds:.2f} s; it was left out"
    return ""


def _by_success(ref: EpisodeRef, wanted: FilterRecipe, reader: Reader) -> str:
    if wanted.success == "all":
        return ""
    found = success_of(ref, wanted.success_from, reader)
    if found is None and wanted.success == "only":
        return f"expected an episode that says of itself whether it succeeded ({', '.join(wanted.success_from)}), found none; it was left out"
    return "expected an episode that succeeded, found one that failed; it was left out" if found is False else ""


def success_of(ref: EpisodeRef, names: Sequence[str], reader: Reader) -> bool | None:
    """Return whether the recording says that it succeeded, by the first of ``names`` that it has; None where it says nothing.

    A fact of the episode is asked first, then a signal, which is read: true at any step is success.
    """
    offered = {signal.name for signal in ref.signals}
    for name in names:
        fact = ref.details.get(name)
        if isinstance(fact, bool | int | float):
            return bool(fact)
        if isinstance(fact, str) and fact.lower() in ("true", "success", "1", "false", "failure", "0"):
            return fact.lower() in ("true", "success", "1")
        if name in offered:
            try:
                rows = reader.read_signals(ref, [name], np.arange(ref.num_steps)).values[name]
            except SourceError:
                return None  # not lost: the shard tasks read the same file and refuse its steps with the reason
            return bool(np.any(np.nan_to_num(np.asarray(rows, np.float64)) > 0))
    return None
