"""Pictures in ROS messages: ``sensor_msgs/Image`` row by row, ``sensor_msgs/CompressedImage`` as it is."""

from collections.abc import Mapping

import numpy as np

from pipeline.readers.folders import MAX_FRAME_NBYTES
from pipeline.readers.ros_messages import Value
from schemas.errors import Reason, SourceError
from schemas.source import ViewInfo
from tasks.decode import frame_size

IMAGE, COMPRESSED = "sensor_msgs/Image", "sensor_msgs/CompressedImage"
COLOURS: Mapping[str, tuple[int, ...]] = {
    "rgb8": (0, 1, 2), "bgr8": (2, 1, 0), "rgba8": (0, 1, 2), "bgra8": (2, 1, 0), "mono8": (0, 0, 0), "8UC1": (0, 0, 0), "8UC3": (2, 1, 0),
}  # fmt: skip
"""Place of red, green and blue in a pixel; 8UC3, which does not say, is OpenCV's order."""
CHANNELS: Mapping[str, int] = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC1": 1, "8UC3": 3}
DEPTHS: Mapping[str, tuple[str, float]] = {"16UC1": ("u2", 1e-3), "32FC1": ("f4", 1.0)}
"""NumPy type and metres a unit of depth images (REP 118)."""


def describe_image(topic: str, kind: str, values: Mapping[str, Value]) -> ViewInfo:
    """Return the view that a topic's first message begins; SourceError where it is no picture that can be read."""
    if kind == COMPRESSED:
        data = compressed_image(values)
        height, width = frame_size(data)
        return ViewInfo(name=topic, height_px=height, width_px=width, encoding="png" if data[:1] == b"\x89" else "jpeg")
    pixels = image(values)
    height, width = pixels.shape[:2]
    view_kind = "rgb" if pixels.ndim == 3 else "depth"
    return ViewInfo(name=topic, height_px=height, width_px=width, encoding="raw", kind=view_kind)


def compressed_image(values: Mapping[str, Value]) -> bytes:
    """Return the JPEG or PNG of a ``CompressedImage``; SourceError where it is something else, such as compressed depth."""
    data, format = values.get("data"), str(values.get("format", ""))
    encoded = data.tobytes() if isinstance(data, np.ndarray) and data.nbytes <= MAX_FRAME_NBYTES else b""
    if not encoded.startswith((b"\xff\xd8", b"\x89PNG")):
        message = f"expected a JPEG or PNG, found {format[:40]!r} of {len(encoded)} bytes; record it as one"
        raise SourceError(message, Reason.UNSUPPORTED)
    return encoded


def image(values: Mapping[str, Value]) -> np.ndarray:
    """Return the pixels of an ``Image``, padding at the ends of rows cut off.

    ``uint8[height, width, 3]`` in RGB, grey repeated and alpha left out; depth ``float32[height, width]`` in m, 0 or NaN where there is
    none. SourceError where it is in another encoding, or has fewer bytes than it says.
    """
    encoding, data = str(values.get("encoding", "")), values.get("data")
    height, width, step = (int(np.asarray(values.get(name, 0))) for name in ("height", "width", "step"))
    dtype, scale = DEPTHS.get(encoding, ("u1", 1.0))
    channels = CHANNELS.get(encoding, 1 if encoding in DEPTHS else 0)
    if not channels or not isinstance(data, np.ndarray):
        known = ", ".join([*CHANNELS, *DEPTHS])
        raise SourceError(f"expected an image in {known}, found {encoding[:40]!r}; convert it", Reason.UNSUPPORTED)
    row_nbytes = width * channels * np.dtype(dtype).itemsize
    if height <= 0 or width <= 0 or step < row_nbytes or height * step > data.nbytes:
        message = f"expected {height} rows of {row_nbytes} bytes or more, found step {step} and {data.nbytes} bytes; record it again"
        raise SourceError(message, Reason.WRONG_SHAPE)
    rows = data[: height * step].reshape(height, step)[:, :row_nbytes]
    if encoding in DEPTHS:
        order = ">" if np.asarray(values.get("is_bigendian", 0)) else "<"
        return np.ascontiguousarray(rows).view(order + dtype).astype(np.float32) * np.float32(scale)
    return np.ascontiguousarray(rows.reshape(height, width, channels)[:, :, list(COLOURS[encoding])])
