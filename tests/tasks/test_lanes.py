"""Lines at equal steps, lanes near a point, the lane of a pose, ways through the graph: against the obvious loops."""

import math
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tasks.lanes import index_lanes, lanes_near, match_poses, reach, resample_line, resample_lines
from tasks.opendrive import read_opendrive
from tests.conftest import shared_data
from tests.tasks.xodr_builder import lane, piece, road, section, town

coordinates = st.integers(-50, 50).map(float) | st.floats(-50, 50)


def resampled_slowly(points, num):
    """Drop repeats, then walk the line to each of the wanted lengths."""
    kept = [points[0]]
    for point in points[1:]:
        if math.dist(point, kept[-1]) > 0:
            kept.append(point)
    steps = [math.dist(a, b) for a, b in pairwise(kept)]
    line = []
    for k in range(num):
        left = math.fsum(steps) * k / (num - 1)
        for a, b, step in zip(kept, kept[1:], steps, strict=False):
            if left <= step:
                line.append([p + left / step * (q - p) for p, q in zip(a, b, strict=True)])
                break
            left -= step
        else:
            line.append(list(kept[-1]))
    return np.array(line)


@given(
    points=st.lists(st.tuples(coordinates, coordinates, st.integers(1, 3)), min_size=1, max_size=12),
    num=st.integers(2, 30),
    flat=st.booleans(),
)
def test_resampling_is_a_walk_along_the_line(points, num, flat):
    rows = np.repeat([[x, y, 0.5 * x][: 2 if flat else 3] for x, y, _ in points], [n for *_, n in points], axis=0)
    rows.flags.writeable = False
    found = resample_line(rows, num)
    np.testing.assert_allclose(found, resampled_slowly(rows.tolist(), num), atol=1e-9)
    np.testing.assert_array_equal(found[[0, -1]], rows[[0, -1]])


def test_lines_of_a_map_are_resampled_by_themselves():
    points = np.array([[0, 0], [4, 0], [7, 7], [7, 7], [7, 8], [0, 0], [0, 2]], dtype=np.float64)
    found = resample_lines(points, np.array([0, 2, 5, 7]), np.array([2, 0]), num_points=3)
    assert found.tolist() == [[[0, 0], [0, 1], [0, 2]], [[0, 0], [2, 0], [4, 0]]]


@pytest.mark.parametrize(("lanes", "num", "found"), [([0], 1, "points a line, found 1"), ([1], 5, "found 1 to 1")])
def test_resampling_refuses_what_a_kernel_would_not_survive(lanes, num, found):
    with pytest.raises(SchemaError, match=found):
        resample_lines(np.zeros((2, 2)), np.array([0, 2]), np.array(lanes), num_points=num)


# -- near a point ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scattered():
    """Return a hundred roads of all lengths, in every direction, some of them bent."""
    rng = np.random.default_rng(5)
    roads = []
    for index in range(100):
        length = float(rng.uniform(0.5, 300.0))
        shape = f'<arc curvature="{rng.normal(0, 0.02)}"/>' if index % 2 else "<line/>"
        x, y, heading = rng.uniform(-400, 400), rng.uniform(-200, 200), rng.uniform(-4, 4)
        plan = piece(shape, x=float(x), y=float(y), heading=float(heading), length=length)
        roads.append(road(index, section(lane(1), lane(-1)), length=length, plan=plan))
    return read_opendrive(town(*roads), spacing_m=2.0)


def polygon_distance(polygon, x, y):
    """Return the distance of a point from a polygon, 0 inside, where the angles under which its edges are seen add up."""
    a = polygon - (x, y)
    b = np.roll(a, -1, axis=0)
    along, square = ((b - a) * -a).sum(axis=1), ((b - a) ** 2).sum(axis=1)
    share = np.clip(np.divide(along, square, out=np.zeros(len(a)), where=square > 0), 0.0, 1.0)
    turns = np.arctan2(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0], (a * b).sum(axis=1)).sum()
    return 0.0 if abs(turns) > 1.0 else np.hypot(*(a + share[:, None] * (b - a)).T).min()


def polygon_of(graph, index):
    rows = graph.points_of(index)
    return np.concatenate([graph.left_m[rows, :2], graph.right_m[rows, :2][::-1]])


@given(x=st.floats(-700, 700), y=st.floats(-500, 500), radius=st.floats(0.5, 150.0), cell_m=st.floats(5.0, 500.0))
def test_lanes_near_a_point_are_those_whose_polygon_is_nearest_vertex_first(scattered, x, y, radius, cell_m):
    lanes, distance_m = lanes_near(index_lanes(scattered, cell_m=cell_m), np.array([x, y]), radius_m=radius)
    away = np.array([polygon_distance(polygon_of(scattered, i), x, y) for i in range(scattered.num_lanes)])
    clear = np.abs(away - radius) > 1e-9
    assert set(np.flatnonzero((away <= radius) & clear)) == {i for i in lanes.tolist() if clear[i]}
    vertices = [np.hypot(*(scattered.center_m[scattered.points_of(i), :2] - (x, y)).T).min() for i in lanes]
    np.testing.assert_allclose(distance_m, vertices, atol=1e-12)
    assert (np.diff(distance_m) >= 0).all()


def test_a_point_inside_of_a_wide_lane_is_near_it_whatever_the_radius():
    graph = read_opendrive(town(road(1, section(lane(-1, width=100.0)))))
    lanes, distance_m = lanes_near(index_lanes(graph), np.array([5.0, -30.0]), radius_m=0.1)
    assert (lanes.tolist(), distance_m.tolist()) == ([0], [20.0])


def test_only_lanes_that_are_kept_are_found(scattered):
    keep = np.arange(scattered.num_lanes) % 3 == 0
    lanes, _ = lanes_near(index_lanes(scattered, keep=keep), np.array([0.0, 0.0]), radius_m=1e4)
    assert sorted(lanes.tolist()) == np.flatnonzero(keep).tolist()
    assert len(lanes_near(index_lanes(scattered, keep=keep & False), np.zeros(2))[0]) == 0


def test_few_very_long_lanes_do_not_fill_millions_of_cells():
    plan = piece(length=1e6, heading=0.7)
    graph = read_opendrive(town(road(1, section(lane(-1)), length=1e6, plan=plan)), spacing_m=1000.0)
    grid = index_lanes(graph, cell_m=1.0)
    assert grid.num_columns * grid.num_rows <= 64_000
    assert lanes_near(grid, np.array([1e5 * math.cos(0.7), 1e5 * math.sin(0.7)]), radius_m=5.0)[0].tolist() == [0]


# -- the lane of a pose ------------------------------------------------------------------------------------------------


@given(
    s=st.floats(-4.0, 14.0),
    t=st.floats(-8.0, 8.0),
    error=st.floats(-3.1, 3.1),
    turn=st.floats(-7, 7),
    reverse=st.booleans(),
)
def test_a_pose_is_matched_to_the_nearest_lane_that_runs_its_way(s, t, error, turn, reverse):
    """On a straight road of two lanes that run against each other, everything about the place is known."""
    plan = piece(x=100.0, y=-50.0, heading=turn, length=10.0)
    grid = index_lanes(read_opendrive(town(road(1, section(lane(1), lane(-1)), plan=plan))))
    sign = -1.0 if reverse else 1.0
    x = 100.0 + s * math.cos(turn) - t * math.sin(turn)
    y = -50.0 + s * math.sin(turn) + t * math.cos(turn)
    found = match_poses(grid, np.array([[x, y, turn + error + (math.pi if reverse else 0.0)]]))
    is_near = math.hypot(max(-s, 0.0, s - 10.0), t + sign * 1.5)
    if abs(is_near - 3.0) < 1e-6 or abs(abs(error) - math.pi / 4) < 1e-6 or abs(error) > math.pi - math.pi / 4 - 1e-6:
        return  # at the limits, or nearer to the other lane's direction
    if is_near > 3.0 or abs(error) > math.pi / 4:
        assert found.lane[0] == -1 and math.isnan(found.distance_m[0])
        return
    assert found.lane[0] == (0 if reverse else 1)
    assert found.distance_m[0] == pytest.approx(is_near, abs=1e-9)
    assert found.left_m[0] == pytest.approx(sign * t + 1.5, abs=1e-9)
    assert found.along_m[0] == pytest.approx(min(max(10.0 - s if reverse else s, 0.0), 10.0), abs=1e-9)
    assert found.heading_error_rad[0] == pytest.approx(error, abs=1e-9)


def test_of_lanes_equally_near_the_first_is_taken():
    graph = read_opendrive(town(road(1, section(lane(-1))), road(2, section(lane(-1)))))
    assert match_poses(index_lanes(graph), np.array([[5.0, -1.5, 0.0], [5.0, 40.0, 0.0]])).lane.tolist() == [0, -1]


# -- ways through the graph --------------------------------------------------------------------------------------------


@given(
    num=st.integers(1, 12), edges=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    starts=st.lists(st.integers(0, 11), max_size=3), depth=st.integers(0, 6),
)  # fmt: skip
def test_breadth_first_reaches_what_the_obvious_queue_does(num, edges, starts, depth):
    edges = sorted((a % num, b % num) for a, b in edges)
    starts = [start % num for start in starts]
    targets = np.array([b for _, b in edges], dtype=np.int32)
    offsets = np.searchsorted([a for a, _ in edges], np.arange(num + 1)).astype(np.int64)
    found = reach(offsets, targets, np.array(starts, dtype=np.int64), depth=depth)
    expected, queue = dict.fromkeys(starts, 0), deque(dict.fromkeys(starts))
    while queue:
        node = queue.popleft()
        for a, b in edges:
            if a == node and b not in expected and expected[node] < depth:
                expected[b] = expected[node] + 1
                queue.append(b)
    assert found.depth.tolist() == [expected.get(node, -1) for node in range(num)]
    assert found.order.tolist() == list(expected)
    for node in range(num):
        path = found.path_to(node)
        assert len(path) == expected.get(node, -1) + 1
        assert all(pair in edges for pair in pairwise(path))
        assert not path or (path[0] in starts and path[-1] == node)


def test_a_start_that_does_not_exist_is_refused():
    with pytest.raises(SchemaError, match=r"expected lanes in \[0, 2\), found 2 to 2"):
        reach(np.array([0, 0, 0]), np.empty(0, dtype=np.int32), np.array([2]), depth=1)


# -- a real town -------------------------------------------------------------------------------------------------------


def test_from_every_lane_of_a_real_town_one_comes_back_to_where_one_was():
    graph = read_opendrive(shared_data("carla_xodr", "Town01.xodr.gz").read_bytes())
    (driving,) = np.nonzero(graph.is_type("driving"))
    ahead = reach(graph.successor_offsets, graph.successors, driving[:1], depth=200)
    behind = reach(graph.predecessor_offsets, graph.predecessors, driving[:1], depth=200)
    assert set(ahead.order.tolist()) == set(behind.order.tolist()) == set(driving.tolist())


def test_a_pose_on_any_lane_of_a_real_town_is_matched_to_it():
    graph = read_opendrive(shared_data("carla_xodr", "Town03.xodr.gz").read_bytes())
    keep = graph.is_type("driving")
    lanes = np.flatnonzero(keep & (np.diff(graph.offsets) > 4) & ~graph.is_junction)  # connectors lie over each other
    middle = (graph.offsets[lanes] + graph.offsets[lanes + 1]) // 2
    step = graph.center_m[middle + 1] - graph.center_m[middle - 1]
    poses = np.column_stack([graph.center_m[middle, :2], np.arctan2(step[:, 1], step[:, 0])])
    found = match_poses(index_lanes(graph, keep=keep), poses)
    assert np.mean(found.lane == lanes) > 0.99  # but for roads over each other
    assert found.distance_m.max() < 1e-9
