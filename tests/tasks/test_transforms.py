"""Transforms of state and actions: worked constants, and the way back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tasks.normalize import z_score
from tasks.transforms import (
    AlohaToPi,
    Chain,
    ConvertRotation,
    DeltaActions,
    Inverse,
    Normalize,
    PadToModel,
    ScaleColumns,
    Transform,
    delta_mask,
)

STATS = {
    "norm_stats": {
        "state": {"mean": [1.0, 2.0, 3.0], "std": [1.0, 2.0, 0.0], "q01": [0.0, 0.0, 0.0], "q99": [2.0, 4.0, 8.0]},
        "actions": {"mean": [0.0] * 3, "std": [1.0] * 3, "q01": [-1.0] * 3, "q99": [1.0] * 3},
    }
}


def read_only(values: Any, dtype: type = np.float64) -> np.ndarray:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


def batch(seed: int, state_dim: int, action_dim: int, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return read_only(rng.random((3, state_dim)), dtype), read_only(rng.random((3, 5, action_dim)), dtype)


def test_delta_actions_are_relative_to_the_state_at_the_start_of_the_chunk() -> None:
    state, actions = read_only([[10, 20, 30]]), read_only([[[11, 21, 31], [12, 22, 32]]])
    found, delta = DeltaActions(delta_mask(1, -1, 1))(state, actions)
    assert found is state
    np.testing.assert_array_equal(delta, [[[1, 21, 1], [2, 22, 2]]])
    np.testing.assert_array_equal(DeltaActions((True,))(state, actions)[1], [[[1, 21, 31], [2, 22, 32]]])
    np.testing.assert_array_equal(Inverse(DeltaActions((True, False, True)))(state, delta)[1], actions)


def test_a_mask_longer_than_the_values_is_refused() -> None:
    with pytest.raises(SchemaError, match="as the mask has"):
        DeltaActions((True,) * 4)(np.zeros((1, 4)), np.zeros((1, 2, 3)))


def test_aloha_joints_turn_and_grippers_become_the_angles_of_pi0() -> None:
    # worked by hand from the crank: at 58 mm horn and arm are in line, asin(1) = pi / 2; at 18.44 mm
    # asin((0.022^2 + 0.01844^2 - 0.036^2) / (2 * 0.022 * 0.01844)) = asin(-0.5817000) = -0.6207999
    state = read_only([[1.0] * 6 + [0.0] + [1.0] * 6 + [1.0]])
    found, actions = AlohaToPi()(state, read_only(np.ones((1, 2, 14))))
    joints = [1, -1, -1, 1, 1, 1]
    np.testing.assert_array_equal(found[0, :6], joints)
    np.testing.assert_array_equal(found[0, 7:13], joints)
    sine = (0.000484 + 0.0003400336 - 0.001296) / 0.00081136
    closed = (np.arcsin(sine) - 0.5476) / 1.0820
    assert found[0, 6] == pytest.approx(closed, abs=1e-12)
    assert closed == pytest.approx(-1.0797, abs=2e-4)
    assert found[0, 13] == pytest.approx((np.pi / 2 - 0.5476) / 1.0820, abs=1e-6)
    np.testing.assert_array_equal(actions[0, 0, :6], joints)
    np.testing.assert_allclose(actions[0, :, 6], 1.4910 - 0.5476, atol=1e-12)
    closed_action = AlohaToPi()(state, np.zeros((1, 1, 14)))[1][0, 0, 13]
    assert closed_action == pytest.approx(-0.6213 - 0.5476, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
def test_aloha_comes_back(seed: int, dtype: type) -> None:
    state, actions = batch(seed, 14, 14, dtype)
    back = AlohaToPi().invert(*AlohaToPi()(state, actions))
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    np.testing.assert_allclose(back[0], state, atol=tolerance)
    np.testing.assert_allclose(back[1], actions, atol=tolerance)
    assert back[0].dtype == back[1].dtype == dtype


def test_aloha_clips_what_is_further_open_than_open() -> None:
    found, _ = AlohaToPi()(np.full((1, 14), 1.1), np.zeros((1, 1, 14)))
    assert found[0, 6] == pytest.approx((np.pi / 2 - 0.5476) / 1.0820, abs=1e-12)


def test_gripper_conventions() -> None:
    state, actions = read_only([[0.0, 1.0, 0.25]]), read_only([[[5.0, 1.0], [5.0, -1.0]]])
    turned = ScaleColumns.between((0, 1), (1, 0), state=(0, 2))(state, actions)
    np.testing.assert_array_equal(turned[0], [[1, 1, 0.75]])
    assert turned[1] is actions
    unit = ScaleColumns.between((-1, 1), (0, 1), actions=(1,))(state, actions)
    np.testing.assert_array_equal(unit[1], [[[5, 1], [5, 0]]])
    for wrong in (lambda: ScaleColumns(scale=0), lambda: ScaleColumns.between((1, 1), (0, 1))):
        with pytest.raises(SchemaError):
            wrong()
    with pytest.raises(SchemaError, match="expected columns"):
        ScaleColumns(scale=2, state=(3,))(state, actions)


def test_columns_after_a_rotation_move_along() -> None:
    # two arms: position, quaternion, gripper
    row = [1, 2, 3, 0, 0, 0, 1, 9]
    state = read_only([row + [n + 10 for n in row[:3]] + [1, 0, 0, 0, 8]])
    change = ConvertRotation(source="quat_xyzw", target="axis_angle", state=(3, 11))
    found, _ = change(state, np.zeros((1, 1, 2)))
    np.testing.assert_allclose(found, [[1, 2, 3, 0, 0, 0, 9, 11, 12, 13, np.pi, 0, 0, 8]], atol=1e-15)
    np.testing.assert_allclose(change.invert(found, np.zeros((1, 1, 2)))[0], state, atol=1e-15)
    with pytest.raises(SchemaError, match="found fewer columns"):
        ConvertRotation(source="quat_xyzw", target="matrix", state=(13,))(state, np.zeros((1, 1, 2)))
    with pytest.raises(SchemaError, match="one after the other"):
        ConvertRotation(source="quat_xyzw", target="matrix", state=(3, 5))


def test_normalize_by_openpis_formulas() -> None:
    state, actions = read_only([[2.0, 4.0, 3.0]]), read_only([[[0.5, 0.0, -0.5]]])
    found, _ = Normalize.from_norm_stats(STATS, "zscore")(state, actions)
    np.testing.assert_allclose(found, [[1 / 1.000001, 2 / 2.000001, 0]], rtol=1e-15)
    found, chunk = Normalize.from_norm_stats(STATS, "quantile")(state, actions)
    np.testing.assert_allclose(found, [[4 / 2.000001 - 1, 8 / 4.000001 - 1, 6 / 8.000001 - 1]], rtol=1e-15)
    np.testing.assert_allclose(chunk, [[[3 / 2.000001 - 1, 2 / 2.000001 - 1, 1 / 2.000001 - 1]]], rtol=1e-12)
    only = Normalize(state=z_score([1.0], [1.0]))(read_only([[3.0]]), actions)
    assert only[1] is actions
    for content, method in (
        (STATS, "minmax"),
        ({"norm_stats": {"state": {"mean": [1], "std": None}}}, "zscore"),
        ({}, "zscore"),
    ):
        with pytest.raises(SchemaError):
            Normalize.from_norm_stats(content, method)


def test_padding_is_zero_and_is_cut_off_again() -> None:
    state, actions = batch(0, 7, 8)
    pad = PadToModel(7, 8, 32)
    wide = pad(state, actions)
    assert [part.shape for part in wide] == [(3, 32), (3, 5, 32)]
    assert not wide[0][:, 7:].any() and not wide[1][..., 8:].any()
    np.testing.assert_array_equal(pad.invert(*wide)[1], actions)
    assert PadToModel(7, 8, 4)(state, actions)[0].shape == (3, 7)
    with pytest.raises(SchemaError, match="expected 7 and 7"):
        PadToModel(7, 7)(state, actions)


CHAINS: dict[str, tuple[int, tuple[Transform, ...]]] = {
    "delta": (7, (DeltaActions(delta_mask(6, -1)),)),
    "gripper": (7, (ScaleColumns.between((0, 1), (1, -1), state=(6,), actions=(6,)),)),
    "rotation": (8, (ConvertRotation(source="quat_wxyz", target="rot6d_rows", state=(3,)), PadToModel(10, 8))),
    "normalize": (3, (Normalize.from_norm_stats(STATS, "quantile"),)),
    "aloha": (14, (AlohaToPi(), DeltaActions(delta_mask(6, -1, 6, -1)), PadToModel(14, 14))),
    "inverse": (14, (Inverse(AlohaToPi()),)),
}


@pytest.mark.parametrize("name", CHAINS)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_chain_leads_back_and_writes_to_no_input(name: str, seed: int) -> None:
    dim, transforms = CHAINS[name]
    state, actions = batch(seed, dim, dim)
    if name == "rotation":
        quat = state[:, 3:7] / np.linalg.norm(state[:, 3:7], axis=1, keepdims=True)  # w >= 0, as all are
        state = read_only(np.concatenate([state[:, :3], quat, state[:, 7:]], axis=1))
    if name == "inverse":
        state = read_only(0.2 + 0.1 * state)  # angles that the crank can take
    chain = Chain(transforms)
    there = chain(state, actions)
    for part in there:
        part.flags.writeable = False
    back = chain.invert(*there)
    np.testing.assert_allclose(back[0], state, atol=1e-9)
    np.testing.assert_allclose(back[1], actions, atol=1e-9)
