"""What a planner asks of a lane graph: lines at equal steps, lanes near a point, the lane of a pose, and ways through the graph."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32, Int64

from schemas.errors import SchemaError
from schemas.lanes import LaneGraph
from tasks.kernels.lanes import LaneGrid, breadth_first, lanes_within, match, resample, vertex_distances

MAX_CELLS_PER_LANE = 64
"""On average; cells of a map with fewer but longer lanes are made larger."""

Rows = tuple[Int64[np.ndarray, " end"], Int32[np.ndarray, " item"]]
"""Rows of different lengths: where each begins, and all items end to end."""


@dataclass(frozen=True, slots=True)
class Match:
    """The lane of each pose, and the pose's place on it."""

    lane: Int32[np.ndarray, " pose"]
    """-1 where no lane is near enough and runs the same way."""
    distance_m: Float64[np.ndarray, " pose"]
    """To the nearest point of the centre line."""
    left_m: Float64[np.ndarray, " pose"]
    """Offset to the left of the centre line; less than ``distance_m`` beyond the line's ends."""
    along_m: Float64[np.ndarray, " pose"]
    """Length of the centre line up to there."""
    heading_error_rad: Float64[np.ndarray, " pose"]
    """Heading of the pose minus that of the lane, in [-pi, pi)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a walk over a graph reached."""

    order: Int32[np.ndarray, " reached"]
    """Nodes, nearest first; the starts among them."""
    depth: Int32[np.ndarray, " node"]
    """Number of edges from the nearest start; -1 where not reached."""
    parent: Int32[np.ndarray, " node"]
    """Node from which each was reached; -1 at the starts."""

    def path_to(self, node: int) -> list[int]:
        """Return the nodes of a shortest way from a start to ``node``, both included; none where it was not reached."""
        path = [node] if self.depth[node] >= 0 else []
        while path and self.parent[path[-1]] >= 0:
            path.append(int(self.parent[path[-1]]))
        return path[::-1]


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


def index_lanes(graph: LaneGraph, *, keep: Bool[np.ndarray, " lane"] | None = None, cell_m: float = 50.0) -> LaneGrid:
    """Make the index of a map, which finds lanes near a point in the plane.

    Parameters
    ----------
    keep
        Lanes to be found; all by default. The lanes of the index are numbered as in ``graph``.
    cell_m
        Edge of a cell, enlarged where lanes are so long that each would stand in very many.
    """
    outline_m = _outlines(graph)
    lowest = np.minimum.reduceat(outline_m, 2 * graph.offsets[:-1]) if graph.num_lanes else np.zeros((0, 2))
    highest = np.maximum.reduceat(outline_m, 2 * graph.offsets[:-1]) if graph.num_lanes else np.zeros((0, 2))
    rows = np.arange(graph.num_lanes) if keep is None else np.nonzero(keep)[0]
    origin_m = lowest[rows].min(axis=0) if len(rows) else np.zeros(2)
    while True:
        first = np.maximum(np.floor((lowest - origin_m) / cell_m), 0.0)
        extent = np.floor((highest - origin_m) / cell_m)[rows] - first[rows] + 1.0
        shape = (first[rows] + extent).max(axis=0) if len(rows) else np.ones(2)
        if max(extent.prod(axis=1).sum(), shape.prod()) <= MAX_CELLS_PER_LANE * max(len(rows), 1000):
            break
        cell_m *= 2.0
    num_columns, num_rows = int(shape[0]), int(shape[1])
    cell_offsets, cell_lanes = _fill_cells(
        rows, first[rows].astype(np.int64), extent.astype(np.int64), (num_columns, num_rows)
    )
    return LaneGrid(
        center_m=np.ascontiguousarray(graph.center_m[:, :2]),
        offsets=graph.offsets,
        outline_m=outline_m,
        bounds_m=np.hstack([lowest, highest]),
        first_cell=first.astype(np.int64),
        origin_m=origin_m,
        cell_m=float(cell_m),
        num_columns=num_columns,
        num_rows=num_rows,
        cell_offsets=cell_offsets,
        cell_lanes=cell_lanes,
    )


def _outlines(graph: LaneGraph) -> Float64[np.ndarray, "vertex 2"]:
    """Return every lane's polygon: left boundary forwards, right boundary backwards."""
    lane = np.repeat(np.arange(graph.num_lanes), np.diff(graph.offsets))
    begin, end = graph.offsets[lane], graph.offsets[lane + 1]
    point = np.arange(len(lane))
    outline_m = np.empty((2 * len(lane), 2))
    outline_m[begin + point] = graph.left_m[:, :2]
    outline_m[2 * end - 1 - (point - begin)] = graph.right_m[:, :2]
    return outline_m


def _fill_cells(
    lanes: Int64[np.ndarray, " lane"],
    first: Int64[np.ndarray, "lane 2"],
    extent: Int64[np.ndarray, "lane 2"],
    shape: tuple[int, int],
) -> Rows:
    """Return the lanes that each cell holds."""
    counts = extent.prod(axis=1)
    row = np.repeat(np.arange(len(lanes)), counts)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    column = first[row, 0] + place % extent[row, 0]
    cell = (first[row, 1] + place // extent[row, 0]) * shape[0] + column
    order = np.argsort(cell, kind="stable")
    per_cell = np.bincount(cell, minlength=shape[0] * shape[1])
    return np.concatenate([[0], np.cumsum(per_cell)]).astype(np.int64), lanes[row[order]].astype(np.int32)


def lanes_near(
    grid: LaneGrid, position_m: Float64[np.ndarray, " 2"], *, radius_m: float = 100.0
) -> tuple[Int32[np.ndarray, " lane"], Float64[np.ndarray, " lane"]]:
    """Return the lanes within a distance of a point, nearest first, and how near they are.

    As Diffusion Planner chooses lanes: those whose polygon comes within ``radius_m``, by the distance of their nearest centre-line
    vertex, which is what is returned and may be greater. Lanes equally near stand by index.
    """
    found = np.empty(len(grid.offsets) - 1, dtype=np.int32)
    x, y = float(position_m[0]), float(position_m[1])
    lanes = np.sort(found[: lanes_within(grid, x, y, float(radius_m), found)])
    distance_m = np.empty(len(lanes))
    vertex_distances(grid, lanes, x, y, distance_m)
    order = np.argsort(distance_m, kind="stable")
    return lanes[order], distance_m[order]


def match_poses(
    grid: LaneGrid,
    poses: Float64[np.ndarray, "pose 3"],
    *,
    max_distance_m: float = 3.0,
    max_heading_rad: float = np.pi / 4,
) -> Match:
    """Return the lane that each pose (x, y, heading) is on: the nearest centre line of those that run its way.

    Parameters
    ----------
    max_distance_m, max_heading_rad
        How far a centre line may be, and below what the heading must differ; the defaults are nuPlan's for the start of a route.
    """
    poses = np.ascontiguousarray(poses, dtype=np.float64)
    lanes, places = np.empty(len(poses), dtype=np.int32), np.full((len(poses), 4), np.nan)
    scratch = np.empty(len(grid.offsets) - 1, dtype=np.int32)
    match(grid, poses, (float(max_distance_m), float(max_heading_rad)), scratch, lanes, places)
    distance_m, left_m, along_m, error_rad = (places[:, column].copy() for column in range(4))
    return Match(lanes, distance_m, left_m, along_m, error_rad)


def reach(
    offsets: Int64[np.ndarray, " end"],
    targets: Int32[np.ndarray, " edge"],
    starts: Int[np.ndarray, " start"],
    *,
    depth: int,
) -> Reach:
    """Walk a graph breadth first: forwards with ``successors``, backwards with ``predecessors``.

    Parameters
    ----------
    offsets, targets
        Node ``i`` leads to ``targets[offsets[i]:offsets[i + 1]]``.
    depth
        Greatest number of edges.
    """
    num = len(offsets) - 1
    unique = _rows_of(np.asarray(list(dict.fromkeys(np.asarray(starts).tolist())), dtype=np.int64), num)
    queue, found, parent = np.empty(num, np.int32), np.full(num, -1, np.int32), np.full(num, -1, np.int32)
    queue[: len(unique)] = unique
    found[unique] = 0
    count = breadth_first(offsets, targets, queue, len(unique), int(depth), found, parent)
    return Reach(queue[:count], found, parent)


def _rows_of(lanes: Int[np.ndarray, " row"], num: int) -> Int32[np.ndarray, " row"]:
    """Return indices for a kernel, which checks none."""
    if len(lanes) and not 0 <= lanes.min() <= lanes.max() < num:
        raise SchemaError(f"expected lanes in [0, {num}), found {lanes.min()} to {lanes.max()}; correct the call")
    return np.ascontiguousarray(lanes, dtype=np.int32)
