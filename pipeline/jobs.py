"""The tasks of a plan: made when they are needed, and recognised when they are done."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.arrays import frame_specs, sample_specs
from pipeline.plan import Plan, PlannedEpisode
from pipeline.shard_rows import Segment
from pipeline.shard_task import ShardJob, ShardResult
from pipeline.store.metadata import DatasetInfo
from pipeline.store.tables import manifest_rows, read_table
from pipeline.workspace import Workspace


def finished_tasks(
    root: Path, plan: Plan, records: Sequence[Mapping[str, Any]], workspace: Workspace
) -> tuple[dict[int, ShardResult], set[int]]:
    """Return what the journal says is done and the disk confirms: shard results, and numbers of digested episodes."""
    results: dict[int, ShardResult] = {}
    sources: set[int] = set()
    for record in records:
        if record["kind"] == "source":
            if _is_whole_source(workspace.parts / f"source-{record['number']:08d}.json"):
                sources.add(record["number"])
            continue
        result = ShardResult.from_json(record["result"])
        part = workspace.parts / f"part-{result.shard:08d}.npz"
        files = [(root / row.path, row.nbytes, row.xxh3) for row in result.rows]
        files.append((part, result.part_nbytes, result.part_xxh3))
        if all(_is_as_written(*file) for file in files):
            results[result.shard] = result
    return results, sources


class Tasks:
    """The tasks of a plan, made when they are needed."""

    def __init__(
        self, root: Path, plan: Plan, readers: Mapping[str, Any], previous: DatasetInfo | None, *, map_path: str = ""
    ) -> None:
        self.root, self.plan, self.readers = root, plan, readers
        self.place = str(root.resolve())
        self.stops = np.array([episode.stop for episode in plan.episodes])
        self.specs = tuple(frame_specs(plan.recipe, plan.bindings, plan.shard_steps))
        self.sample_specs = tuple(sample_specs(plan.recipe, plan.bindings, plan.shard_steps))
        self.map_path = map_path
        self.committed = manifest_rows(read_table(previous, "manifest")) if previous is not None else {}

    def episodes(self, shard: int) -> Iterator[tuple[int, PlannedEpisode]]:
        """Yield ``(number, episode)`` of those with a step in ``shard``."""
        start, stop = shard * self.plan.shard_steps, (shard + 1) * self.plan.shard_steps
        for number in range(int(np.searchsorted(self.stops, start, side="right")), len(self.plan.episodes)):
            if self.plan.episodes[number].start >= stop:
                return
            yield number, self.plan.episodes[number]

    def job(self, shard: int, refused: str = "") -> ShardJob:
        """Return the job of one shard."""
        start, stop = shard * self.plan.shard_steps, (shard + 1) * self.plan.shard_steps
        segments = tuple(
            Segment(
                reader=self.readers[episode.source],
                episode=episode,
                start=max(start, episode.start) - episode.start,
                stop=min(stop, episode.stop) - episode.start,
            )
            for _, episode in self.episodes(shard)
        )
        begun = start < self.plan.first_step
        return ShardJob(
            root=self.place,
            shard=shard,
            specs=self.specs,
            recipe=self.plan.recipe,
            bindings=self.plan.bindings,
            segments=segments,
            sample_specs=self.sample_specs,
            map_path=self.map_path,
            committed={
                spec.name: self.committed[spec.name, shard] for spec in (*self.specs, *self.sample_specs) if begun
            },
            refused=refused,
        )


def _is_as_written(path: Path, nbytes: int, xxh3: str) -> bool:
    """Whether a file still is what its task wrote: what is resumed is committed, and nobody looks at it again."""
    digest = xxhash.xxh3_128()
    try:
        if not path.is_file() or path.stat().st_size != nbytes:
            return False
        with path.open("rb", buffering=0) as file:
            while block := file.read(4 * 2**20):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == xxh3


def _is_whole_source(path: Path) -> bool:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and value.keys() == {"files", "rate_measured_hz", "jitter_s"}
