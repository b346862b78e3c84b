"""The recordings that a dataset was made from, found again by their content."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.incremental import Contents, Files, episode_files, places_of, read_files
from pipeline.plan import Plan, PlannedEpisode, bindings_from_json
from pipeline.sources import Source, all_faults, open_sources
from pipeline.store.metadata import DatasetInfo
from pipeline.store.tables import read_table
from schemas.recipe import recipe_from_mapping
from schemas.source import EpisodeRef


@dataclass(frozen=True, slots=True)
class Recordings:
    """Where the recordings lie, and how to read them: what `convert` was told of them."""

    paths: Sequence[str | Path]
    format: str
    reader: Mapping[str, str]
    map: str


class Replay:
    """All episodes of a dataset as one plan, and which of them have their recordings.

    Every shard is a function of the steps that it holds and of nothing else, so that one plan of all generations makes the same
    shards as the plans that made the dataset one after the other.
    """

    def __init__(self, info: DatasetInfo, recordings: Recordings) -> None:
        self.info, self.recordings = info, recordings
        self.sources: list[Source] = []
        self.files = episode_files(info)
        self.rows = read_table(info, "episodes", ["source", "key", "start", "stop", "rate_hz"]).to_pylist()
        self.found: dict[int, tuple[Source, EpisodeRef]] = {}
        self.missing: dict[int, str] = {}

    def look_for(self, wanted: Iterable[int]) -> None:
        """Find the recordings of some episodes: by name, else by content; ``missing`` says of the others what differs."""
        wanted = [number for number in wanted if number not in self.found and number not in self.missing]
        if not wanted:
            return
        asked = self.recordings
        if not self.sources and asked.paths:
            self.sources = open_sources(asked.paths, asked.format, asked.reader)
        present = {
            f"{source.name}/{ref.key}": (source, ref) for source in self.sources for ref in source.index.episodes
        }
        for number in wanted:
            name = self.name(number)
            if name not in present:
                self.missing[number] = f"the recording {name} is not in the raw folders given"
                continue
            difference = _difference(self.files[number], read_files(*present[name]))
            if difference:
                self.missing[number] = f"the recording {name} is not what was converted: {difference}"
            else:
                self.found[number] = present[name]
        self._look_by_content({number for number in wanted if number in self.missing}, present)

    def _look_by_content(self, wanted: set[int], present: Mapping[str, tuple[Source, EpisodeRef]]) -> None:
        if not wanted:
            return
        contents = Contents({str(number): files for number, files in enumerate(self.files)})
        places = places_of(present)
        for name, (source, ref) in present.items():
            number = contents.find(source, ref, places[name])
            if number and int(number) in wanted:
                self.found[int(number)] = source, ref
                self.missing.pop(int(number), None)

    def name(self, number: int) -> str:
        """Return ``source/key`` of an episode."""
        return f"{self.rows[number]['source']}/{self.rows[number]['key']}"

    def plan(self) -> Plan:
        """Return the plan; an episode whose recording was not looked for has no streams in it."""
        info = self.info
        episodes = []
        for number, row in enumerate(self.rows):
            nothing = EpisodeRef(key=row["key"], num_steps=0, rate_hz=row["rate_hz"], views=(), signals=())
            source, ref = self.found.get(number, (None, nothing))
            planned = PlannedEpisode(
                source=source.name if source is not None else row["source"],
                ref=ref,
                start=row["start"],
                num_steps=row["stop"] - row["start"],
                rate_hz=row["rate_hz"],
                fingerprint="",
            )
            episodes.append(planned)
        return Plan(
            generation=info.generation,
            first_step=0,
            first_episode=0,
            shard_steps=info.shard_steps,
            recipe=recipe_from_mapping({**info.recipe, "on_bad_frame": self._policy()}, info.recipe["name"]),
            bindings=bindings_from_json(info.attributes["bindings"]),
            sources=tuple(source.name for source in self.sources),
            episodes=tuple(episodes),
            faults=tuple(all_faults(self.sources)),
            maps=tuple(info.attributes.get("maps", {}).items()),
        )

    def _policy(self) -> str:
        """Return what happens to a bad frame: what was converted was not stopped by any."""
        policy = str(self.info.recipe.get("on_bad_frame", "mask"))
        return "mask" if policy == "stop" else policy

    @property
    def readers(self) -> dict[str, object]:
        """Readers by the name of their source."""
        return {source.name: source.reader for source in self.sources}


def _difference(before: Files, now: Files) -> str:
    """Say how files differ from what they were; empty where they do not."""
    if before == now:
        return ""
    if len(before) != len(now):
        return f"expected {len(before)} files, found {len(now)}"
    for (old_path, old_nbytes, old_xxh3), (path, nbytes, xxh3) in zip(before, now, strict=True):
        if (old_path, old_nbytes, old_xxh3) != (path, nbytes, xxh3):
            found = "none that can be read" if nbytes < 0 else f"{path} of {nbytes} bytes and xxh3 {xxh3}"
            return f"expected {old_path} of {old_nbytes} bytes and xxh3 {old_xxh3}, found {found}"
    return ""
