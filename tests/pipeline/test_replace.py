"""``--replace``: an episode that was recorded again is served in the place of the old one, and no committed byte changes."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.dataset import open_dataset
from pipeline.generations import remove_old_generations
from pipeline.loaders import MultiViewLoader
from pipeline.report import ConvertReport
from pipeline.stats_export import stats_file
from pipeline.store.metadata import read_info
from pipeline.summaries import summarize_dataset
from pipeline.verification import verify
from schemas.errors import DatasetError, PlanError, UsageError
from tests.pipeline.recordings import tree, write_recipe, write_route

THREADS = ClusterOptions(workers=0)


def run(folder: Path, **options) -> ConvertReport:
    return convert(folder / "raw", folder / "out", folder / "tiny.toml", shard_steps=4, cluster=THREADS, **options)


def read_table(out: Path, name: str) -> list[dict]:
    return pq.read_table(out / read_info(out).tables[name].path).to_pylist()


@pytest.fixture
def recorded_again(tmp_path) -> Path:
    """Two converted routes, 2 of 7 steps and 3 of 5, of which the first was recorded again with 6 steps."""
    write_recipe(tmp_path)
    write_route(tmp_path / "raw", 2, 7)
    write_route(tmp_path / "raw", 3, 5)
    run(tmp_path)
    for file in (tmp_path / "raw" / "route_02").rglob("0006.*"):
        file.unlink()
    return tmp_path


def test_a_replaced_episode_is_served_by_nothing_and_its_bytes_stay(recorded_again):
    out = recorded_again / "out"
    before = tree(out)
    report = run(recorded_again, replace=["route_02"])
    assert report.replaced_episodes == ("raw/route_02",)
    after = tree(out)
    mutable = {path for path in before if not path.startswith("_") and path.count(".") > 1}
    full = {path for path in mutable if path.split(".")[1] in "01" and path.startswith(("rgb_main/", "rgb_left/"))}
    assert {path: before[path] for path in full} == {path: after[path] for path in full}

    valid = np.array([False] * 7 + [True] * 11)
    np.testing.assert_array_equal(open_dataset(out).valid.values, valid)
    served = [int(step) for batch in MultiViewLoader(out, 1, shuffle=False) for step in batch["index"]]
    assert served == list(range(7, 18))
    assert [row["valid"] for row in read_table(out, "steps")] == valid.tolist()
    assert [(row["replaced_by"], row["valid"], row["generation"]) for row in read_table(out, "episodes")] == [
        (2, False, 1),
        (-1, True, 1),
        (-1, True, 2),
    ]
    record = json.loads(stats_file(out))["headrace"]
    assert record["num_valid_steps"] == 11
    assert record == json.loads((out / read_info(out).tables["norm_stats"].path).read_bytes())["headrace"]
    summary = summarize_dataset(out)
    assert (summary["num_replaced_episodes"], summary["num_invalid_steps"]) == (1, 7)
    assert verify(out).problems == ()


def test_old_generations_are_readable_until_they_are_removed(recorded_again):
    out = recorded_again / "out"
    old = open_dataset(out).load()
    run(recorded_again, replace=["raw/route_02"])
    then = open_dataset(out, generation=1)
    for name in old.variables:
        np.testing.assert_array_equal(then[name].values, old[name].values)
    remove_old_generations(out)
    with pytest.raises(DatasetError, match="expected generation 1 of .*, found none kept"):
        open_dataset(out, generation=1)
    assert verify(out).problems == ()


def test_replacing_what_did_not_change_says_so_and_changes_nothing(recorded_again):
    before = tree(recorded_again / "out")
    with pytest.raises(PlanError, match="add --replace EPISODE for each"):
        run(recorded_again)
    with pytest.raises(PlanError, match="raw/route_02"):
        run(recorded_again, replace=["route_03"])
    write_route(recorded_again / "raw", 2, 7)
    report = run(recorded_again, replace=["route_03"])
    assert "raw/route_03 is what the dataset has already: nothing to replace" in report.notes
    assert (report.num_episodes, report.replaced_episodes) == (0, ())
    assert tree(recorded_again / "out") == before


def test_an_episode_that_is_not_there_is_named_with_its_neighbours(recorded_again):
    with pytest.raises(UsageError, match=r"found 'rout_02'; did you mean route_02"):
        run(recorded_again, replace=["rout_02"])
    write_route(recorded_again / "raw", 4, 3)
    with pytest.raises(UsageError, match="found 'route_04'"):
        run(recorded_again, replace=["route_04"])
    (recorded_again / "raw" / "route_02").rename(recorded_again / "gone")
    with pytest.raises(UsageError, match="expected raw/route_02 in the raw folders"):
        run(recorded_again, replace=["route_02"])


def test_an_episode_may_be_replaced_again_and_again(recorded_again):
    run(recorded_again, replace=["route_02"])
    write_route(recorded_again / "raw", 2, 8)
    report = run(recorded_again, replace=["route_02"])
    assert (report.generation, report.num_steps) == (3, 8)
    out = recorded_again / "out"
    assert [row["replaced_by"] for row in read_table(out, "episodes")] == [2, -1, 3, -1]
    assert read_info(out).attributes["replaced"] == [[0, 7], [12, 18]]
    assert int(open_dataset(out).valid.values.sum()) == 5 + 8
    assert run(recorded_again).num_episodes == 0
    assert verify(out).problems == ()
