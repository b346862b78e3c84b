"""A lane graph made ready for planner samples, once for many episodes: lanes resampled, joined to blocks, and searchable.

A *block* stands for nuPlan's roadblock: the lanes of one road section in one direction, or, inside a junction, the lanes that
lead from one such block to one other. nuPlan's routes are lists of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from schemas.lanes import LaneGraph
from schemas.planner import PlannerParams
from schemas.tracks import Tracks
from tasks.kernels.planner_lanes import LaneTable
from tasks.lanes import index_lanes, resample_line

DRIVING = ("driving", "bidirectional")
"""Lane types on which vehicles drive, as OpenDRIVE names them."""

HOPS_AHEAD = 3
"""Lanes that a vehicle may pass between two steps of its path: sections may be shorter than it drives in one."""

MAX_SIGNAL_M = 5.0
"""Greatest distance of a recorded light from the signal of the map that it is: both are the same post."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ragged:
    """Rows of different lengths: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: Int64[np.ndarray, " end"]
    values: Int64[np.ndarray, " value"]

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> "Ragged":
        """Join ``rows``."""
        lists = [np.fromiter(row, np.int64) for row in rows]
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(row) for row in lists], out=offsets[1:])
        return Ragged(offsets=offsets, values=np.concatenate(lists) if lists else np.zeros(0, np.int64))

    def row(self, index: int) -> Int64[np.ndarray, " value"]:
        """Return one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerLanes:
    """The driving lanes of a map, renumbered from 0."""

    table: LaneTable
    graph_lane: Int64[np.ndarray, " lane"]
    """Index in the graph."""
    is_junction: Bool[np.ndarray, " lane"]
    successors: Ragged
    """Lanes that each lane leads to."""
    ahead: Ragged
    """Lanes that can be reached in one to :data:`HOPS_AHEAD` steps."""
    block_lanes: Ragged
    block_successors: Ragged
    block_predecessors: Ragged
    block_is_connector: Bool[np.ndarray, " block"]

    @property
    def num_lanes(self) -> int:
        """Number of driving lanes."""
        return len(self.graph_lane)


def prepare_lanes(graph: LaneGraph, params: PlannerParams) -> PlannerLanes:
    """Make the driving lanes of ``graph`` ready; some seconds for the largest towns, so keep it."""
    kept = np.flatnonzero(graph.is_type(*DRIVING)).astype(np.int64)
    number = np.full(graph.num_lanes + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    successors = [_known(number, graph.successors_of(lane)) for lane in kept.tolist()]
    predecessors = [_known(number, graph.predecessors_of(lane)) for lane in kept.tolist()]
    is_junction = graph.is_junction[kept]
    block = _blocks(graph.ids[kept], graph.is_along_s[kept], graph.junction_id[kept], (predecessors, successors))
    num_blocks = int(block.max()) + 1 if len(block) else 0
    links = {(int(block[lane]), int(block[other])) for lane, row in enumerate(successors) for other in row}
    links = {(a, b) for a, b in links if a != b}
    block_lanes = _grouped(block, np.arange(len(kept)), num_blocks)
    is_connector = np.zeros(num_blocks, np.bool_)
    is_connector[block[is_junction]] = True
    return PlannerLanes(
        table=_table(graph, kept, (block, block_lanes), params.num_points),
        graph_lane=kept,
        is_junction=is_junction,
        successors=Ragged.of(successors),
        ahead=Ragged.of(_reach(successors, lane) for lane in range(len(kept))),
        block_lanes=block_lanes,
        block_successors=_edges(links, num_blocks),
        block_predecessors=_edges({(b, a) for a, b in links}, num_blocks),
        block_is_connector=is_connector,
    )


def _table(graph: LaneGraph, kept: np.ndarray, blocks: tuple[np.ndarray, Ragged], num_points: int) -> LaneTable:
    lines = [_oriented(graph, lane) for lane in kept.tolist()]
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(center) for center, _, _ in lines], out=offsets[1:])
    return LaneTable(
        grid=index_lanes(np.array([_box(*line) for line in lines]).reshape(-1, 4)),
        offsets=offsets,
        center=np.concatenate([np.zeros((0, 3)), *(center for center, _, _ in lines)]),
        left=np.concatenate([np.zeros((0, 2)), *(left for _, left, _ in lines)]),
        right=np.concatenate([np.zeros((0, 2)), *(right for _, _, right in lines)]),
        half_width=np.array([_half_width(*line) for line in lines]).reshape(-1),
        points=np.array([_resampled(line, num_points) for line in lines]).reshape(-1, num_points, 6),
        speed_limit=graph.speed_limit_mps[kept].astype(np.float64),
        has_speed_limit=graph.has_speed_limit[kept].copy(),
        block=blocks[0],
        block_offsets=blocks[1].offsets,
        block_lanes=blocks[1].values,
    )


def _known(number: np.ndarray, lanes: np.ndarray) -> list[int]:
    found: list[int] = number[lanes][number[lanes] >= 0].tolist()
    return found


def _oriented(graph: LaneGraph, lane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return centre and boundaries; a boundary whose end is nearer the centre's start than its own start is turned."""
    rows = graph.points_of(lane)
    center = graph.center_m[rows].copy()
    sides = []
    for side in (graph.left_m[rows, :2], graph.right_m[rows, :2]):
        is_turned = _distance(side[-1], center[0]) < _distance(side[0], center[0])
        sides.append(np.ascontiguousarray(side[::-1] if is_turned else side))
    return center, sides[0], sides[1]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.hypot(a[0] - b[0], a[1] - b[1]))


def _box(center: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    everything = np.concatenate([center[:, :2], left, right])
    return np.concatenate([everything.min(axis=0), everything.max(axis=0)])


def _half_width(center: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    return max(float(np.hypot(*(side - center[:, :2]).T).max()) for side in (left, right))


def _resampled(line: tuple[np.ndarray, np.ndarray, np.ndarray], num_points: int) -> np.ndarray:
    return np.concatenate([resample_line(part[:, :2], num_points) for part in line], axis=1)


def _blocks(
    ids: np.ndarray, is_along_s: np.ndarray, junction: np.ndarray, links: tuple[list[list[int]], list[list[int]]]
) -> Int64[np.ndarray, " lane"]:
    """Return the number of each lane's block: road, section and direction; in a junction, where a lane comes from and goes to."""
    plain = [(road, section, along) for (road, section, _), along in zip(ids.tolist(), is_along_s.tolist())]
    keys: list[tuple[object, ...]] = []
    for lane, key in enumerate(plain):
        before, after = links[0][lane], links[1][lane]
        ends = [*before, *after]
        if junction[lane] >= 0 and before and after and not any(junction[end] >= 0 for end in ends):
            keys.append((int(junction[lane]), plain[before[0]], plain[after[0]]))
        else:
            keys.append(key)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def _reach(successors: Sequence[Sequence[int]], lane: int) -> list[int]:
    found: dict[int, None] = {}
    front = [lane]
    for _ in range(HOPS_AHEAD):
        front = [other for step in front for other in successors[step] if other not in found]
        found.update(dict.fromkeys(front))
    return list(found)


def _grouped(groups: np.ndarray, values: np.ndarray, num_groups: int) -> Ragged:
    order = np.argsort(groups, kind="stable")
    offsets = np.searchsorted(groups[order], np.arange(num_groups + 1)).astype(np.int64)
    return Ragged(offsets=offsets, values=values[order].astype(np.int64))


def _edges(links: set[tuple[int, int]], num_blocks: int) -> Ragged:
    pairs = np.array(sorted(links), np.int64).reshape(-1, 2)
    return _grouped(pairs[:, 0], pairs[:, 1], num_blocks)


def lane_lights(tracks: Tracks, graph: LaneGraph, lanes: PlannerLanes) -> Int64[np.ndarray, " lane"]:
    """Return the recorded light that governs each lane, -1 for none; only lanes inside junctions have one, as in nuPlan.

    A light is known by its OpenDRIVE signal; else by the lane and the box in which it stops traffic, and governs what follows
    them in the junction; else by the signal of the map that stands nearest. Of two lights of a lane the first one counts.
    """
    number = np.full(graph.num_lanes + 1, -1, np.int64)
    number[lanes.graph_lane] = np.arange(lanes.num_lanes)
    signal_of = {signal: index for index, signal in enumerate(graph.signals.ids)}
    light_of = np.full(lanes.num_lanes, -1, np.int64)
    for light, signal in enumerate(tracks.light_signal):
        governed: list[int] = []
        if signal in signal_of:
            governed = _governed(graph, number, signal_of[signal])
        if not governed:
            governed = [
                *_on_lane(graph, number, tracks.light_lane[light]),
                *_in_box(lanes, tracks.light_trigger[light]),
            ]
        if not governed and len(graph.signals.ids):
            away_m = np.hypot(*(graph.signals.position_m[:, :2] - tracks.light_position[light, :2]).T)
            if np.nanmin(away_m, initial=np.inf) <= MAX_SIGNAL_M:
                governed = _governed(graph, number, int(np.nanargmin(away_m)))
        for lane in _inside_junction(lanes, governed):
            if light_of[lane] < 0:
                light_of[lane] = light
    return light_of


def _governed(graph: LaneGraph, number: np.ndarray, signal: int) -> list[int]:
    return _known(number, graph.signals.lanes_of(signal))


def _inside_junction(lanes: PlannerLanes, governed: Iterable[int]) -> list[int]:
    """Return the lanes of junctions among ``governed`` and right after them."""
    inside: list[int] = []
    for lane in dict.fromkeys(governed):
        candidates = [lane] if lanes.is_junction[lane] else lanes.successors.row(lane).tolist()
        inside += [other for other in candidates if lanes.is_junction[other]]
    return inside


def _on_lane(graph: LaneGraph, number: np.ndarray, road_lane: np.ndarray) -> list[int]:
    if road_lane[1] == 0:
        return []
    found = np.flatnonzero((graph.ids[:, 0] == road_lane[0]) & (graph.ids[:, 2] == road_lane[1]))
    return _known(number, found)


def _in_box(lanes: PlannerLanes, box: Float64[np.ndarray, " 5"]) -> list[int]:
    """Return the lanes before a junction of which a vertex of the centre lies in ``box``, or else those in it."""
    if not np.all(np.isfinite(box)):
        return []
    x, y, heading, half_length, half_width = box.tolist()
    offset = lanes.table.center[:, :2] - (x, y)
    along = np.cos(heading) * offset[:, 0] + np.sin(heading) * offset[:, 1]
    across = np.cos(heading) * offset[:, 1] - np.sin(heading) * offset[:, 0]
    inside = (np.abs(along) <= half_length + 0.5) & (np.abs(across) <= half_width + 0.5)  # vertices lie 1 m apart
    found = np.unique(np.searchsorted(lanes.table.offsets, np.flatnonzero(inside), side="right") - 1).tolist()
    before = [lane for lane in found if not lanes.is_junction[lane] and _inside_junction(lanes, [lane])]
    return before or found
