"""Tiny recordings in the exact layout of each format; values say which episode and step they belong to."""

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CAMERAS = (
    "rgb_front",
    "rgb_front_left",
    "rgb_front_right",
    "rgb_back",
    "rgb_back_left",
    "rgb_back_right",
    "rgb_top_down",
)


def colour(view: int, step: int, size: tuple[int, int] = (6, 8)) -> np.ndarray:
    """One colour all over, which survives JPEG: (16 * view, 8 * step, 255)."""
    return np.full((*size, 3), (16 * view, 8 * step, 255), np.uint8)


def image_bytes(frame: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return buffer.getvalue()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def measurement(step: int) -> dict[str, object]:
    return {
        "x": -226.5 + step,
        "y": 338.0,
        "theta": 0.5,
        "speed": 1.0 + step,
        "target_speed": 7.0,
        "x_command": -209.0,
        "y_command": 338.5,
        "command": [4, 1, 2, 3, 5, 6, -1][step % 7],
        "steer": 0.25,
        "throttle": 0.75,
        "brake": step % 2 == 1,
    }


def write_lbc_route(route: Path, num_steps: int = 4, size: tuple[int, int] = (6, 8)) -> Path:
    for step in range(num_steps):
        write(route / f"measurements/{step:04d}.json", repr(measurement(step)).encode())
        for view, name in enumerate(("rgb", "rgb_left", "rgb_right")):
            write(route / f"{name}/{step:04d}.png", image_bytes(colour(view, step, size)))
        write(route / f"topdown/{step:04d}.png", image_bytes(np.full((10, 10), step, np.uint8)))
    return route


def annotation(step: int) -> dict[str, object]:
    ego = {
        "class": "ego_vehicle",
        "id": "109",
        "location": [94.0 + step, 193.5, 1.0],
        "rotation": [-1.0, 0.5, 166.0],
        "center": [94.0 + step, 193.5, 1.5],
        "extent": [2.5, 1.0, 0.75],
        "world2ego": np.eye(4).tolist(),
    }
    weather = "cloudiness precipitation precipitation_deposits wind_intensity sun_azimuth_angle sun_altitude_angle fog_density fog_distance"
    return {
        "x": 95.5,
        "y": 193.0,
        "throttle": 0.75,
        "steer": -0.5,
        "brake": 0.0,
        "reverse": False,
        "theta": float("nan") if step == 1 else 4.5,
        "speed": 2.0 + step,
        "x_command_far": 41.5,
        "y_command_far": 193.5,
        "command_far": 4,
        "x_command_near": 90.5,
        "y_command_near": 193.25,
        "command_near": 2,
        "should_brake": True,
        "only_ap_brake": None,
        "x_target": 41.5,
        "y_target": 193.5,
        "next_command": 4,
        "weather": {name: float(k) for k, name in enumerate((*weather.split(), "wetness", "fog_falloff"))},
        "acceleration": [2.25, -0.5, 9.75],
        "angular_velocity": [0.0, 0.0, -0.5],
        # The ego is not the first box, and another actor's brake is the NaN literal of real clips.
        "bounding_boxes": [{"class": "vehicle", "id": "162", "brake": float("nan"), "location": [0.0, 0.0, 0.0]}, ego],
        "sensors": {"CAM_FRONT": {"fov": 70.0}},
    }


def write_bench2drive_clip(clip: Path, num_steps: int = 4, size: tuple[int, int] = (16, 16)) -> Path:
    for step in range(num_steps):
        data = gzip.compress(json.dumps(annotation(step)).encode(), mtime=0)
        write(clip / f"anno/{step:05d}.json.gz", data)
        for view, name in enumerate(CAMERAS):
            write(clip / f"camera/{name}/{step:05d}.jpg", image_bytes(colour(view, step, size), "JPEG"))
        write(clip / f"expert_assessment/{step - 1:05d}.npz", b"not read")
    return clip


def write_lerobot(
    root: Path,
    lengths: Sequence[int] = (3, 4),
    *,
    version: str | None = "v2.1",
    ids: Sequence[int] | None = None,
    fps: float = 10.0,
) -> Path:
    """Two signals of lists, one scalar, one image column; episode ``k`` holds the values ``1000 * k + step``."""
    ids = range(len(lengths)) if ids is None else ids
    features = {
        "observation.images.front": {"dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channel"]},
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": ["shoulder", "elbow"]}},
        "action": {"dtype": "float64", "shape": [2], "names": [["a", "b"]]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "annotation.trace": {"dtype": "binary", "shape": [1]},
    }
    info = {
        "fps": fps,
        "robot_type": "arm",
        "chunks_size": 2,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": features,
    }
    if version:
        info["codebase_version"] = version
    write(root / "meta/info.json", json.dumps(info).encode())
    write(root / "meta/tasks.jsonl", b'{"task_index": 7, "task": "push"}\n{"task_index": 3, "task": "pull"}\n')
    lines = [{"episode_index": k, "tasks": ["push", "pull"], "length": n} for k, n in zip(ids, lengths, strict=True)]
    write(root / "meta/episodes.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    for index, length in zip(ids, lengths, strict=True):
        path = root / f"data/chunk-{index // 2:03d}/episode_{index:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(lerobot_table(index, length, fps), path)
    return root


def lerobot_table(index: int, length: int, fps: float = 10.0) -> pa.Table:
    steps = np.arange(length)
    values = 1000.0 * index + steps
    pairs = np.stack([values, -values], axis=1)
    images = [{"bytes": image_bytes(colour(index, step)), "path": f"frame_{step:06d}.png"} for step in range(length)]
    return pa.table(
        {
            "observation.images.front": pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(pairs.ravel(), pa.float32()), 2),
            "action": pa.array(pairs.tolist(), pa.list_(pa.float64())),
            "next.reward": pa.array(values, pa.float32()),
            "annotation.trace": pa.array([b"\x80\x04N."] * length, pa.binary()),
            "timestamp": pa.array(steps / fps, pa.float32()),
            "frame_index": pa.array(steps, pa.int64()),
            "episode_index": pa.array([index] * length, pa.int64()),
            "task_index": pa.array([7 if step < 2 else 3 for step in range(length)], pa.int64()),
        }
    )


def write_npy(folder: Path, num_steps: int = 5, **arrays: np.ndarray) -> Path:
    """A raw view ``front``, ``state`` of 3 and ``action`` of 2, and any further arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.arange(num_steps)
    front = np.stack([colour(1, step) for step in range(num_steps)]) if num_steps else np.zeros((0, 6, 8, 3), np.uint8)
    standard = {
        "front": front,
        "state": (steps[:, None] + np.array([0, 100, 200])).astype(np.float32),
        "action": np.stack([steps, -steps], axis=1).astype(np.float64),
    }
    for name, array in {**standard, **arrays}.items():
        np.save(folder / f"{name}.npy", array)
    return folder
