"""CARLA recorder logs: every packet, damage, and the one real log."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.readers import carla_recorder, open_source
from pipeline.readers.carla_recorder import CarlaRecorderReader
from schemas.errors import Reason, SourceError
from schemas.planner import PlannerParams
from schemas.tracks import ActorClass, LightState
from tasks.opendrive import read_opendrive
from tasks.planner import planner_scene, scene_block
from tasks.planner_tracks import planner_anchors, resample_tracks
from tests.pipeline.readers import log_writer as w
from tests.tasks.planner_reference import Reference


def reader_of(tmp_path, log, name="a.log"):
    (tmp_path / name).write_bytes(log)
    return CarlaRecorderReader(tmp_path)


def test_a_log_is_an_episode_without_views(tmp_path):
    reader_of(tmp_path, w.small_log())
    (tmp_path / "notes.log").write_text("nothing to do with CARLA")
    reader = open_source(tmp_path)
    index = reader.index()
    (ref,) = index.episodes
    assert (index.format, ref.key, ref.num_steps, ref.rate_hz, ref.views) == ("carla-recorder", "a", 6, 0.0, ())
    assert (ref.details["town"], ref.details["ego_id"], ref.details["ego_type"]) == (
        "Town05",
        w.HERO,
        "vehicle.lincoln.mkz_2020",
    )
    assert [str(path) for path in reader.files(ref)] == ["a.log"]
    assert index.faults == ()


def test_signals_are_the_egos_in_the_right_handed_frame(tmp_path):
    reader = reader_of(tmp_path, w.small_log())
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, [signal.name for signal in ref.signals], np.array([0, 2, 2, 5]))
    times = np.array([0, 0.11, 0.11, 0.27])
    np.testing.assert_allclose(block.values["timestamp_s"], times)
    np.testing.assert_allclose(
        block.values["ego_position"], np.stack([times * 0 + 10, -2 - 10 * times, times * 0 + 0.05], 1), atol=1e-6
    )
    np.testing.assert_allclose(block.values["ego_rotation"], np.radians([[0, -2, -90]] * 4), atol=1e-7)
    np.testing.assert_allclose(block.values["ego_velocity"][1:], [[0, -10, 0]] * 3)
    np.testing.assert_allclose(block.values["ego_angular_velocity"][1:, 2], np.radians([-30] * 3))
    assert np.isnan(block.values["ego_velocity"][0]).all()  # a log's first frame has no kinematics
    np.testing.assert_array_equal(block.values["steer"], [0.25] * 4)
    np.testing.assert_array_equal(block.values["gear"], [2] * 4)
    np.testing.assert_array_equal(block.values["simulator_frame"], [100, 102, 102, 105])


def test_tracks_hold_every_actor_with_its_class_box_and_life(tmp_path):
    reader = reader_of(tmp_path, w.small_log())
    (ref,) = reader.index().episodes
    tracks = reader.read_tracks(ref)
    assert (tracks.town, tracks.ego_model) == ("Town05", "vehicle.lincoln.mkz_2020")
    np.testing.assert_allclose(tracks.time_s, [0, 0.05, 0.11, 0.16, 0.22, 0.27])
    np.testing.assert_array_equal(tracks.actor_id, [w.CAR, w.BIKE, w.WALKER, w.CONE])
    kinds = [ActorClass.VEHICLE, ActorClass.BICYCLE, ActorClass.PEDESTRIAN, ActorClass.TRAFFIC_CONE]
    np.testing.assert_array_equal(tracks.actor_class, kinds)
    np.testing.assert_allclose(tracks.actor_length_m, [4.6, 1.8, 0.36, 0.34])  # the bicycle has no box: a usual one
    np.testing.assert_allclose(tracks.actor_width_m, [1.92, 0.6, 0.40, 0.34])
    np.testing.assert_allclose([tracks.ego_length_m, tracks.ego_width_m], [4.9, 1.84])
    np.testing.assert_array_equal(tracks.actor_valid[:, 0], [True] * 4 + [False] * 2)
    np.testing.assert_array_equal(tracks.actor_valid[:, 2:], True)
    # The car looks along -x; its box lies 6 cm behind its origin and 2 cm to its right, which is +y here.
    np.testing.assert_allclose(tracks.actor_position[0, 0], [20.06, -1.98, 0.98], atol=1e-6)
    np.testing.assert_allclose(np.abs(tracks.actor_heading[0, 0]), np.pi)
    np.testing.assert_allclose(tracks.actor_heading[0, 2:], [np.pi / 2, -np.pi / 4])
    np.testing.assert_allclose(tracks.ego_velocity, [[0, -10]] * 6, atol=1e-3)
    np.testing.assert_allclose(tracks.ego_acceleration, 0, atol=1e-2)


def test_lights_keep_their_state_and_know_where_they_hold(tmp_path):
    reader = reader_of(tmp_path, w.small_log())
    tracks = reader.read_tracks(reader.index().episodes[0])
    red, yellow, unknown = LightState.RED, LightState.YELLOW, LightState.UNKNOWN
    np.testing.assert_array_equal(tracks.light_state[:, 0], [red, yellow, yellow, unknown, unknown, red])
    np.testing.assert_allclose(tracks.light_position, [[30, -5, 0.1]])
    # The light looks along CARLA's +y, here -y; its volume lies 1 m ahead and 2 m to its left, towards +x.
    np.testing.assert_allclose(tracks.light_trigger, [[32, -6, -np.pi / 2, 3, 0.5]], atol=1e-6)


def test_unknown_packets_change_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    readers = [
        reader_of(tmp_path / name, w.small_log(unknown=unknown)) for name, unknown in (("x", True), ("y", False))
    ]
    one, other = (reader.read_tracks(reader.index().episodes[0]).arrays() for reader in readers)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@given(cut=st.integers(1, 6000))
def test_a_log_cut_anywhere_gives_its_whole_frames_or_a_reason(tmp_path_factory, cut):
    log = w.small_log()
    folder = tmp_path_factory.mktemp("cut")
    reader = reader_of(folder, log[: max(len(log) - cut, 0)])
    index = reader.index()
    if index.episodes:
        tracks = reader.read_tracks(index.episodes[0])
        assert tracks.num_steps == index.episodes[0].num_steps <= 6
    elif len(log) - cut >= 18:
        assert index.faults[0].reason in (Reason.EMPTY_EPISODE, Reason.TRUNCATED)


@given(place=st.integers(40, 2500), value=st.integers(0, 255))
def test_a_damaged_log_is_read_or_refused_and_never_breaks(tmp_path_factory, place, value):
    log = bytearray(w.small_log())
    log[place] = value
    reader = reader_of(tmp_path_factory.mktemp("damaged"), bytes(log))
    for ref in reader.index().episodes:
        with contextlib.suppress(SourceError):
            reader.read_tracks(ref)


@given(
    packets=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40), st.binary(max_size=60)), max_size=12),
    place=st.integers(0, 5),
)
def test_packets_of_any_kind_and_content_are_answered(tmp_path_factory, packets, place):
    """Each with a count of rows that need not fit what follows; what is served is finite."""
    junk = b"".join(w.packet(kind, count.to_bytes(2, "little") + content) for kind, count, content in packets)
    frames = w.small_log().split(w.packet(1))
    log = w.packet(1).join([*frames[:place], junk, *frames[place:]])
    reader = reader_of(tmp_path_factory.mktemp("junk"), log)
    for ref in reader.index().episodes:
        with contextlib.suppress(SourceError):
            arrays = reader.read_tracks(ref).arrays()
            assert all(
                np.isfinite(array).all()
                for name, array in arrays.items()
                if name not in ("light_trigger", "light_position")
            )
        with contextlib.suppress(SourceError):
            reader.read_signals(ref, ["speed", "gear"], np.arange(ref.num_steps))


def test_a_row_that_is_not_finite_is_a_frame_without_its_actor(tmp_path):
    rows = [(w.HERO, *[0.0] * 6), (w.CAR, 2000, 200, 5, 0, 0, 180)]
    lost = [(w.HERO, *[0.0] * 6), (w.CAR, float("nan"), 200, 5, 0, 0, 180)]
    log = w.header() + b"".join(
        w.frame(k, 0.1, 0.1 * k, *([w.added(w.ACTORS)] if k == 0 else []), w.rows(6, "I6f", lost if k == 1 else rows))
        for k in range(3)
    )
    reader = reader_of(tmp_path, log)
    tracks = reader.read_tracks(reader.index().episodes[0])
    np.testing.assert_array_equal(tracks.actor_valid[:, list(tracks.actor_id).index(w.CAR)], [True, False, True])


def test_a_log_is_parsed_once_however_many_blocks_ask_and_again_when_it_changes(tmp_path):
    def parsed():
        return carla_recorder._whole_ego_rows.cache_info().misses

    reader, before = reader_of(tmp_path, w.small_log()), parsed()
    (ref,) = reader.index().episodes
    whole = reader.read_signals(ref, ["speed", "steer"], np.arange(6)).values
    for step in range(6):
        block = reader.read_signals(ref, ["steer", "speed"], np.array([step])).values
        assert all(np.array_equal(block[name], whole[name][[step]], equal_nan=True) for name in ("speed", "steer"))
    assert parsed() == before + 1
    (tmp_path / "a.log").write_bytes(w.small_log(unknown=False))
    reader.read_signals(ref, ["speed"], np.arange(6))
    assert parsed() == before + 2


def test_what_lies_before_a_damage_is_served(tmp_path):
    whole = w.small_log()
    end = whole.rindex(w.packet(1))
    log = whole[:end] + w.packet(6, b"\xff\xff") + whole[end:]  # rows that are not there, in the last frame
    reader = reader_of(tmp_path, log)
    (ref,) = reader.index().episodes
    np.testing.assert_array_equal(reader.read_signals(ref, ["gear"], np.arange(5)).values["gear"], [2] * 5)
    with pytest.raises(SourceError, match="expected 65535 rows"):
        reader.read_signals(ref, ["gear"], np.arange(6))


def test_a_log_without_a_hero_is_refused_with_the_roles_there_are(tmp_path):
    log = w.small_log().replace(b"hero", b"boss")
    reader = reader_of(tmp_path, log)
    index = reader.index()
    assert index.episodes == ()
    assert (index.faults[0].reason, index.faults[0].path) == (Reason.BAD_METADATA, "a.log")
    assert "['autopilot', 'boss']" in index.faults[0].message
    assert CarlaRecorderReader(tmp_path, ("boss",)).index().episodes[0].details["ego_id"] == w.HERO


def test_an_id_that_is_given_again_is_another_actor(tmp_path):
    def frame(k, *more, there=True):
        places = [(1, 0, 0, 0, 0, 0, 0), *([(2, 500, 0, 0, 0, 0, 0)] if there else [])]
        return w.frame(k, 0.1, 0.1 * k, *more, w.rows(6, "I6f", places))

    hero = (1, 1, (0,) * 3, (0,) * 3, "vehicle.a", {"role_name": "hero"})
    log = w.header() + frame(0, w.added([hero, (2, 2, (0,) * 3, (0,) * 3, "walker", {})])) + frame(1)
    log += frame(2, w.rows(3, "I", [(2,)]), there=False) + frame(
        3, w.added([(2, 1, (0,) * 3, (0,) * 3, "vehicle.b", {})])
    )
    reader = reader_of(tmp_path, log)
    tracks = reader.read_tracks(reader.index().episodes[0])
    np.testing.assert_array_equal(tracks.actor_class, [ActorClass.PEDESTRIAN, ActorClass.VEHICLE])
    np.testing.assert_array_equal(tracks.actor_valid, [[True, False], [True, False], [False, False], [False, True]])


# -- the real log ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(shared_data):
    reader = open_source(shared_data / "carla_recorder")
    (ref,) = reader.index().episodes
    graph = read_opendrive((shared_data / "carla_xodr" / "Town01.xodr.gz").read_bytes())
    return reader, ref, reader.read_tracks(ref), graph


def test_the_real_log_is_what_an_independent_parser_found(real):
    _, ref, tracks, _ = real
    assert (ref.num_steps, ref.details["town"], ref.details["ego_type"]) == (847, "Town01", "vehicle.lincoln.mkz_2017")
    np.testing.assert_allclose(tracks.time_s[-1], 24.72371636610478)
    assert len(tracks.light_id) == 36
    car = int(np.flatnonzero(tracks.actor_id == 175)[0])
    np.testing.assert_allclose(
        [tracks.actor_length_m[car], tracks.actor_width_m[car]], [4.6045099, 1.9315930], rtol=1e-6
    )
    step = 299  # frame 300
    np.testing.assert_allclose(tracks.ego_position[step], [167.80728, -133.0063184, 0.0351715], atol=1e-5)
    np.testing.assert_allclose(tracks.ego_velocity[step], [9.566987, -0.000672], atol=1e-5)


def test_recorded_velocities_are_the_derivatives_of_recorded_positions(real):
    _, _, tracks, _ = real
    steps = np.arange(150, 840)
    moved = np.diff(tracks.ego_position[:, :2], axis=0) / np.diff(tracks.time_s)[:, None]
    error = np.abs(moved[steps] - tracks.ego_velocity[steps + 1])
    assert np.median(error) < 0.05


def test_planner_samples_of_the_real_log(real):
    """What they say is checked where they are stored: ``tests/pipeline/test_planner_conversion.py``."""
    _, _, tracks, graph = real
    params = PlannerParams()
    scene = planner_scene(tracks, graph, params)
    anchors = planner_anchors(scene.tracks, params)
    assert len(anchors) == 147
    block = scene_block(scene, anchors)
    assert block["ego_agent_future_valid"].all()
    seen = block["neighbor_agents_id"][:, 0] == 175
    assert not seen[:2].any() and seen[2:].all()  # until then it waits 500 m below the map
    assert block["route_lanes_valid"][:, 0].all()


def test_the_real_log_is_as_the_reference_says(real):
    _, _, tracks, graph = real
    params = PlannerParams(num_lanes=20, rate_hz=10)
    scene = planner_scene(tracks, graph, params)
    steps = [20, 90, 167, 240, 247]
    block = scene_block(scene, np.array(steps))
    driven = np.where(scene.path.lane >= 0, scene.lanes.graph_lane[scene.path.lane], -1)
    reference = Reference(resample_tracks(tracks, params), graph, params, driven)
    reference.light = lambda t, lane: [
        0,
        0,
        0,
        0,
    ]  # these are known by their place, which the reference does not look at
    for row, step in enumerate(steps):
        for name, value in reference.sample(step).items():
            found = block[name][row]
            if name in ("lanes", "route_lanes"):
                found, value = found[..., :8], value[..., :8]
            np.testing.assert_allclose(found, value, rtol=2e-6, atol=3e-5, err_msg=name)


def test_each_light_of_the_real_log_stands_where_the_map_has_one(real):
    """And those that turned green together govern lanes that do not cross."""
    _, _, tracks, graph = real
    away = np.hypot(*(graph.signals.position_m[None, :, :2] - tracks.light_position[:, None, :2]).transpose(2, 0, 1))
    assert away.min(axis=1).max() < 1.0
    assert len(np.unique(away.argmin(axis=1))) == 36
    scene = planner_scene(tracks, graph, PlannerParams())
    governed = scene.light_of[scene.light_of >= 0]
    assert len(np.unique(governed)) == 36
    assert (scene.light_of[~scene.lanes.is_junction] == -1).all()
