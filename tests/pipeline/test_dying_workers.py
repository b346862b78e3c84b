"""Workers that die: innocent work survives, and only a task that kills when it is alone is blamed."""

import random
import threading
from contextlib import suppress

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import zarr

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.readers import READERS
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from tests.pipeline.deadly import DeadlyReader
from tests.pipeline.recordings import tree, write_recipe, write_route


def run(folder, out, monkeypatch, memory="auto", **options):
    monkeypatch.setitem(READERS, "deadly", DeadlyReader)
    return convert(
        folder / "raw",
        folder / out,
        write_recipe(folder),
        format="deadly",
        shard_steps=4,
        cluster=ClusterOptions(workers=2, memory=memory),
        **options,
    )


def test_a_shard_that_kills_every_worker_is_quarantined_and_no_innocent_one_is(tmp_path, monkeypatch):
    for route in range(3):
        write_route(tmp_path / "raw", route, 8)
    (tmp_path / "raw" / "route_01" / "deadly").write_text("5")  # steps 12:16 of the dataset
    report = run(tmp_path, "out", monkeypatch)
    assert (report.exit_code, report.quarantined) == (3, {"worker-died": 1})
    valid = zarr.open_group(tmp_path / "out", mode="r")["valid"][:]
    np.testing.assert_array_equal(np.flatnonzero(~valid), [12, 13, 14, 15])
    (row,) = pq.read_table(tmp_path / "out" / read_info(tmp_path / "out").tables["quarantine"].path).to_pylist()
    assert (row["episode"], row["start"], row["stop"]) == ("route_01", 4, 8)
    assert verify(tmp_path / "out").ok


def test_a_worker_that_dies_once_changes_no_byte(tmp_path, monkeypatch):
    for route in range(2):
        write_route(tmp_path / "raw", route, 8)
    run(tmp_path, "whole", monkeypatch)
    (tmp_path / "raw" / "route_01" / "once").write_text("2")
    assert run(tmp_path, "out", monkeypatch).exit_code == 0
    assert not (tmp_path / "raw" / "route_01" / "once").exists()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.soak
def test_a_worker_out_of_memory_is_blamed_for_its_shard_and_the_rest_is_whole(tmp_path, monkeypatch):
    for route in range(2):
        write_route(tmp_path / "raw", route, 8)
    (tmp_path / "raw" / "route_01" / "hungry").write_text("5")
    report = run(tmp_path, "out", monkeypatch, memory="600MiB")
    assert (report.exit_code, report.quarantined) == (3, {"worker-died": 1})
    valid = zarr.open_group(tmp_path / "out", mode="r")["valid"][:]
    np.testing.assert_array_equal(np.flatnonzero(~valid), [12, 13, 14, 15])
    assert verify(tmp_path / "out").ok


def test_a_module_in_the_folder_one_stands_in_is_not_the_workers(tmp_path, monkeypatch):
    write_route(tmp_path / "raw", 0, 8)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "numpy.py").write_text("raise SystemExit('not numpy')")
    (tmp_path / "here" / "tasks.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    assert run(tmp_path, "out", monkeypatch).exit_code == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_workers_killed_every_few_seconds_lose_nothing_and_blame_nobody(tmp_path, monkeypatch, seed):
    for route in range(6):
        write_route(tmp_path / "raw", route, 40)
    run(tmp_path, "whole", monkeypatch)
    rng, done = random.Random(seed), threading.Event()

    def kill_workers() -> None:
        while not done.wait(1 + 2 * rng.random()):
            workers = [
                child
                for child in psutil.Process().children(recursive=True)
                if "spawn_main" in " ".join(child.cmdline())
            ]
            if workers:
                with suppress(psutil.NoSuchProcess):
                    rng.choice(workers).kill()

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        report = run(tmp_path, "out", monkeypatch)
    finally:
        done.set()
        killer.join()
    assert report.exit_code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
