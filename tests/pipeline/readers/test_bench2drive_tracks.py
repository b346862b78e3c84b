"""Tracks of Bench2Drive clips, anchored at one real annotation."""

import copy
import json

import numpy as np
import pytest

from pipeline.readers.bench2drive import Bench2DriveReader
from pipeline.readers.bench2drive_tracks import annotation_tracks
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef
from schemas.tracks import ActorClass, LightState
from tasks.planner_tracks import turn_vectors
from tests.pipeline.readers import builders


def ref_of(num_steps):
    return EpisodeRef(key="clip", num_steps=num_steps, rate_hz=10, views=(), signals=(), details={"town": "Town03"})


def record(x, *boxes, **more):
    ego = {
        "class": "ego_vehicle",
        "id": "9",
        "location": [x, 20.0, 1.0],
        "rotation": [0.0, 0.0, 30.0],
        "extent": [2.4, 0.9, 0.7],
        "speed": 5.0,
    }
    return {"bounding_boxes": [ego, *boxes], **more}


def box(kind, number, center, yaw=0.0, extent=(2.0, 1.0, 0.7), **more):
    return {
        "class": kind,
        "id": number,
        "center": list(center),
        "location": [0.0, 0.0, 0.0],
        "rotation": [0.0, 0.0, yaw],
        "extent": list(extent),
        **more,
    }


def test_the_ego_of_a_real_annotation_is_where_its_own_matrix_puts_it(shared_data):
    """Turned round in y, ``world2ego`` is the inverse of our pose; the compass is a quarter turn off the yaw."""
    (path,) = (shared_data / "bench2drive_anno_excerpt").glob("*.json")
    real = json.loads(path.read_text())
    tracks = annotation_tracks(ref_of(3), lambda step: real)
    ego_from_world = np.array(real["bounding_boxes"][0]["world2ego"])
    flip = np.diag([1.0, -1.0, 1.0, 1.0])
    expected = np.linalg.inv(flip @ ego_from_world @ flip)
    axes = np.stack([turn_vectors(tracks.ego_rotation[0], axis) for axis in np.eye(3)], axis=1)
    np.testing.assert_allclose(axes, expected[:3, :3], atol=6e-8)
    np.testing.assert_allclose(tracks.ego_position[0], expected[:3, 3], atol=3e-5)  # its translation is in float32
    yaw_of_compass = -(real["theta"] - np.pi / 2)
    np.testing.assert_allclose(tracks.ego_rotation[0, 2], yaw_of_compass, atol=1e-6)
    # What the IMU feels of gravity points up once it is turned to the map, and nothing of it is left in the plane.
    imu = turn_vectors(tracks.ego_rotation[0], np.array(real["acceleration"]) * (1, -1, 1))
    np.testing.assert_allclose(imu[2], 9.81, atol=0.1)
    np.testing.assert_array_equal(tracks.actor_class, [ActorClass.VEHICLE, ActorClass.VEHICLE, ActorClass.CZONE_SIGN])
    np.testing.assert_allclose(tracks.actor_position[0, 1], [79.30831909, -207.43319702, 1.52324855])
    np.testing.assert_allclose(tracks.actor_length_m[:2], [4.89238167, 4.18121004])
    np.testing.assert_allclose(tracks.actor_width_m[:2], [1.83671331, 1.99411714])
    np.testing.assert_allclose([tracks.ego_length_m, tracks.ego_width_m], [4.89238167, 1.83671331])


def test_corners_tell_the_heading_of_parked_cars_as_rotations_do_of_others(shared_data):
    (path,) = (shared_data / "bench2drive_anno_excerpt").glob("*.json")
    real = json.loads(path.read_text())
    moving = next(b for b in real["bounding_boxes"] if b["class"] == "vehicle" and "world_cord" in b)
    parked = {**moving, "state": "static", "rotation": [0, 0, 77.0], "id": "parked"}
    tracks = annotation_tracks(
        ref_of(1), lambda step: {**real, "bounding_boxes": [real["bounding_boxes"][0], moving, parked]}
    )
    np.testing.assert_array_equal(tracks.actor_class, [ActorClass.VEHICLE, ActorClass.GENERIC])
    np.testing.assert_allclose(*tracks.actor_heading[0], atol=1e-5)


def test_speed_has_the_direction_of_motion_and_walkers_are_differentiated():
    steps = [record(10.0 + 0.5 * k, box("walker", "7", (3.0, 4.0 + 0.1 * k, 0), yaw=90.0)) for k in range(5)]
    tracks = annotation_tracks(ref_of(5), steps.__getitem__)
    np.testing.assert_allclose(tracks.ego_velocity, [[5, 0]] * 5, atol=1e-9)
    np.testing.assert_allclose(tracks.ego_rotation[:, 2], np.radians(-30))
    np.testing.assert_allclose(tracks.actor_velocity[:, 0], [[0, -1]] * 5, atol=1e-9)
    np.testing.assert_allclose(tracks.actor_heading[:, 0], -np.pi / 2)
    np.testing.assert_allclose(tracks.ego_acceleration, 0, atol=1e-9)


def test_what_stands_and_what_cycles_has_its_class():
    boxes = [
        box("vehicle", "1", (0, 0, 0), state="dynamic", base_type="bicycle", type_id="vehicle.bh.crossbike"),
        box("vehicle", "2", (0, 0, 0), state="dynamic", base_type="truck"),
        box("vehicle", "3", (0, 0, 0), state="static", type_id="/Game/mesh"),
        box("traffic_sign", "4", (0, 0, 0), type_id="static.prop.trafficcone01"),
        box("traffic_sign", "5", (0, 0, 0), type_id="static.prop.streetbarrier"),
        box("traffic_sign", "6", (0, 0, 0), type_id="traffic.speed_limit.60"),
    ]
    tracks = annotation_tracks(ref_of(1), lambda step: record(0, *boxes))
    kinds = [ActorClass.BICYCLE, ActorClass.VEHICLE, ActorClass.GENERIC, ActorClass.TRAFFIC_CONE, ActorClass.BARRIER]
    np.testing.assert_array_equal(tracks.actor_class, kinds)
    np.testing.assert_array_equal(tracks.actor_id, [1, 2, 3, 4, 5])


def test_lights_have_their_state_and_the_box_where_it_holds():
    light = box("traffic_light", "50", (5.0, 6.0, 4.0), state=2, road_id=67, lane_id=-2,
                trigger_volume_location=[7.0, 8.0, 1.0], trigger_volume_rotation=[0.0, 0.0, 90.0], trigger_volume_extent=[3.0, 0.5, 1.0])  # fmt: skip
    steps = [record(0, light), record(0, {**light, "state": 1}), record(0)]
    tracks = annotation_tracks(ref_of(3), steps.__getitem__)
    np.testing.assert_array_equal(tracks.light_state[:, 0], [LightState.GREEN, LightState.YELLOW, LightState.UNKNOWN])
    np.testing.assert_allclose(tracks.light_position, [[5, -6, 4]])
    np.testing.assert_allclose(tracks.light_trigger, [[7, -8, -np.pi / 2, 3, 0.5]])
    np.testing.assert_array_equal(tracks.light_lane, [[67, -2]])


def test_a_step_that_cannot_be_read_is_a_fault_and_a_gap_and_nan_elsewhere_costs_nothing():
    def load(step):
        if step == 2:
            raise SourceError("expected a file, found none; copy it", Reason.MISSING_FILE)
        if step == 3:
            return {"bounding_boxes": []}
        found = record(float(step), box("vehicle", "8", (0, 0, 0)), theta=float("nan"), acceleration=[float("nan")] * 3)
        return {**found, "brake": float("nan")}

    tracks = annotation_tracks(ref_of(6), load)
    np.testing.assert_array_equal(tracks.source_step, [0, 1, 4, 5])
    np.testing.assert_allclose(tracks.time_s, [0, 0.1, 0.4, 0.5])
    assert [(fault.start, fault.reason) for fault in tracks.faults] == [
        (2, Reason.MISSING_FILE),
        (3, Reason.BAD_METADATA),
    ]
    assert np.isfinite(tracks.ego_acceleration).all()
    with pytest.raises(SourceError, match="a step with the ego's pose"):
        annotation_tracks(ref_of(4), lambda step: load(3))


def test_the_imu_is_brought_to_the_vehicles_origin():
    """Turning at w, the IMU 1.4 m behind the origin feels w^2 * 1.4 m more towards it."""
    still = record(0.0, acceleration=[1.0, 2.0, 9.81], angular_velocity=[0.0, 0.0, -0.5])
    still["bounding_boxes"][0] = {**copy.deepcopy(still["bounding_boxes"][0]), "rotation": [0.0, 0.0, 0.0]}
    tracks = annotation_tracks(ref_of(2), lambda step: still)
    np.testing.assert_allclose(tracks.ego_acceleration, [[1.0 - 0.25 * 1.4, -2.0]] * 2)


def test_the_reader_of_clips_gives_tracks(tmp_path):
    reader = Bench2DriveReader(builders.write_bench2drive_clip(tmp_path / "Accident_Town03_Route24816_Weather25"))
    (ref,) = reader.index().episodes
    tracks = reader.read_tracks(ref)
    assert (tracks.num_steps, tracks.town) == (4, "Town03")
    np.testing.assert_allclose(tracks.ego_position, [[94.0 + step, -193.5, 1.0] for step in range(4)])
