"""Recordings that are folders with one file a step, ``anno/00017.json.gz`` beside ``camera/rgb_front/00017.jpg``."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.readers.folders import Folder, Numbered, list_folder, numbered, read_inside, walk_folders
from pipeline.readers.records import fault_at, parse_record, unzip
from schemas.errors import Reason, SourceError, locate
from schemas.source import EpisodeRef, Fault, Frame
from tasks.decode import frame_size

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
HEAD_NBYTES = 64 * 2**10
"""Enough of an image to know its size."""


@dataclass(slots=True)
class Found:
    """What a walk over a source found."""

    episodes: list[EpisodeRef]
    faults: list[Fault]
    num_others: int = 0
    """Files beside the records that are no records."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what was ignored."""
        return (f"{self.num_others} files beside the records were ignored",) if self.num_others else ()


def find_episodes(
    root: Path, is_episode: Callable[[Folder], bool], describe: Callable[[Folder], tuple[EpisodeRef, int]]
) -> Found:
    """Describe every folder below ``root`` that is an episode; one that cannot be described is a fault."""
    found = Found([], [])
    for folder in walk_folders(root, lambda folder: not is_episode(folder)):
        if isinstance(folder, Fault):
            found.faults.append(folder)
        elif is_episode(folder):
            try:
                ref, num_others = describe(folder)
            except SourceError as error:
                path = str(error.where.get("file", folder.path))
                key = episode_key(root, folder)
                found.faults.append(Fault(reason=error.reason, message=error.message, episode=key, path=path))
                continue
            found.episodes.append(ref)
            found.num_others += num_others
    return found


def episode_key(root: Path, folder: Folder) -> str:
    """Return an episode's path below the source; its folder's name where it is the source."""
    return folder.path or root.name


def find_steps(root: Path, path: str, suffixes: tuple[str, ...]) -> Numbered:
    """List the records of an episode: every number between the first and the last is a step, recorded or not.

    So a lost file is one refused step and does not shift its followers, as counting files would. SourceError where there is
    no record, or where so many are absent that the numbers cannot be steps.
    """
    found = numbered(list_folder(root, path).names, suffixes)
    if found.count == 0:
        message = f"expected files such as 00000{suffixes[0]}, found none; record it again, or remove the folder"
        raise SourceError(message, Reason.EMPTY_EPISODE, file=path)
    if found.stop - found.first > 2 * found.count + 10:
        raise SourceError(
            f"expected files numbered step by step, found {found.count} numbered {found.first} to {found.stop - 1}; "
            "remove those that do not belong",
            Reason.BAD_METADATA,
            file=path,
        )
    return found


@dataclass(frozen=True, slots=True)
class StepFiles:
    """A folder of files named by the number of their step."""

    root: Path
    path: str
    """Relative to the source."""
    first: int
    """Number of step 0."""
    width: int
    """Digits of a number, filled with zeros."""
    suffix: str
    prefix: str = ""
    """What stands before the number."""
    stride: int = 1
    """From one step's number to the next one's."""
    numbers: tuple[int, ...] = ()
    """Number of each step, where they are not evenly spaced."""

    def number(self, step: int) -> int:
        """Return the number of a step."""
        return self.numbers[step] if self.numbers else self.first + step * self.stride

    def name(self, step: int) -> str:
        """Return the expected file of a step, relative to the source."""
        return self._join(f"{self.prefix}{self.number(step):0{self.width}d}{self.suffix}")

    def _join(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def read_record(self, step: int, limit_nbytes: int) -> Mapping[str, Any]:
        """Read and parse the record of a step, gzip or not; SourceError says why not."""
        name = self.name(step)
        with locate(file=name):
            return parse_record(unzip(read_inside(self.root, name, limit_nbytes), limit_nbytes))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the encoded image of each step, or a fault. One with other digits or another suffix is found by listing once."""
        listed: Mapping[int, str] | None = None
        for step in np.asarray(steps).tolist():
            frame = self._frame(self.name(step), ref, view, step)
            if isinstance(frame, Fault) and frame.reason == Reason.MISSING_FILE:
                listed = self.list_images() if listed is None else listed
                found = listed.get(self.number(step))
                frame = self._frame(found, ref, view, step) if found else frame
            yield frame

    def _frame(self, name: str, ref: EpisodeRef, view: str, step: int) -> Frame:
        try:
            return read_inside(self.root, name)
        except SourceError as error:
            return fault_at(error, ref, step, view)

    def list_images(self) -> Mapping[int, str]:
        """Return ``number -> file`` of the images there are, whatever their digits and suffix."""
        try:
            names = list_folder(self.root, self.path).files
        except SourceError:
            return {}  # every file of it is already missing, and is said to be
        found = {}
        for name in sorted(names):
            stem, suffix = os.path.splitext(name)
            digits = stem.removeprefix(self.prefix)
            is_numbered = digits.isascii() and digits.isdecimal() and len(digits) < 10
            if is_numbered and stem.startswith(self.prefix) and suffix.lower() in IMAGE_SUFFIXES:
                found[int(digits)] = self._join(name)
        return found

    def size(self) -> tuple[int, int]:
        """Return height and width by the header of the first image that has one, of four; (0, 0) if none has."""
        names = [self.name(step) for step in range(len(self.numbers[:4]) or 4)]
        if not os.path.lexists(os.path.join(self.root, names[0])):
            names = [name for _, name in sorted(self.list_images().items())][:4]
        for name in names:
            try:
                return frame_size(read_inside(self.root, name, head_nbytes=HEAD_NBYTES))
            except SourceError:
                continue  # the frame is read, and refused with the reason, when it is asked for
        return 0, 0

    def files(self, num_steps: int) -> Iterator[Path]:
        """Name the file of every step: as it was found, else as it would be called."""
        found = self.list_images() if self.suffix in IMAGE_SUFFIXES else {}
        for step in range(num_steps):
            yield Path(found.get(self.number(step), self.name(step)))


def step_files(root: Path, details: Mapping[str, Any], name: str, suffix: str) -> StepFiles:
    """Return the folder ``name`` of the episode that :func:`find_steps` numbered in ``details``."""
    path = f"{details['folder']}/{name}" if details["folder"] else name
    return StepFiles(root, path, details["first"], details["width"], suffix)
