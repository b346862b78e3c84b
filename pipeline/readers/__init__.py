"""Readers of raw formats, by name, and how the right one is found."""

from pathlib import Path
from typing import cast

from pipeline.readers.bench2drive import Bench2DriveReader
from pipeline.readers.folders import source_root
from pipeline.readers.lbc import LbcReader
from pipeline.readers.lerobot import LeRobotReader
from pipeline.readers.npy import NpyReader
from pipeline.readers.protocol import Reader
from schemas.errors import Reason, SourceError, UsageError

READERS: dict[str, type[LbcReader | Bench2DriveReader | LeRobotReader | NpyReader]] = {
    reader.name: reader for reader in (LeRobotReader, Bench2DriveReader, LbcReader, NpyReader)
}
"""In the order in which they are tried: the most specific first."""


def open_source(path: str | Path, format: str = "") -> Reader:
    """Return the reader of the recordings below ``path``: the one called ``format``, or the first that knows them.

    Raises
    ------
    UsageError
        Where no reader is called ``format``.
    SourceError
        Where ``path`` is no folder, is empty, cannot be read, or is of no known format; the message says what each misses.
    """
    if format and format not in READERS:
        raise UsageError(f"expected a format of {', '.join(READERS)}, found {format!r}; leave it out to have it found")
    root = source_root(path)
    missed = {}
    for name in [format] if format else READERS:
        missed[name] = READERS[name].sniff(root)
        if not missed[name]:
            return cast(Reader, READERS[name](root))  # frozen, which the protocol's plain attributes do not foresee
    tried = "; ".join(f"{name}: {miss}" for name, miss in missed.items())
    raise SourceError(
        f"expected recordings of a known format in {root}, found none ({tried}); check the path", Reason.UNSUPPORTED
    )
