"""Write pick-and-place episodes as a LeRobot v2.1 set: the folders, names, columns and statistics of the format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipeline.demo import arm
from pipeline.demo.tabletop import VIEWS, Table
from schemas.errors import UsageError

_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_CHUNK_EPISODES = 1000
_CODECS = (("libx264", "h264"), ("libsvtav1", "av1"))
"""Encoders by preference, and what ``info.json`` calls what they write."""
_X264 = {
    "g": "2",
    "crf": "20",
    "bf": "0",
    "sc_threshold": "0",
    "preset": "veryfast",
    "mbtree": "0",
    "rc-lookahead": "0",
}
"""With its macroblock tree, the x264 of av 18.1 gave other bytes for equal frames 48 times in 14,000 (64 x 36 and 64 x 48
pixels, 2026-12); without the tree and its look-ahead, never in 33,000."""


def write_lerobot_set(
    root: Path,
    *,
    num_episodes: int = 4,
    num_steps: int = 90,
    size: tuple[int, int] = (240, 320),
    rate_hz: int = 30,
    seed: int = 0,
    views: Sequence[str] = VIEWS,
) -> Path:
    """Render pick-and-place episodes and write them into ``root``; equal arguments give equal bytes.

    Of two or more episodes the last has no video of the last view, as happens in real sets.

    Parameters
    ----------
    root
        Folder of the set; made where it is absent.
    size
        Height and width of a picture in pixels, both even.
    views
        Which of ``cam_high``, ``cam_left_wrist``, ``cam_right_wrist`` are painted.

    Returns
    -------
    ``root``.
    """
    if size[0] % 2 or size[1] % 2:
        raise UsageError(f"expected an even height and width, found {size[0]} x {size[1]}; yuv420p halves both")
    root = Path(root)
    codec, codec_name = next(pair for pair in _CODECS if pair[0] in av.codecs_available)
    features = _features(size, rate_hz, codec_name, views)
    records, stats = [], []
    for episode in range(num_episodes):
        task = arm.lay_table(episode, seed)
        motion = arm.plan_motion(task, num_steps, seed + episode)
        columns = _columns(motion, episode, num_steps, rate_hz)
        _write_table(root / _path(_DATA_PATH, episode), columns, features)
        present = views[:-1] if episode == num_episodes - 1 > 0 else views
        episode_stats = {name: _row_stats(values) for name, values in columns.items()}
        for view in present:
            pictures = [
                Table(task=task).paint(view, state, block, size)
                for state, block in zip(motion.state, motion.block, strict=True)
            ]
            _write_video(root / _path(_VIDEO_PATH, episode, view), pictures, rate_hz, codec)
            episode_stats[f"observation.images.{view}"] = _picture_stats(pictures)
        records.append({"episode_index": episode, "tasks": [task.instruction], "length": num_steps})
        stats.append({"episode_index": episode, "stats": episode_stats})
    _write_meta(root, features, records, stats, rate_hz)
    return root


def _path(template: str, episode: int, view: str = "") -> str:
    return template.format(
        episode_chunk=episode // _CHUNK_EPISODES, episode_index=episode, video_key=f"observation.images.{view}"
    )


def _features(size: tuple[int, int], rate_hz: int, codec: str, views: Sequence[str]) -> dict[str, Any]:
    """Return ``info.json``'s description of every column and video."""
    joints = {"dtype": "float32", "shape": [7], "names": list(arm.STATE_NAMES)}
    video = {
        "dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"],
        "info": {
            "video.fps": float(rate_hz), "video.height": size[0], "video.width": size[1], "video.channels": 3,
            "video.codec": codec, "video.pix_fmt": "yuv420p", "video.is_depth_map": False, "has_audio": False,
        },
    }  # fmt: skip
    scalars = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    return {
        "observation.state": joints, "action": joints, **{f"observation.images.{view}": video for view in views},
        **{name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in scalars.items()},
    }  # fmt: skip


def _columns(motion: arm.Motion, episode: int, num_steps: int, rate_hz: int) -> dict[str, np.ndarray]:
    frame = np.arange(num_steps, dtype=np.int64)
    return {
        "observation.state": motion.state, "action": motion.action,
        "timestamp": (frame / rate_hz).astype(np.float32), "frame_index": frame,
        "episode_index": np.full_like(frame, episode), "index": frame + episode * num_steps,
        "task_index": np.full_like(frame, episode % len(arm.TASKS)),
    }  # fmt: skip


def _write_table(path: Path, columns: Mapping[str, np.ndarray], features: Mapping[str, Any]) -> None:
    """Write one episode's columns with the schema that Hugging Face's ``datasets`` looks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {}
    arrays = {}
    for name, values in columns.items():
        value = {"dtype": features[name]["dtype"], "_type": "Value"}
        if values.ndim == 2:
            arrays[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
            described[name] = {"feature": value, "length": values.shape[1], "_type": "Sequence"}
        else:
            arrays[name], described[name] = pa.array(values), value
    table = pa.table(arrays)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": described}})})
    pq.write_table(table, path, compression="snappy")


def _write_video(path: Path, pictures: Sequence[Image.Image], rate_hz: int, codec: str) -> None:
    """Encode pictures with a key frame every second frame, as LeRobot does, in one thread so that bytes repeat."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = _X264 if codec == "libx264" else {"g": "2", "crf": "30", "preset": "10"}
    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec, rate=rate_hz, options=options)
        if not isinstance(stream, av.VideoStream):
            raise UsageError(f"expected a video encoder, found {codec}; install another build of av")
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        stream.width, stream.height = pictures[0].size
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_image(picture)):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)


def _row_stats(values: np.ndarray) -> dict[str, list[float]]:
    rows = values.reshape(len(values), -1)
    return {
        "min": rows.min(axis=0).tolist(), "max": rows.max(axis=0).tolist(),
        "mean": rows.mean(axis=0, dtype=np.float64).tolist(), "std": rows.std(axis=0, dtype=np.float64).tolist(),
        "count": [len(rows)],
    }  # fmt: skip


def _picture_stats(pictures: Sequence[Image.Image]) -> dict[str, list[Any]]:
    """Return statistics in 0 .. 1, shaped (3, 1, 1), over evenly spaced frames: as many as LeRobot samples."""
    num_samples = min(len(pictures), int(np.clip(len(pictures) ** 0.75, 100, 10_000)))
    chosen = np.rint(np.linspace(0, len(pictures) - 1, num_samples)).astype(int)
    counts = np.sum([pictures[i].histogram() for i in chosen], axis=0).reshape(3, 256)
    levels, pixels = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ levels / pixels
    std = np.sqrt(
        [(row @ (levels - middle) ** 2) / total for row, middle, total in zip(counts, mean, pixels, strict=True)]
    )
    present = [levels[row > 0] for row in counts]
    stats = {"min": [row[0] for row in present], "max": [row[-1] for row in present], "mean": mean, "std": std}
    return {name: np.reshape(value, (3, 1, 1)).tolist() for name, value in stats.items()} | {"count": [num_samples]}


def _write_meta(
    root: Path, features: Mapping[str, Any], records: Sequence[Mapping[str, Any]], stats: Sequence[Mapping[str, Any]],
    rate_hz: int,
) -> None:  # fmt: skip
    num_videos = sum(feature["dtype"] == "video" for feature in features.values())
    used = {instruction for record in records for instruction in record["tasks"]}
    tasks = [{"task_index": i, "task": task} for i, task in enumerate(arm.TASKS) if task in used]
    info = {
        "codebase_version": "v2.1", "robot_type": "demo_arm", "total_episodes": len(records),
        "total_frames": sum(record["length"] for record in records), "total_tasks": len(tasks),
        "total_videos": num_videos * len(records), "total_chunks": -(-len(records) // _CHUNK_EPISODES),
        "chunks_size": _CHUNK_EPISODES, "fps": rate_hz, "splits": {"train": f"0:{len(records)}"},
        "data_path": _DATA_PATH, "video_path": _VIDEO_PATH, "features": features,
    }  # fmt: skip
    meta = root / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    (meta / "info.json").write_text(json.dumps(info, indent=4))
    for name, rows in (("tasks", tasks), ("episodes", records), ("episodes_stats", stats)):
        (meta / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
