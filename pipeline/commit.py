"""Stages 10 and 11 of the walk: rows, tables and statistics of a finished run, then the one replacement that makes it visible."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import xxhash

from pipeline.arrays import episode_specs, feature_names, frame_specs, row_specs
from pipeline.plan import Plan, PlannedEpisode, bindings_to_json
from pipeline.shard_task import ShardResult
from pipeline.store.atomic import write_atomic, xxh3_hex
from pipeline.store.metadata import ROOT_DOCUMENT, DatasetInfo, TableRef, array_document, read_info, root_document
from pipeline.store.shards import ShardReader, ShardWriter, shard_path
from pipeline.store.tables import (
    EPISODES,
    QUARANTINE,
    TASKS,
    manifest_rows,
    manifest_table,
    read_table,
    steps_batch,
    steps_schema,
    write_document,
    write_table,
)
from pipeline.workspace import Workspace
from schemas.dataset import ROW_CHUNK_STEPS, ROW_SHARD_STEPS, ArraySpec, ShardRow
from schemas.errors import PlanError
from schemas.recipe import recipe_to_mapping
from schemas.source import Fault

BLOCK_STEPS = 64 * ROW_CHUNK_STEPS
"""Steps held at once while rows become tables and statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All shard tasks of a plan are done: what the commit needs to know."""

    plan: Plan
    root: Path
    results: Mapping[int, ShardResult]
    previous: DatasetInfo | None
    """The generation before, None for the first."""

    @property
    def workspace(self) -> Workspace:
        """Paths of the workspace."""
        return Workspace(self.root)


@dataclass(frozen=True, slots=True)
class _Previous:
    """Tables of the generation before, empty for the first."""

    episodes: pa.Table
    tasks: list[str]
    quarantine: pa.Table
    shards: dict[tuple[str, int], ShardRow]
    sources: list[dict[str, Any]]

    @staticmethod
    def load(info: DatasetInfo | None) -> "_Previous":
        if info is None:
            return _Previous(EPISODES.empty_table(), [], QUARANTINE.empty_table(), {}, [])
        manifest = read_table(info, "manifest")
        sources = manifest.filter(pa.compute.equal(manifest["kind"], "source"))
        return _Previous(
            read_table(info, "episodes"),
            read_table(info, "tasks")["task"].to_pylist(),
            read_table(info, "quarantine"),
            manifest_rows(manifest),
            sources.select(["episode", "path", "nbytes", "xxh3"]).to_pylist(),
        )


def commit(finished: Finished) -> DatasetInfo:
    """Make a finished run the dataset's next generation. Run again after a crash at any point, it writes the same bytes."""
    plan, root = finished.plan, finished.root
    previous = _Previous.load(finished.previous)
    parts = _Parts(finished)
    tasks = _task_numbers(previous.tasks, plan.episodes)
    dropped = _dropped(finished)
    specs = row_specs(plan.recipe, plan.bindings, _features(finished))
    rows = _write_rows(finished, specs, parts.blocks(tasks, dropped), previous.shards)
    table, episode_rows = _write_episodes(finished, previous, parts, dropped)
    steps = StepRows(root, specs, plan.num_steps)
    tables = _write_tables(finished, previous, {"episodes": table, "tasks": _task_table(tasks)}, rows + episode_rows)
    tables["steps"] = write_table(
        _table_path(finished, "steps"), steps.batches(), finished.workspace.tmp, schema=steps.schema
    )
    tables["norm_stats"] = _write_norm_stats(finished, steps, table)
    _write_documents(finished, specs, tables, table.num_rows)
    return read_info(root)


def _features(finished: Finished) -> dict[str, list[str]]:
    """Return the feature names: those of the first generation, for ever."""
    if finished.previous is not None:
        arrays = finished.previous.arrays
        return {name: dict(arrays[name].attributes)["features"] for name in finished.plan.bindings.sizes}
    return feature_names(finished.plan.bindings, [episode.ref for episode in finished.plan.episodes])


def _task_numbers(known: Sequence[str], episodes: Sequence[PlannedEpisode]) -> dict[str, int]:
    """Number instructions in order of first appearance; an episode without any has the empty one."""
    numbers = {task: number for number, task in enumerate(known)}
    for episode in episodes:
        for task in episode.ref.instructions or ("",):
            numbers.setdefault(task, len(numbers))
    return numbers


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    return pa.table({"task_index": list(tasks.values()), "task": list(tasks)}, schema=TASKS)


def _dropped(finished: Finished) -> set[tuple[str, str]]:
    """Return ``(source, key)`` of the episodes that a refused step condemns, under the policy drop-episode."""
    if finished.plan.recipe.on_bad_frame != "drop-episode":
        return set()
    return {(source, fault.episode) for result in finished.results.values() for source, fault in result.faults}


class _Parts:
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
            return {name: arrays[name] for name in arrays.files}

    def blocks(self, tasks: Mapping[str, int], dropped: set[tuple[str, str]]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows of consecutive steps, with episode and task numbers filled in."""
        local = [np.array([tasks[task] for task in e.ref.instructions or ("",)], np.int32) for e in self.plan.episodes]
        for shard in self.plan.shards:
            part = self.load(shard)
            numbers = np.searchsorted(self.starts, part.pop("episode"), side="right") - 1
            instruction = part.pop("instruction_index")
            part.pop("step_digest")
            part["task_index"] = np.array(
                [local[n][i] for n, i in zip(numbers.tolist(), instruction.tolist(), strict=True)], np.int32
            )
            part["episode_index"] = (self.plan.first_episode + numbers).astype(np.int32)
            if dropped:
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


def _write_rows(
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

    def __init__(self, root: Path, specs: Sequence[ArraySpec], num_steps: int) -> None:
        self.root, self.specs, self.num_steps = root, {spec.name: spec for spec in specs}, num_steps
        self.schema = steps_schema(self.specs)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of one array, each chunk checked."""
        spec, pieces = self.specs[name], []
        for shard in range(start // spec.shard_steps, -(-stop // spec.shard_steps)):
            offset = shard * spec.shard_steps
            with ShardReader(self.root / shard_path(spec, shard), spec) as reader:
                pieces.append(reader.rows(max(start - offset, 0), min(stop - offset, spec.shard_steps)))
        return np.concatenate(pieces) if pieces else np.zeros((0, *spec.row_shape), spec.dtype)

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


def _write_episodes(
    finished: Finished, previous: _Previous, parts: _Parts, dropped: set[tuple[str, str]]
) -> tuple[pa.Table, list[ShardRow]]:
    plan = finished.plan
    new = []
    for number, (episode, (digest, num_invalid)) in enumerate(zip(plan.episodes, parts.episodes(), strict=True)):
        clock = json.loads((finished.workspace.parts / f"source-{number:08d}.json").read_bytes())
        gone = episode.name in dropped
        new.append(
            {
                "episode_index": plan.first_episode + number,
                "key": episode.ref.key,
                "source": episode.source,
                "start": episode.start,
                "stop": episode.stop,
                "rate_hz": episode.rate_hz,
                "rate_measured_hz": clock["rate_measured_hz"],
                "jitter_s": clock["jitter_s"],
                "instructions": list(episode.ref.instructions),
                "views": [view.name for view in plan.recipe.views if plan.bindings.view(episode.ref, view.name)],
                "num_invalid": episode.num_steps if gone else num_invalid,
                "valid": not gone and num_invalid < episode.num_steps,
                "digest": digest,
                "details": json.dumps(dict(episode.ref.details), sort_keys=True),
            }
        )
    table = pa.concat_tables([previous.episodes, pa.Table.from_pylist(new, schema=EPISODES)])
    ends = np.asarray(table["stop"].to_numpy(), np.int64)
    values = {"row_size": ends - np.asarray(table["start"].to_numpy(), np.int64), "episode_ends": ends}
    rows = [row for spec in episode_specs() for row in _write_vector(finished, spec, values[spec.name])]
    return table, rows


def _write_vector(finished: Finished, spec: ArraySpec, values: np.ndarray) -> Iterator[ShardRow]:
    """Write the shards of an episode array that hold a new episode."""
    for shard in range(finished.plan.first_episode // spec.shard_steps, -(-len(values) // spec.shard_steps)):
        with ShardWriter(finished.root, spec, shard, finished.workspace.tmp) as writer:
            rows = values[shard * spec.shard_steps : (shard + 1) * spec.shard_steps]
            for start in range(0, len(rows), spec.chunk_steps):
                writer.put(rows[start : start + spec.chunk_steps])
            yield writer.commit()


def _table_path(finished: Finished, name: str, suffix: str = "parquet") -> Path:
    return finished.root / "_tables" / f"{name}-{finished.plan.generation}.{suffix}"


def _write_tables(
    finished: Finished, previous: _Previous, tables: dict[str, pa.Table], rows: Sequence[ShardRow]
) -> dict[str, TableRef]:
    tables["quarantine"] = pa.concat_tables([previous.quarantine, _quarantine(finished)])
    sources = [*previous.sources, *_source_rows(finished)]
    tables["manifest"] = manifest_table(_shard_rows(finished, previous, rows), sources)
    return {
        name: write_table(_table_path(finished, name), table, finished.workspace.tmp) for name, table in tables.items()
    }


def _quarantine(finished: Finished) -> pa.Table:
    found = list(finished.plan.faults)
    found += [fault for shard in finished.plan.shards for fault in finished.results[shard].faults]
    unique = dict.fromkeys(found)
    return pa.Table.from_pylist([_fault_row(s, f, finished.plan.generation) for s, f in unique], schema=QUARANTINE)


def _fault_row(source: str, fault: Fault, generation: int) -> dict[str, Any]:
    return {
        "source": source,
        "episode": fault.episode,
        "stream": fault.stream,
        "start": fault.start,
        "stop": fault.stop,
        "path": fault.path,
        "reason": str(fault.reason),
        "message": fault.message,
        "generation": generation,
    }


def _shard_rows(finished: Finished, previous: _Previous, rows: Sequence[ShardRow]) -> list[ShardRow]:
    """Return the committed shards of all generations; a new one takes the place of the one it extends."""
    merged = dict(previous.shards)
    merged.update((row.key, row) for row in rows)
    merged.update((row.key, row) for result in finished.results.values() for row in result.rows)
    return list(merged.values())


def _source_rows(finished: Finished) -> Iterator[dict[str, Any]]:
    for number, episode in enumerate(finished.plan.episodes):
        found = json.loads((finished.workspace.parts / f"source-{number:08d}.json").read_bytes())
        for path, nbytes, xxh3 in found["files"]:
            yield {"episode": "/".join(episode.name), "path": path, "nbytes": nbytes, "xxh3": xxh3}


def _write_norm_stats(finished: Finished, steps: StepRows, episodes: pa.Table) -> TableRef:
    from pipeline.stats import norm_stats

    arrays = [name for name in ("state", "actions") if name in finished.plan.bindings.sizes]
    ends = np.asarray(episodes["stop"].to_numpy(), np.int64)
    valid = np.concatenate([steps.read("valid", start, stop) for start, stop in steps.blocks()])
    stats: dict[str, Any] = {"norm_stats": {}}
    if arrays and valid.any():
        stats = norm_stats(steps.read, ends, valid, horizon=finished.plan.recipe.horizon, arrays=tuple(arrays))
    data = json.dumps(stats, sort_keys=True, indent=1).encode()
    return write_document(_table_path(finished, "norm_stats", "json"), data, finished.workspace.tmp)


def _write_documents(
    finished: Finished, row_arrays: Sequence[ArraySpec], tables: Mapping[str, TableRef], num_episodes: int
) -> None:
    """Write the root's metadata, which is the commit, and then each array's own."""
    plan, tmp = finished.plan, finished.workspace.tmp
    steps = [*frame_specs(plan.recipe, plan.bindings, plan.shard_steps), *row_arrays]
    arrays = {spec.name: (spec, plan.num_steps) for spec in steps}
    arrays |= {spec.name: (spec, num_episodes) for spec in episode_specs()}
    attributes = {
        "generation": plan.generation,
        "num_steps": plan.num_steps,
        "num_episodes": num_episodes,
        "shard_steps": plan.shard_steps,
        "recipe": recipe_to_mapping(plan.recipe),
        "bindings": bindings_to_json(plan.bindings),
        "tables": tables,
    }
    write_atomic(finished.root / ROOT_DOCUMENT, root_document(arrays, attributes), tmp)
    write_array_documents(finished.root, arrays, tmp)


def write_array_documents(root: Path, arrays: Mapping[str, tuple[ArraySpec, int]], tmp: Path) -> None:
    """Write each array's own ``zarr.json`` where it differs from what the root says."""
    for name, (spec, length) in arrays.items():
        path, document = root / name / ROOT_DOCUMENT, array_document(spec, length)
        if not path.exists() or path.read_bytes() != document:
            write_atomic(path, document, tmp)
