"""Kernels of lanes: polylines at equal steps, distances in the plane, and lanes near a point."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from tasks.kernels.decorator import kernel


class LaneGrid(NamedTuple):
    """A grid of square cells that finds lanes by their boxes; kernels take it whole."""

    boxes: Float64[np.ndarray, "lane 4"]
    """Least x, least y, greatest x, greatest y of each lane, in metres."""
    first_cell: Int64[np.ndarray, "lane 2"]
    """Column and row of the first cell that holds the lane."""
    origin_m: Float64[np.ndarray, " 2"]
    cell_m: float
    num_columns: int
    num_rows: int
    cell_offsets: Int64[np.ndarray, " end"]
    cell_lanes: Int32[np.ndarray, " entry"]
    """Lanes whose boxes touch the cell, cell by cell, row by row."""


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
def segment_distance(x: float, y: float, ax: float, ay: float, bx: float, by: float) -> float:
    """Return the distance of (x, y) from the segment a-b."""
    ux, uy = bx - ax, by - ay
    length2 = ux * ux + uy * uy
    share = 0.0
    if length2 > 0:
        share = min(1.0, max(0.0, ((x - ax) * ux + (y - ay) * uy) / length2))
    dx, dy = x - (ax + share * ux), y - (ay + share * uy)
    return math.sqrt(dx * dx + dy * dy)


@kernel
def is_within(x: float, y: float, left: Float64[np.ndarray, "point 2"], right: Float64[np.ndarray, "point 2"]) -> bool:
    """Return whether (x, y) lies in the polygon of ``left`` there and ``right`` back, by the even-odd rule."""
    n = left.shape[0]
    inside = False
    bx, by = right[0, 0], right[0, 1]  # the last point of the way round
    for k in range(2 * n):
        ax, ay = (left[k, 0], left[k, 1]) if k < n else (right[2 * n - 1 - k, 0], right[2 * n - 1 - k, 1])
        if (ay > y) != (by > y) and x < (bx - ax) * (y - ay) / (by - ay) + ax:
            inside = not inside
        bx, by = ax, ay
    return inside


@kernel
def polygon_distance(
    x: float, y: float, left: Float64[np.ndarray, "point 2"], right: Float64[np.ndarray, "point 2"]
) -> float:
    """Return the distance of (x, y) from the area between ``left`` and ``right``: 0 inside."""
    if is_within(x, y, left, right):
        return 0.0
    n = left.shape[0]
    nearest = min(
        segment_distance(x, y, left[0, 0], left[0, 1], right[0, 0], right[0, 1]),
        segment_distance(x, y, left[n - 1, 0], left[n - 1, 1], right[n - 1, 0], right[n - 1, 1]),
    )
    for k in range(n - 1):
        nearest = min(nearest, segment_distance(x, y, left[k, 0], left[k, 1], left[k + 1, 0], left[k + 1, 1]))
        nearest = min(nearest, segment_distance(x, y, right[k, 0], right[k, 1], right[k + 1, 0], right[k + 1, 1]))
    return nearest


@kernel
def box_distance(x: float, y: float, box: Float64[np.ndarray, " 4"]) -> float:
    """Return the distance of (x, y) from ``box`` (least x, least y, greatest x, greatest y): 0 inside."""
    dx = max(box[0] - x, 0.0, x - box[2])
    dy = max(box[1] - y, 0.0, y - box[3])
    return math.hypot(dx, dy)


@kernel
def lanes_within(x: float, y: float, radius_m: float, grid: LaneGrid, out: Int32[np.ndarray, " lane"]) -> int:
    """Write the lanes whose box comes within ``radius_m`` of a point to ``out``, unordered; return how many.

    A lane stands in every cell that its box touches, and is looked at in the first of those inside the window only.
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
                if is_first and box_distance(x, y, grid.boxes[lane]) <= radius_m:
                    out[count] = lane
                    count += 1
    return count


@kernel
def _cell(distance_m: float, cell_m: float, num: int) -> int:
    """Return the cell at this distance from the origin; beyond the grid, the outermost one."""
    return int(min(max(math.floor(distance_m / cell_m), 0.0), num - 1.0))
