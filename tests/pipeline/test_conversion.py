"""Conversions from end to end on tiny routes whose values say where they belong."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.report import ConvertReport
from pipeline.store.metadata import read_info, root_document
from pipeline.verification import verify
from pipeline.watch import Watch
from schemas.errors import DatasetError, LockedError, PlanError, RecipeError, SourceError, UsageError
from tests.pipeline.recordings import RECIPE, VIEWS, frame, tree, truncate, write_recipe, write_route

THREADS = ClusterOptions(workers=0)


def run(raw, out, recipe, **options) -> ConvertReport:
    return convert(raw, out, recipe, **{"shard_steps": 4, "cluster": THREADS, **options})


def table(out: Path, name: str) -> list[dict]:
    return pq.read_table(out / read_info(out).tables[name].path).to_pylist()


@pytest.fixture
def raw(tmp_path) -> Path:
    folder = tmp_path / "raw"
    write_route(folder, 2, 7)
    write_route(folder, 10, 9)
    return folder


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


class StopAfter(Watch):
    """Interrupts like Ctrl-C once so many shards are journalled."""

    def __init__(self, shards: int) -> None:
        self.left = shards

    def advanced(self, done_steps: int, total_steps: int, frames: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_every_stored_value_is_the_recorded_one(raw, recipe, out):
    report = run(raw, out, recipe)
    assert (report.exit_code, report.total_episodes, report.total_steps, report.num_frames) == (0, 2, 16, 32)
    group = zarr.open_group(out, mode="r")
    places = [(2, step) for step in range(7)] + [(10, step) for step in range(9)]
    for row, (route, step) in enumerate(places):
        np.testing.assert_array_equal(group["rgb_main"][row], frame(route, step, 0))
        np.testing.assert_array_equal(group["rgb_left"][row], frame(route, step, 1))
    np.testing.assert_array_equal(group["state"][:, 0], [1000 * route + step for route, step in places])
    np.testing.assert_array_equal(group["actions"][:], np.array([[s / 100, 0.25] for _, s in places], np.float32))
    np.testing.assert_array_equal(group["timestamp_s"][:], [step / 2 for _, step in places])
    np.testing.assert_array_equal(group["episode_index"][:], [0] * 7 + [1] * 9)
    np.testing.assert_array_equal(group["source_step"][:], [step for _, step in places])
    np.testing.assert_array_equal(group["row_size"][:], [7, 9])
    np.testing.assert_array_equal(group["episode_ends"][:], [7, 16])
    assert group["valid"][:].all() and group["rgb_main_valid"][:].all()
    assert verify(out).ok


def test_the_steps_table_equals_the_arrays_and_joins_with_the_episodes(raw, recipe, out):
    run(raw, out, recipe)
    group = zarr.open_group(out, mode="r")
    steps = pq.read_table(out / read_info(out).tables["steps"].path)
    for name in ("timestamp_s", "episode_index", "task_index", "source_step", "valid"):
        np.testing.assert_array_equal(steps[name].to_numpy(), group[name][:])
    np.testing.assert_array_equal(np.array(steps["actions"].to_pylist(), np.float32), group["actions"][:])
    episodes = pq.read_table(out / read_info(out).tables["episodes"].path)
    joined = steps.to_pandas().merge(episodes.to_pandas(), on="episode_index")
    assert joined["key"].tolist() == ["route_02"] * 7 + ["route_10"] * 9
    scalars = steps.select(["episode_index", "source_step"])  # Arrow's own join takes no list columns, keys or not
    assert len(scalars.join(episodes.select(["episode_index", "key"]), "episode_index")) == 16
    assert steps["step_in_episode"].to_pylist() == [*range(7), *range(9)]


def test_episode_ten_comes_after_episode_two(raw, recipe, out):
    run(raw, out, recipe)
    assert [row["key"] for row in table(out, "episodes")] == ["route_02", "route_10"]


def test_equal_inputs_give_equal_bytes_wherever_they_lie_and_whoever_works(raw, recipe, out, tmp_path):
    moved = tmp_path / "elsewhere" / "raw"
    shutil.copytree(raw, moved, copy_function=shutil.copy)  # other modification times
    run(raw, out, recipe)
    run(moved, tmp_path / "b", recipe, cluster=ClusterOptions(workers=0, threads=3))
    assert tree(out) == tree(tmp_path / "b")


def test_worker_processes_write_the_same_bytes_as_threads(raw, recipe, out, tmp_path):
    run(raw, out, recipe)
    run(raw, tmp_path / "b", recipe, cluster=ClusterOptions(workers=2))
    assert tree(out) == tree(tmp_path / "b")


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_an_interrupted_run_is_invisible_and_the_same_call_finishes_it(raw, recipe, out, tmp_path, shards):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(shards))
    with pytest.raises(DatasetError, match="unfinished"):
        read_info(out)
    report = run(raw, out, recipe)
    assert report.shards_reused >= shards
    assert report.shards_written == 4 - report.shards_reused
    run(raw, tmp_path / "b", recipe)
    assert tree(out) == tree(tmp_path / "b")
    assert [path.name for path in Path(f"{out}.work").iterdir()] == ["seen.json"]


def test_a_finished_shard_that_was_lost_meanwhile_is_written_again(raw, recipe, out, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(3))
    next(iter((out / "rgb_main").glob("c.*"))).unlink()
    run(raw, out, recipe)
    run(raw, tmp_path / "b", recipe)
    assert tree(out) == tree(tmp_path / "b")


def test_new_episodes_form_the_next_generation_and_committed_bytes_stay(raw, recipe, out, tmp_path):
    run(raw, out, recipe)
    before = zarr.open_group(out, mode="r")
    frames = before["rgb_main"][:]
    old_tables = {path.name: path.read_bytes() for path in (out / "_tables").iterdir()}
    write_route(raw, 11, 5)
    report = run(raw, out, recipe)
    assert (report.generation, report.num_episodes, report.unchanged_episodes, report.total_steps) == (2, 1, 2, 21)
    after = zarr.open_group(out, mode="r")
    np.testing.assert_array_equal(after["rgb_main"][:16], frames)
    np.testing.assert_array_equal(before["rgb_main"][:], frames)  # a reader of the old generation sees it still
    assert {name: (out / "_tables" / name).read_bytes() for name in old_tables} == old_tables
    fresh = tmp_path / "fresh"
    run(raw, fresh, recipe)
    for name, array in zarr.open_group(fresh, mode="r").arrays():
        np.testing.assert_array_equal(after[name][:], array[:], err_msg=name)
    assert [row["digest"] for row in table(out, "episodes")] == [row["digest"] for row in table(fresh, "episodes")]
    assert verify(out).ok and verify(fresh).ok


def test_nothing_new_changes_no_byte(raw, recipe, out):
    run(raw, out, recipe)
    before = tree(out)
    report = run(raw, out, recipe)
    assert (report.num_episodes, report.unchanged_episodes, report.exit_code, report.generation) == (0, 2, 0, 1)
    assert tree(out) == before


def test_touched_files_with_the_same_content_are_unchanged_and_others_are_refused(raw, recipe, out):
    run(raw, out, recipe)
    touched = raw / "route_02" / "rgb" / "0003.png"
    os.utime(touched, (1, 1))
    assert run(raw, out, recipe).unchanged_episodes == 2
    (raw / "route_02" / "measurements" / "0003.json").write_text("{'speed': 1.0}")
    with pytest.raises(PlanError, match="1 changed: raw/route_02"):
        run(raw, out, recipe)


def test_moved_and_renamed_episodes_are_known_by_their_content(raw, recipe, out):
    run(raw, out, recipe)
    (raw / "route_02").rename(raw / "town_7")
    (raw / "deeper").mkdir()
    (raw / "route_10").rename(raw / "deeper" / "route_10")
    for _ in range(2):  # the second time by size and modification time
        report = run(raw, out, recipe)
        assert (report.num_episodes, report.unchanged_episodes, report.removed_episodes) == (0, 2, ())
        assert set(report.moved_episodes) == {"raw/route_02 -> raw/town_7", "raw/route_10 -> raw/deeper/route_10"}
    write_route(raw, 11, 5)
    assert (run(raw, out, recipe).num_episodes, len(table(out, "episodes"))) == (1, 3)


def test_a_copy_of_a_known_episode_is_not_converted_twice(raw, recipe, out):
    run(raw, out, recipe)
    shutil.copytree(raw / "route_02", raw / "copy")
    write_route(raw, 11, 5)
    report = run(raw, out, recipe)
    assert (report.num_episodes, report.quarantined) == (1, {"duplicate": 1})
    (row,) = table(out, "quarantine")
    assert (row["episode"], row["reason"]) == ("copy", "duplicate")
    assert "'raw/route_02'" in row["message"]


def test_rehash_believes_no_size_and_no_time(raw, recipe, out):
    run(raw, out, recipe)
    path = raw / "route_02" / "measurements" / "0003.json"
    status = path.stat()
    path.write_text(path.read_text().replace("'speed': 2003.0", "'speed': 2004.0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(raw, out, recipe).unchanged_episodes == 2
    with pytest.raises(PlanError, match="1 changed: raw/route_02"):
        run(raw, out, recipe, rehash=True)


def test_an_episode_that_left_the_source_stays_and_is_named(raw, recipe, out):
    run(raw, out, recipe)
    shutil.rmtree(raw / "route_02")
    report = run(raw, out, recipe)
    assert (report.removed_episodes, report.total_episodes) == (("raw/route_02",), 2)


def test_another_recipe_is_refused_naming_the_difference(raw, recipe, out, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(1))
    with pytest.raises(PlanError, match=r"views\.main\.size \[6, 8\] -> \[4, 4\].*--restart"):
        run(raw, out, recipe, size=4)
    run(raw, out, recipe)
    with pytest.raises(PlanError, match=r"horizon 4 -> 5"):
        run(raw, out, write_recipe(tmp_path, RECIPE.replace("horizon = 4", "horizon = 5")))
    with pytest.raises(PlanError, match=r"shard_steps 4 -> 8"):
        run(raw, out, write_recipe(tmp_path), shard_steps=8)


def test_nothing_is_appended_to_arrays_that_this_version_would_lay_out_otherwise(raw, recipe, out):
    run(raw, out, recipe)
    info = read_info(out)
    arrays = {name: (spec, info.lengths[name]) for name, spec in info.arrays.items()}
    main, row = info.arrays["rgb_main"], info.arrays["row_size"]
    arrays["rgb_main"] = (replace(main, codec="zstd"), arrays["rgb_main"][1])
    arrays["older"] = (replace(row, name="older"), arrays.pop("row_size")[1])
    (out / "zarr.json").write_bytes(root_document(arrays, {**info.attributes, "tables": info.tables}))
    before = tree(out)
    write_route(raw, 3, 4)
    with pytest.raises(
        PlanError, match=r"array older; array row_size; codec of rgb_main zstd -> raw; convert into a new dataset"
    ):
        run(raw, out, recipe)
    changed = {path for path, data in tree(out).items() if before.get(path) != data}
    assert changed == {"rgb_main/zarr.json", "older/zarr.json"}  # arrays' own documents follow the root


def test_a_source_that_changed_under_an_unfinished_run_is_refused_and_restart_discards(raw, recipe, out, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(2))
    write_route(raw, 2, 8)
    with pytest.raises(PlanError, match="route_02 has 8 steps, had 7"):
        run(raw, out, recipe)
    report = run(raw, out, recipe, restart=True)
    assert (report.shards_reused, report.total_steps) == (0, 17)
    run(raw, tmp_path / "b", recipe)
    assert tree(out) == tree(tmp_path / "b")


def test_episodes_that_arrive_under_an_unfinished_run_form_the_next_generation(raw, recipe, out):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(1))
    write_route(raw, 3, 4)
    report = run(raw, out, recipe)
    assert report.generation == 2
    assert [row["key"] for row in table(out, "episodes")] == ["route_02", "route_10", "route_03"]
    assert verify(out).ok


def test_a_truncated_picture_masks_its_step_and_is_named(raw, recipe, out):
    truncate(raw / "route_02" / "rgb_left" / "0004.png")
    report = run(raw, out, recipe)
    assert (report.exit_code, sum(report.quarantined.values())) == (3, 1)
    group = zarr.open_group(out, mode="r")
    assert np.flatnonzero(~group["valid"][:]).tolist() == [4]
    assert np.flatnonzero(~group["rgb_left_valid"][:]).tolist() == [4]
    assert group["rgb_main_valid"][:].all()
    assert not group["rgb_left"][4].any()
    (row,) = table(out, "quarantine")
    assert (row["episode"], row["stream"], row["start"], row["stop"]) == ("route_02", "rgb_left", 4, 5)
    assert row["path"] == "route_02/rgb_left/0004.png" and row["reason"] in ("truncated", "decode")
    assert verify(out).ok


def test_half_a_record_and_a_missing_one_refuse_their_steps_only(raw, recipe, out):
    truncate(raw / "route_10" / "measurements" / "0002.json")
    (raw / "route_10" / "rgb" / "0005.png").unlink()
    report = run(raw, out, recipe)
    assert report.exit_code == 3
    group = zarr.open_group(out, mode="r")
    assert np.flatnonzero(~group["valid"][:]).tolist() == [7 + 2, 7 + 5]
    assert {(row["start"], row["reason"]) for row in table(out, "quarantine")} >= {(5, "missing-file")}
    assert np.isfinite(group["state"][:]).all()
    assert verify(out).ok


def test_a_value_that_is_not_finite_refuses_its_step(raw, recipe, out):
    path = raw / "route_02" / "measurements" / "0001.json"
    path.write_text(path.read_text().replace("'speed': 2001.0", "'speed': nan"))
    run(raw, out, recipe)
    (row,) = table(out, "quarantine")
    assert (row["reason"], row["stream"], row["start"], row["stop"]) == ("non-finite", "state", 1, 2)


def test_a_nan_in_a_field_nobody_asked_for_condemns_nothing(raw, recipe, out):
    path = raw / "route_02" / "measurements" / "0001.json"
    path.write_text(path.read_text().replace("'theta': 0.0", "'theta': nan"))
    assert run(raw, out, recipe).exit_code == 0


def test_a_view_that_an_episode_lacks_is_masked_and_its_steps_stay_valid(raw, recipe, out):
    shutil.rmtree(raw / "route_10" / "rgb_left")
    run(raw, out, recipe)
    group = zarr.open_group(out, mode="r")
    assert group["rgb_left_valid"][:].tolist() == [True] * 7 + [False] * 9
    assert group["valid"][:].all()
    assert [row["views"] for row in table(out, "episodes")] == [["main", "left"], ["main"]]
    assert verify(out).ok


def test_the_policy_drop_episode_condemns_the_whole_episode_and_stop_stops(raw, recipe, out, tmp_path):
    truncate(raw / "route_02" / "rgb" / "0004.png")
    run(raw, out, recipe, on_bad_frame="drop-episode")
    assert zarr.open_group(out, mode="r")["valid"][:].tolist() == [False] * 7 + [True] * 9
    assert [(row["valid"], row["num_invalid"]) for row in table(out, "episodes")] == [(False, 7), (True, 0)]
    with pytest.raises(SourceError, match="source raw, episode route_02, stream rgb, steps 4:5"):
        run(raw, tmp_path / "b", recipe, strict=True)


def test_recordings_are_resampled_to_the_rate_asked_for(raw, recipe, out):
    report = run(raw, out, recipe, rate_hz=4.0)  # twice the recorded rate: every second step lies between two
    assert report.total_steps == 13 + 17
    group = zarr.open_group(out, mode="r")
    np.testing.assert_allclose(group["state"][:13, 0], 2000 + np.arange(13) / 2)  # linear
    np.testing.assert_allclose(group["actions"][:13, 0], np.repeat(np.arange(7), 2)[:13] / 100)  # previous
    np.testing.assert_array_equal(group["timestamp_s"][:13], np.arange(13) / 4)
    np.testing.assert_array_equal(np.abs(group["align_error_s"][:13]), [0, 0.25] * 6 + [0])
    for row in range(13):
        np.testing.assert_array_equal(group["rgb_main"][row], frame(2, int(group["source_step"][row]), 0))
    assert group["valid"][:].all()


def test_the_second_run_is_told_who_holds_the_dataset(raw, recipe, out):
    class Second(Watch):
        def planned(self, plan, cost, reused) -> None:
            with pytest.raises(LockedError, match=f"process {os.getpid()} of .* on ") as refused:
                run(raw, out, recipe)
            assert refused.value.exit_code == 75

    assert run(raw, out, recipe, watch=Second()).complete


def test_places_that_are_something_else_are_refused(raw, recipe, out, tmp_path):
    with pytest.raises(UsageError, match="outside the raw folder"):
        run(raw, raw / "out", recipe)
    with pytest.raises(UsageError, match="outside the raw folder"):
        run(raw, tmp_path, recipe)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="found a file"):
        run(raw, tmp_path / "file", recipe)
    (out / "photos").mkdir(parents=True)
    (out / "photos" / "holiday.jpg").write_text("x")
    with pytest.raises(UsageError, match="other files"):
        run(raw, out, recipe)
    assert (out / "photos" / "holiday.jpg").exists()
    with pytest.raises(UsageError, match="power of two"):
        run(raw, out, recipe, shard_steps=12)
    with pytest.raises(RecipeError, match="found 'nope'"):
        run(raw, tmp_path / "c", "nope")


def test_nothing_usable_is_an_error_that_says_why(tmp_path, recipe, out):
    write_route(tmp_path / "raw", 1, 0)
    with pytest.raises(SourceError, match="usable|recordings"):
        run(tmp_path / "raw", out, recipe)
    assert not out.exists() or not (out / "zarr.json").exists()


def test_a_dry_run_writes_nothing(raw, recipe, out):
    report = run(raw, out, recipe, dry_run=True)
    assert (report.complete, report.total_steps) == (False, 16)
    assert not out.exists() and not Path(f"{out}.work").exists()


@pytest.mark.parametrize("codec", ["zstd", "jpeg:95"])
def test_other_codecs_hold_what_they_promise(raw, recipe, out, codec):
    run(raw, out, recipe, codec=codec)
    assert verify(out).ok
    from pipeline.loaders.reader import DatasetReader

    found = np.empty((1, 6, 8, 3), np.uint8)
    DatasetReader(out).gather("rgb_main", np.array([3]), found)
    if codec == "zstd":
        np.testing.assert_array_equal(found[0], frame(2, 3, 0))
    else:
        assert np.abs(found[0].astype(int) - frame(2, 3, 0)).mean() < 12  # noise is a JPEG's worst case


def test_normalised_frames_are_the_uint8_ones_through_the_formula(raw, recipe, out, tmp_path):
    text = RECIPE + '[frames]\ndtype = "float32"\nmean = [0.485, 0.456, 0.406]\nstd = [0.229, 0.224, 0.225]\n'
    run(raw, out, write_recipe(tmp_path, text))
    stored = zarr.open_group(out, mode="r")["rgb_main"][3]
    expected = (frame(2, 3, 0) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(stored, expected, atol=2e-6)


def test_two_sources_make_one_dataset(tmp_path, recipe, out):
    write_route(tmp_path / "a" / "town", 1, 3)
    write_route(tmp_path / "b" / "town", 1, 4)
    report = run([tmp_path / "a" / "town", tmp_path / "b" / "town"], out, recipe)
    assert (report.total_episodes, report.total_steps) == (2, 7)
    assert [row["source"] for row in table(out, "episodes")] == ["a/town", "b/town"]
    with pytest.raises(UsageError, match="twice"):
        run([tmp_path / "a", tmp_path / "a"], tmp_path / "c", recipe)


def test_the_report_says_what_served_what(raw, recipe, out):
    report = run(raw, out, recipe)
    assert report.views == {"main": ("rgb",), "left": ("rgb_left",)}
    assert report.signals == {"state": ("speed",), "actions": ("steer", "throttle")}
    assert VIEWS[0] in report.views["main"]


def crash(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("point", ["rows", "tables", "root", "documents", "clean"])
def test_a_crash_at_any_point_of_the_commit_leaves_one_generation_or_the_other(
    raw, recipe, out, tmp_path, monkeypatch, point
):
    run(raw, out, recipe)
    committed = read_info(out)
    old_frames = zarr.open_group(out, mode="r")["rgb_main"][:]
    write_route(raw, 11, 5)
    targets = {
        "rows": "pipeline.commit._write_episodes",
        "tables": "pipeline.commit._write_norm_stats",
        "root": "pipeline.commit._write_documents",
        "documents": "pipeline.commit.write_array_documents",
        "clean": "pipeline.workspace.Workspace.clean",
    }
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(targets[point], crash)
        run(raw, out, recipe)
    seen = read_info(out)
    assert seen.generation == (2 if point in ("documents", "clean") else 1)
    if seen.generation == 1:
        assert replace(seen, root=committed.root) == committed
    np.testing.assert_array_equal(zarr.open_group(out, mode="r")["rgb_main"][:16], old_frames)
    assert verify(out).ok or point == "documents"
    run(raw, out, recipe)
    assert verify(out).ok
    uninterrupted = tmp_path / "b"
    moved = tmp_path / "moved"
    (raw / "route_11").rename(moved)
    run(raw, uninterrupted, recipe)
    moved.rename(raw / "route_11")
    run(raw, uninterrupted, recipe)
    assert tree(out) == tree(uninterrupted)


def test_the_dataset_names_neither_place_nor_time(raw, recipe, out, tmp_path):
    run(raw, out, recipe)
    for path in out.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes()
    assert json.loads((out / "zarr.json").read_bytes())["attributes"]["headrace"]["generation"] == 1


def test_a_dataset_that_lost_its_root_is_never_written_over(raw, recipe, out):
    run(raw, out, recipe)
    (out / "zarr.json").unlink()
    before = tree(out)
    with pytest.raises(DatasetError, match="a dataset that lost it"):
        run(raw, out, recipe)
    with pytest.raises(DatasetError, match="a dataset that lost it"):
        read_info(out)
    assert tree(out) == before


def test_folders_and_files_of_others_are_never_removed(raw, recipe, out):
    for name in ("_tables/precious", "thesis"):
        (out / name).mkdir(parents=True)
    (out / "_tables" / "myfile").write_text("keep")
    with pytest.raises(UsageError, match="other files"):
        run(raw, out, recipe)
    assert (out / "_tables" / "myfile").read_text() == "keep"
    assert (out / "thesis").is_dir()


def test_restart_removes_what_the_run_wrote_and_nothing_else(raw, recipe, out, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(2))
    (out / "notes.txt").write_text("keep")
    run(raw, out, recipe, restart=True)
    assert (out / "notes.txt").read_text() == "keep"
    (out / "notes.txt").unlink()
    run(raw, tmp_path / "b", recipe)
    assert tree(out) == tree(tmp_path / "b")


def test_a_pipe_among_the_pictures_blocks_nothing(raw, recipe, out):
    path = raw / "route_02" / "rgb" / "0003.png"
    path.unlink()
    os.mkfifo(path)
    report = run(raw, out, recipe)
    assert (report.exit_code, sum(report.quarantined.values())) == (3, 1)


def test_a_pipe_in_the_place_of_a_shard_blocks_no_verify(raw, recipe, out):
    run(raw, out, recipe)
    path = out / "rgb_main" / "c.1.0.0.0"
    path.unlink()
    os.mkfifo(path)
    report = verify(out)
    assert not report.ok
    assert any(problem.array == "rgb_main" and problem.start == 4 for problem in report.problems)


def test_the_dataset_may_be_named_through_a_link(raw, recipe, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run(raw, tmp_path / "link", recipe)
    assert verify(tmp_path / "real").ok
    assert run(raw, tmp_path / "real", recipe).num_episodes == 0


def test_one_views_fault_leaves_the_others_and_shards_do_not_matter(raw, recipe, out, tmp_path):
    shutil.rmtree(raw / "route_10" / "rgb")
    (raw / "route_10" / "rgb").mkdir()
    write_route(raw, 10, 9, views=["rgb_left"])
    for step in range(9):
        (raw / "route_10" / "rgb" / f"{step:04d}.png").write_bytes(b"")
    run(raw, out, recipe)
    run(raw, tmp_path / "b", recipe, shard_steps=16)
    found = [zarr.open_group(path, mode="r") for path in (out, tmp_path / "b")]
    for group in found:
        assert group["rgb_left_valid"][:].all()
        assert group["rgb_main_valid"][:].tolist() == [True] * 7 + [False] * 9
    digests = [[row["digest"] for row in table(path, "episodes")] for path in (out, tmp_path / "b")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("what", ["shard", "part", "source"])
def test_damage_under_an_unfinished_run_is_made_again(raw, recipe, out, tmp_path, what):
    with pytest.raises(KeyboardInterrupt):
        run(raw, out, recipe, watch=StopAfter(3))
    pattern = {"shard": "out/rgb_main/c.*", "part": "out.work/parts/part-*", "source": "out.work/parts/source-*"}[what]
    path = next(iter(sorted(tmp_path.glob(pattern))))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data if what != "source" else b"{}")
    run(raw, out, recipe)
    run(raw, tmp_path / "b", recipe)
    assert tree(out) == tree(tmp_path / "b")


def test_metadata_of_an_array_that_was_damaged_is_written_again_by_the_same_call(raw, recipe, out):
    run(raw, out, recipe)
    before = tree(out)
    (out / "state" / "zarr.json").write_text("{}")
    assert not verify(out).ok
    run(raw, out, recipe)
    assert tree(out) == before


def test_impossible_memory_is_refused_before_anything_runs(raw, recipe, out):
    for memory in ("lots", "-1", "1KiB"):
        with pytest.raises(UsageError, match="--memory"):
            run(raw, out, recipe, cluster=ClusterOptions(workers=1, memory=memory))
    with pytest.raises(UsageError, match="65536"):
        run(raw, out, recipe, shard_steps=2**30)
    with pytest.raises(UsageError, match="empty"):
        run(raw, "", recipe)
    assert not out.exists()
