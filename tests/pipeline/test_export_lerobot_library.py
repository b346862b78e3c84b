"""What an export is to LeRobot's own library, where it is installed: 0.3 opens v2.1, 0.4 opens v3.0.

Neither version is of the test environment, for it brings torch along: `pip install lerobot==0.4.4` beside Headrace runs this.
"""

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.export_lerobot import export_lerobot
from tests.pipeline.store_builder import Built, build_dataset

pytest.importorskip("lerobot", reason="LeRobot's own library is not installed", exc_type=ImportError)

SIZE = (32, 48)
RUNS = ((0, 5), (5, 6), (7, 14), (14, 21))
"""Episodes of 5, 9 and 7 steps, the step 6 of which may not be served."""
VERSION = "3.0" if version_of("lerobot") >= "0.4" else "2.1"
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs are not ours


def open_set(root: Path, **options: Any) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("headrace/export", root=root, video_backend="pyav", **options)


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("library") / "out", size=SIZE, missing={"side": []})


@pytest.mark.parametrize(("images", "tolerance"), [("png", 0), ("jpeg", 12), ("video", 25)])
def test_lerobot_opens_an_export_and_finds_every_step_as_it_was(
    built: Built, tmp_path: Path, images: str, tolerance: float
) -> None:
    export_lerobot(built.root, tmp_path / "set", images=images, version=VERSION)
    dataset = open_set(tmp_path / "set")
    assert (len(dataset), dataset.num_episodes, dataset.fps) == (20, 4, 10)
    index = 0
    for episode, (start, stop) in enumerate(RUNS):
        for step in range(start, stop):
            item = dataset[index]
            np.testing.assert_array_equal(item["observation.state"].numpy(), built.arrays["state"][step])
            np.testing.assert_array_equal(item["action"].numpy(), built.arrays["actions"][step])
            numbers = [item[name].item() for name in ("index", "episode_index", "frame_index")]
            assert numbers == [index, episode, step - start]
            assert item["timestamp"].item() == np.float32((step - start) / 10)
            assert item["task"] == ["task 0", "task 1", "task 1", "task 0"][episode]
            for view in ("main", "side"):
                pixels = item[f"observation.images.{view}"].numpy().transpose(1, 2, 0) * 255
                difference = np.abs(pixels - built.arrays[f"rgb_{view}"][step])
                assert difference.mean() <= tolerance + 1e-4
            index += 1


def test_lerobot_cuts_windows_at_the_ends_of_episodes(built: Built, tmp_path: Path) -> None:
    export_lerobot(built.root, tmp_path / "set", images="video", version=VERSION)
    dataset = open_set(
        tmp_path / "set", delta_timestamps={"action": [0.0, 0.1, 0.2], "observation.images.main": [-0.1, 0.0]}
    )
    item = dataset[4]  # the last step of the first episode
    np.testing.assert_array_equal(item["action"].numpy(), built.arrays["actions"][[4, 4, 4]])
    assert item["action_is_pad"].tolist() == [False, True, True]
    assert tuple(item["observation.images.main"].shape) == (2, 3, *SIZE)


def test_lerobot_finds_the_statistics(built: Built, tmp_path: Path) -> None:
    export_lerobot(built.root, tmp_path / "set", version=VERSION)
    found = open_set(tmp_path / "set").meta.stats
    kept = np.concatenate([np.arange(start, stop) for start, stop in RUNS])
    for name, array in (("action", "actions"), ("observation.state", "state")):
        rows = built.arrays[array][kept].astype(np.float64)
        np.testing.assert_allclose(found[name]["mean"], rows.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(found[name]["std"], rows.std(axis=0), rtol=1e-6)
    pixels = built.arrays["rgb_main"][kept] / 255
    np.testing.assert_allclose(
        np.ravel(found["observation.images.main"]["mean"]), pixels.mean(axis=(0, 1, 2)), rtol=1e-6
    )
