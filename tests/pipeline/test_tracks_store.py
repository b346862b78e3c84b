"""A dataset that keeps tracks and map instead of tensors gives the same samples, bit for bit."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.export_planner import export_planner
from pipeline.generations import remove_old_generations
from pipeline.loaders import PlannerDataset, PlannerLoader
from pipeline.planner_stats import planner_normalization
from pipeline.preview import write_preview
from pipeline.recipes import load_recipe
from pipeline.repair import repair
from pipeline.store.metadata import read_info
from pipeline.store.tables import read_table
from pipeline.verification import verify
from schemas.errors import PlanError, RecipeError
from schemas.planner import TENSORS
from tasks.planner_augment import Perturbation
from tests.conftest import shared_data
from tests.pipeline.city import COUNTS, write_city
from tests.pipeline.recordings import tree
from tests.pipeline.test_preview import places_of

SIZES = {"num_agents": 8, "num_lanes": 20, "num_route_lanes": 6, "past_steps": 5, "future_steps": 24}


def recipe_of(**changes):
    recipe = load_recipe("diffusion-planner")
    return replace(recipe, planner=replace(recipe.planner, **changes))


def make(raw, out, town, **changes):
    options = {"map": str(town), "cluster": ClusterOptions(workers=0), "shard_steps": 16}
    return convert(raw, out, recipe_of(**changes), **options)


@pytest.fixture(scope="module")
def city(tmp_path_factory):
    folder = tmp_path_factory.mktemp("city")
    town, logs = write_city(folder, 90, num_nodes=3, counts=0.2)
    return folder, town, logs


@pytest.fixture(scope="module")
def both(city) -> tuple[Path, Path]:
    folder, town, logs = city
    for store in ("samples", "tracks"):
        make(logs, folder / store, town, store=store, **SIZES)
    return folder / "samples", folder / "tracks"


def assert_equal_samples(one: Path, other: Path, **options):
    pair = [PlannerDataset(path, **options) for path in (one, other)]
    assert len(pair[0]) == len(pair[1]) > 0
    for index in range(len(pair[0])):
        for name, a, b in zip(TENSORS, pair[0][index], pair[1][index], strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes(), f"{name} of sample {index}"
    return len(pair[0])


def test_every_tensor_of_every_sample_of_a_dense_scene_is_the_same(both):
    limits = {"past_neighbor_num": 8, "predicted_neighbor_num": 6, "future_len": 24}
    assert assert_equal_samples(*both, **limits) == 32
    assert_equal_samples(*both, physical=True, past_neighbor_num=5, predicted_neighbor_num=8, future_len=7)
    data = PlannerDataset(both[1], physical=True, **limits)
    found = dict(zip(TENSORS, (np.stack(arrays) for arrays in zip(*(data[k] for k in range(32))))))
    assert [name for name, rows in found.items() if not rows.any()] == []
    assert found["lanes"][..., 8:].any(axis=(0, 1, 2)).tolist() == [True, False, True, True]  # yellow is unknown


def test_every_tensor_of_the_real_log_is_the_same(tmp_path):
    town, logs = shared_data("carla_xodr", "Town01.xodr.gz"), shared_data("carla_recorder")
    for store in ("samples", "tracks"):
        make(logs, tmp_path / store, town, store=store)
    assert assert_equal_samples(tmp_path / "samples", tmp_path / "tracks", predicted_neighbor_num=32) == 147
    assert verify(tmp_path / "tracks").ok


def test_batches_and_perturbed_ones_are_the_same_in_any_order_with_little_memory(both):
    limits = {"past_neighbor_num": 8, "predicted_neighbor_num": 6, "future_len": 24}
    for options in ({"shuffle": "block"}, {"perturbation": Perturbation(), "perturbation_seed": 4, "tracks_nbytes": 1}):
        loaders = [PlannerLoader(path, 7, seed=2, **limits, **options) for path in both]
        for one, other in zip(*loaders, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_tracks_store_is_smaller_is_verified_and_opens_in_xarray(both):
    samples, tracks = (sum(f.stat().st_size for f in path.glob("*/c.*")) for path in both)
    assert tracks < samples
    assert verify(both[1]).ok
    dataset = xr.open_zarr(both[1])
    assert dataset["tracks_actors"].attrs["features"] == ["x", "y", "heading", "vx", "vy", "width", "length"]
    ids = dataset["tracks_actor_numbers"][:, :, 1].values
    assert ids.shape == (90, 512) and len(np.unique(ids[ids >= 0])) > 20


def test_statistics_and_exported_files_of_a_tracks_store_are_those_of_its_samples(both, tmp_path):
    assert planner_normalization(both[0]) == planner_normalization(both[1])
    files = []
    for number, path in enumerate(both):
        export_planner(path, tmp_path / str(number))
        files.append({name: np.load(name) for name in sorted((tmp_path / str(number)).glob("*.npz"))})
    assert len(files[0]) == 32
    for (one, a), (other, b) in zip(files[0].items(), files[1].items(), strict=True):
        assert one.name == other.name and a.files == b.files
        assert all(a[name].tobytes() == b[name].tobytes() for name in a.files)


def test_tracks_are_appended_and_equal_what_one_run_makes(both, city, tmp_path):
    _, town, logs = city
    limits = {"past_neighbor_num": 8, "predicted_neighbor_num": 6, "future_len": 24}
    (tmp_path / "logs").mkdir()
    shutil.copy(logs / "0.log", tmp_path / "logs")
    make(tmp_path / "logs", tmp_path / "out", town, store="tracks", **SIZES)
    old = PlannerDataset(tmp_path / "out", **limits)
    shutil.copy(logs / "1.log", tmp_path / "logs")
    assert make(tmp_path / "logs", tmp_path / "out", town, store="tracks", **SIZES).generation == 2
    assert verify(tmp_path / "out").ok
    one, other = tree(both[1]), tree(tmp_path / "out")
    chunks = [path for path in one if "/c." in path]
    assert len(chunks) > 20 and all(one[path] == other[path] for path in chunks)
    info = read_info(tmp_path / "out")
    (row,) = read_table(info, "maps").to_pylist()
    assert (row["town"], row["document"]) == ("City", town.read_bytes())
    assert len(old) == 16  # opened before, first read after: the generation that it opened
    for one, other in zip(old, PlannerDataset(both[0], **limits)):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
    with pytest.raises(PlanError, match="store tracks -> samples"):
        make(tmp_path / "logs", tmp_path / "out", town, **SIZES)
    removed = remove_old_generations(tmp_path / "out")
    assert {"_tables/maps-1.parquet", "_copies/maps-1.parquet"} <= set(removed.paths)
    assert verify(tmp_path / "out").ok
    assert_equal_samples(tmp_path / "out", both[0], **limits)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.workspace import Journal
from tests.pipeline.test_tracks_store import SIZES, make

append, left = Journal.append, int(sys.argv[4])

def append_and_die(journal, record):
    global left
    append(journal, record)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.append = append_and_die
make(*map(Path, sys.argv[1:4]), store="tracks", **SIZES)
"""


def test_a_run_that_is_killed_ends_as_if_nothing_had_happened(both, city, tmp_path):
    _, town, logs = city
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(logs), str(out), str(town), "4"]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert len((tmp_path / "out.work" / "journal").read_bytes().splitlines()) == 4
    make(logs, out, town, store="tracks", **SIZES)
    assert tree(out) == tree(both[1])


def test_damaged_tracks_and_maps_are_repaired_byte_for_byte_from_the_log_and_the_map(both, city, tmp_path):
    _, town, logs = city
    out, before = tmp_path / "out", tree(both[1])
    maps = {"_tables/maps-1.parquet", "_copies/maps-1.parquet"}
    tracks = {next(path for path in before if path.startswith(f"tracks_{name}/c.1")) for name in ("ego", "actors")}
    rows = {"_tables/steps-1.parquet", "has_tracks/c.0", "is_anchor/c.0"}
    for damaged in ({"tracks_flags/c.2.0", *tracks, "_tables/maps-1.parquet"}, {*maps, *tracks}, rows):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(both[1], out)
        for path in damaged:
            data = bytearray((out / path).read_bytes())
            data[len(data) // 3] ^= 1
            (out / path).write_bytes(data)
        assert not verify(out).ok
        some = repair(out, logs, cluster=ClusterOptions(workers=0))
        left = {problem.path: problem.message for problem in some.left}
        assert left and left.keys() == damaged - set(some.repaired)
        assert all(message.endswith("found none given; add --map") for message in left.values())
        report = repair(out, logs, map=str(town), cluster=ClusterOptions(workers=0))
        assert (report.left, {*some.repaired, *report.repaired}) == ((), damaged)
        assert tree(out) == before
    (out / "_tables/maps-1.parquet").unlink()
    (out / "_copies/maps-1.parquet").unlink()
    (tmp_path / "other.xodr").write_bytes(town.read_bytes() + b" ")
    report = repair(out, logs, map=str(tmp_path / "other.xodr"), cluster=ClusterOptions(workers=0))
    assert {problem.path for problem in report.left} == maps
    assert "expected the map of 'City' that the conversion read, found another" in report.left[0].message


def test_damaged_tracks_are_named_and_an_episode_with_too_many_actors_is_refused(both, city, tmp_path):
    shutil.copytree(both[1], tmp_path / "copy")
    path = tmp_path / "copy" / "tracks_actors" / "c.1.0.0"
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    (problem,) = verify(tmp_path / "copy").problems
    assert (problem.array, problem.start, problem.stop) == ("tracks_actors", 16, 17)
    _, town, logs = city
    report = make(logs, tmp_path / "few", town, store="tracks", max_actors=3, **SIZES)
    assert any("expected at most 3 actors" in line for line in report.problems)
    with pytest.raises(RecipeError, match="with \\[planner\\]"):
        convert(logs, tmp_path / "none", "pi0", planner_store="tracks", cluster=ClusterOptions(workers=0))


def test_a_preview_draws_the_samples_of_a_tracks_store(both, tmp_path):
    pictures = []
    for number, path in enumerate(both):
        write_preview(path, tmp_path / f"{number}.png", samples=2)
        with Image.open(tmp_path / f"{number}.png") as picture:
            pictures.append(picture)
            assert len(places_of(picture, "ego-future")) > 100
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_larger_sizes_hold_what_smaller_ones_do_and_more(both, city, tmp_path):
    """The forks' sizes: slots are filled nearest first, so that the first of many are the few; and with room for all, all are there."""
    _, town, logs = city
    sizes = {
        "num_agents": 64,
        "num_static": 10,
        "num_lanes": 140,
        "num_route_lanes": 25,
        "past_steps": 10,
        "future_steps": 30,
    }
    make(logs, tmp_path / "large", town, **sizes)
    few, many = (xr.open_zarr(path) for path in (both[0], tmp_path / "large"))
    steps = np.flatnonzero(many["is_anchor"].values)
    assert len(steps) == 2 * (45 - 10 - 30) and few["is_anchor"].values[steps].all()
    few, many = few.isel(step=steps).load(), many.isel(step=steps).load()
    assert many["neighbor_agents_past"].shape == (10, 64, 11, 11) and many["lanes"].shape == (10, 140, 20, 12)
    for name, cut in (("lanes", 20), ("lanes_speed_limit", 20), ("static_objects", 5)):
        np.testing.assert_array_equal(many[name].values[:, :cut], few[name].values, err_msg=name)
    np.testing.assert_array_equal(many["ego_agent_future"].values[:, :24], few["ego_agent_future"].values)
    np.testing.assert_array_equal(many["ego_current_state"].values, few["ego_current_state"].values)
    ids, some = many["neighbor_agents_id"].values, few["neighbor_agents_id"].values
    num_moving = sum(round(0.2 * count) for name, count in COUNTS.items() if not name.startswith("static"))
    assert ((ids >= 0).sum(axis=1) == num_moving).all() and not many["neighbor_agents_dropped"].values.any()
    for row in range(len(steps)):
        slots = [ids[row].tolist().index(one) for one in some[row]]
        assert slots == sorted(slots)
        past = many["neighbor_agents_past"].values[row, slots, -6:]
        np.testing.assert_array_equal(past, few["neighbor_agents_past"].values[row])
