"""OpenDRIVE to a lane graph: lines in metres, driving direction, links, speed limits and traffic lights.

:mod:`tasks.opendrive_tables` reads the XML, :mod:`tasks.lane_shapes` computes lines, :mod:`tasks.lane_links` the graph. ASAM OpenDRIVE 1.7
is the source of all formulas; where CARLA reads a map otherwise, that is said, because recordings follow CARLA.
"""

from dataclasses import fields

import numpy as np
from jaxtyping import Float64, Int32, Int64

from schemas.errors import SourceError
from schemas.lanes import LaneGraph, Signals
from tasks.lane_links import governed_lanes, is_along_s, link_lanes, transpose
from tasks.lane_shapes import Profile, ReferenceLines, Sections, beside, sections_of, trace_lanes
from tasks.opendrive_tables import Tables, read_tables


def read_opendrive(data: bytes, *, spacing_m: float = 1.0) -> LaneGraph:
    """Read an OpenDRIVE map, plain or gzip, into a lane graph.

    Parameters
    ----------
    data
        Content of an ``.xodr`` or ``.xodr.gz`` file, of any origin.
    spacing_m
        Largest distance of neighbouring points along the reference line. A lane has a point at both of its ends and
        equally spaced ones between, and no fewer than two.

    Raises
    ------
    SourceError
        Not OpenDRIVE, damaged, too large, of an unsupported kind, or self-contradictory.
    """
    tables = read_tables(data)
    if not tables.lanes:
        raise SourceError("expected lanes, found none; name the .xodr file of a town")
    sections = sections_of(tables, spacing_m)
    reference = ReferenceLines(tables)
    roads = [tables.roads[tables.sections[lane.section][0]] for lane in tables.lanes]
    along = np.array([is_along_s(road, lane.id) for road, lane in zip(roads, tables.lanes, strict=True)])
    lines = trace_lanes(tables, sections, reference, along)
    types = tuple(dict.fromkeys(lane.type for lane in tables.lanes))
    limit_mps = _speed_limits(tables, sections)
    successor_offsets, successors = link_lanes(tables)
    predecessor_offsets, predecessors = transpose(successor_offsets, successors)
    return LaneGraph(
        ids=_ids(tables),
        is_along_s=along,
        junction_id=np.array([road.junction for road in roads], dtype=np.int32),
        types=types,
        type_index=np.array([types.index(lane.type) for lane in tables.lanes], dtype=np.int16),
        speed_limit_mps=np.nan_to_num(limit_mps).astype(np.float32),
        has_speed_limit=~np.isnan(limit_mps),
        successor_offsets=successor_offsets,
        successors=successors,
        predecessor_offsets=predecessor_offsets,
        predecessors=predecessors,
        signals=_signals(tables, reference),
        **{column.name: getattr(lines, column.name) for column in fields(lines)},
    )


def _ids(tables: Tables) -> Int32[np.ndarray, "lane 3"]:
    """Return road id, index of the section in its road, and lane id."""
    rows = []
    for lane in tables.lanes:
        road = tables.roads[tables.sections[lane.section][0]]
        rows.append((road.id, lane.section - road.sections[0], lane.id))
    return np.array(rows, dtype=np.int32)


def _speed_limits(tables: Tables, sections: Sections) -> Float64[np.ndarray, " lane"]:
    """Return the limit in m/s at every lane's middle: the lane's own, else that of its road's type; NaN without one."""
    section = np.array([lane.section for lane in tables.lanes], dtype=np.int64)
    middle_m = ((sections.begin_m + sections.end_m) / 2)[section]
    of_lane = _holding(Profile(tables.lane_speeds), np.arange(len(section)), middle_m)
    of_road = _holding(Profile(tables.road_speeds), sections.road[section], middle_m)
    return np.where(np.isnan(of_lane), of_road, of_lane)


def _holding(
    profile: Profile, owner: Int64[np.ndarray, " lane"], s_m: Float64[np.ndarray, " lane"]
) -> Float64[np.ndarray, " lane"]:
    """Return the value that holds at ``s_m``, NaN where none does."""
    rows = profile.rows(owner, s_m)
    if not len(profile.owner):
        return np.full(len(owner), np.nan)
    return np.where((rows >= 0) & (profile.start_m[rows] <= s_m), profile.coefficients[rows, 0], np.nan)


def _signals(tables: Tables, reference: ReferenceLines) -> Signals:
    """Return the lights, placed beside their roads' reference lines."""
    rows = tables.signals
    s_m, t_m, height_m, heading_rad = np.array([row.pose for row in rows], dtype=np.float64).reshape(-1, 4).T
    poses = reference.poses(np.array([row.road for row in rows], dtype=np.int64), s_m, s_m)
    lane_offsets, lanes = governed_lanes(tables)
    return Signals(
        ids=tuple(row.id for row in rows),
        types=tuple(row.type for row in rows),
        controllers=tuple(tables.controllers.get(row.id, "") for row in rows),
        position_m=beside(poses, t_m) + height_m[:, None] * [0.0, 0.0, 1.0],
        heading_rad=poses[:, 3] + heading_rad,
        lane_offsets=lane_offsets,
        lanes=lanes,
    )
