"""Caches of Diffusion Planner: a folder of ``.npz`` files, each one training sample, as its ``data_process.py`` writes them.

``docs/formats.md`` describes the layout and what is read of it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.readers.folders import MAX_DEPTH, read_inside, source_root
from pipeline.readers.npz_files import describe, fill_row, most_common
from schemas.errors import Reason, SourceError
from schemas.planner import TENSORS
from schemas.source import EpisodeRef, Fault, Frame, SampleBlock, SignalBlock, SignalInfo, SourceIndex

RUN_SAMPLES = 1024
"""Files of an episode: few enough to name in one record, many enough that a million files are a thousand records."""
LOOKED_AT = 9
"""Files, spread over the cache, that say what the others hold."""
MIN_TEXT_NBYTES = 64
MAX_LIST_NBYTES = 2**30
SNIFF_ENTRIES = 2000
_TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")
_RESERVED = frozenset(
    [
        "timestamp_s",
        "align_error_s",
        "episode_index",
        "task_index",
        "instruction_index",
        "source_step",
        "valid",
        "is_anchor",
        "row_size",
        "episode_ends",
        "travel_m",
        "step",
        "episode",
        "step_digest",
    ]
)
"""Names that the dataset has for itself."""


@dataclass(frozen=True, slots=True)
class PlannerNpzReader:
    """Samples in ``root`` and below it; episodes are runs of files in the order of their names, or of ``names``."""

    name: ClassVar[str] = "planner-npz"

    root: Path
    names: str = ""
    """List file, in the root or anywhere: a JSON list of names relative to the root; only those files are read, in its order."""

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if one of the first ``.npz`` files is a sample, else what is missing."""
        for path in islice(_walk(root, [], SNIFF_ENTRIES), 3):
            try:
                found = {info.name for info in describe(root, path, MIN_TEXT_NBYTES)}
            except SourceError:
                continue
            if {"ego_current_state", "neighbor_agents_past"} <= found:
                return ""
        return "no .npz files with ego_current_state and neighbor_agents_past"

    def index(self) -> SourceIndex:
        """List the files, and look into a few of them for what all hold."""
        root = source_root(self.root)
        faults: list[Fault] = []
        paths = self._listed(root, faults) if self.names else sorted(_walk(root, faults))
        tensors = self._tensors(paths, faults)
        episodes = []
        for number, start in enumerate(range(0, len(paths) if tensors else 0, RUN_SAMPLES)):
            run = paths[start : start + RUN_SAMPLES]
            ref = EpisodeRef(
                key=f"samples_{number:06d}",
                num_steps=len(run),
                rate_hz=0.0,
                views=(),
                signals=(*tensors, _TIME),
                details={"files": "\n".join(run)},
            )
            episodes.append(ref)
        note = f"{len(paths):,} samples in runs of {RUN_SAMPLES}; convert with --recipe planner-npz"
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(episodes),
            faults=tuple(faults),
            tensors=tensors,
            notes=(note,),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. ``timestamp_s`` counts the samples: nothing says how far apart they are."""
        steps = np.asarray(steps, np.int64)
        tensors = [info for info in ref.signals if info.name != _TIME.name]
        values: dict[str, np.ndarray] = {_TIME.name: steps.astype(np.float64)}
        faults: tuple[Fault, ...] = ()
        if set(names) - {_TIME.name}:
            block = self.read_samples(ref, steps, tensors)
            values.update(block.values)
            faults = block.faults
            for rows in block.values.values():
                if rows.dtype.kind == "f":
                    rows[~block.is_read] = np.nan
        return SignalBlock(values={name: values[name] for name in names}, faults=faults)

    def read_samples(self, ref: EpisodeRef, steps: np.ndarray, tensors: Sequence[SignalInfo]) -> SampleBlock:
        """Read the samples at ``steps``; one that is not exactly ``tensors``, or not finite, is a fault and zeros."""
        paths = sample_files(ref)
        values = {info.name: np.zeros((len(steps), *info.shape), info.dtype) for info in tensors}
        is_read = np.zeros(len(steps), np.bool_)
        faults = []
        for row, step in enumerate(np.asarray(steps).tolist()):
            own = {name: rows[row : row + 1] for name, rows in values.items()}
            try:
                fill_row(self.root, paths[step], tensors, own)
                _check_finite(own)
                is_read[row] = True
            except SourceError as error:
                for rows in values.values():
                    rows[row] = 0
                fault = Fault(
                    reason=error.reason,
                    message=error.message,
                    episode=ref.key,
                    stream=str(error.where.get("stream", "")),
                    start=step,
                    stop=step + 1,
                    path=paths[step],
                )
                faults.append(fault)
        return SampleBlock(values=values, is_read=is_read, faults=tuple(faults))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Refuse: samples have no views."""
        ref.view(view)
        return iter(())

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the sample's file."""
        return sample_files(ref)[step]

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the samples' files."""
        return map(Path, sample_files(ref))

    def _listed(self, root: Path, faults: list[Fault]) -> list[str]:
        path = Path(self.names).expanduser()
        path = root / path if (root / path).is_file() else path.absolute()
        try:
            found = json.loads(read_inside(path.parent, path.name, MAX_LIST_NBYTES))
        except (SourceError, ValueError) as error:
            raise SourceError(
                f"expected a JSON list of file names, found {self.names}: {error}; correct --reader names",
                file=self.names,
            ) from error
        if not isinstance(found, list) or not all(isinstance(name, str) and _is_plain(name) for name in found):
            raise SourceError(
                "expected a JSON list of file names, found other values in it; correct the list", file=self.names
            )
        paths = list(dict.fromkeys(found))
        if len(paths) < len(found):
            message = f"expected each file once, found {len(found) - len(paths)} names again; they are read once"
            faults.append(Fault(reason=Reason.DUPLICATE, message=message, path=self.names, is_warning=True))
        return paths

    def _tensors(self, paths: Sequence[str], faults: list[Fault]) -> tuple[SignalInfo, ...]:
        """Return what most of a few files hold; none, with a fault, where none of them can be read."""
        longest = max((len(os.path.basename(path).encode()) for path in paths), default=0)
        text_nbytes = max(MIN_TEXT_NBYTES, 1 << longest.bit_length())
        found, refused = [], []
        for number in np.unique(np.linspace(0, len(paths) - 1, LOOKED_AT).astype(np.int64)).tolist() if paths else ():
            try:
                found.append(_checked(describe(self.root, paths[number], text_nbytes)))
            except SourceError as error:
                refused.append((paths[number], error))
        if not found:
            faults += [Fault(reason=why.reason, message=why.message, path=path) for path, why in refused]
            return ()
        return most_common(found)


def sample_files(ref: EpisodeRef) -> list[str]:
    """Return the file of each step of an episode, relative to the root."""
    return str(ref.details["files"]).split("\n")


def _walk(root: Path, faults: list[Fault], most_entries: int = 0) -> Iterator[str]:
    """Yield the ``.npz`` files of a folder and those below it as they are listed, nothing of which is kept."""
    pending, seen = [("", 0)], 0
    while pending:
        folder, depth = pending.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                for entry in entries:
                    seen += 1
                    if most_entries and seen > most_entries:
                        return
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir() and entry.name.endswith(".npz"):
                        message = f"expected a file, found the folder {entry.name!a}; put the file in its place"
                        shown = path if _is_plain(path) else ascii(path)
                        faults.append(Fault(reason=Reason.UNSUPPORTED, message=message, path=shown))
                    elif entry.is_dir(follow_symlinks=False):
                        pending += [(path, depth + 1)] if depth < MAX_DEPTH else []
                    elif entry.name.endswith(".npz") and _is_plain(path):
                        yield path
                    elif entry.name.endswith(".npz"):
                        message = f"expected a name in UTF-8 on one line, found {entry.name!a}; rename it"
                        faults.append(Fault(reason=Reason.UNSUPPORTED, message=message, path=ascii(path)))
        except OSError as error:
            message = f"expected a folder that can be listed, found: {error.strerror}; check it"
            faults.append(Fault(reason=Reason.IO, message=message, path=folder))


def _is_plain(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return bool(path) and "\n" not in path and "\0" not in path


def _checked(tensors: tuple[SignalInfo, ...]) -> tuple[SignalInfo, ...]:
    odd = [info.name for info in tensors if not info.name.isidentifier() or not info.name.isascii()]
    odd += [info.name for info in tensors if info.name in _RESERVED or info.name.startswith(("rgb_", "_"))]
    if odd:
        raise SourceError(
            f"expected arrays with names that a dataset can have, found {odd}; rename them",
            Reason.UNSUPPORTED,
            stream=odd[0],
        )
    return tensors


def _check_finite(row: dict[str, np.ndarray]) -> None:
    for name in TENSORS:
        if name in row and not np.isfinite(row[name]).all():
            raise SourceError(
                "expected finite values, found NaN or infinity; leave the file out", Reason.NON_FINITE, stream=name
            )
