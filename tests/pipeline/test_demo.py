"""The demo's drive: the published layout, numbers that agree with each other, pictures that agree with the numbers."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.demo.bench2drive import rendered_camera, write_bench2drive_clip
from pipeline.demo.driving import Drive, plan_drive
from pipeline.demo.road import Road
from pipeline.demo.street import Street

# What the published recordings hold, from their writer, Bench2Drive's tools/data_collect.py.
TOP = {
    "x", "y", "throttle", "steer", "brake", "reverse", "theta", "speed", "x_command_far", "y_command_far",
    "command_far", "x_command_near", "y_command_near", "command_near", "should_brake", "x_target", "y_target",
    "next_command", "weather", "acceleration", "angular_velocity", "bounding_boxes", "sensors", "only_ap_brake",
}  # fmt: skip
WHERE = {"class", "id", "location", "rotation", "center", "extent", "semantic_tags", "type_id"}
LANE = {"road_id", "lane_id", "section_id"}
SOLID = WHERE | LANE | {"bbx_loc", "world_cord"}
TRIGGER = {"trigger_volume_location", "trigger_volume_rotation", "trigger_volume_extent"}
VEHICLE = SOLID | {"state", "num_points", "distance", "speed", "brake", "light_state", "world2vehicle"}
BOXES = {
    "ego_vehicle": SOLID | {"base_type", "color", "speed", "brake", "world2ego"},
    "vehicle dynamic": VEHICLE | {"color", "base_type"},
    "vehicle static": VEHICLE,
    "walker": SOLID | {"gender", "age", "num_points", "distance", "speed", "bone", "world2ped"},
    "traffic_light": WHERE | LANE | TRIGGER | {"distance", "state", "affects_ego"},
    "traffic_sign": WHERE | LANE | TRIGGER | {"distance", "affects_ego", "world2sign"},
    "prop": SOLID | {"distance", "affects_ego", "world2sign"},
}
CAMERAS = {
    "rgb_front": ("CAM_FRONT", (0.80, 0.0, 1.60), 0.0, 70.0),
    "rgb_front_left": ("CAM_FRONT_LEFT", (0.27, -0.55, 1.60), -55.0, 70.0),
    "rgb_front_right": ("CAM_FRONT_RIGHT", (0.27, 0.55, 1.60), 55.0, 70.0),
    "rgb_back": ("CAM_BACK", (-2.0, 0.0, 1.60), 180.0, 110.0),
    "rgb_back_left": ("CAM_BACK_LEFT", (-0.32, -0.55, 1.60), -110.0, 70.0),
    "rgb_back_right": ("CAM_BACK_RIGHT", (-0.32, 0.55, 1.60), 110.0, 70.0),
}
NUM_STEPS, SIZE = 12, (36, 64)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bench2drive_clip(tmp_path_factory.mktemp("raw"), num_steps=NUM_STEPS, size=SIZE)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The annotations of all six seconds, without pictures."""
    return read(write_bench2drive_clip(tmp_path_factory.mktemp("long"), num_steps=60, size=SIZE, cameras=()))


def read(clip: Path) -> list[dict[str, Any]]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted((clip / "anno").iterdir())]


def rotation(pitch_roll_yaw_deg: list[float]) -> np.ndarray:
    """Unreal's order, yaw after pitch after roll, in its left-handed axes, where pitch and roll turn the other way."""
    (cp, cr, cy), (sp, sr, sy) = (f(np.radians(pitch_roll_yaw_deg)) for f in (np.cos, np.sin))
    yaw = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    pitch = np.array([[cp, 0, -sp], [0, 1, 0], [sp, 0, cp]])
    roll = np.array([[1, 0, 0], [0, cr, sr], [0, -sr, cr]])
    return yaw @ pitch @ roll


def world_from(thing: dict[str, Any]) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation(thing["rotation"]), thing["location"]
    return matrix


def kind(box: dict[str, Any]) -> str:
    if box["class"] == "vehicle":
        return f"vehicle {box['state']}"
    return "prop" if box["type_id"].startswith("static.prop") else box["class"]


def test_files_are_named_as_the_published_ones_are(clip: Path) -> None:
    assert clip.name == "DemoStraight_Town01_Route1_Weather1"
    assert sorted(path.name for path in clip.iterdir()) == ["anno", "camera", "expert_assessment"]
    assert sorted(path.name for path in (clip / "anno").iterdir()) == [
        f"{step:05}.json.gz" for step in range(NUM_STEPS)
    ]
    folders = sorted(path.name for path in (clip / "camera").iterdir())
    assert folders == sorted([*CAMERAS, "rgb_top_down"])
    for folder in folders:
        names = sorted(path.name for path in (clip / "camera" / folder).iterdir())
        assert names == [f"{step:05}.jpg" for step in range(NUM_STEPS)]
    # The expert's answers are named one step early, the first of them -0001.
    assert {path.name for path in (clip / "expert_assessment").iterdir()} == {
        f"{step - 1:05}.npz" for step in range(NUM_STEPS)
    }
    assert (clip / "expert_assessment" / "-0001.npz").exists()


def test_pictures_are_rgb_jpegs_of_the_size_asked_for(clip: Path) -> None:
    for path in (clip / "camera").rglob("*.jpg"):
        with Image.open(path) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", SIZE[::-1])


def test_expert_assessments_end_in_an_action_index(clip: Path) -> None:
    with np.load(clip / "expert_assessment" / "-0001.npz", allow_pickle=False) as stored:
        row = stored["arr_0"]
    assert row.dtype == np.float32
    assert row[-1] in range(39)


def test_annotations_have_every_field_of_the_published_ones(clip: Path) -> None:
    seen = set()
    for record in read(clip):
        assert set(record) == TOP
        assert len(record["weather"]) == 10
        for box in record["bounding_boxes"]:
            assert set(box) == BOXES[kind(box)], kind(box)
            assert isinstance(box["id"], str)
            seen.add(kind(box))
        assert [box["class"] for box in record["bounding_boxes"]].index("ego_vehicle") == 0
        assert sum(box["class"] == "ego_vehicle" for box in record["bounding_boxes"]) == 1
    assert seen == set(BOXES)


def test_annotations_have_the_fields_of_a_real_one(clip: Path, shared_data: Path) -> None:
    real = json.loads(next((shared_data / "bench2drive_anno_excerpt").iterdir()).read_text())
    ours = read(clip)[0]
    assert set(real) <= set(ours)
    for theirs in real["bounding_boxes"]:
        assert set(theirs) <= BOXES[kind(theirs)]
    for name, sensor in real["sensors"].items():
        assert set(sensor) <= set(ours["sensors"][name])
        for field in ("cam2ego", "fov"):
            if field in sensor:
                np.testing.assert_allclose(ours["sensors"][name][field], sensor[field], atol=1e-6)


def test_world2ego_is_the_inverse_of_the_pose(records: list[dict[str, Any]]) -> None:
    for record in records:
        ego = record["bounding_boxes"][0]
        np.testing.assert_allclose(np.array(ego["world2ego"]) @ world_from(ego), np.eye(4), atol=1e-6)
        for box in record["bounding_boxes"]:
            for name in ("world2vehicle", "world2ped"):
                if name in box:
                    np.testing.assert_allclose(np.array(box[name]) @ world_from(box), np.eye(4), atol=1e-6)


def test_yaw_is_theta_less_a_quarter_turn(records: list[dict[str, Any]]) -> None:
    for record in records:
        yaw = np.radians(record["bounding_boxes"][0]["rotation"][2])
        assert np.angle(np.exp(1j * (record["theta"] - np.pi / 2 - yaw))) == pytest.approx(0, abs=1e-9)
        assert 0 <= record["theta"] < 2 * np.pi


@pytest.mark.parametrize("view", CAMERAS)
def test_cameras_sit_where_bench2drive_mounts_them(records: list[dict[str, Any]], view: str) -> None:
    name, place, yaw, fov = CAMERAS[view]
    for record in records[::20]:
        sensor, ego = record["sensors"][name], world_from(record["bounding_boxes"][0])
        cam2ego = np.array(sensor["cam2ego"])
        np.testing.assert_allclose(cam2ego[:3, 3], place)
        np.testing.assert_allclose(cam2ego[:3, :3], rotation([0.0, 0.0, yaw]), atol=1e-12)
        np.testing.assert_allclose(np.array(sensor["world2cam"]) @ ego @ cam2ego, np.eye(4), atol=1e-6)
        np.testing.assert_allclose(world_from(sensor), ego @ cam2ego, atol=1e-6)
        focal = SIZE[1] / (2 * np.tan(np.radians(fov / 2)))
        np.testing.assert_allclose(sensor["intrinsic"], [[focal, 0, SIZE[1] / 2], [0, focal, SIZE[0] / 2], [0, 0, 1]])


def test_the_camera_from_above_looks_down(records: list[dict[str, Any]]) -> None:
    sensor, ego = records[30]["sensors"]["TOP_DOWN"], world_from(records[30]["bounding_boxes"][0])
    seen = np.array(sensor["world2cam"]) @ ego @ np.array([[0.0, 0, 0, 1], [5.0, 0, 0, 1], [0, 5.0, 0, 1]]).T
    # Axes x forwards (down), y right, z up in the picture: the car's nose is up, its right side right.
    np.testing.assert_allclose(seen[:3].T, [[50, 0, 0], [50, 0, 5], [50, 5, 0]], atol=1e-9)


def test_the_car_moves_as_its_speed_heading_and_steering_say(records: list[dict[str, Any]]) -> None:
    place = np.array([record["bounding_boxes"][0]["location"][:2] for record in records])
    yaw = np.unwrap([record["theta"] for record in records]) - np.pi / 2
    speed = np.array([record["speed"] for record in records])
    moved = np.diff(place, axis=0)
    np.testing.assert_allclose(np.hypot(*moved.T) * 10, (speed[1:] + speed[:-1]) / 2, atol=0.03)
    between = (yaw[1:] + yaw[:-1]) / 2
    np.testing.assert_allclose(np.arctan2(np.sin(np.arctan2(*moved.T[::-1]) - between), 1), 0, atol=0.01)
    turning = np.array([record["angular_velocity"][2] for record in records])
    np.testing.assert_allclose(np.diff(yaw) * 10, (turning[1:] + turning[:-1]) / 2, atol=0.05)
    steer = np.array([record["steer"] for record in records])
    assert yaw[-1] - yaw[0] > 0.3  # to the right, where y is
    assert (steer[-10:] > 0.05).all()
    assert speed.min() < 4 < 7 < speed.max()


def test_the_gnss_position_is_near_the_antenna_and_not_exact(records: list[dict[str, Any]]) -> None:
    off = []
    for record in records:
        seen = np.array(record["bounding_boxes"][0]["world2ego"]) @ [record["x"], record["y"], 0.0, 1.0]
        off.append(seen[:2] - [-1.4, 0.0])
    assert np.abs(np.mean(off, axis=0)).max() < 0.2
    assert 0.1 < np.std(off) < 0.6


def test_some_parked_vehicles_brake_by_nan_and_nothing_else_does(records: list[dict[str, Any]]) -> None:
    broken = [(step, box) for step, record in enumerate(records) for box in record["bounding_boxes"]
              if np.isnan(box.get("brake", 0.0))]  # fmt: skip
    assert broken
    assert {box["class"] for _, box in broken} == {"vehicle"}
    assert {box["speed"] for _, box in broken} == {0.0}
    assert len({step for step, _ in broken}) < len(records) / 4
    json.dumps([{**record, "bounding_boxes": []} for record in records], allow_nan=False)


def test_the_light_changes_from_red_to_green(records: list[dict[str, Any]]) -> None:
    lights = [box for record in records for box in record["bounding_boxes"] if box["class"] == "traffic_light"]
    states = [box["state"] for box in lights]
    assert states == sorted(states)
    assert set(states) == {0, 2}  # CARLA: red, green
    assert [record["should_brake"] for record in records] == [state == 0 for state in states]


def paint(drive: Drive, view: str, time_s: float, size: tuple[int, int] = (225, 400)) -> np.ndarray:
    return np.asarray(Street(drive, [rendered_camera(view, size)], 0).paint(time_s)[0], np.float64)


def pixel_of(
    record: dict[str, Any], view: str, place: np.ndarray, size: tuple[int, int] = (225, 400)
) -> tuple[int, int]:
    """Project by the annotation alone: row and column of a world point."""
    name, _, _, fov = CAMERAS[view]
    x, y, z, _ = np.array(record["sensors"][name]["world2cam"]) @ [*place, 1.0]
    focal = size[1] / (2 * np.tan(np.radians(fov / 2)))
    assert x > 0
    return int(size[0] / 2 - focal * z / x), int(size[1] / 2 + focal * y / x)


@pytest.mark.parametrize(("green_s", "lit", "dark"), [(9.0, 0, 2), (0.0, 2, 0)])
def test_the_lamp_glows_in_the_picture_where_the_annotation_has_it(
    records: list[dict[str, Any]], green_s: float, lit: int, dark: int
) -> None:
    drive = replace(plan_drive(6.0, 0), green_s=green_s)
    picture = paint(drive, "rgb_front", 0.0)
    box = next(box for box in records[0]["bounding_boxes"] if box["class"] == "traffic_light")
    lamp = {state: np.add(box["center"], [0, 0, 0.39 * (1 - state)]) for state in (0, 2)}
    row, column = pixel_of(records[0], "rgb_front", lamp[lit])
    channel = lit // 2
    assert picture[row, column, channel] > 180
    assert picture[row, column, channel] > 1.5 * picture[row, column, 1 - channel]
    row, column = pixel_of(records[0], "rgb_front", lamp[dark])
    assert picture[row, column].max() < 130


@pytest.mark.parametrize("step", [24, 34, 42])
def test_standing_things_are_in_every_picture_where_the_pose_says(records: list[dict[str, Any]], step: int) -> None:
    cones = [box for box in records[step]["bounding_boxes"] if kind(box) == "prop"]
    picture = paint(plan_drive(6.0, 0), "rgb_front", step / 10)
    row, column = pixel_of(records[step], "rgb_front", np.add(cones[0]["location"], [0, 0, 0.2]))
    red, _, blue = picture[row, column]
    assert red > 2 * blue  # orange
    red, _, blue = picture[row, -column]  # and a mirrored picture would not pass
    assert red < 1.5 * blue


def test_each_camera_sees_its_own_side(records: list[dict[str, Any]]) -> None:
    """Houses are on the left of the road, the park is on its right: only there the middle rows are green."""
    drive = plan_drive(6.0, 0)

    def green(view: str) -> float:
        picture = paint(drive, view, 0.5, (90, 160))[45:60]
        return float(np.mean(picture[..., 1] > 1.15 * np.maximum(picture[..., 0], picture[..., 2])))

    assert green("rgb_back_right") > 0.3 > 0.15 > green("rgb_back_left")
    assert green("rgb_front_right") > green("rgb_front_left")


def digests(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_one_seed_gives_the_same_bytes_and_another_other_ones(tmp_path: Path) -> None:
    first, again, other = (
        digests(write_bench2drive_clip(tmp_path / place, num_steps=3, size=SIZE, seed=seed))
        for place, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again
    assert set(first) == set(other)
    assert not set(first.values()) & set(other.values())


def test_only_the_cameras_asked_for_are_painted(tmp_path: Path) -> None:
    clip = write_bench2drive_clip(
        tmp_path, num_steps=2, size=SIZE, cameras=("rgb_back",), name="A_Town02_Route3_Weather4"
    )
    assert [path.name for path in (clip / "camera").iterdir()] == ["rgb_back"]
    assert len(read(clip)[0]["sensors"]) == 13


@given(along=st.floats(-50, 120), across=st.floats(-15, 15), turn=st.sampled_from([-1.0, 1.0]))
def test_locating_a_point_on_the_road_undoes_placing_it(along: float, across: float, turn: float) -> None:
    road = Road(
        bend_start_m=20.0, bend_radius_m=25.0, bend_rad=1.2, turn=turn, stop_line_m=12.0, crossing_m=(14.0, 17.0)
    )
    x, y, heading = road.place(along, across)
    found = road.locate(np.array([x]), np.array([y]))
    np.testing.assert_allclose([found[0][0], found[1][0], found[2][0]], [along, across, heading], atol=1e-4)
