"""``ds.headrace``: one episode, frames in their units, a picture of a step."""

import importlib.util

import numpy as np
import pytest
import xarray as xr

from pipeline.dataset import open_dataset
from pipeline.raw import open_raw
from pipeline.sheet import contact_sheet
from schemas.errors import MissingExtraError, UsageError
from tests.pipeline.recordings import VIEWS, frame, write_route
from tests.pipeline.store_builder import build_dataset


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    root = tmp_path_factory.mktemp("accessor")
    write_route(root, 1, 4)
    write_route(root, 2, 5, views=("rgb",))
    return open_raw(root)


def test_an_episode_is_its_steps_and_stays_lazy(raw, tmp_path):
    second = raw.headrace.episode(1)
    assert second.sizes["step"] == 5
    assert second.step_in_episode.values.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(second.rgb[3].values, frame(2, 3, 0))
    built = build_dataset(tmp_path / "out")
    ds = open_dataset(built.root)
    for number, length in enumerate(built.episode_lengths):
        episode = ds.headrace.episode(number)
        assert episode.sizes["step"] == length
        assert not episode["rgb_main"].variable._in_memory
    part = ds.isel(step=slice(1, None, 2)).headrace.episode(0)
    assert part.sizes["step"] == len(range(1, built.episode_lengths[0], 2))


def test_an_episode_that_is_not_there_is_named(raw):
    with pytest.raises(UsageError, match="episode of 0 to 1, found 7"):
        raw.headrace.episode(7)
    with pytest.raises(UsageError, match="found neither"):
        xr.Dataset({"a": ("step", [1, 2])}).headrace.episode(0)


def test_physical_is_what_open_dataset_gives(tmp_path):
    root = build_dataset(tmp_path / "out", codec="raw", dtype="float32").root
    expected = open_dataset(root, physical=True)
    found = open_dataset(root).headrace.physical()
    for name in ("rgb_main", "rgb_side"):
        assert found[name].dtype == np.uint8
        np.testing.assert_array_equal(found[name].values, expected[name].values)


def test_a_step_is_shown_with_every_view(raw):
    tiles = {view: [frame(1, 2, k)] for k, view in enumerate(VIEWS)}
    expected = contact_sheet(tiles, columns=["episode 0, 1.00 s, step 2"], tile_width_px=320, missing="masked")
    assert raw.headrace.show(2).tobytes() == expected.tobytes()
    gap = (np.asarray(raw.headrace.show(6)) == (234, 238, 242)).all(axis=2).sum()
    assert gap > 2 * 300 * 200  # two views that the second episode lacks
    with pytest.raises(UsageError, match="camera views"):
        raw[["speed"]].headrace.show(0)


def test_a_player_needs_its_extra(raw):
    if importlib.util.find_spec("ipywidgets") is None:
        with pytest.raises(MissingExtraError, match=r"headrace\[notebook\]"):
            raw.headrace.play()
        return
    player = raw.headrace.episode(0).headrace.play()
    slider, picture = player.children[0].children[1], player.children[1]
    before = picture.value
    slider.value = 3
    assert picture.value != before and picture.value[:4] == b"\x89PNG"
