"""Exports of a dataset, by the name of the format."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schemas.errors import UsageError

LEROBOT = {"lerobot": "2.1", "lerobot-v3": "3.0"}
"""Version of each format that is LeRobot's."""
FORMATS = (*LEROBOT, "planner-npz")


def export_dataset(
    out: Path, target: Path, to: str, *, images: str = "png", views: Sequence[str] = ()
) -> dict[str, Any]:
    """Export ``out`` into ``target`` in a format of :data:`FORMATS`; return its report."""
    if to in LEROBOT:
        from pipeline.export_lerobot import export_lerobot

        return asdict(export_lerobot(out, target, images=images, version=LEROBOT[to], views=views))
    if to != "planner-npz":
        raise UsageError(f"expected --to {' or '.join(FORMATS)}, found {to!r}; correct --to")
    if images != "png" or views:
        raise UsageError("expected --images and --view with lerobot alone, found them with planner-npz; leave them out")
    from pipeline.export_planner import export_planner

    return asdict(export_planner(out, target))
