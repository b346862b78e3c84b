"""Replay buffers of Diffusion Policy and UMI: Zarr v2, all episodes end to end, as a folder or a ``.zarr.zip``.

``docs/formats.md`` describes the layout and what is read of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, natural_key, source_root, walk_folders
from pipeline.readers.metadata import as_text
from pipeline.readers.sidecar import Sidecar, read_sidecar
from pipeline.readers.zarr_files import Files, FolderFiles, ZipFiles
from pipeline.readers.zarr_v2 import META, ZarrArray, read_array, read_rows
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo

ENDS = "meta/episode_ends"
MAX_EPISODES = 2**20
MAX_ARRAYS = 256
MAX_ROW_SIZE = 2**16
"""Greatest number of elements of one row of a signal."""
DEFAULT_RATE_HZ = 1.0
ARCHIVE = ".zarr.zip"
TIMES = ("timestamp", "timestamps")
"""Names of an array of times in seconds, which Diffusion Policy's real robots record."""
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")

AGENT_POS = "agent_pos"
"""PushT's own observation: the first two of ``state``, the others being the pose of the block."""
PUSHT = {"state": (5,), "keypoint": (9, 2), "action": (2,)}
"""Arrays and their rows, by which PushT is known."""
PUSHT_RATE_HZ, UMI_RATE_HZ = 10.0, 60.0
ROBOT = ("eef_pos", "eef_rot_axis_angle", "eef_quat", "eef_pose", "joint", "gripper_width", "gripper_qpos")
"""What ``robot0_...``, ``robot1_...`` or ``robot_...`` may say that makes a state, in order."""


@dataclass(frozen=True, slots=True)
class DiffusionPolicyReader:
    """Replay buffers at or below ``root``: folders with ``data/`` and ``meta/episode_ends``, and files ``*.zarr.zip``."""

    name: ClassVar[str] = "diffusion-policy"

    root: Path
    rate_hz: float = 0.0
    """Rate of all recordings; 0 takes that of ``meta.json`` or a ``timestamp`` array, else PushT's or UMI's, else 1 Hz."""

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a replay buffer lies at or below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_buffer(folder)), SNIFF_FOLDERS)
        found = any(isinstance(folder, Folder) and next(_stores(root, folder), None) is not None for folder in folders)
        return "" if found else f"no folder with data/ and {ENDS}/{META}, and no *{ARCHIVE}"

    def index(self) -> SourceIndex:
        """List the episodes by ``meta/episode_ends`` and the metadata of each array; of ``data/`` nothing is read."""
        root = source_root(self.root)
        found = _Index(root, self.rate_hz)
        for folder in walk_folders(root, lambda folder: not _is_buffer(folder)):
            if isinstance(folder, Fault):
                found.faults.append(folder)
                continue
            for path in _stores(root, folder):
                found.add(path, folder.path)
        columns = default_columns(next((episode.signals for episode in found.episodes), ()))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=columns["state"],
            actions=columns["actions"],
            notes=tuple(dict.fromkeys(found.notes)),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``; each chunk that holds some is unpacked once."""
        steps = np.asarray(steps, np.int64)
        files = _files(self.root, ref.details["store"])
        values: dict[str, np.ndarray] = {}
        faults: list[Fault] = []
        for name in dict.fromkeys(names):
            signal = ref.signal(name)
            empty = np.nan if np.dtype(signal.dtype).kind == "f" else 0
            values[name] = np.full((len(steps), *signal.shape), empty, signal.dtype)
            if name == TIME.name:
                values[name] = self._times(files, ref, steps, faults)
            else:
                self._fill(files, ref, signal, (steps, values[name]), faults)
        return SignalBlock(values=values, faults=tuple(faults))

    def _times(self, files: Files, ref: EpisodeRef, steps: np.ndarray, faults: list[Fault]) -> np.ndarray:
        name = ref.details["times"]
        if not name:
            return steps / ref.rate_hz
        signal = SignalInfo(name=name, shape=(), dtype="float64")
        times_s, first_s = np.full(len(steps), np.nan), np.full(1, np.nan)
        self._fill(files, ref, signal, (np.zeros(1, np.int64), first_s), faults)
        if not faults:
            self._fill(files, ref, signal, (steps, times_s), faults)
        return times_s - first_s

    def _fill(
        self,
        files: Files,
        ref: EpisodeRef,
        signal: SignalInfo,
        wanted: tuple[np.ndarray, np.ndarray],
        faults: list[Fault],
    ) -> None:
        steps, out = wanted
        array_name = "state" if signal.name == AGENT_POS and ref.details["is_pusht"] else signal.name
        done = 0
        for part, block in _blocks(files, ref, array_name, steps):
            if isinstance(block, Fault):
                faults.append(replace(block, stream=signal.name, start=int(part[0]), stop=int(part[-1]) + 1))
            else:
                width = 2 if array_name != signal.name else None
                out[done : done + len(part)] = block[..., :width].reshape(len(part), *signal.shape)
            done += len(part)

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield each step's frame as uint8; one chunk is held at a time, and unpacked once."""
        name, wanted = ref.view(view).name, np.asarray(steps, np.int64)
        for part, block in _blocks(_files(self.root, ref.details["store"]), ref, name, wanted):
            for row, step in enumerate(part.tolist()):
                if isinstance(block, Fault):
                    yield replace(block, stream=view, start=step, stop=step + 1)
                else:
                    yield _pixels(block[row], ref, view, step)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the archive, or the view's first chunk that holds the step."""
        files = _files(self.root, ref.details["store"])
        try:
            array = read_array(files, f"data/{view}")
        except SourceError:
            return files.path(f"data/{view}/{META}")
        key, _ = next(array.keys((ref.details["start"] + step) // array.chunks[0]))
        return files.path(key)

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the archive, or the chunks that hold steps of the episode, views first.

        The metadata is left out: a new episode changes it, and no other episode with it.
        """
        files = _files(self.root, ref.details["store"])
        if isinstance(files, ZipFiles):
            yield Path(files.archive)
            return
        names = [view.name for view in ref.views]
        names += [signal.name for signal in ref.signals if signal.name not in (TIME.name, AGENT_POS)]
        for name in [*names, *filter(None, [ref.details["times"]])]:
            try:
                array = read_array(files, f"data/{name}")
            except SourceError:
                continue  # the fault comes from whoever reads it
            start, stop = ref.details["start"], ref.details["start"] + ref.num_steps
            for row in range(start // array.chunks[0], (stop - 1) // array.chunks[0] + 1):
                yield from (Path(files.path(key)) for key, _ in array.keys(row))


def _is_buffer(folder: object) -> bool:
    return isinstance(folder, Folder) and {"data", "meta"} <= folder.folders


def _stores(root: Path, folder: Folder) -> Iterator[str]:
    """Yield the paths of replay buffers in a folder: the folder itself, and archives in it."""
    if _is_buffer(folder) and (root / folder.join(f"{ENDS}/{META}")).is_file():
        yield folder.path
    for name in sorted(folder.files, key=natural_key):
        if name.endswith(ARCHIVE):
            yield folder.join(name)


def _files(root: Path, store: str) -> Files:
    return ZipFiles(root, store) if store.endswith(ARCHIVE) else FolderFiles(root, store)


def _blocks(
    files: Files, ref: EpisodeRef, name: str, steps: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray | Fault]]:
    """Yield ``(steps, their rows)`` chunk by chunk, or a fault in the place of rows."""
    path = f"data/{name}"

    def fault(error: SourceError) -> Fault:
        place = str(error.where.get("file", files.path(f"{path}/{META}")))
        return Fault(reason=error.reason, message=error.message, episode=ref.key, path=place)

    if not len(steps):
        return
    try:
        array = read_array(files, path)
    except SourceError as error:
        yield steps, fault(error)
        return
    for row, group in groupby((steps + ref.details["start"]).tolist(), key=lambda at: at // array.chunks[0]):
        rows = np.array(list(group))
        part = rows - ref.details["start"]
        try:
            if rows[-1] >= array.shape[0]:
                message = f"expected {ref.details['start'] + ref.num_steps} steps in {name!r}, found {array.shape[0]}; check the recording"
                raise SourceError(message, Reason.COUNT_MISMATCH)
            yield part, read_rows(files, array, row)[rows - row * array.chunks[0]]
        except SourceError as error:
            yield part, fault(error)


def _pixels(row: np.ndarray, ref: EpisodeRef, view: str, step: int) -> Frame:
    """Return a frame as uint8, exactly; a fault where its values are not whole numbers of 0 to 255."""
    if row.dtype == np.uint8:
        return np.ascontiguousarray(row)
    with np.errstate(invalid="ignore"):  # NaN and what is out of range, which the comparison finds
        frame = row.astype(np.uint8)
    if np.array_equal(frame, row):
        return np.ascontiguousarray(frame)
    message = (
        f"expected whole numbers of 0 to 255 in {row.dtype} frames, found others ({row.min():g} to {row.max():g}); "
        "write the frames as uint8"
    )
    return Fault(reason=Reason.UNSUPPORTED, message=message, episode=ref.key, stream=view, start=step, stop=step + 1)


def default_columns(signals: Sequence[SignalInfo]) -> dict[str, tuple[str, ...]]:
    """Return which columns make ``state`` and ``actions``.

    ``state`` is PushT's agent_pos, or the array called so, else the robots' poses. UMI has no actions: its policies
    predict the poses to come, so they are the same columns.
    """
    offered = [signal.name for signal in signals]
    state: tuple[str, ...] = next(((name,) for name in (AGENT_POS, "state", "obs") if name in offered), ())
    state = state or tuple(
        name for part in _robots(offered) for name in (f"{part}_{what}" for what in ROBOT) if name in offered
    )
    actions = next(((name,) for name in ("action", "actions") if name in offered), ())
    return {"state": state, "actions": actions or state}


def _robots(names: Sequence[str]) -> list[str]:
    return sorted({name.partition("_")[0] for name in names if name.startswith("robot")}, key=natural_key)


@dataclass(slots=True)
class _Index:
    """An index as it grows."""

    root: Path
    rate_hz: float
    episodes: list[EpisodeRef] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, store: str, folder: str) -> None:
        """Add the episodes of one replay buffer."""
        files = _files(self.root, store)
        try:
            arrays = self._arrays(files, store)
            ends = _ends(files)
        except SourceError as error:
            self._refuse(error.reason, error.message, path=str(error.where.get("file", store)))
            return
        self._compare(files, arrays, int(ends[-1]))
        sidecar = read_sidecar(self.root, ("", folder), self.faults)
        template = self._template(store, arrays, sidecar)
        prefix = f"{store}/" if store else ""
        longest = max(array.shape[0] for array in arrays.values())
        starts = np.append(0, ends[:-1]).tolist()
        for number, (start, stop) in enumerate(zip(starts, ends.tolist(), strict=True)):
            key = f"{prefix}episode_{number:06d}"
            if start == stop:
                message = f"expected an episode of 1 step or more, found none in {ENDS}; drop it"
                self._refuse(Reason.EMPTY_EPISODE, message, key, files.path(ENDS))
            elif start < longest:  # what lies beyond is a fault of its arrays already
                details = {**template.details, "start": start}
                num_steps = min(stop, longest) - start
                self.episodes.append(replace(template, key=key, num_steps=num_steps, details=details))

    def _refuse(self, reason: Reason, message: str, episode: str = "", path: str = "") -> None:
        self.faults.append(Fault(reason=reason, message=message, episode=episode, path=path))

    def _arrays(self, files: Files, store: str) -> dict[str, ZarrArray]:
        """Return the arrays of ``data/`` that can be read; the others are faults."""
        names = sorted(files.folders("data"), key=natural_key)
        if len(names) > MAX_ARRAYS:
            message = f"expected at most {MAX_ARRAYS} arrays in data/, found {len(names)}; give another folder"
            raise SourceError(message, Reason.UNSUPPORTED, file=store)
        arrays = {}
        for name in names:
            try:
                array = read_array(files, f"data/{name}")
                if as_text(name) != name or not math.prod(array.row_shape):
                    raise SourceError("expected rows of one number or more, found none; drop the array")
            except SourceError as error:
                path = str(error.where.get("file", files.path(f"data/{name}/{META}")))
                self.faults.append(Fault(reason=error.reason, message=error.message, stream=as_text(name), path=path))
                continue
            arrays[name] = array
        if not arrays:
            message = "expected arrays in data/, found none that can be read; check the download"
            raise SourceError(message, Reason.EMPTY_EPISODE, file=store)
        return arrays

    def _compare(self, files: Files, arrays: dict[str, ZarrArray], num_steps: int) -> None:
        for name, array in arrays.items():
            if array.shape[0] != num_steps:
                message = f"expected {num_steps} steps as {ENDS} says, found {array.shape[0]}; check the recording"
                path = files.path(f"data/{name}/{META}")
                self.faults.append(Fault(reason=Reason.COUNT_MISMATCH, message=message, stream=name, path=path))

    def _template(self, store: str, arrays: dict[str, ZarrArray], sidecar: Sidecar) -> EpisodeRef:
        """Return an episode as all of the buffer are, but for key, length and start."""
        is_pusht = all(name in arrays and arrays[name].row_shape == shape for name, shape in PUSHT.items())
        times = next((name for name in TIMES if name in arrays and _is_time(arrays[name])), "")
        views = tuple(_view(name, array) for name, array in arrays.items() if _is_view(array))
        signals = [_signal(name, array) for name, array in arrays.items() if not _is_view(array) and name != times]
        large = [signal.name for signal in signals if signal.size > MAX_ROW_SIZE]
        if large:
            self.notes.append(f"arrays of more than {MAX_ROW_SIZE} numbers a step were left alone: {', '.join(large)}")
        own = [TIME]
        if is_pusht and AGENT_POS not in arrays:
            own.append(SignalInfo(name=AGENT_POS, shape=(2,), dtype=arrays["state"].dtype.name, units="px"))
        offered = [signal for signal in signals if signal.name not in (*large, TIME.name)]
        details: dict[str, Any] = {"store": store, "start": 0, "times": times, "is_pusht": len(own) > 1}
        return EpisodeRef(
            key=store,
            num_steps=0,
            rate_hz=self._rate(arrays, sidecar, times, is_pusht),
            views=views,
            signals=(*offered, *own),
            instructions=sidecar.instructions,
            details=details,
        )

    def _rate(self, arrays: dict[str, ZarrArray], sidecar: Sidecar, times: str, is_pusht: bool) -> float:
        if self.rate_hz or sidecar.rate_hz or times:
            return self.rate_hz or sidecar.rate_hz  # 0 with times: they alone say
        if is_pusht:
            self.notes.append(f"the format has no rate; took PushT's {PUSHT_RATE_HZ:g} Hz")
            return PUSHT_RATE_HZ
        if {"robot0_eef_pos", "robot0_demo_start_pose"} <= arrays.keys():
            self.notes.append(f"the format has no rate; took UMI's {UMI_RATE_HZ:g} Hz")
            return UMI_RATE_HZ
        self.notes.append("the format has no rate and meta.json gives no rate_hz: one step counts as one second")
        return DEFAULT_RATE_HZ


def _ends(files: Files) -> np.ndarray:
    """Return ``meta/episode_ends``, checked."""
    array = read_array(files, ENDS)
    if len(array.shape) != 1 or array.dtype.kind not in "iu" or not 0 < array.shape[0] <= MAX_EPISODES:
        message = f"expected 1 to {MAX_EPISODES} whole numbers in {ENDS}, found {array.dtype}{list(array.shape)}; check the recording"
        raise SourceError(message, Reason.BAD_METADATA, file=files.path(f"{ENDS}/{META}"))
    count = -(-array.shape[0] // array.chunks[0])
    ends = np.concatenate([read_rows(files, array, row) for row in range(count)]).astype(np.int64)
    if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] < 1:
        message = f"expected {ENDS} that do not decrease, found others; check the recording"
        raise SourceError(message, Reason.BAD_METADATA, file=files.path(f"{ENDS}/{META}"))
    return ends


def _is_view(array: ZarrArray) -> bool:
    """Return whether rows are images: uint8, or numbers of another type of at least 16 pixels a side."""
    if len(array.shape) != 4 or array.shape[3] != 3 or array.dtype.kind not in "uif":
        return False
    return array.dtype == np.uint8 or min(array.shape[1:3]) >= 16


def _is_time(array: ZarrArray) -> bool:
    return array.dtype.kind == "f" and array.row_shape in ((), (1,))


def _view(name: str, array: ZarrArray) -> ViewInfo:
    return ViewInfo(name=name, height_px=array.shape[1], width_px=array.shape[2], encoding="raw")


def _signal(name: str, array: ZarrArray) -> SignalInfo:
    return SignalInfo(name=name, shape=() if array.row_shape == (1,) else array.row_shape, dtype=array.dtype.name)
