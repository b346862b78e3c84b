"""Old generations of a dataset: kept so that readers that opened one go on, removed when asked."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.store.atomic import sync_folder
from pipeline.store.copies import kept_generations, write_copies
from pipeline.store.metadata import COPIES, TABLES, read_info
from pipeline.workspace import Lock, Workspace
from schemas.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed."""

    generation: int
    """The one that stays."""
    paths: tuple[str, ...]
    """Relative to the dataset."""
    nbytes: int


def remove_old_generations(path: str | Path) -> Removed:
    """Remove the tables, and their copies, of all generations but the committed one.

    Shards are shared by generations and stay. A process that opened an older generation keeps what it has read, and finds
    no tables of it any more.

    Raises
    ------
    DatasetError
        Not a finished dataset.
    PlanError
        A conversion is unfinished: finish it first.
    LockedError
        A conversion is running.
    """
    root = Path(path)
    info = read_info(root)
    workspace = Workspace(root)
    with Lock(workspace):
        if workspace.plan.exists():
            raise PlanError(
                "expected no unfinished conversion, found one; run the same `headrace convert` again, then this"
            )
        write_copies(info, workspace.tmp)
        kept = kept_generations(info)[0].files
        present = [f"{folder}/{file.name}" for folder in (TABLES, COPIES) for file in (root / folder).iterdir()]
        old = sorted(path for path in present if path not in kept)
        nbytes = sum((root / path).stat().st_size for path in old)
        for path in old:
            (root / path).unlink()
        for folder in (TABLES, COPIES):
            sync_folder(root / folder)
        workspace.clean()
    return Removed(generation=info.generation, paths=tuple(old), nbytes=nbytes)
