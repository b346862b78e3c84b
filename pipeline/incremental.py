"""What a dataset, an unfinished plan and the sources have in common, and what changed between them."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from pipeline.arrays import episode_specs, frame_specs, row_specs, sample_specs
from pipeline.same_content import SharedContent
from pipeline.sources import Source, digest_file, fingerprint, forget_digests
from pipeline.store.metadata import ROOT_DOCUMENT, DatasetInfo, read_info
from pipeline.store.tables import manifest_rows, read_table
from pipeline.views import Bindings
from pipeline.workspace import Workspace, read_json, write_json
from schemas.errors import DatasetError, PlanError, Reason, UsageError
from schemas.recipe import Recipe, recipe_from_mapping, recipe_to_mapping
from schemas.source import EpisodeRef, Fault

_SHARD = re.compile(r"c(\.\d+)+")
_FIRST_TABLES = re.compile(r"(episodes|steps|tasks|manifest|quarantine)-1\.parquet|norm_stats-1\.json")


def read_previous(root: Path, workspace: Workspace) -> DatasetInfo | None:
    """Return the committed generation, or None; refuses to write into a folder that holds anything else.

    Only a plan beside it proves that a folder without root metadata is an unfinished first run. A dataset that lost its root
    metadata is damaged, and never to be written over.
    """
    if (root / ROOT_DOCUMENT).exists():
        return read_info(root)
    if not root.is_dir() or not any(root.iterdir()):
        return None
    if workspace.plan.exists() and planned_generation(workspace) == 1:
        return None
    tables = root / "_tables"
    if tables.is_dir() and any(file.name.startswith("manifest-") for file in tables.iterdir()):
        raise DatasetError(
            f"expected {ROOT_DOCUMENT} in {root}, found a dataset that lost it; run `headrace verify --repair`"
        )
    raise UsageError(f"expected a new folder or a dataset, found other files in {root}; choose another place")


def planned_generation(workspace: Workspace) -> int:
    """Return the generation that the plan in the workspace makes; 0 where it does not say."""
    plan = read_json(workspace.plan, "the plan of an unfinished run")
    return int(plan["generation"]) if isinstance(plan, dict) and isinstance(plan.get("generation"), int) else 0


def discard_uncommitted(root: Path, previous: DatasetInfo | None) -> None:
    """Remove the files that an unfinished run wrote and nothing names: shards, and of a first run its tables and metadata.

    Files of any other name, and folders that are not empty after, stay: whoever put them there, it was not a conversion.
    """
    if not root.is_dir():
        return
    kept = {row.path for row in manifest_rows(read_table(previous, "manifest")).values()} if previous else set()
    for folder in [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]:
        if previous is not None and folder.name not in previous.arrays:
            continue
        for file in list(folder.iterdir()):
            is_shard = _SHARD.fullmatch(file.name) is not None and f"{folder.name}/{file.name}" not in kept
            is_first = previous is None and (
                file.name == ROOT_DOCUMENT
                or (folder.name == "_tables" and _FIRST_TABLES.fullmatch(file.name) is not None)
            )
            if file.is_file() and (is_shard or is_first):
                file.unlink()
        if previous is None and not any(folder.iterdir()):
            folder.rmdir()


Files = tuple[tuple[str, int, str], ...]
"""``(path, nbytes, xxh3)`` of an episode's files, in its reader's order."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last run saw of the sources: a cache beside the dataset, which may be lost."""

    marks: dict[str, str]
    """``source/key -> fingerprint`` by which an untouched episode is known without reading it."""
    moved: dict[str, str]
    """``source/key now -> source/key in the dataset`` of episodes that were found again under another name."""

    @staticmethod
    def load(workspace: Workspace) -> "Seen":
        """Read the cache; an absent or damaged one is empty."""
        try:
            value = json.loads(workspace.seen.read_bytes())
            return Seen(dict(value["marks"]), dict(value["moved"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Seen({}, {})

    def save(self, workspace: Workspace) -> None:
        """Write the cache."""
        write_json(workspace.seen, {"marks": self.marks, "moved": self.moved}, workspace.tmp)


@dataclass(frozen=True, slots=True)
class Changes:
    """What the sources hold, compared with the dataset."""

    new: list[tuple[str, EpisodeRef, str]]
    """``(source, episode, fingerprint)``."""
    seen: Seen
    """What is known of the others now."""
    unchanged: int
    moved: tuple[str, ...]
    """``old -> new`` names."""
    removed: tuple[str, ...]
    duplicates: tuple[tuple[str, Fault], ...]
    """``(source, fault)`` of episodes whose content the dataset has under a name that is still there."""
    replaced: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """``(source, key) -> episode_index`` of those that a new recording is to replace."""
    same: tuple[str, ...] = ()
    """Episodes that were to be replaced, and are what the dataset has."""


NOTHING = Changes([], Seen({}, {}), 0, (), (), ())
"""No comparison was made: an unfinished plan comes first."""


def find_changes(
    previous: DatasetInfo | None,
    sources: Sequence[Source],
    seen: Seen,
    *,
    rehash: bool = False,
    replace: Sequence[str] = (),
) -> Changes:
    """Compare sources and dataset: by size and time first, then by content, so that touching, moving and renaming change nothing.

    Episodes of a file that others share, and that has changed, are compared one by one (:class:`SharedContent`): mostly it grew.

    With ``rehash`` nothing is believed by size and time. PlanError where an episode changed that ``replace`` does not name.
    """
    if rehash:
        forget_digests()
    known = known_files(previous)
    present = {f"{source.name}/{ref.key}": (source, ref) for source in sources for ref in source.index.episodes}
    marks = {name: fingerprint(source.reader, ref) for name, (source, ref) in present.items()}
    contents, shared = Contents(known), SharedContent(previous, present)
    places = places_of(present)
    asked = _named(replace, known, present)
    new, moved, duplicates, changed = [], {}, [], []
    for name, (source, ref) in present.items():
        old = name if name in known else seen.moved.get(name, "")
        if old in known and not rehash and name not in asked and seen.marks.get(name) == marks[name]:
            pass
        elif name in known:
            if read_files(source, ref) != known[name] and not shared.is_same(name):
                changed.append(name)
            continue
        else:
            old = contents.find(source, ref, places[name])
        if not old:
            new.append((source.name, ref, marks[name]))
        elif old in present and old != name:
            message = f"expected each recording once, found the content of {old!r} again; remove one of them"
            duplicates.append((source.name, Fault(reason=Reason.DUPLICATE, message=message, episode=ref.key)))
        elif old != name:
            moved[name] = old
    replaced = asked & set(changed)
    new += [(present[name][0].name, present[name][1], marks[name]) for name in changed if name in replaced]
    changed = [name for name in changed if name not in replaced]
    if changed:
        raise PlanError(
            f"expected the converted episodes to be as they were, found {len(changed)} changed: {', '.join(changed[:5])}; "
            "restore them, add --replace EPISODE for each to take the new recording, or convert into a new dataset"
        )
    accounted = {*moved.values(), *(name for name in present if name in known)}
    return Changes(
        new,
        Seen({name: mark for name, mark in marks.items() if name in known or name in moved}, moved),
        unchanged=len(accounted),
        moved=tuple(f"{old} -> {name}" for name, old in moved.items()),
        removed=tuple(sorted(known.keys() - accounted)),
        duplicates=tuple(duplicates),
        replaced={(present[name][0].name, present[name][1].key): known_numbers(previous)[name] for name in replaced},
        same=tuple(sorted(asked - replaced)),
    )


def _named(replace: Sequence[str], known: Mapping[str, Files], present: Mapping[str, Any]) -> set[str]:
    """Return the ``source/key`` names that ``--replace`` means; UsageError where it means none, several, or one that is gone."""
    names = set()
    for wanted in replace:
        found = [wanted] if wanted in known else [name for name in known if name.endswith(f"/{wanted}")]
        if len(found) != 1:
            spelled = {part for name in known for part in (name, name.rpartition("/")[2])}
            near = found or difflib.get_close_matches(wanted, sorted(spelled), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near[:5])}?" if near else "see `headrace info`"
            raise UsageError(f"expected --replace with one episode of the dataset, found {wanted!r}; {hint}")
        if found[0] not in present:
            raise UsageError(
                f"expected {found[0]} in the raw folders, to replace it by, found none; give the folder with it"
            )
        names.add(found[0])
    return names


class Contents:
    """Episodes of the dataset by what their files contain, whatever they are called."""

    def __init__(self, known: Mapping[str, Files]) -> None:
        self._names: dict[tuple[object, ...], str] = {}
        self._sizes: set[tuple[int, int]] = set()
        ordinals: Counter[tuple[str, ...]] = Counter()
        for name, files in known.items():
            # Episodes that lie in one file share its digest: which one it is, is said by its place among them.
            paths = tuple(path for path, _, _ in files)
            self._names.setdefault((ordinals[paths], *_content(files)), name)
            self._sizes.add((len(files), sum(nbytes for _, nbytes, _ in files)))
            ordinals[paths] += 1

    def find(self, source: Source, ref: EpisodeRef, place: int) -> str:
        """Return the name under which the dataset has this episode, or an empty string; files are read only if sizes agree."""
        paths = [path.as_posix() for path in source.reader.files(ref)]
        try:
            nbytes = sum((source.reader.root / path).stat().st_size for path in paths)
        except OSError:
            return ""
        if (len(paths), nbytes) not in self._sizes:
            return ""
        return self._names.get((place, *_content(read_files(source, ref))), "")


def places_of(present: Mapping[str, tuple[Source, EpisodeRef]]) -> dict[str, int]:
    """Give each episode its place among those that lie in the same files."""
    counts: Counter[tuple[str, ...]] = Counter()
    places = {}
    for name, (source, ref) in present.items():
        paths = (source.name, *(path.as_posix() for path in source.reader.files(ref)))
        places[name] = counts[paths]
        counts[paths] += 1
    return places


def _content(files: Files) -> tuple[tuple[int, str], ...]:
    return tuple((nbytes, xxh3) for _, nbytes, xxh3 in files)


def read_files(source: Source, ref: EpisodeRef) -> Files:
    """Digest the files of an episode."""
    return tuple(digest_file(source.reader.root, path) for path in source.reader.files(ref))


def known_files(previous: DatasetInfo | None) -> dict[str, Files]:
    """Return ``source/key -> files`` of the dataset's episodes, those that were replaced aside."""
    if previous is None:
        return {}
    files = episode_files(previous)
    return {name: files[number] for name, number in known_numbers(previous).items()}


def known_numbers(previous: DatasetInfo | None) -> dict[str, int]:
    """Return ``source/key -> episode_index`` of the dataset's episodes, those that were replaced aside."""
    if previous is None:
        return {}
    rows = read_table(previous, "episodes", ["source", "key", "episode_index", "replaced_by"]).to_pylist()
    return {f"{row['source']}/{row['key']}": row["episode_index"] for row in rows if row["replaced_by"] < 0}


def episode_files(info: DatasetInfo) -> list[Files]:
    """Return the files that each episode of the dataset was made from, replaced ones too."""
    found: list[list[tuple[str, int, str]]] = [[] for _ in range(info.num_episodes)]
    manifest = read_table(info, "manifest", ["kind", "episode_index", "path", "nbytes", "xxh3"])
    for row in manifest.filter(pa.compute.equal(manifest["kind"], "source")).to_pylist():
        found[row["episode_index"]].append((row["path"], row["nbytes"], row["xxh3"]))
    return [tuple(files) for files in found]


def refuse_other_recipe(previous: DatasetInfo, recipe: Recipe, shard_steps: int | None) -> None:
    """Raise PlanError, naming the differences, unless the dataset was made with this recipe."""
    stored = recipe_from_mapping(previous.recipe, previous.recipe["name"])
    differences = list(recipe_differences(stored, recipe))
    if shard_steps not in (None, previous.shard_steps):
        differences.append(f"shard_steps {previous.shard_steps} -> {shard_steps}")
    if differences:
        raise PlanError(
            f"expected the recipe that the dataset was made with, found {'; '.join(differences[:5])}; "
            "use the same recipe and flags, or convert into a new dataset"
        )


def refuse_other_layout(previous: DatasetInfo, recipe: Recipe, bindings: Bindings) -> None:
    """Raise PlanError, naming the differences, unless this version of Headrace would lay the arrays out as they are.

    The recipe may be the same and the dataset of another version: nothing may be appended in another encoding.
    """
    shard_steps, names = previous.shard_steps, dict.fromkeys(bindings.sizes, ())
    specs = [*frame_specs(recipe, bindings, shard_steps), *sample_specs(recipe, bindings, shard_steps)]
    now = {spec.name: spec for spec in [*specs, *row_specs(recipe, bindings, names), *episode_specs()]}
    differences = [f"array {name}" for name in sorted(now.keys() ^ previous.arrays.keys())]
    for name in sorted(now.keys() & previous.arrays.keys()):
        for part in ("dims", "row_shape", "dtype", "chunk_steps", "shard_steps", "codec", "valid_array"):
            stored, wanted = getattr(previous.arrays[name], part), getattr(now[name], part)
            if stored != wanted:
                differences.append(f"{part} of {name} {stored} -> {wanted}")
    if differences:
        raise PlanError(
            f"expected the arrays that this version of Headrace writes, found a dataset of another: {'; '.join(differences[:5])}; "
            "convert into a new dataset, or append with the version that made this one"
        )


UNPLANNED = ("on_bad_frame", "min_steps", "filter.")
"""Keys of a recipe, or beginnings of them, that may change under an unfinished plan: they have acted, or act at the commit."""
POLICIES = (*UNPLANNED, "checks.")
"""Those that may change between generations: they say what is taken, not what it becomes."""


def recipe_differences(before: Recipe, now: Recipe, policies: tuple[str, ...] = POLICIES) -> Iterator[str]:
    """Name what differs, ``policies`` aside."""
    old, new = _flat(recipe_to_mapping(before)), _flat(recipe_to_mapping(now))
    for key in sorted(old.keys() | new.keys()):
        if not key.startswith(policies) and old.get(key) != new.get(key):
            yield f"{key} {old.get(key)} -> {new.get(key)}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        items = [(f"{prefix}.{item['name']}", item) for item in value]
    else:
        return {prefix: value}
    return {key: leaf for path, item in items for key, leaf in _flat(item, path).items()}
