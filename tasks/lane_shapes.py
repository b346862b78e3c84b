"""Polylines of all lanes of an OpenDRIVE map, computed at once: sections, samples, widths, heights.

ASAM OpenDRIVE 1.7, sections 9 (``<elevation>``, ``<superelevation>``) and 11 (``<laneOffset>``, ``<width>``, ``<border>``). The raised
surface of single lanes (``<height>``) and ``<shape>`` are not part of a lane's line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from schemas.errors import Reason, SourceError
from tasks.opendrive_tables import Record, Tables
from tasks.plan_view import Pieces, trace

MAX_POINTS = 20_000_000
"""More are refused: Town12, the largest of CARLA's, has 1.6 million at 1 m."""

_EDGE_M = 1e-6
"""Which record holds is looked up this far inside of a section, since writers round where records and sections meet."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of lanes in the direction of driving, as in :class:`schemas.lanes.LaneGraph`."""

    offsets: Int64[np.ndarray, " end"]
    s_m: Float64[np.ndarray, " point"]
    center_m: Float64[np.ndarray, "point 3"]
    left_m: Float64[np.ndarray, "point 3"]
    right_m: Float64[np.ndarray, "point 3"]
    width_m: Float64[np.ndarray, " point"]


class Profile:
    """Cubics in ``s`` of many owners, each record holding from its ``s`` to the next one's."""

    def __init__(self, records: Sequence[Record]) -> None:
        table = np.array(records, dtype=np.float64).reshape(-1, 6)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        self.owner = table[:, 0].astype(np.int64)
        self.start_m = table[:, 1]
        self.coefficients = table[:, 2:]

    def rows(
        self, owner: Int64[np.ndarray, " sample"], s_m: Float64[np.ndarray, " sample"]
    ) -> Int64[np.ndarray, " sample"]:
        """Return the record of ``owner`` that holds at ``s_m``, its first one before that, -1 where it has none.

        One search for all owners: they are laid end to end on one axis.
        """
        if not len(self.owner):
            return np.full(len(owner), -1, dtype=np.int64)
        low = min(float(self.start_m.min()), float(s_m.min(initial=0.0)))
        high = max(float(self.start_m.max()), float(s_m.max(initial=0.0)))
        span = high - low + 1.0
        found = np.searchsorted(self.owner * span + self.start_m - low, owner * span + s_m - low, side="right") - 1
        first = np.minimum(np.searchsorted(self.owner, owner), len(self.owner) - 1)
        return np.where(self.owner[first] == owner, np.maximum(found, first), -1)

    def values(
        self,
        owner: Int64[np.ndarray, " sample"],
        lookup_m: Float64[np.ndarray, " sample"],
        s_m: Float64[np.ndarray, " sample"],
    ) -> Float64[np.ndarray, " sample"]:
        """Return the cubic that holds at ``lookup_m``, at ``s_m``; 0 for owners without records."""
        rows = self.rows(owner, lookup_m)
        if not len(self.owner):
            return np.zeros(len(owner))
        ds = np.maximum(s_m - self.start_m[rows], 0.0)
        a, b, c, d = (self.coefficients[rows, i] for i in range(4))
        return np.where(rows >= 0, a + ds * (b + ds * (c + ds * d)), 0.0)


@dataclass(frozen=True, slots=True)
class Sections:
    """Lane sections, and where along the road they are sampled."""

    road: Int64[np.ndarray, " section"]
    begin_m: Float64[np.ndarray, " section"]
    end_m: Float64[np.ndarray, " section"]
    num_points: Int64[np.ndarray, " section"]

    @property
    def offsets(self) -> Int64[np.ndarray, " end"]:
        """Where each section's samples begin."""
        return np.concatenate([[0], np.cumsum(self.num_points)])


def sections_of(tables: Tables, spacing_m: float) -> Sections:
    """Return the extent of every lane section: to the next one, or to the end of the road."""
    table = np.array(tables.sections, dtype=np.float64).reshape(-1, 2)
    road, begin_m = table[:, 0].astype(np.int64), table[:, 1]
    length_m = np.array([road.length_m for road in tables.roads])
    is_last = np.append(road[1:] != road[:-1], True)[: len(road)]
    end_m = np.where(is_last, np.maximum(length_m[road], begin_m), np.append(begin_m[1:], 0.0)[: len(road)])
    if np.any(end_m < begin_m):
        found = tables.roads[road[np.argmax(end_m < begin_m)]].id
        raise SourceError("expected lane sections by growing s, found others; sort them", road=found)
    num_points = np.maximum(np.ceil((end_m - begin_m) / spacing_m) + 1.0, 2.0)
    lanes_of = np.bincount([lane.section for lane in tables.lanes], minlength=len(road))
    if (total := float(num_points @ np.maximum(lanes_of, 1))) > MAX_POINTS:
        raise SourceError(
            f"expected at most {MAX_POINTS} points of lanes, found {total:.0f}; sample more widely", Reason.TOO_LARGE
        )
    return Sections(road, begin_m, end_m, num_points.astype(np.int64))


class ReferenceLines:
    """The reference lines of all roads: plan view, elevation and superelevation."""

    def __init__(self, tables: Tables) -> None:
        table = np.array(tables.pieces, dtype=np.float64).reshape(-1, 16)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        self._starts = Profile([(int(row[0]), row[1], 0.0, 0.0, 0.0, 0.0) for row in table])
        self._pieces = Pieces(table[:, 6].astype(np.int64), table[:, 2:5], table[:, 5], table[:, 7:])
        self._elevation = Profile(tables.elevations)
        self._superelevation = Profile(tables.superelevations)
        self._road_ids = [road.id for road in tables.roads]

    def poses(
        self,
        road: Int64[np.ndarray, " sample"],
        lookup_m: Float64[np.ndarray, " sample"],
        s_m: Float64[np.ndarray, " sample"],
    ) -> Float64[np.ndarray, "sample 5"]:
        """Return x, y, z, heading and roll of the reference line."""
        rows = self._starts.rows(road, lookup_m)
        if np.any(rows < 0):
            found = self._road_ids[road[np.argmax(rows < 0)]]
            raise SourceError("expected a <planView> with geometry, found none; correct the map", road=found)
        plane = trace(self._pieces.take(rows), s_m - self._starts.start_m[rows])
        height = self._elevation.values(road, lookup_m, s_m)
        roll = self._superelevation.values(road, lookup_m, s_m)
        return np.column_stack([plane[:, :2], height, plane[:, 2], roll])


def beside(
    poses: Float64[np.ndarray, "sample 5"], t_m: Float64[np.ndarray, " sample"]
) -> Float64[np.ndarray, "sample 3"]:
    """Return the points ``t_m`` to the left of the reference line, on the road as superelevation tilts it."""
    x, y, z, heading, roll = poses.T
    flat = t_m * np.cos(roll)
    return np.stack([x - flat * np.sin(heading), y + flat * np.cos(heading), z + t_m * np.sin(roll)], axis=1)


def trace_lanes(
    tables: Tables, sections: Sections, reference: ReferenceLines, is_along_s: Bool[np.ndarray, " lane"]
) -> Lines:
    """Sample centre and boundaries of every lane at its section's samples, in the direction of driving."""
    section = np.array([lane.section for lane in tables.lanes], dtype=np.int64)
    num_points = sections.num_points[section]
    offsets = np.concatenate([[0], np.cumsum(num_points)])
    lane = np.repeat(np.arange(len(section)), num_points)
    place = np.arange(len(lane)) - offsets[lane]
    place = np.where(is_along_s[lane], place, num_points[lane] - 1 - place)
    sample = sections.offsets[section[lane]] + place
    owner, lookup_m, s_m = _section_samples(sections)
    poses = reference.poses(sections.road[owner], lookup_m, s_m)
    middle_m = Profile(tables.offsets).values(sections.road[owner], lookup_m, s_m)
    inner_m, outer_m = _borders(tables, offsets, middle_m[sample], (lane, lookup_m[sample], s_m[sample]))
    center_m, inner, outer = (beside(poses[sample], t_m) for t_m in ((inner_m + outer_m) / 2, inner_m, outer_m))
    # Whoever keeps right has the road's middle on the left, on either side of it.
    lane_id = np.array([lane.id for lane in tables.lanes])
    is_inner_left = ((lane_id < 0) == is_along_s)[lane][:, None]
    left_m, right_m = np.where(is_inner_left, inner, outer), np.where(is_inner_left, outer, inner)
    return Lines(offsets, s_m[sample], center_m, left_m, right_m, np.abs(outer_m - inner_m))


def _section_samples(
    sections: Sections,
) -> tuple[Int64[np.ndarray, " sample"], Float64[np.ndarray, " sample"], Float64[np.ndarray, " sample"]]:
    """Return section, ``s`` for looking up records, and ``s`` of every sample."""
    owner = np.repeat(np.arange(len(sections.road)), sections.num_points)
    place = np.arange(len(owner)) - sections.offsets[owner]
    begin_m, end_m = sections.begin_m[owner], sections.end_m[owner]
    s_m = begin_m + (end_m - begin_m) * (place / (sections.num_points[owner] - 1))
    edge_m = np.minimum(_EDGE_M, (end_m - begin_m) / 2)
    return owner, np.clip(s_m, begin_m + edge_m, end_m - edge_m), s_m


def _borders(
    tables: Tables,
    offsets: Int64[np.ndarray, " end"],
    middle_m: Float64[np.ndarray, " point"],
    where: tuple[Int64[np.ndarray, " point"], Float64[np.ndarray, " point"], Float64[np.ndarray, " point"]],
) -> tuple[Float64[np.ndarray, " point"], Float64[np.ndarray, " point"]]:
    """Return the ``t`` of every lane's inner and outer border: widths add up from the centre lane outwards.

    A width below 0, where rounding ends a lane, counts as 0.
    """
    lane = where[0]
    value_m = Profile(tables.widths).values(*where)
    side = np.sign([row.id for row in tables.lanes]).astype(np.float64)
    has_border = np.array([row.has_border for row in tables.lanes], dtype=np.bool_)
    inside, rank = _inner_lanes(tables)
    inner_m, outer_m = middle_m.copy(), np.empty_like(middle_m)
    for step in range(int(rank.max(initial=-1)) + 1):
        (points,) = np.nonzero(rank[lane] == step)
        owner = lane[points]
        if step:
            inner_m[points] = outer_m[points - offsets[owner] + offsets[inside[owner]]]
        from_inner = inner_m[points] + side[owner] * np.maximum(value_m[points], 0.0)
        outer_m[points] = np.where(has_border[owner], middle_m[points] + value_m[points], from_inner)
    return inner_m, outer_m


def _inner_lanes(tables: Tables) -> tuple[Int64[np.ndarray, " lane"], Int64[np.ndarray, " lane"]]:
    """Return for every lane the next one towards the middle (-1: the centre lane), and how many lie between."""
    inside = np.full(len(tables.lanes), -1, dtype=np.int64)
    rank = np.zeros(len(tables.lanes), dtype=np.int64)
    place = {(lane.section, lane.id): index for index, lane in enumerate(tables.lanes)}
    for index in sorted(range(len(tables.lanes)), key=lambda i: abs(tables.lanes[i].id)):
        lane = tables.lanes[index]
        inner_id = lane.id - (1 if lane.id > 0 else -1)
        if inner_id:
            if (lane.section, inner_id) not in place:
                road = tables.roads[tables.sections[lane.section][0]].id
                raise SourceError(
                    f"expected lane {inner_id} beside {lane.id}, found none; number lanes in order", road=road
                )
            inside[index] = place[lane.section, inner_id]
            rank[index] = rank[inside[index]] + 1
    return inside, rank
