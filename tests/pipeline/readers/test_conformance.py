"""The same two episodes, written into every format, come out equal.

To add a format: write a function that lays :data:`EPISODES` out in it, and add a :class:`Format` to :data:`FORMATS` that says
under which names it holds them. Pixels and numbers encode their own coordinates, so that a frame or row that comes from
elsewhere is seen. What a format cannot hold is left out of its entry: a view, a column, the instruction.
"""

import gzip
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import READERS, open_source
from pipeline.readers.aloha import AlohaReader
from pipeline.readers.protocol import Reader
from schemas.source import EpisodeRef
from tests.pipeline.readers import bag_builder, builders, droid_builder, hdf5_builders, replay_builder, rlds_builder
from tests.tasks.example_encoder import bytes_list, float_list, int64_list

VIEWS = {"main": (12, 16), "wrist": (10, 14)}
"""``view -> height, width``."""


@dataclass(frozen=True)
class Episode:
    """What was recorded."""

    number: int
    num_steps: int
    instruction: str

    def frame(self, view: str, step: int) -> np.ndarray:
        """Return red that rises downwards, green to the right, and blue that says episode, view and step. Smooth, as JPEG needs."""
        height, width = VIEWS[view]
        y, x = np.mgrid[:height, :width]
        blue = np.full((height, width), 90 * self.number + 40 * [*VIEWS].index(view) + 5 * step)
        return np.stack([8 * y + 4 * x, 6 * y + 10 * x, blue], axis=2).astype(np.uint8)

    def frames(self, view: str) -> np.ndarray:
        """Return all frames of a view."""
        return np.stack([self.frame(view, step) for step in range(self.num_steps)])

    @property
    def state(self) -> np.ndarray:
        """``float64[step, 2]``, exact in float32."""
        return 100.0 * self.number + np.arange(self.num_steps)[:, None] + np.array([0.0, 0.5])

    @property
    def actions(self) -> np.ndarray:
        """``float64[step, 3]``, within [0, 1) as controls are, exact in float32."""
        steps = np.arange(self.num_steps)[:, None]
        return (32 * self.number + 4 * steps + np.arange(3)) / 64


EPISODES = (Episode(0, 5, "lift the cube"), Episode(1, 7, "open the drawer"))


@dataclass(frozen=True)
class Format:
    """Where a format holds the episodes."""

    write: Callable[[Path], None]
    rate_hz: float
    views: Mapping[str, str]
    """``view -> its name in the format``, of those that the format can hold."""
    state: Sequence[str]
    """Signals that make the first ``num_state`` columns of the state."""
    actions: Sequence[str]
    num_state: int = 2
    pixel_error: int = 0
    """Greatest error of a pixel: 0 where images are lossless."""
    has_instruction: bool = True
    reader: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, root: Path, name: str) -> Reader:
        """Write the episodes and return the reader that finds them."""
        self.write(root)
        reader = open_source(root)
        assert reader.name == (self.reader or name)
        return type(reader)(root, **self.options) if self.options else reader  # type: ignore[call-arg]


# -- writers -----------------------------------------------------------------------------------------------------------


def write_lerobot(root: Path) -> None:
    """LeRobot v2.1 with images in columns."""
    features: dict[str, Any] = {
        f"observation.images.{view}": {"dtype": "image", "shape": [*size, 3], "names": ["height", "width", "channel"]}
        for view, size in VIEWS.items()
    }
    features |= {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "action": {"dtype": "float32", "shape": [3], "names": None},
    }
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 1000,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": features,
    }
    lines = [{"episode_index": e.number, "tasks": [e.instruction], "length": e.num_steps} for e in EPISODES]
    tasks = [{"task_index": e.number, "task": e.instruction} for e in EPISODES]
    builders.write(root / "meta/info.json", json.dumps(info).encode())
    builders.write(root / "meta/episodes.jsonl", "\n".join(map(json.dumps, lines)).encode())
    builders.write(root / "meta/tasks.jsonl", "\n".join(map(json.dumps, tasks)).encode())
    (root / "data/chunk-000").mkdir(parents=True)
    for episode in EPISODES:
        pq.write_table(lerobot_table(episode), root / f"data/chunk-000/episode_{episode.number:06d}.parquet")


def lerobot_table(episode: Episode) -> pa.Table:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        f"observation.images.{view}": pa.array(
            [{"bytes": builders.image_bytes(frame), "path": None} for frame in episode.frames(view)], image
        )
        for view in VIEWS
    }
    steps = np.arange(episode.num_steps)
    return pa.table(
        {
            **columns,
            "observation.state": pa.array(episode.state.tolist(), pa.list_(pa.float32(), 2)),
            "action": pa.array(episode.actions.tolist(), pa.list_(pa.float32(), 3)),
            "timestamp": pa.array(steps / 10, pa.float32()),
            "frame_index": steps,
            "episode_index": np.full_like(steps, episode.number),
            "task_index": np.full_like(steps, episode.number),
        }
    )


def write_npy(root: Path) -> None:
    for episode in EPISODES:
        folder = root / f"episode_{episode.number}"
        folder.mkdir(parents=True)
        for view in VIEWS:
            np.save(folder / f"{view}.npy", episode.frames(view))
        np.save(folder / "state.npy", episode.state)
        np.save(folder / "actions.npy", episode.actions)
        meta = {"rate_hz": 25, "instructions": [episode.instruction]}
        (folder / "meta.json").write_text(json.dumps(meta))


def write_npy_end_to_end(root: Path) -> None:
    root.mkdir()
    for view in VIEWS:
        np.save(root / f"{view}.npy", np.concatenate([episode.frames(view) for episode in EPISODES]))
    np.save(root / "state.npy", np.concatenate([episode.state for episode in EPISODES]))
    np.save(root / "actions.npy", np.concatenate([episode.actions for episode in EPISODES]))
    np.save(root / "episode_ends.npy", np.cumsum([episode.num_steps for episode in EPISODES]))
    (root / "meta.json").write_text('{"rate_hz": 25}')


def write_aloha(root: Path, *, compressed: bool = False, is_reversed: bool = False) -> None:
    for episode in EPISODES:
        images = {}
        for view, camera in (("main", "cam_high"), ("wrist", "cam_left_wrist")):
            stack = episode.frames(view)[..., ::-1] if is_reversed else episode.frames(view)
            images[camera] = hdf5_builders.padded([hdf5_builders.jpeg(f, 100) for f in stack]) if compressed else stack
        arrays = {"observations/qpos": episode.state.astype("f4"), "action": episode.actions.astype("f4")}
        hdf5_builders.write_aloha_arrays(root / f"episode_{episode.number}.hdf5", arrays, images)


def write_robomimic(root: Path, **options: Any) -> None:
    path = root / "demo.hdf5"
    demos = {
        f"demo_{episode.number}": {
            "actions": episode.actions,
            "obs/robot0_joint_pos": episode.state,
            "obs/agentview_image": episode.frames("main"),
            "obs/robot0_eye_in_hand_image": episode.frames("wrist"),
        }
        for episode in EPISODES
    }
    hdf5_builders.write_demos(path, demos, **options)


def write_libero(root: Path) -> None:
    """One file a task, as LIBERO has them; images upside down."""
    for episode in EPISODES:
        demo = {
            "actions": episode.actions,
            "obs/ee_states": episode.state[:, :1],
            "obs/gripper_states": episode.state[:, 1:],
            "obs/agentview_rgb": episode.frames("main")[:, ::-1],
            "obs/eye_in_hand_rgb": episode.frames("wrist")[:, ::-1],
        }
        hdf5_builders.write_demos(
            root / f"task{episode.number}_demo.hdf5",
            {"demo_0": demo},
            problem_info={"language_instruction": episode.instruction},
            macros_image_convention="opengl",
        )


CONTROLS = ("steer", "throttle", "brake")


def write_lbc(root: Path) -> None:
    for episode in EPISODES:
        for step in range(episode.num_steps):
            controls = dict(zip(CONTROLS, episode.actions[step].tolist(), strict=True))
            record = {**builders.measurement(step), "speed": float(episode.state[step, 0]), **controls}
            folder = root / f"route_{episode.number}"
            builders.write(folder / f"measurements/{step:04d}.json", repr(record).encode())
            for view, name in (("main", "rgb"), ("wrist", "rgb_left")):
                builders.write(folder / f"{name}/{step:04d}.png", builders.image_bytes(episode.frame(view, step)))


def write_bench2drive(root: Path) -> None:
    for episode in EPISODES:
        for step in range(episode.num_steps):
            controls = dict(zip(CONTROLS, episode.actions[step].tolist(), strict=True))
            record = {**builders.annotation(step), "speed": float(episode.state[step, 0]), **controls}
            folder = root / f"clip_{episode.number}"
            builders.write(folder / f"anno/{step:05d}.json.gz", gzip.compress(json.dumps(record).encode(), mtime=0))
            for view, name in (("main", "rgb_front"), ("wrist", "rgb_back")):
                image = hdf5_builders.jpeg(episode.frame(view, step), 100)
                builders.write(folder / f"camera/{name}/{step:05d}.jpg", image)


def write_garage(root: Path) -> None:
    for episode in EPISODES:
        folder = root / f"Accident/{episode.number}_Rep0_Town12_route0_01_02_03_04_05"
        for step in range(episode.num_steps):
            controls = dict(zip(CONTROLS, episode.actions[step].tolist(), strict=True))
            record = {"command": 4, "speed": float(episode.state[step, 0]), **controls}
            for name, content in (("measurements", record), ("boxes", [])):
                packed = gzip.compress(json.dumps(content).encode(), mtime=0)
                builders.write(folder / name / f"{step:04d}.json.gz", packed)
            for view, name in (("main", "rgb"), ("wrist", "rgb_augmented")):
                image = hdf5_builders.jpeg(episode.frame(view, step), 100)
                builders.write(folder / name / f"{step:04d}.jpg", image)
        results = {"status": "Perfect", "scores": {"score_composed": 100.0}, "infractions": {}}
        builders.write(folder / "results.json.gz", gzip.compress(json.dumps(results).encode(), mtime=0))


def write_dump(root: Path, *, table: bool = False) -> None:
    """Every third frame of the simulator, from another number on in each recording."""
    for episode in EPISODES:
        folder, frames = root / f"run_{episode.number}", 998 + 7 * episode.number + 3 * np.arange(episode.num_steps)
        lines = ["frame,timestamp,speed,steer,throttle,brake"]
        for step, frame in enumerate(frames.tolist()):
            controls = dict(zip(CONTROLS, episode.actions[step].tolist(), strict=True))
            record = {"speed": float(episode.state[step, 0]), "control": controls} | controls
            lines.append(",".join(map(str, (frame, 0.05 * frame, record["speed"], *controls.values()))))
            if not table:
                builders.write(folder / f"ego/{frame}.json", json.dumps(record).encode())
            for view, name in (("main", "front"), ("wrist", "rear")):
                builders.write(folder / f"{name}/{frame}.png", builders.image_bytes(episode.frame(view, step)))
        if table:
            builders.write(folder / "ego.csv", "\n".join(lines).encode())


def write_rlds(root: Path) -> None:
    images = {f"image_{k}": rlds_builder.image("png", *size, 3) for k, size in enumerate(VIEWS.values())}
    observation = rlds_builder.folder(**images, state=rlds_builder.tensor("float32", 2))
    action, text = rlds_builder.tensor("float32", 3), rlds_builder.text()
    first = rlds_builder.tensor("bool")
    step = rlds_builder.folder(observation=observation, action=action, language_instruction=text, is_first=first)
    episodes = [
        {
            **{
                f"steps/observation/image_{k}": bytes_list([builders.image_bytes(f) for f in episode.frames(view)])
                for k, view in enumerate(VIEWS)
            },
            "steps/observation/state": float_list(episode.state.ravel().tolist()),
            "steps/action": float_list(episode.actions.ravel().tolist()),
            "steps/is_first": int64_list([1] + [0] * (episode.num_steps - 1)),
            "steps/language_instruction": bytes_list([episode.instruction.encode()] * episode.num_steps),
        }
        for episode in EPISODES
    ]
    features = rlds_builder.folder(steps=rlds_builder.sequence(step))
    rlds_builder.write_rlds(root, {"train": [episodes[:1], episodes[1:]]}, features=features)


def write_replay_buffer(root: Path) -> None:
    arrays = {view: np.concatenate([episode.frames(view) for episode in EPISODES]) for view in VIEWS}
    arrays["state"] = np.concatenate([episode.state for episode in EPISODES]).astype(np.float32)
    arrays["action"] = np.concatenate([episode.actions for episode in EPISODES]).astype(np.float32)
    ends = np.cumsum([episode.num_steps for episode in EPISODES]).tolist()
    for path, data in replay_builder.buffer_files(ends, arrays).items():
        builders.write(root / "runs.zarr" / path, data)
    (root / "meta.json").write_text('{"rate_hz": 10}')


def bag_messages(episode: Episode, *, is_ros1: bool) -> list[bag_builder.Message]:
    """Cameras and joints 10 times a second, actions once between each two of them, the instruction before all else."""
    found = [("/task", "std_msgs/String", -1, bag_builder.text(is_ros1, episode.instruction))]
    for step in range(episode.num_steps):
        at_ns = 10**8 * step
        stamp = {"stamp_ns": 10**12 * (episode.number + 1) + at_ns}
        main, wrist = (episode.frame(view, step) for view in VIEWS)
        png = bag_builder.compressed(is_ros1, builders.image_bytes(wrist), "png", **stamp)
        position = bag_builder.joints(is_ros1, ("a", "b"), episode.state[step].tolist(), **stamp)
        found += [
            (
                "/main",
                "sensor_msgs/Image",
                at_ns,
                bag_builder.image(is_ros1, main[..., ::-1], "bgr8", padding=3, **stamp),
            ),
            ("/wrist", "sensor_msgs/CompressedImage", at_ns + 10**6, png),
            ("/joint_states", "sensor_msgs/JointState", at_ns + 2 * 10**6, position),
            (
                "/action",
                "std_msgs/Float64MultiArray",
                at_ns,
                bag_builder.numbers(is_ros1, episode.actions[step].tolist()),
            ),
        ]
    origin_ns = 10**12 * (episode.number + 1)
    return [bag_builder.Message(topic, kind, origin_ns + at_ns, data) for topic, kind, at_ns, data in found]


def write_bags(root: Path, **options: Any) -> None:
    for episode in EPISODES:
        bag_builder.write_ros1(root / f"run_{episode.number}.bag", bag_messages(episode, is_ros1=True), **options)


def write_mcaps(root: Path, **options: Any) -> None:
    for episode in EPISODES:
        bag_builder.write_mcap(root / f"run_{episode.number}.mcap", bag_messages(episode, is_ros1=False), **options)


def write_ros2(root: Path, **options: Any) -> None:
    for episode in EPISODES:
        bag_builder.write_sqlite(root / f"run_{episode.number}", bag_messages(episode, is_ros1=False), **options)


def write_droid(root: Path) -> None:
    """The state's second number is the gripper's; annotations beside all episodes."""
    said = {}
    for episode in EPISODES:
        folder = root / f"lab/success/2023-10-10/Fri_Oct_10_14:0{episode.number}:00_2023"
        arrays = {
            "observation/robot_state/joint_positions": episode.state[:, :1],
            "observation/robot_state/gripper_position": episode.state[:, 1],
            "action/joint_position": episode.actions[:, :2],
            "action/gripper_position": episode.actions[:, 2],
        }
        droid_builder.write_trajectory(folder, arrays)
        droid_builder.write_metadata(folder, f"run{episode.number}")
        for view, role in (("main", "ext1"), ("wrist", "wrist")):
            path = folder / f"recordings/MP4/{droid_builder.SERIALS[role]}.mp4"
            droid_builder.write_mp4(path, episode.frames(view))
        said[f"run{episode.number}"] = {"language_instruction1": episode.instruction}
    (root / "aggregated-annotations-030724.json").write_text(json.dumps(said))


# -- formats -----------------------------------------------------------------------------------------------------------

_NPY = {"rate_hz": 25.0, "views": {"main": "main", "wrist": "wrist"}, "state": ("state",), "actions": ("actions",)}
_ALOHA: dict[str, Any] = {
    "rate_hz": 50.0,
    "views": {"main": "cam_high", "wrist": "cam_left_wrist"},
    "state": ("qpos",),
    "actions": ("action",),
    "has_instruction": False,
    "reader": "aloha",
}
_ROBOMIMIC: dict[str, Any] = {
    "rate_hz": 20.0,
    "views": {"main": "agentview_image", "wrist": "robot0_eye_in_hand_image"},
    "state": ("robot0_joint_pos",),
    "actions": ("actions",),
    "has_instruction": False,
    "reader": "robomimic",
}
_BAG: dict[str, Any] = {
    "rate_hz": 10.0,
    "views": {"main": "/main", "wrist": "/wrist"},
    "state": ("/joint_states.position",),
    "actions": ("/action.data",),
    "reader": "rosbag",
}
_DRIVING: dict[str, Any] = {"state": ("speed",), "actions": CONTROLS, "num_state": 1, "has_instruction": False}
_DUMP: dict[str, Any] = {"rate_hz": 6.66666667, "views": {"main": "front", "wrist": "rear"}, **_DRIVING}

FORMATS: dict[str, Format] = {
    "lerobot": Format(
        write_lerobot,
        rate_hz=10.0,
        views={view: f"observation.images.{view}" for view in VIEWS},
        state=("observation.state",),
        actions=("action",),
    ),
    "npy": Format(write_npy, **_NPY),
    "npy-end-to-end": Format(write_npy_end_to_end, **_NPY, reader="npy", has_instruction=False),
    "aloha": Format(write_aloha, **_ALOHA),
    "aloha-jpeg": Format(lambda root: write_aloha(root, compressed=True), **_ALOHA, pixel_error=3),
    "aloha-jpeg-rgb": Format(
        lambda root: write_aloha(root, compressed=True, is_reversed=True),
        **_ALOHA,
        pixel_error=3,
        options={"channel_order": "rgb"},
    ),
    "aloha-bgr": Format(lambda root: write_aloha(root, is_reversed=True), **_ALOHA, options={"channel_order": "bgr"}),
    "robomimic": Format(write_robomimic, **_ROBOMIMIC),
    "robomimic-gzip": Format(lambda root: write_robomimic(root, compression="gzip"), **_ROBOMIMIC),
    "libero": Format(
        write_libero,
        rate_hz=20.0,
        views={"main": "agentview_rgb", "wrist": "eye_in_hand_rgb"},
        state=("ee_states", "gripper_states"),
        actions=("actions",),
        reader="robomimic",
    ),
    "lbc": Format(write_lbc, rate_hz=2.0, views={"main": "rgb", "wrist": "rgb_left"}, **_DRIVING),
    "bench2drive": Format(
        write_bench2drive, rate_hz=10.0, views={"main": "rgb_front", "wrist": "rgb_back"}, **_DRIVING, pixel_error=3
    ),
    "carla-garage": Format(
        write_garage, rate_hz=4.0, views={"main": "rgb", "wrist": "rgb_augmented"}, **_DRIVING, pixel_error=3
    ),
    "carla-dump": Format(write_dump, **_DUMP, options={"fixed_delta_s": 0.05}),
    "carla-dump-table": Format(lambda root: write_dump(root, table=True), **_DUMP, reader="carla-dump"),
    "rlds": Format(
        write_rlds,
        rate_hz=5.0,
        views={"main": "image_0", "wrist": "image_1"},
        state=("state",),
        actions=("action",),
    ),
    "diffusion-policy": Format(
        write_replay_buffer,
        rate_hz=10.0,
        views={view: view for view in VIEWS},
        state=("state",),
        actions=("action",),
        has_instruction=False,
    ),
    "droid": Format(
        write_droid,
        rate_hz=15.0,
        views={"main": "exterior_image_1_left", "wrist": "wrist_image_left"},
        state=("observation/robot_state/joint_positions", "observation/robot_state/gripper_position"),
        actions=("action/joint_position", "action/gripper_position"),
    ),
    "bag": Format(write_bags, **_BAG),
    "bag-lz4": Format(lambda root: write_bags(root, codec="lz4"), **_BAG),
    "mcap": Format(lambda root: write_mcaps(root, per_chunk=0), **_BAG),
    "mcap-zstd": Format(lambda root: write_mcaps(root, codec="zstd"), **_BAG),
    "ros2-sqlite": Format(lambda root: write_ros2(root, files=2, has_definitions=False), **_BAG),
}


# -- what holds for each -----------------------------------------------------------------------------------------------


@pytest.fixture(params=FORMATS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Format, Reader, Sequence[EpisodeRef]]:
    format = FORMATS[request.param]
    reader = format.open(tmp_path / "raw", request.param)
    index = reader.index()
    assert index.faults == ()
    assert (index.state[: len(format.state)], index.actions) == (tuple(format.state), tuple(format.actions))
    return format, reader, index.episodes


def picked(episode: Episode) -> list[np.ndarray]:
    """Return steps that a caller may ask for: all, none, one, some with repeats."""
    last = episode.num_steps - 1
    return [np.array(steps, np.int64) for steps in (range(last + 1), [], [last], [0, 0, 2, last, last, last])]


def test_episodes_have_their_length_rate_order_and_instruction(case) -> None:
    format, _, refs = case
    assert [ref.num_steps for ref in refs] == [episode.num_steps for episode in EPISODES]
    assert [ref.rate_hz for ref in refs] == [format.rate_hz] * 2
    assert len({ref.key for ref in refs}) == 2
    if format.has_instruction:
        assert [ref.instructions for ref in refs] == [(episode.instruction,) for episode in EPISODES]
    for ref in refs:
        assert [ref.view(name).present for name in format.views.values()] == [True] * len(format.views)
        sizes = {view: (ref.view(name).height_px, ref.view(name).width_px) for view, name in format.views.items()}
        assert sizes == {view: VIEWS[view] for view in format.views}


def test_numbers_come_out_as_they_were_recorded(case) -> None:
    format, reader, refs = case
    for episode, ref in zip(EPISODES, refs, strict=True):
        for steps in picked(episode):
            rows, faults = signals(reader, ref, [*format.state, *format.actions, "timestamp_s"], steps)
            assert faults == ()
            state, actions = episode.state[:, : format.num_state], episode.actions
            times_s = np.arange(episode.num_steps)[:, None] / format.rate_hz
            np.testing.assert_array_equal(rows[:, :-1], np.hstack([state, actions])[steps])
            np.testing.assert_allclose(rows[:, -1:], times_s[steps], atol=1e-6)


def test_pixels_come_out_as_they_were_recorded(case) -> None:
    format, reader, refs = case
    for episode, ref in zip(EPISODES, refs, strict=True):
        for view, name in format.views.items():
            for steps in picked(episode):
                found = list(frames(reader, ref, name, steps))
                assert len(found) == len(steps)
                for step, frame in zip(steps.tolist(), found, strict=True):
                    assert isinstance(frame, np.ndarray), frame
                    error = np.abs(frame.astype(int) - episode.frame(view, step)).max()
                    assert error <= format.pixel_error, (view, step)


def test_the_reader_itself_yields_one_frame_for_each_step_asked_for(case) -> None:
    format, reader, refs = case
    for episode, ref in zip(EPISODES, refs, strict=True):
        for name in format.views.values():
            for steps in picked(episode):
                assert len(list(reader.read_frames(ref, name, steps))) == len(steps)


def test_the_files_of_an_episode_are_named_and_there(case) -> None:
    format, reader, refs = case
    for ref in refs:
        files = list(reader.files(ref))
        named = [reader.frame_path(ref, name, 0) for name in format.views.values()]
        assert files and {Path(path) for path in named} <= set(files)
        assert len(set(files)) == len(files)
        assert all((reader.root / path).is_file() for path in files)


def test_references_hold_json_and_travel(case) -> None:
    _, reader, refs = case
    assert pickle.loads(pickle.dumps((reader, refs))) == (reader, refs)
    assert [json.loads(json.dumps(ref.details)) for ref in refs] == [ref.details for ref in refs]


def test_nothing_in_an_index_depends_on_where_the_source_lies(case, tmp_path: Path) -> None:
    format, reader, refs = case
    reader.root.rename(tmp_path / "moved")
    (tmp_path / "raw").mkdir()
    (tmp_path / "moved").rename(tmp_path / "raw/raw")
    moved = type(reader)(tmp_path / "raw/raw", **format.options)
    assert moved.index().episodes == refs


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    """Once, and for the format whose library has state of its own."""
    write_aloha(tmp_path / "raw")
    reader = AlohaReader(tmp_path / "raw")
    ref = reader.index().episodes[1]
    (tmp_path / "job").write_bytes(pickle.dumps((reader, ref)))
    code = """
import pickle, sys
import numpy as np
reader, ref = pickle.load(open(sys.argv[1], "rb"))
print(sum(int(frame.sum()) for frame in reader.read_frames(ref, "cam_high", np.arange(ref.num_steps))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == int(EPISODES[1].frames("main").sum())


WITHOUT = {
    "carla-recorder": "records poses and no pixels",
    "planner-npz": "holds training samples, no episodes and no pixels",
}
"""Readers that no entry covers, and why."""


def test_every_reader_conforms_or_is_said_not_to() -> None:
    covered = {format.reader or name for name, format in FORMATS.items()}
    assert set(READERS) <= covered | set(WITHOUT)
    assert not covered & set(WITHOUT), "take it out of WITHOUT"
