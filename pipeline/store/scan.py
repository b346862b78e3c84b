"""Reads one shard file front to back, once, and says all that is wrong with it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from pipeline.store.metadata import DatasetInfo
from pipeline.store.shards import ABSENT, ShardReader, shard_path
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import DatasetError

REPAIR = "`--repair RAW` makes it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something of a dataset that is not as it was committed."""

    array: str = ""
    """Empty where the file belongs to no array."""
    start: int = 0
    """First step (or episode, for arrays along ``episode``) concerned."""
    stop: int = 0
    """One past the last; ``start == stop`` where the file has no steps."""
    path: str
    """File, relative to the dataset."""
    message: str

    def __str__(self) -> str:
        place = f"{self.array}, steps {self.start}:{self.stop}, " if self.array else ""
        return f"{place}{self.path}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard file that the root promises."""

    spec: ArraySpec
    number: int
    stop: int
    """One past its last committed step."""
    row: ShardRow | None
    """Its row of the manifest; None where the manifest cannot be read or does not name it."""

    @property
    def start(self) -> int:
        """First step."""
        return self.number * self.spec.shard_steps

    @property
    def path(self) -> str:
        """File, relative to the dataset."""
        return shard_path(self.spec, self.number)

    @property
    def num_chunks(self) -> int:
        """Number of chunks with a committed step."""
        return -(-(self.stop - self.start) // self.spec.chunk_steps)

    @property
    def is_full(self) -> bool:
        """Whether all its steps are committed; only then is the file as a whole known."""
        return self.stop - self.start == self.spec.shard_steps

    def problem(self, message: str, start: int | None = None, stop: int | None = None) -> Problem:
        """Return a problem of this file, of all its steps by default."""
        return Problem(
            array=self.spec.name,
            start=self.start if start is None else start,
            stop=self.stop if stop is None else min(stop, self.stop),
            path=self.path,
            message=message,
        )


def shards_of(info: DatasetInfo, name: str, rows: dict[tuple[str, int], ShardRow]) -> list[Shard]:
    """Return the shards that the committed length of an array makes."""
    spec, length = info.arrays[name], info.lengths[name]
    return [
        Shard(spec=spec, number=k, stop=min((k + 1) * spec.shard_steps, length), row=rows.get((name, k)))
        for k in range(-(-length // spec.shard_steps))
    ]


def scan_index(info: DatasetInfo, shard: Shard) -> list[Problem]:
    """Check existence, size and index of a shard file, and where chunks are absent against the manifest."""
    try:
        with ShardReader(info.root / shard.path, shard.spec, shard.row) as reader:
            problems = _check_size(shard, reader)
            present = [nbytes != ABSENT for _, nbytes in reader.index[: shard.num_chunks]]
    except (DatasetError, OSError) as error:
        return [shard.problem(_message(error))]
    if shard.row is None:
        return problems
    committed = [crc is not None for crc in shard.row.chunk_crc32c]
    differing = [chunk for chunk in range(shard.num_chunks) if present[chunk] != committed[chunk]]
    return problems + _join([_absence(shard, chunk, present[chunk], "the manifest") for chunk in differing])


def scan_shard(
    info: DatasetInfo,
    shard: Shard,
    valid: np.ndarray | None,
    sink: Callable[[int, memoryview], None],
    *,
    is_digested: bool = False,
) -> list[Problem]:
    """Read a shard file once, front to back, and check every byte of it.

    Parameters
    ----------
    info, shard
        The dataset and its shard.
    valid
        ``bool[step]`` of the shard's committed steps, which says exactly where a chunk is absent; None where unknown
        or where no chunk may be absent.
    sink
        Called with the number and the payload of each present, committed, sound chunk, in order; the payload is only
        borrowed.
    is_digested
        The sink digests the payloads, and they are the rows as stored: then the digest of the file would say the same again,
        since its other bytes follow from them. It costs as much as half of all the rest.
    """
    try:
        with ShardReader(info.root / shard.path, shard.spec, shard.row) as reader:
            return _check_size(shard, reader) + _scan_chunks(
                shard, reader, valid, None if is_digested else xxhash.xxh3_128(), sink
            )
    except (DatasetError, OSError) as error:
        return [shard.problem(_message(error))]


def _scan_chunks(
    shard: Shard, reader: ShardReader, valid: np.ndarray | None, digest: Any, sink: Callable[[int, memoryview], None]
) -> list[Problem]:
    buffer, found = bytearray(_longest(reader)), []
    is_valid = None if valid is None else valid.tolist()
    for chunk in range(len(reader.index)):
        try:
            stored = reader.stored(chunk, buffer)
            if stored is not None and digest is not None:
                digest.update(stored)
            payload = reader.check(chunk, stored)
            if chunk >= shard.num_chunks:
                continue  # an unfinished append may have put later steps behind the committed ones
            if _is_misplaced(shard, chunk, payload is not None, is_valid):
                found.append(_absence(shard, chunk, payload is not None, shard.spec.valid_array or "the format"))
            elif payload is not None:
                sink(chunk, payload)
        except (DatasetError, OSError) as error:
            start, stop = reader.steps(chunk)
            found.append(shard.problem(_message(error), min(start, shard.stop), stop))
    if digest is not None and not found and shard.row is not None and shard.is_full:
        digest.update(reader.index_bytes)
        if digest.hexdigest() != shard.row.xxh3:
            message = f"expected a file of xxh3 {shard.row.xxh3}, found {digest.hexdigest()}; {REPAIR}"
            found.append(shard.problem(message))
    return _join(found)


def _longest(reader: ShardReader) -> int:
    return max((nbytes for _, nbytes in reader.index if nbytes != ABSENT), default=0)


def _is_misplaced(shard: Shard, chunk: int, is_present: bool, valid: list[bool] | None) -> bool:
    if not shard.spec.valid_array:
        return not is_present
    return valid is not None and valid[chunk] != is_present


def _absence(shard: Shard, chunk: int, is_present: bool, authority: str) -> Problem:
    start = shard.start + chunk * shard.spec.chunk_steps
    message = (
        f"expected no chunk by {authority}, found one" if is_present else f"expected a chunk by {authority}, found none"
    )
    return shard.problem(f"{message}; {REPAIR}", start, start + shard.spec.chunk_steps)


def _check_size(shard: Shard, reader: ShardReader) -> list[Problem]:
    if shard.row is None or not shard.is_full or reader.nbytes == shard.row.nbytes:
        return []
    return [shard.problem(f"expected {shard.row.nbytes} bytes, found {reader.nbytes}; {REPAIR}")]


def _message(error: DatasetError | OSError) -> str:
    if isinstance(error, DatasetError):
        return f"{error.message.partition('; run ')[0]}; {REPAIR}"  # who reads this has run verify
    return f"expected a readable file, found {error.strerror}; check the disk and the permissions"


def _join(problems: list[Problem]) -> list[Problem]:
    """Join problems of neighbouring chunks that differ in numbers only."""
    joined: list[Problem] = []
    for problem in problems:
        last = joined[-1] if joined else None
        if last is not None and last.stop == problem.start and _kind(last) == _kind(problem):
            joined[-1] = replace(last, stop=problem.stop)
        else:
            joined.append(problem)
    return joined


def _kind(problem: Problem) -> str:
    return re.sub(r"\b[0-9a-f]{8}\b|\d+", "#", problem.message)
