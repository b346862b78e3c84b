"""carla_garage routes: layout, route filters, tracks at 4 Hz."""

import gzip
import json

import numpy as np
import pytest

from pipeline.readers import open_source
from pipeline.readers.carla_garage import CarlaGarageReader
from pipeline.readers.route_results import refusal
from schemas.errors import Reason, SourceError, UsageError
from schemas.planner import PlannerParams
from schemas.tracks import ActorClass, LightState
from tasks.planner_tracks import planner_anchors, resample_tracks
from tests.conftest import shared_data
from tests.pipeline.readers.builders import image_bytes

ROUTE = "data/Accident/1234_Rep0_Town12_Accident_route0_01_02_03_04_05"
PERFECT = {"status": "Completed", "scores": {"score_composed": 100.0}, "infractions": {"red_light": []}}


def write_json(path, value, packed=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(value).encode()
    path.with_name(path.name + (".gz" if packed else "")).write_bytes(gzip.compress(data) if packed else data)


def matrix(x, y, yaw, z=0.0):
    """CARLA's world_from_actor, left-handed, yaw in rad."""
    c, s = np.cos(yaw), np.sin(yaw)
    return [[c, -s, 0, x], [s, c, 0, y], [0, 0, 1, z], [0, 0, 0, 1]]


def measurement(step):
    x, yaw = 2.0 * step, 0.05 * step
    return {
        "pos_global": [x, 10.0], "theta": yaw, "speed": 8.0, "command": 2, "steer": 0.1, "throttle": 0.5, "brake": float("nan"),
        "target_point": [5.0, 1.0], "junction": False, "ego_matrix": matrix(x, 10.0, yaw, 0.5),
    }  # fmt: skip


def boxes(step):
    return [
        {"class": "ego_car", "extent": [2.4, 0.9, 0.7], "id": 1, "matrix": matrix(2.0 * step, 10.0, 0)},
        {"class": "car", "extent": [2.0, 1.0, 0.7], "id": 2, "matrix": matrix(30.0 + step, 14.0, 0.2), "base_type": "car", "number_of_wheels": 4},
        {"class": "car", "extent": [0.9, 0.3, 0.7], "id": 3, "matrix": matrix(0.0, 0.0, 0.0), "base_type": "bicycle", "number_of_wheels": 2},
        {"class": "walker", "extent": [0.2, 0.2, 0.9], "id": 4, "position": [3.0, 1.0, 0.0], "yaw": 0.0},
        {"class": "static_trafficwarning", "extent": [1.0, 0.5, 0.7], "id": 5, "matrix": matrix(9.0, 9.0, 0.0)},
        {"class": "static_car", "extent": [2.0, 1.0, 0.7], "matrix": matrix(5.0, 5.0, 0.0)},
        {"class": "static", "type_id": "static.prop.constructioncone", "extent": [0.2, 0.2, 0.5], "id": 6, "matrix": matrix(1.0, 1.0, 0.0)},
        {"class": "traffic_light", "extent": [1.5, 0.5, 0.5], "id": 7, "matrix": matrix(40.0, 10.0, 0.0), "state": "Red", "affects_ego": True},
        {"class": "traffic_light_vqa", "id": 8, "state": 2, "state_str": "Green", "road_id": 5, "lane_id": -1, "junction_id": 3},
        {"class": "weather", "fog": 1.0},
    ]  # fmt: skip


def write_route(root, name=ROUTE, num_steps=8, results=PERFECT, packed=True):
    folder = root / name
    for step in range(num_steps):
        write_json(folder / "measurements" / f"{step:04d}.json", measurement(step), packed)
        write_json(folder / "boxes" / f"{step:04d}.json", boxes(step), packed)
        (folder / "rgb").mkdir(exist_ok=True)
        (folder / "rgb" / f"{step:04d}.jpg").write_bytes(image_bytes(np.full((4, 8, 3), step, np.uint8), "JPEG"))
    if results is not None:
        write_json(folder / "results.json", results, packed)
    return folder


@pytest.mark.parametrize(
    ("name", "town"),
    [
        (ROUTE, "Town12"),
        ("s1_dataset_2023_05_10/Routes_Town04_Scenario1_Repetition2/Town04_Scenario1_route49_05_11_16_31_34", "Town04"),
    ],
)
def test_both_layouts_are_routes(tmp_path, name, town):
    write_route(tmp_path, name)
    reader = open_source(tmp_path)
    index = reader.index()
    (ref,) = index.episodes
    assert (index.format, ref.key, ref.num_steps, ref.rate_hz, ref.details["town"]) == (
        "carla-garage",
        name,
        8,
        4.0,
        town,
    )
    assert [(view.name, view.height_px, view.width_px) for view in ref.views if view.present] == [("rgb", 4, 8)]
    assert len(list(reader.files(ref))) == 25
    block = reader.read_signals(ref, ["speed", "pos_global", "brake"], np.arange(2, 5))
    np.testing.assert_array_equal(block.values["pos_global"], [[4, 10], [6, 10], [8, 10]])
    np.testing.assert_allclose(block.values["timestamp_s"], [0.5, 0.75, 1.0])
    assert np.isnan(block.values["brake"]).all() and block.faults == ()


def test_tracks_are_right_handed_and_hold_what_is_around(tmp_path):
    write_route(tmp_path)
    reader = CarlaGarageReader(tmp_path)
    (ref,) = reader.index().episodes
    tracks = reader.read_tracks(ref)
    step = np.arange(8)
    np.testing.assert_allclose(tracks.time_s, step / 4)
    np.testing.assert_allclose(tracks.ego_position, np.stack([2.0 * step, step * 0 - 10.0, step * 0 + 0.5], 1))
    np.testing.assert_allclose(tracks.ego_rotation[:, 2], -0.05 * step, atol=1e-12)
    np.testing.assert_allclose(tracks.ego_velocity, [[8, 0]] * 8, atol=1e-9)
    np.testing.assert_allclose([tracks.ego_length_m, tracks.ego_width_m], [4.8, 1.8])
    kinds = [
        ActorClass.VEHICLE,
        ActorClass.BICYCLE,
        ActorClass.PEDESTRIAN,
        ActorClass.CZONE_SIGN,
        ActorClass.GENERIC,
        ActorClass.TRAFFIC_CONE,
    ]
    np.testing.assert_array_equal(tracks.actor_class, kinds)
    np.testing.assert_allclose(tracks.actor_velocity[:, 0], [[4, 0]] * 8, atol=1e-9)
    np.testing.assert_allclose(tracks.actor_heading[:, 0], -0.2)
    # The walker is told from the ego: 3 m ahead and 1 m to its right.
    yaw = 0.05 * step
    expected = 2.0 * step + 3 * np.cos(yaw) - np.sin(yaw), -(10 + 3 * np.sin(yaw) + np.cos(yaw))
    np.testing.assert_allclose(tracks.actor_position[:, 2, :2], np.stack(expected, 1))
    np.testing.assert_array_equal(tracks.light_state[0], [LightState.RED, LightState.GREEN])
    np.testing.assert_array_equal(tracks.light_lane, [[0, 0], [5, -1]])
    np.testing.assert_allclose(tracks.light_trigger[0], [40, -10, 0, 1.5, 0.5])


def test_a_route_at_4_hz_becomes_10_hz_with_flags(tmp_path):
    write_route(tmp_path, num_steps=21)
    reader = CarlaGarageReader(tmp_path)
    grid = resample_tracks(reader.read_tracks(reader.index().episodes[0]), PlannerParams())
    assert grid.num_steps == 51
    np.testing.assert_allclose(grid.ego_position[:, 0], 0.8 * np.arange(51))
    np.testing.assert_allclose(grid.ego_rotation[:, 2], -0.02 * np.arange(51), atol=1e-12)
    np.testing.assert_array_equal(grid.is_interpolated, np.arange(51) % 5 != 0)
    assert grid.ego_valid.all() and not grid.is_break.any()
    # 5 s are too short for a whole sample, and enough for one whose future is masked.
    assert len(planner_anchors(grid, PlannerParams())) == 0
    np.testing.assert_array_equal(planner_anchors(grid, PlannerParams(), min_future_steps=20), np.arange(20, 31))


def test_a_missing_measurement_is_bridged_and_a_longer_hole_is_not(tmp_path):
    folder = write_route(tmp_path, num_steps=21)
    for step in (5, 12, 13):
        (folder / "measurements" / f"{step:04d}.json.gz").unlink()
    (folder / "boxes" / "0017.json.gz").write_bytes(b"")
    reader = CarlaGarageReader(tmp_path)
    tracks = reader.read_tracks(reader.index().episodes[0])
    assert [(fault.start, fault.stop, fault.stream) for fault in tracks.faults] == [
        (5, 6, ""),
        (12, 14, ""),
        (17, 18, "boxes"),
    ]
    assert not tracks.actor_valid[tracks.source_step == 17].any()
    grid = resample_tracks(tracks, PlannerParams())
    np.testing.assert_array_equal(
        np.flatnonzero(~grid.ego_valid), np.arange(28, 35)
    )  # 2.75 s to 3.5 s, neither included
    np.testing.assert_allclose(grid.ego_position[12, 0], 9.6)


def test_without_a_matrix_the_compass_is_used_and_nan_is_no_turn(tmp_path):
    folder = write_route(tmp_path, num_steps=3)
    plain = {key: value for key, value in measurement(1).items() if key != "ego_matrix"}
    write_json(folder / "measurements" / "0001.json", plain)
    write_json(folder / "measurements" / "0002.json", {**plain, "theta": float("nan")})
    reader = CarlaGarageReader(tmp_path)
    tracks = reader.read_tracks(reader.index().episodes[0])
    np.testing.assert_allclose(tracks.ego_rotation[:, 2], [0, -0.05])
    assert [fault.start for fault in tracks.faults] == [2]


def test_routes_are_left_out_by_their_results_and_counted(tmp_path):
    slow = {
        "status": "Completed",
        "scores": {"score_composed": 70.0},
        "infractions": {"min_speed_infractions": ["slow"], "red_light": []},
    }
    outside = {**slow, "infractions": {"min_speed_infractions": ["slow"], "outside_route_lanes": ["out"]}}
    failed = {"status": "Failed - Agent crashed", "scores": {"score_composed": 100.0}, "infractions": {}}
    for name, results in (
        ("a", PERFECT),
        ("b", slow),
        ("c", outside),
        ("d", failed),
        ("e", None),
        ("f", {"status": 3}),
    ):
        write_route(tmp_path, f"{name}_Town01", 2, results)
    kept = {
        rule: [ref.key for ref in CarlaGarageReader(tmp_path, rule).index().episodes]
        for rule in ("perfect", "min-speed", "lead", "all")
    }
    assert kept["perfect"] == ["a_Town01"]
    assert kept["min-speed"] == ["a_Town01", "b_Town01"]
    assert kept["lead"] == ["a_Town01", "b_Town01", "c_Town01"]
    assert len(kept["all"]) == 6
    index = CarlaGarageReader(tmp_path).index()
    (note,) = index.notes
    assert note == (
        "4 of 6 routes were left out by the rule min-speed: 1 Failed - Agent crashed; 1 below a score of 100; "
        "1 with broken results; 1 without results"
    )
    assert [fault.episode for fault in index.faults] == ["c_Town01", "d_Town01", "e_Town01", "f_Town01"]
    reasons = [fault.reason for fault in index.faults]
    assert reasons == [Reason.LEFT_OUT, Reason.LEFT_OUT, Reason.LEFT_OUT, Reason.BAD_METADATA]
    with pytest.raises(UsageError, match="expected keep one of"):
        CarlaGarageReader(tmp_path, "best")


def test_the_rules_on_real_results():
    """Of 28 evaluated routes, one failed; what the others did wrong decides."""
    path = shared_data("leaderboard_results", "tfpp_b2d_traj", "eval_bench2drive220_0.json")
    records = json.loads(path.read_text())["_checkpoint"]["records"]
    kept = {
        rule: [r["index"] for r in records if not refusal(r, rule)] for rule in ("perfect", "min-speed", "lead", "all")
    }
    assert len(records) == len(kept["all"]) == 28
    assert set(kept["perfect"]) <= set(kept["min-speed"]) <= set(kept["lead"])
    for r in records:
        events = {name for name, found in r["infractions"].items() if found}
        fine = r["status"] != "Failed - TickRuntime" and (
            r["scores"]["score_composed"] >= 100 or events == {"min_speed_infractions"}
        )
        assert (r["index"] in kept["min-speed"]) == fine
    with pytest.raises(SourceError, match="status and composed score"):
        refusal({}, "perfect")
