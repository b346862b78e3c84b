"""Second copies of what cannot be made again from other files: the root's metadata and the tables, ``steps`` aside."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.store.atomic import read_regular, write_atomic
from pipeline.store.metadata import COPIES, ROOT_DOCUMENT, DatasetInfo, TableRef, root_copy
from pipeline.store.tables import read_document

UNCOPIED = ("steps",)
"""As large as the arrays of rows, and made again from them."""


def copied_tables(info: DatasetInfo) -> Mapping[str, TableRef]:
    """Return ``table -> its copy`` of all tables that have one."""
    return {
        name: TableRef(path=f"{COPIES}/{Path(ref.path).name}", nbytes=ref.nbytes, xxh3=ref.xxh3)
        for name, ref in info.tables.items()
        if name not in UNCOPIED
    }


def copy_paths(info: DatasetInfo) -> list[str]:
    """Return the paths of all copies of a generation, relative to the dataset; the root's is the last."""
    return [*(ref.path for ref in copied_tables(info).values()), root_copy(info.generation)]


def write_copies(info: DatasetInfo, tmp: Path) -> None:
    """Write the copies that are absent. The root's is the last, so that it proves that its generation was committed."""
    for name, ref in copied_tables(info).items():
        if not (info.root / ref.path).exists():
            write_atomic(info.root / ref.path, read_document(info, name), tmp)
    if not (info.root / root_copy(info.generation)).exists():
        write_atomic(info.root / root_copy(info.generation), read_regular(info.root / ROOT_DOCUMENT), tmp)
