"""One episode as LeRobot v2.1 lays it out: a Parquet table, its images embedded as Hugging Face's ``datasets`` does, or videos beside it."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
class EpisodeFiles:
    """Where an episode goes."""

    table: Path
    videos: Mapping[str, Path]
    """By feature; empty where images are embedded."""
    images: str
    """One of :data:`IMAGES`."""
    rate_hz: float


def write_episode(
    files: EpisodeFiles, columns: Mapping[str, np.ndarray], frames: Iterator[Frames], features: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Write table and videos of an episode; return the statistics of its images.

    Parameters
    ----------
    columns
        ``feature -> [step]`` or ``[step, dim]``, in the order of the table.
    frames
        Blocks of :data:`BLOCK_STEPS` steps, the last one shorter.
    features
        Of info.json, by which columns are ordered and described.
    """
    num_steps = len(next(iter(columns.values())))
    files.table.parent.mkdir(parents=True, exist_ok=True)
    stats = _PictureStats(_sampled(num_steps))
    with ExitStack() as stack:
        videos = {
            name: stack.enter_context(VideoFile(path, features[name]["shape"][:2], files.rate_hz, VIDEO_OPTIONS))
            for name, path in files.videos.items()
        }
        schema = _schema(columns, features)
        table = stack.enter_context(pq.ParquetWriter(files.table, schema, compression="snappy"))
        start = 0
        for block in frames:
            stop = start + len(next(iter(block.values()))) if block else min(start + BLOCK_STEPS, num_steps)
            for name, pictures in block.items():
                stats.add(name, start, pictures)
                if name in videos:
                    videos[name].write(pictures)
            cells = {} if videos else {name: _cells(block[name], start, files.images) for name in block}
            rows = {name: _column(values[start:stop]) for name, values in columns.items()} | cells
            table.write_table(pa.table([rows[name] for name in schema.names], schema=schema))
            start = stop
    return stats.finish()


def _schema(columns: Mapping[str, np.ndarray], features: Mapping[str, Any]) -> pa.Schema:
    """Return the table's schema with the description that ``datasets`` keeps in it."""
    fields, described = [], {}
    for name, feature in features.items():
        if name in columns:
            values = columns[name]
            kind, value = pa.from_numpy_dtype(values.dtype), {"dtype": feature["dtype"], "_type": "Value"}
            is_vector = values.ndim == 2
            fields.append(pa.field(name, pa.list_(kind, values.shape[1]) if is_vector else kind))
            described[name] = {"feature": value, "length": values.shape[1], "_type": "Sequence"} if is_vector else value
        elif feature["dtype"] == "image":
            fields.append(pa.field(name, _CELL))
            described[name] = {"_type": "Image"}
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def _column(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


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
class _PictureStats:
    """Moments of each channel over sampled frames, in whole numbers, so that nothing rounds before the end."""

    steps: np.ndarray
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    """``feature -> int64[3, 256]``: how often each channel had each value."""

    def add(self, name: str, start: int, pictures: np.ndarray) -> None:
        """Count those of ``pictures``, the first of which is step ``start``, that are sampled."""
        counts = self.counts.setdefault(name, np.zeros((3, 256), np.int64))
        for step in self.steps[(self.steps >= start) & (self.steps < start + len(pictures))].tolist():
            for channel in range(3):
                counts[channel] += np.bincount(pictures[step - start, ..., channel].reshape(-1), minlength=256)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Return LeRobot's entries: values in [0, 1], shaped (3, 1, 1), ``count`` in frames."""
        return {name: self._entry(counts) for name, counts in self.counts.items()}

    def _entry(self, counts: np.ndarray) -> dict[str, Any]:
        levels, total = np.arange(256) / 255, counts.sum(axis=1)
        mean = counts @ levels / total
        std = np.sqrt(
            [row @ (levels - middle) ** 2 / num for row, middle, num in zip(counts, mean, total, strict=True)]
        )
        present = [levels[row > 0] for row in counts]
        values: dict[str, Sequence[float] | np.ndarray] = {
            "min": [row[0] for row in present], "max": [row[-1] for row in present], "mean": mean, "std": std,
        }  # fmt: skip
        entry: dict[str, Any] = {name: np.reshape(value, (3, 1, 1)).tolist() for name, value in values.items()}
        return {**entry, "count": [len(self.steps)]}
