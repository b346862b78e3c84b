"""The demo's arm: LeRobot v2.1 by the letter, numbers that agree with each other and with the pictures."""

import hashlib
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo import arm
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.demo.tabletop import Table, camera
from schemas.errors import UsageError

VIEWS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
NUM_EPISODES, NUM_STEPS, SIZE = 3, 12, (36, 64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("raw") / "set"
    return write_lerobot_set(place, num_episodes=NUM_EPISODES, num_steps=NUM_STEPS, size=SIZE)


@pytest.fixture(scope="module")
def info(root: Path) -> dict[str, Any]:
    return json.loads((root / "meta" / "info.json").read_text())


def lines(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "meta" / f"{name}.jsonl").read_text().splitlines()]


def table(root: Path, episode: int) -> pa.Table:
    return pq.read_table(root / f"data/chunk-000/episode_{episode:06d}.parquet")


def rows(root: Path, episode: int, name: str) -> np.ndarray:
    return np.array(table(root, episode)[name].to_pylist())


def test_the_files_are_those_that_the_metadata_promises_but_one(root: Path, info: dict[str, Any]) -> None:
    promised = {"meta/info.json", "meta/tasks.jsonl", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"}
    for episode in range(NUM_EPISODES):
        place = {"episode_chunk": episode // info["chunks_size"], "episode_index": episode}
        promised.add(info["data_path"].format(**place))
        videos = (key for key, feature in info["features"].items() if feature["dtype"] == "video")
        promised.update(info["video_path"].format(**place, video_key=key) for key in videos)
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert promised - found == {"videos/chunk-000/observation.images.cam_right_wrist/episode_000002.mp4"}
    assert found <= promised


def test_info_has_the_keys_and_totals_of_version_2_1(info: dict[str, Any]) -> None:
    assert info["codebase_version"] == "v2.1"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 36, 3)
    assert (info["total_videos"], info["total_chunks"], info["chunks_size"], info["fps"]) == (9, 1, 1000, 30)
    assert info["splits"] == {"train": "0:3"}
    assert info["features"]["action"] == {"dtype": "float32", "shape": [7], "names": list(arm.STATE_NAMES)}
    video = info["features"]["observation.images.cam_high"]
    assert (video["dtype"], video["shape"], video["names"]) == ("video", [36, 64, 3], ["height", "width", "channels"])
    assert video["info"]["video.codec"] in ("h264", "av1")
    for name, dtype in (("timestamp", "float32"), ("index", "int64"), ("task_index", "int64")):
        assert info["features"][name] == {"dtype": dtype, "shape": [1], "names": None}


def test_columns_have_the_types_that_datasets_writes(root: Path) -> None:
    vector, number = pa.list_(pa.float32(), 7), pa.int64()
    names = ("frame_index", "episode_index", "index", "task_index")
    fields = [("observation.state", vector), ("action", vector), ("timestamp", pa.float32())]
    assert table(root, 0).schema.equals(pa.schema(fields + [(name, number) for name in names]))
    stored = pq.ParquetFile(root / "data/chunk-000/episode_000000.parquet").metadata
    assert stored.num_row_groups == 1
    assert stored.row_group(0).column(0).compression == "SNAPPY"
    described = json.loads(stored.metadata[b"huggingface"])["info"]["features"]
    assert described["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 7, "_type": "Sequence"}
    assert described["timestamp"] == {"dtype": "float32", "_type": "Value"}


def test_index_columns_count_and_time_is_frame_over_rate(root: Path) -> None:
    frame = np.arange(NUM_STEPS)
    for episode, record in enumerate(lines(root, "episodes")):
        assert record["length"] == table(root, episode).num_rows == NUM_STEPS
        np.testing.assert_array_equal(rows(root, episode, "frame_index"), frame)
        np.testing.assert_array_equal(rows(root, episode, "index"), frame + NUM_STEPS * episode)
        np.testing.assert_array_equal(rows(root, episode, "episode_index"), episode)
        np.testing.assert_array_equal(rows(root, episode, "timestamp").astype("f4"), (frame / 30).astype("f4"))
        tasks = {row["task_index"]: row["task"] for row in lines(root, "tasks")}
        assert [tasks[index] for index in set(rows(root, episode, "task_index").tolist())] == record["tasks"]
    assert lines(root, "tasks")[0]["task"] == "pick up the red block and put it on the blue plate"


def test_videos_have_a_frame_for_every_row_and_a_key_frame_every_second(root: Path) -> None:
    paths = sorted((root / "videos").rglob("*.mp4"))
    assert len(paths) == 8
    for path in paths:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height, stream.average_rate) == (64, 36, 30)
            assert stream.codec_context.pix_fmt == "yuv420p"
            frames = list(container.decode(stream))
        assert len(frames) == NUM_STEPS
        assert [frame.key_frame for frame in frames] == [step % 2 == 0 for step in range(NUM_STEPS)]
        assert [round(frame.time * 30) for frame in frames] == list(range(NUM_STEPS))


def test_actions_are_the_next_state(root: Path) -> None:
    for episode in range(NUM_EPISODES):
        state, action = rows(root, episode, "observation.state"), rows(root, episode, "action")
        np.testing.assert_array_equal(action[:-1], state[1:])
        np.testing.assert_array_equal(action[-1], state[-1])
        assert state[:, 6].min() >= 0
        assert state[:, 6].max() <= 1


def test_statistics_are_those_of_the_columns_and_of_the_pictures(root: Path) -> None:
    for episode, record in enumerate(lines(root, "episodes_stats")):
        assert record["episode_index"] == episode
        stats = record["stats"]
        values = rows(root, episode, "observation.state")
        for name, expected in (
            ("min", values.min(0)),
            ("max", values.max(0)),
            ("mean", values.mean(0)),
            ("std", values.std(0)),
        ):
            np.testing.assert_allclose(stats["observation.state"][name], expected, atol=1e-6)
        assert stats["observation.state"]["count"] == [NUM_STEPS]
        assert stats["index"]["max"] == [NUM_STEPS * (episode + 1) - 1]
        pictures = {key: value for key, value in stats.items() if key.startswith("observation.images.")}
        assert len(pictures) == (2 if episode == NUM_EPISODES - 1 else 3)
        for key, image in pictures.items():
            path = root / f"videos/chunk-000/{key}/episode_{episode:06d}.mp4"
            with av.open(str(path)) as container:
                pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]) / 255
            assert np.shape(image["mean"]) == (3, 1, 1)
            np.testing.assert_allclose(np.ravel(image["mean"]), pixels.mean(axis=(0, 1, 2)), atol=0.02)
            np.testing.assert_allclose(np.ravel(image["std"]), pixels.std(axis=(0, 1, 2)), atol=0.02)


def tip_of(state: np.ndarray) -> np.ndarray:
    """Where a planar arm on a turntable has its tip, by trigonometry."""
    waist, shoulder, elbow, _, wrist = state[:5]
    angles = np.cumsum([shoulder, elbow, wrist])
    lengths = np.array([arm.UPPER_M, arm.FORE_M, arm.HAND_M])
    reach, height = lengths @ np.sin(angles), arm.BASE_M + lengths @ np.cos(angles)
    return np.array([reach * np.cos(waist), reach * np.sin(waist), height])


@pytest.mark.parametrize("episode", range(4))
def test_the_hand_closes_around_the_block_and_opens_above_the_plate(episode: int) -> None:
    task = arm.lay_table(episode, 0)
    motion = arm.plan_motion(task, 90, episode)
    closing = np.flatnonzero(np.diff(motion.state[:, 6]) < 0)
    opening = np.flatnonzero(np.diff(motion.state[:, 6]) > 0)
    x, y, _ = task.blocks[task.block]
    np.testing.assert_allclose(tip_of(motion.state[closing[-1] + 1]), [x, y, arm.BLOCK_HALF_M], atol=4e-3)
    plate = task.plates[task.plate]
    np.testing.assert_allclose(tip_of(motion.state[opening[0]])[:2], plate, atol=4e-3)
    np.testing.assert_allclose(motion.block[-1, :3, 3], [*plate, arm.PLATE_TOP_M + arm.BLOCK_HALF_M], atol=1e-9)
    held = slice(closing[-1] + 2, opening[0])
    for state, block in zip(motion.state[held], motion.block[held], strict=True):
        np.testing.assert_allclose(block[:3, 3], tip_of(state), atol=1e-3)
    assert np.abs(np.diff(motion.block[:, :3, 3], axis=0)).max() < 0.05  # it never jumps
    assert np.abs(np.diff(motion.state[:, :6], axis=0)).max() < 0.15  # nor does a joint


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("step", [0, 25, 89])
def test_the_block_is_in_the_pictures_where_the_numbers_have_it(view: str, step: int) -> None:
    task = arm.lay_table(0, 0)
    motion = arm.plan_motion(task, 90, 0)
    eye = camera(view, motion.state[step], (120, 160))
    seen = eye.see(motion.block[step, :3, 3])
    assert seen[0] > 0
    column, row = eye.project(seen).astype(int)
    picture = np.asarray(Table(task=task).paint(view, motion.state[step], motion.block[step], (120, 160)), np.float64)
    if not (0 <= row < 120 and 0 <= column < 160):
        pytest.skip("out of this view at this step")
    red, green, blue = picture[row, column]
    assert red > 2 * max(green, blue)


def test_left_and_right_wrist_see_the_world_from_their_own_side() -> None:
    state = arm.plan_motion(arm.lay_table(0, 0), 2, 0).state[0]
    left, right = (camera(view, state, SIZE).position_m for view in VIEWS[1:])
    assert left[1] > 0.05 > -0.05 > right[1]  # y is to the robot's left


def test_one_seed_gives_the_same_bytes_and_another_other_ones(tmp_path: Path) -> None:
    def digests(place: str, seed: int) -> dict[str, str]:
        root = write_lerobot_set(tmp_path / place, num_episodes=1, num_steps=4, size=SIZE, seed=seed)
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    first, other = digests("a", 0), digests("c", 1)
    assert first == digests("b", 0)
    differing = {name.split("/")[0] for name, digest in first.items() if other[name] != digest}
    assert differing == {"data", "meta", "videos"}


def test_a_single_episode_has_all_its_views(tmp_path: Path) -> None:
    root = write_lerobot_set(tmp_path, num_episodes=1, num_steps=2, size=SIZE, views=("cam_high", "cam_left_wrist"))
    assert len(list(root.rglob("*.mp4"))) == 2


def test_an_odd_picture_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="even height and width, found 35 x 64"):
        write_lerobot_set(tmp_path, size=(35, 64))
