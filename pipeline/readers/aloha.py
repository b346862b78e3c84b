"""ALOHA, ACT and Mobile ALOHA: one HDF5 file an episode, images plain or as zero-padded JPEG.

``docs/formats.md`` describes the layout and what is read of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.readers.folders import MAX_FRAME_NBYTES, source_root
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
from pipeline.readers.hdf5_rows import Rows
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex, ViewInfo
from tasks.decode import decode_frame, frame_size

FOLDERS = ("", "observations")
IMAGES = "observations/images"
CHANNEL_ORDERS = ("openpi", "rgb", "bgr")
HEAD_NBYTES = 64 * 2**10
LENGTHS = "compress_len"
MAX_LENGTHS = 2**22
ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
JOINTS = tuple(f"{side}_{joint}" for side in ("left", "right") for joint in ARM)
_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82"}
"""How an image begins and ends."""


@dataclass(frozen=True, slots=True)
class AlohaReader:
    """Episodes ``episode_<N>.hdf5`` at or below ``root``."""

    name: ClassVar[str] = "aloha"

    root: Path
    channel_order: str = "openpi"
    """Order of the channels that the recorder had in memory: ``rgb``, ``bgr``, or ``openpi``, which is what openpi's converter
    takes for granted: ``bgr`` where it wrote JPEG with cv2.imencode, ``rgb`` where it wrote plain images. No file says it."""
    rate_hz: float = 50.0
    """Steps per second; no file says it."""

    def __post_init__(self) -> None:
        if self.channel_order not in CHANNEL_ORDERS:
            raise UsageError(
                f"expected a channel_order of {', '.join(CHANNEL_ORDERS)}, found {self.channel_order!r}; correct it"
            )
        if not 0 < self.rate_hz <= 1e6:
            raise UsageError(f"expected a rate_hz above 0, found {self.rate_hz}; correct it")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if an ALOHA episode lies at or below ``root``, else what is missing."""
        return sniff_files(root, _miss)

    def index(self) -> SourceIndex:
        """List the episodes by the shapes of their arrays and the header of each view's first JPEG."""
        root = source_root(self.root)
        require_h5py()
        episodes: list[EpisodeRef] = []
        faults: list[Fault] = []
        others: dict[str, None] = {}
        for path in hdf5_files(root):
            if isinstance(path, Fault):
                faults.append(path)
                continue
            try:
                with open_hdf5(root, path) as file:
                    ref, found = self._describe(file)
            except SourceError as error:
                faults.append(Fault(reason=error.reason, message=error.message, episode=file_key(path), path=path))
                continue
            episodes.append(ref)
            faults += place_faults(found.faults, ref.key)
            others.update(dict.fromkeys(found.others))
        notes = [f"arrays that are neither images nor rows of numbers were left alone: {', '.join(others)}"]
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(episodes),
            faults=tuple(faults),
            state=("qpos",),
            actions=("action",),
            notes=tuple(notes if others else ()) + self._colour_notes(episodes),
        )

    def _colour_notes(self, episodes: Sequence[EpisodeRef]) -> tuple[str, ...]:
        if self.channel_order != "openpi" or not any(ref.views for ref in episodes):
            return ()
        return ("no file says whether images are RGB or BGR; read as openpi does: look at them, or say channel_order",)

    def _describe(self, file: Hdf5File) -> tuple[EpisodeRef, Arrays]:
        missing = _miss(file)
        if missing:
            raise SourceError(f"expected an ALOHA episode, found {missing}; remove the file", file=file.path)
        found = Arrays()
        found.add_all(file, FOLDERS, but=(LENGTHS,))
        found.require("action", file.path)
        for name in file.names(IMAGES):
            self._add_view(file, name, found)
        num_steps = found.count_steps("action", file.path)
        if num_steps == 0:
            raise SourceError(
                "expected 1 step or more, found none; drop the file", Reason.EMPTY_EPISODE, file=file.path
            )
        ref = EpisodeRef(
            key=file_key(file.path),
            num_steps=num_steps,
            rate_hz=self.rate_hz,
            views=tuple(found.views),
            signals=(*(_with_names(signal) for signal in found.signals), TIME),
            details={"file": file.path, "sim": file.text("/", "sim"), "channel_order": self.channel_order},
        )
        return ref, found

    def _add_view(self, file: Hdf5File, name: str, found: Arrays) -> None:
        """Add a view: plain where it has 4 axes, else compressed, whatever the attribute ``compress`` says."""
        path = f"{IMAGES}/{name}"
        if not file.is_array(path):
            found.others.append(name)
            return
        try:
            rows = file.rows(path, "biufS")
        except SourceError as error:
            found.faults.append(Fault(reason=error.reason, message=error.message, stream=name, path=file.path))
            return
        if len(rows.row_shape) == 3:
            num_signals = len(found.signals)
            found.add(file, name, path)
            found.others += [signal.name for signal in found.signals[num_signals:]]
            del found.signals[num_signals:]
        elif _is_compressed(rows):
            height, width = _first_size(rows)
            encoding = "raw" if self.channel_order == "rgb" else "jpeg"
            found.views.append(ViewInfo(name=name, height_px=height, width_px=width, encoding=encoding))
            found.counts[name] = rows.num_steps
        else:
            found.others.append(name)

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, reading those rows alone."""
        return read_signals(self.root, ref, names, steps, FOLDERS)

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield each step's frame in RGB: the JPEG that was recorded, or pixels where it holds others or the array is plain."""
        lengths = cache(partial(_read_lengths, self.root, ref))
        path = f"{IMAGES}/{ref.view(view).name}"
        convert = partial(self._frame, lengths)
        return read_frames(self.root, ref, view, steps, path=path, convert=convert, kinds="biufS")

    def _frame(self, lengths: Callable[[], np.ndarray], row: np.ndarray, step: int) -> Frame:
        if np.ndim(row) == 3:
            return np.array(row[:, :, ::-1] if self.channel_order == "bgr" else row, order="C")
        data = image_bytes(np.asarray(row).tobytes(), lambda: lengths()[:, step])
        return np.ascontiguousarray(decode_frame(data)[:, :, ::-1]) if self.channel_order == "rgb" else data

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the episode's file."""
        return str(ref.details["file"])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the episode's file."""
        yield Path(ref.details["file"])


def _miss(file: Hdf5File) -> str:
    if not file.is_array("action"):
        return "no HDF5 file with /action"
    return "" if file.names("observations") else "no HDF5 file with /action and /observations"


def _with_names(signal: SignalInfo) -> SignalInfo:
    return replace(signal, names=JOINTS) if signal.shape == (len(JOINTS),) else signal


def _is_compressed(rows: Rows) -> bool:
    is_text = rows.dtype.kind == "S" and not rows.row_shape
    nbytes = rows.dtype.itemsize if is_text else sum(rows.row_shape)
    return (is_text or (rows.dtype == np.uint8 and len(rows.row_shape) == 1)) and 0 < nbytes <= MAX_FRAME_NBYTES


def _first_size(rows: Rows) -> tuple[int, int]:
    """Return height and width by the header of the first frame; (0, 0) if it has none."""
    try:
        row = rows.read(*rows.block(0, 1))[0] if rows.num_steps else np.zeros(0, np.uint8)
        return frame_size(np.asarray(row).tobytes()[:HEAD_NBYTES])
    except SourceError:
        return 0, 0  # the frame is read, and refused with the reason, when it is asked for


def _read_lengths(root: Path, ref: EpisodeRef) -> np.ndarray:
    """Return ``/compress_len`` as ``[camera, step]``, in whatever order; no cameras where it is not there or makes no sense.

    Writers disagree about the order of cameras, and one counts depth among them, so that every row is tried.
    """
    nothing = np.zeros((0, ref.num_steps))
    with open_hdf5(root, ref.details["file"]) as file:
        if not file.is_array(LENGTHS):
            return nothing
        rows = file.rows(LENGTHS)
        if len(rows.row_shape) != 1 or rows.num_steps * rows.row_shape[0] > MAX_LENGTHS:
            return nothing
        lengths = np.concatenate([rows.read(*rows.block(k, rows.num_steps)) for k in _block_starts(rows)])
    lengths = lengths if lengths.shape[1] == ref.num_steps else lengths.T
    return lengths if lengths.shape[1] == ref.num_steps else nothing


def _block_starts(rows: Rows) -> Iterator[int]:
    step = 0
    while step < rows.num_steps:
        yield step
        step = rows.block(step, rows.num_steps)[1]


def image_bytes(padded: bytes, lengths: Callable[[], np.ndarray]) -> bytes:
    """Return the JPEG (or PNG) that a row holds without its padding; SourceError where there is none, or it is cut.

    The padding is zeros, which no image ends with. Where it is something else, ``lengths`` says where the image may end, and is
    believed only where an image does end there.
    """
    bare = padded.rstrip(b"\0")
    end = next((end for begin, end in _ENDS.items() if bare.startswith(begin)), b"")
    if not end:
        found = f"one that begins with {bare[:8]!r}" if bare else "zeros"
        message = f"expected a JPEG or PNG, found {found}; record it again"
        raise SourceError(message, Reason.DECODE if bare else Reason.TRUNCATED)
    if bare.endswith(end):
        return bare
    for length in lengths():
        if np.isfinite(length) and 0 < length <= len(padded) and padded[: int(length)].endswith(end):
            return padded[: int(length)]
    stop = padded.rfind(end)
    if stop < 0:
        message = f"expected a whole image, found {len(bare)} bytes of one without its end; record it again"
        raise SourceError(message, Reason.TRUNCATED)
    return padded[: stop + len(end)]
