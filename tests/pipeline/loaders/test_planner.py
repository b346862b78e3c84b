"""Planner batches: perturbed, normalised anew, and as windows over the ego's trajectory."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.loaders import PlannerDataset, PlannerLoader, WindowLoader
from pipeline.planner_arrays import planner_specs
from schemas.errors import SchemaError, UsageError
from schemas.planner import NORMALIZATION, TENSORS, PlannerParams
from tasks.order import uniforms
from tasks.planner_augment import Perturbation
from tasks.planner_normalize import normalization_to_json, normalize_observation
from tests.pipeline.store_builder import row_spec, write_dataset
from tests.tasks.test_planner_augment import reference

PARAMS = PlannerParams(
    past_steps=3, future_steps=30, num_agents=4, num_static=2, num_lanes=5, num_route_lanes=3, num_points=4
)
LENGTHS = (40, 25)
ANCHORS = np.array([*range(3, 20), *range(42, 58)])
WHOLE = 7
"""Anchors from this one on have a future of which the last 5 steps were not recorded."""


def planner_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Return random tensors in physical units, with rows of zeros among them; zero where a step is no sample."""
    rng = np.random.default_rng(seed)
    num = sum(LENGTHS)
    out = {}
    for spec in planner_specs(PARAMS, 16):
        rows = (
            rng.normal(0, 8, (num, *spec.row_shape))
            if spec.dtype == "float32"
            else rng.random((num, *spec.row_shape)) < 0.5
        )
        out[spec.name] = rows.astype(spec.dtype)
    out["neighbor_agents_past"][:, -1] = out["lanes"][:, -1] = out["neighbor_agents_future"][:, 1, -9:] = 0
    speed = rng.uniform(0, 9, num)
    out["ego_current_state"][:] = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    out["ego_current_state"][:, 4:] = np.column_stack([speed, *rng.normal(0, 0.3, (5, num))])
    turn = np.cumsum(rng.normal(0, 0.02, (num, 30)), axis=1)
    path = [np.cumsum(0.1 * speed[:, None] * f(turn), axis=1) for f in (np.cos, np.sin)]
    out["ego_agent_future"] = np.stack([*path, turn], axis=-1).astype(np.float32)
    out["ego_agent_future_valid"][:] = True
    out["ego_agent_future_valid"][ANCHORS[WHOLE:], -5:] = False
    out["ego_agent_future"][~out["ego_agent_future_valid"]] = 0
    for rows in out.values():
        rows[np.setdiff1d(np.arange(num), ANCHORS)] = 0
    return out


def build(root: Path, normalize: str = "none", seed: int = 0) -> tuple[Path, dict[str, np.ndarray]]:
    physical = planner_arrays(seed)
    stored = normalize_observation(physical) if normalize == "published" else physical
    num, ends = sum(LENGTHS), np.cumsum(LENGTHS, dtype=np.int64)
    rows = {
        "state": np.arange(num * 2, dtype=np.float32).reshape(num, 2),
        "actions": np.zeros((num, 1), np.float32),
        "timestamp_s": np.arange(num) / 10.0,
        **{name: np.zeros(num, np.int32) for name in ("episode_index", "task_index", "source_step")},
        "align_error_s": np.zeros(num, np.float32),
        "valid": np.ones(num, bool),
        "is_anchor": np.isin(np.arange(num), ANCHORS),
        "row_size": np.array(LENGTHS, np.int64),
        "episode_ends": ends,
    }
    specs = {
        name: row_spec(
            name, str(v.dtype), v.shape[1:], chunk_steps=8, shard_steps=64, dim="step" if len(v) == num else "episode"
        )
        for name, v in rows.items()
    }
    specs |= {spec.name: spec for spec in planner_specs(PARAMS, 16)}
    recipe = {"planner": {"normalize": normalize}}
    write_dataset(root, specs, {**rows, **stored}, LENGTHS, shard_steps=16, recipe=recipe)
    return root, physical


SIZES = {"past_neighbor_num": 4, "predicted_neighbor_num": 3, "future_len": 12}


@pytest.fixture(scope="module", params=["none", "published"])
def built(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp(request.param) / "out", request.param)


def plain_uniforms(number: int, seed: int, epoch: int) -> list[float]:
    """Ten numbers in plain integers."""
    keys = [int(k) for k in np.random.SeedSequence(seed, spawn_key=(epoch, 0x706572)).generate_state(8, np.uint64)]
    out = []
    for k in range(10):
        value = (number * 10 + k) % 2**64
        for key in keys[:2]:
            value = (value + key) % 2**64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
            value ^= value >> 31
        out.append((value >> 11) / 2**53)
    return out


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.integers(0, 2**31), st.integers(0, 9))
def test_draws_are_what_plain_integers_give(numbers, seed, epoch):
    found = uniforms(np.array(numbers), 10, seed=seed, epoch=epoch, part=(0x706572,))
    np.testing.assert_array_equal(found, [plain_uniforms(number, seed, epoch) for number in numbers])


def test_draws_are_uniform_and_independent_of_their_neighbours():
    found = uniforms(np.arange(20_000), 10, seed=3, epoch=1)
    assert found.min() >= 0 and found.max() < 1
    np.testing.assert_allclose(found.mean(axis=0), 0.5, atol=0.01)
    assert np.abs(np.corrcoef(found.T) - np.eye(10)).max() < 0.03
    assert abs(np.corrcoef(found[:-1, 0], found[1:, 0])[0, 1]) < 0.03


def expected_batch(physical, epoch, seed=5):
    """Perturb all anchors row by row in plain numbers, and cut."""
    batch = {name: physical[name][ANCHORS] for name in TENSORS}
    draws = np.array([plain_uniforms(int(step), seed, epoch) for step in ANCHORS])
    out = reference(batch, draws[:, 1:], draws[:, 0] >= 0.5)
    out["ego_agent_future"][~physical["ego_agent_future_valid"][ANCHORS]] = 0
    out["neighbor_agents_future"] = out["neighbor_agents_future"][:, :3, :12]
    out["ego_agent_future"] = out["ego_agent_future"][:, :12]
    return out


def epoch_of(root, batch_size, *, epochs=1, **options):
    """Return the last of some epochs in the order of the samples."""
    loader = PlannerLoader(root, batch_size, seed=1, tail="keep", **SIZES, **options)
    for _ in range(epochs):
        batches = list(loader)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return {name: rows[np.argsort(joined["index"])] for name, rows in joined.items()}


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_perturbed_epoch_is_what_the_contract_gives_row_by_row(built, epoch):
    root, physical = built
    found = epoch_of(root, 7, epochs=epoch + 1, physical=True, perturbation=Perturbation(), perturbation_seed=5)
    expected = expected_batch(physical, epoch)
    np.testing.assert_array_equal(found["index"], ANCHORS)
    moved = (expected["lanes"] != physical["lanes"][ANCHORS]).any(axis=(1, 2, 3))
    assert 5 < moved.sum() < len(ANCHORS) - 5
    for name in TENSORS:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-4, err_msg=name)


def test_batch_size_threads_and_order_do_not_change_a_perturbation(built):
    root, _ = built
    options = {"perturbation": Perturbation(probability=0.8)}
    first = epoch_of(root, 3, threads=3, **options)
    for other in (epoch_of(root, 33, threads=1, shuffle=False, **options), epoch_of(root, 8, threads=2, **options)):
        for name in first:
            np.testing.assert_array_equal(first[name], other[name])
    data = PlannerDataset(root, **SIZES, **options)
    data.set_epoch(0)
    for name, rows in zip(TENSORS, zip(*(data[k] for k in range(len(data))))):
        np.testing.assert_array_equal(np.stack(rows), first[name])
    data.set_epoch(1)
    later = pickle.loads(pickle.dumps(data))
    second = epoch_of(root, 5, epochs=2, **options)
    np.testing.assert_array_equal(np.stack([later[k][4] for k in range(len(later))]), second["lanes"])
    assert not np.array_equal(first["lanes"], second["lanes"])


def test_samples_left_alone_are_those_of_a_loader_without_perturbation(built):
    root, _ = built
    plain, found = epoch_of(root, 9), epoch_of(root, 9, perturbation=Perturbation(probability=0.0))
    for name in plain:
        np.testing.assert_array_equal(found[name], plain[name])


def test_several_datasets_are_perturbed_as_each_alone(tmp_path):
    options = {"perturbation": Perturbation(probability=1.0), **SIZES}
    roots = [build(tmp_path / str(seed), seed=seed)[0] for seed in range(2)]
    alone = [epoch_of(root, 33, epochs=2, perturbation=options["perturbation"]) for root in roots]
    mixed = PlannerLoader([(root, 1.0) for root in roots], 11, seed=2, **options)
    list(mixed)
    for batch in mixed:  # epoch 1
        for number, rows in enumerate(alone):
            mine = batch["dataset"] == number
            place = np.searchsorted(ANCHORS, batch["index"][mine])
            np.testing.assert_array_equal(batch["lanes"][mine], rows["lanes"][place])


def test_a_future_that_is_too_short_to_perturb_is_refused(built):
    loader = PlannerLoader(built[0], 4, perturbation=Perturbation(num_steps=30, probability=1.0), **SIZES)
    with pytest.raises(SchemaError, match="a future of more than 30 steps, found 30"):
        next(iter(loader))


def test_observations_come_normalised_by_a_given_file(built, tmp_path):
    root, physical = built
    other = {
        name: replace(scaling, mean=tuple(value + 1 for value in scaling.mean))
        for name, scaling in NORMALIZATION.items()
    }
    path = tmp_path / "normalization.json"
    path.write_text(json.dumps(normalization_to_json(other)))
    found = epoch_of(root, 8, normalization=path)
    for name in TENSORS:
        rows = physical[name][ANCHORS][tuple(slice(0, side) for side in (None, *found[name].shape[1:]))].astype(
            np.float64
        )
        if name in other:
            scaled = (rows - other[name].mean) / np.array(other[name].std)
            rows = np.where((rows == 0).all(axis=-1, keepdims=True), 0, scaled)
        np.testing.assert_allclose(found[name], rows, atol=2e-5, err_msg=name)
    with pytest.raises(UsageError, match="found both"):
        PlannerLoader(root, 2, physical=True, normalization=path)
    path.write_text("{")
    with pytest.raises(UsageError, match=r"expected a normalization\.json"):
        PlannerLoader(root, 2, normalization=path)


def plain_trajectory(physical, step, horizon):
    poses = [(0.0, 0.0, 0.0), *(tuple(map(float, pose)) for pose in physical["ego_agent_future"][step])][:horizon]
    valid = [True, *physical["ego_agent_future_valid"][step]][:horizon]
    return [(x, y, np.cos(h), np.sin(h)) for x, y, h in poses], valid


@pytest.mark.parametrize("horizon", [1, 8, 31])
def test_diffuser_plans_over_the_ego_trajectory_of_each_sample(built, horizon):
    root, physical = built
    loader = WindowLoader(
        root,
        64,
        layout="diffuser",
        horizon=horizon,
        actions="",
        obs={"ego": "ego_trajectory"},
        shuffle=False,
        tail="keep",
    )
    (batch,) = list(loader)
    np.testing.assert_array_equal(batch["index"], ANCHORS)
    for row, step in enumerate(ANCHORS):
        poses, valid = plain_trajectory(physical, step, horizon)
        expected = [pose if is_there else (0, 0, 0, 0) for pose, is_there in zip(poses, valid)]
        np.testing.assert_allclose(batch["trajectories"][row], expected, atol=1e-6)
        np.testing.assert_array_equal(batch["is_pad"][row], ~np.array(valid))
    np.testing.assert_array_equal(batch["conditions"][0], [[0, 0, 1, 0]] * len(ANCHORS))


def test_diffusion_policy_takes_the_ego_trajectory_as_actions(built):
    root, physical = built
    loader = WindowLoader(
        root,
        64,
        horizon=31,
        num_obs_steps=2,
        actions="ego_trajectory",
        obs={"state": "state"},
        shuffle=False,
        tail="keep",
    )
    (batch,) = list(loader)
    state = np.arange(sum(LENGTHS) * 2).reshape(-1, 2)
    for row, step in enumerate(ANCHORS):
        poses, valid = plain_trajectory(physical, step, 31)
        last = max(k for k in range(31) if valid[k])
        np.testing.assert_allclose(batch["action"][row], [*poses[: last + 1], *[poses[last]] * (30 - last)], atol=1e-6)
        np.testing.assert_array_equal(batch["obs"]["state"][row], state[step : step + 2])
    with pytest.raises(UsageError, match="a horizon of at most 31 steps of ego_trajectory, found 32"):
        WindowLoader(root, 4, horizon=32, actions="ego_trajectory")


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30))
def test_neighbours_and_futures_are_cut_to_what_is_asked(one_built, past, predicted, future):
    root, physical = one_built
    data = PlannerDataset(root, past_neighbor_num=past, predicted_neighbor_num=predicted, future_len=future)
    sample = dict(zip(TENSORS, data[4]))
    step = ANCHORS[4]
    np.testing.assert_array_equal(sample["neighbor_agents_past"], physical["neighbor_agents_past"][step, :past])
    np.testing.assert_array_equal(
        sample["neighbor_agents_future"], physical["neighbor_agents_future"][step, :predicted, :future]
    )
    np.testing.assert_array_equal(sample["ego_agent_future"], physical["ego_agent_future"][step, :future])


@pytest.fixture(scope="module")
def one_built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("one") / "out")
