"""Which lane leads to which, and which light governs which lane, from the tables of an OpenDRIVE map."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, Int64

from tasks.opendrive_tables import Claim, Lane, Road, Tables

Rows = tuple[Int64[np.ndarray, " end"], Int32[np.ndarray, " item"]]
"""Rows of different lengths: where each begins, and all items end to end."""


def link_lanes(tables: Tables) -> Rows:
    """Return the lanes that each lane leads to, in the direction of driving.

    A lane driven along ``s`` leaves its section at the end, by its successors; one driven against it leaves at the
    beginning, by its predecessors. It is entered likewise: at the first section of a road or at the last one, as the
    lane's own direction says. That is how CARLA reads a map; ``contactPoint`` says the same where maps are consistent.
    A link to a lane that the map does not have is a dead end.
    """
    links = _Links(tables)
    return pack_rows([sorted(set(links.leaving(lane))) for lane in tables.lanes])


def is_along_s(road: Road, lane_id: int) -> bool:
    """Return whether one drives this lane towards growing ``s``."""
    return (lane_id < 0) != road.is_left_hand


class _Links:
    """Look-up of roads and lanes by the ids that links name."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._lanes = {(lane.section, lane.id): index for index, lane in enumerate(tables.lanes)}
        self._roads = {road.id: road for road in tables.roads}

    def leaving(self, lane: Lane) -> Iterator[int]:
        """Yield the lanes that one enters at the end of this one."""
        road = self._tables.roads[self._tables.sections[lane.section][0]]
        along = is_along_s(road, lane.id)
        side = "successor" if along else "predecessor"
        if lane.section != road.sections[-1 if along else 0]:
            neighbour = lane.section + (1 if along else -1)
            found = [self._lanes.get((neighbour, target)) for target in lane.links[side]]
        else:
            kind, target_id = road.links.get(side, ("", -1))
            if kind == "junction":
                rows = self._tables.connections.get((target_id, road.id), [])
                pairs = [(target, target_lane) for source, target, target_lane in rows if source == lane.id]
            else:
                pairs = [(target_id, target) for target in lane.links[side]]
            found = [self._entered(*pair) for pair in pairs]
        yield from (index for index in found if index is not None)

    def _entered(self, road_id: int, lane_id: int) -> int | None:
        """Return the lane of this id where one enters the road in its direction."""
        road = self._roads.get(road_id)
        if road is None or not road.sections:
            return None
        return self._lanes.get((road.sections[0 if is_along_s(road, lane_id) else -1], lane_id))


def governed_lanes(tables: Tables) -> Rows:
    """Return the lanes that each signal governs, where a signal itself or a reference to it claims them.

    Where nothing names lanes, orientation does, as CARLA reads it: ``+`` the lanes of positive id, ``-`` those of
    negative id. (The standard has it the other way round; the tool that CARLA's towns come from agrees with CARLA.)
    """
    place = {signal.id: row for row, signal in enumerate(tables.signals)}
    rows: list[set[int]] = [set() for _ in tables.signals]
    lanes_of: dict[int, list[int]] = {}
    for index, lane in enumerate(tables.lanes):
        lanes_of.setdefault(lane.section, []).append(index)
    for claim in tables.claims:
        if claim.signal in place:
            lanes = lanes_of.get(_section_at(tables, claim), [])
            rows[place[claim.signal]].update(index for index in lanes if _claims(claim, tables.lanes[index].id))
    return pack_rows([sorted(row) for row in rows])


def _section_at(tables: Tables, claim: Claim) -> int:
    """Return the lane section at the claim's position, -1 on a road without sections."""
    sections = tables.roads[claim.road].sections
    passed = [section for section in sections if tables.sections[section][1] <= claim.s]
    return passed[-1] if passed else next(iter(sections), -1)


def _claims(claim: Claim, lane_id: int) -> bool:
    if claim.lanes:
        return any(min(pair) <= lane_id <= max(pair) for pair in claim.lanes)
    return claim.orientation not in ("+", "-") or (lane_id > 0) == (claim.orientation == "+")


def pack_rows(rows: Sequence[Sequence[int]]) -> Rows:
    """Lay rows end to end."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return offsets, np.array([item for row in rows for item in row], dtype=np.int32)


def transpose(offsets: Int64[np.ndarray, " end"], items: Int32[np.ndarray, " item"]) -> Rows:
    """Return for every lane the rows that hold it: predecessors of successors."""
    order = np.argsort(items, kind="stable")
    sources = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[order].astype(np.int32)
    counts = np.bincount(items, minlength=len(offsets) - 1)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), sources
