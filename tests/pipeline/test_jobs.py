"""Jobs by file: incremental and idempotent, exclusive, told to hooks, and checked before they run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.job_file import check_job, load_job
from pipeline.job_run import JobRun
from pipeline.store.metadata import read_info
from pipeline.watch import Watch
from pipeline.workspace import Lock, Workspace
from schemas.errors import HeadraceError, LockedError, SourceError, UsageError
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import tree, write_recipe, write_route

TELL = """
import json, os, sys
line = {"moment": sys.argv[1], **{k[9:]: v for k, v in os.environ.items() if k.startswith("HEADRACE_")}}
with open(sys.argv[2], "a") as file:
    print(json.dumps(line), file=file)
sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
"""


def words(folder: Path, moment: str, code: int = 0) -> str:
    return json.dumps([sys.executable, str(folder / "tell.py"), moment, str(folder / "told"), str(code)])


def told(folder: Path) -> list[tuple[str, str, str]]:
    """Return moment, generation and exit code of every call of a hook, and forget them."""
    lines = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
    (folder / "told").unlink(missing_ok=True)
    return [(row["moment"], row["GENERATION"], row["EXIT_CODE"]) for row in map(json.loads, lines)]


@pytest.fixture
def job(tmp_path) -> Path:
    write_route(tmp_path / "raw" / "day_1", 1, 5)
    write_recipe(tmp_path)
    (tmp_path / "tell.py").write_text(TELL)
    path = tmp_path / "job.toml"
    path.write_text(f"""
sources = ["raw/day_*"]
dataset = "out"
recipe = "tiny.toml"
[convert]
shard_steps = 4
on_bad_frame = "mask"
[cluster]
workers = 0
[hooks]
before = {words(tmp_path, "before")}
after = [{words(tmp_path, "after")}, {words(tmp_path, "after too")}]
on_failure = {words(tmp_path, "failed")}
[notify]
0 = {words(tmp_path, "fine")}
1 = {words(tmp_path, "wrong")}
75 = {words(tmp_path, "busy")}
""")
    return path


def run(job: Path):
    return JobRun(load_job(job))(Watch())


def test_each_run_takes_what_is_new_and_nothing_new_makes_no_generation(job, tmp_path):
    first = run(job)
    assert (first.generation, first.total_episodes, first.exit_code) == (1, 1, 0)
    assert told(tmp_path) == [("before", "0", "0"), ("after", "1", "0"), ("after too", "1", "0"), ("fine", "1", "0")]
    held = tree(tmp_path / "out")
    again = run(job)
    assert (again.generation, again.num_episodes, again.exit_code) == (1, 0, 0)
    assert tree(tmp_path / "out") == held
    write_route(tmp_path / "raw" / "day_2", 2, 6)
    assert (run(job).generation, read_info(tmp_path / "out").num_steps) == (2, 11)
    assert told(tmp_path)[-1] == ("fine", "2", "0")


def test_a_second_run_is_told_who_runs_and_runs_no_hook(job, tmp_path):
    with Lock(Workspace(tmp_path / "out"), "run"):
        with pytest.raises(LockedError, match=f"process {os.getpid()} of .* on .* since .*; try again") as caught:
            run(job)
    assert caught.value.exit_code == 75
    assert told(tmp_path) == [("busy", "0", "75")]


def test_what_another_command_holds_is_refused_too(job, tmp_path):
    with Lock(Workspace(tmp_path / "out")), pytest.raises(LockedError):
        run(job)
    assert told(tmp_path) == [("before", "0", "0"), ("busy", "0", "75")]


def test_a_failure_is_told_and_raised(job, tmp_path):
    job.write_text(job.read_text().replace("raw/day_*", "nowhere_*"))
    with pytest.raises(SourceError, match="expected recordings at nowhere_\\*, found nothing; check `sources`"):
        run(job)
    assert told(tmp_path) == [("before", "0", "0"), ("failed", "0", "1"), ("wrong", "0", "1")]


def test_a_hook_that_fails_before_stops_the_run_and_one_after_is_no_success(job, tmp_path):
    text = job.read_text()
    job.write_text(text.replace(words(tmp_path, "before"), words(tmp_path, "before", 7)))
    with pytest.raises(HeadraceError, match=r"\(before\) to succeed, found exit code 7"):
        run(job)
    assert not (tmp_path / "out").exists()
    job.write_text(text.replace(words(tmp_path, "after too"), words(tmp_path, "after too", 7)))
    with pytest.raises(HeadraceError, match="found exit code 7; generation 1 is committed; correct it"):
        run(job)
    assert read_info(tmp_path / "out").generation == 1
    assert told(tmp_path)[-1] == ("wrong", "1", "1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sources =", "source =", "expected a known key in the job file, found 'source'; did you mean 'sources'?"),
        ("shard_steps", "shard_step", "expected a known key in [convert], found 'shard_step'; did you mean 'shard_steps'?"),
        ("shard_steps = 4", "shard_steps = 12", "expected a power of two up to 65536 for --shard-steps, found 12"),
        ("shard_steps = 4", "shard_steps = true", "expected a whole number for shard_steps in [convert], found True"),
        ("workers = 0", "worker = 0", "did you mean 'workers'?"),
        ("workers = 0", 'file = "no.toml"', "expected a cluster file at "),
        ("before =", "befor =", "did you mean 'before'?"),
        ("75 =", "76 =", "expected one of the exit codes 0, 1, 2, 3, 75, 130, 143 in [notify], found '76'"),
        ("[notify]\n", '[notify]\n3 = "mail -s x"\n', "expected a command as a list of words"),
        ('dataset = "out"', "", "expected texts for dataset and recipe, found None"),
    ],
)  # fmt: skip
def test_a_job_file_that_does_not_fit_is_wrong_usage(job, old, new, message):
    assert old in job.read_text()
    job.write_text(job.read_text().replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_job(job)
    assert message in str(caught.value) and str(caught.value).startswith("job job.toml")


def test_check_names_everything_that_is_wrong_and_touches_nothing(job, tmp_path):
    assert check_job(job)[1] == []
    (tmp_path / "out").write_text("")
    write_recipe(tmp_path, "horizn = 1")
    job.write_text(job.read_text().replace("raw/day_*", "s3://bucket/day").replace(sys.executable, "no-such-program"))
    problems = check_job(job)[1]
    assert [problem.partition(";")[0] for problem in problems] == [
        "recipe tiny.toml: expected a known key in the recipe, found 'horizn'",
        "expected a path or a file:// URL, found 's3://bucket/day'",
        f"expected a folder for the dataset, found a file at {tmp_path / 'out'}",
        "expected the program 'no-such-program' of a hook, found none",
    ]
    assert not (tmp_path / "out.work").exists() and not (tmp_path / "told").exists()


def test_a_file_url_is_the_folder_it_names(job, tmp_path):
    job.write_text(job.read_text().replace("raw/day_*", f"file://{tmp_path}/raw/day%5F1"))
    assert load_job(job).folders() == [tmp_path / "raw" / "day_1"]


def test_the_command_checks_runs_and_stops_within_ten_seconds(job, tmp_path):
    """As a scheduler calls it; the signal comes while the dataset is being made."""
    command = [sys.executable, "-m", "pipeline", "run", str(job), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    checked = subprocess.run([*command, "--check"], capture_output=True, text=True, env=environment, timeout=120)
    assert (checked.returncode, json.loads(checked.stdout)["ok"], checked.stderr) == (0, True, "")
    write_route(tmp_path / "raw" / "day_1", 2, 40)
    job.write_text(job.read_text().replace("shard_steps = 4", "shard_steps = 1"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    journal = tmp_path / "out.work" / "journal"
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, json.loads(out)["exit_code"]) == (143, 143)
    assert told(tmp_path) == [("before", "0", "0"), ("failed", "0", "143")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    report = json.loads(done.stdout)
    assert (done.returncode, report["total_steps"]) == (0, 45) and report["shards_reused"] > 0


def test_the_files_that_the_page_shows_are_accepted(tmp_path):
    page = (REPOSITORY / "docs" / "operations.md").read_text("utf-8")
    night, slurm = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "slurm.toml").write_text(slurm)
    (tmp_path / "night.toml").write_text(night.replace("workers = 8 ", 'file = "slurm.toml" '))
    job = load_job(tmp_path / "night.toml")
    assert (job.cluster.num_workers, job.convert["on_bad_frame"]) == (64, "drop-episode")
    assert job.hooks["before"] == (("mountpoint", "/data"),)
