"""What a dataset, an unfinished plan and the sources have in common, and what changed between them."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.sources import Source, read_provenance
from pipeline.store.metadata import ROOT_DOCUMENT, DatasetInfo, read_info
from pipeline.store.tables import manifest_rows, read_table
from pipeline.workspace import Workspace
from schemas.errors import PlanError, UsageError
from schemas.recipe import Recipe, recipe_from_mapping, recipe_to_mapping
from schemas.source import EpisodeRef


def read_previous(root: Path, workspace: Workspace) -> DatasetInfo | None:
    """Return the committed generation, or None; refuses to write into a folder that is something else."""
    if (root / ROOT_DOCUMENT).exists():
        return read_info(root)
    if root.is_dir() and any(root.iterdir()) and not workspace.plan.exists() and not _is_ours(root):
        raise UsageError(f"expected a new folder or a dataset, found other files in {root}; choose another place")
    return None


def _is_ours(root: Path) -> bool:
    """Whether all that lies here can be what a discarded or killed first run left: array folders of shards, and tables."""
    return all(path.is_dir() and all(_is_written(file) for file in path.iterdir()) for path in root.iterdir())


def _is_written(file: Path) -> bool:
    return file.name.startswith("c.") or file.parent.name == "_tables" or file.name == ROOT_DOCUMENT


def discard_uncommitted(root: Path, previous: DatasetInfo | None) -> None:
    """Remove what a discarded run wrote and nothing names: shards beyond the committed ones, tables of no generation."""
    if not root.is_dir():
        return
    if previous is None:
        for path in root.iterdir():
            shutil.rmtree(path)
        return
    kept = {row.path for row in manifest_rows(read_table(previous, "manifest")).values()}
    for folder in (path for path in root.iterdir() if path.is_dir()):
        for file in folder.iterdir():
            name = f"{folder.name}/{file.name}"
            if file.name.startswith("c.") and name not in kept:
                file.unlink()


def known_files(previous: DatasetInfo | None) -> dict[str, set[tuple[str, int, str]]]:
    """Return ``source/key -> {(path, nbytes, xxh3)}`` of the dataset's episodes."""
    if previous is None:
        return {}
    episodes = read_table(previous, "episodes", ["source", "key"]).to_pylist()
    known: dict[str, set[tuple[str, int, str]]] = {f"{row['source']}/{row['key']}": set() for row in episodes}
    manifest = read_table(previous, "manifest", ["kind", "episode", "path", "nbytes", "xxh3"]).to_pylist()
    for row in manifest:
        if row["kind"] == "source":
            known[row["episode"]].add((row["path"], row["nbytes"], row["xxh3"]))
    return known


def same_content(source: Source, ref: EpisodeRef, known: set[tuple[str, int, str]]) -> bool:
    """Whether a touched episode still has the files, bit for bit, that were converted."""
    return set(read_provenance(source.reader, ref).files) == known


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


def recipe_differences(before: Recipe, now: Recipe) -> Iterator[str]:
    """Name what differs, policies aside: they change what happens, not what is stored."""
    old, new = _flat(recipe_to_mapping(before)), _flat(recipe_to_mapping(now))
    for key in sorted(old.keys() | new.keys()):
        if key != "on_bad_frame" and old.get(key) != new.get(key):
            yield f"{key} {old.get(key)} -> {new.get(key)}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        items = [(f"{prefix}.{item['name']}", item) for item in value]
    else:
        return {prefix: value}
    return {key: leaf for path, item in items for key, leaf in _flat(item, path).items()}
