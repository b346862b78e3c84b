"""Rows that shard tasks left in the workspace, streamed into their shards and read back for tables and statistics."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.motion import TRAVEL
from pipeline.plan import Plan
from pipeline.shard_task import ShardResult
from pipeline.store.atomic import xxh3_hex
from pipeline.store.metadata import DatasetInfo
from pipeline.store.shards import ShardReader, ShardWriter, shard_path
from pipeline.store.tables import steps_batch, steps_schema
from pipeline.workspace import Workspace
from schemas.dataset import ROW_CHUNK_STEPS, ROW_SHARD_STEPS, ArraySpec, ShardRow
from schemas.errors import PlanError
from schemas.source import Fault

BLOCK_STEPS = 64 * ROW_CHUNK_STEPS
"""Steps held at once while rows become tables and statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found about the episodes of a run, rows by shard tasks and by :mod:`pipeline.quality`."""

    faults: tuple[tuple[str, Fault], ...] = ()
    """``(source, fault)``."""
    masked: tuple[tuple[int, int], ...] = ()
    """``[start, stop)`` of dataset steps that are not to be served."""
    dropped: frozenset[tuple[str, str]] = frozenset()
    """``(source, key)`` of episodes of which no step is to be served."""


NO_FINDINGS = Findings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All shard tasks of a plan are done: what the commit needs to know."""

    plan: Plan
    root: Path
    results: Mapping[int, ShardResult]
    previous: DatasetInfo | None
    """The generation before, None for the first."""
    findings: Findings = NO_FINDINGS
    map_path: str = ""
    """Map, or folder of maps, that a tracks store keeps."""

    @property
    def workspace(self) -> Workspace:
        """Paths of the workspace."""
        return Workspace(self.root)


class Parts:
    """Rows that the shard tasks left in the workspace, in step order."""

    def __init__(self, finished: Finished) -> None:
        self.finished = finished
        self.plan = finished.plan
        self.starts = np.array([episode.start for episode in self.plan.episodes], np.int64)

    def load(self, shard: int) -> dict[str, np.ndarray]:
        """Read one part file, checked against the journal."""
        path = self.finished.workspace.parts / f"part-{shard:08d}.npz"
        data, expected = path.read_bytes(), self.finished.results[shard].part_xxh3
        if xxh3_hex(data) != expected:
            raise PlanError(f"expected {path} as the journal says, found other bytes; run again with --restart")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            part = {name: arrays[name] for name in arrays.files}
        first = max(shard * self.plan.shard_steps, self.plan.first_step)
        for start, stop in self.finished.findings.masked:
            part["valid"][max(start - first, 0) : max(stop - first, 0)] = False
        return part

    def numbers(self, part: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return which planned episode each row of a part belongs to."""
        return np.searchsorted(self.starts, part["episode"], side="right") - 1

    def blocks(self, tasks: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows of consecutive steps, with episode and task numbers filled in."""
        local = [np.array([tasks[task] for task in e.ref.instructions or ("",)], np.int32) for e in self.plan.episodes]
        for shard in self.plan.shards:
            part = self.load(shard)
            numbers = self.numbers(part)
            instruction = part.pop("instruction_index")
            for name in ("episode", "step_digest", TRAVEL):
                part.pop(name)
            part["task_index"] = np.array(
                [local[n][i] for n, i in zip(numbers.tolist(), instruction.tolist(), strict=True)], np.int32
            )
            part["episode_index"] = (self.plan.first_episode + numbers).astype(np.int32)
            if dropped := self.finished.findings.dropped:
                gone = np.array([episode.name in dropped for episode in self.plan.episodes])
                part["valid"] &= ~gone[numbers]
            yield part

    def episodes(self) -> Iterator[tuple[str, int]]:
        """Yield each planned episode's digest and its number of invalid steps."""
        shards = iter(self.plan.shards)
        digests, valid = np.zeros((0, 16), np.uint8), np.zeros(0, np.bool_)
        for episode in self.plan.episodes:
            while len(valid) < episode.num_steps:
                part = self.load(next(shards))
                digests = np.concatenate([digests, part["step_digest"]])
                valid = np.concatenate([valid, part["valid"]])
            yield (
                xxhash.xxh3_128_hexdigest(digests[: episode.num_steps].tobytes()),
                int((~valid[: episode.num_steps]).sum()),
            )
            digests, valid = digests[episode.num_steps :], valid[episode.num_steps :]


def write_rows(
    finished: Finished,
    specs: Sequence[ArraySpec],
    blocks: Iterator[dict[str, np.ndarray]],
    committed: Mapping[tuple[str, int], ShardRow],
) -> list[ShardRow]:
    """Stream rows into their shards; one that holds committed steps is replaced by one with an identical beginning."""
    first, total = finished.plan.first_step, finished.plan.num_steps
    rows: list[ShardRow] = []
    stream = _Aligned(blocks)
    for shard in range(first // ROW_SHARD_STEPS, -(-total // ROW_SHARD_STEPS)):
        start, stop = max(shard * ROW_SHARD_STEPS, first), min((shard + 1) * ROW_SHARD_STEPS, total)
        writers = {spec.name: ShardWriter(finished.root, spec, shard, finished.workspace.tmp) for spec in specs}
        try:
            for spec in specs:
                prefix = _copy_whole_chunks(finished.root, spec, committed.get((spec.name, shard)), writers[spec.name])
                if prefix is not None:
                    stream.prepend(spec.name, prefix)
            position = start - start % ROW_CHUNK_STEPS
            while position < stop:
                count = min(ROW_CHUNK_STEPS, stop - position)
                chunk = stream.take(count, [spec.name for spec in specs])
                for spec in specs:
                    writers[spec.name].put(chunk[spec.name])
                position += count
            rows += [writers[spec.name].commit() for spec in specs]
        finally:
            for writer in writers.values():
                writer.__exit__(None, None, None)
    return rows


def _copy_whole_chunks(root: Path, spec: ArraySpec, row: ShardRow | None, writer: ShardWriter) -> np.ndarray | None:
    """Copy the committed whole chunks of a shard and return the committed rows of its last, partly filled one."""
    if row is None or (row.stop - row.start) == spec.shard_steps:
        return None
    whole, rest = divmod(row.stop - row.start, spec.chunk_steps)
    with ShardReader(root / row.path, spec, row) as reader:
        for chunk in range(whole):
            writer.put_stored(reader.chunk(chunk) or b"")
        return reader.rows(whole * spec.chunk_steps, whole * spec.chunk_steps + rest) if rest else None


class _Aligned:
    """Rows of many arrays, regrouped from blocks of any size."""

    def __init__(self, blocks: Iterator[dict[str, np.ndarray]]) -> None:
        self.blocks = blocks
        self.held: dict[str, list[np.ndarray]] = {}
        self.count = 0
        self.prepended = False

    def prepend(self, name: str, rows: np.ndarray) -> None:
        """Put committed rows in front of the first new ones."""
        self.held.setdefault(name, []).insert(0, rows)
        if not self.prepended:
            self.count += len(rows)
            self.prepended = True

    def take(self, count: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the next ``count`` rows of every array."""
        while self.count < count:
            block = next(self.blocks)
            for name in names:
                self.held.setdefault(name, []).append(block[name])
            self.count += len(block["valid"])
        self.count -= count
        taken = {}
        for name in names:
            joined = np.concatenate(self.held[name])
            taken[name], self.held[name] = joined[:count], [joined[count:]]
        return taken


class StepRows:
    """Rows of the step arrays as they lie in their shards, read in bounded blocks."""

    def __init__(
        self, root: Path, specs: Sequence[ArraySpec], num_steps: int, replaced: Sequence[Sequence[int]] = ()
    ) -> None:
        self.root, self.specs, self.num_steps = root, {spec.name: spec for spec in specs}, num_steps
        self.replaced = replaced
        self.schema = steps_schema(self.specs)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of one array, each chunk checked; steps of replaced episodes are not ``valid``."""
        spec, pieces = self.specs[name], []
        for shard in range(start // spec.shard_steps, -(-stop // spec.shard_steps)):
            offset = shard * spec.shard_steps
            with ShardReader(self.root / shard_path(spec, shard), spec) as reader:
                pieces.append(reader.rows(max(start - offset, 0), min(stop - offset, spec.shard_steps)))
        rows = np.concatenate(pieces) if pieces else np.zeros((0, *spec.row_shape), spec.dtype)
        for first, last in self.replaced if name == "valid" else ():
            rows[max(first - start, 0) : max(last - start, 0)] = False
        return rows

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ``[start, stop)`` of at most :data:`BLOCK_STEPS`."""
        for start in range(0, self.num_steps, BLOCK_STEPS):
            yield start, min(start + BLOCK_STEPS, self.num_steps)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the steps table."""
        episode_start, last_episode = 0, 0
        for start, stop in self.blocks():
            columns = {name: self.read(name, start, stop) for name in self.specs}
            episodes = columns["episode_index"]
            position = np.arange(start, stop)
            first = np.flatnonzero(np.diff(episodes, prepend=last_episode))
            origin = np.zeros(len(position), np.int64)
            origin[first] = position[first]
            origin = np.maximum.accumulate(np.where(origin > 0, origin, episode_start))
            episode_start, last_episode = int(origin[-1]), int(episodes[-1])
            columns["step_in_episode"] = (position - origin).astype(np.int32)
            yield steps_batch(self.schema, columns)
