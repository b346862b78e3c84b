"""RLDS and replay buffers from end to end: converted, verified, and served as they were recorded."""

import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipeline import convert, verify
from pipeline.cluster import ClusterOptions
from pipeline.export_lerobot import export_lerobot
from pipeline.loaders import DatasetReader, WindowLoader
from schemas.errors import PlanError
from schemas.recipe import FrameRecipe, Recipe, SignalRecipe, ViewRecipe
from tests.pipeline.readers.builders import colour
from tests.pipeline.readers.hdf5_builders import write_robomimic
from tests.pipeline.readers.replay_builder import buffer_files, pusht_arrays, write_pusht, write_zip
from tests.pipeline.readers.rlds_builder import write_bridge
from tests.pipeline.store_builder import build_dataset


def recipe(view: str, size: tuple[int, int]) -> Recipe:
    """Frames at their own size, so that what is stored is what was recorded."""
    views = (ViewRecipe(name="main", candidates=(view,), height_px=size[0], width_px=size[1], resize="stretch"),)
    signals = (SignalRecipe(name="state"), SignalRecipe(name="actions"))
    return Recipe(name="own-size", views=views, signals=signals, frames=FrameRecipe(codec="raw"))


def converted(raw: Path, out: Path, made: Recipe) -> DatasetReader:
    report = convert(raw, out, made, cluster=ClusterOptions(workers=0))
    assert report.complete and not report.quarantined
    assert verify(out).ok
    return DatasetReader(out)


def test_an_rlds_dataset_converts_verifies_and_reads_back(tmp_path):
    write_bridge(tmp_path / "raw", (3, 4, 2))
    reader = converted(tmp_path / "raw", tmp_path / "out", recipe("image_1", (6, 8)))
    place = [(episode, step) for episode, length in enumerate((3, 4, 2)) for step in range(length)]
    frames = np.empty((9, 6, 8, 3), np.uint8)
    reader.gather("rgb_main", np.arange(9), frames)
    np.testing.assert_array_equal(frames, [colour(episode + 8, step) for episode, step in place])
    expected = [[100 * episode + 10 * step + d / 8 for d in range(7)] for episode, step in place]
    np.testing.assert_array_equal(reader.rows("state"), np.float32(expected))
    np.testing.assert_array_equal(reader.rows("actions"), -np.float32(expected))
    np.testing.assert_allclose(reader.rows("timestamp_s"), [step / 5 for _, step in place])
    assert reader.table("tasks")["task"].to_pylist() == ["task 0", "task 1", "task 2"]


def test_a_replay_buffer_makes_the_same_dataset_as_a_folder_and_as_an_archive(tmp_path):
    write_pusht(tmp_path / "folder" / "a", (3, 7, 9))
    write_zip(tmp_path / "zip" / "a.zarr.zip", buffer_files((3, 7, 9), pusht_arrays(9)))
    readers = [
        converted(tmp_path / kind, tmp_path / f"{kind}-out", recipe("img", (16, 20))) for kind in ("folder", "zip")
    ]
    for reader in readers:
        frames = np.empty((9, 16, 20, 3), np.uint8)
        reader.gather("rgb_main", np.arange(9), frames)
        np.testing.assert_array_equal(frames, pusht_arrays(9)["img"])
        np.testing.assert_array_equal(reader.rows("state"), pusht_arrays(9)["state"][:, :2])
        np.testing.assert_array_equal(reader.rows("actions"), pusht_arrays(9)["action"])
        assert reader.rows("episode_ends").tolist() == [3, 7, 9]


def test_windows_of_a_converted_replay_buffer_are_those_of_the_buffer(tmp_path):
    write_pusht(tmp_path / "raw", (5, 9))
    converted(tmp_path / "raw", tmp_path / "out", recipe("img", (16, 20)))
    obs = {"image": "rgb_main", "agent_pos": "state"}
    loader = WindowLoader(
        tmp_path / "out", 16, horizon=4, pad_before=1, pad_after=1, obs=obs, shuffle=False, tail="keep"
    )
    (batch,) = list(loader)
    firsts = [-1, 0, 1, 2, 4, 5, 6]
    assert batch["index"].tolist() == firsts
    arrays = pusht_arrays(9)
    for row, (first, (start, stop)) in enumerate(zip(firsts, [(0, 5)] * 4 + [(5, 9)] * 3, strict=True)):
        steps = np.clip(np.arange(first, first + 4), start, stop - 1)
        np.testing.assert_array_equal(batch["obs"]["image"][row], arrays["img"][steps])
        np.testing.assert_array_equal(batch["obs"]["agent_pos"][row], arrays["state"][steps, :2])
        np.testing.assert_array_equal(batch["action"][row], arrays["action"][steps])


def test_episodes_appended_to_a_replay_buffer_are_converted_alone(tmp_path):
    made = recipe("img", (16, 20))
    write_pusht(tmp_path / "raw", (4, 8))  # chunks of 4 steps
    converted(tmp_path / "raw", tmp_path / "out", made)
    write_pusht(tmp_path / "raw", (4, 8, 11))
    report = convert(tmp_path / "raw", tmp_path / "out", made, cluster=ClusterOptions(workers=0))
    assert (report.num_episodes, report.total_episodes, report.unchanged_episodes) == (1, 3, 2)
    assert verify(tmp_path / "out").ok
    np.testing.assert_array_equal(DatasetReader(tmp_path / "out").rows("actions"), pusht_arrays(11)["action"])


def grow(kind: str, folder: Path, num_episodes: int) -> Recipe:
    """Write the first episodes of a set anew, all into the files that it has, and return how they are converted."""
    if kind == "robomimic":
        (folder / "demo.hdf5").unlink(missing_ok=True)
        write_robomimic(folder / "demo.hdf5", (0, 2, 10)[:num_episodes])
        return recipe("agentview_image", (6, 8))
    if kind == "replay buffer":  # each new episode fills up the last chunk of the one before it
        write_pusht(folder, (3, 7, 11)[:num_episodes])
        return recipe("img", (16, 20))
    with tempfile.TemporaryDirectory() as scratch:
        built = build_dataset(Path(scratch) / "out", episode_lengths=(3, 4, 5)[:num_episodes], missing={"side": []})
        shutil.rmtree(folder, ignore_errors=True)
        export_lerobot(built.root, folder, version="3.0")
    return recipe("observation.images.main", built.arrays["rgb_main"].shape[1:3])


@pytest.mark.parametrize("kind", ["replay buffer", "robomimic", "lerobot v3"])
def test_a_file_of_many_episodes_may_grow(tmp_path, kind):
    raw, out, options = tmp_path / "raw", tmp_path / "out", {"cluster": ClusterOptions(workers=0)}
    made = grow(kind, raw, 2)
    converted(raw, out, made)
    grow(kind, raw, 3)
    report = convert(raw, out, made, **options)
    assert (report.num_episodes, report.total_episodes, report.unchanged_episodes) == (1, 3, 2)
    assert verify(out).ok
    again = convert(raw, out, made, rehash=True, **options)
    assert (again.num_episodes, again.unchanged_episodes) == (0, 3)
    once = converted(raw, tmp_path / "once", made)
    for name in ("state", "actions", "valid"):
        np.testing.assert_array_equal(DatasetReader(out).rows(name), once.rows(name))


def test_an_episode_that_changed_in_a_file_that_grew_is_still_said(tmp_path):
    made = grow("robomimic", tmp_path / "raw", 2)
    converted(tmp_path / "raw", tmp_path / "out", made)
    grow("robomimic", tmp_path / "raw", 3)
    with h5py.File(tmp_path / "raw" / "demo.hdf5", "r+") as file:
        file["data/demo_2/obs/agentview_image"][1, 3, 4, 0] ^= 1
    with pytest.raises(PlanError, match="found 1 changed: raw/.*demo_2"):
        convert(tmp_path / "raw", tmp_path / "out", made, cluster=ClusterOptions(workers=0))
