"""The command line as a person or a program meets it: one clear line or one JSON document, and the documented exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from pipeline.cli import main
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import RECIPE, truncate, write_recipe, write_route


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("headrace: ")]


@pytest.fixture
def headrace(monkeypatch, capsys):
    """Call the command line in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def raw(tmp_path):
    write_route(tmp_path / "raw", 1, 5)
    write_route(tmp_path / "raw", 2, 6)
    write_recipe(tmp_path)
    return tmp_path / "raw"


def convert(headrace, folder, *more):
    return headrace(
        "convert",
        folder / "raw",
        folder / "out",
        "--recipe",
        folder / "tiny.toml",
        "--workers",
        0,
        "--shard-steps",
        4,
        *more,
    )


def test_convert_info_and_verify_speak_json_and_nothing_else(headrace, raw, tmp_path):
    done = convert(headrace, tmp_path, "--json")
    report = json.loads(done.out)
    assert (done.code, done.err, report["exit_code"], report["total_steps"]) == (0, "", 0, 11)
    facts = json.loads(headrace("info", tmp_path / "out", "--json").out)
    assert (facts["num_steps"], facts["generation"], facts["recipe"]) == (11, 1, "tiny")
    assert facts["arrays"]["rgb_main"]["shape"] == [11, 6, 8, 3]
    verdict = json.loads(headrace("verify", tmp_path / "out", "--json").out)
    assert verdict["ok"] is True and verdict["problems"] == []


def test_inspect_says_what_is_here(headrace, raw):
    told = headrace("inspect", raw)
    assert told.code == 0
    for word in ("format lbc", "2 episodes", "11 steps", "2 Hz", "rgb_left", "8x6", "route_02"):
        assert word in told.out
    facts = json.loads(headrace("inspect", raw, "--json").out)
    assert (facts["format"], facts["num_episodes"], facts["num_steps"]) == ("lbc", 2, 11)


def test_the_plan_and_the_report_are_for_people_on_standard_error(headrace, raw, tmp_path):
    done = convert(headrace, tmp_path)
    assert done.out == ""
    for word in ("plan: 2 episodes, 11 steps, 22 frames, 3 shards of 4 steps", "view main <- rgb", "done: "):
        assert word in done.err
    again = convert(headrace, tmp_path)
    assert (again.code, "nothing new" in again.err) == (0, True)


def test_quarantined_input_is_exit_code_three_and_named(headrace, raw, tmp_path):
    truncate(raw / "route_01" / "rgb" / "0002.png")
    done = convert(headrace, tmp_path)
    assert done.code == 3
    assert "quarantined: 1 " in done.err and "route_01 rgb steps 2:3" in done.err
    assert "Traceback" not in done.err
    assert "quarantined: 1 " in headrace("info", tmp_path / "out").out


def test_a_damaged_dataset_is_exit_code_one_and_the_place_is_named(headrace, raw, tmp_path):
    convert(headrace, tmp_path)
    shard = tmp_path / "out" / "rgb_main" / "c.1.0.0.0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    found = headrace("verify", tmp_path / "out")
    assert found.code == 1
    assert "rgb_main steps 4:5" in found.out


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_folders_of_nothing_and_files_are_one_clear_line(headrace, tmp_path, command):
    write_recipe(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file", "absent"):
        more = [tmp_path / f"out-{name}", "--workers", 0] if command == "convert" else []
        found = headrace(command, tmp_path / name, *more)
        assert found.code == 1
        assert len(found.err.splitlines()) == 1 and found.error_lines
        assert "expected" in found.err and name in found.err


@pytest.mark.parametrize("command", ["info", "verify"])
def test_what_is_no_dataset_is_one_clear_line(headrace, tmp_path, command):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file", "absent"):
        found = headrace(command, tmp_path / name)
        text = found.err + found.out
        assert found.code == 1 and "expected" in text and "Traceback" not in text


def test_a_misspelt_recipe_key_is_wrong_usage_with_the_nearest_key(headrace, raw, tmp_path):
    write_recipe(tmp_path, RECIPE.replace("horizon", "horizn"))
    found = convert(headrace, tmp_path)
    assert found.code == 2
    assert found.error_lines == [
        "headrace: recipe tiny.toml: expected a known key in the recipe, found 'horizn'; did you mean 'horizon'?"
    ]


def test_wrong_flags_are_wrong_usage(headrace, raw, tmp_path):
    assert convert(headrace, tmp_path, "--view", "nose=rgb").code == 2
    assert convert(headrace, tmp_path, "--view", "main=nose").code == 2
    assert convert(headrace, tmp_path, "--codec", "gif").code == 2
    assert convert(headrace, tmp_path, "--shard-steps", 12).code == 2
    assert convert(headrace, tmp_path, "--format", "nope").code == 2
    assert convert(headrace, tmp_path, "--rate", 0).code == 2
    assert convert(headrace, tmp_path, "--nope").code == 2
    assert convert(headrace, tmp_path, "--reader", "nope=1").code == 2
    assert convert(headrace, tmp_path, "--reader", "nope").code == 2
    assert headrace("convert", raw).code == 2
    assert headrace("nope").code == 2
    assert not (tmp_path / "out").exists()


def test_an_empty_episode_is_quarantined_beside_good_ones(headrace, raw, tmp_path):
    write_route(raw, 3, 0)
    done = convert(headrace, tmp_path, "--json")
    report = json.loads(done.out)
    assert (done.code, report["total_episodes"], report["quarantined"]) == (3, 2, {"empty-episode": 1})
    assert "route_03" in headrace("inspect", raw).out


def test_recipes_are_listed_and_printed(headrace, tmp_path):
    listed = headrace("recipe", "list")
    assert listed.code == 0 and "pi0" in listed.out and "three-view" in listed.out
    assert {row["name"] for row in json.loads(headrace("recipe", "list", "--json").out)} >= {"pi0", "three-view"}
    shown = headrace("recipe", "show", "pi0")
    (tmp_path / "copy.toml").write_text(shown.out)
    assert json.loads(headrace("recipe", "show", tmp_path / "copy.toml", "--json").out)["name"] == "pi0"
    assert headrace("recipe", "show", "nope").code == 2


def test_the_version_is_printed(headrace):
    from pipeline import __version__

    assert headrace("--version").out.strip() == f"headrace {__version__}"


def test_debug_shows_the_traceback(headrace, tmp_path, monkeypatch):
    from schemas.errors import SourceError

    monkeypatch.setattr(sys, "argv", ["headrace", "inspect", str(tmp_path / "absent"), "--debug"])
    with pytest.raises(SourceError):
        main()


def test_statistics_are_printed_or_written_in_each_format(headrace, raw, tmp_path):
    convert(headrace, tmp_path)
    out = tmp_path / "out"
    printed = json.loads(headrace("stats", out).out)
    assert set(printed["norm_stats"]) == {"state", "actions"}
    assert printed["headrace"]["horizon"] == 4
    speeds = [1000 + step for step in range(5)] + [2000 + step for step in range(6)]
    assert printed["norm_stats"]["state"]["mean"][0] == pytest.approx(sum(speeds) / 11)
    assert headrace("stats", out, "--format", "lerobot", "-o", tmp_path / "stats.json").out == ""
    assert json.loads((tmp_path / "stats.json").read_text())["action"]["count"] == [11]
    delta = json.loads(headrace("stats", out, "--delta", "1", "--horizon", 2).out)
    assert delta["headrace"]["delta_mask"] == [True]
    for wrong in (
        ["--delta", "a"],
        ["--delta", "1,-1"],
        ["--format", "xml"],
        ["--format", "lerobot", "--horizon", 3],
        ["--tail", "x"],
    ):
        assert headrace("stats", out, *wrong).code == 2


def test_statistics_after_an_append_are_those_of_one_conversion_and_frozen_ones_show_the_drift(headrace, raw, tmp_path):
    convert(headrace, tmp_path)
    out, frozen = tmp_path / "out", tmp_path / "frozen.json"
    headrace("stats", out, "-o", frozen)
    same = headrace("stats", out, "--against", frozen)
    assert same.code == 0 and "no dimension drifted" in same.out
    write_route(raw, 3, 4)
    convert(headrace, tmp_path)
    drifted = headrace("stats", out, "--against", frozen, "--json")
    report = json.loads(drifted.out)
    assert (drifted.code, report["drifted"], report["first_episode"]) == (3, True, 2)
    speed = report["dims"][0]
    old = [1000 + step for step in range(5)] + [2000 + step for step in range(6)]
    shift = (sum(3000 + step for step in range(4)) / 4 - np.mean(old)) / np.std(old)
    assert (speed["array"], speed["shift_std"], speed["outside"]) == ("state", pytest.approx(shift), 1.0)
    assert headrace("stats", out, "--against", frozen, "-o", "x").code == 2
    now = json.loads(headrace("stats", out).out)
    assert now["headrace"]["generation"] == 2
    assert now == json.loads((out / "_tables/norm_stats-2.json").read_text())
    headrace("convert", raw, tmp_path / "once", "--recipe", tmp_path / "tiny.toml", "--workers", "0")
    once = json.loads(headrace("stats", tmp_path / "once").out)
    assert {**once, "headrace": {**once["headrace"], "generation": 2}} == now


def test_old_generations_are_removed_when_asked_and_the_committed_one_stays(headrace, raw, tmp_path):
    convert(headrace, tmp_path)
    write_route(raw, 3, 4)
    convert(headrace, tmp_path)
    out = tmp_path / "out"
    assert len(list((out / "_tables").iterdir())) == 14
    removed = json.loads(headrace("gc", out, "--json").out)
    assert (removed["generation"], len(removed["paths"])) == (2, 13)
    assert sorted(path.name for path in (out / "_tables").iterdir()) == sorted(
        [f"{name}-2.parquet" for name in ("episodes", "manifest", "quarantine", "steps", "tasks")]
        + ["norm_stats-2.json", "zarr-2.json"]
    )
    assert headrace("verify", out).code == 0
    assert "removed 0 files" in headrace("gc", out).out
    assert headrace("gc", tmp_path / "nothing").code == 1


def test_the_plan_says_which_views_were_guessed_and_what_is_wider_than_the_policy(headrace, raw, tmp_path):
    write_recipe(tmp_path, RECIPE.replace('from = ["rgb_left"]', "").replace("action_dim = 4", "action_dim = 1"))
    plan = convert(headrace, tmp_path, "--dry-run").err
    assert "view main <- rgb\n" in plan
    assert "view left <- rgb_left (guessed; --view left=... chooses another)" in plan
    assert "actions is wider than action_dim 1" in plan
    assert "state is wider" not in plan


def test_a_view_that_no_episode_has_is_guessed_last(headrace, raw, tmp_path):
    for route in ("route_01", "route_02"):
        shutil.rmtree(raw / route / "rgb_left")
    write_recipe(tmp_path, RECIPE.replace('from = ["rgb_left"]', ""))
    report = json.loads(convert(headrace, tmp_path, "--dry-run", "--json").out)
    assert report["views"] == {"main": ["rgb"], "left": ["rgb_right"]}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("info", "nowhere"), 1, {"kind": "DatasetError", "reason": None}),
        (("inspect", "nowhere"), 1, {"kind": "SourceError", "reason": "missing-file", "next_step": "check the path"}),
        (("convert", "raw"), 2, {"kind": "UsageError", "next_step": "name the dataset to make last"}),
        (("convert", "raw", "out", "--size", "0"), 2, {"kind": "UsageError", "next_step": "see --help"}),
        (("convert", "raw", "out", "--no-such-flag"), 2, {"kind": "UsageError"}),
    ],
)
def test_an_error_is_one_json_document_too(headrace, tmp_path, monkeypatch, arguments, code, expected):
    monkeypatch.chdir(tmp_path)
    failed = headrace(*arguments, "--json")
    told = json.loads(failed.out)
    assert (failed.code, told["exit_code"], len(failed.error_lines)) == (code, code, 1)
    assert told.items() >= expected.items() and told["error"]


def test_lines_fit_a_terminal_and_are_whole_in_a_pipe(raw, tmp_path):
    """By a real terminal of 80 columns: its own line ends are the screen's."""
    import pty

    arguments = [
        sys.executable,
        "-m",
        "pipeline",
        "convert",
        raw,
        tmp_path / "out",
        "-r",
        tmp_path / "tiny.toml",
        "--workers",
        "0",
    ]
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(REPOSITORY), "TERM": "dumb"}
    done = subprocess.run(
        list(map(str, arguments)), stderr=child, stdout=subprocess.DEVNULL, env=environment, timeout=120
    )
    os.close(child)
    told = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:  # what Linux says where the other end is closed
            break
        if not block:
            break
        told += block
    os.close(parent)
    lines = told.decode().replace("\r", "").splitlines()
    assert done.returncode == 0 and any("done: " in line for line in lines)
    assert [line for line in lines if len(line.rstrip()) > 80] == []


LOST = """
import os, signal, sys, time
from pipeline import cli

class Future:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # here the handler runs, and what it raises is lost

def work(arguments, standalone_mode):
    Future()
    time.sleep(30)

cli.app = work
cli.main()
"""


def test_a_signal_that_comes_in_a_destructor_stops_the_program_all_the_same(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 143
    assert done.stderr == "headrace: stopped; what was finished is kept, and the same command continues\n"
