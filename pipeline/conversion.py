"""The conversion: plan, run shard tasks in a sliding window, journal what is done, commit. Resume is the same call again."""

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.cluster import ClusterOptions, memory_nbytes
from pipeline.commit import commit, write_array_documents
from pipeline.commit_rows import NO_FINDINGS, Findings, Finished
from pipeline.incremental import (
    NOTHING,
    UNPLANNED,
    Changes,
    Seen,
    discard_uncommitted,
    find_changes,
    planned_generation,
    read_previous,
    recipe_differences,
    refuse_other_layout,
    refuse_other_recipe,
)
from pipeline.jobs import Tasks, finished_tasks
from pipeline.plan import (
    Plan,
    PlannedEpisode,
    bindings_from_json,
    default_shard_steps,
    estimate,
    place,
    plan_from_json,
    plan_to_json,
    refuse_if_too_large,
    usable,
)
from pipeline.quality import examine
from pipeline.recipes import load_recipe, override
from pipeline.report import ConvertReport, fault_line
from pipeline.run_tasks import run_tasks
from pipeline.selection import indexes_of, split_wanted, take
from pipeline.shard_task import ShardResult
from pipeline.sources import all_faults, fingerprint, open_sources
from pipeline.store.copies import write_copies
from pipeline.store.metadata import read_info
from pipeline.summaries import count_reasons
from pipeline.views import Bindings, bind
from pipeline.watch import Watch
from pipeline.workspace import Journal, Lock, Workspace, read_json, write_json
from schemas.errors import HeadraceError, PlanError, SourceError, UsageError, locate
from schemas.recipe import Recipe
from schemas.source import EpisodeRef, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What a conversion may be told beside sources, dataset and recipe."""

    views: Mapping[str, str] = field(default_factory=dict)
    """``target -> source`` view, over the recipe's candidates."""
    size: int | None = None
    """Pixels a side of every view."""
    decode: str | None = None
    """``exact`` or ``fast``, for every view."""
    rate_hz: float | None = None
    codec: str | None = None
    on_bad_frame: str | None = None
    shard_steps: int | None = None
    """Steps of a frame shard: a power of two; None chooses by size."""
    format: str = ""
    """Name of the reader; empty sniffs."""
    reader: Mapping[str, str] = field(default_factory=dict)
    """Options of the reader, such as ``{"channel_order": "rgb"}``."""
    map: str = ""
    """OpenDRIVE map, or folder of maps, for recipes with planner tensors."""
    planner_store: str | None = None
    """``samples`` or ``tracks``, for recipes with planner tensors."""
    strict: bool = False
    """Stop at the first piece of input that would be quarantined."""
    restart: bool = False
    """Discard an unfinished run."""
    rehash: bool = False
    """Compare every source file by content, whatever its size and time say."""
    replace: Sequence[str] = ()
    """Episodes whose recording changed, by key or ``source/key``: the old one is served no more, the new one appended."""
    episodes: Sequence[str] = ()
    """Patterns of the episodes that this run takes, or ``@FILE`` with one a line; later runs may take the others."""
    limit: int | None = None
    """Episodes that this run takes, at most."""
    dry_run: bool = False
    """Plan, print, and stop."""
    cluster: ClusterOptions = ClusterOptions()

    def __post_init__(self) -> None:
        steps = self.shard_steps
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"expected --limit of 1 or more, found {self.limit}; leave it out to take all episodes")
        if steps is not None and (not 1 <= steps <= 65_536 or steps & (steps - 1)):
            raise UsageError(f"expected a power of two up to 65536 for --shard-steps, found {steps}; for example 64")

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these options in it."""
        policy = "stop" if self.strict else self.on_bad_frame
        changes = {
            "views": self.views,
            "size": self.size,
            "decode": self.decode,
            "rate_hz": self.rate_hz,
            "codec": self.codec,
            "planner_store": self.planner_store,
        }
        return override(recipe, {**changes, "on_bad_frame": policy})


def convert(
    raw: str | Path | Sequence[str | Path],
    out: str | Path,
    recipe: str | Path | Recipe = "pi0",
    *,
    watch: Watch | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert raw recordings into a dataset, or continue, or append what is new.

    Parameters
    ----------
    raw
        One folder of recordings, or several.
    out
        The dataset to make. The same call again finishes an interrupted run; when nothing is unfinished, episodes
        that the dataset does not have yet become its next generation.
    recipe
        Name of a built-in recipe, a TOML file, or a :class:`Recipe`.
    watch
        Sees the plan and the progress.
    options
        Fields of :class:`ConvertOptions`.

    Raises
    ------
    SourceError
        Nothing here can be read, or the recipe says stop.
    PlanError
        It does not fit, or sources or recipe changed.
    LockedError
        Another run holds the dataset.
    """
    asked = ConvertOptions(**options)
    wanted = asked.apply(load_recipe(recipe))
    memory_nbytes(asked.cluster.memory)
    paths = [raw] if isinstance(raw, str | Path) else list(raw)
    if not str(out):
        raise UsageError("expected a path for the dataset, found an empty one; name it")
    root = Path(out).expanduser().resolve()  # once: workers have no other idea of where it is
    _refuse_overlap(paths, root)
    _refuse_mount(root)
    if asked.dry_run:
        return _Conversion(paths, root, wanted, asked, watch or Watch()).preview()
    watch = watch or Watch()
    with Lock(Workspace(root)) as lock:
        report = _Conversion(paths, root, wanted, asked, watch).run(lock)
    watch.committed(report)
    return report


def _refuse_overlap(paths: Sequence[str | Path], root: Path) -> None:
    target = root.resolve()
    for path in paths:
        source = Path(path).expanduser().resolve()
        if source == target or source in target.parents or target in source.parents:
            raise UsageError(
                f"expected the dataset outside the raw folder, found {root} and {path}; choose another place"
            )
    if root.exists() and not root.is_dir():
        raise UsageError(f"expected a folder for the dataset, found a file at {root}; choose another place")


def _refuse_mount(root: Path) -> None:
    """Refuse a mount point: nothing can be renamed into it from the workspace beside it, on another file system."""
    if root.is_dir() and root.parent.stat().st_dev != root.stat().st_dev:
        raise UsageError(
            f"expected a folder below the mount point, found the mount point {root}; for example {root}/dataset.zarr"
        )


class _Conversion:
    """One call of :func:`convert`."""

    def __init__(
        self, paths: Sequence[str | Path], root: Path, recipe: Recipe, asked: ConvertOptions, watch: Watch
    ) -> None:
        self.root, self.recipe, self.asked, self.watch = root, recipe, asked, watch
        self.workspace = Workspace(root)
        self.began_s = time.monotonic()
        self.num_waiting = 0
        self.previous = read_previous(root, self.workspace)
        self.sources = open_sources(paths, asked.format, asked.reader)
        self.readers = {source.name: source.reader for source in self.sources}

    def preview(self) -> ConvertReport:
        """Plan and stop."""
        if self.workspace.plan.exists() and not self.asked.restart:
            plan, found = self._resume(), NOTHING
        else:
            found = self._changes()
            plan = self._plan(found)
        if plan.episodes:
            self.watch.planned(plan, estimate(plan, self.asked.cluster.num_workers, self.root), 0)
        return self._report(plan, found, {}, reused=0, complete=False)

    def run(self, lock: Lock) -> ConvertReport:
        """Finish an unfinished plan, then make the next generation if there is anything new."""
        if self.asked.restart and self.workspace.plan.exists():
            discard_uncommitted(self.root, self.previous)  # before the plan, which is what proves them discardable
            self.workspace.clean()
        if self.previous is not None:
            self._complete_documents()
            if self.workspace.plan.exists() and planned_generation(self.workspace) <= self.previous.generation:
                self.workspace.clean()  # it was committed: what the sources did since is no matter of that plan
        if self.workspace.plan.exists():
            report = self._make(self._resume(), NOTHING, lock)
            self.previous = read_info(self.root)
            found = self._changes()
            plan = self._plan(found)
            if not plan.episodes:
                return report
            self.watch.said(f"{len(plan.episodes)} new episodes since that plan: they form the next generation")
        found = self._changes()
        plan = self._plan(found)
        if not plan.episodes:
            return self._nothing_new(plan, found)
        self.workspace.prepare()
        write_json(self.workspace.plan, plan_to_json(plan), self.workspace.tmp)
        return self._make(plan, found, lock)

    def _complete_documents(self) -> None:
        """Write what follows the root, where it is not what the root says: after a kill in the commit, or damage."""
        if self.previous is not None:
            arrays = {name: (spec, self.previous.lengths[name]) for name, spec in self.previous.arrays.items()}
            write_array_documents(self.root, arrays, self.workspace.tmp)
            write_copies(self.previous, self.workspace.tmp)

    def _nothing_new(self, plan: Plan, found: Changes) -> ConvertReport:
        if self.previous is None:
            refused = [f"{fault.episode or source}: {fault.message}" for source, fault in plan.faults]
            shown = "; ".join(refused[:3]) or "none"
            raise SourceError(
                f"expected at least one usable episode, found {len(refused)} refused or left out ({shown}); see `inspect`"
            )
        self._remember(plan, found)
        return self._report(plan, found, {}, reused=0, complete=True)

    def _resume(self) -> Plan:
        try:
            plan = plan_from_json(read_json(self.workspace.plan, "the plan of an unfinished run"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"expected a whole plan, found {self.workspace.plan} damaged; add --restart") from error
        differences = [*recipe_differences(plan.recipe, self.recipe, UNPLANNED), *self._source_differences(plan)]
        if self.asked.shard_steps not in (None, plan.shard_steps):
            differences.append(f"shard_steps {plan.shard_steps} -> {self.asked.shard_steps}")
        if differences:
            shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
            raise PlanError(
                f"expected what the unfinished run began with, found {len(differences)} differences: {shown}; "
                "run the first command again, or add --restart to discard what it did"
            )
        return replace(plan, recipe=replace(plan.recipe, on_bad_frame=self.recipe.on_bad_frame))

    def _source_differences(self, plan: Plan) -> Iterator[str]:
        refs = {(source.name, ref.key): ref for source in self.sources for ref in source.index.episodes}
        for name in plan.sources:
            if name not in self.readers:
                yield f"source {name} is not given"
        for episode in plan.episodes:
            ref = refs.get(episode.name)
            if episode.source not in self.readers:
                continue
            if ref is None:
                yield f"episode {episode.ref.key} is gone"
            elif ref.num_steps != episode.ref.num_steps:
                yield f"episode {episode.ref.key} has {ref.num_steps} steps, had {episode.ref.num_steps}"
            elif fingerprint(self.readers[episode.source], ref) != episode.fingerprint:
                yield f"files of episode {episode.ref.key} were touched"

    def _changes(self) -> Changes:
        """Compare the sources with the dataset as it is now."""
        seen = Seen.load(self.workspace)
        return find_changes(self.previous, self.sources, seen, rehash=self.asked.rehash, replace=self.asked.replace)

    def _plan(self, found: Changes) -> Plan:
        wanted, left_out = split_wanted(found.new, self.recipe, self.readers)
        names = [f"{source.name}/{ref.key}" for source in self.sources for ref in source.index.episodes]
        taken = take(wanted, names, self.asked.episodes, self.asked.limit)
        self.num_waiting = len(wanted) - len(taken)
        faults = [*all_faults(self.sources), *found.duplicates, *left_out]
        if self.previous is None:
            indexes = indexes_of(self.sources, taken)
            if not any(index.episodes for index in indexes):
                return self._empty_plan(faults)
            bindings = bind(self.recipe, indexes)
            shard_steps = self.asked.shard_steps or default_shard_steps(self.recipe, bindings)
        else:
            refuse_other_recipe(self.previous, self.recipe, self.asked.shard_steps)
            bindings = bindings_from_json(self.previous.attributes["bindings"])
            refuse_other_layout(self.previous, self.recipe, bindings)
            shard_steps = self.previous.shard_steps
        accepted: list[tuple[str, EpisodeRef, str]] = []
        for name, ref, mark in taken:
            with locate(source=name):
                fault = usable(ref, self.recipe, bindings)
            if fault is None:
                accepted.append((name, ref, mark))
            else:
                faults.append((name, fault))
        refused = [row for row in faults if row[1].is_refusal]
        if refused and self.recipe.on_bad_frame == "stop":
            source, first = refused[0]
            raise SourceError(
                f"{first.message} (the recipe says stop)", first.reason, source=source, episode=first.episode
            )
        placed, more = self._place(accepted)
        placed = [replace(episode, replaces=found.replaced.get(episode.name, -1)) for episode in placed]
        return Plan(
            generation=self.previous.generation + 1 if self.previous else 1,
            first_step=self.previous.num_steps if self.previous else 0,
            first_episode=self.previous.num_episodes if self.previous else 0,
            shard_steps=shard_steps,
            recipe=self.recipe,
            bindings=bindings,
            sources=tuple(self.readers),
            episodes=tuple(placed),
            faults=tuple(faults + more),
            maps=self._maps(accepted, bindings),
        )

    def _place(
        self, accepted: list[tuple[str, EpisodeRef, str]]
    ) -> tuple[list[PlannedEpisode], list[tuple[str, Fault]]]:
        """Lay episodes end to end; one whose length on the grid cannot be known is refused."""
        placed: list[PlannedEpisode] = []
        faults: list[tuple[str, Fault]] = []
        start = self.previous.num_steps if self.previous else 0
        for source, ref, mark in accepted:
            try:
                placed += place([(source, ref, mark)], self.recipe, start, self.readers.__getitem__)
                start = placed[-1].stop
            except SourceError as error:
                faults.append((source, Fault(reason=error.reason, message=error.message, episode=ref.key)))
        return placed, faults

    def _maps(self, accepted: list[tuple[str, EpisodeRef, str]], bindings: Bindings) -> tuple[tuple[str, str], ...]:
        """Digest the maps of the episodes' towns; another map than the one of earlier generations is refused."""
        if self.recipe.planner is None or bindings.tensors:
            return ()
        from pipeline.planner_rows import map_digest, require_tracks

        if not self.asked.map:
            raise UsageError("expected a map for a planner recipe, found none; add --map FILE.xodr or a folder of them")
        for name in dict.fromkeys(source for source, _, _ in accepted):
            require_tracks(self.readers[name])
        known = dict(self.previous.attributes.get("maps", {})) if self.previous is not None else {}
        towns = dict.fromkeys(str(ref.details.get("town", "")) for _, ref, _ in accepted)
        found = {town: map_digest(self.asked.map, town) for town in towns}
        changed = [town for town in found if known.get(town, found[town]) != found[town]]
        if changed:
            raise PlanError(f"expected the maps that the dataset was made with, found others of {changed}; give those")
        return tuple(sorted({**known, **found}.items()))

    def _empty_plan(self, faults: list[tuple[str, Fault]]) -> Plan:
        return Plan(
            generation=1,
            first_step=0,
            first_episode=0,
            shard_steps=1,
            recipe=self.recipe,
            bindings=Bindings({}, {}, {}),
            sources=tuple(self.readers),
            episodes=(),
            faults=tuple(faults),
        )

    def _make(self, plan: Plan, found: Changes, lock: Lock) -> ConvertReport:
        """Run what the journal does not name, then commit."""
        self.workspace.prepare()
        journal = Journal(self.workspace.journal)
        records = journal.open()
        results, sources = finished_tasks(self.root, plan, records, self.workspace)
        if lost := len(records) - len(results) - len(sources):
            self.watch.mismatched(lost)
        reused = len(results)
        cost = estimate(plan, self.asked.cluster.num_workers, self.root)
        if not reused:
            refuse_if_too_large(cost, plan.recipe.frames.codec)
        self.watch.planned(plan, cost, reused)
        try:
            tasks = Tasks(self.root, plan, self.readers, self.previous, map_path=self.asked.map)
            run_tasks(tasks, results, sources, journal=journal, lock=lock, options=self.asked.cluster, watch=self.watch)
            self.watch.said("writing tables, committing")
            finished = Finished(
                plan=plan, root=self.root, results=results, previous=self.previous, map_path=self.asked.map
            )
            findings = examine(finished)
            commit(replace(finished, findings=findings))
        except OSError as error:
            raise _disk_error(error, self.root) from error
        finally:
            journal.close()
        self._remember(plan, found)
        self.workspace.clean()
        return self._report(plan, found, results, reused=reused, complete=True, findings=findings)

    def _remember(self, plan: Plan, found: Changes) -> None:
        before = Seen.load(self.workspace)
        marks = {"/".join(episode.name): episode.fingerprint for episode in plan.episodes}
        after = Seen({**before.marks, **found.seen.marks, **marks}, {**before.moved, **found.seen.moved})
        if after != before:
            after.save(self.workspace)

    def _report(
        self,
        plan: Plan,
        found: Changes,
        results: Mapping[int, ShardResult],
        *,
        reused: int,
        complete: bool,
        findings: Findings = NO_FINDINGS,
    ) -> ConvertReport:
        faults = {*plan.faults, *findings.faults} if plan.episodes else set()
        total = plan.num_steps if plan.episodes else (self.previous.num_steps if self.previous else 0)
        known = self.previous.num_episodes if self.previous else 0
        return ConvertReport(
            dataset=str(self.root),
            generation=plan.generation if plan.episodes else (self.previous.generation if self.previous else 0),
            complete=complete,
            num_episodes=len(plan.episodes),
            num_steps=plan.num_steps - plan.first_step if plan.episodes else 0,
            num_frames=sum(result.num_frames for result in results.values()),
            total_episodes=plan.first_episode + len(plan.episodes) if plan.episodes else known,
            total_steps=total,
            shards_written=len(results) - reused,
            shards_reused=reused,
            nbytes=sum(row.nbytes for result in results.values() for row in result.rows),
            seconds=time.monotonic() - self.began_s,
            unchanged_episodes=found.unchanged,
            moved_episodes=found.moved,
            removed_episodes=found.removed,
            replaced_episodes=tuple("/".join(episode.name) for episode in plan.episodes if episode.replaces >= 0),
            views=plan.bindings.views,
            signals=plan.bindings.signals,
            **count_reasons(fault for _, fault in faults),
            problems=tuple(sorted(fault_line(source, fault) for source, fault in faults))[:20],
            notes=(
                *(f"{name} is what the dataset has already: nothing to replace" for name in found.same),
                *([f"{self.num_waiting:,} more new episodes were not asked for"] if self.num_waiting else []),
                *(note for source in self.sources for note in source.index.notes),
                *self._planner_notes(plan),
            ),
        )

    def _planner_notes(self, plan: Plan) -> tuple[str, ...]:
        if self.recipe.planner is None or plan.bindings.tensors:
            return ()
        from pipeline.planner_rows import planner_notes

        return planner_notes(self.recipe.planner, plan.episodes)


def _disk_error(error: OSError, root: Path) -> HeadraceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PlanError(
            f"expected room on the disk of {root}, found it full; free some and run the same command again"
        )
    return PlanError(
        f"expected to write {error.filename or root}, found: {error.strerror or error}; correct it and run the same command again"
    )
