"""Copies that another program wrote: the same samples, said to be slower, and never a way around damage."""

import logging
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset import open_dataset
from pipeline.loaders import DatasetReader, MultiViewDataset, MultiViewLoader, WindowLoader
from pipeline.loaders.zarr_reader import ZarrReader
from schemas.errors import DatasetError, UsageError
from tests.pipeline.loaders.test_reader import flip
from tests.pipeline.store_builder import Built, build_dataset

pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.ZarrUserWarning", "ignore:Consolidated metadata:UserWarning"
)


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("rewritten") / "out")


@pytest.fixture(name="copy", params=[2, 3], scope="module")
def _copy(request, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset as xarray writes it, its tables copied along."""
    path = tmp_path_factory.mktemp("copies") / f"v{request.param}.zarr"
    open_dataset(built.root).to_zarr(path, zarr_format=request.param)
    shutil.copytree(built.root / "_tables", path / "_tables")
    return path


def test_loaders_serve_the_same_batches_from_a_copy_that_xarray_wrote(built, copy, caplog):
    options = {"horizon": 3, "seed": 4, "tail": "keep", "filter": "num_steps > 5"}
    with caplog.at_level(logging.WARNING, "headrace.loaders"):
        stream = MultiViewLoader(copy, 4, **options)
    assert [record.message for record in caplog.records if "rewritten by another program" in record.message]
    for batch, expected in zip(stream, MultiViewLoader(built.root, 4, **options), strict=True):
        for view, frames in expected["image"].items():
            np.testing.assert_array_equal(batch["image"][view], frames)
            np.testing.assert_array_equal(batch["image_mask"][view], expected["image_mask"][view])
        for name in ("state", "actions", "actions_is_pad", "index", "prompt"):
            np.testing.assert_array_equal(batch[name], expected[name])
    windows = zip(WindowLoader(copy, 3, horizon=4), WindowLoader(built.root, 3, horizon=4), strict=True)
    for batch, expected in windows:
        np.testing.assert_array_equal(batch["obs"]["main"], expected["obs"]["main"])
        np.testing.assert_array_equal(batch["action"], expected["action"])
    dataset = pickle.loads(pickle.dumps(MultiViewDataset(copy)))
    np.testing.assert_array_equal(dataset[7]["image"]["side"], MultiViewDataset(built.root)[7]["image"]["side"])


def test_a_reader_of_a_copy_gives_rows_in_any_order_and_refuses_others(built, copy):
    reader = ZarrReader(copy)
    out = np.empty((4, 6, 4, 3), np.uint8)
    reader.gather("rgb_main", np.array([20, 3, 3, 0]), out)
    np.testing.assert_array_equal(out, built.arrays["rgb_main"][[20, 3, 3, 0]])
    for name in ("valid", "state", "episode_ends"):
        np.testing.assert_array_equal(reader.rows(name), built.arrays[name])
        assert reader.rows(name).dtype == built.arrays[name].dtype
    for wrong in (-1, 21):
        with pytest.raises(UsageError, match=r"expected steps in \[0, 21\)"):
            reader.gather("rgb_main", np.array([wrong]), out[:1])


def test_without_its_tables_a_copy_has_no_instructions_and_says_so(built, tmp_path, caplog):
    open_dataset(built.root).to_zarr(tmp_path / "copy.zarr")
    with caplog.at_level(logging.WARNING, "headrace.loaders"):
        batch = next(iter(MultiViewLoader(tmp_path / "copy.zarr", 4, default_prompt="go")))
    assert batch["prompt"] == ["go"] * 4
    assert [record.message for record in caplog.records if "has no _tables" in record.message]


def test_a_selection_is_refused_since_its_episodes_do_not_fit(built, tmp_path):
    open_dataset(built.root).isel(step=slice(0, 12)).to_zarr(tmp_path / "part.zarr")
    with pytest.raises(DatasetError, match="expected 21 rows, as the dataset had, found 12"):
        MultiViewLoader(tmp_path / "part.zarr", 2)


def test_a_damaged_dataset_of_ours_is_never_read_in_another_way(tmp_path):
    built = build_dataset(tmp_path / "out")
    text = (built.root / "zarr.json").read_bytes()
    flip(built.root / "zarr.json", text.index(b"camera frames"))
    with pytest.raises(DatasetError, match="expected metadata of xxh3"):
        MultiViewLoader(built.root, 2)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DatasetError, match="expected"):
            MultiViewLoader(path, 2)
    assert not isinstance(DatasetReader(build_dataset(tmp_path / "sound").root), ZarrReader)
