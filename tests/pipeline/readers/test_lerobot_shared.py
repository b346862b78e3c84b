"""LeRobot v3.0: episodes that share tables and videos."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.lerobot import LeRobotReader
from pipeline.readers.lerobot_shared import count_rows, first_frames
from pipeline.readers.parquet_rows import read_columns
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault
from tests.pipeline.readers import builders

VIEW = "observation.images.top"
IMAGE = "observation.images.front"
FPS = 10


def numbered_frame(number: int) -> np.ndarray:
    """A grey frame of four quarters, each a digit of base 8: survives any codec."""
    frame = np.empty((32, 32, 3), np.uint8)
    for digit in range(4):
        row, column = 16 * (digit // 2), 16 * (digit % 2)
        frame[row : row + 16, column : column + 16] = 16 + 30 * (number >> 3 * digit & 7)
    return frame


def number_of(frame: object) -> int:
    assert isinstance(frame, np.ndarray)
    corners = [frame[16 * (d // 2) + 8, 16 * (d % 2) + 8].mean() for d in range(4)]
    return sum(round((corner - 16) / 30) << 3 * digit for digit, corner in enumerate(corners))


def write_video(path: Path, numbers: Sequence[int], fps: int = FPS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"g": "50"})
        stream.width = stream.height = 32
        stream.pix_fmt, stream.bit_rate = "yuv420p", 400_000
        for number in numbers:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(numbered_frame(number))))
        container.mux(stream.encode(None))


def video_columns(view: str, file: tuple[int, int], span: tuple[float, float]) -> dict[str, Any]:
    names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    return {f"videos/{view}/{name}": value for name, value in zip(names, (*file, *span), strict=True)}


def write_shared(
    root: Path,
    lengths: Sequence[int] = (5, 3, 4, 6),
    *,
    data_files: Sequence[int] | None = None,
    video_files: Sequence[int] | None = None,
    drift_s: Sequence[float] | None = None,
    ids: Sequence[int] | None = None,
    task_column: str = "task",
    row_group_size: int | None = None,
    images: bool = False,
) -> Path:
    """A v3.0 set; step ``s`` of episode ``k`` holds ``1000 * k + s``, and its video frame shows its place in the set."""
    ids = range(len(lengths)) if ids is None else ids
    data_files = [0] * len(lengths) if data_files is None else data_files
    video_files = data_files if video_files is None else video_files
    drift_s = [0.0] * len(lengths) if drift_s is None else drift_s
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
        "action": {"dtype": "float64", "shape": [2], "names": None},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        VIEW: {"dtype": "video", "shape": [32, 32, 3], "names": ["height", "width", "channels"]},
    }
    if images:
        features[IMAGE] = {"dtype": "image", "shape": [6, 8, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v3.0", "robot_type": "arm", "fps": FPS, "total_episodes": len(lengths), "chunks_size": 1000,
        "data_files_size_in_mb": 100, "video_files_size_in_mb": 500, "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }  # fmt: skip
    builders.write(root / "meta/info.json", json.dumps(info).encode())
    tasks = pa.table({"task_index": pa.array([3, 7]), task_column: ["pull", "push"]})
    pq.write_table(tasks, root / "meta/tasks.parquet")
    rows, tables, shown, in_video, total = [], {}, {}, {}, 0
    for episode, length, data, video, drift in zip(ids, lengths, data_files, video_files, drift_s, strict=True):
        table = builders.lerobot_table(episode, length, FPS)
        tables.setdefault(data, []).append(table if images else table.drop_columns([IMAGE]))
        first = in_video.get(video, 0)
        in_video[video] = first + length
        shown.setdefault(video, []).extend(range(total, total + length))
        span = (first / FPS + drift, (first + length) / FPS + drift)
        rows.append(
            {
                "episode_index": episode, "tasks": ["push", "pull"], "length": length, "data/chunk_index": 0,
                "data/file_index": data, "dataset_from_index": total, "dataset_to_index": total + length,
                **video_columns(VIEW, (0, video), span), "stats/action/mean": [0.0, 0.0], "meta/episodes/chunk_index": 0,
            }
        )  # fmt: skip
        total += length
    write_episodes(root, rows)
    for file, parts in tables.items():
        path = root / f"data/chunk-000/file-{file:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(parts), path, row_group_size=row_group_size)
    for file, numbers in shown.items():
        write_video(root / f"videos/{VIEW}/chunk-000/file-{file:03d}.mp4", numbers)
    return root


def write_episodes(root: Path, rows: Sequence[dict[str, Any]], file: int = 0) -> None:
    path = root / f"meta/episodes/chunk-000/file-{file:03d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def read_episodes(root: Path) -> list[dict[str, Any]]:
    return pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()


def shown_by(reader: LeRobotReader, ref: EpisodeRef, steps: Sequence[int]) -> list[int]:
    return [number_of(frame) for frame in frames(reader, ref, VIEW, np.asarray(steps))]


@pytest.mark.parametrize("task_column", ["task", "__index_level_0__"])
def test_episodes_that_share_files_are_read_as_episodes(tmp_path: Path, task_column: str) -> None:
    reader = open_source(write_shared(tmp_path, task_column=task_column))
    assert isinstance(reader, LeRobotReader)
    index = reader.index()
    assert index.faults == ()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [
        (f"episode_{k:06d}", n) for k, n in enumerate((5, 3, 4, 6))
    ]
    assert (index.state, index.actions) == (("observation.state",), ("action",))
    first = 0
    for episode, ref in enumerate(index.episodes):
        assert ref.instructions == ("push", "pull")
        steps = np.arange(ref.num_steps)
        names = ["observation.state", "action", "next.reward", "timestamp_s", "instruction_index"]
        rows, faults = signals(reader, ref, names, steps)
        values = 1000.0 * episode + steps
        expected = [values, -values, values, -values, values, np.float32(steps / FPS), steps >= 2]
        np.testing.assert_array_equal(rows, np.stack(expected, axis=1))
        assert faults == ()
        assert shown_by(reader, ref, steps.tolist()) == list(range(first, first + ref.num_steps))
        first += ref.num_steps
        assert list(reader.files(ref)) == [
            Path("data/chunk-000/file-000.parquet"), Path(f"videos/{VIEW}/chunk-000/file-000.mp4"),
        ]  # fmt: skip


def test_files_are_rolled_and_tables_roll_elsewhere_than_videos(tmp_path: Path) -> None:
    reader = LeRobotReader(write_shared(tmp_path, data_files=(0, 0, 1, 1), video_files=(0, 1, 1, 2)))
    first = 0
    for episode, ref in enumerate(reader.index().episodes):
        rows, _ = signals(reader, ref, ["next.reward"], np.arange(ref.num_steps))
        np.testing.assert_array_equal(rows[:, 0], 1000 * episode + np.arange(ref.num_steps))
        assert shown_by(reader, ref, range(ref.num_steps)) == list(range(first, first + ref.num_steps))
        first += ref.num_steps


def test_ids_are_keys_and_not_positions(tmp_path: Path) -> None:
    reader = LeRobotReader(write_shared(tmp_path, (3, 4), ids=(7, 3)))
    by_key = {ref.key: ref for ref in reader.index().episodes}
    assert list(by_key) == ["episode_000003", "episode_000007"]
    rows, _ = signals(reader, by_key["episode_000003"], ["next.reward"], np.array([0, 3]))
    np.testing.assert_array_equal(rows[:, 0], [3000, 3003])
    assert shown_by(reader, by_key["episode_000003"], [0, 3]) == [3, 6]


def test_frames_after_1100_seconds_are_exact_whatever_float_drift_their_times_have(tmp_path: Path) -> None:
    # float32 seconds lie 1.2e-4 apart from 1024 s on: a drift below the tolerance of 1e-4 makes LeRobot's own check fail
    lengths = (11_000, 4, 4, 4)
    reader = LeRobotReader(write_shared(tmp_path, lengths, drift_s=(0.0, 10e-6, 60e-6, -60e-6)))
    episodes = reader.index().episodes
    for episode, first in ((1, 11_000), (2, 11_004), (3, 11_008)):
        expected = [number % 8**4 for number in range(first, first + 4)]
        assert shown_by(reader, episodes[episode], range(4)) == expected
    assert shown_by(reader, episodes[0], [0, 1]) == [0, 1]


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=40),
    st.sampled_from([5.0, 10.0, 15.0, 24.0, 29.97, 30.0, 50.0, 60.0]),
    st.integers(0, 60),
)
def test_a_running_sum_of_drifting_durations_gives_cumulative_lengths(
    lengths: list[int], rate: float, drift_us: int
) -> None:
    spans, at = [], 0.0
    for length in lengths:
        after = float(np.float32(at + length / rate + drift_us * 1e-6))  # worse than any writer
        spans.append((at, after))
        at = after
    ends = np.cumsum(lengths).tolist()
    expected = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    assert first_frames(spans, lengths, rate) == expected


def test_an_episode_alone_far_inside_a_video_is_placed_by_rounding() -> None:
    nan = float("nan")
    assert first_frames([(2100.00006, nan)], [7], 30.0) == [(63_000, 63_007)]
    assert first_frames([(5.0, 6.0), (1.0, 2.0)], [10, 10], 10.0) == [(50, 60), (10, 20)]  # a gap, in any order
    assert first_frames([(0.05, 1.0), (nan, 1.0), (-3.0, 1.0)], [10] * 3, 10.0) == [None] * 3
    assert first_frames([(0.0, 1.0)], [10], 0.0) == [None]


def test_a_view_whose_times_lie_between_frames_is_refused_for_that_episode(tmp_path: Path) -> None:
    write_shared(tmp_path)
    rows = read_episodes(tmp_path)
    rows[2][f"videos/{VIEW}/from_timestamp"] = 0.85
    write_episodes(tmp_path, rows)
    reader = LeRobotReader(tmp_path)
    index = reader.index()
    assert [(fault.episode, fault.stream, fault.reason) for fault in index.faults] == [
        ("episode_000002", VIEW, Reason.BAD_METADATA)
    ]
    assert [ref.view(VIEW).present for ref in index.episodes] == [True, True, False, True]
    found = list(frames(reader, index.episodes[2], VIEW, np.array([0, 1])))
    assert [frame.reason for frame in found if isinstance(frame, Fault)] == [Reason.MISSING_FILE] * 2
    assert shown_by(reader, index.episodes[3], [0, 5]) == [12, 17]


def test_a_video_one_frame_short_does_not_show_the_next_episode(tmp_path: Path) -> None:
    write_shared(tmp_path)
    rows = read_episodes(tmp_path)
    # the encoder dropped the last of 5 frames: all that follow in the file begin one frame earlier
    for row, (first, stop) in zip(rows, ((0, 4), (4, 7), (7, 11), (11, 17)), strict=True):
        row.update(video_columns(VIEW, (0, 0), (first / FPS, stop / FPS)))
    write_episodes(tmp_path, rows)
    write_video(tmp_path / f"videos/{VIEW}/chunk-000/file-000.mp4", [*range(4), *range(5, 18)])
    reader = LeRobotReader(tmp_path)
    episodes = reader.index().episodes
    *good, bad = frames(reader, episodes[0], VIEW, np.arange(5))
    assert [number_of(frame) for frame in good] == [0, 1, 2, 3]
    assert isinstance(bad, Fault)
    assert (bad.reason, bad.start, bad.episode) == (Reason.COUNT_MISMATCH, 4, "episode_000000")
    assert shown_by(reader, episodes[1], range(3)) == [5, 6, 7]


def test_a_truncated_video_costs_the_episodes_at_its_end(tmp_path: Path) -> None:
    write_shared(tmp_path)
    write_video(tmp_path / f"videos/{VIEW}/chunk-000/file-000.mp4", range(10))
    reader = LeRobotReader(tmp_path)
    found = list(frames(reader, reader.index().episodes[2], VIEW, np.arange(4)))
    assert [number_of(frame) for frame in found[:2]] == [8, 9]
    assert [(f.reason, f.start, f.path) for f in found[2:] if isinstance(f, Fault)] == [
        (Reason.COUNT_MISMATCH, step, f"videos/{VIEW}/chunk-000/file-000.mp4") for step in (2, 3)
    ]


def test_rows_are_read_by_row_groups_and_not_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shared(tmp_path, (500, 7, 500), row_group_size=50)
    reader = LeRobotReader(tmp_path)
    ref = reader.index().episodes[1]
    signals(reader, ref, ["next.reward"], np.arange(1))  # the column that says where episodes lie is read once
    read: list[int] = []
    original = pq.ParquetFile.read_row_groups

    def spy(file: pq.ParquetFile, groups: list[int], **options: Any) -> pa.Table:
        read.extend(groups)
        return original(file, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    rows, _ = signals(reader, ref, ["next.reward", "action"], np.array([2, 2, 6]))
    np.testing.assert_array_equal(rows, [[1002, 1002, -1002], [1002, 1002, -1002], [1006, 1006, -1006]])
    assert set(read) == {10}


def test_embedded_images_stay_with_their_episode(tmp_path: Path) -> None:
    reader = LeRobotReader(write_shared(tmp_path, (5, 3, 4), images=True, row_group_size=4))
    for episode, ref in enumerate(reader.index().episodes):
        found = list(frames(reader, ref, IMAGE, np.arange(ref.num_steps)))
        for step, frame in enumerate(found):
            np.testing.assert_array_equal(frame, builders.colour(episode, step))


def test_only_the_columns_that_place_episodes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shared(tmp_path)
    rows = [{**row, **{f"stats/x/q{k}": [0.0] for k in range(90)}} for row in read_episodes(tmp_path)]
    write_episodes(tmp_path, rows)
    asked: list[str] = []
    original = pq.ParquetFile.read

    def spy(file: pq.ParquetFile, columns: list[str], **options: Any) -> pa.Table:
        asked.extend(columns)
        return original(file, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", spy)
    assert len(LeRobotReader(tmp_path).index().episodes) == 4
    assert not [name for name in asked if name.startswith("stats/")]


def test_columns_in_another_order_and_without_hints_serve(tmp_path: Path) -> None:
    write_shared(tmp_path)
    rows = read_episodes(tmp_path)
    dropped = ("dataset_from_index", f"videos/{VIEW}/to_timestamp")
    write_episodes(tmp_path, [{k: row[k] for k in sorted(row, reverse=True) if k not in dropped} for row in rows])
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    pq.write_table(
        tasks.select(["task", "task_index"]).slice(0).take(pa.array([1, 0])), tmp_path / "meta/tasks.parquet"
    )
    reader = LeRobotReader(tmp_path)
    ref = reader.index().episodes[2]
    rows_read, faults = signals(reader, ref, ["next.reward", "instruction_index"], np.arange(4))
    np.testing.assert_array_equal(rows_read, [[2000, 0], [2001, 0], [2002, 1], [2003, 1]])
    assert faults == ()
    assert shown_by(reader, ref, range(4)) == [8, 9, 10, 11]


def test_a_table_without_episode_index_is_cut_by_dataset_from_index(tmp_path: Path) -> None:
    write_shared(tmp_path, data_files=(0, 0, 1, 1))
    for file in (0, 1):
        path = tmp_path / f"data/chunk-000/file-{file:03d}.parquet"
        pq.write_table(pq.read_table(path).drop_columns(["episode_index"]), path)
    reader = LeRobotReader(tmp_path)
    for episode, ref in enumerate(reader.index().episodes):
        rows, faults = signals(reader, ref, ["next.reward"], np.arange(ref.num_steps))
        np.testing.assert_array_equal(rows[:, 0], 1000 * episode + np.arange(ref.num_steps))
        assert faults == ()


def test_of_100_declared_episodes_the_5_that_are_here_are_read_and_all_others_said(tmp_path: Path) -> None:
    write_shared(tmp_path, (3,) * 100, data_files=[k // 5 for k in range(100)], video_files=[0] * 100)
    for file in range(1, 20):
        (tmp_path / f"data/chunk-000/file-{file:03d}.parquet").unlink()
    index = LeRobotReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == [f"episode_{k:06d}" for k in range(5)]
    assert [(fault.reason, fault.episode) for fault in index.faults] == [
        (Reason.MISSING_FILE, f"episode_{k:06d}") for k in range(5, 100)
    ]
    write_episodes(tmp_path, read_episodes(tmp_path)[:5])
    index = LeRobotReader(tmp_path).index()
    (fault,) = index.faults
    assert len(index.episodes) == 5
    assert "expected 100 episodes as info.json says, found 5" in fault.message


def test_an_unfinished_table_refuses_each_of_its_episodes_and_no_other(tmp_path: Path) -> None:
    write_shared(tmp_path, data_files=(0, 1, 1, 0))
    path = tmp_path / "data/chunk-000/file-001.parquet"
    path.write_bytes(path.read_bytes()[:-30])  # the writer was not finalised: no footer
    index = LeRobotReader(tmp_path).index()
    assert [ref.key for ref in index.episodes] == ["episode_000000", "episode_000003"]
    assert [(fault.reason, fault.episode, fault.path) for fault in index.faults] == [
        (Reason.TRUNCATED, f"episode_{k:06d}", "data/chunk-000/file-001.parquet") for k in (1, 2)
    ]


def test_unfinished_metadata_is_a_fault_and_costs_what_only_it_names(tmp_path: Path) -> None:
    write_shared(tmp_path)
    rows = read_episodes(tmp_path)
    write_episodes(tmp_path, rows[:2])
    write_episodes(tmp_path, rows[2:], file=1)
    path = tmp_path / "meta/episodes/chunk-000/file-001.parquet"
    path.write_bytes(path.read_bytes()[:-8])
    index = LeRobotReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [5, 3]
    assert [(fault.reason, fault.path) for fault in index.faults] == [
        (Reason.TRUNCATED, "meta/episodes/chunk-000/file-001.parquet"),
        (Reason.MISSING_FILE, "meta/info.json"),
    ]


def test_broken_rows_of_the_metadata_cost_themselves_only(tmp_path: Path) -> None:
    write_shared(tmp_path)
    rows = read_episodes(tmp_path)
    changes = [{"episode_index": None}, {"length": -1}, {"data/file_index": None}, {}]
    broken = [{**rows[0], "episode_index": 9 + k, **change} for k, change in enumerate(changes[:3])]
    write_episodes(tmp_path, [*rows, *broken, rows[1]])
    index = LeRobotReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [5, 3, 4, 6]
    assert [fault.reason for fault in index.faults] == [Reason.BAD_METADATA] * 3 + [Reason.DUPLICATE]


def test_lengths_that_disagree_with_the_table_are_a_count_mismatch(tmp_path: Path) -> None:
    write_shared(tmp_path, images=True)
    rows = read_episodes(tmp_path)
    rows[1]["length"] = 5
    write_episodes(tmp_path, rows)
    reader = LeRobotReader(tmp_path)
    ref = reader.index().episodes[1]
    block = reader.read_signals(ref, ["next.reward"], np.arange(5))
    np.testing.assert_array_equal(block.values["next.reward"], [1000, 1001, 1002, np.nan, np.nan])
    assert [(fault.reason, fault.start, fault.stop) for fault in block.faults] == [(Reason.COUNT_MISMATCH, 3, 5)]
    found = list(frames(reader, ref, IMAGE, np.arange(5)))
    assert [isinstance(frame, Fault) for frame in found] == [False] * 3 + [True] * 2  # and no row of the next episode


def test_rows_of_an_episode_that_lie_apart_are_refused(tmp_path: Path) -> None:
    write_shared(tmp_path)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array([*range(1, len(table)), 0])), path)
    reader = LeRobotReader(tmp_path)
    episodes = reader.index().episodes
    (fault,) = reader.read_signals(episodes[0], ["action"], np.arange(5)).faults
    assert (fault.reason, fault.start, fault.stop) == (Reason.BAD_METADATA, 0, 5)
    assert signals(reader, episodes[1], ["next.reward"], np.arange(3))[0][:, 0].tolist() == [1000, 1001, 1002]


@given(st.lists(st.integers(-1, 4), max_size=30))
def test_runs_of_rows_are_what_a_loop_counts(episode_index: list[int]) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for episode in dict.fromkeys(episode_index):
        rows = [row for row, value in enumerate(episode_index) if value == episode]
        expected[episode] = (rows[0] if rows[-1] - rows[0] + 1 == len(rows) else -1, len(rows))
    assert count_rows(np.asarray(episode_index, np.int64)) == expected


def test_shared_files_without_the_table_that_places_episodes_are_refused(tmp_path: Path) -> None:
    write_shared(tmp_path)
    (tmp_path / "meta/episodes/chunk-000/file-000.parquet").unlink()
    for folder in ("meta/episodes/chunk-000", "meta/episodes"):
        (tmp_path / folder).rmdir()
    with pytest.raises(SourceError, match="expected meta/episodes") as caught:
        open_source(tmp_path).index()
    assert caught.value.reason == Reason.MISSING_FILE


def test_tasks_without_a_known_column_are_a_fault_and_cost_no_episode(tmp_path: Path) -> None:
    write_shared(tmp_path, task_column="sentence")
    index = LeRobotReader(tmp_path).index()
    assert [(fault.path, fault.reason) for fault in index.faults] == [("meta/tasks.parquet", Reason.BAD_METADATA)]
    assert index.episodes[0].instructions == ("push", "pull")


def test_the_real_set_that_calls_itself_v3_is_read_as_it_is_laid_out(shared_data: Path) -> None:
    root = shared_data / "lerobot_v2.1_minimal/data/lerobot_list_type"
    reader = open_source(root)
    index = reader.index()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [("episode_000000", 30), ("episode_000001", 30)]
    assert index.faults == ()
    ref = index.episodes[1]
    assert not ref.views[0].present  # the template asks for a file of each episode, and file-000.mp4 is none
    rows, faults = signals(reader, ref, ["observation.state"], np.arange(30))
    table = pq.read_table(root / "data/chunk-000/episode_000001.parquet")
    np.testing.assert_array_equal(rows, np.array(table["observation.state"].to_pylist(), np.float32))
    assert faults == ()


def test_real_frames_concatenated_as_the_v3_converter_does_stay_with_their_episodes(
    shared_data: Path, tmp_path: Path
) -> None:
    """Real pixels in a reconstructed container: two copies of the PushT episode, their packets copied end to end."""
    source = shared_data / "lerobot_v1/pusht"
    with pa.ipc.open_stream(str(source / "train/data-00000-of-00001.arrow")) as stream:
        real = stream.read_all()
    num = len(real)
    features = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        VIEW: {"dtype": "video", "shape": [96, 96, 3], "names": ["height", "width", "channels"]},
    }
    info = {"codebase_version": "v3.0", "fps": 10, "total_episodes": 2, "features": features}
    builders.write(tmp_path / "meta/info.json", json.dumps(info).encode())
    rows = [
        {
            "episode_index": k, "tasks": ["Push the T-shaped block onto the target."], "length": num,
            "data/chunk_index": 0, "data/file_index": 0,
            **video_columns(VIEW, (0, 0), (k * num / 10 + 3e-5 * k, (k + 1) * num / 10)),
        }
        for k in range(2)
    ]  # fmt: skip
    write_episodes(tmp_path, rows)
    state = pa.concat_arrays([real["observation.state"].combine_chunks()] * 2)
    table = pa.table({"observation.state": state, "episode_index": np.repeat([0, 1], num)})
    (tmp_path / "data/chunk-000").mkdir(parents=True)
    pq.write_table(table, tmp_path / "data/chunk-000/file-000.parquet", row_group_size=num)
    video = source / "videos/observation.image_episode_000000.mp4"
    concatenate(video, tmp_path / f"videos/{VIEW}/chunk-000/file-000.mp4")
    with av.open(str(video)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    reader = LeRobotReader(tmp_path)
    steps = np.array([0, 1, 80, 81, 159, 160])
    for ref in reader.index().episodes:
        for step, frame in zip(steps, frames(reader, ref, VIEW, steps), strict=True):
            np.testing.assert_array_equal(frame, decoded[step])
        rows_read, _ = signals(reader, ref, ["observation.state"], np.arange(num))
        np.testing.assert_array_equal(rows_read, np.array(real["observation.state"].to_pylist()))


def concatenate(source: Path, target: Path, copies: int = 2) -> None:
    target.parent.mkdir(parents=True)
    with av.open(str(target), "w") as out:
        stream, shift = None, 0
        for _ in range(copies):
            with av.open(str(source)) as container:
                video = container.streams.video[0]
                stream = stream or out.add_stream_from_template(video)
                for packet in container.demux(video):
                    if packet.dts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                        out.mux(packet)
                shift += video.duration


def test_columns_of_a_table_are_read_in_the_order_asked_for() -> None:
    table = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=1)
    found = read_columns(pq.ParquetFile(pa.BufferReader(sink.getvalue())), ["b", "a"], 1, 3)
    assert found.to_pydict() == {"b": [5, 6], "a": [2, 3]}


def link_snapshot(cache: Path, source: Path) -> Path:
    """Lay ``source`` out as huggingface_hub does: a snapshot of links into the blobs of the cached repository."""
    repository = cache / "datasets--lab--arm"
    snapshot = repository / "snapshots/0123abcd"
    (repository / "blobs").mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(repository / f"blobs/{number:040x}")
        link.symlink_to(Path(*[".."] * len(link.relative_to(repository).parts[:-1]), "blobs", f"{number:040x}"))
    return snapshot


def test_a_snapshot_in_the_hugging_face_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = link_snapshot(tmp_path / "hub", write_shared(tmp_path / "raw"))
    reader = open_source(snapshot)
    assert isinstance(reader, LeRobotReader)
    index = reader.index()
    assert (len(index.episodes), index.faults) == (4, ())
    assert shown_by(reader, index.episodes[1], [0, 2]) == [5, 7]
    rows, faults = signals(reader, index.episodes[3], ["next.reward"], np.array([5]))
    assert (rows[0, 0], faults) == (3005, ())


@pytest.mark.parametrize(
    "target",
    [
        "../../../other--x/blobs/1",
        "../../blobs/deep/1",
        "../../refs/main",
        "/etc/passwd",
        "../../../datasets--lab--b/blobs/1",
    ],
)
def test_links_of_a_snapshot_that_lead_elsewhere_are_refused(tmp_path: Path, target: str) -> None:
    snapshot = link_snapshot(tmp_path / "hub", write_shared(tmp_path / "raw"))
    path = snapshot / "data/chunk-000/file-000.parquet"
    path.unlink()
    path.symlink_to(Path("../..", target) if target.startswith("..") else Path(target))
    landing = path.parent / "../.." / target
    if target.startswith(".."):
        landing = Path(str(landing.parent.resolve()), landing.name)
        landing.parent.mkdir(parents=True, exist_ok=True)
        landing.write_bytes(b"PAR1")
    index = LeRobotReader(snapshot).index()
    assert index.episodes == ()
    assert {fault.reason for fault in index.faults} == {Reason.MISSING_FILE}


def test_metadata_may_not_name_a_blob_itself(tmp_path: Path) -> None:
    snapshot = link_snapshot(tmp_path / "hub", builders.write_lerobot(tmp_path / "raw", (3,)))
    info = json.loads((snapshot / "meta/info.json").read_text())
    name = (snapshot / "data/chunk-000/episode_000000.parquet").readlink().name
    (snapshot / "meta/info.json").unlink()
    (snapshot / "meta/info.json").write_text(json.dumps({**info, "data_path": f"../../blobs/{name}"}))
    assert LeRobotReader(snapshot).index().episodes == ()
