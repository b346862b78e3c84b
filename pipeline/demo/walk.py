"""``headrace demo``: make two small raw sets, convert both, verify, load batches, and say what to try next."""

import os
import shlex
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.conversion import convert
from pipeline.demo.bench2drive import write_bench2drive_clip
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.loaders import MultiViewLoader
from pipeline.screens import ConvertScreen, err_console
from pipeline.sheet import contact_sheet
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from pipeline.watch import Watch
from schemas.errors import DatasetError, UsageError

RAW_SETS = ("driving", "robot")
MARK = "headrace-demo.txt"
"""Says that a folder is the demo's own, so that running it again may replace it."""


def run_demo(folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run the demonstration in ``folder`` and return what it did; a folder that is not the demo's own is refused."""
    console = err_console()
    console.quiet = quiet
    _claim(folder)
    began_s = time.monotonic()
    raw = folder / "raw"
    console.print(
        "rendering a drive seen by six cameras (Bench2Drive layout) and an arm seen by three (LeRobot layout) ..."
    )
    write_bench2drive_clip(raw / "driving", num_steps=40, size=(225, 400))
    write_lerobot_set(raw / "robot")
    summary: dict[str, Any] = {"folder": str(folder), "datasets": {}}
    for name in RAW_SETS:
        console.print(f"\nconverting {raw / name} -> {folder / name}.zarr")
        summary["datasets"][name] = _walk_one(raw / name, folder / f"{name}.zarr", quiet)
        console.print(_sentence(summary["datasets"][name]))
    sheet = folder / "sheet.png"
    _save_sheet(folder, sheet)
    summary.update(sheet=str(sheet), seconds=time.monotonic() - began_s)
    console.print(f"\n{summary['seconds']:.0f} s in all; the frames as a policy sees them: {sheet}")
    for line in _next_steps(folder):
        console.print(line)
    return summary


def _claim(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"expected a new folder, found a file at {folder}; name another place")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UsageError(f"expected a new or empty folder, found other files in {folder}; name another place")
    if (folder / MARK).exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text("Made by `headrace demo`, which replaces this folder when it runs again.\n", "utf-8")


def _walk_one(raw: Path, out: Path, quiet: bool) -> dict[str, Any]:
    """Convert, verify and load one set; every number comes from doing it."""
    watch = Watch() if quiet else ConvertScreen()
    report = convert(raw, out, "pi0", watch=watch)
    if isinstance(watch, ConvertScreen):
        watch.__exit__(None, None, None)
    verified = verify(out)
    if not verified.ok:
        raise DatasetError(
            f"expected a sound dataset, found {verified.problems[0].message}", file=verified.problems[0].path
        )
    batches, samples, seconds = 0, 0, 0.0
    with closing(MultiViewLoader(out, batch_size=8, seed=0)) as loader:
        for batch in loader:  # the first epoch compiles the kernels
            shapes = {view: list(images.shape) for view, images in batch["image"].items()}
        began_s = time.perf_counter()
        for batch in loader:
            batches, samples = batches + 1, samples + len(batch["state"])
        seconds = time.perf_counter() - began_s
    return {
        "dataset": str(out),
        "episodes": report.total_episodes,
        "steps": report.total_steps,
        "frames": report.num_frames,
        "quarantined": dict(report.quarantined),
        "verified_files": verified.num_files,
        "verified_nbytes": verified.nbytes,
        "batches": batches,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "image_shapes": shapes,
    }


def _sentence(result: dict[str, Any]) -> str:
    return (
        f"  {result['episodes']} episodes, {result['steps']} steps, {result['frames']} frames; verified {result['verified_files']} files; "
        f"{result['batches']} batches of 8 loaded, {result['samples_per_s']:,.0f} samples/s"
    )


def _save_sheet(folder: Path, path: Path) -> None:
    """Draw a few steps of both datasets as the loader serves them."""
    tiles: dict[str, list[np.ndarray | None]] = {}
    for name in RAW_SETS:
        out = folder / f"{name}.zarr"
        steps = np.linspace(0, read_info(out).num_steps - 1, 6).astype(np.int64)
        with closing(MultiViewLoader(out, batch_size=1, shuffle=False)) as loader:
            for batch in loader:
                if batch["index"][0] in steps:
                    for view, images in batch["image"].items():
                        shown = images[0] if batch["image_mask"][view][0] else None
                        tiles.setdefault(f"{name} {view}", []).append(shown)
    contact_sheet(tiles, title="headrace demo: what the policy sees", tile_width_px=180, missing="masked").save(path)


def _next_steps(folder: Path) -> list[str]:
    """Return commands that can be pasted as they stand."""
    command = shlex.quote(_command())
    quoted = {
        name: shlex.quote(str(folder / name)) for name in ("driving.zarr", "robot.zarr", "raw/driving", "raw/robot")
    }
    python = shlex.quote(
        os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    )
    script = (
        f"from pipeline.loaders import MultiViewLoader as L; batch = next(iter(L('{folder / 'robot.zarr'}', 8))); "
        "print(batch['state'].shape, batch['actions'].shape, batch['prompt'][0])"
    )
    small = shlex.quote(
        str(folder.with_name(f"{folder.resolve().name}-small.zarr"))
    )  # the demo's own folder is replaced
    return [
        "\ntry next:",
        f"  {command} inspect {quoted['raw/robot']}",
        f"  {command} info {quoted['robot.zarr']}",
        f"  {command} verify {quoted['driving.zarr']}",
        f"  {command} convert {quoted['raw/driving']} {small} --recipe pi0 --size 96",
        f'  {python} -c "{script}"',
    ]


def _command() -> str:
    """Return how this program was called, shortest form that works from here."""
    called = Path(sys.argv[0])
    if called.name != "headrace":
        return "headrace"
    if shutil.which("headrace") and Path(shutil.which("headrace") or "").resolve() == called.resolve():
        return "headrace"
    return os.path.relpath(called) if called.is_absolute() and called.is_relative_to(Path.cwd()) else str(called)
