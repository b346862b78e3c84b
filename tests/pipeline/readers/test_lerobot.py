"""LeRobot v2.0 and v2.1."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.lerobot import LeRobotReader
from pipeline.readers.lerobot_meta import flat_names
from schemas.errors import Reason, SourceError
from schemas.source import Fault
from tests.pipeline.readers import builders

ALL = ["observation.state", "action", "next.reward"]


def edit_info(root: Path, **changes: object) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info.update(changes)
    path.write_text(json.dumps({key: value for key, value in info.items() if value is not ...}))


def edit_feature(root: Path, name: str, **changes: object) -> None:
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"].setdefault(name, {}).update(changes)
    path.write_text(json.dumps(info))


def test_the_real_set_has_4_episodes_1667_steps_and_one_base_view(shared_data: Path) -> None:
    root = shared_data / "lerobot_v2.1/starvla_sim_pick_place"
    reader = open_source(root)
    index = reader.index()
    assert index.format == "lerobot"
    assert [ref.num_steps for ref in index.episodes] == [412, 411, 398, 446]
    assert [ref.key for ref in index.episodes] == [f"episode_{k:06d}" for k in range(4)]
    present = {ref.key[-1]: [view.name for view in ref.views if view.present] for ref in index.episodes}
    assert present == {
        "0": ["video.ego_view"],
        "1": ["video.ego_view"],
        "2": ["video.base_view", "video.ego_view"],
        "3": ["video.ego_view"],
    }
    assert all(len(ref.views) == 3 for ref in index.episodes)
    assert index.faults == ()
    modality = json.loads((root / "meta/modality.json").read_text())
    assert list(index.actions) == [value["original_key"] for value in modality["action"].values()]
    assert list(index.state) == [value["original_key"] for value in modality["state"].values()]
    assert any("21 columns" in note and "unpickled" in note for note in index.notes)


def test_rows_of_the_real_set_are_what_pyarrow_reads(shared_data: Path) -> None:
    root = shared_data / "lerobot_v2.1/starvla_sim_pick_place"
    reader = LeRobotReader(root)
    ref = reader.index().episodes[2]
    table = pq.read_table(root / "data/chunk-000/episode_000002.parquet", columns=["state.joints", "timestamp"])
    steps = np.array([0, 0, 7, 200, 397])
    rows, faults = signals(reader, ref, ["state.joints", "timestamp_s", "instruction_index"], steps)
    np.testing.assert_array_equal(rows[:, :7], np.array(table["state.joints"].to_pylist())[steps])
    np.testing.assert_array_equal(rows[:, 7], np.array(table["timestamp"].to_pylist())[steps])
    np.testing.assert_array_equal(rows[:, 8], 0)
    assert ref.instructions == ("Move the potato to the top of the cooking utensils.",)
    assert faults == ()


def test_frames_of_the_real_video_are_read_by_index(shared_data: Path) -> None:
    pytest.importorskip("av")
    reader = LeRobotReader(shared_data / "lerobot_v2.1/starvla_sim_pick_place")
    ref = reader.index().episodes[2]
    found = list(frames(reader, ref, "video.base_view", np.array([0, 1, 1])))
    assert [frame.shape for frame in found if isinstance(frame, np.ndarray)] == [(480, 640, 3)] * 3
    missing = list(frames(reader, ref, "video.base_view_2", np.array([0, 5])))
    assert [(f.reason, f.start, f.stream) for f in missing if isinstance(f, Fault)] == [
        (Reason.MISSING_FILE, 0, "video.base_view_2"),
        (Reason.MISSING_FILE, 5, "video.base_view_2"),
    ]


def test_the_minimal_real_set_is_read_without_most_of_its_metadata(shared_data: Path) -> None:
    root = shared_data / "lerobot_v2.1_minimal/data/lerobot"
    reader = LeRobotReader(root)
    index = reader.index()
    assert [ref.num_steps for ref in index.episodes] == [30, 30]
    assert (index.state, index.actions) == (("observation.state",), ("action",))
    rows, faults = signals(reader, index.episodes[1], ["observation.state"], np.arange(30))
    table = pq.read_table(root / "data/chunk-000/episode_000001.parquet")
    np.testing.assert_array_equal(rows, np.stack([table[f"observation.state_{k}"] for k in range(14)], axis=1))
    assert faults == ()


def test_v1_is_named_and_not_read_yet(shared_data: Path) -> None:
    with pytest.raises(SourceError, match="not read yet") as caught:
        open_source(shared_data / "lerobot_v1/pusht")
    assert caught.value.reason == Reason.UNSUPPORTED
    with pytest.raises(SourceError, match="not read yet"):
        LeRobotReader(shared_data / "lerobot_v1/pusht").index()


@pytest.mark.parametrize("version", ["v3.1", "v4.0", "v1.6", "2.5"])
def test_versions_that_nobody_has_seen_are_refused(tmp_path: Path, version: str) -> None:
    builders.write_lerobot(tmp_path, (3,), version=version)
    with pytest.raises(SourceError, match="expected LeRobot v2.0, v2.1 or v3.0"):
        open_source(tmp_path)


@pytest.mark.parametrize("version", ["v2.0", "v2.1", None])
def test_signals_frames_and_instructions_of_a_set(tmp_path: Path, version: str | None) -> None:
    reader = open_source(builders.write_lerobot(tmp_path, (3, 4, 2), version=version))
    index = reader.index()
    assert [ref.num_steps for ref in index.episodes] == [3, 4, 2]
    ref = index.episodes[1]
    assert ref.instructions == ("push", "pull")
    rows, faults = signals(reader, ref, [*ALL, "timestamp_s", "instruction_index"], np.arange(4))
    values = 1000.0 + np.arange(4)
    expected = np.stack([values, -values, values, -values, values, np.float32(np.arange(4) / 10), [0, 0, 1, 1]], axis=1)
    np.testing.assert_array_equal(rows, expected)
    assert faults == ()
    found = list(frames(reader, ref, "observation.images.front", np.array([0, 2, 2, 3])))
    for step, frame in zip((0, 2, 2, 3), found, strict=True):
        np.testing.assert_array_equal(frame, builders.colour(1, step))
    assert (ref.views[0].height_px, ref.views[0].width_px) == (6, 8)
    assert list(reader.files(ref)) == [Path("data/chunk-000/episode_000001.parquet")]


def test_ids_are_keys_and_not_positions(tmp_path: Path) -> None:
    reader = LeRobotReader(builders.write_lerobot(tmp_path, (3, 2), ids=(7, 3)))
    index = reader.index()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [("episode_000003", 2), ("episode_000007", 3)]
    rows, _ = signals(reader, index.episodes[1], ["next.reward"], np.array([2]))
    assert rows[0, 0] == 7002


def test_paths_come_from_the_templates(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    (tmp_path / "data/chunk-000/episode_000000.parquet").rename(tmp_path / "e0.parquet")
    edit_info(tmp_path, data_path="e{episode_index}.parquet")
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    assert signals(reader, ref, ["next.reward"], np.array([2]))[0][0, 0] == 2


@pytest.mark.parametrize(
    "template",
    [
        "{episode_index:999999999d}",
        "{episode_index.__class__}",
        "{0}",
        "{other}",
        "{episode_index",
        "{episode_index!r}",
        5,
    ],
)
def test_a_template_that_could_do_more_than_name_a_file_is_refused(tmp_path: Path, template: object) -> None:
    builders.write_lerobot(tmp_path, (3,))
    edit_info(tmp_path, data_path=template)
    with pytest.raises(SourceError, match="data_path"):
        LeRobotReader(tmp_path).index()


def test_a_template_that_leaves_the_source_finds_nothing(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path / "set", (3,))
    (tmp_path / "set/data/chunk-000/episode_000000.parquet").rename(tmp_path / "e0.parquet")
    edit_info(tmp_path / "set", data_path="../e{episode_index}.parquet")
    index = LeRobotReader(tmp_path / "set").index()
    assert index.episodes == ()
    assert [fault.reason for fault in index.faults] == [Reason.MISSING_FILE]


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ([480, 640, 3], ["height", "width", "channels"], (480, 640)),
        ([3, 480, 640], ["channel", "height", "width"], (480, 640)),
        ([3, 480, 640], None, (480, 640)),
        ([480, 640, 3], None, (480, 640)),
        ([640, 480, 3], ["width", "height", "channel"], (480, 640)),
        ([480, 640, 1], {"axes": ["height", "width", "channel"]}, (480, 640)),
        ([480, 640], None, (480, 640)),
        ([7], None, (0, 0)),
    ],
)
def test_height_and_width_are_found_in_any_order(
    tmp_path: Path, shape: list[int], names: object, expected: tuple[int, int]
) -> None:
    builders.write_lerobot(tmp_path, (3,))
    edit_feature(tmp_path, "observation.images.front", shape=shape, names=names)
    view = LeRobotReader(tmp_path).index().episodes[0].views[0]
    assert (view.height_px, view.width_px) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ()),
        (["a", "b"], ("a", "b")),
        ([["a", "b"]], ("a", "b")),
        ({"motors": ["a", "b"]}, ("a", "b")),
        ({"a": 0, "b": 1}, ("a", "b")),
        (7, ()),
        ("a", ("a",)),
    ],
)
def test_names_of_any_shape_are_flattened(names: object, expected: tuple[str, ...]) -> None:
    assert flat_names(names) == expected


def test_names_that_do_not_fit_their_feature_are_dropped(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    edit_feature(tmp_path, "action", names=["only one"])
    ref = LeRobotReader(tmp_path).index().episodes[0]
    assert ref.signal("action").names == ()
    assert ref.signal("observation.state").names == ("shoulder", "elbow")


def test_broken_lines_cost_themselves_only(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3, 4))
    path = tmp_path / "meta/episodes.jsonl"
    good = path.read_text().splitlines()
    lines = [good[0], "{", "[]", '{"episode_index": "1"}', '{"episode_index": 5}', "", good[0], good[1], "\xff\udcff"]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    index = LeRobotReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [3, 4]
    assert [fault.reason for fault in index.faults] == [Reason.BAD_METADATA] * 4 + [
        Reason.DUPLICATE,
        Reason.BAD_METADATA,
    ]
    assert [fault.message.split(":")[0] for fault in index.faults] == [f"line {k}" for k in (2, 3, 4, 5, 7, 9)]


def test_a_missing_data_file_is_a_fault_of_the_index(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3, 4, 2))
    (tmp_path / "data/chunk-000/episode_000001.parquet").unlink()
    index = LeRobotReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["episode_000000", "episode_000002"]
    (fault,) = index.faults
    assert (fault.reason, fault.episode, fault.path) == (
        Reason.MISSING_FILE,
        "episode_000001",
        "data/chunk-000/episode_000001.parquet",
    )


def test_an_unfinished_table_is_a_fault_when_it_is_read(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    path = tmp_path / "data/chunk-000/episode_000000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["action", "timestamp_s"], np.arange(3))
    assert np.isnan(block.values["action"]).all()
    assert [(fault.reason, fault.start, fault.stop) for fault in block.faults] == [(Reason.TRUNCATED, 0, 3)]
    found = list(frames(reader, ref, "observation.images.front", np.arange(3)))
    assert [frame.reason for frame in found if isinstance(frame, Fault)] == [Reason.TRUNCATED] * 3


@pytest.mark.parametrize(("declared", "bounds"), [(5, (3, 5)), (2, (2, 3))])
def test_lengths_that_disagree_are_a_count_mismatch(tmp_path: Path, declared: int, bounds: tuple[int, int]) -> None:
    builders.write_lerobot(tmp_path, (3,))
    line = {"episode_index": 0, "tasks": ["push"], "length": declared}
    (tmp_path / "meta/episodes.jsonl").write_text(json.dumps(line))
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.num_steps == declared
    block = reader.read_signals(ref, ["next.reward"], np.arange(declared))
    np.testing.assert_array_equal(block.values["next.reward"][:3], np.arange(min(declared, 3)))
    assert np.isnan(block.values["next.reward"][3:]).all()
    assert [(fault.reason, fault.start, fault.stop) for fault in block.faults] == [(Reason.COUNT_MISMATCH, *bounds)]
    assert reader.read_signals(ref, ["next.reward"], np.arange(1)).faults == ()
    found = list(frames(reader, ref, "observation.images.front", np.arange(declared)))
    assert [isinstance(frame, Fault) for frame in found] == [False, False, False, True, True][:declared]


def test_lengths_come_from_the_footers_where_there_is_no_episodes_file(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3, 4))
    (tmp_path / "meta/episodes.jsonl").unlink()
    (tmp_path / "meta/tasks.jsonl").unlink()
    builders.write(tmp_path / "data/chunk-000/episode_000009.parquet", b"PAR1")
    index = LeRobotReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [3, 4]
    assert [(fault.reason, fault.episode) for fault in index.faults] == [(Reason.TRUNCATED, "episode_000009")]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float64())),
        pa.array([[1.0, 2.0]] * 3, pa.large_list(pa.float32())),
        pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        pa.array([[[1.0], [2.0]]] * 3, pa.list_(pa.list_(pa.float32()))),
        pa.array([[[1.0, 2.0]]] * 3, pa.list_(pa.list_(pa.float32(), 2), 1)),
        pa.array([[1, 2]] * 3, pa.list_(pa.int8())),
        pa.array([[9.0, 9.0]] + [[1.0, 2.0]] * 3, pa.list_(pa.float64())).slice(1),
        pa.array([[9.0, 9.0]] + [[1.0, 2.0]] * 3, pa.list_(pa.float64(), 2)).slice(1),
    ],
)
def test_rows_are_read_from_any_of_arrows_types(tmp_path: Path, column: pa.Array) -> None:
    builders.write_lerobot(tmp_path, (3,))
    pq.write_table(pa.table({"action": column}), tmp_path / "data/chunk-000/episode_000000.parquet")
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["action"], np.arange(3))
    np.testing.assert_array_equal(block.values["action"], [[1, 2]] * 3)
    assert block.values["action"].dtype == np.float64
    assert block.faults == ()


def test_null_and_ragged_rows_are_faults_of_their_steps(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (5,))
    column = pa.array([[1.0, 2.0], None, [3.0], [4.0, 5.0], [6.0, None]], pa.list_(pa.float64()))
    reward = pa.array([1.0, None, 3.0, 4.0, float("inf")], pa.float32())
    pq.write_table(
        pa.table({"action": column, "next.reward": reward}), tmp_path / "data/chunk-000/episode_000000.parquet"
    )
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["action", "next.reward"], np.arange(5))
    nan = np.nan
    np.testing.assert_array_equal(block.values["action"], [[1, 2], [nan, nan], [nan, nan], [4, 5], [6, nan]])
    np.testing.assert_array_equal(block.values["next.reward"], [1, nan, 3, 4, np.inf])
    assert [(f.stream, f.reason, f.start, f.stop) for f in block.faults] == [
        ("action", Reason.WRONG_SHAPE, 1, 3),
        ("next.reward", Reason.WRONG_SHAPE, 1, 2),
    ]


def test_a_column_that_is_absent_or_no_number_costs_itself_only(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    edit_feature(tmp_path, "lost", dtype="float32", shape=[2])
    edit_feature(tmp_path, "annotation.trace", dtype="float32", shape=[1])
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["lost", "next.reward", "annotation.trace"], np.arange(3))
    np.testing.assert_array_equal(block.values["next.reward"], [0, 1, 2])
    assert [(fault.stream, fault.reason) for fault in block.faults] == [
        ("lost", Reason.BAD_METADATA),
        ("annotation.trace", Reason.UNSUPPORTED),
    ]


def test_only_the_row_groups_asked_for_are_read(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (100,))
    path = tmp_path / "data/chunk-000/episode_000000.parquet"
    pq.write_table(builders.lerobot_table(0, 100), path, row_group_size=7)
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    steps = np.array([20, 21, 21, 64, 99])
    rows, faults = signals(reader, ref, ["next.reward", "timestamp_s"], steps)
    np.testing.assert_array_equal(rows, np.stack([steps, np.float32(steps / 10)], axis=1))
    assert faults == ()
    found = list(frames(reader, ref, "observation.images.front", np.array([6, 7, 13, 20])))
    for step, frame in zip((6, 7, 13, 20), found, strict=True):
        np.testing.assert_array_equal(frame, builders.colour(0, step))


def test_images_beside_the_table_are_read_and_lost_ones_are_faults(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (4,))
    builders.write(tmp_path / "images/a.png", builders.image_bytes(builders.colour(2, 3)))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": None, "path": path} for path in ("images/a.png", "images/lost.png", "../../etc/passwd", None)]
    table = pa.table({"observation.images.front": pa.array(cells, kind)})
    pq.write_table(table, tmp_path / "data/chunk-000/episode_000000.parquet")
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    found = list(frames(reader, ref, "observation.images.front", np.arange(4)))
    np.testing.assert_array_equal(found[0], builders.colour(2, 3))
    reasons = [frame.reason for frame in found[1:] if isinstance(frame, Fault)]
    assert reasons == [Reason.MISSING_FILE, Reason.UNSUPPORTED, Reason.MISSING_FILE]


def test_a_task_that_the_episode_does_not_have_is_a_fault(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (4,))
    (tmp_path / "meta/episodes.jsonl").write_text('{"episode_index": 0, "tasks": ["push"], "length": 4}')
    reader = LeRobotReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["instruction_index"], np.arange(4))
    assert [(fault.stream, fault.start, fault.stop) for fault in block.faults] == [("instruction_index", 2, 4)]


def test_state_and_actions_follow_modality_then_names_then_prefixes(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    index = LeRobotReader(tmp_path).index()
    assert (index.state, index.actions) == (("observation.state",), ("action",))
    modality = {
        "state": {"arm": {"start": 0, "end": 2}, "reward": {"original_key": "next.reward"}},
        "action": {"b": {"original_key": "nowhere"}},
    }
    (tmp_path / "meta/modality.json").write_text(json.dumps(modality))
    index = LeRobotReader(tmp_path).index()
    assert (index.state, index.actions) == (("observation.state", "next.reward"), ("action",))
    (tmp_path / "meta/modality.json").write_text("{")
    edit_info(
        tmp_path,
        features={
            name: {"dtype": "float32", "shape": [1]} for name in ("state.b", "action.x", "state.a", "other", "action.w")
        },
    )
    index = LeRobotReader(tmp_path).index()
    assert (index.state, index.actions) == (("state.b", "state.a"), ("action.x", "action.w"))
    assert any("modality.json" in note for note in index.notes)


@pytest.mark.parametrize("fps", [0, -1, None, "30", float("nan"), 10**400, True])
def test_a_rate_that_is_none_is_noted_and_times_come_from_the_table(tmp_path: Path, fps: object) -> None:
    builders.write_lerobot(tmp_path, (3,))
    edit_info(tmp_path, fps=fps)
    reader = LeRobotReader(tmp_path)
    index = reader.index()
    assert index.episodes[0].rate_hz == 0
    assert any("fps" in note for note in index.notes)
    rows, _ = signals(reader, index.episodes[0], ["timestamp_s"], np.arange(3))
    np.testing.assert_allclose(rows[:, 0], [0, 0.1, 0.2], atol=1e-7)


def test_text_that_is_no_text_is_replaced(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path, (3,))
    (tmp_path / "meta/episodes.jsonl").write_text(
        '{"episode_index": 0, "tasks": ["\\ud800 mug", "Tür öffnen"], "length": 3}'
    )
    (ref,) = LeRobotReader(tmp_path).index().episodes
    assert ref.instructions == ("? mug", "Tür öffnen")


def test_a_set_below_the_root_is_pointed_at(tmp_path: Path) -> None:
    builders.write_lerobot(tmp_path / "pusht", (3,))
    with pytest.raises(SourceError, match="one in 'pusht': open that folder"):
        open_source(tmp_path)


def test_readers_and_references_travel_by_pickle(tmp_path: Path) -> None:
    reader = LeRobotReader(builders.write_lerobot(tmp_path))
    ref = reader.index().episodes[0]
    assert pickle.loads(pickle.dumps((reader, ref))) == (reader, ref)
    json.dumps(ref.details)
