"""Which episodes are converted: filters of the recipe, and what one run alone takes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.readers.lerobot import LeRobotReader
from pipeline.recipes import load_recipe
from pipeline.selection import success_of, take
from pipeline.store.metadata import read_info
from schemas.errors import SourceError, UsageError
from schemas.recipe import recipe_from_mapping, recipe_to_mapping
from tests.pipeline.readers.builders import write_lerobot
from tests.pipeline.recordings import RECIPE, write_recipe, write_route


def run(tmp_path, recipe=RECIPE, **options):
    path = write_recipe(tmp_path, recipe)
    return convert(tmp_path / "raw", tmp_path / "out", path, **{"cluster": ClusterOptions(workers=0), **options})


def table(tmp_path, name):
    return pq.read_table(tmp_path / "out" / read_info(tmp_path / "out").tables[name].path).to_pylist()


def keys(tmp_path):
    return [row["key"] for row in table(tmp_path, "episodes")]


@pytest.fixture
def raw(tmp_path):
    for route, num_steps in ((1, 6), (2, 8), (3, 10), (4, 12)):
        write_route(tmp_path / "raw", route, num_steps)
    return tmp_path / "raw"


def test_what_a_filter_leaves_out_is_counted_and_no_failure_and_a_wider_one_appends_it(raw, tmp_path):
    narrow = "min_steps = 7\n" + RECIPE + '[filter]\nexclude = ["*_04"]\nmin_duration_s = 4.5\n'
    planned = run(tmp_path, narrow, dry_run=True, strict=True)
    report = run(tmp_path, narrow, strict=True)
    assert planned.left_out == report.left_out == {"left-out-length": 2, "left-out-name": 1}
    assert (report.exit_code, report.quarantined, keys(tmp_path)) == (0, {}, ["route_03"])
    assert run(tmp_path, narrow, strict=True).num_episodes == 0
    report = run(tmp_path, "min_steps = 7\n" + RECIPE)
    assert (report.num_episodes, keys(tmp_path)) == (2, ["route_03", "route_02", "route_04"])
    assert [(row["episode"], row["reason"]) for row in table(tmp_path, "quarantine")] == [
        ("route_01", "left-out-length")
    ]


def test_one_run_takes_what_it_is_told_and_the_next_the_rest(raw, tmp_path):
    report = run(tmp_path, limit=1)
    assert (keys(tmp_path), report.notes) == (["route_01"], ("3 more new episodes were not asked for",))
    (tmp_path / "some.txt").write_text("# good ones\nraw/route_03\n\nroute_02\n")
    run(tmp_path, episodes=[f"@{tmp_path / 'some.txt'}"], limit=1)
    assert keys(tmp_path) == ["route_01", "route_02"]
    run(tmp_path)
    assert keys(tmp_path) == ["route_01", "route_02", "route_03", "route_04"]
    assert table(tmp_path, "quarantine") == []


def test_a_name_that_names_nothing_is_refused_with_the_nearest(raw, tmp_path):
    with pytest.raises(UsageError, match="'rout_02'.*did you mean route_02"):
        run(tmp_path, episodes=["rout_02"])
    with pytest.raises(UsageError, match="list of episodes"):
        run(tmp_path, episodes=["@nowhere.txt"])
    with pytest.raises(SourceError, match="4 refused or left out"):
        run(tmp_path, RECIPE + '[filter]\ninclude = ["town05/*"]\n')


def test_patterns_are_of_keys_or_whole_names():
    rows = [(source, type("Ref", (), {"key": key})(), "") for source in "ab" for key in ("x/1", "x/2", "y/1")]
    known = [f"{source}/{ref.key}" for source, ref, _ in rows]

    def taken(*patterns, limit=None):
        return [f"{source}/{ref.key}" for source, ref, _ in take(rows, known, patterns, limit)]

    assert taken("x/*") == ["a/x/1", "a/x/2", "b/x/1", "b/x/2"]
    assert taken("a/*", "b/y/1") == ["a/x/1", "a/x/2", "a/y/1", "b/y/1"]
    assert taken("?/1", limit=3) == ["a/x/1", "a/y/1", "b/x/1"]


def test_a_dataset_keeps_the_names_of_a_list_not_the_file(tmp_path):
    (tmp_path / "good.txt").write_text("a\nb*\n")
    recipe = load_recipe(write_recipe(tmp_path, RECIPE + '[filter]\ninclude = ["@good.txt", "c"]\n'))
    assert recipe.filter.include == ("a", "b*", "c")
    assert recipe_from_mapping(recipe_to_mapping(recipe), "x") == recipe


def write_successes(root, said):
    write_lerobot(root, [3] * len(said))
    lines = [{"episode_index": k, "tasks": ["push"], "length": 3, **line} for k, line in enumerate(said)]
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))


SAID = ({"success": True}, {"success": False}, {"is_success": 1}, {}, {"success": "failure"}, {"success": None})


@pytest.mark.parametrize(
    ("success", "kept"), [("all", [0, 1, 2, 3, 4, 5]), ("only", [0, 2]), ("not-failed", [0, 2, 3, 5])]
)
def test_episodes_are_chosen_by_what_they_say_of_their_success(tmp_path, success, kept):
    write_successes(tmp_path / "raw", SAID)
    recipe = f'name = "s"\n[signals.state]\n[signals.actions]\n[filter]\nsuccess = "{success}"\n'
    report = run(tmp_path, recipe)
    assert keys(tmp_path) == [f"episode_{index:06d}" for index in kept]
    assert sum(report.left_out.values()) == len(SAID) - len(kept)


@pytest.mark.parametrize(("flags", "expected"), [([0, 0, 1], True), ([0, 0, 0], False)])
def test_a_success_column_is_true_where_one_step_is(tmp_path, flags, expected):
    write_lerobot(tmp_path, (3,))
    info = json.loads((tmp_path / "meta/info.json").read_text())
    info["features"]["next.success"] = {"dtype": "bool", "shape": [1], "names": None}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    path = tmp_path / "data/chunk-000/episode_000000.parquet"
    pq.write_table(pq.read_table(path).append_column("next.success", pa.array(np.array(flags, np.bool_))), path)
    reader = LeRobotReader(tmp_path)
    assert success_of(reader.index().episodes[0], ("success", "next.success"), reader) is expected
