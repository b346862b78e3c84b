"""The example training loops learn, and a run that is stopped goes on with the samples that it would have had."""

import importlib
import re
import sys

import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.demo.bench2drive import write_bench2drive_clip
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.demo.town import write_town_map
from tests.conftest import REPOSITORY

pytest.importorskip("torch")


@pytest.fixture(name="examples", scope="module")
def _examples(tmp_path_factory):
    """Datasets of the examples, small."""
    folder = tmp_path_factory.mktemp("examples")
    write_lerobot_set(folder / "robot", num_episodes=1, num_steps=40, size=(48, 64))
    convert(folder / "robot", folder / "train_policy", cluster=ClusterOptions(workers=0))
    write_bench2drive_clip(folder / "drive", num_steps=110, size=(18, 32), cameras=("rgb_front",))
    write_town_map(folder / "Town01.xodr")
    options = {"map": folder / "Town01.xodr", "cluster": ClusterOptions(workers=0)}
    convert(folder / "drive", folder / "train_planner", recipe="diffusion-planner", **options)
    return folder


@pytest.fixture(name="run", params=["train_policy", "train_planner"])
def _run(request, examples, monkeypatch):
    """Return a function that runs an example with more arguments."""
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "examples"), *sys.path])
    module = importlib.import_module(request.param)
    parser = importlib.import_module("training").parser

    def run(*arguments):
        words = [str(examples / request.param), "--batch-size", "4", "--device", "cpu", *map(str, arguments)]
        return module.main(parser("", "").parse_args(words))

    return run


def test_the_loss_goes_down_and_a_stopped_run_goes_on_as_if_it_had_not_been(run, tmp_path, capsys):
    whole = run("--steps", 16)
    assert sum(whole.losses[-4:]) < 0.7 * sum(whole.losses[:4])
    checkpoint = ("--steps", 16, "--checkpoint", tmp_path / "run.pt")
    parts = [run(*checkpoint, "--stop-after", 5), run(*checkpoint, "--stop-after", 4), run(*checkpoint)]
    assert [len(part.losses) for part in parts] == [5, 4, 7]
    assert [samples for part in parts for samples in part.samples] == whole.samples
    assert [loss for part in parts for loss in part.losses] == pytest.approx(whole.losses, rel=0.05)
    assert run(*checkpoint).losses == []
    assert "going on after step 16" in capsys.readouterr().out


def test_the_profile_says_how_long_the_loop_waits(run, capsys):
    run("--steps", 18, "--profile")
    waits = re.search(r"wait for data: (\d+) times, ([\d.]+) ms each", capsys.readouterr().out)
    assert 10 <= int(waits[1]) <= 16  # ten batches, and the ends of epochs between them
