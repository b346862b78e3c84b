"""What a dataset becomes as a LeRobot set, and what comes back of it."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline import export_lerobot as module
from pipeline import lerobot_layouts as layouts
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.export_lerobot import ExportReport, export_lerobot, find_runs
from pipeline.graph import frames, signals
from pipeline.lerobot_episode import step_schema
from pipeline.lerobot_layouts import LAYOUTS
from pipeline.loaders import MultiViewLoader
from pipeline.readers.lerobot import LeRobotReader
from schemas.errors import ChecksumError, DatasetError, UsageError
from tests.pipeline.loaders.test_reader import flip
from tests.pipeline.store_builder import Built, build_dataset

SIZE = (32, 48)
RUNS = ((0, 5), (5, 6), (7, 14), (14, 21))
"""Episodes of 5, 9 and 7 steps, the step 6 of which may not be served."""


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("export") / "out", size=SIZE, missing={"side": []})


def lines(target: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / f"meta/{name}.jsonl").read_text().splitlines()]


def read_back(target: Path, view: str) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Return state, actions and time of each episode side by side, and its frames, as our own reader reads them."""
    reader = LeRobotReader(target)
    index = reader.index()
    assert index.faults == ()
    found = []
    for ref in index.episodes:
        steps = np.arange(ref.num_steps)
        rows, faults = signals(reader, ref, ["observation.state", "action", "timestamp_s"], steps)
        assert faults == ()
        found.append((rows, [f for f in frames(reader, ref, view, steps) if isinstance(f, np.ndarray)]))
    return found


def check(built: Built, target: Path, runs: Sequence[tuple[int, int]], view: str, *, tolerance: float = 0) -> None:
    episodes = read_back(target, f"observation.images.{view}")
    assert len(episodes) == len(runs)
    for (start, stop), (rows, pictures) in zip(runs, episodes, strict=True):
        expected = [built.arrays["state"], built.arrays["actions"]]
        np.testing.assert_array_equal(rows[:, :5], np.concatenate([part[start:stop] for part in expected], axis=1))
        np.testing.assert_array_equal(rows[:, 5], (np.arange(stop - start) / 10).astype(np.float32))
        difference = np.abs(np.array(pictures, int) - built.arrays[f"rgb_{view}"][start:stop])
        assert difference.mean() <= tolerance


@pytest.mark.parametrize("version", LAYOUTS)
def test_an_export_comes_back_as_it_was(built: Built, tmp_path: Path, version: str) -> None:
    report = export_lerobot(built.root, tmp_path / "set", version=version)
    assert report == ExportReport(
        target=str(tmp_path / "set"),
        version=version,
        num_episodes=4,
        num_steps=20,
        features=("action", "observation.state", "observation.images.main", "observation.images.side"),
        num_split=1,
        num_empty=0,
        left_out={"invalid": 1},
    )
    for view in ("main", "side"):
        check(built, tmp_path / "set", RUNS, view)


@pytest.mark.parametrize("version", LAYOUTS)
@pytest.mark.parametrize(("images", "tolerance"), [("jpeg", 12), ("video", 25)])
def test_lossy_images_come_back_nearly_and_in_their_places(
    built: Built, tmp_path: Path, images: str, tolerance: float, version: str
) -> None:
    export_lerobot(built.root, tmp_path / "set", images=images, version=version)
    check(built, tmp_path / "set", RUNS, "main", tolerance=tolerance)
    num_videos = {"2.1": 8, "3.0": 2}[version] if images == "video" else 0
    assert len(list((tmp_path / "set").rglob("*.mp4"))) == num_videos


@pytest.mark.parametrize("images", ["png", "video"])
def test_files_that_are_full_are_followed_by_others(
    built: Built, tmp_path: Path, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DATA_MB", 0), ("VIDEO_MB", 0), ("EPISODES_AT_ONCE", 2)):
        monkeypatch.setattr(layouts, name, value)
    export_lerobot(built.root, tmp_path / "set", images=images, version="3.0")
    check(built, tmp_path / "set", RUNS, "main", tolerance=25 if images == "video" else 0)
    names = [f"chunk-000/file-{number:03d}" for number in range(4)]
    assert found_files(tmp_path / "set/data") == [f"{name}.parquet" for name in names]
    assert found_files(tmp_path / "set/meta/episodes") == [f"{name}.parquet" for name in names[:2]]
    videos = tmp_path / "set/videos/observation.images.side"
    assert found_files(videos) == ([f"{name}.mp4" for name in names] if images == "video" else [])


def test_videos_are_followed_by_others_before_their_times_are_too_coarse(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MAX_VIDEO_S", 1.3)
    export_lerobot(built.root, tmp_path / "set", images="video", version="3.0")
    check(built, tmp_path / "set", RUNS, "side", tolerance=25)
    key = "videos/observation.images.side"
    rows = pq.read_table(tmp_path / "set/meta/episodes").to_pylist()
    assert [row[f"{key}/file_index"] for row in rows] == [0, 0, 0, 1]
    assert [row[f"{key}/from_timestamp"] for row in rows] == [0.0, 0.5, 0.6, 0.0]
    assert [row[f"{key}/to_timestamp"] for row in rows] == [0.5, 0.6, 1.3, 0.7]


def found_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_smooth_frames_come_back_from_a_video_each_as_itself(tmp_path: Path) -> None:
    write_lerobot_set(tmp_path / "raw", num_episodes=1, num_steps=140, size=(48, 64), views=("cam_high",))
    views = {"base_0_rgb": "observation.images.cam_high"}
    convert(tmp_path / "raw", tmp_path / "out", "pi0", views=views, size=64, cluster=ClusterOptions(workers=0))
    report = export_lerobot(tmp_path / "out", tmp_path / "set", images="video")
    assert "the view left_wrist_0_rgb has no frame and is left out" in report.notes
    stored = next(iter(MultiViewLoader(tmp_path / "out", 140, shuffle=False)))
    episodes = read_back(tmp_path / "set", "observation.images.base_0_rgb")
    found = np.concatenate([np.array(pictures, int) for _, pictures in episodes])
    rows = np.concatenate([rows for rows, _ in episodes])
    np.testing.assert_array_equal(rows[:, :7], stored["state"][:, :7])
    pixels = stored["image"]["base_0_rgb"].astype(int)
    shifted = {shift: np.abs(found[1:-1] - pixels[1 + shift : 139 + shift]).mean() for shift in (-1, 0, 1)}
    assert shifted[0] < 3
    assert shifted[0] < min(shifted[-1], shifted[1])
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    original = json.loads((tmp_path / "raw/meta/info.json").read_text())
    assert info["robot_type"] == original["robot_type"]
    assert info["features"]["action"]["names"] == original["features"]["action"]["names"]
    again = convert(tmp_path / "set", tmp_path / "again", "pi0", size=64, cluster=ClusterOptions(workers=0))
    assert (again.num_steps, dict(again.quarantined)) == (140, {})


def test_metadata_is_what_lerobot_reads(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "set"
    export_lerobot(built.root, target)
    info = json.loads((target / "meta/info.json").read_text())
    expected = {
        "codebase_version": "v2.1", "total_episodes": 4, "total_frames": 20, "total_tasks": 2, "total_videos": 0,
        "total_chunks": 1, "chunks_size": 1000, "fps": 10, "splits": {"train": "0:4"}, "video_path": None,
    }  # fmt: skip
    assert {key: info[key] for key in expected} == expected
    assert info["features"]["observation.images.main"] == {
        "dtype": "image", "shape": [*SIZE, 3], "names": ["height", "width", "channels"],
    }  # fmt: skip
    assert info["features"]["observation.state"]["shape"] == [3]
    episodes = lines(target, "episodes")
    assert [(line["episode_index"], line["length"], line["tasks"]) for line in episodes] == [
        (0, 5, ["task 0"]), (1, 1, ["task 1"]), (2, 7, ["task 1"]), (3, 7, ["task 0"]),
    ]  # fmt: skip
    assert [line["source_steps"] for line in episodes] == [[0, 5], [0, 1], [2, 9], [0, 7]]
    assert lines(target, "tasks") == [{"task_index": 0, "task": "task 0"}, {"task_index": 1, "task": "task 1"}]


def test_metadata_of_version_3_says_where_each_episode_lies(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "set"
    export_lerobot(built.root, target, version="3.0")
    info = json.loads((target / "meta/info.json").read_text())
    expected = {
        "codebase_version": "v3.0", "total_episodes": 4, "total_frames": 20, "total_tasks": 2, "chunks_size": 1000,
        "fps": 10, "splits": {"train": "0:4"}, "video_path": None, "data_files_size_in_mb": 100,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_files_size_in_mb": 200,
    }  # fmt: skip
    assert {key: info[key] for key in expected} == expected
    assert not {"total_chunks", "total_videos"} & info.keys()
    rows = pq.read_table(target / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["episode_index"] for row in rows] == [0, 1, 2, 3]
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in rows] == [(0, 5), (5, 6), (6, 13), (13, 20)]
    assert [row["tasks"] for row in rows] == [["task 0"], ["task 1"], ["task 1"], ["task 0"]]
    assert {
        row[f"{at}/{key}"] for row in rows for at in ("data", "meta/episodes") for key in ("chunk_index", "file_index")
    } == {0}
    tasks = pd.read_parquet(target / "meta/tasks.parquet")
    assert (tasks.index.name, list(tasks.index), list(tasks["task_index"])) == ("task", ["task 0", "task 1"], [0, 1])
    table = pq.read_table(target / "data/chunk-000/file-000.parquet")
    assert table["index"].to_pylist() == list(range(20))
    assert table["episode_index"].to_pylist() == [0] * 5 + [1] + [2] * 7 + [3] * 7


def test_statistics_of_version_3_are_those_of_the_rows_and_frames_with_quantiles(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "set"
    export_lerobot(built.root, target, version="3.0")
    rows = pq.read_table(target / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    total = json.loads((target / "meta/stats.json").read_text())
    entries = [{key: row[f"stats/action/{key}"] for key in total["action"]} for row in rows]
    kept = np.concatenate([np.arange(start, stop) for start, stop in RUNS])
    for steps, entry in [*((np.arange(*run), entry) for run, entry in zip(RUNS, entries)), (kept, total["action"])]:
        values = built.arrays["actions"][steps].astype(np.float64)
        assert entry["count"] == [len(steps)]
        np.testing.assert_allclose(entry["std"], values.std(axis=0), rtol=1e-12, atol=1e-12)
        for percent in (1, 10, 50, 90, 99):
            quantiles = np.quantile(values, percent / 100, axis=0, method="inverted_cdf")
            np.testing.assert_array_equal(entry[f"q{percent:02d}"], quantiles)
    pictures = built.arrays["rgb_side"][kept].reshape(-1, 3) / 255
    entry = total["observation.images.side"]
    assert (np.shape(entry["mean"]), entry["count"]) == ((3, 1, 1), [20])
    np.testing.assert_allclose(np.ravel(entry["mean"]), pictures.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(np.ravel(entry["q90"]), np.quantile(pictures, 0.9, axis=0, method="inverted_cdf"))
    assert (total["frame_index"]["max"], total["index"]["q50"], total["episode_index"]["q99"]) == ([6], [9.0], [3.0])
    assert total.keys() == {key.split("/")[1] for key in rows[0] if key.startswith("stats/")}


def test_rows_of_one_number_are_numbers() -> None:
    features = {"action": {"dtype": "float32", "shape": [1]}, "observation.state": {"dtype": "float64", "shape": [2]}}
    schema = step_schema(features)
    assert [str(field.type) for field in schema] == ["float", "fixed_size_list<item: double>[2]"]
    assert json.loads(schema.metadata[b"huggingface"])["info"]["features"]["action"]["_type"] == "Value"


def test_tables_have_the_columns_and_the_description_of_hugging_face(built: Built, tmp_path: Path) -> None:
    export_lerobot(built.root, tmp_path / "set")
    path = tmp_path / "set/data/chunk-000/episode_000002.parquet"
    table = pq.read_table(path)
    assert table["index"].to_pylist() == list(range(6, 13))
    assert table["episode_index"].to_pylist() == [2] * 7
    assert table["frame_index"].to_pylist() == list(range(7))
    assert table["task_index"].to_pylist() == [1] * 7
    assert str(table.schema.field("timestamp").type) == "float"
    assert str(table.schema.field("observation.state").type).startswith("fixed_size_list<")
    described = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert described["observation.images.main"] == {"_type": "Image"}
    assert described["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "Sequence"}
    assert described["task_index"] == {"dtype": "int64", "_type": "Value"}
    cell = table["observation.images.main"][0].as_py()
    assert cell["path"] == "frame_000000.png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(cell["bytes"]))), built.arrays["rgb_main"][7])


def test_statistics_of_each_episode_are_those_of_its_rows_and_frames(built: Built, tmp_path: Path) -> None:
    export_lerobot(built.root, tmp_path / "set")
    for (start, stop), line in zip(RUNS, lines(tmp_path / "set", "episodes_stats"), strict=True):
        stats = line["stats"]
        for name, array in (("observation.state", "state"), ("action", "actions")):
            rows = built.arrays[array][start:stop].astype(np.float64)
            for key, value in (("mean", rows.mean(axis=0)), ("min", rows.min(axis=0)), ("std", rows.std(axis=0))):
                np.testing.assert_allclose(stats[name][key], value, rtol=1e-12, atol=1e-12)
            assert stats[name]["count"] == [stop - start]
        pictures = built.arrays["rgb_side"][start:stop] / 255
        entry = stats["observation.images.side"]
        for key in ("mean", "std", "min", "max"):
            expected = getattr(pictures, key)(axis=(0, 1, 2)).reshape(3, 1, 1)
            np.testing.assert_allclose(entry[key], expected, rtol=1e-12, atol=1e-12)
        assert entry["count"] == [stop - start]
        assert stats["frame_index"]["max"] == [stop - start - 1]


def test_steps_without_a_frame_are_left_out_and_counted_and_no_black_frame_is_written(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", size=SIZE, missing={"side": [3, *range(14, 21)]})
    report = export_lerobot(built.root, tmp_path / "set")
    runs = ((0, 3), (4, 5), (5, 6), (7, 14))
    assert (report.num_episodes, report.num_split, report.num_empty) == (4, 2, 1)
    assert report.left_out == {"invalid": 1, "side": 8}
    check(built, tmp_path / "set", runs, "side")
    report = export_lerobot(built.root, tmp_path / "main", views=["main"])
    assert report.left_out == {"invalid": 1}
    check(built, tmp_path / "main", RUNS, "main")


def test_frames_stored_normalised_are_exported_as_pixels(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", dtype="float32", missing={"side": []})
    export_lerobot(built.root, tmp_path / "set", views=["main"])
    (_, pictures), *_ = read_back(tmp_path / "set", "observation.images.main")
    assert pictures[0].dtype == np.uint8


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(built: Built, tmp_path: Path) -> None:
    for wrong in ({"images": "gif"}, {"version": "3.1"}, {"views": ["top"]}):
        with pytest.raises(UsageError):
            export_lerobot(built.root, tmp_path / "set", **wrong)  # type: ignore[arg-type]
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="there already"):
        export_lerobot(built.root, tmp_path / "there")
    with pytest.raises(UsageError, match="outside the dataset"):
        export_lerobot(built.root, built.root / "set")
    odd = build_dataset(tmp_path / "odd", size=(7, 8), missing={"side": []})
    with pytest.raises(UsageError, match="even height and width"):
        export_lerobot(odd.root, tmp_path / "set", images="video")
    empty = build_dataset(tmp_path / "empty", invalid=range(21))
    with pytest.raises(DatasetError, match="expected"):
        export_lerobot(empty.root, tmp_path / "set")
    assert sorted(os.listdir(tmp_path)) == ["empty", "odd", "there"]


def test_rates_that_differ_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"found \[10.0, 50.0\] Hz"):
        module._rate([10.0, 50.0, 10.0])
    with pytest.raises(DatasetError, match="one rate"):
        module._rate([0.0])


@pytest.mark.parametrize("version", LAYOUTS)
def test_a_damaged_frame_ends_the_export_and_leaves_nothing(tmp_path: Path, version: str) -> None:
    built = build_dataset(tmp_path / "out", size=SIZE, missing={"side": []})
    flip(built.root / "rgb_side/c.1.0.0.0", 40)
    with pytest.raises(ChecksumError):
        export_lerobot(built.root, tmp_path / "set", images="video", version=version)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("images", "version"), [("png", "3.0"), ("jpeg", "2.1"), ("video", "2.1"), ("video", "3.0")])
def test_an_export_of_equal_data_has_equal_bytes(built: Built, tmp_path: Path, images: str, version: str) -> None:
    for name in ("a", "b"):
        export_lerobot(built.root, tmp_path / name, images=images, version=version)
    files = found_files(tmp_path / "a")
    assert files == found_files(tmp_path / "b")
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=6))
def test_runs_are_what_a_loop_finds(episodes: list[list[bool]]) -> None:
    expected, first = [], 0
    for episode, flags in enumerate(episodes):
        open_at = None
        for step, flag in enumerate([*flags, False]):
            if flag and open_at is None:
                open_at = first + step
            elif not flag and open_at is not None:
                expected.append((episode, open_at, first + step))
                open_at = None
        first += len(flags)
    ends = np.cumsum([len(flags) for flags in episodes], dtype=np.int64)
    kept = np.array([flag for flags in episodes for flag in flags], np.bool_)
    assert [(run.episode, run.start, run.stop) for run in find_runs(ends, kept)] == expected
