"""What a map is to a planner: lanes as polylines, and how one drives from one to the next."""

from dataclasses import dataclass

import numpy as np

from schemas.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """The traffic lights of a map, and the lanes that each of them governs."""

    ids: tuple[str, ...]
    """OpenDRIVE's signal ids, in file order."""
    types: tuple[str, ...]
    """OpenDRIVE's signal types; 1000001 is the common light of three lamps."""
    controllers: tuple[str, ...]
    """Id of the controller that switches the signal together with others; empty where none does."""
    position_m: np.ndarray
    """``float64[signal, 3]``: where the light itself stands or hangs."""
    heading_rad: np.ndarray
    """``float64[signal]``: the way that those who obey it drive, in every one of CARLA's towns: direction of the reference line plus
    the signal's own offset, whatever its orientation (the standard would turn half of them around)."""
    lane_offsets: np.ndarray
    """``int64[signal + 1]``: signal ``i`` governs ``lanes[lane_offsets[i]:lane_offsets[i + 1]]``."""
    lanes: np.ndarray
    """``int32[pair]``: indices of lanes, ascending within a signal."""

    def __post_init__(self) -> None:
        num = len(self.ids)
        _expect("position_m", self.position_m, (num, 3), "float64")
        _expect("heading_rad", self.heading_rad, (num,), "float64")
        _expect("lane_offsets", self.lane_offsets, (num + 1,), "int64")
        _expect("lanes", self.lanes, (int(self.lane_offsets[-1]),), "int32")

    def lanes_of(self, signal: int) -> np.ndarray:
        """Return the lanes that the signal at this index governs: ``int32[lane]``."""
        return self.lanes[self.lane_offsets[signal] : self.lane_offsets[signal + 1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneGraph:
    """The lanes of a map in flat arrays, one row a lane; every line runs in the direction of driving.

    A lane is what OpenDRIVE calls so: one lane of one section of one road. The frame is OpenDRIVE's and is right-handed,
    in metres and radians: its ``(x, y)`` is CARLA's ``(x, -y)``. Points of lane ``i`` are rows
    ``offsets[i]:offsets[i + 1]`` of the point arrays, two or more; centre, left and right belong together row by row.
    """

    ids: np.ndarray
    """``int32[lane, 3]``: road id, index of the section in its road, lane id (never 0)."""
    is_along_s: np.ndarray
    """``bool[lane]``: whether one drives towards growing ``s`` of the road's reference line."""
    junction_id: np.ndarray
    """``int32[lane]``: the junction whose inside this lane crosses, -1 outside of junctions."""
    types: tuple[str, ...]
    """Names of the lane types that occur: ``driving``, ``sidewalk``, ..."""
    type_index: np.ndarray
    """``int16[lane]``: index into ``types``."""
    speed_limit_mps: np.ndarray
    """``float32[lane]``: the limit at the middle of the lane; 0 where there is none."""
    has_speed_limit: np.ndarray
    """``bool[lane]``."""
    offsets: np.ndarray
    """``int64[lane + 1]``: where each lane's points begin."""
    s_m: np.ndarray
    """``float64[point]``: position on the road's reference line; falls along lanes driven against it."""
    center_m: np.ndarray
    """``float64[point, 3]``."""
    left_m: np.ndarray
    """``float64[point, 3]``: boundary on the driver's left."""
    right_m: np.ndarray
    """``float64[point, 3]``: boundary on the driver's right."""
    width_m: np.ndarray
    """``float64[point]``: at a right angle to the reference line."""
    successor_offsets: np.ndarray
    """``int64[lane + 1]``: lane ``i`` leads to ``successors[successor_offsets[i]:successor_offsets[i + 1]]``."""
    successors: np.ndarray
    """``int32[edge]``: indices of lanes, ascending within a lane."""
    predecessor_offsets: np.ndarray
    """``int64[lane + 1]``: as ``successor_offsets``."""
    predecessors: np.ndarray
    """``int32[edge]``: the same edges, seen from where they lead to."""
    signals: Signals

    def __post_init__(self) -> None:
        num, num_points = len(self.ids), int(self.offsets[-1])
        _expect("ids", self.ids, (num, 3), "int32")
        _expect("offsets", self.offsets, (num + 1,), "int64")
        for name, dtype in _LANE_COLUMNS.items():
            _expect(name, getattr(self, name), (num,), dtype)
        for name in ("s_m", "width_m"):
            _expect(name, getattr(self, name), (num_points,), "float64")
        for name in ("center_m", "left_m", "right_m"):
            _expect(name, getattr(self, name), (num_points, 3), "float64")
        for name, offsets in (("successors", self.successor_offsets), ("predecessors", self.predecessor_offsets)):
            _expect(f"{name[:-1]}_offsets", offsets, (num + 1,), "int64")
            _expect(name, getattr(self, name), (int(offsets[-1]),), "int32")
        if num and np.diff(self.offsets).min() < 2:
            raise SchemaError("expected two or more points in every lane, found fewer; rebuild the lane graph")
        for name, lanes in (
            ("successors", self.successors),
            ("predecessors", self.predecessors),
            ("signals of lanes", self.signals.lanes),
        ):
            if len(lanes) and not 0 <= lanes.min() <= lanes.max() < num:
                raise SchemaError(f"expected {name} in [0, {num}), found others; rebuild the lane graph")

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.ids)

    @property
    def is_junction(self) -> np.ndarray:
        """``bool[lane]``: whether the lane crosses a junction."""
        return self.junction_id >= 0

    def is_type(self, *names: str) -> np.ndarray:
        """Return ``bool[lane]``: whether the lane is of one of these types."""
        wanted = [index for index, name in enumerate(self.types) if name in names]
        return np.isin(self.type_index, wanted)

    def points_of(self, lane: int) -> slice:
        """Return the rows of this lane's points."""
        return slice(int(self.offsets[lane]), int(self.offsets[lane + 1]))

    def successors_of(self, lane: int) -> np.ndarray:
        """Return the lanes that this one leads to: ``int32[lane]``."""
        return self.successors[self.successor_offsets[lane] : self.successor_offsets[lane + 1]]

    def predecessors_of(self, lane: int) -> np.ndarray:
        """Return the lanes that lead to this one: ``int32[lane]``."""
        return self.predecessors[self.predecessor_offsets[lane] : self.predecessor_offsets[lane + 1]]

    def index_of(self, road: int, section: int, lane: int) -> int:
        """Return the index of a lane by its OpenDRIVE ids, -1 where the map has no such lane."""
        (found,) = np.nonzero((self.ids == (road, section, lane)).all(axis=1))
        return int(found[0]) if len(found) else -1


_LANE_COLUMNS = {
    "is_along_s": "bool",
    "junction_id": "int32",
    "type_index": "int16",
    "speed_limit_mps": "float32",
    "has_speed_limit": "bool",
}


def _expect(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an array of another shape or dtype."""
    if array.shape != shape or array.dtype != dtype:
        raise SchemaError(
            f"expected {dtype}{list(shape)} as {name}, found {array.dtype}{list(array.shape)}; rebuild the lane graph"
        )
