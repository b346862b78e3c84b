"""Whole files of a dataset put back: each checked by size and digest before it gets its name, nothing of others lost."""

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from pipeline.store.atomic import AtomicFile, make_folder, open_regular, sync_folder
from pipeline.store.copies import kept_generations, numbers_in
from pipeline.store.metadata import COPIES, ROOT_DOCUMENT, DatasetInfo, TableRef, read_info, root_copies, whole_copy
from pipeline.workspace import Workspace
from schemas.errors import DatasetError

_BLOCK_NBYTES = 4 * 2**20


class Folder:
    """A dataset under repair: what is found, put back and moved away in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = Workspace(root)
        self.tmp = self.workspace.tmp
        self.repaired: list[str] = []
        self.moved: list[str] = []

    def holds(self, path: str, ref: TableRef) -> bool:
        """Whether ``path`` is the file that ``ref`` describes."""
        try:
            return (self.root / path).stat().st_size == ref.nbytes and _xxh3(self.root / path) == ref.xxh3
        except OSError:
            return False

    def fetch(self, path: str, ref: TableRef) -> AtomicFile | None:
        """Return the content of ``ref`` as a finished file without its name yet, wherever in the dataset it lies; or None.

        Two files that were swapped, and one that was renamed, come back by this alone.
        """
        for candidate in self._of_size(ref.nbytes):
            file = AtomicFile(self.root / path, self.tmp)
            try:
                for block in _blocks(candidate):
                    file.write(block)
            except OSError:
                file.discard()
                continue
            if file.xxh3() == ref.xxh3:
                return file
            file.discard()
        return None

    def put(self, path: str, file: AtomicFile) -> None:
        """Give a finished file its name; what is no file there is moved away first."""
        self._clear(path)
        file.commit()
        self.repaired.append(path)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self._clear(path)
        with AtomicFile(self.root / path, self.tmp) as file:
            file.write(data)
            file.commit()
        self.repaired.append(path)

    def put_made(self, path: str, made: Path) -> None:
        """Give a durable file from the scratch folder its place in the dataset."""
        self._clear(path)
        make_folder((self.root / path).parent)
        os.replace(made, self.root / path)
        sync_folder((self.root / path).parent)
        self.repaired.append(path)

    def move_away(self, path: str) -> None:
        """Move what is no part of the dataset beside it: whoever put it there may want it."""
        if not os.path.lexists(self.root / path):
            return  # the folder it was in has been moved away
        target = self._free_place(path)
        os.rename(self.root / path, target)
        sync_folder((self.root / path).parent)
        self.moved.append(f"{path} -> {target}")

    def _free_place(self, path: str) -> Path:
        """Return where to move a file: below ``OUT.work/unknown``, or ``unknown.1``, ... where an earlier one is in the way."""
        for number in itertools.count():
            target = self.workspace.folder / (f"unknown.{number}" if number else "unknown") / path
            try:
                make_folder(target.parent)
            except (FileExistsError, NotADirectoryError):
                continue
            if not os.path.lexists(target):
                break
        return target

    def _clear(self, path: str) -> None:
        for part in reversed([Path(path), *Path(path).parents][:-1]):
            try:
                status = os.lstat(self.root / part)
            except FileNotFoundError:
                return
            is_right = stat.S_ISREG(status.st_mode) if part == Path(path) else stat.S_ISDIR(status.st_mode)
            if not is_right:
                self.move_away(part.as_posix())
                return

    def _of_size(self, nbytes: int) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root):
            for name in sorted(names):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode) and status.st_size == nbytes:
                    yield Path(folder, name)


def repair_root(folder: Folder) -> DatasetInfo:
    """Return the committed generation, its root metadata put back from its copy where they are damaged.

    Raises
    ------
    DatasetError
        Neither the root's metadata nor a copy of the newest generation is whole.
    """
    problem: DatasetError | None = None
    try:
        return read_info(folder.root)
    except DatasetError as error:
        problem = error
    numbers = sorted(numbers_in(folder.root), reverse=True)
    copies = (whole_copy(folder.root, number) for number in numbers)
    found = next((copy for copy in copies if copy is not None), None)
    if found is None:
        raise DatasetError(
            f"expected the root's metadata or a copy in {COPIES}, found neither whole ({problem.message}); "
            "restore zarr.json from a backup, or convert into a new folder",
            file=folder.root / ROOT_DOCUMENT,
        ) from problem
    info, document = found
    if numbers[0] > info.generation and not folder.workspace.plan.exists():
        raise DatasetError(
            f"expected a copy of the root of generation {numbers[0]}, found that of {info.generation} only; "
            "restore zarr.json from a backup, or convert into a new folder",
            file=folder.root / root_copies(numbers[0])[1],
        ) from problem
    folder.put_bytes(ROOT_DOCUMENT, document)
    return read_info(folder.root)


def repair_tables(folder: Folder, info: DatasetInfo) -> None:
    """Put back tables and copies, older ones too, that are not what their root says, from wherever their content lies."""
    wanted = [ref for generation in kept_generations(info) for ref in generation.files.values()]
    damaged = [ref for ref in wanted if not folder.holds(ref.path, ref)]
    fetched = [(ref.path, folder.fetch(ref.path, ref)) for ref in damaged]  # all, before the first is overwritten
    for path, file in fetched:
        if file is not None:
            folder.put(path, file)


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_128()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while block := file.read(_BLOCK_NBYTES):
            yield block
