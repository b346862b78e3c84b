"""OpenDRIVE maps by file or by the name of a town, each parsed once in a process."""

import re
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from threading import Lock

import numpy as np
import xxhash

from schemas.errors import Reason, SourceError, locate
from schemas.lanes import LaneGraph
from tasks.opendrive import read_opendrive

SUFFIXES = (".xodr", ".xodr.gz")
PICKLED = ".npz"
_PICKLED_MESSAGE = (
    "expected an OpenDRIVE map, found {}: Bench2Drive's HD maps are pickles, which may run any code and are not opened; "
    "give the town's .xodr as --map, from CARLA's Content/Carla/Maps/OpenDrive, of which they were made"
)
_TOWN = re.compile(r"town\d+(hd)?")
MAX_CACHED = 4
"""Maps kept in memory, the ones used last. Town12, the largest, takes 150 MB, and to parse 5 s and 0.5 GB (one core of a Xeon,
2026-12): too little to be worth a cache on disk that can be stale."""

_cache: OrderedDict[str, LaneGraph] = OrderedDict()
_lock = Lock()


def load_map(path: str | Path, town: str = "") -> LaneGraph:
    """Return the lane graph of a map; its arrays are shared and read-only.

    Parameters
    ----------
    path
        An ``.xodr`` or ``.xodr.gz`` file, or a folder that has one named after the town.
    town
        Name of the town as recordings have it, such as ``Town10HD_Opt`` or ``Carla/Maps/Town01``. A file may have any name but that
        of another of CARLA's towns.

    Raises
    ------
    SourceError
        No map there, none of that name, or not OpenDRIVE.
    """
    file = find_map(path, town)
    with locate(map=str(file)):
        try:
            data = file.read_bytes()
        except OSError as error:
            raise SourceError(f"expected a readable file, found {error.strerror}; check --map", Reason.IO) from error
        return parse_map(data)


def find_map(path: str | Path, town: str = "") -> Path:
    """Return the file of a map: ``path`` itself, or in a folder the file of the town.

    A town is found under its name without folders, in any case, and without the ending ``_Opt``, by which CARLA calls maps
    whose layers can be switched off; their lanes are the same.
    """
    if not str(path):
        raise SourceError("expected a map or a folder of maps, found none given; add --map", Reason.MISSING_FILE)
    root = Path(path)
    if root.suffix == PICKLED:
        raise SourceError(_PICKLED_MESSAGE.format(root.name), Reason.UNSUPPORTED)
    if root.is_file():
        _refuse_other_town(root, town)
        return root
    if not root.is_dir():
        raise SourceError(
            f"expected a map or a folder of maps, found nothing at {root}; check --map", Reason.MISSING_FILE
        )
    files = sorted(file for file in root.iterdir() if file.name.endswith(SUFFIXES))
    names = {_stem(file.name): file for file in reversed(files)}  # the plain one of a plain and a compressed one
    wanted = _wanted(town)
    found = names.get(wanted) or names.get(wanted.removesuffix("_opt"))
    if found is None:
        pickled = sorted(file.name for file in root.iterdir() if file.suffix == PICKLED)
        if pickled and not files:
            raise SourceError(_PICKLED_MESSAGE.format(pickled[0]), Reason.UNSUPPORTED)
        have = ", ".join(sorted(names)) or "no .xodr or .xodr.gz file"
        raise SourceError(
            f"expected a map of {town or 'a named town'!r} in {root}, found {have}; give the file itself as --map",
            Reason.MISSING_FILE,
        )
    return found


def _refuse_other_town(file: Path, town: str) -> None:
    """Raise SourceError where a file is named after another of CARLA's towns: on the wrong roads every tensor would be wrong."""
    names = [name.removesuffix("_opt") for name in (_stem(file.name), _wanted(town))]
    if names[0] != names[1] and all(_TOWN.fullmatch(name) for name in names):
        raise SourceError(
            f"expected the map of {town}, found {file.name}; give that town's map, or a folder of maps",
            Reason.UNSUPPORTED,
        )


def _wanted(town: str) -> str:
    return _stem(re.split(r"[/\\]", town)[-1])


def _stem(name: str) -> str:
    """Return the name of a town without the suffix of its file, in small letters."""
    return re.sub(r"\.xodr(\.gz)?$", "", name).lower()


def parse_map(data: bytes) -> LaneGraph:
    """Parse a map, or take it from those parsed already, by its content.

    One at a time: threads that ask for the same map must not parse it twice.
    """
    digest = xxhash.xxh3_128_hexdigest(data)
    with _lock:
        graph = _cache.get(digest)
        if graph is None:
            graph = _cache[digest] = _read_only(read_opendrive(data))
            while len(_cache) > MAX_CACHED:
                _cache.popitem(last=False)
        _cache.move_to_end(digest)
        return graph


def _read_only(graph: LaneGraph) -> LaneGraph:
    """Lock the arrays of a graph that several callers will hold."""
    for part in (graph, graph.signals):
        for column in fields(part):
            value = getattr(part, column.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
    return graph
