"""A dataset opens lazily as the xarray.Dataset that xarray itself would open, verified, in either form."""

import pickle
import shutil
import time
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dataset import open_dataset
from pipeline.store.metadata import root_document
from schemas.dataset import ROW_CHUNK_STEPS, ROW_SHARD_STEPS
from schemas.errors import ChecksumError, DatasetError, UsageError
from tests.pipeline.store_builder import Built, build_dataset, frame_spec, row_spec

MEAN, STD = np.array([0.5, 0.4, 0.3]), np.array([0.2, 0.25, 0.3])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("dataset") / "out")


@pytest.mark.parametrize(
    ("codec", "dtype"), [("raw", "uint8"), ("zstd", "uint8"), ("raw", "float16"), ("zstd", "float32")]
)
def test_it_is_what_xarray_itself_opens(tmp_path: Path, codec: str, dtype: str) -> None:
    root = build_dataset(tmp_path / "out", codec=codec, dtype=dtype).root
    xr.testing.assert_identical(open_dataset(root).load(), xr.open_zarr(root, chunks=None).load())


def test_it_is_lazy_and_explains_itself(built: Built) -> None:
    ds = open_dataset(built.root)
    assert set(ds.coords) == {"episode_index", "timestamp_s"}
    assert ds.chunks == {}
    assert not any(variable._in_memory for variable in ds.variables.values())
    assert ds.rgb_main.attrs["long_name"] == "camera frames, view main"
    assert ds.timestamp_s.attrs["units"] == "s"
    assert ds.attrs["headrace"]["generation"] == 1
    repr(ds)
    ds._repr_html_()
    assert not any(variable._in_memory for variable in ds.variables.values())


keys = st.one_of(
    st.integers(-21, 20),
    st.slices(21),
    st.lists(st.integers(-21, 20), max_size=6).map(lambda steps: np.array(steps, np.int64)),
)


@given(step=keys, row=st.one_of(st.integers(-6, 5), st.slices(6)), column=st.lists(st.integers(0, 3), max_size=3))
def test_indexing_agrees_with_numpy(built: Built, step: object, row: object, column: list[int]) -> None:
    ds = open_dataset(built.root)
    for name in ("rgb_main", "rgb_side", "state", "valid"):
        found = ds[name][step].values  # type: ignore[index]
        np.testing.assert_array_equal(found, built.arrays[name][step])  # type: ignore[index]
    found = ds.rgb_side[step, row, np.array(column, np.int64)].values  # type: ignore[index]
    expected = (
        built.arrays["rgb_side"][step][..., row, :, :]
        if isinstance(step, int)
        else built.arrays["rgb_side"][step][:, row]
    )  # type: ignore[index]
    np.testing.assert_array_equal(found, np.take(expected, column, axis=-2))


def test_episodes_and_times_are_selected_by_value(built: Built) -> None:
    ds = open_dataset(built.root)
    np.testing.assert_array_equal(ds.sel(episode_index=1).state, built.arrays["state"][5:14])
    times = built.arrays["timestamp_s"][5:14]
    episode = ds.headrace.episode(1).swap_dims(step="timestamp_s")
    found = episode.sel(timestamp_s=times[4] + 1e-3, method="nearest")
    np.testing.assert_array_equal(found.rgb_main, built.arrays["rgb_main"][9])


def test_a_part_survives_to_zarr_and_back(built: Built, tmp_path: Path) -> None:
    part = open_dataset(built.root).isel(step=slice(2, 8))
    part.to_zarr(tmp_path / "part.zarr", zarr_format=3, consolidated=False)
    again = xr.open_zarr(tmp_path / "part.zarr", consolidated=False)
    for name in ("rgb_main", "state", "episode_index", "timestamp_s"):
        np.testing.assert_array_equal(again[name], built.arrays[name][2:8])


def test_vectorised_and_boolean_indexing_work(built: Built) -> None:
    ds = open_dataset(built.root)
    episode = ds.isel(step=(ds.episode_index == 1).values)
    np.testing.assert_array_equal(episode.state, built.arrays["state"][5:14])
    steps, rows = xr.DataArray([3, 20, 0], dims="p"), xr.DataArray([5, 0, 2], dims="p")
    picked = ds.rgb_main.isel(step=steps, height_main=rows)
    np.testing.assert_array_equal(picked, built.arrays["rgb_main"][[3, 20, 0], [5, 0, 2]])
    with pytest.raises(IndexError):
        ds.rgb_main[21].load()


def test_dask_chunks_only_where_asked_and_then_of_whole_shards(built: Built) -> None:
    ds = open_dataset(built.root, chunks={})
    assert ds.chunks["step"] == (8, 8, 5)
    assert open_dataset(built.root, chunks={"step": 5}).chunks["step"] == (5, 5, 5, 5, 1)
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            for name in built.arrays:
                np.testing.assert_array_equal(ds[name].compute().values, built.arrays[name])
    again = open_dataset(built.root, chunks={})
    assert again.rgb_main.data.name == ds.rgb_main.data.name


def test_it_can_be_pickled(built: Built) -> None:
    ds = open_dataset(built.root)
    ds.state[0].load()
    copy = pickle.loads(pickle.dumps(ds))
    np.testing.assert_array_equal(copy.rgb_main[7], built.arrays["rgb_main"][7])


def float_pair(tmp_path: Path) -> tuple[Built, Built, np.ndarray]:
    """Return the same frames stored as uint8 and as float32 normalised before writing, both naming the constants."""
    from dataclasses import replace

    from tests.pipeline import store_builder

    plain = build_dataset(tmp_path / "plain", codec="zstd", dtype="uint8")
    normalization = {"mean": MEAN.tolist(), "std": STD.tolist()}
    specs, arrays = dict(plain.specs), dict(plain.arrays)
    for name in ("rgb_main", "rgb_side"):
        specs[name] = replace(specs[name], attributes=(*specs[name].attributes, ("normalization", normalization)))
    physical = store_builder.write_dataset(tmp_path / "u8", specs, arrays, plain.episode_lengths, shard_steps=8)
    for name in ("rgb_main", "rgb_side"):
        specs[name] = replace(specs[name], dtype="float32")
        values = (arrays[name] / 255 - MEAN) / STD
        values[~arrays[specs[name].valid_array]] = 0
        arrays[name] = values.astype(np.float32)
    normalised = store_builder.write_dataset(tmp_path / "f4", specs, arrays, plain.episode_lengths, shard_steps=8)
    return physical, normalised, plain.arrays["rgb_side"]


def test_both_forms_come_from_either_way_of_storing(tmp_path: Path) -> None:
    physical, normalised, frames = float_pair(tmp_path)
    for built in (physical, normalised):
        ds = open_dataset(built.root, physical=True)
        assert ds.rgb_side.dtype == np.uint8
        np.testing.assert_array_equal(ds.rgb_side, frames)
        np.testing.assert_array_equal(ds.rgb_side[3], 0)  # absent: black, not the mean colour
        np.testing.assert_array_equal(ds.rgb_side[6, 2], frames[6, 2])
    one, other = (open_dataset(built.root, normalized=True) for built in (physical, normalised))
    assert one.rgb_side.dtype == other.rgb_side.dtype == np.float32
    assert np.abs(one.rgb_side.values - other.rgb_side.values).max() < 2e-5
    np.testing.assert_array_equal(one.rgb_side[8:16], 0)
    for ds in (one, other):
        assert ds.rgb_main.values.std() > 0.5
    assert one.rgb_main.attrs["units"] == "standard deviations"
    np.testing.assert_array_equal(one.state, physical.arrays["state"])
    with pytest.raises(UsageError, match="found both"):
        open_dataset(physical.root, physical=True, normalized=True)


def test_damage_is_found_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    path = built.root / "rgb_main" / "c.1.0.0.0"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    ds = open_dataset(built.root)
    np.testing.assert_array_equal(ds.rgb_main[9], built.arrays["rgb_main"][9])
    with pytest.raises(ChecksumError, match="array rgb_main, steps 8:9, file rgb_main/c.1.0.0.0"):
        ds.rgb_main[8].load()
    path.unlink()
    with pytest.raises(DatasetError, match="expected a shard file, found none"):
        open_dataset(built.root).rgb_main[9].load()


def test_swapped_shards_are_refused_when_read(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    first, second = (built.root / "rgb_main" / f"c.{k}.0.0.0" for k in (0, 1))
    shutil.move(first, tmp_path / "x")
    shutil.move(second, first)
    shutil.move(tmp_path / "x", second)
    with pytest.raises(ChecksumError, match="swapped or replaced"):
        open_dataset(built.root).rgb_main[0].load()


def test_what_is_no_finished_dataset_is_refused(built: Built, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="found nothing"):
        open_dataset(tmp_path / "absent")
    with pytest.raises(DatasetError, match="no zarr.json"):
        open_dataset(tmp_path)
    (tmp_path / "zarr.json").write_bytes((built.root / "zarr.json").read_bytes()[:-9])
    with pytest.raises(DatasetError, match="expected JSON"):
        open_dataset(str(tmp_path))


def test_a_million_steps_open_in_half_a_second(tmp_path: Path) -> None:
    num_steps, num_episodes = 1_000_000, 10_000
    specs = {
        f"rgb_{view}": frame_spec(view, (224, 224), shard_steps=256, codec="raw", dtype="uint8")
        for view in ("base", "left", "right")
    }
    for name in ("state", "actions"):
        specs[name] = row_spec(name, "float32", (32,), chunk_steps=ROW_CHUNK_STEPS, shard_steps=ROW_SHARD_STEPS)
    specs["row_size"] = row_spec("row_size", "int64", (), chunk_steps=1024, shard_steps=262144, dim="episode")
    lengths = {name: (spec, num_steps if spec.dims[0] == "step" else num_episodes) for name, spec in specs.items()}
    attributes = {
        "num_steps": num_steps,
        "num_episodes": num_episodes,
        "generation": 1,
        "shard_steps": 256,
        "tables": {},
        "recipe": {},
    }
    (tmp_path / "zarr.json").write_bytes(root_document(lengths, attributes))
    open_dataset(tmp_path)
    began = time.perf_counter()
    ds = open_dataset(tmp_path)
    assert time.perf_counter() - began < 0.5
    assert ds.sizes["step"] == num_steps
