"""The specifications of planner arrays fit what the block function gives."""

import numpy as np
import pytest

from pipeline.planner_arrays import planner_specs
from schemas.planner import EXTRAS, MASKS, NORMALIZATION, TENSORS, PlannerParams
from tasks.planner import planner_block
from tests.tasks.planner_scenes import drive, line, make_graph, make_tracks


@pytest.mark.parametrize(
    "params", [PlannerParams(), PlannerParams(past_steps=4, future_steps=3, num_agents=2, num_lanes=3, num_points=5)]
)
def test_every_array_of_a_block_has_its_specification_and_none_is_missing(params):
    graph = make_graph([{"center": line((0, 0), (60, 0))}])
    block = planner_block(make_tracks(drive(line((0, 0), (60, 0)), 3.0, 40)), graph, np.arange(10, 14), params)
    specs = planner_specs(params, 64)
    assert {spec.name for spec in specs} == set(block) == {*TENSORS, *MASKS, *EXTRAS}
    for spec in specs:
        spec.check(block[spec.name])
        assert spec.dims[0] == "step"
        assert (spec.chunk_steps, spec.codec) in ((1, "blosc:zstd"), (64, "raw"))
    # One size per dimension name, as a Dataset demands.
    sizes = {side: size for spec in specs for side, size in zip(spec.dims[1:], spec.row_shape)}
    assert all(sizes[side] == size for spec in specs for side, size in zip(spec.dims[1:], spec.row_shape))


def test_features_are_named_and_have_units():
    specs = {spec.name: dict(spec.attributes) for spec in planner_specs(PlannerParams(), 64)}
    past = specs["neighbor_agents_past"]
    assert past["features"][6:8] == ["width", "length"]
    assert past["feature_units"] == ["m", "m", "1", "1", "m/s", "m/s", "m", "m", "1", "1", "1"]
    assert specs["lanes_speed_limit"]["units"] == "m/s"
    normalized = {
        spec.name: dict(spec.attributes) for spec in planner_specs(PlannerParams(), 64, scaled=tuple(NORMALIZATION))
    }
    assert set(normalized["lanes"]["feature_units"]) == {"1"}
    assert normalized["ego_agent_future"]["feature_units"] == ["m", "m", "rad"]
