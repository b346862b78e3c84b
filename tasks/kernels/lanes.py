"""Kernels of lanes: polylines at equal steps, lanes near a point, poses on lanes, and walks over the graph."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from tasks.kernels.decorator import kernel


class LaneGrid(NamedTuple):
    """Lanes of a map in the plane, and a grid of square cells that finds them; kernels take it whole."""

    center_m: Float64[np.ndarray, "point 2"]
    offsets: Int64[np.ndarray, " end"]
    """Where each lane's centre points begin; its outline begins at twice that."""
    outline_m: Float64[np.ndarray, "vertex 2"]
    """The lane's polygon: left boundary forwards, right boundary backwards."""
    bounds_m: Float64[np.ndarray, "lane 4"]
    """Least x and y, greatest x and y of the outline."""
    first_cell: Int64[np.ndarray, "lane 2"]
    """Column and row of the first cell that holds the lane."""
    origin_m: Float64[np.ndarray, " 2"]
    cell_m: float
    num_columns: int
    num_rows: int
    cell_offsets: Int64[np.ndarray, " end"]
    cell_lanes: Int32[np.ndarray, " entry"]
    """Lanes whose bounds touch the cell, cell by cell, row by row."""


@kernel
def resample(
    points: Float64[np.ndarray, "point dim"],
    offsets: Int64[np.ndarray, " end"],
    lanes: Int32[np.ndarray, " row"],
    out: Float64[np.ndarray, "row num dim"],
) -> None:
    """Fill ``out[r, k]`` with the point ``k / (num - 1)`` of the way along polyline ``lanes[r]``, both ends included.

    Segments of no length, of points that repeat, are stepped over; a line of one place repeats it.
    """
    num = out.shape[1]
    dims = points.shape[1]
    for r in range(np.uintp(lanes.size)):
        begin = offsets[lanes[r]]
        last = offsets[lanes[r] + 1] - 1
        total = 0.0
        for p in range(begin, last):
            total += _step(points, p)
        p = begin
        passed = 0.0
        length = _step(points, p) if p < last else 0.0
        for k in range(num):
            target = total * k / (num - 1)
            while p + 1 < last and passed + length < target:
                passed += length
                p += 1
                length = _step(points, p)
            share = min(max((target - passed) / length, 0.0), 1.0) if length > 0.0 else 0.0
            for d in range(dims):
                if k == num - 1:
                    out[r, k, d] = points[last, d]
                elif share > 0.0:
                    out[r, k, d] = points[p, d] + share * (points[p + 1, d] - points[p, d])
                else:
                    out[r, k, d] = points[p, d]


@kernel
def _step(points: Float64[np.ndarray, "point dim"], p: int) -> float:
    """Return the distance of points ``p`` and ``p + 1``."""
    square = 0.0
    for d in range(points.shape[1]):
        square += (points[p + 1, d] - points[p, d]) ** 2
    return math.sqrt(square)


@kernel
def lanes_within(grid: LaneGrid, x: float, y: float, radius_m: float, out: Int32[np.ndarray, " lane"]) -> int:
    """Write the lanes whose polygon comes within ``radius_m`` of a point to ``out``, unordered; return how many.

    A lane stands in every cell that its bounds touch, and is looked at in the first of those inside the window only.
    """
    left = _cell(x - radius_m - grid.origin_m[0], grid.cell_m, grid.num_columns)
    right = _cell(x + radius_m - grid.origin_m[0], grid.cell_m, grid.num_columns)
    bottom = _cell(y - radius_m - grid.origin_m[1], grid.cell_m, grid.num_rows)
    top = _cell(y + radius_m - grid.origin_m[1], grid.cell_m, grid.num_rows)
    count = 0
    for row in range(bottom, top + 1):
        for column in range(left, right + 1):
            cell = row * grid.num_columns + column
            for entry in range(grid.cell_offsets[cell], grid.cell_offsets[cell + 1]):
                lane = grid.cell_lanes[entry]
                is_first = column == max(grid.first_cell[lane, 0], left) and row == max(
                    grid.first_cell[lane, 1], bottom
                )
                if is_first and _is_within(grid, lane, x, y, radius_m):
                    out[count] = lane
                    count += 1
    return count


@kernel
def _cell(distance_m: float, cell_m: float, num: int) -> int:
    """Return the cell at this distance from the origin; beyond the grid, the outermost one."""
    return int(min(max(math.floor(distance_m / cell_m), 0.0), num - 1.0))


@kernel
def _is_within(grid: LaneGrid, lane: int, x: float, y: float, radius_m: float) -> bool:
    """Return whether the lane's polygon comes within ``radius_m`` of a point, or holds it (by crossings of a ray)."""
    dx = max(grid.bounds_m[lane, 0] - x, 0.0, x - grid.bounds_m[lane, 2])
    dy = max(grid.bounds_m[lane, 1] - y, 0.0, y - grid.bounds_m[lane, 3])
    if dx * dx + dy * dy > radius_m * radius_m:
        return False
    begin, end = 2 * grid.offsets[lane], 2 * grid.offsets[lane + 1]
    is_inside = False
    previous = end - 1
    for vertex in range(begin, end):
        ax, ay = grid.outline_m[previous, 0], grid.outline_m[previous, 1]
        bx, by = grid.outline_m[vertex, 0], grid.outline_m[vertex, 1]
        share = _nearest_share(ax, ay, bx, by, x, y)
        dx, dy = ax + share * (bx - ax) - x, ay + share * (by - ay) - y
        if dx * dx + dy * dy <= radius_m * radius_m:
            return True
        if (ay > y) != (by > y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
            is_inside = not is_inside
        previous = vertex
    return is_inside


@kernel
def _nearest_share(ax: float, ay: float, bx: float, by: float, x: float, y: float) -> float:
    """Return how far along the segment from a to b its point nearest to (x, y) lies, in [0, 1]."""
    ux, uy = bx - ax, by - ay
    square = ux * ux + uy * uy
    if square == 0.0:
        return 0.0
    return min(max(((x - ax) * ux + (y - ay) * uy) / square, 0.0), 1.0)


@kernel
def vertex_distances(
    grid: LaneGrid, lanes: Int32[np.ndarray, " row"], x: float, y: float, out: Float64[np.ndarray, " row"]
) -> None:
    """Fill ``out[r]`` with the distance of a point to the nearest centre-line vertex of ``lanes[r]``."""
    for r in range(np.uintp(lanes.size)):
        least = np.inf
        for p in range(grid.offsets[lanes[r]], grid.offsets[lanes[r] + 1]):
            dx, dy = grid.center_m[p, 0] - x, grid.center_m[p, 1] - y
            least = min(least, dx * dx + dy * dy)
        out[r] = math.sqrt(least)


@kernel
def project(grid: LaneGrid, lane: int, x: float, y: float, heading: float) -> tuple[float, float, float, float]:
    """Return a pose's place on a lane: distance to the centre line, offset to its left, way along it, heading error.

    The offset is positive on the left and may be smaller than the distance, beyond the line's ends. The heading error is
    the pose's heading minus that of the nearest segment, in [-pi, pi).
    """
    distance, left, along, direction = np.inf, 0.0, 0.0, 0.0
    passed = 0.0
    for p in range(grid.offsets[lane], grid.offsets[lane + 1] - 1):
        ax, ay = grid.center_m[p, 0], grid.center_m[p, 1]
        bx, by = grid.center_m[p + 1, 0], grid.center_m[p + 1, 1]
        length = math.hypot(bx - ax, by - ay)
        if length == 0.0:
            continue
        share = _nearest_share(ax, ay, bx, by, x, y)
        away = math.hypot(ax + share * (bx - ax) - x, ay + share * (by - ay) - y)
        if away < distance:
            distance = away
            left = ((bx - ax) * (y - ay) - (by - ay) * (x - ax)) / length
            along = passed + share * length
            direction = math.atan2(by - ay, bx - ax)
        passed += length
    error = heading - direction
    return distance, left, along, error - 2 * math.pi * math.floor(error / (2 * math.pi) + 0.5)


@kernel
def match(
    grid: LaneGrid,
    poses: Float64[np.ndarray, "pose 3"],
    limits: tuple[float, float],
    candidates: Int32[np.ndarray, " lane"],
    lanes: Int32[np.ndarray, " pose"],
    out: Float64[np.ndarray, "pose 4"],
) -> None:
    """Fill ``lanes[i]`` with the lane nearest to pose ``i`` of those that run its way, and ``out[i]`` with its place on it.

    ``limits`` are the greatest distance and the heading error to stay below; -1, and ``out[i]`` left as it is, where no lane
    keeps both. Of lanes equally near, the lowest index. ``candidates`` is scratch, one place a lane.
    """
    for i in range(poses.shape[0]):
        best = -1
        x, y, heading = poses[i, 0], poses[i, 1], poses[i, 2]
        for c in range(lanes_within(grid, x, y, limits[0], candidates)):
            lane = candidates[c]
            distance, left, along, error = project(grid, lane, x, y, heading)
            if distance > limits[0] or abs(error) >= limits[1]:
                continue
            if best < 0 or distance < out[i, 0] or (distance == out[i, 0] and lane < best):
                best = lane
                out[i, 0], out[i, 1], out[i, 2], out[i, 3] = distance, left, along, error
        lanes[i] = best


@kernel
def breadth_first(
    offsets: Int64[np.ndarray, " end"],
    targets: Int32[np.ndarray, " edge"],
    queue: Int32[np.ndarray, " node"],
    num_starts: int,
    max_depth: int,
    depth: Int32[np.ndarray, " node"],
    parent: Int32[np.ndarray, " node"],
) -> int:
    """Walk from ``queue[:num_starts]`` along edges, nearest first; return how many nodes are reached, in order in ``queue``.

    ``depth`` must be 0 at the starts and -1 elsewhere, ``parent`` -1 everywhere.
    """
    count = num_starts
    head = 0
    while head < count:
        node = queue[head]
        head += 1
        if depth[node] >= max_depth:
            continue
        for edge in range(offsets[node], offsets[node + 1]):
            target = targets[edge]
            if depth[target] < 0:
                depth[target] = depth[node] + 1
                parent[target] = node
                queue[count] = target
                count += 1
    return count
