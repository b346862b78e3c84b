"""The window loader: the batches that Diffusion Policy and Diffuser train on."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from pipeline.loaders.windows import WindowLoader
from schemas.errors import DatasetError, UsageError
from tests.pipeline.store_builder import Built, build_dataset

PIECES = ((0, 5), (5, 6), (7, 14), (14, 21))
"""Episodes of 5, 9 and 7 steps, of which step 6 is not valid."""


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("windows") / "out")


def expected_steps(horizon: int, pad_before: int, pad_after: int) -> list[list[int]]:
    return [
        [min(max(first + k, start), stop - 1) for k in range(horizon)]
        for start, stop in PIECES
        for first in range(start - pad_before, stop - horizon + pad_after + 1)
    ]


def test_a_batch_is_what_diffusion_policy_takes(built):
    loader = WindowLoader(
        built.root, 64, horizon=4, num_obs_steps=2, pad_before=1, pad_after=2, shuffle=False, tail="keep"
    )
    (batch,) = list(loader)
    steps = np.array(expected_steps(4, 1, 2))
    assert len(steps) == loader.samples.num == len(batch["index"])
    assert batch["obs"].keys() == {"main", "side", "state"}
    np.testing.assert_array_equal(batch["action"], built.arrays["actions"][steps])
    np.testing.assert_array_equal(batch["obs"]["state"], built.arrays["state"][steps[:, :2]])
    for view in ("main", "side"):
        np.testing.assert_array_equal(batch["obs"][view], built.arrays[f"rgb_{view}"][steps[:, :2]])
        np.testing.assert_array_equal(batch["obs_mask"][view], built.arrays[f"rgb_{view}_valid"][steps[:, :2]])
    np.testing.assert_array_equal(batch["is_pad"], steps != batch["index"][:, None] + np.arange(4))


def test_frames_come_as_the_policies_divide_them(built):
    obs = {"image": "rgb_main", "agent_pos": "state"}
    loader = WindowLoader(built.root, 5, horizon=3, normalize_images=True, obs=obs, shuffle=False)
    batch = next(iter(loader))
    steps = np.array(expected_steps(3, 0, 0))[:5]
    frames = built.arrays["rgb_main"][steps].astype(np.float32)
    assert list(batch["obs"]) == ["image", "agent_pos"]
    assert batch["obs"]["image"].dtype == np.float32
    np.testing.assert_array_equal(batch["obs"]["image"], np.moveaxis(frames, -1, 2) / 255)


def test_frames_stored_normalised_come_as_pixels(tmp_path):
    built = build_dataset(tmp_path / "out", dtype="float32", missing={})
    batch = next(iter(WindowLoader(built.root, 4, horizon=2, obs={"image": "rgb_main"}, shuffle=False)))
    assert batch["obs"]["image"].dtype == np.uint8 and batch["obs"]["image"].shape == (4, 2, 6, 4, 3)


def test_a_batch_is_what_diffuser_takes(built):
    loader = WindowLoader(built.root, 64, layout="diffuser", horizon=6, shuffle=False, tail="keep")
    (batch,) = list(loader)
    joined = np.concatenate([built.arrays["actions"], built.arrays["state"]], axis=1)
    expected = []
    for start, stop in PIECES:
        for first in range(start, stop - 1):
            inside = joined[first : min(first + 6, stop)]
            expected.append(np.concatenate([inside, np.zeros((6 - len(inside), 5))]))
    np.testing.assert_array_equal(batch["trajectories"], expected)
    np.testing.assert_array_equal(batch["conditions"][0], np.array(expected)[:, 0, 2:])
    assert batch["trajectories"].dtype == np.float32


def test_every_window_comes_once_an_epoch_and_ranks_share_them(built):
    whole = WindowLoader(built.root, 4, horizon=3, tail="keep", obs={"state": "state"})
    order = [step for batch in whole for step in batch["index"].tolist()]
    assert sorted(order) == [steps[0] for steps in expected_steps(3, 0, 0)]
    ranks = [
        WindowLoader(built.root, 2, horizon=3, tail="keep", obs={"state": "state"}, rank=rank, world_size=2)
        for rank in range(2)
    ]
    shared = [step for rank in ranks for batch in rank for step in batch["index"].tolist()]
    assert sorted(shared) == sorted(order)


def test_a_pickled_loader_goes_on_where_it_was(built):
    loader = WindowLoader(built.root, 3, horizon=3, threads=1)
    batches = iter(loader)
    next(batches)
    again = pickle.loads(pickle.dumps(loader))
    np.testing.assert_array_equal(next(iter(again))["index"], next(batches)["index"])
    loader.close()


def test_a_state_of_other_windows_is_refused(built):
    state = WindowLoader(built.root, 3, horizon=3).state_dict()
    with pytest.raises(UsageError, match="expected a state of this dataset"):
        WindowLoader(built.root, 3, horizon=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"layout": "dp"}, UsageError),
        ({"horizon": 0}, UsageError),
        ({"num_obs_steps": 99}, UsageError),
        ({"horizon": 99}, DatasetError),
        ({"obs": {"a": "nothing"}}, DatasetError),
        ({"obs": {"a": "timestamp_s"}}, DatasetError),
        ({"obs": {"a": "rgb_nothing"}}, UsageError),
        ({"layout": "diffuser", "obs": {"a": "rgb_main"}}, UsageError),
    ],
)
def test_options_that_cannot_be_are_refused(built: Built, options: dict[str, object], error: type[Exception]):
    with pytest.raises(error, match="expected"):
        WindowLoader(Path(built.root), 2, **options)
