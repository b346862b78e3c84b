"""What lies beside the recordings of one format: a source is read in one format, and what that leaves unread is said."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pipeline.readers import open_source
from pipeline.readers.folders import list_folder, natural_key
from pipeline.readers.protocol import Reader
from schemas.errors import SourceError
from schemas.source import EpisodeRef, SourceIndex

MAX_OTHERS = 50
"""Folders without a recording of the format that are looked into."""


def index_source(reader: Reader, *, is_chosen: bool = False) -> SourceIndex:
    """Return the source's index, with a note for each folder of recordings of another format below the root.

    Where the format was chosen by name (``is_chosen``), nobody needs to be told of others.
    """
    index = reader.index()
    if is_chosen or not index.episodes or reader.name == "lerobot":  # whose root is one recording
        return index
    notes = [_note(path, name, count) for path, name, count in _others(reader, index)]
    return replace(index, notes=(*index.notes, *notes)) if notes else index


def _note(path: str, name: str, count: int) -> str:
    return (
        f"{path} holds {count:,} episode{'' if count == 1 else 's'} of format {name}, which were not read: a source is read in one format; "
        f"give {path} as a source of its own"
    )


def _others(reader: Reader, index: SourceIndex) -> Iterator[tuple[str, str, int]]:
    """Yield ``(folder, format, episodes)`` of folders in which the index found nothing and another reader does."""
    for number, path in enumerate(_unclaimed(reader, index)):
        if number == MAX_OTHERS:
            return
        try:
            other = open_source(reader.root / path)
            count = len(other.index().episodes)
        except SourceError:
            continue  # of no format, which is nothing to be told of: papers, logs, maps
        if count and other.name != reader.name:
            yield path, other.name, count


def _unclaimed(reader: Reader, index: SourceIndex) -> Iterator[str]:
    """Yield the outermost folders that hold no episode and lie in none, in natural order."""
    claimed = {_place(reader, ref) for ref in index.episodes}
    above = {str(parent) for place in claimed for parent in PurePosixPath(place).parents}
    if "." in claimed:
        return
    pending = [""]
    while pending:
        try:
            folder = list_folder(reader.root, pending.pop())
        except SourceError:
            continue  # the index has said so
        for name in sorted(folder.folders - folder.links, key=natural_key, reverse=True):
            path = folder.join(name)
            if path in above:
                pending.append(path)
            elif path not in claimed:
                yield path


def _place(reader: Reader, ref: EpisodeRef) -> str:
    """Return the folder or file that is the episode's own, relative to the root; ``.`` for the root itself."""
    for key in ("folder", "file", "store", "path"):
        if isinstance(ref.details.get(key), str):
            return ref.details[key] or "."
    first = next(reader.files(ref), Path())
    return first.parent.as_posix()
