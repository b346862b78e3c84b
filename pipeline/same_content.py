"""Whether an episode is what was converted, though a file that it shares with others is not: a file that grew."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.commit_rows import Finished, Parts
from pipeline.jobs import Tasks
from pipeline.plan import Plan, bindings_from_json, place, usable
from pipeline.shard_task import write_shard
from pipeline.sources import Source
from pipeline.store.metadata import DatasetInfo
from pipeline.store.tables import read_table
from schemas.errors import SourceError
from schemas.recipe import recipe_from_mapping
from schemas.source import EpisodeRef

_COLUMNS = ["source", "key", "start", "stop", "digest", "instructions", "replaced_by"]


class SharedContent:
    """Compares episodes by what they would become with what they became; only those that share a file are ever read.

    Parameters
    ----------
    previous
        The dataset, None where there is none yet.
    present
        ``source/key -> source, episode`` of what the raw folders hold now.
    """

    def __init__(self, previous: DatasetInfo | None, present: Mapping[str, tuple[Source, EpisodeRef]]) -> None:
        self._previous, self._present = previous, present
        self._uses: Counter[tuple[str, Path]] | None = None
        self._rows: dict[str, dict[str, Any]] = {}

    def is_same(self, name: str) -> bool:
        """Convert the episode ``name`` again in a temporary folder, in this process, and compare its digest and instructions.

        False, unread, for one that has its files to itself, and in datasets of planner tensors, which need maps.
        """
        previous, (source, ref) = self._previous, self._present[name]
        if previous is None or not self._shares_a_file(source, ref):
            return False
        row = self._row(previous, name)
        recipe = recipe_from_mapping(previous.recipe, previous.recipe["name"])
        recipe = replace(recipe, on_bad_frame="mask" if recipe.on_bad_frame == "stop" else recipe.on_bad_frame)
        bindings = bindings_from_json(previous.attributes["bindings"])
        if recipe.planner is not None or list(ref.instructions) != row["instructions"]:
            return False
        try:
            episodes = tuple(place([(source.name, ref, "")], recipe, 0, lambda _: source.reader))
            if usable(ref, recipe, bindings) or episodes[0].num_steps != row["stop"] - row["start"]:
                return False
            plan = Plan(
                generation=1,
                first_step=0,
                first_episode=0,
                shard_steps=previous.shard_steps,
                recipe=recipe,
                bindings=bindings,
                sources=(source.name,),
                episodes=episodes,
            )
            return _digest(plan, source) == row["digest"]
        except SourceError:  # what cannot be read is not what was converted
            return False

    def _shares_a_file(self, source: Source, ref: EpisodeRef) -> bool:
        if self._uses is None:
            self._uses = Counter(
                (other.name, path) for other, episode in self._present.values() for path in other.reader.files(episode)
            )
        return any(self._uses[source.name, path] > 1 for path in source.reader.files(ref))

    def _row(self, previous: DatasetInfo, name: str) -> dict[str, Any]:
        if not self._rows:
            rows = read_table(previous, "episodes", _COLUMNS).to_pylist()
            self._rows = {f"{row['source']}/{row['key']}": row for row in rows if row["replaced_by"] < 0}
        return self._rows[name]


def _digest(plan: Plan, source: Source) -> str:
    """Return the digest of the one episode of a plan, converted shard by shard and forgotten."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        root = Path(folder) / "episode"
        tasks, results = Tasks(root, plan, {source.name: source.reader}, None), {}
        for shard in plan.shards:
            results[shard] = write_shard(tasks.job(shard))
            for row in results[shard].rows:
                (root / row.path).unlink()
        ((digest, _),) = Parts(Finished(plan=plan, root=root, results=results, previous=None)).episodes()
    return digest
