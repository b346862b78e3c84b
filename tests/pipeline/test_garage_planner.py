"""Routes of both leaderboards through the whole walk to Diffusion Planner's tensors: filters, 4 Hz to 10 Hz, holes, short clips."""

import gzip
import json

import numpy as np
import pytest
import zarr

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import PlannerDataset
from pipeline.loaders.planner import PlannerOptions, PlannerSamples
from pipeline.recipes import recipe_text
from pipeline.store.metadata import read_info
from pipeline.store.tables import read_table
from pipeline.summaries import summarize_dataset
from tests.pipeline.readers.test_carla_garage import PERFECT, write_json, write_route
from tests.tasks import xodr_builder as x

LAYOUTS = {
    "Town04": "s1_dataset_2023_05_10/Routes_Town04_Scenario1_Repetition2/Town04_Scenario1_route{}_05_11_16_31_34",
    "Town12": "data/Accident/{}_Rep0_Town12_Accident_route0_01_02_03_04_05",
}
SLOW = {"status": "Completed", "scores": {"score_composed": 70.0}, "infractions": {"min_speed_infractions": ["slow"]}}
RED = {"status": "Completed", "scores": {"score_composed": 70.0}, "infractions": {"red_light": ["ran"]}}
FAILED = {"status": "Failed - Agent crashed", "scores": {"score_composed": 0.0}, "infractions": {}}
NUM_STEPS = 61
"""15 s at 4 Hz: 151 steps at 10 Hz."""


def write_maps(folder):
    folder.mkdir(exist_ok=True)
    for town in LAYOUTS:
        data = x.town(x.road(5, x.section(x.lane(-1), x.lane(1)), length=400.0))
        (folder / f"{town}.xodr.gz").write_bytes(gzip.compress(data))
    return folder


def sound_brakes(folder):
    """Give the ego's own brake a number, as recordings have it, and a parked car the NaN of Bench2Drive's."""
    for path in sorted((folder / "measurements").iterdir()):
        write_json(
            path.with_name(path.name.removesuffix(".gz")),
            {**json.loads(gzip.decompress(path.read_bytes())), "brake": False},
        )
    for path in sorted((folder / "boxes").iterdir()):
        boxes = json.loads(gzip.decompress(path.read_bytes()))
        write_json(path.with_name(path.name.removesuffix(".gz")), [{**box, "brake": float("nan")} for box in boxes])


def run(root, out, recipe="diffusion-planner"):
    return convert(root / "raw", out, recipe, map=str(write_maps(root / "maps")), cluster=ClusterOptions(workers=0))


@pytest.mark.parametrize("town", LAYOUTS)
def test_filters_are_counted_and_a_route_at_4_hz_gives_samples_at_10(tmp_path, town):
    names = [LAYOUTS[town].format(10 + k) for k in range(5)]
    for name, results in zip(names, (PERFECT, SLOW, RED, FAILED, None), strict=True):
        route = write_route(tmp_path / "raw", name, NUM_STEPS, results)
        sound_brakes(route)
        first = next((route / "measurements").glob("*0.json.gz"))
        record = {**json.loads(gzip.decompress(first.read_bytes())), "speed": 0.5 + len(str(results))}
        write_json(first.with_name(first.name.removesuffix(".gz")), record)  # the same drive twice would be a duplicate
    report = run(tmp_path, tmp_path / "out")
    assert (report.num_episodes, report.total_steps, report.exit_code) == (2, 302, 0)
    assert (dict(report.quarantined), dict(report.left_out)) == ({}, {"left-out": 3})
    assert report.notes == (
        "3 of 5 routes were left out by the rule min-speed: 1 Failed - Agent crashed; 1 below a score of 100; 1 without results",
    )
    rows = read_table(read_info(tmp_path / "out"), "quarantine").to_pylist()
    assert sorted((row["episode"], row["reason"]) for row in rows) == [(name, "left-out") for name in sorted(names[2:])]
    assert summarize_dataset(tmp_path / "out")["left_out"] == {"left-out": 3}
    group = zarr.open_group(tmp_path / "out", mode="r")
    step = np.arange(302) % 151
    np.testing.assert_array_equal(
        group["planner_interpolated"][:][group["is_anchor"][:]], (step % 5 != 0)[(step >= 20) & (step < 71)]
    )
    np.testing.assert_array_equal(np.flatnonzero(group["is_anchor"][:]), np.flatnonzero((step >= 20) & (step < 71)))
    assert len(PlannerDataset(tmp_path / "out")) == 102
    assert group["lanes_valid"][:][group["is_anchor"][:], 0].all()


def test_a_missing_frame_is_bridged_and_a_hole_takes_its_samples_alone(tmp_path):
    folder = write_route(tmp_path / "raw", LAYOUTS["Town12"].format(1), 121, PERFECT)
    sound_brakes(folder)
    for step in (30, 70, 71):
        (folder / f"measurements/{step:04d}.json.gz").unlink()
    report = run(tmp_path, tmp_path / "out")
    group = zarr.open_group(tmp_path / "out", mode="r")
    # One measurement is missing at 7.5 s and bridged; two at 17.5 s are a hole between 17.25 and 18 s: steps 173 to 179.
    whole = [s for s in range(20, 301 - 80) if not any(s - 20 <= lost <= s + 80 for lost in range(173, 180))]
    found = np.flatnonzero(group["is_anchor"][:])
    np.testing.assert_array_equal(found, whole)
    # Steps at the bridged measurement lack its controls, which no tensor has, and are samples to the loader too.
    assert not group["valid"][:][75]
    np.testing.assert_array_equal(PlannerSamples(tmp_path / "out", PlannerOptions()).anchors, whole)
    assert report.quarantined["missing-file"] >= 2
    assert report.exit_code == 3


def test_a_brake_that_is_not_finite_costs_no_sample(tmp_path):
    write_route(tmp_path / "raw", LAYOUTS["Town12"].format(1), NUM_STEPS, PERFECT)  # each brake is NaN
    report = run(tmp_path, tmp_path / "out")
    assert dict(report.quarantined) == {"non-finite": 1}
    assert len(PlannerDataset(tmp_path / "out")) == 51


def test_a_clip_of_five_seconds_gives_samples_with_masked_futures_where_they_are_asked_for(tmp_path):
    sound_brakes(write_route(tmp_path / "raw", LAYOUTS["Town12"].format(1), 21, PERFECT))
    report = run(tmp_path, tmp_path / "none")
    assert report.notes[0].startswith("1 of 1 episodes are shorter than the 101 steps of a sample and give none")
    assert not zarr.open_group(tmp_path / "none", mode="r")["is_anchor"][:].any()
    recipe = tmp_path / "short.toml"
    recipe.write_text(recipe_text("diffusion-planner").replace("min_future_steps = 0", "min_future_steps = 20"))
    assert run(tmp_path, tmp_path / "some", recipe).notes == ()
    group = zarr.open_group(tmp_path / "some", mode="r")
    anchors = np.flatnonzero(group["is_anchor"][:])
    np.testing.assert_array_equal(anchors, np.arange(20, 31))
    valid = group["ego_agent_future_valid"][:][anchors]
    np.testing.assert_array_equal(valid.sum(axis=1), 50 - anchors)
    futures = group["ego_agent_future"][:][anchors]
    assert not futures[~valid].any() and futures[valid].any(axis=1).all()
    assert not group["neighbor_agents_future"][:][anchors][:, :, 30:].any()


def test_an_ego_whose_axles_are_not_known_is_a_warning_of_each_episode(tmp_path):
    names = [LAYOUTS["Town12"].format(number) for number in (1, 2)]
    for num_steps, name in zip((21, 25), names, strict=True):
        folder = write_route(tmp_path / "raw", name, num_steps, PERFECT)
        sound_brakes(folder)
        for path in sorted((folder / "boxes").iterdir()):
            boxes = json.loads(gzip.decompress(path.read_bytes()))
            boxes[0]["type_id"] = "vehicle.tesla.cybertruck"
            write_json(path.with_name(path.name.removesuffix(".gz")), boxes)
    report = run(tmp_path, tmp_path / "out")
    table = read_table(read_info(tmp_path / "out"), "quarantine").to_pylist()
    rows = [row for row in table if row["reason"] == "unsupported"]  # others say that this car's speed never changes
    assert [(row["episode"], row["is_warning"]) for row in rows] == [(name, True) for name in names]
    assert all(row["message"].startswith("the axles of vehicle.tesla.cybertruck are not known: took") for row in rows)
    assert (report.total_episodes, report.exit_code) == (2, 0)
    recipe = tmp_path / "given.toml"
    text = recipe_text("diffusion-planner").replace("rear_axle_m = 0.0", "rear_axle_m = -1.5")
    recipe.write_text(text.replace("wheel_base_m = 0.0", "wheel_base_m = 3.8"))
    run(tmp_path, tmp_path / "given", recipe)
    assert "unsupported" not in read_table(read_info(tmp_path / "given"), "quarantine")["reason"].to_pylist()
