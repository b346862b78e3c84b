"""What the sources hold now, against what the dataset and an unfinished plan know of them."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from pipeline.plan import PlannedEpisode
from pipeline.readers import open_source
from pipeline.readers.folders import open_inside
from pipeline.readers.others import index_source
from pipeline.readers.protocol import Reader
from pipeline.store.atomic import write_atomic
from pipeline.workspace import Workspace
from schemas.errors import Reason, SourceError, UsageError, locate
from schemas.source import EpisodeRef, Fault, SourceIndex

_READ_NBYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """One raw folder, opened and indexed."""

    name: str
    """Unique among the sources of one conversion: the last part of the path, or more of it where that repeats."""
    path: str
    reader: Reader
    index: SourceIndex


def open_sources(paths: Sequence[str | Path], kind: str = "", options: Mapping[str, str] | None = None) -> list[Source]:
    """Open and index every source; UsageError where two are the same folder."""
    resolved = [Path(path).expanduser() for path in paths]
    absolute = [path.resolve() for path in resolved]
    if len(set(absolute)) != len(absolute):
        raise UsageError(f"expected each source once, found one twice in {[str(path) for path in paths]}; drop one")
    sources = []
    for name, path in zip(_unique_names(absolute), absolute, strict=True):
        with locate(source=name):
            reader = open_source(path, kind, options)
            sources.append(Source(name, str(path), reader, index_source(reader, is_chosen=bool(kind))))
    return sources


def _unique_names(paths: Sequence[Path]) -> list[str]:
    depth = 1
    names = [path.name for path in paths]
    while len(set(names)) != len(names):
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names


def fingerprint(reader: Reader, ref: EpisodeRef) -> str:
    """Digest name, size and modification time of an episode's files: equal means nobody touched them."""
    digest = xxhash.xxh3_128()
    for path in reader.files(ref):
        try:
            status = (reader.root / path).stat()
            line = f"{path.as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n"
        except OSError:
            line = f"{path.as_posix()}\0missing\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What an episode came from, and what its clock did."""

    files: tuple[tuple[str, int, str], ...]
    """``(path, nbytes, xxh3)`` of every file, in the reader's order; a missing one has size -1."""
    rate_measured_hz: float
    jitter_s: float
    """Standard deviation of the time between steps."""


def read_provenance(reader: Reader, ref: EpisodeRef) -> Provenance:
    """Digest every file of an episode. Reading them also brings them into the page cache just before they are decoded."""
    files = tuple(digest_file(reader.root, path) for path in reader.files(ref))
    times_s = np.zeros(0)
    try:
        block = reader.read_signals(ref, ["timestamp_s"], np.arange(ref.num_steps))
        times_s = np.asarray(block.values["timestamp_s"], np.float64).reshape(-1)
    except SourceError:
        pass  # not lost: the shard tasks read the same stream and refuse its steps with the reason
    periods_s = np.diff(times_s[np.isfinite(times_s)])
    if len(periods_s) == 0 or periods_s.mean() <= 0:
        return Provenance(files=files, rate_measured_hz=0.0, jitter_s=0.0)
    return Provenance(files=files, rate_measured_hz=float(1 / periods_s.mean()), jitter_s=float(periods_s.std()))


def digest_file(root: Path, path: Path) -> tuple[str, int, str]:
    """Return a file's path, size and xxh3-128; size -1 where it cannot be read."""
    try:
        status = (root / path).stat()
        nbytes, xxh3 = _digest(root, path.as_posix(), (status.st_size, status.st_mtime_ns, status.st_ino))
    except (OSError, SourceError):
        return path.as_posix(), -1, ""
    return path.as_posix(), nbytes, xxh3


def forget_digests() -> None:
    """Forget the digests this process keeps, so that every file is read again."""
    _digest.cache_clear()


@lru_cache(maxsize=1024)
def _digest(root: Path, path: str, version: tuple[int, int, int]) -> tuple[int, str]:
    """Digest a file; kept by process, since hundreds of episodes may lie in one file, and each asks for its digest.

    Opened as readers open it: no pipe blocks, no link leads out of the source.
    """
    digest, found = xxhash.xxh3_128(), 0
    with os.fdopen(open_inside(root, path), "rb", buffering=0) as file:
        while block := file.read(_READ_NBYTES):
            digest.update(block)
            found += len(block)
    return found, digest.hexdigest()


def write_provenance(root: str, reader: Reader, episode: PlannedEpisode, number: int) -> int:
    """Task: write an episode's provenance into the workspace; returns the bytes read."""
    workspace = Workspace(Path(root))
    with locate(source=episode.source, episode=episode.ref.key):
        found = read_provenance(reader, episode.ref)
    value = {"files": found.files, "rate_measured_hz": found.rate_measured_hz, "jitter_s": found.jitter_s}
    path = workspace.parts / f"source-{number:08d}.json"
    write_atomic(path, json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogateescape"), workspace.tmp)
    return sum(max(nbytes, 0) for _, nbytes, _ in found.files)


def all_faults(sources: Sequence[Source]) -> Iterator[tuple[str, Fault]]:
    """Yield ``(source, fault)`` of everything that indexing refused, duplicate keys included."""
    for source in sources:
        for fault in source.index.faults:
            yield source.name, fault
        seen: set[str] = set()
        for ref in source.index.episodes:
            if ref.key in seen:
                message = "expected each episode once, found its key again; rename one of them"
                yield source.name, Fault(reason=Reason.DUPLICATE, message=message, episode=ref.key)
            seen.add(ref.key)
