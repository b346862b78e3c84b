"""Repair: what `verify` finds damaged is put back byte for byte, from its copy, from other files, or from the recordings."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster import ClusterOptions
from pipeline.repair_files import Folder, repair_root, repair_tables
from pipeline.repair_recordings import Recordings
from pipeline.repair_shards import Remaker
from pipeline.store.metadata import ROOT_DOCUMENT, DatasetInfo, array_document
from pipeline.store.scan import Problem
from pipeline.store.tables import read_document
from pipeline.verification import UNKNOWN, verify
from pipeline.watch import Watch
from pipeline.workspace import Lock, Workspace
from schemas.errors import HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was damaged, what was repaired, and what is left."""

    ok: bool
    """Whether the dataset is sound now: all of it was verified again."""
    damaged: tuple[Problem, ...]
    repaired: tuple[str, ...]
    """Files that were put back, each byte for byte what was committed."""
    moved: tuple[str, ...]
    """``path -> where`` of files that are no part of the dataset; nothing is deleted."""
    left: tuple[Problem, ...]
    """What still is damaged, and why it could not be repaired."""


def repair(
    path: str | Path,
    raw: str | Path | Sequence[str | Path] = (),
    *,
    format: str = "",
    reader: Mapping[str, str] | None = None,
    map: str = "",
    cluster: ClusterOptions = ClusterOptions(),
    watch: Watch | None = None,
) -> RepairReport:
    """Repair a dataset: rewrite exactly what is damaged, from its recordings where nothing else holds it, and verify all of it.

    Every file is compared with what was committed before it takes its place, at once and whole: a repair that is killed, or
    whose recordings changed, leaves nothing worse than it found.

    Parameters
    ----------
    path
        The dataset.
    raw
        The folders that it was converted from; moved and renamed recordings are known by content.
    format, reader, map, cluster
        As for :func:`~pipeline.conversion.convert`.
    watch
        Sees what is going on.

    Raises
    ------
    DatasetError
        There is no dataset at ``path``, or its root's metadata are lost with their copies.
    LockedError
        Another run holds the dataset.
    """
    root = Path(path).expanduser().resolve()
    if not (root / "_tables").is_dir():
        verify(root, quick=True)  # raises, saying what is there instead
    paths = [raw] if isinstance(raw, str | Path) else list(raw)
    recordings = Recordings(paths, format, reader or {}, map)
    with Lock(Workspace(root)) as lock:
        return _Repair(Folder(root), Remaker(recordings, cluster, lock, watch or Watch())).run()


class _Repair:
    """One run."""

    def __init__(self, folder: Folder, remaker: Remaker) -> None:
        self.folder, self.remaker = folder, remaker
        self.reasons: dict[str, str] = {}

    def run(self) -> RepairReport:
        root, tmp = self.folder.root, self.folder.tmp
        shutil.rmtree(tmp, ignore_errors=True)  # of runs that died: the lock is ours
        try:
            before = verify(root, quick=True).problems
            info = repair_root(self.folder)
            repair_tables(self.folder, info)
            damaged = _distinct([*before, *verify(root).problems])
            self._repair(info, damaged)
            after = verify(root).problems if damaged else ()
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
        left = tuple(self._explained(problem) for problem in after)
        return RepairReport(
            ok=not after,
            damaged=tuple(damaged),
            repaired=tuple(dict.fromkeys(self.folder.repaired)),
            moved=tuple(self.folder.moved),
            left=left,
        )

    def _repair(self, info: DatasetInfo, damaged: Sequence[Problem]) -> None:
        for name, spec in info.arrays.items():
            path = f"{name}/{ROOT_DOCUMENT}"
            if any(problem.path == path for problem in damaged):
                self.folder.put_bytes(path, array_document(spec, info.lengths[name]))
        if self._holds_manifest(info):
            self.reasons.update(self.remaker.remake(self.folder, info, damaged))
        for problem in damaged:
            if problem.message == UNKNOWN:
                self.folder.move_away(problem.path)

    def _holds_manifest(self, info: DatasetInfo) -> bool:
        """Whether the tables are there by which everything that is made again is judged."""
        for name in ("manifest", "episodes"):
            try:
                read_document(info, name)
            except HeadraceError as error:
                message = f"{error.message.partition(';')[0]}; its copy is lost too: restore it from a backup, or convert into a new folder"
                self.reasons[info.tables[name].path] = message
        return not self.reasons

    def _explained(self, problem: Problem) -> Problem:
        why = self.reasons.get(problem.path)
        if why is None:
            return problem
        return Problem(array=problem.array, start=problem.start, stop=problem.stop, path=problem.path, message=why)


def _distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Drop what a quick look and a thorough one say of the same file in the same words."""
    return list(dict.fromkeys(problems))
