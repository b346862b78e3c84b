"""Lines at equal steps, and lanes near a point: against the obvious loops."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from schemas.planner import PlannerParams
from tasks.kernels.planner_lanes import nearest_lanes
from tasks.lanes import index_lanes, resample_line, resample_lines
from tasks.opendrive import read_opendrive
from tasks.planner_lanes import prepare_lanes
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
    graph = read_opendrive(town(*roads), spacing_m=2.0)
    return graph, prepare_lanes(graph, PlannerParams())


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


def lanes_near(lanes, position, radius_m, limit=400, cell_m=50.0):
    """Return the lanes within a distance of a point, nearest first, and how near their vertices are."""
    table = lanes.table._replace(grid=index_lanes(lanes.table.grid.boxes, cell_m=cell_m))
    distances, found, near = np.empty(limit), np.empty(limit, np.int64), np.empty(lanes.num_lanes, np.int32)
    count = nearest_lanes(*map(float, position), float(radius_m), table, (distances, found, near))
    return lanes.graph_lane[found[:count]], distances[:count]


@given(x=st.floats(-700, 700), y=st.floats(-500, 500), radius=st.floats(0.5, 150.0), cell_m=st.floats(5.0, 500.0))
def test_lanes_near_a_point_are_those_whose_polygon_is_nearest_vertex_first(scattered, x, y, radius, cell_m):
    graph, prepared = scattered
    lanes, distance_m = lanes_near(prepared, (x, y), radius, cell_m=cell_m)
    away = np.array([polygon_distance(polygon_of(graph, i), x, y) for i in range(graph.num_lanes)])
    clear = np.abs(away - radius) > 1e-9
    assert set(np.flatnonzero((away <= radius) & clear)) == {i for i in lanes.tolist() if clear[i]}
    vertices = [np.hypot(*(graph.center_m[graph.points_of(i), :2] - (x, y)).T).min() for i in lanes]
    np.testing.assert_allclose(distance_m, vertices, atol=1e-12)
    assert (np.diff(distance_m) >= 0).all()
    some, _ = lanes_near(prepared, (x, y), radius, limit=3, cell_m=cell_m)
    np.testing.assert_array_equal(some, lanes[:3])


def test_of_lanes_equally_near_the_first_is_taken_wherever_they_are_found():
    """Two bundles of three lanes each, left and right of a point: their order is that of the map, not of the grid."""
    at = [piece(x=x, y=1.5) for x in (5.0, -15.0, 5.0, -15.0, 5.0, -15.0)]
    lanes = prepare_lanes(
        read_opendrive(town(*(road(k, section(lane(-1)), plan=plan) for k, plan in enumerate(at)))), PlannerParams()
    )
    for cell_m in (2.0, 50.0):
        assert lanes_near(lanes, (0.0, 0.0), 30.0, limit=4, cell_m=cell_m)[0].tolist() == [0, 1, 2, 3]


def test_a_point_inside_of_a_wide_lane_is_near_it_whatever_the_radius():
    graph = read_opendrive(town(road(1, section(lane(-1, width=100.0)))))
    lanes, distance_m = lanes_near(prepare_lanes(graph, PlannerParams()), (5.0, -30.0), 0.1)
    assert (lanes.tolist(), distance_m.tolist()) == ([0], [20.0])


def test_few_very_long_lanes_do_not_fill_millions_of_cells():
    plan = piece(length=1e6, heading=0.7)
    graph = read_opendrive(town(road(1, section(lane(-1)), length=1e6, plan=plan)), spacing_m=1000.0)
    lanes = prepare_lanes(graph, PlannerParams())
    grid = index_lanes(lanes.table.grid.boxes, cell_m=1.0)
    assert grid.num_columns * grid.num_rows <= 64_000
    place = (1e5 * math.cos(0.7), 1e5 * math.sin(0.7))
    assert lanes_near(lanes, place, 5.0, cell_m=1.0)[0].tolist() == [0]


# -- a real town -------------------------------------------------------------------------------------------------------


def reached(offsets, targets, start):
    """Return the nodes that edges lead to from ``start``."""
    found, front = {start}, [start]
    while front:
        front = [b for a in front for b in targets[offsets[a] : offsets[a + 1]].tolist() if b not in found]
        found.update(front)
    return found


def test_from_every_lane_of_a_real_town_one_comes_back_to_where_one_was():
    graph = read_opendrive(shared_data("carla_xodr", "Town01.xodr.gz").read_bytes())
    driving = np.flatnonzero(graph.is_type("driving")).tolist()
    ahead = reached(graph.successor_offsets, graph.successors, driving[0])
    behind = reached(graph.predecessor_offsets, graph.predecessors, driving[0])
    assert ahead == behind == set(driving)
