"""The node of every graph: recorded steps in, decoded frames and numeric rows out.

``open_raw`` wraps it in lazy arrays and a shard task of ``convert`` calls it, so that a notebook shows what is written.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int64

from pipeline.readers.protocol import Reader
from schemas.errors import Reason, SchemaError, SourceError
from schemas.recipe import ViewRecipe
from schemas.source import EpisodeRef, Fault, Frame, ViewInfo
from tasks.decode import decode_depth, decode_frame, decode_labels, frame_size
from tasks.resize import decode_resized, resize_frame


class Laps:
    """Seconds by stage of one task's work: whatever passes between two laps belongs to the stage that the second one names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Give the time since the last lap to ``stage``."""
        now_s = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s


def frames(
    reader: Reader,
    ref: EpisodeRef,
    view: str,
    steps: Int64[np.ndarray, " n"],
    target: ViewRecipe | None = None,
    *,
    odd_sizes: dict[int, tuple[int, int]] | None = None,
    laps: Laps | None = None,
) -> Iterator[np.ndarray | Fault]:
    """Yield the decoded frame, or why there is none, of each of ``steps`` (sorted, repeats allowed), in order.

    An rgb view yields ``uint8[height, width, 3]``, resized to ``target`` where one is given; a depth view ``float32[height,
    width]`` in m; a label view ``uint8`` or ``uint16[height, width]``. A step asked for again yields the same array again: it
    is read, decoded and resized once. Memory is one encoded and one decoded frame. Treat frames as read-only. ``odd_sizes``
    takes height and width of steps whose frame has another size than the view declares, before they are yielded; ``laps`` the time
    of reading, decoding and resizing.

    Raises
    ------
    SourceError
        With reason UNSUPPORTED, where ``target`` asks to resize a view that is not rgb: labels must not be mixed.
    """
    info = ref.view(view)
    if target is not None and info.kind != "rgb":
        raise SourceError(
            f"expected an rgb view to resize for {target.name!r}, found the {info.kind} view {view!r}; choose another with --view",
            Reason.UNSUPPORTED,
        )
    wanted, repeats = np.unique(np.asarray(steps, np.int64), return_counts=True)
    recorded = reader.read_frames(ref, view, wanted)
    laps = laps or Laps()
    for step, count, frame in zip(wanted.tolist(), repeats.tolist(), recorded, strict=True):
        laps.lap("read")
        found = _pixels(frame, info, target, laps)
        if odd_sizes is not None and info.height_px and not isinstance(frame, Fault) and not isinstance(found, Fault):
            size = frame.shape[:2] if isinstance(frame, np.ndarray) else frame_size(frame)
            if size != (info.height_px, info.width_px):
                odd_sizes[step] = size
        if isinstance(found, Fault):
            place = {"start": step, "stop": step + 1} if found.start == found.stop else {}
            path = found.path or reader.frame_path(ref, view, step)
            found = replace(found, episode=ref.key, stream=view, path=path, **place)
        for _ in range(count):
            yield found


def _pixels(frame: Frame, info: ViewInfo, target: ViewRecipe | None, laps: Laps) -> np.ndarray | Fault:
    if isinstance(frame, Fault):
        return frame
    try:
        if target is None:
            return frame if isinstance(frame, np.ndarray) else _decode(frame, info.kind)
        out = np.empty((target.height_px, target.width_px, 3), np.uint8)
        if not isinstance(frame, np.ndarray) and target.decode == "fast":
            decode_resized(frame, out, method=target.resize, filter=target.filter, fast=True)
            laps.lap("decode")
            return out
        decoded = frame if isinstance(frame, np.ndarray) else decode_frame(frame)
        laps.lap("decode")
        resize_frame(decoded, out, method=target.resize, filter=target.filter)
        laps.lap("resize")
        return out
    except SourceError as error:
        return Fault(reason=error.reason, message=error.message, path=str(error.where.get("file", "")))


def _decode(data: bytes, kind: str) -> np.ndarray:
    if kind == "depth":
        return decode_depth(data)
    if kind == "labels":
        return decode_labels(data)
    return decode_frame(data)


def signals(
    reader: Reader, ref: EpisodeRef, names: Sequence[str], steps: Int64[np.ndarray, " n"]
) -> tuple[Float64[np.ndarray, "n features"], tuple[Fault, ...]]:
    """Read ``names`` at ``steps`` and join their flattened rows, in the order asked for, in float64.

    Rows that could not be read are NaN, and each is named by one of the faults, which come back beside the values.
    """
    block = reader.read_signals(ref, names, steps)
    parts = [np.zeros((len(steps), 0))]
    for name in names:
        shape = () if name == "timestamp_s" else ref.signal(name).shape
        found = block.values[name]
        if found.shape != (len(steps), *shape):
            raise SchemaError(
                f"expected {name}[{len(steps)}, {shape}], found {list(found.shape)}; report this as a bug of the reader"
            )
        with np.errstate(invalid="ignore"):  # of a signaling NaN, which a damaged chunk may hold
            flat = found.reshape(len(steps), -1) if len(steps) else np.zeros((0, int(np.prod(shape))))
            parts.append(flat.astype(np.float64))
    return np.concatenate(parts, axis=1), tuple(replace(fault, episode=ref.key) for fault in block.faults)
