"""Disks that fill up, turn read-only or refuse: a clear error, nothing committed that does not verify, and the same call continues."""

import errno
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import DatasetError, PlanError, UsageError
from tests.pipeline.recordings import RECIPE, tree, write_recipe, write_route

ZSTD = RECIPE + '[frames]\ncodec = "zstd"\n'
"""Its size is no matter of arithmetic, so that nothing is refused before it runs."""


def run(folder: Path, out: Path):
    return convert(folder / "raw", out, folder / "tiny.toml", shard_steps=4, cluster=ClusterOptions(workers=0))


@pytest.fixture
def recorded(tmp_path) -> Path:
    for route in range(3):
        write_route(tmp_path / "raw", route, 20)
    write_recipe(tmp_path, ZSTD)
    run(tmp_path, tmp_path / "whole")
    return tmp_path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, which only root may make."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def check_unfinished(out: Path) -> None:
    """Nothing is committed, or all of it."""
    try:
        read_info(out)
    except DatasetError:
        return
    assert {problem.path.rpartition("/")[2][:4] for problem in verify(out).problems} <= {"zarr"}


def check_full_disk(recorded: Path, disk: Path, seed: int, times: int) -> None:
    rng, out = random.Random(seed), disk / "out"
    need = sum(path.stat().st_size for path in (recorded / "whole").rglob("*"))
    for size in sorted(rng.randrange(8192, need) for _ in range(times)):
        mount("-o", f"remount,size={size}", str(disk))
        with pytest.raises((PlanError, OSError), match="expected room on the disk.*run the same command|No space left"):
            run(recorded, out)
        check_unfinished(out)
    mount("-o", "remount,size=64m", str(disk))
    run(recorded, out)
    assert tree(out) == tree(recorded / "whole")
    assert verify(out).ok


def test_a_full_disk_is_named_and_the_same_call_continues_when_there_is_room(recorded, disk):
    check_full_disk(recorded, disk, seed=0, times=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_disk_that_fills_up_at_random_points_loses_nothing(recorded, disk, seed):
    check_full_disk(recorded, disk, seed, times=8)


def test_a_read_only_disk_is_refused_and_harms_nothing(recorded, disk):
    mount("-o", "remount,size=64m", str(disk))
    run(recorded, disk / "out")
    write_route(recorded / "raw", 3, 4)
    mount("-o", "remount,ro", str(disk))
    with pytest.raises((UsageError, OSError), match="(?i)read-only"):
        run(recorded, disk / "out")
    assert verify(disk / "out").ok
    with pytest.raises(UsageError, match="Read-only file system"):
        run(recorded, disk / "other")
    mount("-o", "remount,rw", str(disk))
    assert run(recorded, disk / "out").generation == 2


def check_refusals(recorded: Path, monkeypatch, points: list[int]) -> None:
    out, real = recorded / "out", os.open
    for point in points:
        opened, lock = 0, threading.Lock()

        def refuse(path, flags, *arguments, point=point, **named):
            nonlocal opened
            if flags & os.O_WRONLY and "out.work" in str(path):
                with lock:
                    opened += 1
                    if opened >= point:
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, flags, *arguments, **named)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises((PlanError, OSError), match="Permission denied"):
            run(recorded, out)
        monkeypatch.setattr(os, "open", real)
        check_unfinished(out)
    run(recorded, out)
    assert tree(out) == tree(recorded / "whole")


def test_a_right_that_is_lost_while_it_runs_is_named_and_the_same_call_continues(recorded, monkeypatch):
    check_refusals(recorded, monkeypatch, [1, 9, 30])


@pytest.mark.soak
def test_a_right_that_is_lost_at_any_moment_costs_nothing(recorded, monkeypatch):
    check_refusals(recorded, monkeypatch, list(range(1, 60)))
