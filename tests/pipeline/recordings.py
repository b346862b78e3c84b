"""Tiny LBC routes whose pixels and numbers encode where they belong, and helpers to compare datasets."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

VIEWS = ("rgb", "rgb_left", "rgb_right")
SIZE = (6, 8)
"""Height and width of the frames."""
RECIPE = """
name = "tiny"
horizon = 4
action_dim = 4
[views.main]
from = ["rgb"]
size = [6, 8]
resize = "stretch"
[views.left]
from = ["rgb_left"]
size = [6, 8]
resize = "stretch"
[signals.state]
from = ["speed"]
align = "linear"
[signals.actions]
from = ["steer", "throttle"]
align = "previous"
"""
"""Frames at their own size, so that what is stored is what was recorded."""


def frame(route: int, step: int, view: int) -> np.ndarray:
    """Return ``uint8[6, 8, 3]`` whose first pixel is (step, route, view)."""
    rng = np.random.default_rng([route, step, view])
    pixels = rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    pixels[0, 0] = step, route, view
    return pixels


def write_route(root: Path, route: int, num_steps: int, *, views: Sequence[str] = VIEWS) -> Path:
    """Write ``root/route_<route>`` in LBC's layout; speed is 1000 * route + step, steer step / 100, throttle 0.25."""
    folder = root / f"route_{route:02d}"
    for name in ("measurements", *views):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for step in range(num_steps):
        record = {
            "x": float(step),
            "y": 0.0,
            "theta": 0.0,
            "speed": 1000.0 * route + step,
            "target_speed": 7.0,
            "x_command": 0.0,
            "y_command": 0.0,
            "command": 4,
            "steer": step / 100,
            "throttle": 0.25,
            "brake": False,
        }
        (folder / "measurements" / f"{step:04d}.json").write_text(repr(record))
        for view in views:
            path = folder / view / f"{step:04d}.png"
            Image.fromarray(frame(route, step, VIEWS.index(view))).save(path)
    return folder


def write_arrays(root: Path, route: int, num_steps: int) -> Path:
    """Write ``root/route_<route>`` as a folder of arrays that holds what :func:`write_route` writes as pictures and text."""
    folder = root / f"route_{route:02d}"
    folder.mkdir(parents=True)
    steps = np.arange(num_steps)
    for number, view in enumerate(VIEWS):
        np.save(folder / f"{view}.npy", np.stack([frame(route, step, number) for step in range(num_steps)]))
    for name, values in (
        ("speed", 1000.0 * route + steps),
        ("steer", steps / 100),
        ("throttle", np.full(num_steps, 0.25)),
    ):
        np.save(folder / f"{name}.npy", values)
    return folder


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    """Write the recipe and return its path."""
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def tree(root: Path) -> dict[str, str]:
    """Return ``relative path -> digest`` of every file below ``root``."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def truncate(path: Path, share: float = 0.5) -> None:
    """Cut a file short."""
    os.truncate(path, int(path.stat().st_size * share))
