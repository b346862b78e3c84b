"""Frames of a video by exact index, in one sequential pass, and what is missing said frame by frame."""

import bisect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from pipeline.readers.folders import inside, open_inside
from schemas.errors import Reason, SchemaError, SourceError
from schemas.source import Fault

MAX_PIXELS = 1 << 26
"""Greatest area of a frame: a decoder allocates several of what the header declares."""

_DECODER_OPTIONS = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
_DAV1D_OPTIONS = {**_DECODER_OPTIONS, "max_frame_delay": "1"}
"""dav1d otherwise reports a damaged packet only at a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """What a video's header declares."""

    num_frames: int
    """Declared number of frames; 0 where the container does not say."""
    height_px: int
    width_px: int
    rate_hz: float
    """Average rate; 0 where the container does not say."""
    codec: str
    """FFmpeg's name of the decoder, such as ``h264`` or ``libdav1d``."""


def probe_video(path: Path) -> VideoInfo:
    """Read a video's header; SourceError (MISSING_FILE, IO, TRUNCATED, DECODE, UNSUPPORTED) where there is none to read."""
    with _open(path) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        rate_hz = float(stream.average_rate or 0)
        return VideoInfo(
            num_frames=stream.frames,
            height_px=context.height,
            width_px=context.width,
            rate_hz=rate_hz,
            codec=context.name,
        )


def read_video_frames(path: Path, steps: np.ndarray) -> Iterator[np.ndarray | Fault]:
    """Yield for each of ``steps`` (sorted, repeats allowed) the frame of exactly that index, or why there is none.

    Frames are counted in order of presentation and known by their packets' timestamps, not by counting what the decoder
    gives out: one that drops a damaged frame must not shift its followers. A first pass over the packets, which decodes nothing
    and is remembered for a few files, finds the timestamps; a second decodes from the last keyframe before the first
    step to the last step. Memory is a few frames and 24 bytes a packet.

    Decoding is strict (``err_detect=explode``): after a damaged packet every frame that may depend on it is a fault, since concealment
    would make up pixels. A frame is ``uint8[height, width, 3]`` RGB by swscale from the stream's own matrix and
    range, as PyAV and so LeRobot show it; a step asked for again yields the same array again.
    """
    wanted = [int(step) for step in steps]
    if wanted != sorted(wanted) or (wanted and wanted[0] < 0):
        raise SchemaError("expected sorted steps of 0 or more, found others; report this as a bug of the reader")
    if not wanted:
        return
    try:
        index = _index(path)
        yield from _match(path, index, wanted, _decode(path, index, wanted[0], wanted[-1]))
    except SourceError as error:
        yield from (_fault(path, step, error.reason, error.message) for step in wanted)


def probe_source_video(root: Path, path: str) -> VideoInfo:
    """Read the header of a video of a source; SourceError where it leads out of it, or there is none to read."""
    os.close(open_inside(root, path))
    return probe_video(Path(inside(root, path)))


def read_source_video(root: Path, path: str, steps: np.ndarray) -> Iterator[np.ndarray | Fault]:
    """Yield what :func:`read_video_frames` does of a video of a source, and faults where the file itself is refused."""
    done = 0
    try:
        os.close(open_inside(root, path))
        for frame in read_video_frames(Path(inside(root, path)), steps):
            yield frame
            done += 1
    except SourceError as error:
        for step in np.asarray(steps)[done:].tolist():
            yield Fault(reason=error.reason, message=error.message, start=step, stop=step + 1, path=path)


@dataclass(frozen=True, slots=True)
class _Index:
    """The packets of a video, as they are stored and as they are shown."""

    pts: tuple[int, ...]
    """Timestamps in order of presentation: frame ``i`` is shown at ``pts[i]``. Empty where packets have none to go by."""
    numbers: Mapping[int, int]
    """Timestamp to number of the packet in order of storage."""
    keyframes: tuple[tuple[int, int, int], ...]
    """Number, presentation and decoding timestamp of each packet from which decoding can start, in order of storage."""
    num_frames: int
    short: str
    """What says that the file is truncated; empty where nothing does."""

    def missing(self, step: int) -> tuple[Reason, str]:
        """Say why there is no frame ``step``."""
        if self.short:
            return (
                Reason.TRUNCATED,
                f"expected frame {step}, found {self.num_frames} frames: {self.short}; record it again",
            )
        message = f"expected frame {step}, found a whole video of {self.num_frames} frames; check the episode's length"
        return Reason.COUNT_MISMATCH, message

    def step(self, pts: int | None) -> int:
        """Return the index of the frame shown at ``pts``; -1 where its packet is unknown or its index uncertain."""
        if pts is None or pts not in self.numbers or pts > self.pts[-1]:
            return -1
        return bisect.bisect_left(self.pts, pts)

    def is_suspect(self, step: int, windows: list[tuple[int, int]]) -> bool:
        """Say whether frame ``step`` lies in one of the ``windows``."""
        pts = self.pts[step]
        return any(self.numbers[pts] >= bad and pts < until for bad, until in windows)

    def window(self, bad: int) -> tuple[int, int]:
        """Return the number from which, and the timestamp before which, frames may depend on packet ``bad``.

        Frames stored after the next keyframe but shown before it may look back over it (open groups of pictures).
        """
        return bad, next((pts for number, pts, _ in self.keyframes if number > bad), 1 << 62)


def _index(path: Path) -> _Index:
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read_index(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _read_index(path: Path, nbytes: int, mtime_ns: int) -> _Index:
    """Read all packets' timestamps. Size and time are there for the cache, so that a replaced file is read again."""
    packets: list[tuple[int | None, int | None, bool]] = []
    num_stored, short = 0, ""
    with _open(path) as container:
        stream = container.streams.video[0]
        try:
            for packet in container.demux(stream):
                num_stored += packet.size > 0
                if packet.size and not packet.is_discard:  # an edit list may leave frames out; decoders do too
                    packets.append((packet.pts, packet.dts, packet.is_keyframe))
                    short = short or ("its last packet is cut off" if packet.is_corrupt else "")
        except av.FFmpegError as error:
            short = f"packet {num_stored} cannot be read ({error.strerror})"
        if stream.frames > num_stored:
            short = short or f"its header declares {stream.frames}"
    return _order(packets, short)


def _order(packets: list[tuple[int | None, int | None, bool]], short: str) -> _Index:
    """Put packets (pts, dts, is keyframe) in order of presentation.

    Of a truncated file only those up to the last decoding timestamp count: packets that were lost came after it and are shown after it,
    so a frame shown later still might have any index, and a neighbour would be taken for it.
    """
    pts = [p for p, _, _ in packets if p is not None]
    if len(set(pts)) < len(packets):
        return _Index((), {}, (), len(packets), short)
    numbers = {p: number for number, p in enumerate(pts)}
    keys = tuple((n, p, p if d is None else d) for n, (p, d, key) in enumerate(packets) if key and p is not None)
    if short and packets:
        end = packets[-1][1]
        pts = [p for p in pts if end is not None and p <= end]
    return _Index(tuple(sorted(pts)), numbers, keys, len(pts), short)


_Decoded = tuple[int, "VideoFrame | str"]
"""Index of a frame, and the frame or what is wrong with it."""


def _match(path: Path, index: _Index, wanted: list[int], decoded: Iterator[_Decoded]) -> Iterator[np.ndarray | Fault]:
    """Walk steps and decoded frames side by side; both are sorted."""
    reformatter = VideoReformatter()
    at, frame = next(decoded, _END)
    given, pixels = -1, np.empty(0)
    for step in wanted:
        while at < step:
            at, frame = next(decoded, _END)
        if step == given:
            yield pixels
        elif at == step and isinstance(frame, VideoFrame):
            given, pixels = step, _pixels(frame, reformatter)
            yield pixels
        elif step >= index.num_frames:
            yield _fault(path, step, *index.missing(step))
        else:
            cause = frame if at == step and isinstance(frame, str) else "the decoder refused it"
            message = f"expected frame {step} of {index.num_frames} to decode, found that {cause}; record it again"
            yield _fault(path, step, Reason.TRUNCATED if index.short else Reason.DECODE, message)


_END: _Decoded = (1 << 62, "")


def _decode(path: Path, index: _Index, start: int, stop: int) -> Iterator[_Decoded]:
    """Yield the frames from ``start`` to ``stop`` that the decoder gives, sorted; those that it skips are missing."""
    if start >= index.num_frames:
        return
    with _open(path) as container:
        stream = container.streams.video[0]
        if not index.pts:
            yield from _decode_counting(container, stream, stop)
            return
        first = _seek(container, stream, index, start)
        windows: list[tuple[int, int]] = []
        last = -1
        for number, frames, failed in _packets(container, stream, first):
            windows += [index.window(number)] * failed
            for frame in frames:
                step = index.step(frame.pts)
                if step > stop:
                    return
                if step > last:
                    last = step
                    damaged = frame.is_corrupt or index.is_suspect(step, windows)
                    yield step, "it depends on a damaged packet" if damaged else frame


def _decode_counting(container: InputContainer, stream: VideoStream, stop: int) -> Iterator[_Decoded]:
    """Decode from the beginning where packets have no timestamps to go by; after a damaged packet nothing is certain."""
    step = 0
    for _, frames, failed in _packets(container, stream, 0):
        for frame in frames:
            yield step, frame
            step += 1
        if failed or step > stop:
            return


def _packets(
    container: InputContainer, stream: VideoStream, first: int
) -> Iterator[tuple[int, list[VideoFrame], bool]]:
    """Decode packet after packet: its number, the frames that came out, and whether it is damaged."""
    number = first
    try:
        for packet in container.demux(stream):
            failed = packet.is_corrupt
            try:
                frames = packet.decode()
            except av.FFmpegError:
                frames, failed = [], True
            yield number, frames, failed
            number += packet.size > 0 and not packet.is_discard
    except av.FFmpegError:
        return  # the index says that the file ends here


def _seek(container: InputContainer, stream: VideoStream, index: _Index, start: int) -> int:
    """Go to the last keyframe shown at or before frame ``start``; return its number in order of storage.

    Demuxers seek by decoding timestamps, and not all exactly: where they land is looked at, and the whole way taken if it is no use.
    """
    usable = [key for key in index.keyframes if key[1] <= index.pts[start]]
    if len(usable) < 2:
        return 0
    number, _, dts = usable[-1]
    container.seek(dts, stream=stream)
    landed = next(iter(container.demux(stream)), None)
    found = -1 if landed is None or landed.pts is None or not landed.is_keyframe else index.numbers.get(landed.pts, -1)
    if 0 <= found <= number:
        container.seek(dts, stream=stream)
        return found
    container.seek(index.keyframes[0][2], stream=stream)
    return 0


def _open(path: Path) -> InputContainer:
    try:
        container = av.open(str(path))
    except UnicodeDecodeError as error:  # before PyAV 19, which has no option for it any more
        message = f"expected names in UTF-8 in {path.name}, found other bytes; write the video again"
        raise SourceError(message, Reason.DECODE) from error
    except (av.FFmpegError, OSError) as error:
        raise _unreadable(path, error) from error
    if not container.streams.video:
        container.close()
        raise SourceError(f"expected a video stream in {path.name}, found none; check the file", Reason.UNSUPPORTED)
    context = container.streams.video[0].codec_context
    if getattr(container.streams.video[0], "codec_context", None) is None:  # of a codec that FFmpeg does not know
        container.close()
        raise SourceError(
            f"expected a video in a known codec in {path.name}, found none; check the file", Reason.UNSUPPORTED
        )
    if context.width * context.height > MAX_PIXELS:
        container.close()
        raise SourceError(
            f"expected frames of at most {MAX_PIXELS} pixels, found {context.width}x{context.height}; check the file",
            Reason.TOO_LARGE,
        )
    context.options = dict(_DAV1D_OPTIONS if context.name == "libdav1d" else _DECODER_OPTIONS)
    context.thread_count = 1  # a worker process per core; and frame threads report damage late
    return container


def _unreadable(path: Path, error: Exception) -> SourceError:
    if isinstance(error, FileNotFoundError):
        return SourceError(f"expected a video at {path.name}, found no file; restore it", Reason.MISSING_FILE)
    if not isinstance(error, av.FFmpegError) or isinstance(error, PermissionError):
        return SourceError(f"expected to read {path.name}, found: {error}; check the disk and permissions", Reason.IO)
    nbytes = path.stat().st_size
    reason = Reason.TRUNCATED if nbytes == 0 or _lacks_index(path) else Reason.DECODE
    return SourceError(
        f"expected a video, found {nbytes} bytes that cannot be opened ({error.strerror}); record it again", reason
    )


def _lacks_index(path: Path) -> bool:
    """Say whether an mp4 ends before its ``moov`` box, which recorders write last (ISO 14496-12, 4.2)."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        at, kind = 0, b""
        while at + 8 <= nbytes:
            file.seek(at)
            head = file.read(16)
            size, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if at == 0 and kind != b"ftyp":
                return False
            size = int.from_bytes(head[8:16], "big") if size == 1 else size or nbytes - at
            if kind == b"moov":
                return at + size > nbytes
            at += max(size, 8)
    return kind != b""


def _pixels(frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    return reformatter.reformat(frame, format="rgb24", interpolation="BILINEAR").to_ndarray()


def _fault(path: Path, step: int, reason: Reason, message: str) -> Fault:
    return Fault(reason=reason, message=message, start=step, stop=step + 1, path=path.name)
