"""Which lanes the ego drove along, and the route that follows from them at each anchor, corrected as Diffusion Planner does.

The correction's rules (start off the route, missing links, loops) are those of ``spec`` section 1.3; a route is a list of blocks.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from tasks.kernels.planner_paths import likeliest_path, match_candidates, shared_area, start_candidates
from tasks.planner_lanes import PlannerLanes, Ragged

MAX_AWAY_M = 5.0
"""Farthest lane centre on which a step of the driven path may lie."""
MAX_LEVEL_M = 6.0
"""Greatest difference in height from a lane that one drives on: else it is another level of a bridge."""
NUM_CANDIDATES = 12

START_AREA_M = 1.0
START_HEADING_RAD = np.pi / 4
START_AWAY_M = 3.0
BACKWARD_DEPTH = 15
FORWARD_DEPTH = 30
NUM_JOINABLE = 3
"""First blocks of a route to which a forward search may lead."""
LOOP_AREA_M2 = 1.0
_CELL_M = 0.2


def match_path(
    poses: Float64[np.ndarray, "step 4"], is_cut: Bool[np.ndarray, " step"], lanes: PlannerLanes
) -> Int64[np.ndarray, " step"]:
    """Return the lane of each step of a driven path (x, y, heading, z), -1 where none is near.

    A hidden Markov model in the manner of Newson and Krumm (2009): near a lane's centre and along it is likely, and so is
    driving on along the lane graph, so that a crossing lane of a junction is not taken for the one driven.
    """
    cost = np.empty((len(poses), NUM_CANDIDATES))
    lane = np.empty((len(poses), NUM_CANDIDATES), np.int64)
    match_candidates(poses, (MAX_AWAY_M, MAX_LEVEL_M), lanes.table, cost, lane)
    path = np.empty(len(poses), np.int64)
    ahead = (lanes.ahead.offsets, lanes.ahead.values, lanes.table.block)
    likeliest_path(cost, lane, is_cut, ahead, (np.empty_like(cost), np.empty_like(lane)), path)
    return path


def search_blocks(start: int, targets: Collection[int], links: Ragged, max_depth: int) -> list[int]:
    """Return the shortest chain of blocks from ``start`` to the first of ``targets`` found along ``links``, both included.

    Breadth first, at most ``max_depth`` blocks in a chain; empty where there is none.
    """
    origin = {start: -1}
    queue = deque([(start, 1)])
    while queue:
        block, depth = queue.popleft()
        if block in targets:
            chain = [block]
            while origin[chain[-1]] >= 0:
                chain.append(origin[chain[-1]])
            return chain[::-1]
        if depth < max_depth:
            for other in links.row(block).tolist():
                if other not in origin:
                    origin[other] = block
                    queue.append((other, depth + 1))
    return []


@dataclass(frozen=True, slots=True)
class Start:
    """The blocks on which the ego may stand: the one that counts, and all that do for the search."""

    block: int
    candidates: tuple[int, ...]


def choose_start(blocks: Sequence[int], errors: np.ndarray, route: Collection[int]) -> Start | None:
    """Choose among nearby blocks with ``errors`` (distance if it passes, distance in any case): on the route first.

    None where no block is near.
    """
    near = [(float(error[0]), float(error[1]), int(block)) for block, error in zip(blocks, errors) if block >= 0]
    passing = [(error, block) for error, _, block in near if np.isfinite(error)]
    for some in ([(e, b) for e, b in passing if b in route], passing):
        if some:
            return Start(min(some, key=lambda pair: pair[0])[1], tuple(block for _, block in some))
    if near:
        return Start(min(near, key=lambda one: one[1])[2], tuple(block for _, _, block in near))
    return None


def correct_route(
    route: Sequence[int], start: Start | None, lanes: PlannerLanes, overlaps: Callable[[int, int], bool]
) -> list[int]:
    """Return ``route`` joined to where the ego stands, with missing links filled, and cut before it crosses itself.

    Each block once, in order. ``overlaps`` says whether two connectors share more than :data:`LOOP_AREA_M2`.
    """
    joined = list(route)
    if joined and start is not None and start.block not in joined:
        joined = _joined(joined, start, lanes)
    return list(dict.fromkeys(_without_loops(_linked(joined, lanes), lanes, overlaps)))


def _joined(route: list[int], start: Start, lanes: PlannerLanes) -> list[int]:
    """Lead from the ego's block to the route's beginning, or else to one of its first blocks."""
    back = search_blocks(route[0], start.candidates, lanes.block_predecessors, BACKWARD_DEPTH)
    if back:
        return [*back[:0:-1], *route]
    forward = search_blocks(start.block, route[:NUM_JOINABLE], lanes.block_successors, FORWARD_DEPTH)
    return [*forward, *route[route.index(forward[-1]) + 1 :]] if forward else route


def _linked(route: list[int], lanes: PlannerLanes) -> list[int]:
    """Put what lies between two blocks that do not touch, where a search finds it."""
    linked = route[:1]
    for block in route[1:]:
        if block not in lanes.block_successors.row(linked[-1]):
            linked += search_blocks(linked[-1], (block,), lanes.block_successors, FORWARD_DEPTH)[1:-1]
        linked.append(block)
    return linked


def _without_loops(route: list[int], lanes: PlannerLanes, overlaps: Callable[[int, int], bool]) -> list[int]:
    connectors: list[int] = []
    for place, block in enumerate(route):
        if lanes.block_is_connector[block]:
            if any(overlaps(block, other) for other in connectors):
                return route[:place]
            connectors.append(block)
    return route


class Overlaps:
    """Whether two blocks share an area, remembered: a route asks for the same pairs at every anchor."""

    def __init__(self, lanes: PlannerLanes) -> None:
        self.lanes = lanes
        self.known: dict[tuple[int, int], bool] = {}

    def __call__(self, a: int, b: int) -> bool:
        """Return whether blocks ``a`` and ``b`` share more than :data:`LOOP_AREA_M2`."""
        pair = (min(a, b), max(a, b))
        if pair not in self.known:
            self.known[pair] = a == b or self._area(a, b) > LOOP_AREA_M2
        return self.known[pair]

    def _area(self, a: int, b: int) -> float:
        """Return the greatest area that a lane of one block shares with a lane of the other."""
        lanes = self.lanes
        return max(
            shared_area(lanes.table, one, other, _CELL_M)
            for one in lanes.block_lanes.row(a).tolist()
            for other in lanes.block_lanes.row(b).tolist()
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrivenPath:
    """The driven path of an episode on the map."""

    lane: Int64[np.ndarray, " step"]
    """Lane of each step, -1 where none was near."""
    blocks: tuple[int, ...]
    """Blocks in the order in which they were driven, neighbours different."""
    place: Int64[np.ndarray, " step"]
    """For each step, the first of ``blocks`` that is still to be driven or being driven."""
    stop: Int64[np.ndarray, " step"]
    """For each step, one past the last of ``blocks`` before the ego jumps."""


def driven_path(
    poses: Float64[np.ndarray, "step 4"],
    valid: Bool[np.ndarray, " step"],
    is_break: Bool[np.ndarray, " step"],
    lanes: PlannerLanes,
) -> DrivenPath:
    """Match the path and list its blocks."""
    lane = np.full(len(poses), -1, np.int64)
    lane[valid] = match_path(np.ascontiguousarray(poses[valid]), _cuts(is_break, valid), lanes)
    block = np.where(lane >= 0, lanes.table.block[np.maximum(lane, 0)], -1) if lanes.num_lanes else lane
    steps = np.flatnonzero(lane >= 0)
    segment = np.cumsum(is_break)
    known, part = block[steps], segment[steps]
    is_new = np.ones(len(steps), np.bool_)
    is_new[1:] = (known[1:] != known[:-1]) | (part[1:] != part[:-1])
    number = np.cumsum(is_new) - 1
    upcoming = np.searchsorted(steps, np.arange(len(poses)))
    total = int(is_new.sum())
    place = np.append(number, total)[upcoming]
    stop = np.searchsorted(part[is_new], segment, side="right")
    return DrivenPath(lane=lane, blocks=tuple(known[is_new].tolist()), place=np.minimum(place, stop), stop=stop)


def _cuts(is_break: np.ndarray, valid: np.ndarray) -> np.ndarray:
    segment = np.cumsum(is_break)[valid]
    cuts: np.ndarray = np.diff(segment, prepend=segment[:1]) > 0
    return cuts


def routes_at(
    steps: Int64[np.ndarray, " n"], poses: Float64[np.ndarray, "step 4"], path: DrivenPath, lanes: PlannerLanes
) -> tuple[Int64[np.ndarray, " n"], Ragged]:
    """Return the corrected route of each step: a number of one of the routes, and the routes (0 is the empty one)."""
    overlaps = Overlaps(lanes)
    near = np.empty((len(steps), NUM_CANDIDATES), np.int64)
    errors = np.empty((len(steps), NUM_CANDIDATES, 2))
    limits = (START_AREA_M, MAX_LEVEL_M, START_HEADING_RAD, START_AWAY_M)
    start_candidates(np.ascontiguousarray(poses[steps]), limits, lanes.table, near, errors)
    routes: list[list[int]] = [[]]
    known: dict[tuple[object, ...], int] = {}
    numbers = np.zeros(len(steps), np.int64)
    for row, step in enumerate(steps.tolist()):
        begin, end = int(path.place[step]), int(path.stop[step])
        if begin == end:
            continue
        route = path.blocks[begin:end]
        start = choose_start(near[row], errors[row], route)
        # A start on the route changes nothing, whichever block it is.
        key = (begin, end) if start is None or start.block in route else (begin, end, start)
        if key not in known:
            known[key] = len(routes)
            routes.append(correct_route(route, start, lanes, overlaps))
        numbers[row] = known[key]
    return numbers, Ragged.of(routes)
