"""Steps of an episode as LeRobot stores them: rows of a Parquet table, images embedded as Hugging Face's ``datasets`` does, or videos beside it."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8
from PIL import Image

from pipeline.video_file import VideoFile
from tasks.decode import encode_jpeg

IMAGES = ("png", "jpeg", "video")
JPEG_QUALITY = 95
BLOCK_STEPS = 64
"""Steps whose frames are held at once; a row group of a table with embedded images."""
VIDEO_OPTIONS = {"g": "2", "crf": "18", "bf": "0", "preset": "veryfast", "mbtree": "0", "rc-lookahead": "0"}
"""A key frame every second frame, as LeRobot's own encoder has it: training seeks at random."""
_CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_MIN_SAMPLES, _MAX_SAMPLES = 100, 10_000

Frames = Mapping[str, np.ndarray]
"""``feature -> uint8[block, h, w, 3]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Open files that an episode is appended to."""

    table: pq.ParquetWriter
    videos: Mapping[str, VideoFile]
    """By feature; empty where images are embedded."""
    images: str
    """One of :data:`IMAGES`."""


def open_table(path: Path, features: Mapping[str, Any]) -> pq.ParquetWriter:
    """Begin a table of steps that has the columns of info.json's ``features``; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, step_schema(features), compression="snappy")


def open_video(path: Path, feature: Mapping[str, Any], rate_hz: float) -> VideoFile:
    """Return a video of a feature of info.json, yet to be entered."""
    return VideoFile(path, feature["shape"][:2], rate_hz, VIDEO_OPTIONS)


def write_episode(outputs: Outputs, columns: Mapping[str, np.ndarray], frames: Iterator[Frames]) -> "PictureCounts":
    """Append an episode to table and videos; return what its images were.

    Parameters
    ----------
    columns
        ``feature -> [step]`` or ``[step, dim]``.
    frames
        Blocks of :data:`BLOCK_STEPS` steps, the last one shorter. With embedded images each is a row group; without, an
        episode is one.
    """
    schema = outputs.table.schema
    embedded = [name for name in schema.names if name not in columns]
    num_steps = len(next(iter(columns.values())))
    sampled = _sampled(num_steps)
    counts = PictureCounts(len(sampled))
    start = 0
    for block in frames:
        stop = min(start + BLOCK_STEPS, num_steps)
        near = sampled[(sampled >= start) & (sampled < stop)] - start
        for name, pictures in block.items():
            counts.add(name, pictures[near])
            if name in outputs.videos:
                outputs.videos[name].write(pictures)
        if embedded:
            cells = {name: _cells(block[name], start, outputs.images) for name in embedded}
            rows = {name: _column(values[start:stop]) for name, values in columns.items()} | cells
            outputs.table.write_table(pa.table([rows[name] for name in schema.names], schema=schema))
        start = stop
    if not embedded:
        outputs.table.write_table(pa.table([_column(columns[name]) for name in schema.names], schema=schema))
    return counts


def step_schema(features: Mapping[str, Any]) -> pa.Schema:
    """Return a table's schema with the description that ``datasets`` keeps in it. A row of one number is a number, as in LeRobot."""
    fields: list[pa.Field] = []
    described: dict[str, dict[str, Any]] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            fields.append(pa.field(name, _CELL))
            described[name] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            kind, value = pa.from_numpy_dtype(feature["dtype"]), {"dtype": feature["dtype"], "_type": "Value"}
            (width,) = feature["shape"]
            fields.append(pa.field(name, pa.list_(kind, width) if width > 1 else kind))
            described[name] = {"feature": value, "length": width, "_type": "Sequence"} if width > 1 else value
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def _column(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values[:1].size == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _cells(pictures: np.ndarray, start: int, images: str) -> pa.Array:
    encode = _png if images == "png" else _jpeg
    return pa.array(
        [
            {"bytes": encode(picture), "path": f"frame_{start + row:06d}.{images}"}
            for row, picture in enumerate(pictures)
        ],
        _CELL,
    )


def _png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _jpeg(picture: np.ndarray) -> bytes:
    return encode_jpeg(picture, JPEG_QUALITY)


def _sampled(num_steps: int) -> np.ndarray:
    """Return the steps whose images LeRobot's ``sample_indices`` takes for statistics."""
    num = min(num_steps, int(np.clip(num_steps**0.75, _MIN_SAMPLES, _MAX_SAMPLES)))
    return np.round(np.linspace(0, num_steps - 1, num)).astype(np.int64)


@dataclass(slots=True)
class PictureCounts:
    """How often each channel of some frames had each value, in whole numbers, so that nothing rounds before the end."""

    num_frames: int = 0
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    """``feature -> int64[3, 256]``."""

    def add(self, name: str, pictures: UInt8[np.ndarray, "n height width 3"]) -> None:
        """Count pictures of one feature."""
        counts = self._of(name)
        for picture in pictures:
            for channel in range(3):
                counts[channel] += np.bincount(picture[..., channel].reshape(-1), minlength=256)

    def merge(self, other: "PictureCounts") -> None:
        """Add the counts of other frames."""
        self.num_frames += other.num_frames
        for name, counts in other.counts.items():
            self._of(name)[...] += counts

    def entries(self, percentiles: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
        """Return LeRobot's entries: values in [0, 1], shaped (3, 1, 1), ``count`` in frames; quantiles are values that occur."""
        return {name: self._entry(counts, percentiles) for name, counts in self.counts.items()}

    def _of(self, name: str) -> np.ndarray:
        return self.counts.setdefault(name, np.zeros((3, 256), np.int64))

    def _entry(self, counts: np.ndarray, percentiles: Sequence[int]) -> dict[str, Any]:
        levels, total, reached = np.arange(256) / 255, counts.sum(axis=1), counts.cumsum(axis=1)
        mean = counts @ levels / total
        std = np.sqrt(
            [row @ (levels - middle) ** 2 / num for row, middle, num in zip(counts, mean, total, strict=True)]
        )
        present = [levels[row > 0] for row in counts]
        values: dict[str, Sequence[float] | np.ndarray] = {
            "min": [row[0] for row in present], "max": [row[-1] for row in present], "mean": mean, "std": std,
        }  # fmt: skip
        for percent in percentiles:
            ranks = -(-total * percent // 100)
            values[f"q{percent:02d}"] = [levels[np.searchsorted(row, rank)] for row, rank in zip(reached, ranks)]
        entry: dict[str, Any] = {name: np.reshape(value, (3, 1, 1)).tolist() for name, value in values.items()}
        return {**entry, "count": [self.num_frames]}
