"""Which recordings a folder of bags holds: files of their own, and folders of ROS 2 whose files follow one another."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.readers.bag_index import SUFFIXES
from pipeline.readers.folders import Folder, list_folder, misplaced, natural_key, read_inside, walk_folders
from pipeline.readers.metadata import as_text
from schemas.errors import Reason, SourceError
from schemas.source import Fault

METADATA = "metadata.yaml"
PACKED = (".db3.zstd", ".mcap.zstd")
_FILE = re.compile(r"^ *- +\"?([^\s\"/]+(?:\.db3|\.mcap)(?:\.zstd)?)\"?\s*$", re.MULTILINE)
_COUNT = re.compile(r"^  message_count: *(\d{1,18})\s*$", re.MULTILINE)
_MAX_NBYTES = 2**24


@dataclass(frozen=True, slots=True)
class Recording:
    """The files of one episode."""

    key: str
    paths: tuple[str, ...]
    """In order, relative to the source."""
    metadata: str = ""
    """The file that describes it; empty where there is none."""
    num_messages: int = -1
    """That the metadata tells of; -1 where none does."""


def find_recordings(root: Path) -> Iterator[Recording | Fault]:
    """Yield the recordings at or below ``root`` in natural order, and what was refused."""
    for folder in walk_folders(root, lambda _: True):
        if isinstance(folder, Fault):
            yield folder
            continue
        yield from (fault for fault in misplaced(folder, (METADATA, *SUFFIXES)) if not _holds_bags(root, fault.path))
        names = sorted(folder.files, key=natural_key)
        for name in names:
            if name.endswith(PACKED):
                message = f"expected a bag that is not packed as a whole, found {name}; run zstd -d"
                yield Fault(reason=Reason.UNSUPPORTED, message=message, path=folder.join(name))
        found = [name for name in names if name.endswith(SUFFIXES)]
        parts = [name for name in found if name.endswith((".db3", ".mcap"))]
        if METADATA in folder.files and parts:
            yield from _described(root, folder, parts)
            found = [name for name in found if name not in parts]
        for name in found:
            path = folder.join(name)
            yield Recording(_stem(path), (path,))


def _holds_bags(root: Path, path: str) -> bool:
    """Return whether a folder is called like a bag because it is a recording of ROS 2 itself."""
    try:
        return any(name.endswith((METADATA, *SUFFIXES)) for name in list_folder(root, path).names)
    except SourceError:
        return True  # who walks into it says that it cannot be listed


def _stem(path: str) -> str:
    return as_text(next(path.removesuffix(suffix) for suffix in SUFFIXES if path.endswith(suffix)))


def _described(root: Path, folder: Folder, parts: list[str]) -> Iterator[Recording | Fault]:
    """Yield the recording of a folder with metadata, and a fault for each file of it that is not there.

    The few lines that matter are looked for, so that no YAML is interpreted.
    """
    key, path = as_text(folder.path or root.name), folder.join(METADATA)
    try:
        text = read_inside(root, path, _MAX_NBYTES).decode("utf-8", "replace")
    except SourceError as error:
        yield Fault(reason=error.reason, message=error.message, episode=key, path=path, is_warning=True)
        text = ""
    for name in dict.fromkeys(_FILE.findall(text)):
        if name not in folder.files:
            message = (
                f"expected the file {as_text(name)!r} of {METADATA}, found none; copy it, what it holds is missing"
            )
            yield Fault(reason=Reason.MISSING_FILE, message=message, episode=key, path=path)
    count = _COUNT.search(text)
    paths = tuple(folder.join(name) for name in parts)
    yield Recording(key, paths, path, int(count[1]) if count else -1)
