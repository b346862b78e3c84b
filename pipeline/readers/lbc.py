"""Learning by Cheating routes (2020_CARLA_challenge): three views, a label map and one measurement a step, at 2 Hz.

``docs/formats.md`` describes the layout and what is read of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, source_root, walk_folders
from pipeline.readers.records import INSTRUCTIONS, Field, instruction_index, read_records
from pipeline.readers.stepped import StepFiles, episode_key, find_episodes, find_steps, step_files
from schemas.source import EpisodeRef, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo

RATE_HZ = 2.0
VIEWS = {"rgb": "rgb", "rgb_left": "rgb", "rgb_right": "rgb", "topdown": "labels"}
"""``folder -> kind``."""
MAX_RECORD_NBYTES = 2**20

FIELDS = (
    Field("x", "m"),
    Field("y", "m"),
    Field("theta", "rad"),
    Field("speed", "m/s"),
    Field("target_speed", "m/s"),
    Field("x_command", "m"),
    Field("y_command", "m"),
    Field("command"),
    Field("steer"),
    Field("throttle"),
    Field("brake"),
    Field("instruction_index", get=lambda record: instruction_index(record, "command")),
)
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")


@dataclass(frozen=True, slots=True)
class LbcReader:
    """Routes below ``root``, which may be one route, a folder of routes, or a deeper tree of them."""

    name: ClassVar[str] = "lbc"

    root: Path

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a route lies below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_route(folder)), SNIFF_FOLDERS)
        return "" if any(_is_route(folder) for folder in folders) else "no folder with rgb/ and measurements/ in it"

    def index(self) -> SourceIndex:
        """List the routes: one listing of measurements and one image header a view each, nothing decoded."""
        root = source_root(self.root)
        found = find_episodes(root, _is_route, lambda folder: _describe(root, folder))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=("speed",),
            actions=("steer", "throttle", "brake"),
            notes=found.notes,
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. Time costs no read: a step's number is its time."""
        wanted = [ref.signal(name).name for name in names]
        files = _measurements(self.root, ref.details)
        fields = [field for field in FIELDS if field.name in wanted]
        block = read_records(lambda step: files.read_record(step, MAX_RECORD_NBYTES), fields, ref, steps)
        return SignalBlock(values={**block.values, "timestamp_s": np.asarray(steps) / RATE_HZ}, faults=block.faults)

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the PNG of each step, or a fault."""
        return _images(self.root, ref.details, ref.view(view).name).read_frames(ref, view, steps)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the image of a step."""
        return _images(self.root, ref.details, ref.view(view).name).name(step)

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the measurements, then the images, view by view."""
        yield from _measurements(self.root, ref.details).files(ref.num_steps)
        for view in ref.views:
            if view.present:
                yield from _images(self.root, ref.details, view.name).files(ref.num_steps)


def _is_route(folder: object) -> bool:
    return isinstance(folder, Folder) and {"rgb", "measurements"} <= folder.folders


def _describe(root: Path, folder: Folder) -> tuple[EpisodeRef, int]:
    records = find_steps(root, folder.join("measurements"), (".json",))
    details = {"folder": folder.path, "first": records.first, "width": records.width, "suffix": records.suffix}
    views = []
    for name, kind in VIEWS.items():
        present = name in folder.folders
        height, width = _images(root, details, name).size() if present else (0, 0)
        views.append(ViewInfo(name=name, height_px=height, width_px=width, encoding="png", kind=kind, present=present))
    ref = EpisodeRef(
        key=episode_key(root, folder),
        num_steps=records.stop - records.first,
        rate_hz=RATE_HZ,
        views=tuple(views),
        signals=(*(field.info for field in FIELDS), TIME),
        instructions=INSTRUCTIONS,
        details=details,
    )
    return ref, records.others


def _measurements(root: Path, details: Mapping[str, Any]) -> StepFiles:
    return step_files(root, details, "measurements", details["suffix"])


def _images(root: Path, details: Mapping[str, Any], view: str) -> StepFiles:
    return step_files(root, details, view, ".png")
