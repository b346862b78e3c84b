"""Normalisation of planner observations: constants, zero rows, inverse, file."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from schemas.planner import FEATURES, NORMALIZATION, TARGET_NORMALIZATION, Scaling
from tasks.planner_normalize import (
    denormalize_observation,
    normalization_from_json,
    normalization_to_json,
    normalize_observation,
)


@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(NORMALIZATION)))
def test_rows_are_shifted_and_scaled_and_zero_rows_stay(seed, name):
    rng = np.random.default_rng(seed)
    scaling = NORMALIZATION[name]
    rows = rng.normal(0, 50, (3, 4, len(scaling.mean))).astype(np.float32)
    rows[rng.random((3, 4)) < 0.4] = 0
    rows.flags.writeable = False
    found = normalize_observation({name: rows, "ego_agent_future": rows})
    expected = (rows.astype(np.float64) - scaling.mean) / scaling.std
    expected[(rows == 0).all(axis=-1)] = 0
    np.testing.assert_array_equal(found[name], expected.astype(np.float32))
    assert found["ego_agent_future"] is rows
    back = denormalize_observation(found)[name]
    np.testing.assert_allclose(back, rows, atol=2e-5)
    np.testing.assert_array_equal((back == 0).all(axis=-1), (rows == 0).all(axis=-1))


def test_the_constants_are_the_published_ones():
    data = normalization_to_json()
    assert list(data) == [
        "ego", "neighbor", "ego_current_state", "neighbor_agents_past", "static_objects",
        "lanes", "lanes_speed_limit", "route_lanes", "route_lanes_speed_limit",
    ]  # fmt: skip
    assert data["ego"] == data["neighbor"] == {"mean": [10, 0, 0, 0], "std": [20, 20, 1, 1]}
    assert data["lanes"] == {"mean": [10] + [0] * 11, "std": [20] * 8 + [1] * 4}
    assert data["neighbor_agents_past"]["std"] == [20, 20, 1, 1, 20, 20, 20, 20, 1, 1, 1]
    assert data["ego_current_state"]["std"] == [20, 20, 1, 1, 20, 20, 20, 20, 1, 1]
    assert data["static_objects"]["std"] == [20, 20, 1, 1, 20, 20, 1, 1, 1, 1]
    assert data["lanes_speed_limit"] == {"mean": [0], "std": [20]}
    for name, features in FEATURES.items():
        if name in NORMALIZATION:
            assert len(NORMALIZATION[name].mean) == len(features)


def test_a_file_of_constants_is_read_back_strictly():
    data = json.loads(json.dumps(normalization_to_json()))
    assert normalization_from_json(data) == (dict(NORMALIZATION), dict(TARGET_NORMALIZATION))
    with pytest.raises(SchemaError, match="found agents"):
        normalization_from_json({**data, "agents": data["ego"]})
    with pytest.raises(SchemaError, match="expected 12 numbers for lanes, found 8"):
        normalization_from_json({"lanes": {"mean": [0] * 8, "std": [1] * 8}})
    with pytest.raises(SchemaError, match="expected mean and std of 12 numbers"):
        normalization_from_json({"lanes": {"mean": 10}})
    with pytest.raises(SchemaError, match="all above 0"):
        Scaling(mean=(1.0,), std=(0.0,))
    with pytest.raises(SchemaError, match="expected 12 features of lanes"):
        normalize_observation({"lanes": np.zeros((1, 8), np.float32)})
