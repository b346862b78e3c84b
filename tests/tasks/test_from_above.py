"""A planner sample from above: what is where, worked out by hand."""

import numpy as np

from tasks.from_above import AHEAD, EGO_SIZE_M, LEGEND, box, marks_of, on_page, side_m


def sample() -> dict[str, np.ndarray]:
    """One lane 3 m wide straight ahead at a red light, one car ahead on the left that turns left, one cone on the right."""
    block = {
        "lanes": np.zeros((3, 4, 12), np.float32),
        "route_lanes": np.zeros((2, 4, 12), np.float32),
        "static_objects": np.zeros((2, 10), np.float32),
        "neighbor_agents_past": np.zeros((2, 3, 11), np.float32),
        "neighbor_agents_future": np.zeros((2, 5, 3), np.float32),
        "ego_agent_future": np.zeros((5, 3), np.float32),
    }
    block["lanes"][0, :, 0] = [0, 10, 20, 30]
    block["lanes"][0, :, 2] = 10
    block["lanes"][0, :, 5], block["lanes"][0, :, 7] = 1.5, -1.5
    block["lanes"][0, :, 10] = 1
    block["route_lanes"][0] = block["lanes"][0]
    block["static_objects"][0] = [5, -4, 1, 0, 0.5, 0.8, 0, 0, 1, 0]
    for step in range(3):
        block["neighbor_agents_past"][0, step] = [10, 4 + step, 0, 1, 0, 1, 2, 4, 1, 0, 0]
    block["neighbor_agents_future"][0, :3] = [[10, 7, np.pi / 2], [10, 8, np.pi / 2], [10, 9, np.pi / 2]]
    block["ego_agent_future"][:] = [[1, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0], [5, 0, 0]]
    return block


def by_kind(marks):
    found = {}
    for mark in marks:
        found.setdefault(mark.kind, []).append(mark.points)
    return found


def test_every_row_of_zeros_is_absent_and_every_other_is_drawn():
    found = by_kind(marks_of(sample()))
    counts = {kind: len(points) for kind, points in found.items()}
    assert counts == {
        "surface": 1, "boundary": 2, "light-red": 1, "route": 1, "static": 1, "vehicle": 1, "history": 1,
        "neighbor-future": 1, "ego-future": 1, "ego": 1,
    }  # fmt: skip


def test_boundaries_lie_beside_the_centre_left_first():
    left, right = by_kind(marks_of(sample()))["boundary"]
    np.testing.assert_allclose(left, [[0, 1.5], [10, 1.5], [20, 1.5], [30, 1.5]])
    np.testing.assert_allclose(right, [[0, -1.5], [10, -1.5], [20, -1.5], [30, -1.5]])


def test_a_box_has_its_length_along_its_heading_and_its_width_across():
    (car,) = by_kind(marks_of(sample()))["vehicle"]  # heads left: 4 m along y, 2 m along x, around (10, 6)
    np.testing.assert_allclose([car.min(axis=0), car.max(axis=0)], [[9, 4], [11, 8]], atol=1e-6)
    nose = box(0, 0, np.pi / 2, (4, 2))
    assert np.argmax(nose[:, 1]) in (0, 5)  # the tip points to where it heads
    (ego,) = by_kind(marks_of(sample(), rear_axle_m=-1.4))["ego"]
    np.testing.assert_allclose(ego[:, 0].max(), 1.4 + EGO_SIZE_M[0] / 2)


def test_ways_begin_where_the_agent_is_and_masks_are_heeded():
    found = by_kind(marks_of(sample()))
    np.testing.assert_allclose(found["neighbor-future"][0], [[10, 6], [10, 7], [10, 8], [10, 9]])
    np.testing.assert_allclose(found["history"][0], [[10, 4], [10, 5], [10, 6]])
    assert found["ego-future"][0].tolist() == [[k, 0] for k in range(6)]
    masked = {**sample(), "neighbor_agents_past_valid": np.array([[False, True, True], [False] * 3])}
    np.testing.assert_allclose(by_kind(marks_of(masked))["history"][0], [[10, 5], [10, 6]])


def test_the_ego_is_painted_last_and_surfaces_first():
    kinds = [mark.kind for mark in marks_of(sample())]
    assert kinds == sorted(kinds, key=list(LEGEND).index)
    assert kinds[0] == "surface" and kinds[-1] == "ego"


def test_forward_is_up_and_left_is_left():
    ego, ahead, left = on_page(np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]), 100.0, 500.0)
    assert ego.tolist() == [250, AHEAD * 500]
    assert ahead.tolist() == [250, AHEAD * 500 - 50]
    assert left.tolist() == [200, AHEAD * 500]


def test_the_picture_holds_the_egos_future_but_stays_within_bounds():
    block = sample()
    assert side_m(marks_of(block)) == 50
    block["ego_agent_future"][-1] = [60, 0, 0]
    assert side_m(marks_of(block)) * AHEAD >= 60
    block["ego_agent_future"][-1] = [1000, 0, 0]
    assert side_m(marks_of(block)) == 140
