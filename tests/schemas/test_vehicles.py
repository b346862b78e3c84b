"""Sizes and axles of CARLA's vehicles, against boxes that were recorded."""

import json

import numpy as np
import pytest

from pipeline.plan import PlannedEpisode
from pipeline.planner_arrays import planner_params
from pipeline.planner_rows import planner_notes
from pipeline.readers import open_source
from pipeline.readers.carla_log import VEHICLE
from schemas.errors import RecipeError
from schemas.recipe import PlannerRecipe
from schemas.source import EpisodeRef
from schemas.vehicles import AXLES, SIZES_M, vehicle_axles, vehicle_size
from tests.conftest import shared_data


def test_sizes_are_those_of_a_bench2drive_annotation():
    (path,) = shared_data("bench2drive_anno_excerpt").glob("*.json")
    seen = [box for box in json.loads(path.read_text())["bounding_boxes"] if box.get("type_id", "") in SIZES_M]
    assert "vehicle.lincoln.mkz_2020" in {box["type_id"] for box in seen}
    for box in seen:
        np.testing.assert_allclose(vehicle_size(box["type_id"]), np.multiply(2, box["extent"][:2]), atol=0.01)


def test_sizes_are_those_of_a_recorder_log():
    reader = open_source(shared_data("carla_recorder"))
    (ref,) = reader.index().episodes
    lives = [life for life in reader.read_recording(ref, ref.num_steps).lives if life.actor.kind == VEHICLE]
    assert "vehicle.lincoln.mkz_2017" in {life.actor.blueprint for life in lives}
    for life in lives:
        np.testing.assert_allclose(vehicle_size(life.actor.blueprint), life.box[3:5] / 50, atol=0.01)


@pytest.mark.parametrize("blueprint", AXLES)
def test_both_axles_lie_within_the_car_and_leave_more_of_it_behind(blueprint):
    axles, (length_m, _) = AXLES[blueprint], SIZES_M[blueprint]
    behind_m, ahead_m = axles.rear_m + length_m / 2, length_m / 2 - axles.rear_m - axles.wheel_base_m
    assert 0.9 < behind_m < 1.2 and 0.7 < ahead_m < 1.0


def test_the_recorded_model_decides_unless_the_recipe_does():
    open_recipe, fixed = PlannerRecipe(), PlannerRecipe(rear_axle_m=-1.5, wheel_base_m=2.7)

    def axles(recipe, model):
        params = planner_params(recipe, 10.0, model)
        return params.rear_axle[0], params.wheel_base_m

    assert axles(open_recipe, "vehicle.lincoln.mkz_2020") == (-1.389, 2.860)
    assert axles(open_recipe, "vehicle.tesla.model3") == (-1.357, 3.005)
    assert axles(open_recipe, "") == axles(open_recipe, "vehicle.audi.tt") == (-1.389, 3.089)
    assert axles(fixed, "vehicle.tesla.model3") == (-1.5, 2.7)
    assert vehicle_axles("vehicle.lincoln2020.mkz2020") == vehicle_axles("vehicle.lincoln.mkz_2020")
    with pytest.raises(RecipeError, match="wheel_base_m of 0 to 100"):
        PlannerRecipe(wheel_base_m=-1.0)


def test_a_model_without_known_axles_and_episodes_without_samples_are_said():
    refs = [
        EpisodeRef(key=model, num_steps=1, rate_hz=10.0, views=(), signals=(), details={"ego_type": model})
        for model in ("vehicle.audi.tt", "vehicle.tesla.model3", "", "vehicle.audi.tt")
    ]
    episodes = [
        PlannedEpisode(source="a", ref=ref, start=0, num_steps=size, rate_hz=10.0, fingerprint="")
        for ref, size in zip(refs, (101, 100, 50, 300), strict=True)
    ]
    note, short = planner_notes(PlannerRecipe(), episodes)
    assert note.startswith(
        "the axles of vehicle.audi.tt are not known: took a rear axle at -1.389 m and a wheelbase of 3.089 m"
    )
    assert short.startswith("2 of 4 episodes are shorter than the 101 steps of a sample")
    fixed = PlannerRecipe(rear_axle_m=-1.4, wheel_base_m=2.85, min_future_steps=29)
    assert planner_notes(fixed, episodes) == ()
