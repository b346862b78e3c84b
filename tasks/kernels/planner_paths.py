"""Kernels of planner samples: the driven path on the map, and where a route starts."""

import math

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from tasks.kernels.decorator import kernel
from tasks.kernels.lanes import box_distance, is_within, lanes_within, polygon_distance, segment_distance
from tasks.kernels.planner import insert_nearest, wrapped
from tasks.kernels.planner_lanes import LaneTable


@kernel
def lane_match(
    pose: Float64[np.ndarray, " 4"],
    center: Float64[np.ndarray, "point 3"],
    out: Float64[np.ndarray, " 3"],
) -> None:
    """Fill (distance, heading error, height difference) of ``pose`` (x, y, heading, z) at the nearest segment of a lane's centre.

    Where the error is as great at two segments, the earlier one counts.
    """
    x, y = pose[0], pose[1]
    nearest, at = np.inf, 0
    for k in range(center.shape[0] - 1):
        if center[k + 1, 0] == center[k, 0] and center[k + 1, 1] == center[k, 1]:
            continue
        away = segment_distance(x, y, center[k, 0], center[k, 1], center[k + 1, 0], center[k + 1, 1])
        if away < nearest:
            nearest, at = away, k
    out[0] = nearest
    heading = math.atan2(center[at + 1, 1] - center[at, 1], center[at + 1, 0] - center[at, 0])
    out[1] = abs(wrapped(heading - pose[2]))
    out[2] = abs(center[at, 2] - pose[3])


@kernel
def match_candidates(
    poses: Float64[np.ndarray, "step 4"],
    reach: tuple[float, float],
    table: LaneTable,
    out_cost: Float64[np.ndarray, "step slot"],
    out_lane: Int64[np.ndarray, "step slot"],
) -> None:
    """Fill the lanes that each pose may lie on, the likeliest first, with their cost (inf and -1 where there are fewer).

    ``reach`` is the greatest (distance, height difference). The cost is ``(distance / 1.5 m)^2 + (heading error / 0.4 rad)^2``.
    """
    found, near = np.empty(3, np.float64), np.empty(table.block.size, np.int32)
    for step in range(poses.shape[0]):
        for slot in range(out_cost.shape[1]):
            out_cost[step, slot] = np.inf
            out_lane[step, slot] = -1
        count = 0
        for k in range(lanes_within(poses[step, 0], poses[step, 1], reach[0], table.grid, near)):
            lane = near[k]
            lane_match(poses[step], table.center[table.offsets[lane] : table.offsets[lane + 1]], found)
            if found[0] <= reach[0] and found[2] <= reach[1]:
                cost = (found[0] / 1.5) ** 2 + (found[1] / 0.4) ** 2
                count = insert_nearest(cost, lane, count, out_cost[step], out_lane[step])


@kernel
def step_cost(
    a: int, b: int, ahead: tuple[Int64[np.ndarray, " lane_end"], Int64[np.ndarray, " edge"], Int64[np.ndarray, " lane"]]
) -> float:
    """Return what it costs to be on lane ``a`` and then on ``b``: see :func:`likeliest_path`."""
    if a == b:
        return 0.0
    for k in range(ahead[0][a], ahead[0][a + 1]):
        if ahead[1][k] == b:
            return 0.0
    return 4.0 if ahead[2][a] == ahead[2][b] else 30.0


@kernel
def likeliest_path(
    cost: Float64[np.ndarray, "step slot"],
    lane: Int64[np.ndarray, "step slot"],
    is_cut: Bool[np.ndarray, " step"],
    ahead: tuple[Int64[np.ndarray, " lane_end"], Int64[np.ndarray, " edge"], Int64[np.ndarray, " lane"]],
    scratch: tuple[Float64[np.ndarray, "step slot"], Int64[np.ndarray, "step slot"]],
    out: Int64[np.ndarray, " step"],
) -> None:
    """Fill the lane of each step on the cheapest path (Viterbi): -1 where a step has no candidate.

    Staying and driving on to one of ``ahead`` (offsets, lanes, and the block of each lane) is free, another lane of the same block
    costs 4, anything else 30; nothing costs across ``is_cut`` or from a step without candidates.
    """
    total, origin = scratch
    for t in range(cost.shape[0]):
        linked = t > 0 and not is_cut[t] and lane[t - 1, 0] >= 0
        for b in range(cost.shape[1]):
            total[t, b] = np.inf if linked or lane[t, b] < 0 else cost[t, b]
            origin[t, b] = -1
            for a in range(cost.shape[1] if linked and lane[t, b] >= 0 else 0):
                if lane[t - 1, a] < 0:
                    break
                through = total[t - 1, a] + step_cost(lane[t - 1, a], lane[t, b], ahead) + cost[t, b]
                if through < total[t, b]:
                    total[t, b] = through
                    origin[t, b] = a
    trace_back(lane, total, origin, out)


@kernel
def trace_back(
    lane: Int64[np.ndarray, "step slot"],
    total: Float64[np.ndarray, "step slot"],
    origin: Int64[np.ndarray, "step slot"],
    out: Int64[np.ndarray, " step"],
) -> None:
    """Fill the lanes of the path that ends cheapest, part by part, from the last step on."""
    slot = -1
    for back in range(lane.shape[0]):
        t = lane.shape[0] - 1 - back
        if slot < 0 and lane[t, 0] >= 0:
            slot = 0
            for other in range(lane.shape[1]):
                if total[t, other] < total[t, slot]:
                    slot = other
        out[t] = lane[t, slot] if slot >= 0 else -1
        slot = origin[t, slot] if slot >= 0 else -1


@kernel
def add_distinct(block: int, count: int, out: Int64[np.ndarray, " slot"]) -> int:
    """Append a block unless it is there or there is no room; return the new count."""
    for k in range(count):
        if out[k] == block:
            return count
    if count < out.shape[0]:
        out[count] = block
        return count + 1
    return count


@kernel
def blocks_near(
    pose: Float64[np.ndarray, " 4"],
    limits: tuple[float, float],
    table: LaneTable,
    near: Int32[np.ndarray, " lane"],
    out: Int64[np.ndarray, " slot"],
) -> int:
    """Fill the blocks with a lane whose area is within ``limits[0]``, or else the nearest one; return how many.

    A lane more than ``limits[1]`` above or below is none. ``near`` is scratch.
    """
    found = np.empty(3, np.float64)
    count, nearest, nearest_block, radius = 0, np.inf, -1, limits[0]
    while True:  # farther and farther where nothing is found
        num_near = lanes_within(pose[0], pose[1], radius, table.grid, near)
        near[:num_near].sort()
        for lane in near[:num_near]:
            start, stop = table.offsets[lane], table.offsets[lane + 1]
            reach = min(radius, max(nearest, limits[0]))
            if box_distance(pose[0], pose[1], table.grid.boxes[lane]) > reach:
                continue
            lane_match(pose, table.center[start:stop], found)
            if found[2] > limits[1] or found[0] - table.half_width[lane] > reach:
                continue
            away = polygon_distance(pose[0], pose[1], table.left[start:stop], table.right[start:stop])
            if away < nearest:
                nearest, nearest_block = away, table.block[lane]
            if away <= limits[0]:
                count = add_distinct(table.block[lane], count, out)
        if nearest <= radius or num_near == table.block.size:
            break
        radius = 4.0 * radius
    return add_distinct(nearest_block, count, out) if count == 0 and nearest_block >= 0 else count


@kernel
def start_candidates(
    poses: Float64[np.ndarray, "n 4"],
    limits: tuple[float, float, float, float],
    table: LaneTable,
    out_block: Int64[np.ndarray, "n slot"],
    out_error: Float64[np.ndarray, "n slot 2"],
) -> None:
    """Fill the blocks near each pose (area within ``limits[0]``, height within ``limits[1]``); -1 where there are fewer.

    The errors of a block are its least distance from a centre among its lanes that pass (heading error below ``limits[2]``,
    distance below ``limits[3]``), inf if none does, and the least of all.
    """
    found, near = np.empty(3, np.float64), np.empty(table.block.size, np.int32)
    for i in range(poses.shape[0]):
        count = blocks_near(poses[i], (limits[0], limits[1]), table, near, out_block[i])
        for slot in range(out_block.shape[1]):
            out_error[i, slot, 0] = np.inf
            out_error[i, slot, 1] = np.inf
            if slot >= count:
                out_block[i, slot] = -1
                continue
            block = out_block[i, slot]
            for k in range(table.block_offsets[block], table.block_offsets[block + 1]):
                lane = table.block_lanes[k]
                lane_match(poses[i], table.center[table.offsets[lane] : table.offsets[lane + 1]], found)
                out_error[i, slot, 1] = min(out_error[i, slot, 1], found[0])
                if found[1] < limits[2] and found[0] < limits[3]:
                    out_error[i, slot, 0] = min(out_error[i, slot, 0], found[0])


@kernel
def shared_area(table: LaneTable, a: int, b: int, cell: float) -> float:
    """Return the area that two lanes share, by counting the centres of cells that lie in both."""
    boxes = table.grid.boxes
    left, right = max(boxes[a, 0], boxes[b, 0]), min(boxes[a, 2], boxes[b, 2])
    low, high = max(boxes[a, 1], boxes[b, 1]), min(boxes[a, 3], boxes[b, 3])
    rows_a, rows_b = slice(table.offsets[a], table.offsets[a + 1]), slice(table.offsets[b], table.offsets[b + 1])
    count = 0
    for row in range(math.ceil(max(high - low, 0.0) / cell)):
        y = low + (row + 0.5) * cell
        for column in range(math.ceil(max(right - left, 0.0) / cell)):
            x = left + (column + 0.5) * cell
            if is_within(x, y, table.left[rows_a], table.right[rows_a]) and is_within(
                x, y, table.left[rows_b], table.right[rows_b]
            ):
                count += 1
    return count * cell * cell
