"""Bench2Drive clips: six cameras, a view from above and one annotation a step, at 10 Hz.

``docs/formats.md`` describes the layout and what is read of it. Boxes, lights and signs are read as tracks, by :mod:`pipeline.readers.bench2drive_tracks`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.bench2drive_tracks import annotation_tracks
from pipeline.readers.folders import SNIFF_FOLDERS, Folder, list_folder, source_root, walk_folders
from pipeline.readers.records import INSTRUCTIONS, Field, instruction_index, read_records
from pipeline.readers.stepped import StepFiles, episode_key, find_episodes, find_steps, step_files
from schemas.errors import Reason, SourceError, locate
from schemas.source import EpisodeRef, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo
from schemas.tracks import Tracks

RATE_HZ = 10.0
VIEWS = (
    "rgb_front",
    "rgb_front_left",
    "rgb_front_right",
    "rgb_back",
    "rgb_back_left",
    "rgb_back_right",
    "rgb_top_down",
)
OTHER_VIEWS = {"depth_": "depth", "semantic_": "labels"}
"""Optional folders below ``camera/``, by the beginning of their name: PNG of this kind."""
MAX_RECORD_NBYTES = 2**26
"""Greatest size of an annotation, unpacked: real ones are 0.1 to 1 MB."""

_CLIP = re.compile(r"(?P<scenario>\w+?)_(?P<town>Town\w+?)_Route(?P<route>\d+)_Weather(?P<weather>\d+)", re.ASCII)
_WEATHER = (
    "cloudiness",
    "precipitation",
    "precipitation_deposits",
    "wind_intensity",
    "sun_azimuth_angle",
    "sun_altitude_angle",
    "fog_density",
    "fog_distance",
    "wetness",
    "fog_falloff",
)
_XYZ = ("x", "y", "z")


def _ego(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for box in record["bounding_boxes"]:
        if box["class"] == "ego_vehicle":
            return box
    raise LookupError("ego_vehicle")


def _of_ego(key: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda record: _ego(record)[key]


FIELDS = (
    Field("ego_location", "m", (3,), _XYZ, _of_ego("location")),
    Field("ego_rotation", "deg", (3,), ("pitch", "roll", "yaw"), _of_ego("rotation")),
    Field("ego_center", "m", (3,), _XYZ, _of_ego("center")),
    Field("ego_extent", "m", (3,), _XYZ, _of_ego("extent")),
    Field("world2ego", "", (4, 4), (), _of_ego("world2ego")),
    Field("speed", "m/s"),
    Field("acceleration", "m/s2", (3,), _XYZ),
    Field("angular_velocity", "rad/s", (3,), _XYZ),
    Field("theta", "rad"),
    Field("x", "m"),
    Field("y", "m"),
    Field("steer"),
    Field("throttle"),
    Field("brake"),
    Field("reverse"),
    Field("should_brake"),
    Field("only_ap_brake"),
    Field("x_command_near", "m"),
    Field("y_command_near", "m"),
    Field("command_near"),
    Field("x_command_far", "m"),
    Field("y_command_far", "m"),
    Field("command_far"),
    Field("x_target", "m"),
    Field("y_target", "m"),
    Field("next_command"),
    Field("weather", "", (len(_WEATHER),), _WEATHER, lambda record: [record["weather"][name] for name in _WEATHER]),
    Field("instruction_index", get=lambda record: instruction_index(record, "command_near")),
)
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")


@dataclass(frozen=True, slots=True)
class Bench2DriveReader:
    """Clips below ``root``, which may be one clip, a folder of clips, or a folder of versions."""

    name: ClassVar[str] = "bench2drive"

    root: Path

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a clip lies below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_clip(folder)), SNIFF_FOLDERS)
        return "" if any(_is_clip(folder) for folder in folders) else "no folder with anno/ and camera/ in it"

    def index(self) -> SourceIndex:
        """List the clips: one listing of the annotations and one image header a view each, nothing parsed or decoded."""
        root = source_root(self.root)
        found = find_episodes(root, _is_clip, lambda folder: _describe(root, folder))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=("speed", "acceleration", "angular_velocity"),
            actions=("steer", "throttle", "brake"),
            notes=found.notes,
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. Time costs no read: a step's number is its time."""
        wanted = [ref.signal(name).name for name in names]
        files = _annotations(self.root, ref.details)
        fields = [field for field in FIELDS if field.name in wanted]
        block = read_records(lambda step: files.read_record(step, MAX_RECORD_NBYTES), fields, ref, steps)
        return SignalBlock(values={**block.values, "timestamp_s": np.asarray(steps) / RATE_HZ}, faults=block.faults)

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the encoded image of each step, or a fault."""
        return _images(self.root, ref.details, ref.view(view).name).read_frames(ref, view, steps)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the image of a step."""
        return _images(self.root, ref.details, ref.view(view).name).name(step)

    def read_tracks(self, ref: EpisodeRef) -> Tracks:
        """Return the ego, the boxes and the traffic lights of every annotation, in the right-handed frame."""
        files = _annotations(self.root, ref.details)
        with locate(episode=ref.key):
            return annotation_tracks(ref, lambda step: files.read_record(step, MAX_RECORD_NBYTES))

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the annotations, then the images, view by view."""
        yield from _annotations(self.root, ref.details).files(ref.num_steps)
        for view in ref.views:
            if view.present:
                yield from _images(self.root, ref.details, view.name).files(ref.num_steps)


def _is_clip(folder: object) -> bool:
    """Know a clip by its folders, or by its name where they are missing: an empty clip is refused, not overlooked."""
    if not isinstance(folder, Folder):
        return False
    if {"anno", "camera"} <= folder.folders:
        return True
    name = folder.path.rpartition("/")[2]
    return bool(_CLIP.fullmatch(name)) and not any(_CLIP.fullmatch(below) for below in folder.folders)


def _describe(root: Path, folder: Folder) -> tuple[EpisodeRef, int]:
    if "anno" not in folder.folders:
        message = (
            "expected anno/ and camera/ in a clip, found neither or one; complete the download, or remove the folder"
        )
        raise SourceError(message, Reason.MISSING_FILE, file=folder.path)
    records = find_steps(root, folder.join("anno"), (".json.gz", ".json"))
    key = episode_key(root, folder)
    clip = _CLIP.fullmatch(key.rpartition("/")[2])
    details = {
        **(clip.groupdict() if clip else {}),
        "folder": folder.path,
        "first": records.first,
        "width": records.width,
        "suffix": records.suffix,
    }
    cameras = list_folder(root, folder.join("camera")).folders if "camera" in folder.folders else frozenset()
    ref = EpisodeRef(
        key=key,
        num_steps=records.stop - records.first,
        rate_hz=RATE_HZ,
        views=tuple(_views(root, details, cameras)),
        signals=(*(field.info for field in FIELDS), TIME),
        instructions=INSTRUCTIONS,
        details=details,
    )
    return ref, records.others


def _views(root: Path, details: Mapping[str, Any], cameras: frozenset[str]) -> Iterator[ViewInfo]:
    kinds = dict.fromkeys(VIEWS, "rgb")
    for beginning, kind in OTHER_VIEWS.items():
        kinds.update((name, kind) for name in sorted(cameras) if name.startswith(beginning))
    for name, kind in kinds.items():
        height, width = _images(root, details, name).size() if name in cameras else (0, 0)
        encoding = "jpeg" if kind == "rgb" else "png"
        yield ViewInfo(
            name=name, height_px=height, width_px=width, encoding=encoding, kind=kind, present=name in cameras
        )


def _annotations(root: Path, details: Mapping[str, Any]) -> StepFiles:
    return step_files(root, details, "anno", details["suffix"])


def _images(root: Path, details: Mapping[str, Any], view: str) -> StepFiles:
    return step_files(root, details, f"camera/{view}", ".png" if view.startswith(tuple(OTHER_VIEWS)) else ".jpg")
