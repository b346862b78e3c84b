"""Peak memory of a conversion does not grow with the number of episodes."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.pipeline.recordings import RECIPE, write_recipe, write_route


def anonymous_nbytes(pid: int) -> int:
    """Return the anonymous memory of a process and its descendants: mapped files do not count."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return total


def peak_nbytes(raw: Path, out: Path, recipe: Path) -> int:
    command = [sys.executable, "-m", "pipeline", "convert", str(raw), str(out), "--recipe", str(recipe)]
    process = subprocess.Popen(
        [*command, "--shard-steps", "16", "--workers", "1"], stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_nbytes(process.pid))
        time.sleep(0.02)
    assert process.returncode == 0
    return peak


def write_routes(root: Path, count: int) -> None:
    """Write routes whose frames are large: 256 x 384 pixels, so that a held one would show."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 384, 3), dtype=np.uint8)
    for route in range(count):
        folder = write_route(root, route, 24, views=())
        for view in ("rgb", "rgb_left"):
            (folder / view).mkdir()
            Image.fromarray(pixels).save(folder / view / "0000.png", compress_level=1)
            for step in range(1, 24):
                (folder / view / f"{step:04d}.png").hardlink_to(folder / view / "0000.png")


@pytest.mark.soak
def test_eight_times_the_episodes_take_no_more_memory(tmp_path):
    recipe = write_recipe(tmp_path, RECIPE.replace("size = [6, 8]", "size = [256, 384]"))
    write_routes(tmp_path / "few", 4)
    write_routes(tmp_path / "many", 32)
    few = peak_nbytes(tmp_path / "few", tmp_path / "out-few", recipe)
    many = peak_nbytes(tmp_path / "many", tmp_path / "out-many", recipe)
    # 28 more episodes hold 400 MB of frames; the bound leaves room for the allocator alone
    assert many - few < 40e6, f"{few / 1e6:.0f} MB for 4 episodes, {many / 1e6:.0f} MB for 32"
