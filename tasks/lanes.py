"""What a planner asks of the lines of a map: points at equal steps, and lanes near a point."""

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

from schemas.errors import SchemaError
from tasks.kernels.lanes import LaneGrid, resample

MAX_CELLS_PER_LANE = 64
"""On average; cells of a map with fewer but longer lanes are made larger."""

Rows = tuple[Int64[np.ndarray, " end"], Int32[np.ndarray, " item"]]
"""Rows of different lengths: where each begins, and all items end to end."""


def resample_line(points: Float64[np.ndarray, "point dim"], num_points: int) -> Float64[np.ndarray, "num dim"]:
    """Return ``num_points`` points at equal steps of length along a polyline, both ends included; repeated points don't count.

    >>> resample_line(np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 3.0]]), 3).tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 3.0]]
    """
    offsets = np.array([0, len(points)], dtype=np.int64)
    (line,) = resample_lines(points, offsets, np.zeros(1, dtype=np.int32), num_points=num_points)
    return np.asarray(line)


def resample_lines(
    points: Float64[np.ndarray, "point dim"],
    offsets: Int64[np.ndarray, " end"],
    lanes: Int[np.ndarray, " row"],
    *,
    num_points: int,
) -> Float64[np.ndarray, "row num dim"]:
    """Resample several lines of a map, as :func:`resample_line` does; ``points[:, :2]`` measures length in the plane.

    Raises
    ------
    SchemaError
        Fewer than two points are asked for, a line has none, or a lane does not exist.
    """
    if num_points < 2:
        raise SchemaError(f"expected 2 or more points a line, found {num_points}; correct the call")
    rows = _rows_of(lanes, len(offsets) - 1)
    if len(rows) and np.diff(offsets)[rows].min() < 1:
        raise SchemaError("expected one or more points in every line, found none; correct the call")
    out = np.empty((len(rows), num_points, points.shape[1]))
    resample(np.ascontiguousarray(points, dtype=np.float64), offsets, rows, out)
    return out


def index_lanes(boxes: Float64[np.ndarray, "lane 4"], *, cell_m: float = 50.0) -> LaneGrid:
    """Make the index of a map, which finds lanes near a point in the plane.

    Parameters
    ----------
    boxes
        Least x, least y, greatest x, greatest y of each lane.
    cell_m
        Edge of a cell, enlarged where lanes are so long that each would stand in very many.
    """
    lowest, highest = boxes[:, :2], boxes[:, 2:]
    origin_m = lowest.min(axis=0) if len(boxes) else np.zeros(2)
    while True:
        first = np.floor((lowest - origin_m) / cell_m)
        extent = np.floor((highest - origin_m) / cell_m) - first + 1.0
        shape = (first + extent).max(axis=0) if len(boxes) else np.ones(2)
        if max(extent.prod(axis=1).sum(), shape.prod()) <= MAX_CELLS_PER_LANE * max(len(boxes), 1000):
            break
        cell_m *= 2.0
    num_columns, num_rows = int(shape[0]), int(shape[1])
    cell_offsets, cell_lanes = _fill_cells(first.astype(np.int64), extent.astype(np.int64), (num_columns, num_rows))
    return LaneGrid(
        boxes=np.ascontiguousarray(boxes, np.float64),
        first_cell=first.astype(np.int64),
        origin_m=origin_m,
        cell_m=float(cell_m),
        num_columns=num_columns,
        num_rows=num_rows,
        cell_offsets=cell_offsets,
        cell_lanes=cell_lanes,
    )


def _fill_cells(
    first: Int64[np.ndarray, "lane 2"], extent: Int64[np.ndarray, "lane 2"], shape: tuple[int, int]
) -> Rows:
    """Return the lanes that each cell holds."""
    counts = extent.prod(axis=1)
    row = np.repeat(np.arange(len(first)), counts)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    column = first[row, 0] + place % extent[row, 0]
    cell = (first[row, 1] + place // extent[row, 0]) * shape[0] + column
    order = np.argsort(cell, kind="stable")
    per_cell = np.bincount(cell, minlength=shape[0] * shape[1])
    return np.concatenate([[0], np.cumsum(per_cell)]).astype(np.int64), row[order].astype(np.int32)


def _rows_of(lanes: Int[np.ndarray, " row"], num: int) -> Int32[np.ndarray, " row"]:
    """Return indices for a kernel, which checks none."""
    if len(lanes) and not 0 <= lanes.min() <= lanes.max() < num:
        raise SchemaError(f"expected lanes in [0, {num}), found {lanes.min()} to {lanes.max()}; correct the call")
    return np.ascontiguousarray(lanes, dtype=np.int32)
