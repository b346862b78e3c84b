"""Kernels of planner samples: the lanes around the ego, and the route among them."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int32, Int64

from tasks.kernels.decorator import kernel
from tasks.kernels.lanes import LaneGrid, box_distance, lanes_within, polygon_distance
from tasks.kernels.planner import insert_nearest


class LaneTable(NamedTuple):
    """The driving lanes of a map, in arrays: what all kernels of this module read."""

    grid: LaneGrid
    """Finds lanes by the boxes of centre and boundaries."""
    offsets: Int64[np.ndarray, " lane_end"]
    """Where each lane's vertices begin."""
    center: Float64[np.ndarray, "point 3"]
    """Vertices of the centre lines, as the map has them."""
    left: Float64[np.ndarray, "point 2"]
    """Vertices of the left boundaries, turned to run as the centre does."""
    right: Float64[np.ndarray, "point 2"]
    half_width: Float64[np.ndarray, " lane"]
    """Greatest distance of a boundary's vertex from the centre's: no point of a lane's area is farther from its centre."""
    points: Float64[np.ndarray, "lane num_points 6"]
    """Centre, left, right, each resampled by its own arc length."""
    speed_limit: Float64[np.ndarray, " lane"]
    has_speed_limit: Bool[np.ndarray, " lane"]
    block: Int64[np.ndarray, " lane"]
    block_offsets: Int64[np.ndarray, " block_end"]
    block_lanes: Int64[np.ndarray, " lane"]
    """Lanes of block ``i``: ``block_lanes[block_offsets[i]:block_offsets[i + 1]]``."""


LaneRows = tuple[
    Float32[np.ndarray, "n lane point 12"],
    Float32[np.ndarray, "n lane 1"],
    Bool[np.ndarray, "n lane 1"],
    Bool[np.ndarray, "n lane"],
]
"""Points, speed limit, whether there is one, whether the slot holds a lane."""


@kernel
def nearest_lanes(
    x: float,
    y: float,
    radius: float,
    table: LaneTable,
    scratch: tuple[Float64[np.ndarray, " slot"], Int64[np.ndarray, " slot"], Int32[np.ndarray, " lane"]],
) -> int:
    """Fill ``scratch`` with (distance, lane) of the lanes whose area is within ``radius``, nearest vertex of the centre first.

    A lane is passed over where even its box is farther than the last slot's.
    """
    distances, indices, near = scratch
    count, size = 0, distances.shape[0]
    for k in range(lanes_within(x, y, radius, table.grid, near)):
        lane = near[k]
        if count == size and box_distance(x, y, table.grid.boxes[lane]) > distances[size - 1]:
            continue
        start, stop = table.offsets[lane], table.offsets[lane + 1]
        least = np.inf
        for vertex in range(start, stop):
            dx, dy = table.center[vertex, 0] - x, table.center[vertex, 1] - y
            least = min(least, dx * dx + dy * dy)
        least = math.sqrt(least)
        if count == size and least > distances[size - 1]:
            continue
        # Vertices lie apart, and the area may come nearer than any of them.
        if least > radius and polygon_distance(x, y, table.left[start:stop], table.right[start:stop]) > radius:
            continue
        count = insert_nearest(least, lane, count, distances, indices)
    return count


@kernel
def write_lane(
    frame: tuple[float, float, float, float],
    points: Float64[np.ndarray, "point 6"],
    light: int,
    out: Float32[np.ndarray, "point 12"],
) -> None:
    """Fill a lane's rows: local centre, step to the next point, both boundaries from the centre, and its light.

    ``points`` is (centre, left, right) on the map; ``frame`` is (x, y, cos, sin) of the ego. Local points are rounded to
    float32 first and then subtracted, so that ``x + dx`` is the next row's x.
    """
    x, y, c, s = frame
    n = points.shape[0]
    for k in range(n):
        dx, dy = points[k, 0] - x, points[k, 1] - y
        out[k, 0] = c * dx + s * dy
        out[k, 1] = c * dy - s * dx
        for side in range(2, 6, 2):
            dx, dy = points[k, side] - x, points[k, side + 1] - y
            out[k, 2 + side] = np.float32(c * dx + s * dy) - out[k, 0]
            out[k, 3 + side] = np.float32(c * dy - s * dx) - out[k, 1]
        for column in range(8, 12):
            out[k, column] = 1 if column - 8 == light else 0
    for k in range(n - 1):
        out[k, 2] = out[k + 1, 0] - out[k, 0]
        out[k, 3] = out[k + 1, 1] - out[k, 1]
    out[n - 1, 2] = 0
    out[n - 1, 3] = 0


@kernel
def mark_run(
    route: Int64[np.ndarray, " block"],
    stamp: int,
    is_near: Int64[np.ndarray, " block"],
    is_on_route: Int64[np.ndarray, " block"],
) -> None:
    """Stamp the first contiguous run of ``route``'s blocks that are stamped in ``is_near``."""
    begun = False
    for k in range(route.shape[0]):
        if is_near[route[k]] == stamp:
            begun = True
            is_on_route[route[k]] = stamp
        elif begun:
            return


@kernel
def light_at(states: Int8[np.ndarray, " light"], light: int, marks_yellow: bool) -> int:
    """Return the flag of a light: 3, unknown, where there is none (-1), or where it is yellow and yellow has no flag."""
    if light < 0 or (states[light] == 1 and not marks_yellow):
        return 3
    return int(states[light])


@kernel
def clear_from(row: int, count: int, out: LaneRows) -> None:
    """Zero the slots of a row from ``count`` on."""
    for slot in range(count, out[3].shape[1]):
        for k in range(out[0].shape[2]):
            for column in range(12):
                out[0][row, slot, k, column] = 0
        out[1][row, slot, 0] = 0
        out[2][row, slot, 0] = False
        out[3][row, slot] = False


@kernel
def copy_slot(row: int, slots: tuple[int, int], rows: LaneRows, out: LaneRows) -> None:
    """Copy slot ``slots[0]`` of ``rows`` to slot ``slots[1]`` of ``out``."""
    source, target = slots
    for k in range(rows[0].shape[2]):
        for column in range(12):
            out[0][row, target, k, column] = rows[0][row, source, k, column]
    out[1][row, target, 0] = rows[1][row, source, 0]
    out[2][row, target, 0] = rows[2][row, source, 0]
    out[3][row, target] = True


@kernel
def lane_rows(
    anchors: Int64[np.ndarray, " n"],
    ego: tuple[Float64[np.ndarray, "step 3"], Bool[np.ndarray, " step"]],
    radius: float,
    table: LaneTable,
    lights: tuple[Int8[np.ndarray, "step light"], Int64[np.ndarray, " lane"], bool],
    routes: tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " route_end"], Int64[np.ndarray, " block"]],
    out: tuple[LaneRows, LaneRows],
) -> None:
    """Fill the nearest lanes of each anchor, and those of them on its route, in the same order.

    ``lights`` is (states, light of each lane or -1, whether yellow has its own flag); ``routes`` is (route of each anchor, where each
    route begins, its blocks).
    """
    poses, usable = ego
    near, on_route = out
    slots = near[3].shape[1]
    scratch = (np.empty(slots, np.float64), np.empty(slots, np.int64), np.empty(table.block.size, np.int32))
    is_near = np.full(table.block_offsets.shape[0], -1, np.int64)
    is_on_route = np.full(table.block_offsets.shape[0], -1, np.int64)
    for i in range(anchors.size):
        a = anchors[i]
        frame = (poses[a, 0], poses[a, 1], math.cos(poses[a, 2]), math.sin(poses[a, 2]))
        count = nearest_lanes(frame[0], frame[1], radius, table, scratch) if usable[a] else 0
        for slot in range(count):
            lane = scratch[1][slot]
            is_near[table.block[lane]] = i
            write_lane(frame, table.points[lane], light_at(lights[0][a], lights[1][lane], lights[2]), near[0][i, slot])
            near[1][i, slot, 0] = table.speed_limit[lane] if table.has_speed_limit[lane] else 0
            near[2][i, slot, 0] = table.has_speed_limit[lane]
            near[3][i, slot] = True
        clear_from(i, count, near)
        route = routes[0][i]
        mark_run(routes[2][routes[1][route] : routes[1][route + 1]], i, is_near, is_on_route)
        taken = 0
        for slot in range(count):
            if taken < on_route[3].shape[1] and is_on_route[table.block[scratch[1][slot]]] == i:
                copy_slot(i, (slot, taken), near, on_route)
                taken += 1
        clear_from(i, taken, on_route)


@kernel
def lights_near(
    anchors: Int64[np.ndarray, " n"],
    ego: tuple[Float64[np.ndarray, "step 3"], Bool[np.ndarray, " step"]],
    radius: float,
    table: LaneTable,
    lights: tuple[Int8[np.ndarray, "step light"], Int64[np.ndarray, " lane"]],
    out: Int32[np.ndarray, "n slot 2"],
) -> None:
    """Fill (lane, state) of those of each anchor's nearest lanes that have a light, one a slot, and -1 in the rest.

    ``lights`` is (states, light of each lane or -1); the nearest lanes are as many as there are slots, as :func:`lane_rows` has them.
    """
    slots = out.shape[1]
    scratch = (np.empty(slots, np.float64), np.empty(slots, np.int64), np.empty(table.block.size, np.int32))
    for i in range(anchors.size):
        a, taken = anchors[i], 0
        count = nearest_lanes(ego[0][a, 0], ego[0][a, 1], radius, table, scratch) if ego[1][a] else 0
        out[i, :, :] = -1
        for slot in range(count):
            light = lights[1][scratch[1][slot]]
            if light >= 0:
                out[i, taken, 0] = scratch[1][slot]
                out[i, taken, 1] = lights[0][a, light]
                taken += 1
