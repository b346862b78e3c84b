"""A video that is written picture by picture: H.264 in MP4, in one thread and without a date, so that bytes repeat."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from schemas.errors import UsageError

CODEC, CODEC_NAME, PIXEL_FORMAT = "libx264", "h264", "yuv420p"


class VideoFile:
    """A video file that is being written; a context manager, which ends the file.

    Parameters
    ----------
    path
        File to write; its folder is made.
    size_px
        Height and width, both even.
    rate_hz
        Pictures a second.
    options
        Of the encoder.
    """

    def __init__(self, path: Path, size_px: tuple[int, int], rate_hz: float, options: Mapping[str, str]) -> None:
        self._path, self._size_px, self._rate_hz, self._options = path, size_px, rate_hz, dict(options)

    def __enter__(self) -> "VideoFile":
        import av  # takes long to import

        if CODEC not in av.codecs_available:
            raise UsageError(
                f"expected the video encoder {CODEC}, found a build of av without it; choose pictures, or install another build"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(self._path), "w", options={"fflags": "+bitexact"})
        rate = Fraction(self._rate_hz).limit_denominator(1001)
        stream = self._container.add_stream(CODEC, rate=rate, options=self._options)
        if not isinstance(stream, av.VideoStream):
            raise UsageError(f"expected a video encoder, found {CODEC}; install another build of av")
        (stream.height, stream.width), stream.pix_fmt, stream.thread_count = self._size_px, PIXEL_FORMAT, 1
        self._stream, self._from_array = stream, av.VideoFrame.from_ndarray
        return self

    def write(self, pictures: UInt8[np.ndarray, "n height width 3"]) -> None:
        """Append pictures."""
        for picture in pictures:
            self._container.mux(self._stream.encode(self._from_array(picture, format="rgb24")))

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()
