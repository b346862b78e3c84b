"""Kernels of planner samples: the ego's rows, its neighbours and static objects, all in the ego's frame at an anchor step.

Poses are float64 (x, y, heading) of the map; whatever leaves is rounded to float32 once, at the end.
"""

import math

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int16, Int64

from tasks.kernels.decorator import kernel

TINY_M = np.float32(1e-6)
"""Stands for x where a valid row would be all zero, which means *absent* to Diffusion Planner."""


@kernel
def wrapped(angle: float) -> float:
    """Return ``angle`` in (-pi, pi]."""
    return math.atan2(math.sin(angle), math.cos(angle))


@kernel
def ego_rows(
    anchors: Int64[np.ndarray, " n"],
    poses: Float64[np.ndarray, "step 3"],
    is_usable: Bool[np.ndarray, " step"],
    segment: Int64[np.ndarray, " step"],
    out: Float32[np.ndarray, "n future 3"],
    out_valid: Bool[np.ndarray, "n future"],
) -> None:
    """Fill ``out[i, k] = inv(M(poses[a])) M(poses[a + 1 + k])``; zero where that step is unusable or of another segment."""
    for i in range(np.uintp(anchors.size)):
        a = anchors[i]
        x, y, heading = poses[a, 0], poses[a, 1], poses[a, 2]
        c, s = math.cos(heading), math.sin(heading)
        for k in range(out.shape[1]):
            t = a + 1 + k
            valid = is_usable[a] and t < poses.shape[0] and is_usable[t] and segment[t] == segment[a]
            out_valid[i, k] = valid
            if valid:
                dx, dy = poses[t, 0] - x, poses[t, 1] - y
                out[i, k, 0] = c * dx + s * dy
                out[i, k, 1] = c * dy - s * dx
                out[i, k, 2] = wrapped(poses[t, 2] - heading)
            else:
                out[i, k, :] = 0


@kernel
def is_before(distance: float, index: int, other_distance: float, other_index: int) -> bool:
    """Return whether the first is nearer than the other, or as near and of a lower index."""
    return distance < other_distance or (distance == other_distance and index < other_index)


@kernel
def insert_nearest(
    distance: float,
    index: int,
    count: int,
    distances: Float64[np.ndarray, " slot"],
    indices: Int64[np.ndarray, " slot"],
) -> int:
    """Insert into the ``count`` nearest so far, ascending, the lower index first where equal; return the new count."""
    size = int(distances.shape[0])
    if count == size:
        if size == 0 or not is_before(distance, index, distances[size - 1], indices[size - 1]):
            return count
        place = size - 1
    else:
        place = count
    while place > 0 and is_before(distance, index, distances[place - 1], indices[place - 1]):
        distances[place] = distances[place - 1]
        indices[place] = indices[place - 1]
        place -= 1
    distances[place] = distance
    indices[place] = index
    return min(count + 1, size)


@kernel
def choose_agents(
    pose: Float64[np.ndarray, " 3"],
    state: Float64[np.ndarray, "actor 5"],
    valid: Bool[np.ndarray, " actor"],
    classes: Int8[np.ndarray, " actor"],
    limits: tuple[int, float],
    scratch: tuple[Float64[np.ndarray, "2 slot"], Int64[np.ndarray, "2 slot"], Int64[np.ndarray, " 3"]],
    out: Int64[np.ndarray, " slot"],
) -> int:
    """Fill ``out`` with the actors that become neighbours, by distance; return how many.

    ``limits`` is (number of pedestrians and bicycles preferred, greatest distance). All actors where they fit; else that many
    of the nearest pedestrians and bicycles and all vehicles, and where slots are left more pedestrians and bicycles;
    the nearest of those. ``scratch[2]`` counts what there was of each class.
    """
    distances, indices, totals = scratch
    num_vulnerable, radius = limits
    slots = out.shape[0]
    totals[:] = 0
    counts0, counts1 = 0, 0
    for actor in range(state.shape[0]):
        if not valid[actor] or classes[actor] > 2:
            continue
        distance = math.hypot(state[actor, 0] - pose[0], state[actor, 1] - pose[1])
        if not distance <= radius:
            continue
        totals[classes[actor]] += 1
        if classes[actor] == 0:
            counts0 = insert_nearest(distance, actor, counts0, distances[0], indices[0])
        else:
            counts1 = insert_nearest(distance, actor, counts1, distances[1], indices[1])
    if totals[0] + totals[1] + totals[2] > slots:
        counts1 = min(counts1, max(num_vulnerable, slots - counts0))
    a, b, count = 0, 0, 0
    while count < slots and (a < counts0 or b < counts1):
        take = b >= counts1
        if not take and a < counts0:
            da, db = distances[0, a], distances[1, b]
            take = da < db or (da == db and indices[0, a] < indices[1, b])
        if take:
            out[count] = indices[0, a]
            a += 1
        else:
            out[count] = indices[1, b]
            b += 1
        count += 1
    return count


@kernel
def write_past(
    frame: tuple[float, float, float, float, float],
    track: Float64[np.ndarray, "step 5"],
    valid: Bool[np.ndarray, " step"],
    shape: tuple[float, float, int, int],
    out: Float32[np.ndarray, "past 11"],
    out_valid: Bool[np.ndarray, " past"],
) -> None:
    """Fill the rows of one neighbour, from the current one back; an absent row repeats the nearest later state.

    ``frame`` is (x, y, heading, its cos, its sin) of the ego, ``shape`` (width, length, class, anchor step).
    """
    x, y, heading, c, s = frame
    width, length, kind, anchor = shape
    last = out.shape[0] - 1
    source = anchor
    for back in range(last + 1):
        t = anchor - back
        row = last - back
        present = t >= 0 and valid[max(t, 0)]
        if present:
            source = t
        out_valid[row] = present
        dx, dy = track[source, 0] - x, track[source, 1] - y
        vx, vy = track[source, 3], track[source, 4]
        turned = track[source, 2] - heading
        out[row, 0] = c * dx + s * dy
        out[row, 1] = c * dy - s * dx
        out[row, 2] = math.cos(turned)
        out[row, 3] = math.sin(turned)
        out[row, 4] = c * vx + s * vy
        out[row, 5] = c * vy - s * vx
        out[row, 6] = width
        out[row, 7] = length
        for k in range(8, 11):
            out[row, k] = 1 if k - 8 == kind else 0


@kernel
def write_future(
    frame: tuple[float, float, float, float, float],
    track: Float64[np.ndarray, "step 5"],
    valid: Bool[np.ndarray, " step"],
    anchor: int,
    out: Float32[np.ndarray, "future 3"],
    out_valid: Bool[np.ndarray, " future"],
) -> None:
    """Fill the poses of one neighbour after the anchor; absent rows are zero, and no other row is."""
    x, y, heading, c, s = frame
    for k in range(out.shape[0]):
        t = anchor + 1 + k
        present = t < track.shape[0] and valid[min(t, track.shape[0] - 1)]
        out_valid[k] = present
        if not present:
            out[k, :] = 0
            continue
        dx, dy = track[t, 0] - x, track[t, 1] - y
        out[k, 0] = c * dx + s * dy
        out[k, 1] = c * dy - s * dx
        out[k, 2] = wrapped(track[t, 2] - heading)
        if out[k, 0] == 0 and out[k, 1] == 0 and out[k, 2] == 0:
            out[k, 0] = TINY_M


@kernel
def clear_rows(rows: Float32[np.ndarray, "row feature"], valid: Bool[np.ndarray, " row"]) -> None:
    """Make all rows absent."""
    for i in range(rows.shape[0]):
        valid[i] = False
        for k in range(rows.shape[1]):
            rows[i, k] = 0


@kernel
def agent_rows(
    anchors: Int64[np.ndarray, " n"],
    ego: tuple[Float64[np.ndarray, "step 3"], Bool[np.ndarray, " step"]],
    by_step: tuple[Float64[np.ndarray, "step actor 5"], Bool[np.ndarray, "step actor"]],
    by_actor: tuple[Float64[np.ndarray, "actor step 5"], Bool[np.ndarray, "actor step"]],
    actors: tuple[Int64[np.ndarray, " actor"], Int8[np.ndarray, " actor"], Float64[np.ndarray, "actor 2"]],
    limits: tuple[int, float],
    out: tuple[
        Float32[np.ndarray, "n agent past 11"],
        Bool[np.ndarray, "n agent past"],
        Float32[np.ndarray, "n agent future 3"],
        Bool[np.ndarray, "n agent future"],
        Int64[np.ndarray, "n agent"],
        Int16[np.ndarray, "n 3"],
    ],
) -> None:
    """Fill neighbours' past and future, their masks, their ids (-1: none) and how many of each class were left out.

    ``by_step`` and ``by_actor`` hold the same tracks (x, y, heading, vx, vy of box centres) in two orders, since all actors
    of a step are looked through and then all steps of a few. ``actors`` is (id, class, (width, length)). An actor equal in
    id to an earlier one is another part of the same track.
    """
    poses, usable = ego
    past, past_valid, future, future_valid, ids, dropped = out
    num_agents = past.shape[1]
    distances = np.empty((2, num_agents), np.float64)
    indices = np.empty((2, num_agents), np.int64)
    totals = np.empty(3, np.int64)
    chosen = np.empty(num_agents, np.int64)
    for i in range(anchors.size):
        anchor = anchors[i]
        pose = poses[anchor]
        count = 0
        totals[:] = 0
        if usable[anchor]:
            scratch = (distances, indices, totals)
            count = choose_agents(pose, by_step[0][anchor], by_step[1][anchor], actors[1], limits, scratch, chosen)
        frame = (pose[0], pose[1], pose[2], math.cos(pose[2]), math.sin(pose[2]))
        for slot in range(num_agents):
            if slot >= count:
                clear_rows(past[i, slot], past_valid[i, slot])
                clear_rows(future[i, slot], future_valid[i, slot])
                ids[i, slot] = -1
                continue
            actor = chosen[slot]
            shape = (actors[2][actor, 0], actors[2][actor, 1], int(actors[1][actor]), anchor)
            track, valid = by_actor[0][actor], by_actor[1][actor]
            write_past(frame, track, valid, shape, past[i, slot], past_valid[i, slot])
            write_future(frame, track, valid, anchor, future[i, slot], future_valid[i, slot])
            ids[i, slot] = actors[0][actor]
            totals[actors[1][actor]] -= 1
        for kind in range(3):
            dropped[i, kind] = min(totals[kind], 32767)


@kernel
def static_rows(
    anchors: Int64[np.ndarray, " n"],
    ego: tuple[Float64[np.ndarray, "step 3"], Bool[np.ndarray, " step"]],
    by_step: tuple[Float64[np.ndarray, "step actor 5"], Bool[np.ndarray, "step actor"]],
    actors: tuple[Int64[np.ndarray, " actor"], Int8[np.ndarray, " actor"], Float64[np.ndarray, "actor 2"]],
    radius: float,
    out: Float32[np.ndarray, "n static 10"],
    out_valid: Bool[np.ndarray, "n static"],
) -> None:
    """Fill the nearest static objects of the anchor step: x, y, cos, sin, width, length, class; zero where there are fewer."""
    poses, usable = ego
    state, valid = by_step
    distances = np.empty(out.shape[1], np.float64)
    indices = np.empty(out.shape[1], np.int64)
    for i in range(anchors.size):
        anchor = anchors[i]
        x, y, heading = poses[anchor, 0], poses[anchor, 1], poses[anchor, 2]
        c, s = math.cos(heading), math.sin(heading)
        count = 0
        for actor in range(state.shape[1]):
            if usable[anchor] and valid[anchor, actor] and actors[1][actor] > 2:
                distance = math.hypot(state[anchor, actor, 0] - x, state[anchor, actor, 1] - y)
                if distance <= radius:
                    count = insert_nearest(distance, actor, count, distances, indices)
        out[i, :, :] = 0
        for slot in range(out.shape[1]):
            out_valid[i, slot] = slot < count
            if slot < count:
                actor = indices[slot]
                dx, dy = state[anchor, actor, 0] - x, state[anchor, actor, 1] - y
                turned = state[anchor, actor, 2] - heading
                out[i, slot, 0] = c * dx + s * dy
                out[i, slot, 1] = c * dy - s * dx
                out[i, slot, 2] = math.cos(turned)
                out[i, slot, 3] = math.sin(turned)
                out[i, slot, 4] = actors[2][actor, 0]
                out[i, slot, 5] = actors[2][actor, 1]
                out[i, slot, 6 + actors[1][actor] - 3] = 1
