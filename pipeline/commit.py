"""Stages 10 and 11 of the walk: rows, tables and statistics of a finished run, then the one replacement that makes it visible."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from pipeline.arrays import episode_specs, feature_names, feature_units, frame_specs, row_specs, sample_specs
from pipeline.commit_rows import Finished, Parts, StepRows, write_rows
from pipeline.maps import find_map
from pipeline.plan import Plan, PlannedEpisode, bindings_to_json
from pipeline.store.atomic import write_atomic, xxh3_hex
from pipeline.store.copies import write_copies
from pipeline.store.metadata import ROOT_DOCUMENT, DatasetInfo, TableRef, array_document, read_info, root_document
from pipeline.store.shards import ShardWriter
from pipeline.store.tables import (
    EPISODES,
    MAPS,
    QUARANTINE,
    SOURCES,
    TASKS,
    manifest_rows,
    manifest_table,
    read_table,
    write_document,
    write_table,
)
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import PlanError, Reason
from schemas.recipe import recipe_to_mapping
from schemas.source import Fault


@dataclass(frozen=True, slots=True)
class _Previous:
    """Tables of the generation before, empty for the first."""

    episodes: pa.Table
    tasks: list[str]
    quarantine: pa.Table
    shards: dict[tuple[str, int], ShardRow]
    sources: pa.Table

    @staticmethod
    def load(info: DatasetInfo | None) -> "_Previous":
        if info is None:
            return _Previous(EPISODES.empty_table(), [], QUARANTINE.empty_table(), {}, SOURCES.empty_table())
        manifest = read_table(info, "manifest")
        sources = manifest.filter(pa.compute.equal(manifest["kind"], "source"))
        return _Previous(
            read_table(info, "episodes"),
            read_table(info, "tasks")["task"].to_pylist(),
            read_table(info, "quarantine"),
            manifest_rows(manifest),
            sources.select(SOURCES.names),
        )


def commit(finished: Finished) -> DatasetInfo:
    """Make a finished run the dataset's next generation. Run again after a crash at any point, it writes the same bytes."""
    plan, root = finished.plan, finished.root
    previous = _Previous.load(finished.previous)
    parts = Parts(finished)
    tasks = _task_numbers(previous.tasks, plan.episodes)
    specs = row_specs(plan.recipe, plan.bindings, *_features(finished))
    rows = write_rows(finished, specs, parts.blocks(tasks), previous.shards)
    table, episode_rows = _write_episodes(finished, previous, parts)
    replaced = _replaced_ranges(table)
    steps = StepRows(root, specs, plan.num_steps, replaced)
    tables = _write_tables(finished, previous, {"episodes": table, "tasks": _task_table(tasks)}, rows + episode_rows)
    tables["steps"] = write_table(
        _table_path(finished, "steps"), steps.batches(), finished.workspace.tmp, schema=steps.schema
    )
    tables["norm_stats"] = _write_norm_stats(finished, steps, table)
    _write_documents(finished, specs, {"tables": tables, "num_episodes": table.num_rows, "replaced": replaced})
    info = read_info(root)
    write_copies(info, finished.workspace.tmp)
    return info


def _features(finished: Finished) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the features' names and units: those of the first generation, for ever."""
    bindings = finished.plan.bindings
    if finished.previous is not None:
        known = {name: dict(finished.previous.arrays[name].attributes) for name in bindings.sizes}
        units = {name: attributes.get("feature_units", []) for name, attributes in known.items()}
        return {name: attributes["features"] for name, attributes in known.items()}, units
    refs = [episode.ref for episode in finished.plan.episodes]
    return feature_names(bindings, refs), feature_units(bindings, refs)


def _task_numbers(known: Sequence[str], episodes: Sequence[PlannedEpisode]) -> dict[str, int]:
    """Give each instruction a number, in order of first appearance; an episode without any has the empty one."""
    numbers = {task: number for number, task in enumerate(known)}
    for episode in episodes:
        for task in episode.ref.instructions or ("",):
            numbers.setdefault(task, len(numbers))
    return numbers


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    return pa.table({"task_index": list(tasks.values()), "task": list(tasks)}, schema=TASKS)


def _write_episodes(finished: Finished, previous: _Previous, parts: Parts) -> tuple[pa.Table, list[ShardRow]]:
    plan = finished.plan
    new = []
    for number, (episode, (digest, num_invalid)) in enumerate(zip(plan.episodes, parts.episodes(), strict=True)):
        clock = json.loads((finished.workspace.parts / f"source-{number:08d}.json").read_bytes())
        gone = episode.name in finished.findings.dropped
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
                "generation": plan.generation,
                "replaced_by": -1,
            }
        )
    known = _mark_replaced(previous.episodes, plan)
    table = pa.concat_tables([known, pa.Table.from_pylist(new, schema=EPISODES)])
    ends = np.asarray(table["stop"].to_numpy(), np.int64)
    values = {"row_size": ends - np.asarray(table["start"].to_numpy(), np.int64), "episode_ends": ends}
    rows = [row for spec in episode_specs() for row in _write_vector(finished, spec, values[spec.name])]
    return table, rows


def _mark_replaced(known: pa.Table, plan: Plan) -> pa.Table:
    """Return the episodes table with those that the plan replaces no longer valid, and their replacements named."""
    replaced_by, valid = known["replaced_by"].to_pylist(), known["valid"].to_pylist()
    for number, episode in enumerate(plan.episodes):
        if episode.replaces >= 0:
            replaced_by[episode.replaces], valid[episode.replaces] = plan.first_episode + number, False
    for name, values in (("replaced_by", replaced_by), ("valid", valid)):
        place = EPISODES.get_field_index(name)
        known = known.set_column(place, EPISODES.field(place), pa.array(values, EPISODES.field(place).type))
    return known


def _replaced_ranges(episodes: pa.Table) -> list[list[int]]:
    """Return ``[start, stop]`` of every replaced episode, in step order: the root's attribute ``replaced``."""
    rows = episodes.select(["start", "stop", "replaced_by"]).to_pylist()
    return [[row["start"], row["stop"]] for row in rows if row["replaced_by"] >= 0]


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
    tables["quarantine"] = _quarantine(finished, previous.quarantine)
    sources = pa.concat_tables([previous.sources, *_source_tables(finished)])
    tables["manifest"] = manifest_table(_shard_rows(finished, previous, rows), sources)
    planner = finished.plan.recipe.planner
    if planner is not None and planner.store == "tracks":
        tables["maps"] = map_table(dict(finished.plan.maps), finished.map_path, finished.previous)
    return {
        name: write_table(_table_path(finished, name), table, finished.workspace.tmp) for name, table in tables.items()
    }


def map_table(maps: Mapping[str, str], map_path: str, previous: DatasetInfo | None) -> pa.Table:
    """Return the documents of ``maps``, ``town -> xxh3``, by town: those of the generation before, and new ones from ``map_path``.

    Raises
    ------
    PlanError
        A map is not the one that the conversion read.
    SourceError
        No map of a town at ``map_path``.
    """
    known = {} if previous is None else {row["town"]: row for row in read_table(previous, "maps").to_pylist()}
    rows = []
    for town, xxh3 in sorted(maps.items()):
        if town not in known:
            known[town] = {"town": town, "xxh3": xxh3, "document": find_map(map_path, town).read_bytes()}
        if xxh3_hex(known[town]["document"]) != xxh3:
            raise PlanError(f"expected the map of {town!r} that the conversion read, found another; give that one")
        rows.append(known[town])
    return pa.Table.from_pylist(rows, schema=MAPS)


def _quarantine(finished: Finished, known: pa.Table) -> pa.Table:
    """Return the quarantine so far and what is new: nothing twice, and no wish left about an episode that was taken after all."""
    taken = {episode.name for episode in finished.plan.episodes}
    rows = [
        row
        for row in known.to_pylist()
        if (row["source"], row["episode"]) not in taken or not Reason(row["reason"]).is_wish
    ]
    said = {tuple(value for name, value in row.items() if name != "generation") for row in rows}
    for source, fault in dict.fromkeys([*finished.plan.faults, *finished.findings.faults]):
        row = _fault_row(source, fault, finished.plan.generation)
        if tuple(value for name, value in row.items() if name != "generation") not in said:
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=QUARANTINE)


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
        "is_warning": fault.is_warning,
    }


def _shard_rows(finished: Finished, previous: _Previous, rows: Sequence[ShardRow]) -> list[ShardRow]:
    """Return the committed shards of all generations; a new one takes the place of the one it extends."""
    merged = dict(previous.shards)
    merged.update((row.key, row) for row in rows)
    merged.update((row.key, row) for result in finished.results.values() for row in result.rows)
    return list(merged.values())


def _source_tables(finished: Finished) -> Iterator[pa.Table]:
    """Yield the files of each new episode."""
    for number, episode in enumerate(finished.plan.episodes):
        found = json.loads((finished.workspace.parts / f"source-{number:08d}.json").read_bytes())
        files = dict(zip(("path", "nbytes", "xxh3"), zip(*found["files"], strict=True), strict=False))
        num = len(found["files"])
        same = {
            "episode": ["/".join(episode.name)] * num,
            "episode_index": [finished.plan.first_episode + number] * num,
        }
        yield pa.table({**same, **{name: files.get(name, ()) for name in SOURCES.names[2:]}}, schema=SOURCES)


def _write_norm_stats(finished: Finished, steps: StepRows, episodes: pa.Table) -> TableRef:
    from pipeline.stats import Samples, samples_stats

    arrays = [name for name in ("state", "actions") if name in finished.plan.bindings.sizes]
    ends = np.asarray(episodes["stop"].to_numpy(), np.int64)
    valid = np.concatenate([steps.read("valid", start, stop) for start, stop in steps.blocks()])
    stats: dict[str, Any] = {"norm_stats": {}}
    if arrays and valid.any():
        horizon = finished.plan.recipe.horizon
        samples = Samples(read_rows=steps.read, episode_ends=ends, valid=valid, horizon=horizon)
        stats = samples_stats(samples, arrays)
        stats["headrace"]["generation"] = finished.plan.generation
    data = json.dumps(stats, sort_keys=True, indent=1).encode()
    return write_document(_table_path(finished, "norm_stats", "json"), data, finished.workspace.tmp)


def _write_documents(finished: Finished, row_arrays: Sequence[ArraySpec], contents: Mapping[str, Any]) -> None:
    """Write the root's metadata, which is the commit, and then each array's own; ``contents`` are attributes of the root."""
    plan, tmp = finished.plan, finished.workspace.tmp
    samples = sample_specs(plan.recipe, plan.bindings, plan.shard_steps)
    steps = [*frame_specs(plan.recipe, plan.bindings, plan.shard_steps), *samples, *row_arrays]
    arrays = {spec.name: (spec, plan.num_steps) for spec in steps}
    arrays |= {spec.name: (spec, contents["num_episodes"]) for spec in episode_specs()}
    attributes = {
        "generation": plan.generation,
        "num_steps": plan.num_steps,
        "shard_steps": plan.shard_steps,
        "recipe": recipe_to_mapping(plan.recipe),
        "bindings": bindings_to_json(plan.bindings),
        "maps": dict(plan.maps),
        **contents,
    }
    write_atomic(finished.root / ROOT_DOCUMENT, root_document(arrays, attributes), tmp)
    write_array_documents(finished.root, arrays, tmp)


def write_array_documents(root: Path, arrays: Mapping[str, tuple[ArraySpec, int]], tmp: Path) -> None:
    """Write each array's own ``zarr.json`` where it differs from what the root says."""
    for name, (spec, length) in arrays.items():
        path, document = root / name / ROOT_DOCUMENT, array_document(spec, length)
        if not path.exists() or path.read_bytes() != document:
            write_atomic(path, document, tmp)
