"""Planner samples against a slow reference, written from the contract in plain Python: every tensor and every mask."""

import math
from dataclasses import replace

import numpy as np
import pytest

from schemas.planner import FEATURES, MASKS, TENSORS, PlannerParams
from schemas.tracks import ActorClass, LightState
from tasks.planner import planner_block, prepare_scene, scene_block
from tasks.planner_tracks import planner_anchors, resample_tracks
from tests.tasks.planner_reference import Reference
from tests.tasks.planner_scenes import bend, crossing, drive, line, make_graph, make_tracks, nearest_of, path_of

PARAMS = PlannerParams()
SMALL = PlannerParams(
    past_steps=6,
    future_steps=15,
    num_agents=8,
    num_vulnerable=3,
    num_static=2,
    num_lanes=9,
    num_route_lanes=2,
    num_points=7,
)


def assert_as_reference(tracks, graph, params, driven, steps):
    block = planner_block(tracks, graph, np.array(steps), params)
    reference = Reference(resample_tracks(tracks, params), graph, params, driven)
    for row, step in enumerate(steps):
        expected = reference.sample(step)
        assert set(expected) == set(TENSORS) | set(MASKS)
        for name, value in expected.items():
            found = block[name][row]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            # Local coordinates of 100 m have a last bit of 8e-6 m, and so have their differences.
            np.testing.assert_allclose(found, value, rtol=2e-6, atol=2e-5, err_msg=f"{name} at step {step}")
            if name in MASKS:
                np.testing.assert_array_equal(found, value, err_msg=name)
            if value.dtype == np.float32:
                np.testing.assert_array_equal(
                    (found == 0).all(axis=-1), (value == 0).all(axis=-1), err_msg=f"zero rows of {name}"
                )
    return block


def crowd(num_steps, count, seed, spread=60.0):
    """Actors of all classes that come late, vanish, return, or stay."""
    rng = np.random.default_rng(seed)
    actors = []
    for k in range(count):
        start, heading = rng.uniform(-spread, spread, 2), rng.uniform(-np.pi, np.pi)
        step = rng.uniform(0, 1.2) * np.array([np.cos(heading), np.sin(heading)])
        turn = heading + np.cumsum(rng.normal(0, 0.02, num_steps))
        valid = np.ones(num_steps, bool)
        begin, end = sorted(rng.integers(0, num_steps, 2).tolist())
        kind = k % 4
        if kind == 1:
            valid[:begin] = False
        elif kind == 2:
            valid[end:] = False
        elif kind == 3:
            valid[begin:end] = False
        poses = np.concatenate([start + np.arange(num_steps)[:, None] * step, turn[:, None]], 1)
        actors.append({"poses": poses, "kind": int(rng.integers(0, 7)), "size": rng.uniform(0.3, 5, 2), "valid": valid})
    return actors


def test_a_straight_road_gives_the_numbers_worked_out_by_hand():
    graph = make_graph([{"center": line((-200, 0), (400, 0)), "limit": 13.9}, {"center": line((-200, 50), (400, 50))}])
    ego = drive(line((0, 0), (300, 0)), 10.0, 110)
    ahead = ego + np.array([20.0, 3.0, 0.0])  # another car, as fast
    tracks = make_tracks(ego, [{"poses": ahead, "size": (4.6, 2.1)}])
    tracks = replace(tracks, ego_rotation=tracks.ego_rotation * (0, 0, 1))
    block = planner_block(tracks, graph, np.array([20]), PARAMS)
    np.testing.assert_allclose(block["ego_current_state"][0], [0, 0, 1, 0, 10, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(block["ego_current_state"][0, :4], [0, 0, 1, 0])
    future = block["ego_agent_future"][0]
    np.testing.assert_allclose(future, [[k + 1.0, 0, 0] for k in range(80)], atol=1e-5)
    # The origin of the frame is the rear axle, 1.389 m behind the vehicle's; width stands before length.
    row = block["neighbor_agents_past"][0, 0, -1]
    np.testing.assert_allclose(row, [21.389, 3, 1, 0, 10, 0, 2.1, 4.6, 1, 0, 0], atol=1e-5)
    np.testing.assert_allclose(block["neighbor_agents_past"][0, 0, 0, :2], [1.389, 3], atol=1e-5)
    np.testing.assert_allclose(block["neighbor_agents_future"][0, 0, -1], [101.389, 3, 0], atol=1e-5)
    assert not block["neighbor_agents_past"][0, 1:].any()
    lanes = block["lanes"][0]
    np.testing.assert_allclose(lanes[0, 0], [-218.611, 0, 600 / 19, 0, 0, 1.75, 0, -1.75, 0, 0, 0, 1], atol=1e-4)
    np.testing.assert_allclose(lanes[0, 19], [381.389, 0, 0, 0, 0, 1.75, 0, -1.75, 0, 0, 0, 1], atol=1e-4)
    np.testing.assert_allclose(lanes[1, :, 1], 50, atol=1e-4)
    np.testing.assert_array_equal(block["lanes_valid"][0, :3], [True, True, False])
    np.testing.assert_array_equal(block["lanes_speed_limit"][0, :2, 0], np.array([13.9, 0], np.float32))
    np.testing.assert_array_equal(block["lanes_has_speed_limit"][0, :2, 0], [True, False])
    np.testing.assert_array_equal(block["route_lanes"][0, 0], lanes[0])
    np.testing.assert_array_equal(block["route_lanes_valid"][0, :2], [True, False])


def test_a_curve_with_a_crowd_is_as_the_reference_says():
    angle = np.linspace(0, 2.5, 120)
    path = 60 * np.stack([np.sin(angle), 1 - np.cos(angle)], 1)
    graph = make_graph([{"center": path, "flipped": True}, {"center": 1.06 * path, "along": False, "ids": (0, 0, 1)}])
    ego = drive(path, 9.0, 140)
    ego[:, 2] += 2 * np.pi * 3 - np.pi  # angles of any turn, and across the cut
    ego[:, 2] -= 5 * np.pi
    tracks = make_tracks(ego, crowd(140, 25, seed=1))
    assert_as_reference(tracks, graph, PARAMS, [0] * 140, [0, 5, 20, 58, 100, 139])


@pytest.mark.parametrize("count", [31, 32, 33, 60])
@pytest.mark.parametrize("kinds", ["mixed", "vehicles", "people"])
def test_as_many_neighbours_as_fit_and_more(count, kinds):
    graph = make_graph([{"center": line((-100, 0), (100, 0))}])
    actors = [actor for actor in crowd(110, 4 * count, seed=count) if actor["valid"][25]]
    for number, actor in enumerate(actors):
        actor["kind"] = {"mixed": number % 3, "vehicles": 0, "people": 1 + number % 2}[kinds]
    tracks = make_tracks(drive(line((-50, 0), (100, 0)), 5.0, 110), actors[:count])
    block = assert_as_reference(tracks, graph, PARAMS, [0] * 110, [25])
    taken = block["neighbor_agents_past"][0, :, -1, 8:].sum(axis=0)
    kept = np.array([sum(actor["kind"] == kind for actor in actors[:count]) for kind in range(3)])
    np.testing.assert_array_equal(block["neighbor_agents_dropped"][0], kept - taken)
    assert taken.sum() == min(count, 32)
    assert (block["neighbor_agents_id"][0] >= 0).sum() == min(count, 32)


@pytest.mark.parametrize("seed", range(4))
def test_small_sizes_and_crowds_are_as_the_reference_says(seed):
    lanes, signals, number = crossing()
    graph = make_graph(lanes, signals)
    driven = [number["in", 0, 0], number[0, "left", 0], number["out", 3, 0]]
    ego = drive(path_of(lanes, driven), 8.0, 160, start_m=40)
    tracks = make_tracks(
        ego, crowd(160, 30, seed, spread=40.0), [(f"s{k}", [s] * 160) for k, s in enumerate((0, 1, 2, 3))]
    )
    assert_as_reference(tracks, graph, SMALL, nearest_of(lanes, driven, ego), [0, 3, 30, 90, 150, 159])


@pytest.mark.parametrize("turn", ["left", "straight", "right"])
def test_a_junction_with_lights_is_as_the_reference_says(turn):
    lanes, signals, number = crossing()
    graph = make_graph(lanes, signals)
    lane = {"left": 0, "straight": 0, "right": 1}[turn]
    arm = {"left": 3, "straight": 2, "right": 1}[turn]
    driven = [number["in", 0, lane], number[0, turn, lane], number["out", arm, lane]]
    ego = drive(path_of(lanes, driven), 9.0, 150, start_m=10)
    states = np.repeat([LightState.GREEN, LightState.YELLOW, LightState.RED], 50)
    lights = [("s0", states), ("s1", states[::-1]), ("unknown", states), ("s2", np.full(150, LightState.UNKNOWN))]
    tracks = make_tracks(ego, crowd(150, 10, 3), lights)
    block = assert_as_reference(tracks, graph, PARAMS, nearest_of(lanes, driven, ego), [10, 60, 120])
    on_route = block["route_lanes_valid"].sum(axis=1)
    # In front of the junction: both lanes of the arm, the movement's lanes (two go straight), and both lanes behind it.
    assert on_route[0] == 5 + (turn == "straight")
    assert_as_reference(
        tracks, graph, replace(PARAMS, marks_yellow=True), nearest_of(lanes, driven, ego), [10, 60, 120]
    )


def test_more_lanes_than_fit_and_lanes_beyond_the_radius():
    starts = [(15 * i - 90, 12 * j - 90) for i in range(12) for j in range(14)]
    lanes = [{"center": line((x, y), (x + 8, y)), "ids": (k, 0, -1)} for k, (x, y) in enumerate(starts)]
    lanes.append({"center": line((-90, -300), (-90, -99)), "kind": "sidewalk"})
    graph = make_graph(lanes)
    ego = drive(line((-40, 1), (60, 1)), 6.0, 110)
    block = planner_block(make_tracks(ego), graph, np.array([20]), PARAMS)
    assert block["lanes_valid"].all()
    reference = Reference(resample_tracks(make_tracks(ego), PARAMS), graph, PARAMS, [-1] * 110)
    expected = [reference.lane_points(20, lane) for lane in reference.near_lanes(20)]
    np.testing.assert_allclose(block["lanes"][0], expected, rtol=2e-6, atol=2e-5)


def test_a_lane_counts_by_its_area_and_is_sorted_by_its_vertices():
    # A long lane of two vertices passes near the ego, its vertices far away: it is in, but last.
    lanes = [
        {"center": np.array([(-500.0, 60.0), (500.0, 60.0)])},
        {"center": line((-10, 99), (10, 99))},
        {"center": line((0, 103), (9, 103))},
    ]
    graph = make_graph(lanes)
    tracks = make_tracks(np.zeros((5, 3)))
    block = planner_block(tracks, graph, np.array([0]), PARAMS)
    np.testing.assert_array_equal(block["lanes_valid"][0, :3], [True, True, False])
    np.testing.assert_allclose(block["lanes"][0, :2, 0, 1], [99, 60], atol=0.1)


def test_history_before_an_actor_is_there_repeats_its_first_state():
    graph = make_graph([{"center": line((-10, 0), (200, 0))}])
    ego = drive(line((0, 0), (200, 0)), 5.0, 60)
    valid = np.zeros(60, bool)
    valid[[12, 13, 17, 20, 22]] = True
    actor = {"poses": ego + np.array([5.0, 2.0, 0.3]), "valid": valid, "kind": ActorClass.BICYCLE}
    block = planner_block(make_tracks(ego, [actor]), graph, np.array([20]), PARAMS)
    past, there = block["neighbor_agents_past"][0, 0], block["neighbor_agents_past_valid"][0, 0]
    np.testing.assert_array_equal(np.flatnonzero(there), [12, 13, 17, 20])
    for row, source in ((0, 12), (11, 12), (14, 17), (16, 17), (18, 20)):
        np.testing.assert_array_equal(past[row], past[source])
    future = block["neighbor_agents_future"][0, 0]
    np.testing.assert_array_equal(np.flatnonzero(future.any(axis=1)), [1])


def test_a_valid_future_row_is_never_all_zero():
    graph = make_graph([{"center": line((-10, 0), (50, 0))}])
    params = PlannerParams(rear_axle=(0.0, 0.0, 0.0))
    tracks = make_tracks(np.zeros((5, 3)), [{"poses": np.zeros((5, 3))}])
    block = planner_block(tracks, graph, np.array([0]), params)
    assert block["neighbor_agents_future"][0, 0, :4].any(axis=1).all()
    np.testing.assert_allclose(block["neighbor_agents_future"][0, 0, :4], 0, atol=2e-6)
    np.testing.assert_array_equal(block["neighbor_agents_future_valid"][0, 0, :6], [True] * 4 + [False] * 2)


def test_what_follows_a_jump_is_no_future_and_an_absent_ego_gives_nothing():
    graph = make_graph([{"center": line((-10, 0), (500, 0))}])
    ego = drive(line((0, 0), (500, 0)), 10.0, 100)
    ego[60:, 0] += 40.0
    there = np.ones(100, bool)
    there[80:85] = False
    tracks = make_tracks(ego, crowd(100, 6, 2), ego_valid=there)
    block = assert_as_reference(tracks, graph, PARAMS, np.where(there, 0, -1), [30, 59, 60, 82, 90])
    np.testing.assert_array_equal(block["ego_agent_future_valid"].sum(axis=1), [29, 0, 19, 0, 9])
    assert not any(block[name][3].any() for name in TENSORS)
    grid = resample_tracks(tracks, PARAMS)
    short = replace(PARAMS, past_steps=5, future_steps=10)
    expected = [*range(5, 50), *range(65, 70)]
    np.testing.assert_array_equal(planner_anchors(grid, short), expected)
    np.testing.assert_array_equal(planner_anchors(grid, short, stride=2), [*range(5, 50, 2), *range(65, 70, 2)])
    np.testing.assert_array_equal(planner_anchors(grid, short, min_future_steps=0)[-1], 99)
    assert len(planner_anchors(grid, short, min_distance_m=10.5)) == 0


@pytest.mark.parametrize("yaw_rate", [0.0, 0.3, 1.4, -5.0])
@pytest.mark.parametrize("speed", [0.1, 0.5, 12.0])
def test_steering_comes_from_the_yaw_rate_before_that_is_clipped(speed, yaw_rate):
    graph = make_graph([{"center": line((-10, 0), (50, 0))}])
    heading = np.arange(4) * yaw_rate * 0.1
    tracks = make_tracks(np.stack([np.zeros(4), np.zeros(4), heading], 1))
    ahead = np.stack([np.cos(heading), np.sin(heading)], 1)
    tracks = replace(tracks, ego_velocity=speed * ahead, ego_rotation=tracks.ego_rotation * (0, 0, 1))
    row = planner_block(tracks, graph, np.array([2]), PARAMS)["ego_current_state"][0]
    expected = (math.atan(yaw_rate * 3.089 / speed), max(-0.95, min(0.95, yaw_rate))) if speed >= 0.2 else (0, 0)
    np.testing.assert_allclose(row[8:], expected, atol=1e-5)
    np.testing.assert_allclose(row[4:6], [speed, -1.389 * yaw_rate], atol=1e-5)


def test_rows_depend_on_nothing_but_their_step():
    lanes, signals, number = crossing()
    graph = make_graph(lanes, signals)
    ego = drive(path_of(lanes, [number["in", 1, 0], number[1, "straight", 0], number["out", 3, 0]]), 8.0, 150)
    scene = prepare_scene(make_tracks(ego, crowd(150, 40, 5)), graph, SMALL)
    whole = scene_block(scene, np.arange(150))
    order = np.random.default_rng(0).permutation(150)[:20]
    for name, rows in scene_block(scene, order).items():
        np.testing.assert_array_equal(rows, whole[name][order], err_msg=name)
    assert all(len(rows) == 0 for rows in scene_block(scene, np.zeros(0, np.int64)).values())
    with pytest.raises(IndexError, match="expected steps"):
        scene_block(scene, np.array([150]))


def test_a_map_without_driving_lanes_gives_no_lanes():
    graph = make_graph([{"center": line((-10, 0), (50, 0)), "kind": "sidewalk"}])
    block = planner_block(make_tracks(drive(line((0, 0), (50, 0)), 2.0, 30)), graph, np.array([5]), PARAMS)
    assert not block["lanes_valid"].any() and not block["route_lanes"].any()


def test_the_names_of_features_are_as_many_as_the_features():
    graph = make_graph([{"center": line((-10, 0), (50, 0))}])
    block = planner_block(make_tracks(np.zeros((3, 3))), graph, np.array([0]), PARAMS)
    for name, features in FEATURES.items():
        assert block[name].shape[-1] == len(features), name
    assert FEATURES["neighbor_agents_past"][6:8] == ("width", "length")


def test_a_start_off_the_route_and_missing_links_are_mended():
    """The lanes on which the ego seems to drive leave holes, which the correction fills along the graph."""
    lanes = [{"center": line((40 * k, 0), (40 * k + 40, 0)), "ids": (k, 0, -1), "to": [k + 1]} for k in range(8)]
    lanes[-1]["to"] = []
    graph = make_graph(lanes)
    ego = drive(line((5, 0), (300, 0)), 10.0, 250)
    ego[60:140, 1] += 20.0  # beside the road, where no lane is near
    tracks = make_tracks(ego)
    params = replace(PARAMS, max_speed_m_s=1000.0)
    driven = [int(x // 40) if abs(y) < 5 else -1 for x, y in ego[:, :2] - (1.389, 0)]
    block = assert_as_reference(tracks, graph, params, driven, [0, 30, 100, 138])
    assert block["route_lanes_valid"].any(axis=1).all()


def test_a_route_is_cut_where_it_would_cross_itself():
    """Straight over the junction, round the block, and over it again from the side."""
    lanes, signals, number = crossing()
    number["around"] = len(lanes)
    lanes.append(
        {"center": bend(lanes[number["out", 2, 0]]["center"][-1], np.pi, (-1.75, 90, -np.pi / 2)), "ids": (900, 0, -1)}
    )
    lanes[number["out", 2, 0]]["to"] = [number["around"]]
    lanes[number["around"]]["to"] = [number["in", 1, 0]]
    graph = make_graph(lanes, signals)
    driven = [
        number["in", 0, 0],
        number[0, "straight", 0],
        number["out", 2, 0],
        number["around"],
        number["in", 1, 0],
        number[1, "straight", 0],
        number["out", 3, 0],
    ]
    ego = drive(path_of(lanes, driven), 12.0, 420, start_m=30)
    params = replace(PARAMS, radius_m=300.0)
    block = assert_as_reference(make_tracks(ego), graph, params, nearest_of(lanes, driven, ego), [5])
    last = {
        tuple(row[0, :2].round(3))
        for row, valid in zip(block["route_lanes"][0], block["route_lanes_valid"][0])
        if valid
    }
    everything = {tuple(row[0, :2].round(3)) for row in block["lanes"][0]}
    assert 0 < len(last) < len(everything)


@pytest.mark.parametrize(
    ("known_by", "governed"),
    [
        ("signal", ["right", "straight 0", "straight 1", "left"]),
        ("place", ["right", "straight 0", "straight 1", "left"]),
        ("lane", ["straight 0", "left"]),
        ("box", ["right", "straight 0", "straight 1", "left"]),
        ("a box on one lane", ["right", "straight 1"]),
        ("nothing", []),
    ],
)
def test_a_light_is_known_by_its_signal_its_place_its_lane_or_its_box(known_by, governed):
    lanes, signals, number = crossing()
    graph = make_graph(lanes, signals)
    tracks = make_tracks(np.zeros((2, 3)), lights=[("s0" if known_by == "signal" else "", [0, 0])])
    if known_by == "place":
        tracks = replace(tracks, light_position=np.array([[21.0, 0.5, 5.0]]))  # signal s0 stands at (20, 0)
    elif known_by == "lane":
        tracks = replace(tracks, light_lane=np.array([[0, 1]]))
    elif known_by == "box":  # across both lanes that enter from +x, on the side of y > 0
        tracks = replace(tracks, light_trigger=np.array([[20.0, 3.5, np.pi / 2, 3.0, 1.0]]))
    elif known_by == "a box on one lane":
        tracks = replace(tracks, light_trigger=np.array([[20.0, 5.25, np.pi, 2.0, 1.0]]))
    scene = prepare_scene(tracks, graph, PARAMS)
    found = set(scene.lanes.graph_lane[scene.light_of == 0].tolist())
    names = {
        "right": (0, "right", 1),
        "left": (0, "left", 0),
        "straight 0": (0, "straight", 0),
        "straight 1": (0, "straight", 1),
    }
    assert found == {number[names[name]] for name in governed}
