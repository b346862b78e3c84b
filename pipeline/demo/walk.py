"""``headrace demo``: make three small raw sets, convert and verify them, load batches, and say what to try next."""

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
from pipeline.demo.town import write_town_map
from pipeline.loaders import MultiViewLoader, PlannerLoader
from pipeline.preview import write_preview
from pipeline.screens import ConvertScreen, err_console
from pipeline.sheet import contact_sheet
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from pipeline.watch import Watch
from schemas.errors import DatasetError, UsageError
from schemas.planner import TENSORS

RAW_SETS = ("driving", "robot")
PLANNER_SET = "planner"
PLANNER_STEPS = 120
"""Two seconds of history and eight of future leave the samples of two seconds."""
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
    write_bench2drive_clip(raw / PLANNER_SET, num_steps=PLANNER_STEPS, size=(90, 160), cameras=("rgb_front",))
    write_town_map(raw / "maps" / "Town01.xodr")
    summary: dict[str, Any] = {"folder": str(folder), "datasets": {}}
    for name in RAW_SETS:
        console.print(f"\nconverting {raw / name} -> {folder / name}.zarr")
        summary["datasets"][name] = _walk_one(raw / name, folder / f"{name}.zarr", quiet)
        console.print(_sentence(summary["datasets"][name]))
    console.print(f"\nconverting {raw / PLANNER_SET} with its map -> {folder / PLANNER_SET}.zarr")
    summary["datasets"][PLANNER_SET] = _walk_planner(raw, folder / f"{PLANNER_SET}.zarr", quiet)
    console.print(_planner_sentence(summary["datasets"][PLANNER_SET]))
    sheet = folder / "sheet.png"
    _save_sheet(folder, sheet)
    samples = folder / "samples.png"
    write_preview(folder / f"{PLANNER_SET}.zarr", samples)
    summary.update(sheet=str(sheet), samples=str(samples), seconds=time.monotonic() - began_s)
    console.print(f"\n{summary['seconds']:.0f} s in all; the frames as a policy sees them: {sheet}")
    console.print(f"the planner's samples from above: {samples}")
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
    facts = _convert_and_verify(raw, out, "pi0", quiet)
    batches, samples, seconds = 0, 0, 0.0
    with closing(MultiViewLoader(out, batch_size=8, seed=0)) as loader:
        for batch in loader:  # the first epoch compiles the kernels
            shapes = {view: list(images.shape) for view, images in batch["image"].items()}
        began_s = time.perf_counter()
        for batch in loader:
            batches, samples = batches + 1, samples + len(batch["state"])
        seconds = time.perf_counter() - began_s
    return {
        **facts,
        "batches": batches,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "image_shapes": shapes,
    }


def _walk_planner(raw: Path, out: Path, quiet: bool) -> dict[str, Any]:
    """Convert to Diffusion Planner's tensors, verify and load them."""
    facts = _convert_and_verify(raw / PLANNER_SET, out, "diffusion-planner", quiet, map=str(raw / "maps"))
    with closing(PlannerLoader(out, batch_size=8, seed=0)) as loader:
        batches = list(loader)
    return {
        **facts,
        "batches": len(batches),
        "samples": sum(len(batch["index"]) for batch in batches),
        "tensor_shapes": {name: list(batches[0][name].shape) for name in TENSORS},
    }


def _convert_and_verify(raw: Path, out: Path, recipe: str, quiet: bool, **options: Any) -> dict[str, Any]:
    watch = Watch() if quiet else ConvertScreen()
    report = convert(raw, out, recipe, watch=watch, **options)
    if isinstance(watch, ConvertScreen):
        watch.__exit__(None, None, None)
    verified = verify(out)
    if not verified.ok:
        raise DatasetError(
            f"expected a sound dataset, found {verified.problems[0].message}", file=verified.problems[0].path
        )
    return {
        "dataset": str(out),
        "episodes": report.total_episodes,
        "steps": report.total_steps,
        "frames": report.num_frames,
        "quarantined": dict(report.quarantined),
        "verified_files": verified.num_files,
        "verified_nbytes": verified.nbytes,
    }


def _planner_sentence(result: dict[str, Any]) -> str:
    shapes = result["tensor_shapes"]
    return (
        f"  {result['episodes']} episode, {result['steps']} steps, {result['samples']} samples; verified {result['verified_files']} files; "
        f"lanes {shapes['lanes']}, neighbours {shapes['neighbor_agents_past']}"
    )


def _sentence(result: dict[str, Any]) -> str:
    return (
        f"  {result['episodes']} episode{'' if result['episodes'] == 1 else 's'}, {result['steps']} steps, {result['frames']} frames; verified {result['verified_files']} files; "
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
        name: shlex.quote(str(folder / name))
        for name in ("driving.zarr", "robot.zarr", "raw/driving", "raw/robot", "report.html")
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
        f"  {command} preview {quoted['robot.zarr']} -o {quoted['report.html']}",
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
