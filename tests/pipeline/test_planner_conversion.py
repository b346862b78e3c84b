"""A real CARLA recording through the whole walk to Diffusion Planner's tensors."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.export_planner import export_planner
from pipeline.loaders import PlannerDataset, PlannerLoader
from pipeline.maps import load_map
from pipeline.preview import write_preview
from pipeline.readers import open_source
from pipeline.recipes import recipe_text
from pipeline.repair import repair
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import DatasetError, PlanError, RecipeError, SourceError, UsageError
from schemas.planner import NORMALIZATION, TENSORS, PlannerParams
from tasks.planner import planner_block
from tests.conftest import shared_data
from tests.pipeline.recordings import tree, write_route
from tests.pipeline.test_preview import page_of, places_of

THREADS = ClusterOptions(workers=0)


def run(out: Path, recipe: str | Path = "diffusion-planner", **options):
    town = shared_data("carla_xodr", "Town01.xodr.gz")
    return convert(shared_data("carla_recorder"), out, recipe, **{"map": str(town), "cluster": THREADS, **options})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("planner") / "out"
    report = run(out, shard_steps=64)  # four shards, so that episodes cross them
    assert report.total_steps == 248
    assert [note.split(":")[0] for note in report.notes] == ["the axles of vehicle.lincoln.mkz_2017 are not known"]
    return out


@pytest.fixture(scope="module")
def expected() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tensors of every possible anchor, in their units, straight from tracks and map."""
    reader = open_source(shared_data("carla_recorder"))
    (ref,) = reader.index().episodes
    graph = load_map(shared_data("carla_xodr", "Town01.xodr.gz"))
    steps = np.arange(20, 248 - 80)
    return steps, planner_block(reader.read_tracks(ref), graph, steps, PlannerParams())


def test_every_step_with_history_and_future_is_a_sample_and_equals_its_tensors(dataset, expected):
    steps, block = expected
    group = zarr.open_group(dataset, mode="r")
    anchors = np.flatnonzero(group["is_anchor"][:])
    assert 140 <= len(anchors) <= 148
    assert set(anchors.tolist()) <= set(steps.tolist())
    rows = anchors - steps[0]
    for name in TENSORS:
        stored, physical = group[name][:][anchors], block[name][rows]
        if name not in NORMALIZATION:
            np.testing.assert_array_equal(stored, physical, err_msg=name)
            continue
        mean, std = (np.array(part, np.float64) for part in (NORMALIZATION[name].mean, NORMALIZATION[name].std))
        scaled = (physical - mean) / std
        scaled[(physical == 0).all(axis=-1)] = 0  # padding stays zero
        np.testing.assert_allclose(stored, scaled, atol=2e-5, err_msg=name)
    others = np.setdiff1d(np.arange(248), anchors)
    assert not group["lanes"][:][others].any() and not group["ego_agent_future"][:][others].any()
    assert verify(dataset).ok


@pytest.fixture(scope="module")
def samples(dataset) -> dict[str, np.ndarray]:
    """All samples of the dataset in their units, and the step of the grid at which each stands."""
    data = PlannerDataset(dataset, predicted_neighbor_num=32, physical=True)
    stacked = {name: np.stack(arrays) for name, arrays in zip(TENSORS, zip(*(data[k] for k in range(len(data)))))}
    return {**stacked, "step": np.flatnonzero(zarr.open_group(dataset, mode="r")["is_anchor"][:])}


def test_the_real_log_has_147_samples_that_stand_at_their_own_origin(samples):
    assert len(samples["step"]) == 147
    np.testing.assert_allclose(samples["ego_current_state"][:, :4], [[0, 0, 1, 0]] * 147, atol=1e-6)


def test_every_future_is_where_a_plain_computation_puts_the_rear_axle(samples):
    """Recorded poses mixed in time, the axle -1.389 m along the car, all in float64 and one number at a time."""
    reader = open_source(shared_data("carla_recorder"))
    (ref,) = reader.index().episodes
    names = ["timestamp_s", "ego_position", "ego_rotation"]
    time_s, position, rotation = (reader.read_signals(ref, names, np.arange(ref.num_steps)).values[n] for n in names)
    there = np.isfinite(position[:, 0])
    grid_s = np.arange(248) / 10
    x, y, *_ = (np.interp(grid_s, time_s[there], column) for column in position[there].T)
    roll, pitch, yaw = (np.interp(grid_s, time_s[there], np.unwrap(column)) for column in rotation[there].T)
    forward, up = -1.389, PlannerParams().rear_axle[2]
    cos, sin = np.cos, np.sin
    axle_x = x + forward * cos(yaw) * cos(pitch) + up * (cos(yaw) * sin(pitch) * cos(roll) + sin(yaw) * sin(roll))
    axle_y = y + forward * sin(yaw) * cos(pitch) + up * (sin(yaw) * sin(pitch) * cos(roll) - cos(yaw) * sin(roll))
    for row, step in enumerate(samples["step"].tolist()):
        for k in range(80):
            dx, dy, turn = (values[step + 1 + k] - values[step] for values in (axle_x, axle_y, yaw))
            expected = (
                cos(yaw[step]) * dx + sin(yaw[step]) * dy,
                cos(yaw[step]) * dy - sin(yaw[step]) * dx,
                (turn + np.pi) % (2 * np.pi) - np.pi,
            )
            np.testing.assert_allclose(samples["ego_agent_future"][row, k], expected, atol=2e-5)


def test_the_hero_drives_on_a_returned_lane(samples):
    """Within 2 m of its centre and 15 degrees of its direction, in 95 % of the samples."""
    good = 0
    for lanes in samples["lanes"].astype(np.float64):
        starts, steps = lanes[:, :-1, :2].reshape(-1, 2), lanes[:, :-1, 2:4].reshape(-1, 2)
        kept = np.hypot(*steps.T) > 0
        starts, steps = starts[kept], steps[kept]
        share = np.clip(-(starts * steps).sum(1) / (steps**2).sum(1), 0, 1)
        away = np.hypot(*(starts + share[:, None] * steps).T)
        nearest = int(away.argmin())
        good += away[nearest] < 2.0 and abs(np.arctan2(*steps[nearest][::-1])) < np.radians(15)
    assert good >= 0.95 * len(samples["lanes"])


def test_the_other_car_is_a_neighbour_with_width_before_length(samples, dataset):
    ids = zarr.open_group(dataset, mode="r")["neighbor_agents_id"][:][samples["step"]]
    rows, slots = np.nonzero(ids == 175)
    assert len(rows) >= 145
    shape = samples["neighbor_agents_past"][rows, slots, -1, 6:]
    np.testing.assert_allclose(shape, [[1.9315930, 4.6045099, 1, 0, 0]] * len(rows), atol=1e-5)


def test_the_loader_gives_the_eleven_tensors_in_order_normalised_or_in_their_units(dataset, expected):
    steps, block = expected
    loader = PlannerLoader(dataset, 16, seed=3, physical=True)
    seen = 0
    for batch in loader:
        assert [name for name in batch if name != "index"] == list(TENSORS)
        rows = batch["index"] - steps[0]
        assert batch["neighbor_agents_future"].shape == (16, 10, 80, 3)
        np.testing.assert_array_equal(batch["neighbor_agents_future"], block["neighbor_agents_future"][rows, :10])
        np.testing.assert_array_equal(batch["ego_agent_future"], block["ego_agent_future"][rows])
        for name in NORMALIZATION:
            np.testing.assert_allclose(batch[name], block[name][rows], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(batch["ego_current_state"][:, :4], [[0, 0, 1, 0]] * 16, atol=1e-6)
        seen += 16
    assert seen == len(loader) * 16 >= 128


def test_the_drop_in_dataset_returns_diffusion_planners_tuple(dataset):
    data = PlannerDataset(dataset, future_len=40, predicted_neighbor_num=5)
    sample = data[0]
    shapes = [array.shape for array in sample]
    assert shapes == [
        (10,), (40, 3), (32, 21, 11), (5, 40, 3), (70, 20, 12), (70, 1), (70, 1), (25, 20, 12), (25, 1), (25, 1), (5, 10),
    ]  # fmt: skip
    assert [array.dtype.name for array in sample] == ["float32"] * 6 + ["bool"] + ["float32"] * 2 + ["bool", "float32"]
    assert len(data) >= 140
    with pytest.raises(IndexError):
        data[len(data)]
    with pytest.raises(UsageError, match="at most"):
        PlannerDataset(dataset, future_len=81)


def test_shards_do_not_change_what_an_episode_is(dataset, tmp_path):
    run(tmp_path / "whole", shard_steps=256)
    pairs = [zarr.open_group(path, mode="r") for path in (dataset, tmp_path / "whole")]
    for name in ("lanes", "neighbor_agents_past", "ego_agent_future", "is_anchor"):
        np.testing.assert_array_equal(pairs[0][name][:], pairs[1][name][:])
    run(tmp_path / "again", shard_steps=256)
    assert tree(tmp_path / "again") == tree(tmp_path / "whole")


def test_damage_of_a_small_tensor_is_found_and_named_with_its_steps(dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    path = copy / "static_objects" / "c.1.0.0"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    report = verify(copy)
    assert [(p.array, p.start, p.stop) for p in report.problems] == [("static_objects", 64, 128)]


def test_damaged_tensors_are_repaired_from_the_log_and_the_map(dataset, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(dataset, out)
    arrays = read_info(out).arrays
    by_size = [
        next(
            f"{name}/c.1{'.0' * len(arrays[name].row_shape)}"
            for name in TENSORS
            if is_large == (arrays[name].chunk_steps == 1)
        )
        for is_large in (True, False)
    ]
    for path in by_size:
        data = bytearray((out / path).read_bytes())
        data[len(data) // 3] ^= 1
        (out / path).write_bytes(data)
    (out / "is_anchor" / "c.0").unlink()
    town = shared_data("carla_xodr", "Town01.xodr.gz")
    report = repair(out, shared_data("carla_recorder"), map=str(town), cluster=THREADS)
    assert (report.left, set(report.repaired)) == ((), {*by_size, "is_anchor/c.0"})
    assert tree(out) == tree(dataset)


def test_a_planner_recipe_needs_a_map_and_a_format_with_tracks(tmp_path, dataset):
    with pytest.raises(UsageError, match="add --map"):
        run(tmp_path / "a", map="")
    write_route(tmp_path / "raw", 1, 5)
    town = str(shared_data("carla_xodr", "Town01.xodr.gz"))
    with pytest.raises(UsageError, match="format with tracks"):
        convert(tmp_path / "raw", tmp_path / "b", "diffusion-planner", map=town, cluster=THREADS)
    with pytest.raises(PlanError, match=r"planner\.anchor_stride 1 -> 2"):
        recipe = tmp_path / "stride.toml"
        recipe.write_text(recipe_text("diffusion-planner").replace("anchor_stride = 1", "anchor_stride = 2"))
        run(dataset, recipe)
    assert read_info(dataset).attributes["maps"]


def test_observations_are_stored_by_a_given_normalization_and_exported_in_their_units(expected, tmp_path):
    steps, block = expected
    recipe, given = tmp_path / "mine.toml", {"lanes": {"mean": [3.0] * 12, "std": [7.0] * 12}}
    text = recipe_text("diffusion-planner").replace('"published"  #', '"given.json"  #')
    recipe.write_text(text.replace("anchor_stride = 1", "anchor_stride = 20"))
    (tmp_path / "given.json").write_text(json.dumps(given))
    run(tmp_path / "out", recipe)
    (tmp_path / "given.json").write_text("changed later")
    group = zarr.open_group(tmp_path / "out", mode="r")
    anchors = np.flatnonzero(group["is_anchor"][:])
    lanes = block["lanes"][anchors - steps[0]].astype(np.float64)
    scaled = np.where((lanes == 0).all(axis=-1, keepdims=True), 0, (lanes - 3) / 7)
    np.testing.assert_allclose(group["lanes"][:][anchors], scaled, atol=2e-5)
    np.testing.assert_array_equal(group["route_lanes"][:][anchors], block["route_lanes"][anchors - steps[0]])
    report = export_planner(tmp_path / "out", tmp_path / "cache")
    assert report.num_samples == len(anchors)
    for step, name in zip(anchors, json.loads((tmp_path / "cache" / "diffusion_planner_training.json").read_bytes())):
        with np.load(tmp_path / "cache" / name) as sample:
            assert str(sample["map_name"]) in name
            for key in TENSORS:
                physical = block[key][step - steps[0]]
                assert (sample[key].dtype, sample[key].shape) == (physical.dtype, physical.shape)
                np.testing.assert_allclose(sample[key], physical, atol=1e-4, err_msg=key)
    with pytest.raises(RecipeError, match=r"expected a normalization\.json"):
        run(tmp_path / "other", recipe)


def test_a_dataset_without_the_tensors_is_refused(tmp_path):
    write_route(tmp_path / "raw", 1, 5)
    convert(tmp_path / "raw", tmp_path / "out", "pi0", size=16, cluster=THREADS)
    with pytest.raises(DatasetError, match="--recipe diffusion-planner"):
        PlannerLoader(tmp_path / "out", 2)


def test_a_preview_shows_the_samples_from_above(dataset, tmp_path):
    page = page_of(dataset, samples=3)
    shown = [attributes["aria-label"] for attributes in page.all("svg") if attributes.get("class") == "plan-view"]
    assert len(shown) == 3
    assert re.search(r"Shown: 3 of 14\d samples", page.text)
    assert "1 vehicle" in shown[1] and "at red" in shown[0]
    write_preview(dataset, tmp_path / "samples.png", samples=2)
    with Image.open(tmp_path / "samples.png") as picture:
        assert len(places_of(picture, "ego-future")) > 100


def test_a_map_that_cannot_be_read_ends_the_run_before_anything_is_made(tmp_path):
    town = shared_data("carla_xodr", "Town01.xodr.gz").read_bytes()
    (tmp_path / "Town01.xodr.gz").write_bytes(town[: len(town) // 2])
    with pytest.raises(SourceError, match=r"map .*Town01\.xodr\.gz.*expected a whole gzip file"):
        run(tmp_path / "out", map=str(tmp_path / "Town01.xodr.gz"))
    assert not (tmp_path / "out" / "zarr.json").exists()
    assert run(tmp_path / "out").total_steps == 248
