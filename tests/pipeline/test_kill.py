"""kill -9 of everything, at random moments: resumed runs reuse what was finished and end equal to an uninterrupted one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import DatasetError
from tests.pipeline.recordings import tree, write_arrays, write_recipe, write_route


def start(folder: Path, out: Path, *, workers: int = 0) -> subprocess.Popen:
    """Convert every source of ``folder`` that is there: CARLA routes in ``raw``, arrays in ``arrays``."""
    sources = [str(path) for path in (folder / "raw", folder / "arrays") if path.exists()]
    command = [sys.executable, "-m", "pipeline", "convert", *sources, str(out), "--recipe", str(folder / "tiny.toml")]
    return subprocess.Popen(
        [*command, "--shard-steps", "1", "--workers", str(workers)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def wait_for_journal(process: subprocess.Popen, journal: Path, records: int) -> None:
    """Wait until so many records are journalled, or the process ends."""
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= records:
            return
        time.sleep(0.005)


def kill_and_resume(tmp_path: Path, *, times: int, seed: int) -> tuple[Path, int]:
    """Kill a conversion ``times`` times, each time a little further, and finish it; return the dataset and shards reused."""
    out = tmp_path / "out"
    rng = random.Random(seed)
    for kill in range(times):
        process = start(tmp_path, out)
        wait_for_journal(process, Path(f"{out}.work") / "journal", rng.randint(1, 3) + 3 * kill)
        time.sleep(rng.random() * 0.02)
        with suppress(ProcessLookupError):  # it had just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        with suppress(DatasetError):  # or one that is whole: never a part of one
            assert read_info(out).num_steps == 60
    process = start(tmp_path, out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    reused = [line for line in said.splitlines() if "are finished already" in line]
    return out, int(reused[0].split("continuing: ")[1].split(" of")[0]) if reused else 0


@pytest.fixture
def prepared(tmp_path) -> Path:
    for route in range(3):
        write_route(tmp_path / "raw", route, 20)
    write_recipe(tmp_path)
    process = start(tmp_path, tmp_path / "whole")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return tmp_path


def check(folder: Path, *, times: int, seed: int) -> None:
    out, reused = kill_and_resume(folder, times=times, seed=seed)
    assert reused >= 1
    assert verify(out).ok
    assert tree(out) == tree(folder / "whole")
    assert [path.name for path in Path(f"{out}.work").iterdir()] == ["seen.json"]


def test_a_run_killed_three_times_ends_as_if_nothing_had_happened(prepared):
    check(prepared, times=3, seed=0)


def test_no_worker_outlives_a_killed_run(prepared):
    command = [sys.executable, "-m", "pipeline", "convert", str(prepared / "raw"), str(prepared / "out")]
    process = subprocess.Popen(
        [*command, "--recipe", str(prepared / "tiny.toml"), "--shard-steps", "1", "--workers", "1"],
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    wait_for_journal(process, prepared / "out.work" / "journal", 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_within_ten_seconds_and_the_same_command_continues(prepared, number):
    out = prepared / "out"
    process = start(prepared, out)
    wait_for_journal(process, Path(f"{out}.work") / "journal", 5)
    process.send_signal(number)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "headrace: stopped; what was finished is kept, and the same command continues"
    process = start(prepared, out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "are finished already" in said
    assert tree(out) == tree(prepared / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 41))
def test_runs_killed_at_random_moments_end_as_if_nothing_had_happened(prepared, seed):
    check(prepared, times=random.Random(seed).randint(1, 6), seed=seed)


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Two formats of 90 steps in shards of one step: 450 files to write."""
    for route in range(2):
        write_route(tmp_path / "raw", route, 20)
        write_arrays(tmp_path / "arrays", 5 + route, 25)
    write_recipe(tmp_path)
    process = start(tmp_path, tmp_path / "whole")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return tmp_path


def strike(process: subprocess.Popen, victim: str, rng: random.Random) -> None:
    """Kill -9 a worker, the driver alone, or all of them."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if victim == "worker":
            workers = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if "spawn_main" in " ".join(child.cmdline())
            ]
            if workers:
                rng.choice(workers).kill()
        elif victim == "driver":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def check_strikes(folder: Path, *, kills: int, seed: int, victims: tuple[str, ...]) -> None:
    """Kill, resume, kill again until the dataset is there, and begin anew, ``kills`` times in all."""
    rng, done = random.Random(seed), 0
    out = folder / "out"
    while done < kills:
        process = start(folder, out, workers=2)
        began = time.monotonic()
        wait_for_journal(process, Path(f"{out}.work") / "journal", rng.randint(0, 60))
        while process.poll() is None and done < kills and time.monotonic() - began < 60:
            time.sleep(rng.random() * 0.5)
            victim = rng.choice(victims)
            strike(process, victim, rng)
            done += 1
            if victim != "worker":
                break
        _, said = process.communicate(timeout=120)
        if process.returncode not in (0, -signal.SIGKILL):
            pytest.fail(said)
        if process.returncode == 0:
            check_whole(folder, out)
            shutil.rmtree(out)
            shutil.rmtree(f"{out}.work")
    process = start(folder, out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    check_whole(folder, out)


def check_whole(folder: Path, out: Path) -> None:
    assert tree(out) == tree(folder / "whole")
    assert verify(out).problems == ()
    assert [path.name for path in Path(f"{out}.work").iterdir()] == ["seen.json"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_fifty_kills_of_workers_driver_or_both_lose_double_and_alter_nothing(mixed, seed):
    check_strikes(mixed, kills=50, seed=seed, victims=("worker", "driver", "both"))
