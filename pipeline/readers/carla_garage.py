"""carla_garage routes: TransFuser++ on leaderboard 1 and PDM-Lite on leaderboard 2, one measurement a step, at 4 Hz.

``docs/formats.md`` describes the layout and what is read of it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.carla_garage_tracks import parse_boxes, route_tracks
from pipeline.readers.folders import SNIFF_FOLDERS, Folder, read_inside, source_root, walk_folders
from pipeline.readers.records import INSTRUCTIONS, Field, instruction_index, parse_record, read_records, unzip
from pipeline.readers.route_results import RULES, refusal
from pipeline.readers.stepped import StepFiles, episode_key, find_episodes, find_steps, step_files
from schemas.errors import Reason, SourceError, UsageError, locate
from schemas.source import EpisodeRef, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo
from schemas.tracks import Tracks

RATE_HZ = 4.0
VIEWS = {
    "rgb": "rgb",
    "rgb_augmented": "rgb",
    "semantics": "labels",
    "semantics_augmented": "labels",
    "depth": "labels",
    "depth_augmented": "labels",
    "bev_semantics": "labels",
    "bev_semantics_augmented": "labels",
}
"""``folder -> kind``. Depth is 8 bit in a code of its own, and is handed over as it is stored."""
MAX_RECORD_NBYTES = 2**24
RESULTS = ("results.json.gz", "results.json")

_TOWN = re.compile(r"Town\d\d(?:HD)?", re.ASCII)
_XY = ("x", "y")

FIELDS = (
    Field("pos_global", "m", (2,), _XY),
    Field("theta", "rad"),
    Field("speed", "m/s"),
    Field("target_speed", "m/s"),
    Field("speed_limit", "m/s"),
    Field("target_point", "m", (2,), _XY),
    Field("target_point_next", "m", (2,), _XY),
    Field("command"),
    Field("next_command"),
    Field("aim_wp", "m", (2,), _XY),
    Field("steer"),
    Field("throttle"),
    Field("brake"),
    Field("control_brake"),
    Field("junction"),
    Field("vehicle_hazard"),
    Field("light_hazard"),
    Field("walker_hazard"),
    Field("stop_sign_hazard"),
    Field("stop_sign_close"),
    Field("angle"),
    Field("augmentation_translation", "m"),
    Field("augmentation_rotation", "deg"),
    Field("ego_matrix", "", (4, 4)),
    Field("instruction_index", get=lambda record: instruction_index(record, "command")),
)
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")


@dataclass(frozen=True, slots=True)
class CarlaGarageReader:
    """Routes below ``root``, at any depth. Those that ``keep`` leaves out are faults of the index, and counted in its notes."""

    name: ClassVar[str] = "carla-garage"

    root: Path
    keep: str = "min-speed"
    """One of :data:`~pipeline.readers.route_results.RULES`. The default is the authors' for leaderboard 2; leaderboard 1 knows no such
    infraction, so that there it means a perfect score."""

    def __post_init__(self) -> None:
        if self.keep not in RULES:
            raise UsageError(f"expected keep one of {', '.join(RULES)}, found {self.keep!r}; correct it")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a route lies below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_route(folder)), SNIFF_FOLDERS)
        return "" if any(_is_route(folder) for folder in folders) else "no folder with measurements/ and boxes/ in it"

    def index(self) -> SourceIndex:
        """List the routes: one listing of measurements, one image header a view, and the results, nothing decoded."""
        root = source_root(self.root)
        left_out: Counter[str] = Counter()
        found = find_episodes(root, _is_route, lambda folder: _describe(root, folder, self.keep, left_out))
        counts = "; ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
        total = len(found.episodes) + len(found.faults)
        filtered = (
            (f"{sum(left_out.values())} of {total} routes were left out by the rule {self.keep}: {counts}",)
            if left_out
            else ()
        )
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=("speed",),
            actions=("steer", "throttle", "brake"),
            notes=(*found.notes, *filtered),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``. Time costs no read: a step's number is its time."""
        wanted = [ref.signal(name).name for name in names]
        files = _measurements(self.root, ref.details)
        fields = [field for field in FIELDS if field.name in wanted]
        block = read_records(lambda step: files.read_record(step, MAX_RECORD_NBYTES), fields, ref, steps)
        return SignalBlock(values={**block.values, "timestamp_s": np.asarray(steps) / RATE_HZ}, faults=block.faults)

    def read_tracks(self, ref: EpisodeRef) -> Tracks:
        """Return the ego of every measurement and the boxes around it, in the right-handed frame."""
        with locate(episode=ref.key):
            return route_tracks(ref, RATE_HZ, self._load(ref), self._load_boxes(ref))

    def _load(self, ref: EpisodeRef) -> Callable[[int], Mapping[str, Any]]:
        files = _measurements(self.root, ref.details)
        return lambda step: files.read_record(step, MAX_RECORD_NBYTES)

    def _load_boxes(self, ref: EpisodeRef) -> Callable[[int], list[Mapping[str, Any]]]:
        files = _boxes(self.root, ref.details)

        def load(step: int) -> list[Mapping[str, Any]]:
            with locate(file=files.name(step)):
                return parse_boxes(
                    unzip(read_inside(self.root, files.name(step), MAX_RECORD_NBYTES), MAX_RECORD_NBYTES)
                )

        return load

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the encoded image of each step, or a fault."""
        return _images(self.root, ref.details, ref.view(view).name).read_frames(ref, view, steps)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the image of a step."""
        return _images(self.root, ref.details, ref.view(view).name).name(step)

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the measurements and boxes, the results, then the images, view by view."""
        yield from _measurements(self.root, ref.details).files(ref.num_steps)
        yield from _boxes(self.root, ref.details).files(ref.num_steps)
        if ref.details["results"]:
            yield Path(ref.details["results"])
        for view in ref.views:
            if view.present:
                yield from _images(self.root, ref.details, view.name).files(ref.num_steps)


def _is_route(folder: object) -> bool:
    return isinstance(folder, Folder) and {"measurements", "boxes"} <= folder.folders


def _describe(root: Path, folder: Folder, rule: str, left_out: Counter[str]) -> tuple[EpisodeRef, int]:
    results = next((folder.join(name) for name in RESULTS if name in folder.files), "")
    _check_results(root, folder, results, (rule, left_out))
    records = find_steps(root, folder.join("measurements"), (".json.gz", ".json"))
    town = _TOWN.search(folder.path.rpartition("/")[2]) or _TOWN.search(folder.path) or _TOWN.search(root.name)
    details = {
        "folder": folder.path,
        "first": records.first,
        "width": records.width,
        "suffix": records.suffix,
        "results": results,
        "town": town[0] if town else "",
    }
    views = []
    for name, kind in VIEWS.items():
        present = name in folder.folders
        height, width = _images(root, details, name).size() if present else (0, 0)
        encoding = "jpeg" if kind == "rgb" else "png"
        views.append(
            ViewInfo(name=name, height_px=height, width_px=width, encoding=encoding, kind=kind, present=present)
        )
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


def _check_results(root: Path, folder: Folder, results: str, rule: tuple[str, Counter[str]]) -> None:
    """Refuse a route that the rule leaves out, and count why."""
    keep, left_out = rule
    if keep == "all":
        return
    if not results:
        left_out["without results"] += 1
        message = "expected results.json.gz, found none: the route was not finished; drive it again, or keep all routes"
        raise SourceError(message, Reason.LEFT_OUT, file=folder.path)
    with locate(file=results):
        try:
            why = refusal(parse_record(unzip(read_inside(root, results, MAX_RECORD_NBYTES), MAX_RECORD_NBYTES)), keep)
        except SourceError:
            left_out["with broken results"] += 1
            raise
        if why:
            left_out[why if why.startswith("Failed") else "below a score of 100"] += 1
            message = f"expected a route without infractions, found {why}; drive it again, or keep all routes"
            raise SourceError(message, Reason.LEFT_OUT)


def _measurements(root: Path, details: Mapping[str, Any]) -> StepFiles:
    return step_files(root, details, "measurements", details["suffix"])


def _boxes(root: Path, details: Mapping[str, Any]) -> StepFiles:
    return step_files(root, details, "boxes", details["suffix"])


def _images(root: Path, details: Mapping[str, Any], view: str) -> StepFiles:
    return step_files(root, details, view, ".jpg" if VIEWS[view] == "rgb" else ".png")
