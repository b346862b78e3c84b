"""Second copies of what cannot be made again from other files: the root's metadata and the tables, ``steps`` aside."""

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.store.atomic import read_regular, write_atomic, xxh3_hex
from pipeline.store.metadata import COPIES, ROOT_DOCUMENT, TABLES, DatasetInfo, TableRef, root_copies, whole_copy
from pipeline.store.tables import read_document

UNCOPIED = ("steps",)
"""As large as the arrays of rows, and made again from them."""

TABLE_FILE = re.compile(r"(?:episodes|steps|tasks|manifest|quarantine|norm_stats|maps|zarr)-(\d+)\.(?:parquet|json)")
"""Name of a file of ``_tables`` or ``_copies``; its group is the generation."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation whose tables lie in the dataset."""

    number: int
    info: DatasetInfo | None
    """What its root's metadata say; None where no copy of them is whole."""
    files: dict[str, TableRef]
    """Its tables, their copies, and the copies of its root, by path; empty where unknown."""


def generation_files(info: DatasetInfo, document: bytes) -> dict[str, TableRef]:
    """Return ``path -> what it must be`` of all that a generation has in ``_tables`` and ``_copies``; the root's copies last.

    ``document`` are the bytes of the generation's root metadata.
    """
    refs = [*info.tables.values()]
    refs += [_at(ref, f"{COPIES}/{Path(ref.path).name}") for name, ref in info.tables.items() if name not in UNCOPIED]
    root = TableRef(path=ROOT_DOCUMENT, nbytes=len(document), xxh3=xxh3_hex(document))
    refs += [_at(root, path) for path in root_copies(info.generation)]
    return {ref.path: ref for ref in refs}


def kept_generations(info: DatasetInfo) -> list[Generation]:
    """Return the committed generation and the older ones of which any file is there, the newest first."""
    document = read_regular(info.root / ROOT_DOCUMENT)
    found = [Generation(info.generation, info, generation_files(info, document))]
    for number in sorted(numbers_in(info.root), reverse=True):
        if number < info.generation:
            older = whole_copy(info.root, number)
            found.append(
                Generation(number, older[0], generation_files(*older)) if older else Generation(number, None, {})
            )
    return found


def numbers_in(root: Path) -> set[int]:
    """Return the generations that the files of ``_tables`` and ``_copies`` are named by."""
    files = [file for name in (TABLES, COPIES) if (root / name).is_dir() for file in (root / name).iterdir()]
    return {int(found[1]) for file in files if (found := TABLE_FILE.fullmatch(file.name))}


def write_copies(info: DatasetInfo, tmp: Path) -> None:
    """Write the copies that are absent. The root's are the last, so that they prove that its generation was committed."""
    document = read_regular(info.root / ROOT_DOCUMENT)
    names = {Path(ref.path).name: name for name, ref in info.tables.items()}
    for path in generation_files(info, document):
        if not (info.root / path).exists():
            name = names.get(Path(path).name)
            write_atomic(info.root / path, document if name is None else read_document(info, name), tmp)


def _at(ref: TableRef, path: str) -> TableRef:
    return TableRef(path=path, nbytes=ref.nbytes, xxh3=ref.xxh3)
