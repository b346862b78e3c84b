"""Export planner samples as Diffusion Planner's own cache: one ``.npz`` a sample, and the list file that its training reads."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.planner_blocks import PlannerBlocks, pieces
from pipeline.readers.npz_files import decode_text, npz_bytes
from pipeline.store.atomic import make_folder, sync_folder, write_atomic, xxh3_hex
from pipeline.store.tables import read_table
from pipeline.workspace import read_json, write_json
from schemas.errors import DatasetError, UsageError
from schemas.planner import TENSORS
from schemas.source import TEXT

LIST = "diffusion_planner_training.json"
"""Names of all files, as a flat JSON list: written last, so that a cache that has it is whole."""
_STATE = ".unfinished.json"
_TMP = ".unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerExportReport:
    """What was exported, and what was not."""

    target: str
    num_samples: int
    """Files of the cache."""
    num_resumed: int
    """Those of them that an earlier run had written."""
    arrays: tuple[str, ...]
    """Of each file, in order."""
    left_out: Mapping[str, int]
    """``why -> steps``: ``short-future`` of samples whose future was not recorded whole, which the model has no mask for."""


def export_planner(
    out: str | Path, target: str | Path, *, progress: Callable[[int, int], None] | None = None
) -> PlannerExportReport:
    """Export the samples of the dataset ``out`` into the folder ``target``, in their units. The same call again finishes what was interrupted.

    Each file appears whole or not at all. A dataset that was packed from a cache gives its files back, array by array; one that was made
    of recordings gives ``<map>_<token>.npz`` with the contract's arrays, the token being a digest of source, episode and step.

    Parameters
    ----------
    progress
        Called with the samples written and their number.

    Raises
    ------
    UsageError
        ``target`` is there already, and not an unfinished export of this dataset.
    DatasetError
        Not a planner dataset, a damaged one, or one without a sample to export.
    """
    source = _Source(Path(out).expanduser())
    place = Path(target).expanduser().absolute()
    done = _begin(place, source.blocks)
    num_done = done
    for steps in pieces(source.steps[done:]):
        source.write(place, steps)
        num_done += len(steps)
        write_json(place / _STATE, {**_identity(source.blocks), "num_done": num_done}, place / _TMP)
        if progress is not None:
            progress(num_done, source.num)
    names = [name for steps in pieces(source.steps) for name in source.names(steps)]
    write_atomic(place / LIST, json.dumps(names, indent=0).encode(), place / _TMP)
    (place / _STATE).unlink()
    shutil.rmtree(place / _TMP)
    sync_folder(place)
    return PlannerExportReport(
        target=str(place),
        num_samples=source.num,
        num_resumed=done,
        arrays=source.arrays,
        left_out={"short-future": len(source.blocks.anchors) - source.num},
    )


def _identity(blocks: PlannerBlocks) -> dict[str, Any]:
    return {"dataset": blocks.info.attributes["metadata_xxh3"]}


def _begin(place: Path, blocks: PlannerBlocks) -> int:
    """Make the folder, or find how many samples an interrupted run of the same export has written."""
    if blocks.info.root.resolve() in place.resolve().parents:
        raise UsageError(f"expected a folder outside the dataset, found {place}; choose another place")
    state = place / _STATE
    if state.is_file():
        found = read_json(state, "the state of an unfinished export")
        if {"dataset": found.get("dataset")} != _identity(blocks):
            raise UsageError(
                f"expected an unfinished export of this dataset in {place}, found one of another; remove it"
            )
        return int(found["num_done"])
    if place.exists() or place.is_symlink():
        raise UsageError(f"expected a new folder, found {place} there already; remove it, or choose another place")
    make_folder(place)
    write_json(state, {**_identity(blocks), "num_done": 0}, place / _TMP)
    return 0


class _Source:
    """The dataset, and what of it is exported."""

    def __init__(self, out: Path) -> None:
        self.blocks = PlannerBlocks(out)
        info = self.blocks.info
        packed = tuple(tensor["name"] for tensor in info.attributes.get("bindings", {}).get("tensors", ()))
        self._is_packed = bool(packed)
        self.arrays = packed or ("map_name", "token", *TENSORS)
        self.steps: Int64[np.ndarray, " sample"] = self.blocks.anchors if packed else self.blocks.whole()
        self.num = len(self.steps)
        if not self.num:
            raise DatasetError(
                f"expected a sample to export, found none of {info.num_steps} steps; see the quarantine table"
            )
        self._texts = {name for name in packed if dict(info.arrays[name].attributes).get("encoding") == TEXT}
        table = read_table(info, "episodes", ["source", "key", "start", "stop", "details"])
        self._episodes = table.select(["source", "key", "details"])
        self._starts, self._stops = (np.asarray(table[name].to_numpy(), np.int64) for name in ("start", "stop"))
        self._has_sources = len(set(table["source"].to_pylist())) > 1

    def names(self, steps: Int64[np.ndarray, " sample"]) -> list[str]:
        """Return the file of each sample, relative to the cache."""
        return [name for name, _, _ in self._identities(steps)]

    def write(self, place: Path, steps: Int64[np.ndarray, " sample"]) -> None:
        """Write the files of some samples, and make them durable."""
        stored = self.arrays if self._is_packed else TENSORS
        block = self.blocks.read(stored, steps)
        folders = set()
        for row, (name, town, token) in enumerate(self._identities(steps)):
            made = {"map_name": np.array(town), "token": np.array(token)}
            arrays = {key: self._array(key, block[key][row]) if key in block else made[key] for key in self.arrays}
            path = place / name
            if path.parent not in folders:
                make_folder(path.parent)
                folders.add(path.parent)
            _write(path, npz_bytes(arrays), place / _TMP)
        for folder in folders:
            sync_folder(folder)

    def _array(self, name: str, row: np.ndarray) -> np.ndarray:
        return np.array(decode_text(row)) if name in self._texts else np.asarray(row)

    def _identities(self, steps: Int64[np.ndarray, " sample"]) -> Iterator[tuple[str, str, str]]:
        """Yield ``(file, map, token)`` of samples in step order; a packed one's map and token are arrays of its own."""
        episodes = np.searchsorted(self._stops, steps, side="right")
        for episode in np.unique(episodes).tolist():
            told = self._episodes.slice(episode, 1).to_pylist()[0]
            details = json.loads(told["details"] or "{}")
            files = str(details["files"]).split("\n") if self._is_packed else []
            for step in (steps[episodes == episode] - self._starts[episode]).tolist():
                if files:
                    yield _safe(f"{told['source']}/{files[step]}" if self._has_sources else files[step]), "", ""
                    continue
                town = str(details.get("town", ""))
                token = xxh3_hex(f"{told['source']}/{told['key']}/{step}".encode())[:16]
                yield _safe(f"{town.replace('/', '-')}_{token}.npz"), town, token


def _safe(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.name in (LIST, _STATE) or path.parts[0] == _TMP:
        raise DatasetError(f"expected file names within the cache, found {name!r}; pack the cache again")
    return name


def _write(path: Path, data: bytes, tmp: Path) -> None:
    """Give ``path`` its content at once; its folder is made durable once for many files."""
    temporary = tmp / "sample"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
