"""Raw recordings as a lazy dataset."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import xarray as xr

from pipeline import open_raw
from pipeline.readers.lbc import LbcReader
from schemas.errors import Reason, SourceError
from tests.pipeline.readers import builders


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("expected nothing to be computed")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what decode_frame is asked for, by patching where the graph looks it up."""
    import pipeline.graph

    sizes: list[int] = []
    decode = pipeline.graph.decode_frame

    def counted(data: bytes) -> np.ndarray:
        sizes.append(len(data))
        return decode(data)

    monkeypatch.setattr(pipeline.graph, "decode_frame", counted)
    return sizes


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    for number, num_steps in ((1, 3), (2, 20), (10, 4)):
        builders.write_lbc_route(tmp_path / f"route_{number}", num_steps)
    return tmp_path


def test_opening_and_showing_computes_nothing(routes: Path, decoded: list[int]) -> None:
    with dask.config.set(scheduler=refuse):
        ds = open_raw(routes)
        repr(ds)
        ds._repr_html_()
        ds.isel(step=slice(3, 9)).rgb  # noqa: B018
    assert decoded == []


def test_episodes_lie_end_to_end_with_their_table(routes: Path) -> None:
    ds = open_raw(routes)
    assert ds.sizes["step"] == 27
    assert list(ds.episode_key.values) == ["route_1", "route_2", "route_10"]
    np.testing.assert_array_equal(ds.episode, np.repeat([0, 1, 2], [3, 20, 4]))
    np.testing.assert_array_equal(ds.step_in_episode, [*range(3), *range(20), *range(4)])
    np.testing.assert_array_equal(ds.timestamp_s, ds.step_in_episode / 2)
    np.testing.assert_array_equal(ds.speed, 1.0 + ds.step_in_episode)
    np.testing.assert_array_equal(ds.rgb_left[:, 0, 0, 1] // 8, ds.step_in_episode)
    np.testing.assert_array_equal(ds.rgb_left[:, 0, 0, 0], 16)
    assert ds.rgb.dims == ("step", "height_rgb", "width_rgb", "channel")
    assert ds.speed.units == "m/s"
    assert (ds.attrs["format"], ds.attrs["actions"]) == ("lbc", ["steer", "throttle", "brake"])
    assert "topdown" not in ds  # labels, not rgb


@pytest.mark.parametrize(
    ("touch", "count"),
    [
        (lambda ds: ds.rgb[5].compute(), 1),
        (lambda ds: ds.rgb[5].values, 1),
        (lambda ds: ds.rgb[-1].values, 1),
        (lambda ds: ds.rgb.isel(step=5).values, 1),
        (lambda ds: ds.isel(step=5).rgb.load(), 1),
        (lambda ds: ds.rgb[5, 2:4].values, 1),
        (lambda ds: ds.rgb.isel(step=5, channel=0).values, 1),
        (lambda ds: ds.rgb[5].mean().compute(), 1),
        (lambda ds: (ds.rgb[5] / 255).values, 1),
        (lambda ds: ds[["rgb", "rgb_left"]].isel(step=5).compute(), 2),
        (lambda ds: ds.rgb[4:7].values, 3),
        (lambda ds: ds.rgb[3:23:5].values, 4),
        (lambda ds: ds.rgb.data[5].compute(), 1),
        (lambda ds: ds.rgb.isel(step=ds.episode == 2).values, 4),
        (lambda ds: ds.speed.values, 0),
    ],
)
def test_touching_a_frame_decodes_that_frame(routes: Path, decoded: list[int], touch: Any, count: int) -> None:
    ds = open_raw(routes)
    assert ds.rgb.data.numblocks[0] == 3  # of 3, 20 and 4 steps: more than what is decoded
    touch(ds)
    assert len(decoded) == count


@pytest.mark.parametrize(
    "key", [0, 5, -1, slice(2, 6), slice(None, None, -1), slice(20, 4, -3), [7, 2, 2], np.array([26, 0])]
)
def test_any_index_gives_what_numpy_would(routes: Path, key: Any) -> None:
    ds = open_raw(routes)
    whole = ds.rgb.values
    np.testing.assert_array_equal(ds.rgb[key], whole[key])
    np.testing.assert_array_equal(ds.speed[key], ds.speed.values[key])


def test_a_view_missing_in_some_episodes_is_zeros_there(routes: Path) -> None:
    shutil.rmtree(routes / "route_2/rgb_right")
    ds = open_raw(routes)
    present = ds.rgb_right_present.values
    np.testing.assert_array_equal(present, ds.episode != 1)
    assert not ds.rgb_right.values[~present].any()
    assert (ds.rgb_right.values[present][..., 2] == 255).all()
    assert "rgb_present" not in ds


def test_a_frame_that_cannot_be_decoded_raises_where_it_is_touched(routes: Path) -> None:
    (routes / "route_2/rgb/0007.png").write_bytes(b"")
    ds = open_raw(routes)
    assert ds.rgb[9].values.any()
    with pytest.raises(SourceError) as caught:
        ds.rgb[10].compute()
    assert caught.value.reason == Reason.TRUNCATED
    assert "episode route_2, view rgb, step 7" in str(caught.value)


def test_rows_that_cannot_be_read_are_nan_with_a_warning(routes: Path) -> None:
    (routes / "route_2/measurements/0007.json").write_bytes(b"{")
    ds = open_raw(routes)
    with pytest.warns(RuntimeWarning, match="speed of route_2, steps 7:8"):
        speed = ds.speed.values
    assert list(np.flatnonzero(np.isnan(speed))) == [10]


def test_sizes_that_differ_are_an_error_that_names_them(routes: Path) -> None:
    builders.write_lbc_route(routes / "route_3", 2, size=(12, 16))
    with pytest.raises(SourceError, match=r"found 8x6 px in route_1, 16x12 px in route_3; open one"):
        open_raw(routes)


def test_a_frame_of_another_size_than_the_first_is_an_error(routes: Path) -> None:
    builders.write(routes / "route_2/rgb/0007.png", builders.image_bytes(builders.colour(0, 7, (12, 16))))
    with pytest.raises(SourceError, match=r"expected a frame of \[6, 8, 3\], found \[12, 16, 3\]"):
        open_raw(routes).rgb[10].compute()


def test_a_source_without_a_usable_episode_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "route/rgb").mkdir(parents=True)
    (tmp_path / "route/measurements").mkdir()
    with pytest.raises(SourceError, match="found none that can be read: expected files such as"):
        open_raw(tmp_path)


def test_images_of_a_table_and_raw_arrays_open_alike(tmp_path: Path) -> None:
    robot = open_raw(builders.write_lerobot(tmp_path / "robot", (3, 4)))
    np.testing.assert_array_equal(robot["observation.images.front"][4], builders.colour(1, 1))
    np.testing.assert_array_equal(robot["action"][:, 0], [0, 1, 2, 1000, 1001, 1002, 1003])
    assert robot["observation.state"].features == ["shoulder", "elbow"]
    assert list(robot.instruction.values) == ["push", "push"]
    arrays = open_raw(builders.write_npy(tmp_path / "arrays", 5, episode=np.arange(5.0)))
    np.testing.assert_array_equal(arrays.front[3], builders.colour(1, 3))
    np.testing.assert_array_equal(arrays.episode_recorded, np.arange(5))


def test_a_dataset_travels_to_a_worker(routes: Path) -> None:
    ds = open_raw(routes)
    again = pickle.loads(pickle.dumps(ds.rgb.data[5:6]))
    np.testing.assert_array_equal(again.compute(scheduler="sync"), ds.rgb[5:6])


def test_a_folder_may_be_given_as_text_and_its_format_by_name(routes: Path) -> None:
    xr.testing.assert_identical(open_raw(str(routes), "lbc").isel(step=1), open_raw(routes).isel(step=1))
    with pytest.raises(SourceError, match="npy: no folder"):
        open_raw(routes, "npy")


def test_the_real_route_opens_and_shows_a_frame(shared_data: Path, decoded: list[int]) -> None:
    from PIL import Image

    ds = open_raw(shared_data / "carla_lbc_route")
    assert ds.rgb.shape == (160, 144, 256, 3)
    with Image.open(shared_data / "carla_lbc_route/route_00/rgb/0042.png") as image:
        np.testing.assert_array_equal(ds.rgb[42], np.asarray(image.convert("RGB")))
    assert len(decoded) == 1
    assert LbcReader.name == ds.attrs["format"]


def test_real_video_opens_with_its_missing_views(shared_data: Path) -> None:
    ds = open_raw(shared_data / "lerobot_v2.1/starvla_sim_pick_place")
    assert ds.sizes["step"] == 1667
    assert not ds["video.base_view"][3].values.any()
    assert ds["video.ego_view"][3].values.any()
    np.testing.assert_array_equal(ds["video.base_view_present"], ds.episode == 2)
