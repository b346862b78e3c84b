"""Recordings that can be read and are odd: what is found, where, and what each policy makes of it."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.store.metadata import read_info
from pipeline.summaries import summarize_dataset
from pipeline.verification import verify
from schemas.errors import SourceError
from tests.pipeline.readers.builders import write_npy
from tests.pipeline.recordings import RECIPE, write_recipe, write_route

NUM_STEPS = 20
"""10 s at LBC's 2 Hz."""
NPY = 'name = "n"\n[signals.state]\n[signals.actions]\n'


def run(tmp_path, recipe=RECIPE, **options):
    path = write_recipe(tmp_path, recipe)
    return convert(tmp_path / "raw", tmp_path / "out", path, **{"cluster": ClusterOptions(workers=0), **options})


def rows(tmp_path, *, out="out"):
    info = read_info(tmp_path / out)
    return pq.read_table(tmp_path / out / info.tables["quarantine"].path).to_pylist()


def places(tmp_path, **where):
    return [
        (row["episode"], row["stream"], row["start"], row["stop"], row["reason"]) for row in rows(tmp_path, **where)
    ]


def invalid(tmp_path):
    return np.flatnonzero(~zarr.open_group(tmp_path / "out", mode="r")["valid"][:]).tolist()


def change(route, steps, **values):
    """Change fields of LBC's records, which are Python."""
    for step in steps:
        path = route / "measurements" / f"{step:04d}.json"
        record = json.loads(path.read_text().replace("'", '"').replace("False", "false"))
        path.write_text(json.dumps({**record, **values}))


def freeze(route, view, start, stop):
    for step in range(start + 1, stop):
        shutil.copyfile(route / view / f"{start:04d}.png", route / view / f"{step:04d}.png")


@pytest.fixture
def route(tmp_path):
    return write_route(tmp_path / "raw", 1, NUM_STEPS)


@pytest.mark.parametrize("shard_steps", [4, 32])
def test_a_frozen_view_is_one_row_wherever_shards_end_and_is_served(tmp_path, route, shard_steps):
    freeze(route, "rgb", 5, 13)
    report = run(tmp_path, shard_steps=shard_steps)
    assert (report.exit_code, report.quarantined, report.warned) == (0, {}, {"frozen": 1})
    assert places(tmp_path) == [("route_01", "rgb", 5, 13, "frozen")]
    assert rows(tmp_path)[0]["is_warning"] and "4.0 s" in rows(tmp_path)[0]["message"]
    assert invalid(tmp_path) == []
    assert summarize_dataset(tmp_path / "out")["warned"] == {"frozen": 1}


def test_frozen_steps_are_masked_where_the_recipe_refuses_them(tmp_path, route):
    freeze(route, "rgb", 5, 13)
    report = run(tmp_path, RECIPE + '[checks]\nfrozen = "refuse"\n', shard_steps=4)
    assert (report.exit_code, report.quarantined) == (3, {"frozen": 1})
    assert invalid(tmp_path) == list(range(6, 13))
    assert summarize_dataset(tmp_path / "out")["num_invalid_steps"] == 7
    assert verify(tmp_path / "out").ok


def test_policies_hold_for_what_only_the_whole_episode_shows(tmp_path, route):
    freeze(route, "rgb", 5, 13)
    refusing = RECIPE + '[checks]\nfrozen = "refuse"\n'
    with pytest.raises(SourceError, match=r"route_01.*4\.0 s.*says stop"):
        run(tmp_path, refusing, strict=True)
    assert not (tmp_path / "out" / "zarr.json").exists()
    run(tmp_path, refusing, on_bad_frame="drop-episode")
    assert invalid(tmp_path) == list(range(NUM_STEPS))


def test_a_still_scene_and_a_short_one_are_not_frozen(tmp_path, route):
    freeze(route, "rgb", 1, 5)
    freeze(route, "rgb", 7, 15)
    change(route, range(7, 15), speed=1005.0, x=5.0)
    report = run(tmp_path, shard_steps=4)
    assert (report.warned, rows(tmp_path)) == ({}, [])


@pytest.mark.parametrize(("step", "rate_hz"), [(7, 0), (8, 0), (8, 4)])
def test_a_jump_masks_the_step_after_it_also_at_a_shard_s_first(tmp_path, route, step, rate_hz):
    change(route, range(step, NUM_STEPS), x=5000.0)
    run(tmp_path, f"rate_hz = {rate_hz}\n{RECIPE}", shard_steps=4)
    assert places(tmp_path) == [("route_01", "position", step, step + 1, "pose-jump")]
    assert invalid(tmp_path) == [2 * step if rate_hz else step]


def test_a_heading_may_pass_north_and_may_not_flip(tmp_path, route):
    for step in range(NUM_STEPS):
        change(route, [step], theta=(3.0 + 0.1 * step) if step < 2 else -3.0 + 0.1 * step)
    change(route, range(10, NUM_STEPS), theta=1.5)
    limits = "[checks]\nmax_turn_deg_s = 90\n"
    run(tmp_path, RECIPE + limits)
    assert places(tmp_path) == [("route_01", "theta", 10, 11, "pose-jump")]


def test_a_pose_that_nobody_recorded_condemns_nothing(tmp_path, route):
    change(route, [4, 5], x="lost", theta=None)
    report = run(tmp_path)
    assert (report.exit_code, rows(tmp_path), invalid(tmp_path)) == (0, [], [])


def test_frames_of_another_size_are_one_row(tmp_path, route):
    for step in (7, 8, 9):
        Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save(route / "rgb" / f"{step:04d}.png")
    run(tmp_path, shard_steps=4)
    assert places(tmp_path) == [("route_01", "rgb", 7, 10, "wrong-shape")]
    assert "expected frames of 8x6 px, found 16x12" in rows(tmp_path)[0]["message"]
    assert invalid(tmp_path) == []
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, RECIPE + '[checks]\nview_size = "refuse"\n', shard_steps=4)
    assert invalid(tmp_path) == [7, 8, 9]


def test_the_same_recording_twice_is_served_once(tmp_path, route):
    shutil.copytree(route, tmp_path / "raw" / "route_02")
    report = run(tmp_path)
    assert (report.exit_code, report.quarantined) == (3, {"duplicate": 1})
    assert places(tmp_path) == [("route_02", "", 0, 0, "duplicate")]
    assert "'raw/route_01'" in rows(tmp_path)[0]["message"]
    assert invalid(tmp_path) == list(range(NUM_STEPS, 2 * NUM_STEPS))


def write_run(root, times_s, state, rate_hz=10, instruction="go"):
    write_npy(root, len(times_s), timestamp_s=np.asarray(times_s), state=np.asarray(state, np.float64))
    (root / "meta.json").write_text(json.dumps({"rate_hz": rate_hz, "instructions": [instruction]}))


def test_lost_frames_are_named_and_masked_where_asked(tmp_path):
    times_s = np.arange(30) / 10
    times_s[17:] += 0.3
    write_run(tmp_path / "raw" / "a", times_s, np.arange(60.0).reshape(30, 2))
    report = run(tmp_path, NPY, shard_steps=8)
    assert (report.exit_code, places(tmp_path)) == (0, [("a", "timestamp_s", 17, 18, "time-gap")])
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, NPY + '[checks]\ntime_gap = "refuse"\n', shard_steps=8)
    assert invalid(tmp_path) == [17]


def test_a_clock_that_is_wrong_throughout_is_one_row_a_reason(tmp_path):
    write_run(tmp_path / "raw" / "a", np.arange(30) / 5, np.arange(60.0).reshape(30, 2))
    periods_s = np.where(np.arange(30) % 2, 0.17, 0.03)
    write_run(tmp_path / "raw" / "b", np.cumsum(periods_s), np.arange(60.0).reshape(30, 2))
    run(tmp_path, NPY, shard_steps=8)
    assert places(tmp_path) == [("a", "timestamp_s", 1, 30, "time-gap"), ("b", "timestamp_s", 0, 0, "time-jitter")]


def test_constants_are_told_by_dataset_and_by_episode(tmp_path):
    moving = np.stack([np.arange(30.0), np.full(30, 7.0)], axis=1)
    write_run(tmp_path / "raw" / "a", np.arange(30) / 10, moving)
    write_run(tmp_path / "raw" / "b", np.arange(30) / 10, np.full((30, 2), 7.0))
    run(tmp_path, NPY)
    assert places(tmp_path) == [("", "state", 0, 0, "constant"), ("b", "state", 0, 0, "constant")]
    assert "1 of 2" in rows(tmp_path)[0]["message"] and "state[1]" in rows(tmp_path)[0]["message"]
    write_run(tmp_path / "raw" / "c", np.arange(30) / 10, moving + np.array([100.0, 0.0]))
    assert run(tmp_path, NPY).warned == {}
    assert len(rows(tmp_path)) == 2


def test_the_same_motion_under_another_instruction_is_no_duplicate(tmp_path):
    for name, instruction in (("a", "go"), ("b", "stop"), ("c", "go")):
        write_run(tmp_path / "raw" / name, np.arange(30) / 10, np.arange(60.0).reshape(30, 2), instruction=instruction)
    run(tmp_path, NPY)
    assert places(tmp_path) == [("c", "", 0, 0, "duplicate")]
