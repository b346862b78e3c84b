"""A lane graph checks itself, and finds what it holds."""

from dataclasses import replace

import numpy as np
import pytest

from schemas.errors import SchemaError
from schemas.lanes import LaneGraph, Signals

SIGNALS = Signals(
    ids=("70", "71"),
    types=("1000001", "1000001"),
    controllers=("8", ""),
    position_m=np.zeros((2, 3)),
    heading_rad=np.zeros(2),
    lane_offsets=np.array([0, 2, 2]),
    lanes=np.array([0, 2], dtype=np.int32),
)
GRAPH = LaneGraph(
    ids=np.array([[1, 0, -1], [1, 1, -1], [7, 0, 2]], dtype=np.int32),
    is_along_s=np.array([True, True, False]),
    junction_id=np.array([-1, -1, 0], dtype=np.int32),
    types=("driving", "sidewalk"),
    type_index=np.array([0, 0, 1], dtype=np.int16),
    speed_limit_mps=np.zeros(3, dtype=np.float32),
    has_speed_limit=np.zeros(3, dtype=np.bool_),
    offsets=np.array([0, 2, 5, 7]),
    s_m=np.zeros(7),
    center_m=np.zeros((7, 3)),
    left_m=np.zeros((7, 3)),
    right_m=np.zeros((7, 3)),
    width_m=np.zeros(7),
    successor_offsets=np.array([0, 2, 2, 2]),
    successors=np.array([1, 2], dtype=np.int32),
    predecessor_offsets=np.array([0, 0, 1, 2]),
    predecessors=np.array([0, 0], dtype=np.int32),
    signals=SIGNALS,
)


def test_rows_of_different_lengths_are_found_by_lane_and_by_signal():
    assert GRAPH.points_of(1) == slice(2, 5)
    assert [GRAPH.successors_of(lane).tolist() for lane in range(3)] == [[1, 2], [], []]
    assert [GRAPH.predecessors_of(lane).tolist() for lane in range(3)] == [[], [0], [0]]
    assert [SIGNALS.lanes_of(signal).tolist() for signal in range(2)] == [[0, 2], []]


def test_lanes_are_found_by_their_ids_and_by_their_types():
    assert (GRAPH.num_lanes, GRAPH.index_of(7, 0, 2), GRAPH.index_of(7, 0, -2)) == (3, 2, -1)
    assert GRAPH.is_type("driving").tolist() == [True, True, False]
    assert GRAPH.is_type("median").tolist() == [False, False, False]
    assert GRAPH.is_junction.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"ids": np.zeros((3, 3))}, r"expected int32\[3, 3\] as ids, found float64\[3, 3\]"),
        ({"offsets": np.array([0, 2, 7])}, r"expected int64\[4\] as offsets, found int64\[3\]"),
        ({"offsets": np.array([0, 1, 5, 7])}, "two or more points in every lane"),
        ({"width_m": np.zeros(6)}, r"expected float64\[7\] as width_m"),
        ({"left_m": np.zeros((7, 2))}, r"expected float64\[7, 3\] as left_m"),
        ({"speed_limit_mps": np.zeros(3)}, r"expected float32\[3\] as speed_limit_mps"),
        ({"successors": np.zeros(1, dtype=np.int32)}, r"expected int32\[2\] as successors"),
        ({"successors": np.array([1, 3], dtype=np.int32)}, r"expected successors in \[0, 3\), found others"),
        ({"signals": replace(SIGNALS, lanes=np.array([0, 3], dtype=np.int32))}, r"expected signals of lanes in \[0, 3\)"),
    ],
)  # fmt: skip
def test_a_graph_of_other_shapes_is_refused(change, found):
    with pytest.raises(SchemaError, match=found):
        replace(GRAPH, **change)


def test_signals_of_other_lengths_are_refused():
    with pytest.raises(SchemaError, match=r"expected float64\[2, 3\] as position_m"):
        replace(SIGNALS, position_m=np.zeros((1, 3)))
