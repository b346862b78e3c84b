"""Tracks on the planner's grid: angles, gaps, jumps, flags."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from schemas.planner import PlannerParams
from schemas.tracks import LightState
from tasks.planner_tracks import clean_tracks, differentiate, resample_tracks, turn_vectors, wrap_angle
from tests.tasks.planner_scenes import make_tracks

PARAMS = PlannerParams()


@given(st.floats(-50, 50))
def test_an_angle_is_wrapped_to_the_same_direction(angle):
    wrapped = float(wrap_angle(np.array(angle)))
    assert -np.pi < wrapped <= np.pi
    np.testing.assert_allclose([np.cos(wrapped), np.sin(wrapped)], [np.cos(angle), np.sin(angle)], atol=1e-12)


def test_steps_recorded_on_the_grid_are_taken_bit_for_bit():
    poses = np.random.default_rng(0).normal(size=(30, 3)).cumsum(axis=0) * 0.1
    tracks = make_tracks(poses, [{"poses": poses + 3}])
    grid = resample_tracks(tracks, PARAMS)
    for name, array in tracks.arrays().items():
        if name not in ("ego_rotation", "actor_heading", "time_s"):
            np.testing.assert_array_equal(grid.arrays()[name], array, err_msg=name)
    np.testing.assert_allclose(grid.ego_rotation, wrap_angle(tracks.ego_rotation), atol=1e-15)
    assert not grid.is_interpolated.any()


def test_angles_take_the_shorter_way():
    poses = np.zeros((3, 3))
    poses[:, 2] = [3.0, -3.0, -2.0]
    grid = resample_tracks(make_tracks(poses, [{"poses": poses}], time_s=[0, 0.2, 0.4]), PARAMS)
    np.testing.assert_allclose(grid.ego_rotation[:, 2], [3.0, np.pi, -3.0, -2.5, -2.0])
    np.testing.assert_allclose(grid.actor_heading[:, 0], grid.ego_rotation[:, 2])
    np.testing.assert_array_equal(grid.is_interpolated, [False, True, False, True, False])


@given(seed=st.integers(0, 10_000))
def test_mixtures_are_those_of_interpolation_by_time(seed):
    rng = np.random.default_rng(seed)
    time_s = np.concatenate([[0], np.cumsum(rng.uniform(0.02, 0.4, 40))])
    poses = np.cumsum(rng.normal(0, 0.1, (41, 3)), axis=0)
    grid = resample_tracks(make_tracks(poses, [{"poses": 2 * poses}], time_s=time_s), PARAMS)
    at = np.arange(grid.num_steps) / 10
    np.testing.assert_allclose(grid.time_s, at)
    np.testing.assert_allclose(grid.ego_position[:, 0], np.interp(at, time_s, poses[:, 0]), atol=1e-9)
    np.testing.assert_allclose(grid.actor_position[:, 0, 1], np.interp(at, time_s, 2 * poses[:, 1]), atol=1e-9)
    unwrapped = np.interp(at, time_s, poses[:, 2])
    np.testing.assert_allclose(wrap_angle(grid.ego_rotation[:, 2] - unwrapped), 0, atol=1e-9)
    np.testing.assert_array_equal(np.abs(time_s[grid.source_step] - at), np.abs(time_s[:, None] - at).min(axis=0))


def test_an_actor_is_mixed_only_between_steps_that_both_have_it():
    valid = np.array([True, True, False, True, True])
    tracks = make_tracks(
        np.zeros((5, 3)), [{"poses": np.arange(15.0).reshape(5, 3), "valid": valid}], time_s=np.arange(5) * 0.2
    )
    grid = resample_tracks(tracks, PARAMS)
    np.testing.assert_array_equal(grid.actor_valid[:, 0], [True, True, True, False, False, False, True, True, True])
    np.testing.assert_array_equal(grid.actor_position[~grid.actor_valid], 0)


def test_lights_hold_their_last_recorded_state():
    states = [LightState.RED, LightState.GREEN, LightState.YELLOW]
    grid = resample_tracks(make_tracks(np.zeros((3, 3)), lights=[("s", states)], time_s=[0, 0.25, 0.5]), PARAMS)
    np.testing.assert_array_equal(grid.light_state[:, 0], [2, 2, 2, 0, 0, 1])


def test_nothing_is_mixed_across_a_long_gap():
    poses = np.stack([np.arange(6.0), np.zeros(6), np.zeros(6)], 1)
    grid = resample_tracks(make_tracks(poses, time_s=[0, 0.1, 0.2, 0.95, 1.05, 1.1]), PARAMS)
    np.testing.assert_array_equal(grid.ego_valid, [True] * 3 + [False] * 7 + [True, True])
    np.testing.assert_array_equal(np.flatnonzero(grid.is_break), [3, 10])


def test_an_actor_that_jumps_goes_on_as_another_track():
    poses = np.zeros((12, 3))
    poses[4:, 0], poses[8:, 0] = 40.0, -60.0
    tracks = clean_tracks(make_tracks(np.zeros((12, 3)), [{"poses": poses}, {"poses": poses * 0}]), PARAMS)
    np.testing.assert_array_equal(tracks.actor_id, [100, 101, 100, 100])
    np.testing.assert_array_equal(tracks.actor_valid.sum(axis=0), [4, 12, 4, 4])
    for column, steps in ((0, slice(0, 4)), (2, slice(4, 8)), (3, slice(8, 12))):
        assert tracks.actor_valid[steps, column].all()
        np.testing.assert_array_equal(tracks.actor_position[steps, column, 0], poses[steps, 0])


def test_actors_parked_below_the_map_are_hidden():
    tracks = make_tracks(np.zeros((3, 3)), [{"poses": np.zeros((3, 3))}])
    position = tracks.actor_position.copy()
    position[:2, 0, 2] = -500.0
    tracks = clean_tracks(replace(tracks, actor_position=position), PARAMS)
    np.testing.assert_array_equal(tracks.actor_valid[:, 0], [False, False, True])


def test_differences_are_central_and_one_sided_at_ends():
    time_s = np.array([0, 0.1, 0.3, 0.4, 1.4, 1.5])
    values = (time_s**2)[:, None, None] * np.ones((1, 2, 1))
    valid = np.ones((6, 2), bool)
    valid[2, 1] = False
    found = differentiate(values, time_s, valid)[..., 0]
    np.testing.assert_allclose(found[:, 0], [0.1, 0.3, 0.5, 0.7, 2.9, 2.9])
    np.testing.assert_allclose(found[:, 1], [0.1, 0.1, 0, 0, 2.9, 2.9])


def test_rotations_are_turns_about_x_then_y_then_z():
    quarter = np.pi / 2
    for rotation, vector, expected in (
        ((0, 0, quarter), (1, 0, 0), (0, 1, 0)),
        ((0, quarter, 0), (1, 0, 0), (0, 0, -1)),
        ((quarter, 0, 0), (0, 1, 0), (0, 0, 1)),
        ((quarter, 0, quarter), (0, 1, 0), (0, 0, 1)),
        ((0, quarter, quarter), (0, 0, 1), (0, 1, 0)),
    ):
        np.testing.assert_allclose(
            turn_vectors(np.array(rotation, float), np.array(vector, float)), expected, atol=1e-15
        )


def test_tracks_of_other_shapes_or_times_are_refused():
    tracks = make_tracks(np.zeros((3, 3)), [{"poses": np.zeros((3, 3))}])
    with pytest.raises(SchemaError, match="expected actor_id as int64"):
        replace(tracks, actor_id=np.zeros(2, np.int32))
    with pytest.raises(SchemaError, match="expected ego_velocity"):
        replace(tracks, ego_velocity=np.zeros((2, 2)))
    with pytest.raises(SchemaError, match="increasing times"):
        replace(tracks, time_s=np.array([0.0, 0.2, 0.1]))
