"""What a dataset becomes as a LeRobot set, and what comes back of it."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline import export_lerobot as module
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.export_lerobot import ExportReport, export_lerobot, find_runs
from pipeline.graph import frames, signals
from pipeline.lerobot_episode import IMAGES
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


def test_an_export_comes_back_as_it_was(built: Built, tmp_path: Path) -> None:
    report = export_lerobot(built.root, tmp_path / "set")
    assert report == ExportReport(
        target=str(tmp_path / "set"),
        version="2.1",
        num_episodes=4,
        num_steps=20,
        features=("action", "observation.state", "observation.images.main", "observation.images.side"),
        num_split=1,
        num_empty=0,
        left_out={"invalid": 1},
    )
    for view in ("main", "side"):
        check(built, tmp_path / "set", RUNS, view)


@pytest.mark.parametrize(("images", "tolerance"), [("jpeg", 12), ("video", 25)])
def test_lossy_images_come_back_nearly_and_in_their_places(tmp_path: Path, images: str, tolerance: float) -> None:
    built = build_dataset(tmp_path / "out", size=SIZE, missing={"side": []})
    export_lerobot(built.root, tmp_path / "set", images=images)
    check(built, tmp_path / "set", RUNS, "main", tolerance=tolerance)
    assert len(list((tmp_path / "set").rglob("*.mp4"))) == (8 if images == "video" else 0)


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
    for wrong in ({"images": "gif"}, {"version": "3.0"}, {"views": ["top"]}):
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


def test_a_damaged_frame_ends_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", size=SIZE, missing={"side": []})
    flip(built.root / "rgb_side/c.1.0.0.0", 40)
    with pytest.raises(ChecksumError):
        export_lerobot(built.root, tmp_path / "set")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("images", IMAGES)
def test_an_export_of_equal_data_has_equal_bytes(built: Built, tmp_path: Path, images: str) -> None:
    for name in ("a", "b"):
        export_lerobot(built.root, tmp_path / name, images=images)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*") if path.is_file())
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
