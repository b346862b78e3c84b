"""Tiny episodes in DROID's own layout: trajectory.h5, metadata and a lossless MP4 a camera."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np

from tests.pipeline.readers.builders import colour
from tests.pipeline.readers.hdf5_builders import rows

SERIALS = {"wrist": "13062452", "ext1": "24259877", "ext2": "22008760"}
"""Of the cameras, in another order by number than by role."""


def write_mp4(path: Path, frames: Sequence[np.ndarray], rate_hz: int = 60) -> None:
    """Write frames as PNG in MP4, so that each comes out as it went in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=rate_hz)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def trajectory(num_steps: int) -> dict[str, np.ndarray]:
    """Return the arrays of an episode at 15 Hz, every third step 4 ms late."""
    steps = np.arange(num_steps)
    return {
        "action/joint_position": rows(num_steps, 7, 0.5),
        "action/gripper_position": steps / 100,
        "action/robot_state/joint_positions": rows(num_steps, 7),
        "observation/robot_state/joint_positions": rows(num_steps, 7),
        "observation/robot_state/gripper_position": steps / 50,
        "observation/robot_state/cartesian_position": rows(num_steps, 6, 7.0),
        "observation/controller_info/movement_enabled": steps % 4 != 3,
        "observation/timestamp/control/step_start": 1_700_000_000_000 + steps * 1000 // 15 + 4 * (steps % 3 == 2),
        **{
            f"observation/camera_type/{serial}": np.full(num_steps, min(k, 1))
            for k, serial in enumerate(SERIALS.values())
        },
    }


def write_trajectory(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``trajectory.h5``, its arrays growable as DROID's writer makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "trajectory.h5", "w") as file:
        file.attrs["success"] = True
        for name, values in arrays.items():
            file.create_dataset(name, data=values, maxshape=(None, *values.shape[1:]))


def write_metadata(folder: Path, uuid: str, **facts: Any) -> Path:
    """Write ``metadata_<uuid>.json``."""
    serials = {f"{role}_cam_serial": serial for role, serial in SERIALS.items()}
    path = folder / f"metadata_{uuid}.json"
    path.write_text(json.dumps({"uuid": uuid, "lab": "TRI", **serials, **facts}))
    return path


def write_droid(root: Path, lengths: Sequence[int] = (4, 3)) -> Path:
    """One episode that succeeded and ones that failed, with annotations of the first."""
    for number, num_steps in enumerate(lengths):
        outcome = "failure" if number else "success"
        folder = root / f"TRI/{outcome}/2023-10-1{number}/Fri_Oct_1{number}_14:08:58_2023"
        write_trajectory(folder, trajectory(num_steps))
        write_metadata(
            folder, f"TRI+0+run{number}", success=not number, trajectory_length=num_steps, current_task="Use cup"
        )
        for camera, (role, serial) in enumerate(SERIALS.items()):
            frames = [colour(camera, step, (16, 32)) for step in range(num_steps)]
            if role == "ext2":  # both eyes, side by side
                both = [np.hstack([frame, 255 - frame]) for frame in frames]
                write_mp4(folder / f"recordings/MP4/{serial}-stereo.mp4", both)
            else:
                write_mp4(folder / f"recordings/MP4/{serial}.mp4", frames)
            (folder / "recordings/SVO").mkdir(exist_ok=True)
            (folder / f"recordings/SVO/{serial}.svo").write_bytes(b"SVO")
    said = {"TRI+0+run0": {"language_instruction1": "lift the cup", "language_instruction2": "raise the cup"}}
    (root / "aggregated-annotations-030724.json").write_text(json.dumps(said))
    return root
