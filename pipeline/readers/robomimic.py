"""robomimic, LIBERO and raw robosuite demonstrations: HDF5 files with one group ``data/demo_<N>`` an episode.

``docs/formats.md`` describes the layout and what is read of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.folders import source_root
from pipeline.readers.hdf5_episodes import (
    TIME,
    Arrays,
    file_key,
    hdf5_files,
    place_faults,
    read_frames,
    read_signals,
    sniff_files,
)
from pipeline.readers.hdf5_files import Hdf5File, open_hdf5, require_h5py
from pipeline.readers.metadata import as_rate, as_text
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SourceIndex

RATE_HZ = 20.0
"""Of robosuite and LIBERO, where ``control_freq`` does not say another."""
TURNS = {"recorded": (1, 1), "flipped": (-1, 1), "rotated": (-1, -1)}
"""``orientation -> steps along rows and columns``."""
STATES = (
    ("ee_states", "gripper_states"),  # LIBERO, as in openpi's and OpenVLA's conversions: 6 + 2
    *(
        tuple(f"robot{k}_{part}" for k in robots for part in ("eef_pos", "eef_quat", "gripper_qpos"))
        for robots in ((0, 1), (0,))
    ),  # robomimic's image configurations: 3 + 4 + 2 an arm
)
_DEMO = re.compile(r"demo_(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RobomimicReader:
    """Demonstrations of the HDF5 files at or below ``root``."""

    name: ClassVar[str] = "robomimic"

    root: Path
    mask: str = ""
    """Filter key such as ``train`` or ``20_percent``: only the demonstrations that ``mask/<key>`` names; empty for all."""
    orientation: str = "auto"
    """How images are turned: ``recorded`` not at all, ``flipped`` upside down, ``rotated`` by 180 degrees (as in the LIBERO sets
    that openpi and OpenVLA train on), ``auto`` flipped where ``macros_image_convention`` is ``opengl``, else not at all."""

    def __post_init__(self) -> None:
        if self.orientation not in ("auto", *TURNS):
            known = ", ".join(("auto", *TURNS))
            raise UsageError(f"expected an orientation of {known}, found {self.orientation!r}; correct it")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a file of demonstrations lies at or below ``root``, else what is missing."""
        return sniff_files(root, lambda file: "" if _demos(file)[0] else "no HDF5 file with data/demo_<N>")

    def index(self) -> SourceIndex:
        """List the demonstrations by the attributes of groups and the shapes of their arrays."""
        root = source_root(self.root)
        require_h5py()
        found = _Found()
        for path in hdf5_files(root):
            if isinstance(path, Fault):
                found.faults.append(path)
                continue
            try:
                with open_hdf5(root, path) as file:
                    _Demos(file, self, found).add_all()
            except SourceError as error:
                found.refuse(error, file_key(path), path)
        if self.mask and not found.episodes and self.mask not in found.masks:
            raise UsageError(
                f"expected a mask of {', '.join(found.masks) or '(none)'}, found {self.mask!r}; correct it"
            )
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=_state(found.episodes),
            actions=("actions",),
            notes=found.notes(),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, reading those rows alone."""
        return read_signals(self.root, ref, names, steps, _folders(ref.details["group"]))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the pixels of each step, turned as ``orientation`` says, or a fault."""
        path = f"{ref.details['group']}/obs/{ref.view(view).name}"
        convert = partial(_turn, *TURNS[ref.details["orientation"]])
        return read_frames(self.root, ref, view, steps, path=path, convert=convert)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the file of the demonstration."""
        return str(ref.details["file"])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the file of the demonstration, which holds others too."""
        yield Path(ref.details["file"])


def _turn(down: int, right: int, row: np.ndarray, step: int) -> np.ndarray:
    return np.array(row[::down, ::right], order="C")


def _folders(group: str) -> tuple[str, str]:
    return group, f"{group}/obs"


def _demos(file: Hdf5File) -> tuple[list[str], list[str]]:
    """Return the demonstrations by number, and what else lies in ``data``."""
    names = file.names("data")
    numbers = {name: int(match[1]) for name in names if (match := _DEMO.fullmatch(name))}
    return sorted(numbers, key=lambda name: (numbers[name], name)), [name for name in names if name not in numbers]


def _state(episodes: Sequence[EpisodeRef]) -> tuple[str, ...]:
    """Return what policies are trained on, of what every demonstration offers."""
    offered = [{signal.name for signal in ref.signals} for ref in episodes]
    shared = set.intersection(*offered) if offered else set()
    for columns in STATES:
        if shared.issuperset(columns):
            return columns
    in_obs = [name for name in dict.fromkeys(n for ref in episodes for n in ref.details["observed"]) if name in shared]
    return tuple(in_obs) or (("states",) if "states" in shared else ())


@dataclass(slots=True)
class _Found:
    """An index as it grows."""

    episodes: list[EpisodeRef] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    masks: dict[str, None] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)
    num_flipped: int = 0
    num_unmasked: int = 0
    has_next: bool = False

    def refuse(self, error: SourceError, key: str, path: str, stream: str = "") -> None:
        """Add a fault."""
        self.faults.append(Fault(reason=error.reason, message=error.message, episode=key, stream=stream, path=path))

    def notes(self) -> tuple[str, ...]:
        """Say what was left alone, and what was done to images."""
        notes = []
        if self.others:
            shown = ", ".join([*self.others][:8]) + (", ..." if len(self.others) > 8 else "")
            notes.append(f"neither images nor rows of numbers, left alone: {shown}")
        if self.has_next:
            notes.append("next_obs was left alone: it is obs one step later")
        if self.masks:
            notes.append(f"filter masks: {', '.join(self.masks)}")
        if self.num_unmasked:
            notes.append(f"{self.num_unmasked} demonstrations outside the mask were left alone")
        if self.num_flipped:
            notes.append(
                f"images of {self.num_flipped} demonstrations are stored upside down (opengl) and were flipped; "
                "policies trained on openpi's LIBERO sets saw them rotated by 180 degrees: orientation rotated"
            )
        return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Demos:
    """The demonstrations of one open file."""

    file: Hdf5File
    reader: RobomimicReader
    found: _Found

    def add_all(self) -> None:
        """Add every demonstration of the file, in order."""
        demos, others = _demos(self.file)
        if not demos:
            raise SourceError("expected groups data/demo_<N>, found none; remove the file", file=self.file.path)
        self.found.others.update(dict.fromkeys(others))
        masks = self._masks(set(demos))
        facts = self._facts()
        for demo in demos:
            keys = [key for key, members in masks.items() if demo in members]
            if self.reader.mask and self.reader.mask not in keys:
                self.found.num_unmasked += 1
                continue
            key = f"{file_key(self.file.path)}/{demo}"
            try:
                self._add(f"data/{demo}", key, {**facts, "masks": keys})
            except SourceError as error:
                self.found.refuse(error, key, self.file.path)

    def _masks(self, demos: set[str]) -> Mapping[str, set[str]]:
        """Return ``filter key -> demonstrations``."""
        masks = {}
        for name in self.file.names("mask"):
            self.found.masks[name] = None
            try:
                masks[name] = set(self.file.texts(f"mask/{name}"))
            except SourceError as error:
                self.found.refuse(error, "", self.file.path, f"mask/{name}")
                continue
            lost = sorted(masks[name] - demos)
            if lost:
                message = f"expected the demonstrations that mask/{name} names, found no {', '.join(lost[:3])}; check the file"
                self.found.refuse(SourceError(message, Reason.COUNT_MISMATCH), "", self.file.path, f"mask/{name}")
        return masks

    def _facts(self) -> dict[str, Any]:
        """Return what holds for all demonstrations: environment, rate, instruction, orientation."""
        environment: dict[str, Any] = {}
        instruction = ""
        for attribute in ("env_info", "env_args", "problem_info"):
            try:
                value = self.file.mapping("data", attribute)
            except SourceError as error:
                self.found.refuse(error, "", self.file.path)
                continue
            if attribute == "problem_info":
                instruction = _sentence(value.get("language_instruction"))
            else:
                kwargs = value.get("env_kwargs")
                environment |= {**value, **(kwargs if isinstance(kwargs, dict) else {})}
        name = environment.get("env_name") or self.file.text("data", "env_name") or self.file.text("data", "env")
        convention = self.file.text("data", "macros_image_convention")
        orientation = self.reader.orientation
        if orientation == "auto":
            orientation = "flipped" if convention.strip().lower() == "opengl" else "recorded"
        return {
            "file": self.file.path,
            "env": as_text(name),
            "rate_hz": as_rate(environment.get("control_freq")) or RATE_HZ,
            "instruction": instruction,
            "orientation": orientation,
        }

    def _add(self, group: str, key: str, facts: dict[str, Any]) -> None:
        arrays = Arrays()
        arrays.add_all(self.file, _folders(group))
        arrays.require("actions", self.file.path)
        members = self.file.names(group)
        num_steps = self._count(group, arrays)
        observed = set(self.file.names(f"{group}/obs"))
        at_top = [view.name for view in arrays.views if view.name not in observed]
        self.found.others.update(dict.fromkeys((*arrays.others, *at_top)))
        self.found.has_next |= "next_obs" in members
        self.found.faults += place_faults(arrays.faults, key)
        views = tuple(view for view in arrays.views if view.name in observed)
        self.found.num_flipped += (
            bool(views) and self.reader.orientation == "auto" and facts["orientation"] == "flipped"
        )
        instruction = self._own_instruction(group, key) or facts.pop("instruction")
        facts.pop("instruction", None)
        low_dim = [signal.name for signal in arrays.signals if signal.name in observed and len(signal.shape) < 2]
        self.found.episodes.append(
            EpisodeRef(
                key=key,
                num_steps=num_steps,
                rate_hz=facts.pop("rate_hz"),
                views=views,
                signals=(*arrays.signals, TIME),
                instructions=(instruction,) if instruction else (),
                details={**facts, "group": group, "observed": low_dim},
            )
        )

    def _count(self, group: str, arrays: Arrays) -> int:
        num_steps = arrays.count_steps("actions", self.file.path)
        declared = self.file.text(group, "num_samples")
        if declared.isdecimal() and declared.lstrip("0") != str(num_steps).lstrip("0"):
            message = f"expected {declared[:20]} steps as num_samples says, found {num_steps}; check the recording"
            arrays.faults.append(Fault(reason=Reason.COUNT_MISMATCH, message=message, path=self.file.path))
        if num_steps == 0:
            raise SourceError("expected 1 step or more, found none; drop the demonstration", Reason.EMPTY_EPISODE)
        return num_steps

    def _own_instruction(self, group: str, key: str) -> str:
        """Return the instruction that ep_meta gives, as RoboCasa writes it."""
        try:
            return _sentence(self.file.mapping(group, "ep_meta").get("lang"))
        except SourceError as error:
            self.found.refuse(error, key, self.file.path)
            return ""


def _sentence(value: Any) -> str:
    """Return an instruction, which LIBERO writes as text, in quotes, or as a list of pieces."""
    text = "".join(map(str, value)) if isinstance(value, list) else value
    return as_text(text).strip().strip('"').strip() if isinstance(text, str) else ""
