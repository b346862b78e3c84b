"""Write a drive as a Bench2Drive clip: the folders, names and fields of the published recordings.

Axes are CARLA's: left-handed, x forwards, y right, z up; angles in degrees; extents are half sizes. Rotations are
``[pitch, roll, yaw]``. The compass ``theta`` is 0 in the north (0, -1, 0), so that yaw = theta - pi/2.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.demo import annotation
from pipeline.demo.annotation import CAMERAS, camera_pose
from pipeline.demo.driving import plan_drive
from pipeline.demo.scene import Camera
from pipeline.demo.street import Street

RATE_HZ = 10.0
PUBLISHED_JPEG_QUALITY = 20
"""The quality of Bench2Drive's 1600 x 900 pictures; smaller ones would fall apart at it."""


def write_bench2drive_clip(
    root: Path,
    *,
    name: str = "DemoStraight_Town01_Route1_Weather1",
    num_steps: int = 60,
    size: tuple[int, int] = (900, 1600),
    seed: int = 0,
    cameras: Sequence[str] = tuple(CAMERAS),
) -> Path:
    """Render a drive of ``num_steps`` at 10 Hz and write it below ``root``; equal arguments give equal bytes.

    Parameters
    ----------
    root
        Folder that gets the clip's folder; made where it is absent.
    name
        ``Scenario_TownXX_RouteN_WeatherK``.
    size
        Height and width of a picture in pixels.
    cameras
        Which of ``rgb_front`` ... ``rgb_top_down`` are painted; the annotation describes all of them.

    Returns
    -------
    The clip's folder.
    """
    clip = Path(root) / name
    for folder in ("anno", "expert_assessment", *(f"camera/{camera}" for camera in cameras)):
        (clip / folder).mkdir(parents=True, exist_ok=True)
    drive = plan_drive(num_steps / RATE_HZ, seed)
    world = annotation.world_from_plain(seed)
    street = Street(drive, [rendered_camera(camera, size) for camera in cameras], seed)
    quality = PUBLISHED_JPEG_QUALITY if size[0] >= 900 else 88
    for step in range(num_steps):
        record = annotation.annotate(drive, step / RATE_HZ, world=world, size=size, seed=[seed, 3, step])
        _write_record(clip / "anno" / f"{step:05}.json.gz", record)
        _write_assessment(clip / "expert_assessment" / f"{step - 1:05}.npz", [seed, 4, step])
        for camera, picture in zip(cameras, street.paint(step / RATE_HZ), strict=True):
            picture.save(clip / "camera" / camera / f"{step:05}.jpg", quality=quality)
    return clip


def rendered_camera(view: str, size: tuple[int, int]) -> Camera:
    """Return a camera of the clip in the ego's frame."""
    height, width = size
    mount = CAMERAS[view]
    return Camera(
        view_from_world=np.linalg.inv(camera_pose(mount)), focal_px=annotation.focal_px(mount, width),
        height_px=height, width_px=width,
    )  # fmt: skip


def _write_record(path: Path, record: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(record).encode(), mtime=0))


def _write_assessment(path: Path, seed: Sequence[int]) -> None:
    """Write the expert's feature, value and action index, one frame early by name as the published ones are."""
    rng = np.random.default_rng(seed)
    row = rng.normal(size=18).astype(np.float32)
    row[-1] = rng.integers(0, 39)
    np.savez(path, row)
