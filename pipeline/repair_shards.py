"""Shards made again: rows from the table of steps and it from them, frames from the recordings, chunk by damaged chunk."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from pipeline.arrays import row_specs, sample_specs
from pipeline.cluster import ClusterOptions
from pipeline.commit import commit, map_table
from pipeline.commit_rows import Finished, StepRows
from pipeline.jobs import Tasks
from pipeline.plan import Plan
from pipeline.repair_files import Folder
from pipeline.repair_recordings import Recordings, Replay
from pipeline.run_tasks import run_tasks
from pipeline.shard_rows import Segment
from pipeline.shard_task import ShardJob, ShardResult
from pipeline.store.copies import kept_generations
from pipeline.store.metadata import DatasetInfo, TableRef
from pipeline.store.scan import Problem
from pipeline.store.shards import ShardReader, ShardWriter
from pipeline.store.tables import ROW_GROUP_ROWS, array_of, manifest_rows, read_table, write_table
from pipeline.watch import Watch
from pipeline.workspace import Journal, Lock, Workspace
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import DatasetError, HeadraceError

GIVE = "give the folder that holds it as it was, or restore the file from a backup"
NO_MAP = "expected the map that the samples were made with, found none given; add --map"
OTHER = (
    "expected the recordings to give the committed bytes again, found others: made by another version of Headrace or of a "
    "decoder; restore the file from a backup, or convert into a new folder"
)


class Remaker:
    """Makes damaged arrays and the table of steps again; what has no copy needs the recordings."""

    def __init__(self, recordings: Recordings, options: ClusterOptions, lock: Lock, watch: Watch) -> None:
        self.recordings, self.options, self.lock, self.watch = recordings, options, lock, watch

    def remake(self, folder: Folder, info: DatasetInfo, problems: Sequence[Problem]) -> dict[str, str]:
        """Repair what it can; return ``path -> why not`` of the rest."""
        run = _Run(self, folder, info)
        damaged = [run.committed[path] for path in dict.fromkeys(p.path for p in problems) if path in run.committed]
        damaged = [row for row in damaged if not folder.holds(row.path, _file(row))]
        run.maps_tables()
        run.rows(damaged)
        run.steps_table()
        run.frames(damaged)
        run.everything(damaged)
        return run.reasons


class _Run:
    """One repair of arrays."""

    def __init__(self, remaker: Remaker, folder: Folder, info: DatasetInfo) -> None:
        self.remaker, self.folder, self.info = remaker, folder, info
        self.committed = {row.path: row for row in manifest_rows(read_table(info, "manifest")).values()}
        self.replay = Replay(info, remaker.recordings)
        self.row_specs = _row_specs(info, self.replay.plan())
        self.reasons: dict[str, str] = {}
        self.scratch = folder.tmp / "repair"
        self.tmp = Workspace(self.scratch).tmp
        self.lacks_map = bool(info.attributes.get("maps")) and not remaker.recordings.map
        self.has_steps = folder.holds(info.tables["steps"].path, info.tables["steps"])

    def rows(self, damaged: Sequence[ShardRow]) -> None:
        """Write damaged shards of rows again, from the tables."""
        for row in damaged:
            spec = self.info.arrays[row.array]
            if spec.dims[0] == "episode":
                self._put_rows(spec, row, _episode_rows(self.info, row))
            elif row.array in self.row_specs and self.has_steps:
                self._put_rows(spec, row, _step_rows(self.info, row))

    def maps_tables(self) -> None:
        """Write the tables of maps that are lost with their copies again, of older generations too, from the maps given."""
        for generation in kept_generations(self.info):
            ref = generation.info.tables.get("maps") if generation.info is not None else None
            if generation.info is None or ref is None or self.folder.holds(ref.path, ref):
                continue
            copies = [path for path in generation.files if Path(path).name == Path(ref.path).name]
            try:
                table = map_table(generation.info.attributes["maps"], self.remaker.recordings.map, None)
                made = write_table(self.scratch / ref.path, table, self.tmp)
            except HeadraceError as error:
                self.reasons.update(dict.fromkeys(copies, error.message))
                continue
            if made == ref:
                for path in copies:
                    self.folder.put_bytes(path, (self.scratch / ref.path).read_bytes())
            else:
                self.reasons.update(dict.fromkeys(copies, OTHER))

    def steps_table(self) -> None:
        """Write tables of steps again, from the shards of rows: of older generations too, whose rows are the beginning."""
        for generation in kept_generations(self.info):
            if generation.info is not None:
                self._steps_table(generation.info)

    def _steps_table(self, info: DatasetInfo) -> None:
        ref = info.tables["steps"]
        if self.folder.holds(ref.path, ref):
            return
        steps = StepRows(info.root, list(self.row_specs.values()), info.num_steps, info.attributes.get("replaced", []))
        try:
            made = write_table(self.scratch / ref.path, steps.batches(), self.tmp, schema=steps.schema)
        except DatasetError as error:
            self.reasons[ref.path] = f"expected whole shards of rows to make it from, found {error}"
            return
        if made == ref:
            self.folder.put_made(ref.path, self.scratch / ref.path)

    def frames(self, damaged: Sequence[ShardRow]) -> None:
        """Make damaged frames, and planner tensors, again: the steps of damaged chunks, and those alone."""
        streamed = [
            row for row in damaged if self.info.arrays[row.array].dims[0] == "step" and row.array not in self.row_specs
        ]
        steps = {row.path: self._unsound(row) for row in streamed}
        self.replay.look_for({number for found in steps.values() for number in self._episodes(found)})
        plan = self.replay.plan()
        samples = {spec.name for spec in sample_specs(plan.recipe, plan.bindings, plan.shard_steps)}
        possible = []
        for row in streamed:
            missing = [number for number in self._episodes(steps[row.path]) if number in self.replay.missing]
            if missing:
                self.reasons[row.path] = f"{self.replay.missing[missing[0]]}; {GIVE}"
            elif self.lacks_map and row.array in samples:
                self.reasons[row.path] = NO_MAP
            else:
                possible.append(row)
        wanted = {
            shard: _Wanted(
                arrays=frozenset(row.array for row in possible if row.shard == shard),
                steps=np.unique(np.concatenate([steps[row.path] for row in possible if row.shard == shard])),
            )
            for shard in sorted({row.shard for row in possible})
        }
        made = self._make({shard: part for shard, part in wanted.items() if part.steps.size})
        for row in possible:
            if made is not None:
                self._assemble(row, steps[row.path], wanted[row.shard].steps)

    def everything(self, damaged: Sequence[ShardRow]) -> None:
        """Convert all of it again into a scratch folder, where nothing less helps, and take what is damaged from there."""
        refs = [_file(row) for row in damaged if row.array in self.row_specs] + [self.info.tables["steps"]]
        wanted = [ref for ref in refs if not self.folder.holds(ref.path, ref)]
        if not wanted:
            return
        self.replay.look_for(range(self.info.num_episodes))
        if self.replay.missing or self.lacks_map:
            message = NO_MAP if self.lacks_map else f"{next(iter(self.replay.missing.values()))}; {GIVE}"
            self.reasons.update({ref.path: message for ref in wanted})
            return
        self.remaker.watch.said(
            "rows and the table of steps are both damaged: converting all of it again, to take what is lost"
        )
        plan = self.replay.plan()
        tasks = Tasks(self.scratch, plan, self.replay.readers, None, map_path=self.remaker.recordings.map)
        results: dict[int, ShardResult] = {}
        self._run(tasks, results, set())
        map_path = self.remaker.recordings.map
        commit(Finished(plan=plan, root=self.scratch, results=results, previous=None, map_path=map_path))
        again = Folder(self.scratch)
        for ref in wanted:
            if again.holds(ref.path, ref):
                self.folder.put_made(ref.path, self.scratch / ref.path)
            else:
                self.reasons[ref.path] = OTHER

    def _put_rows(self, spec: ArraySpec, row: ShardRow, rows: np.ndarray) -> None:
        with ShardWriter(self.scratch, spec, row.shard, self.tmp) as writer:
            for start in range(0, len(rows), spec.chunk_steps):
                writer.put(rows[start : start + spec.chunk_steps])
            made = writer.commit()
        if made == row:
            self.folder.put_made(row.path, self.scratch / row.path)

    def _unsound(self, row: ShardRow) -> np.ndarray:
        """Return the steps of a shard, int64[n], whose chunks are there no more as they were committed."""
        spec, every = self.info.arrays[row.array], np.arange(row.start, row.stop)
        if spec.chunk_steps > 1:
            return every
        present = np.array([crc is not None for crc in row.chunk_crc32c], np.bool_)
        try:
            with ShardReader(self.info.root / row.path, spec, row) as reader:
                sound = [_is_sound(reader, chunk) for chunk in range(len(present))]
        except DatasetError:
            return every[present]
        return every[present & ~np.array(sound, np.bool_)]

    def _episodes(self, steps: np.ndarray) -> list[int]:
        stops = [row["stop"] for row in self.replay.rows]
        return np.unique(np.searchsorted(stops, steps, side="right")).tolist()

    def _make(self, wanted: dict[int, "_Wanted"]) -> dict[int, ShardResult] | None:
        """Run the shard tasks of the wanted steps in the scratch folder; None, and reasons, where that fails."""
        plan = self.replay.plan()
        tasks = _RepairTasks(self.scratch, plan, self.replay.readers, self.remaker.recordings.map, wanted)
        nothing = ShardResult(
            shard=0, rows=(), part_nbytes=0, part_xxh3="", faults=(), num_steps=0, num_frames=0, seconds={}
        )
        results = {shard: nothing for shard in plan.shards if shard not in wanted}
        try:
            self._run(tasks, results, set(range(len(plan.episodes))))
        except HeadraceError as error:
            paths = [
                path
                for path, row in self.committed.items()
                if row.shard in wanted and row.array in wanted[row.shard].arrays
            ]
            self.reasons.update(dict.fromkeys(paths, f"expected to make it again from the recordings, found: {error}"))
            return None
        return results

    def _run(self, tasks: Tasks, results: dict[int, ShardResult], sources: set[int]) -> None:
        self.tmp.mkdir(parents=True, exist_ok=True)
        journal = Journal(Workspace(self.scratch).journal)
        journal.open()
        try:
            run_tasks(
                tasks,
                results,
                sources,
                journal=journal,
                lock=self.remaker.lock,
                options=self.remaker.options,
                watch=self.remaker.watch,
            )
        finally:
            journal.close()

    def _assemble(self, row: ShardRow, steps: np.ndarray, made_steps: np.ndarray) -> None:
        """Join sound chunks of a shard with those made again, and put it in its place if it is what was committed."""
        spec, path = self.info.arrays[row.array], self.scratch / row.path
        if spec.chunk_steps == 1:
            path = self.folder.tmp / "joined" / row.path
            with ExitStack() as stack:
                old = (
                    stack.enter_context(ShardReader(self.info.root / row.path, spec, row))
                    if len(steps) < _present(row)
                    else None
                )
                new = stack.enter_context(ShardReader(self.scratch / row.path, spec)) if len(steps) else None
                writer = stack.enter_context(ShardWriter(self.folder.tmp / "joined", spec, row.shard, self.tmp))
                for payload in _payloads(row, (old, new), (set(steps.tolist()), made_steps)):
                    writer.put(None) if payload is None else writer.put_stored(payload)
                writer.commit()
        ref = _file(row)
        if Folder(path.parents[1]).holds(row.path, ref):
            self.folder.put_made(row.path, path)
        else:
            self.reasons[row.path] = OTHER


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be made again of one shard."""

    arrays: frozenset[str]
    steps: np.ndarray
    """int64: steps of the dataset, in order."""


class _RepairTasks(Tasks):
    """Shard tasks of some steps and arrays only."""

    def __init__(
        self, root: Path, plan: Plan, readers: Mapping[str, object], map_path: str, wanted: Mapping[int, _Wanted]
    ) -> None:
        super().__init__(root, plan, readers, None, map_path=map_path)
        self.wanted = wanted

    def job(self, shard: int, refused: str = "") -> ShardJob:
        """Return the job whose chunk k is the k-th wanted step."""
        wanted, job = self.wanted[shard], super().job(shard, refused)
        return replace(
            job,
            specs=tuple(spec for spec in job.specs if spec.name in wanted.arrays),
            sample_specs=tuple(spec for spec in job.sample_specs if spec.name in wanted.arrays),
            segments=tuple(part for segment in job.segments for part in _parts(segment, wanted.steps)),
        )


def _parts(segment: Segment, steps: np.ndarray) -> Iterator[Segment]:
    """Yield the runs of wanted steps within a segment."""
    local = steps - segment.episode.start
    local = local[(local >= segment.start) & (local < segment.stop)]
    for run in np.split(local, np.flatnonzero(np.diff(local) != 1) + 1):
        if run.size:
            yield replace(segment, start=int(run[0]), stop=int(run[-1]) + 1)


def _payloads(
    row: ShardRow, readers: tuple[ShardReader | None, ShardReader | None], steps: tuple[set[int], np.ndarray]
) -> Iterator[bytes | None]:
    """Yield the chunks of a shard in order: ``readers`` are the damaged file and the new one, ``steps`` the damaged and the made."""
    (old, new), (damaged, made) = readers, steps
    for chunk, crc in enumerate(row.chunk_crc32c):
        step = row.start + chunk
        if crc is None:
            yield None
        elif step in damaged and new is not None:
            yield new.chunk(int(np.searchsorted(made, step)))
        elif old is not None:
            yield old.chunk(chunk)


def _is_sound(reader: ShardReader, chunk: int) -> bool:
    try:
        reader.chunk(chunk)
    except (DatasetError, OSError):
        return False
    return True


def _present(row: ShardRow) -> int:
    return sum(crc is not None for crc in row.chunk_crc32c)


def _file(row: ShardRow) -> TableRef:
    return TableRef(path=row.path, nbytes=row.nbytes, xxh3=row.xxh3)


def _row_specs(info: DatasetInfo, plan: Plan) -> dict[str, ArraySpec]:
    """Return the arrays of rows along ``step``, as the dataset has them."""
    features = {name: dict(info.arrays[name].attributes)["features"] for name in plan.bindings.sizes}
    return {spec.name: info.arrays[spec.name] for spec in row_specs(plan.recipe, plan.bindings, features)}


def _episode_rows(info: DatasetInfo, row: ShardRow) -> np.ndarray:
    table = read_table(info, "episodes", ["start", "stop"]).slice(row.start, row.stop - row.start)
    starts, stops = (np.asarray(table[name].to_numpy(), np.int64) for name in ("start", "stop"))
    return stops if row.array == "episode_ends" else stops - starts


def _step_rows(info: DatasetInfo, row: ShardRow) -> np.ndarray:
    """Return the rows of a shard from the table of steps."""
    spec = info.arrays[row.array]
    groups = range(row.start // ROW_GROUP_ROWS, -(-row.stop // ROW_GROUP_ROWS))
    with pq.ParquetFile(info.root / info.tables["steps"].path, page_checksum_verification=True) as file:
        schema = file.schema_arrow
        column = next(field.name for field in schema if array_of(field) == row.array)
        values = file.read_row_groups(list(groups), columns=[column]).column(0).combine_chunks()
    flat = values.flatten() if spec.row_shape else values
    rows = flat.to_numpy(zero_copy_only=False).astype(spec.dtype, copy=False).reshape(-1, *spec.row_shape)
    first = row.start - groups.start * ROW_GROUP_ROWS
    rows = np.array(rows[first : first + row.stop - row.start])
    if row.array == "valid":  # of a replaced episode the table says that it is served no more, not what was recorded
        for start, stop in info.attributes.get("replaced", []):
            rows[max(start - row.start, 0) : max(stop - row.start, 0)] = True
    return rows
