"""Tiny recordings in the exact HDF5 layouts of ALOHA, robomimic, LIBERO and robosuite; values say where they belong."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from tests.pipeline.readers.builders import colour

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")


def rows(num_steps: int, dim: int, start: float = 0.0) -> np.ndarray:
    """Return ``start + step + dim / 100``."""
    return start + np.arange(num_steps)[:, None] + np.arange(dim) / 100


def jpeg(frame: np.ndarray, quality: int = 90) -> bytes:
    """Encode as the recorder did who had ``frame`` in RGB order on his screen."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def padded(images: Sequence[bytes], width: int = 0, filler: int = 0) -> np.ndarray:
    """Lay images side by side, each filled up to the longest."""
    out = np.full((len(images), width or max(map(len, images))), filler, np.uint8)
    for row, image in zip(out, images, strict=True):
        row[: len(image)] = np.frombuffer(image, np.uint8)
    return out


def write_aloha_arrays(
    path: Path, signals: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray], **attributes: Any
) -> Path:
    """Write ``/<name>`` or ``/observations/<name>``, and ``/observations/images/<camera>``, as ACT's recorder lays them out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update({"sim": False, **attributes})
        for name, values in signals.items():
            file.create_dataset(name, data=values)
        for camera, frames in images.items():
            chunks = (1, *frames.shape[1:]) if frames.ndim == 4 and len(frames) else None
            file.create_dataset(f"observations/images/{camera}", data=frames, chunks=chunks)
    return path


def aloha_signals(num_steps: int, episode: int = 0) -> dict[str, np.ndarray]:
    return {
        "observations/qpos": rows(num_steps, 14, 1000 * episode).astype(np.float32),
        "observations/qvel": -rows(num_steps, 14, 1000 * episode).astype(np.float32),
        "observations/effort": np.full((num_steps, 14), 0.5, np.float32),
        "action": rows(num_steps, 14, 1000 * episode + 0.5).astype(np.float32),
    }


def write_aloha(root: Path, lengths: Sequence[int] = (3, 4), *, compressed: bool = False) -> Path:
    """Episodes ``episode_<N>.hdf5`` with three cameras; with ``compressed`` as Mobile ALOHA writes them."""
    for episode, num_steps in enumerate(lengths):
        frames = {
            camera: np.stack([colour(view, step) for step in range(num_steps)]) for view, camera in enumerate(CAMERAS)
        }
        signals = aloha_signals(num_steps, episode)
        if compressed:
            images = {camera: [jpeg(frame) for frame in stack] for camera, stack in frames.items()}
            width = max(len(image) for stack in images.values() for image in stack)
            frames = {camera: padded(stack, width) for camera, stack in images.items()}
            signals["compress_len"] = np.array([[len(image) for image in stack] for stack in images.values()], "f4")
            signals["base_action"] = rows(num_steps, 2)
        write_aloha_arrays(root / f"episode_{episode}.hdf5", signals, frames, compress=compressed)
    return root


Demo = Mapping[str, np.ndarray]


def write_demos(
    path: Path,
    demos: Mapping[str, Demo],
    *,
    masks: Mapping[str, Sequence[str]] | None = None,
    compression: str | None = None,
    text: type[str] | type[np.bytes_] = str,
    **attributes: Any,
) -> Path:
    """Write ``data/<demo>/<name>``; values of ``attributes`` that are mappings become JSON, as robomimic writes them.

    With ``text`` np.bytes_, texts have a fixed length and lie in their object's header, not in the global heap.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(len(demo["actions"]) for demo in demos.values() if "actions" in demo)
        for name, value in attributes.items():
            value = json.dumps(value) if isinstance(value, Mapping) else value
            data.attrs[name] = text(value) if isinstance(value, str) else value
        for demo, arrays in demos.items():
            group = data.create_group(demo)
            group.attrs["num_samples"] = len(arrays.get("actions", ()))
            group.attrs["model_file"] = text("<mujoco/>")
            for name, values in arrays.items():
                group.create_dataset(name, data=values, compression=compression if values.ndim == 4 else None)
        for name, members in (masks or {}).items():
            file.create_dataset(f"mask/{name}", data=np.array(members, dtype="S"))
    return path


def robomimic_demo(num_steps: int, number: int = 0, size: tuple[int, int] = (6, 8)) -> dict[str, np.ndarray]:
    start = 1000 * number
    low_dim = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}
    obs = {name: rows(num_steps, dim, start) for name, dim in low_dim.items()}
    for view, name in enumerate(("agentview_image", "robot0_eye_in_hand_image")):
        obs[name] = np.stack([colour(view, step, size) for step in range(num_steps)])
    ends = np.arange(num_steps) == num_steps - 1
    return {
        "actions": rows(num_steps, 7, start),
        "states": rows(num_steps, 32, start),
        "rewards": ends.astype(np.float64),
        "dones": ends.astype(np.int64),
        **{f"obs/{name}": values for name, values in obs.items()},
        **{f"next_obs/{name}": values for name, values in obs.items()},
    }


def write_robomimic(path: Path, numbers: Sequence[int] = (0, 2, 10), num_steps: int = 4, **options: Any) -> Path:
    demos = {f"demo_{k}": robomimic_demo(num_steps, k) for k in sorted(numbers, key=str)}
    env_args = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 25, "robots": ["Panda"]}}
    return write_demos(path, demos, **{"env_args": env_args, **options})


def libero_demo(num_steps: int, number: int = 0, size: tuple[int, int] = (6, 8)) -> dict[str, np.ndarray]:
    """Images are stored upside down: the first stored row is the lowest of the scene."""
    start, ends = 1000 * number, (np.arange(num_steps) == num_steps - 1).astype(np.uint8)
    obs = {"gripper_states": 2, "joint_states": 7, "ee_pos": 3, "ee_ori": 3, "ee_states": 6}
    scene = np.zeros((*size, 3), np.uint8)
    scene[..., 0], scene[..., 1] = np.arange(size[0])[:, None], np.arange(size[1])
    views = {
        name: np.stack([scene + np.array([0, 0, 40 * view + step], np.uint8) for step in range(num_steps)])[:, ::-1]
        for view, name in enumerate(("agentview_rgb", "eye_in_hand_rgb"))
    }
    return {
        "actions": rows(num_steps, 7, start),
        "states": rows(num_steps, 79, start),
        "robot_states": rows(num_steps, 9, start),
        "rewards": ends,
        "dones": ends,
        **{f"obs/{name}": rows(num_steps, dim, start + dim / 10) for name, dim in obs.items()},
        **{f"obs/{name}": frames for name, frames in views.items()},
    }


def write_libero(path: Path, lengths: Sequence[int] = (3, 4), **options: Any) -> Path:
    problem = {
        "problem_name": "libero_tabletop_manipulation",
        "domain_name": "robosuite",
        "language_instruction": "put the bowl on the plate",
    }
    demos = {f"demo_{k}": libero_demo(num_steps, k) for k, num_steps in enumerate(lengths)}
    attributes = {
        "env_name": "Libero_Tabletop_Manipulation",
        "macros_image_convention": "opengl",
        "problem_info": problem,
        "bddl_file_name": "libero_goal/put_the_bowl_on_the_plate.bddl",
        "num_demos": len(lengths),
        "env_args": {"type": 1, "env_name": "Libero_Tabletop_Manipulation", "env_kwargs": {"control_freq": 20}},
        "tag": "libero-v1",
    }
    return write_demos(path, demos, **{**attributes, **options})
