"""Diffusion Planner's normalization.json, computed and published."""

import json

import numpy as np
import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import PlannerLoader
from pipeline.stats_export import stats_file
from schemas.errors import DatasetError, UsageError
from schemas.planner import NORMALIZATION
from tests.pipeline.loaders.test_planner import ANCHORS, build
from tests.pipeline.planner_caches import write_cache
from tests.pipeline.store_builder import build_dataset

KEYS = ["ego", "neighbor", *NORMALIZATION]
KEPT = {
    "ego": [2, 3],
    "neighbor": [2, 3],
    "ego_current_state": [0, 1, 2, 3],  # x and y are 0 in every row
    "neighbor_agents_past": [2, 3, 8, 9, 10],
    "static_objects": [2, 3, 6, 7, 8, 9],
    "lanes": [8, 9, 10, 11],
    "route_lanes": [8, 9, 10, 11],
}
"""Cosine and sine, flags, and what never changes: mean 0, deviation 1."""


def rows_of(physical):
    """Return the rows that count, as the contract writes them, with NumPy alone."""
    out = {}
    for key, name, num in (("ego", "ego_agent_future", None), ("neighbor", "neighbor_agents_future", 10)):
        future, valid = physical[name][ANCHORS], physical[f"{name}_valid"][ANCHORS]
        if num:
            future, valid = future[:, :num], valid[:, :num]
        x, y, heading = np.moveaxis(future[valid].astype(np.float64), -1, 0)
        out[key] = np.stack([x, y, np.cos(heading), np.sin(heading)], axis=1)
    for name in NORMALIZATION:
        flat = physical[name][ANCHORS].reshape(-1, physical[name].shape[-1]).astype(np.float64)
        out[name] = flat[(flat != 0).any(axis=1)]
    return out


@pytest.mark.parametrize("normalize", ["none", "published"])
def test_means_and_deviations_are_those_of_the_rows_that_are_there(tmp_path, normalize):
    root, physical = build(tmp_path / "out", normalize)
    found = json.loads(stats_file(root, "diffusion-planner"))
    assert list(found) == KEYS
    for name, rows in rows_of(physical).items():
        mean, std = rows.mean(axis=0), rows.std(axis=0)
        mean[KEPT.get(name, [])], std[KEPT.get(name, [])] = 0, 1
        np.testing.assert_allclose(found[name]["mean"], mean, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(found[name]["std"], std, atol=1e-4, err_msg=name)
    path = tmp_path / "normalization.json"
    path.write_text(json.dumps(found))
    options = {"past_neighbor_num": 4, "predicted_neighbor_num": 4, "future_len": 30, "tail": "keep"}
    batches = list(PlannerLoader(root, 16, normalization=path, **options))
    lanes = np.concatenate([batch["lanes"] for batch in batches]).reshape(-1, 12)
    lanes = lanes[lanes.any(axis=1)]
    np.testing.assert_allclose(lanes[:, :8].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(lanes[:, :8].std(axis=0), 1, atol=1e-4)


def test_published_constants_are_the_papers(tmp_path):
    root, _ = build(tmp_path / "out")
    found = json.loads(stats_file(root, "diffusion-planner", published=True))
    assert list(found) == KEYS
    assert found["ego"] == {"mean": [10, 0, 0, 0], "std": [20, 20, 1, 1]}
    assert found["lanes"] == {"mean": [10, *[0] * 11], "std": [20] * 8 + [1] * 4}
    assert found["ego_current_state"]["std"] == [20, 20, 1, 1, 20, 20, 20, 20, 1, 1]


def test_a_cache_of_other_features_has_its_own_statistics(tmp_path):
    def flags(seed):
        return {"lanes": np.concatenate([np.random.default_rng(seed).normal(0, 9, (5, 4, 8)), np.eye(6)[seed % 6] * np.ones((5, 4, 6))], -1).astype(np.float32)}  # fmt: skip

    samples = write_cache(tmp_path / "raw", 20, extra=flags)
    convert(tmp_path / "raw", tmp_path / "out", "planner-npz", cluster=ClusterOptions(workers=0))
    found = json.loads(stats_file(tmp_path / "out", "diffusion-planner"))
    lanes = np.concatenate([sample["lanes"].reshape(-1, 14) for sample in samples.values()]).astype(np.float64)
    np.testing.assert_allclose(found["lanes"]["mean"], [*lanes[:, :8].mean(axis=0), *[0] * 6], atol=1e-9)
    np.testing.assert_allclose(found["lanes"]["std"], [*lanes[:, :8].std(axis=0), *[1] * 6], atol=1e-9)
    future = np.concatenate([sample["neighbor_agents_future"].reshape(-1, 3) for sample in samples.values()])
    future = future[(future != 0).any(axis=1)].astype(np.float64)
    np.testing.assert_allclose(found["neighbor"]["mean"][:2], future[:, :2].mean(axis=0), atol=1e-6)
    path = tmp_path / "normalization.json"
    path.write_text(json.dumps(found))
    options = {"past_neighbor_num": 3, "predicted_neighbor_num": 3, "future_len": 24}
    next(iter(PlannerLoader(tmp_path / "out", 4, normalization=path, **options)))


def test_other_datasets_and_flags_are_refused(tmp_path):
    frames = build_dataset(tmp_path / "frames").root
    with pytest.raises(DatasetError, match="expected the planner's tensors"):
        stats_file(frames, "diffusion-planner")
    with pytest.raises(UsageError, match="--published with diffusion-planner alone"):
        stats_file(frames, "lerobot", published=True)
