"""What the documentation shows works as shown."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.readers import READERS
from pipeline.recipes import BUILT_IN
from schemas import errors
from schemas.errors import HeadraceError, Reason
from schemas.recipe import TABLES, Recipe, SignalRecipe, ViewRecipe, recipe_from_mapping

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("pipeline/*.md")])


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of one language."""
    text = (REPOSITORY / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPOSITORY)) for page in PAGES])
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_training_loop_and_the_openpi_dataset_of_the_readme_run(tmp_path):
    write_lerobot_set(tmp_path / "raw", num_episodes=1, num_steps=40, size=(48, 64))
    convert(tmp_path / "raw", tmp_path / "demo" / "robot.zarr", cluster=ClusterOptions(workers=0))
    training, openpi = blocks("README.md", "python")
    shown = 'print(len(dataset), *sample, *sample["image"]["base_0_rgb"].shape, sample["actions"].shape[0])'
    done = [run_python(code, tmp_path) for code in (training, f"{openpi}\n{shown}")]
    errors = [float(line.split()[-1]) for line in done[0].splitlines()]
    assert len(errors) == 5
    assert errors[-1] < errors[0] / 2
    assert done[1].split() == ["40", "image", "image_mask", "state", "actions", "prompt", "224", "224", "3", "50"]


def run_python(code: str, folder: Path) -> str:
    """Run code in a process of its own and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_names_every_format_and_no_other():
    text = (REPOSITORY / "README.md").read_text("utf-8")
    table = re.search(r"\| format \|.*?\n\n", text, flags=re.DOTALL).group()
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)) == set(READERS)


def test_the_recipe_page_names_every_key_and_no_other():
    text = (REPOSITORY / "docs" / "recipes.md").read_text("utf-8")
    documented = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE))))
    spelled = {"candidates": "from", "columns": "from", "height_px": "size", "width_px": "size"}
    keys = {field.name for field in fields(Recipe)} - {"views", "signals", *TABLES}
    kinds = (ViewRecipe, SignalRecipe, *TABLES.values())
    assert documented == keys | {spelled.get(field.name, field.name) for kind in kinds for field in fields(kind)}
    assert set(re.findall(r"^## `\[(\w+)\]`", text, flags=re.MULTILINE)) == set(TABLES)
    assert all(f"`{name}`" in text for name in BUILT_IN)


def test_the_quarantine_page_names_every_reason_and_no_other():
    text = (REPOSITORY / "docs" / "quarantine.md").read_text("utf-8")
    table = re.search(r"\| reason \|.*?\n\n", text, flags=re.DOTALL).group()
    assert re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE) == [str(reason) for reason in Reason]


def test_the_troubleshooting_page_names_every_error_with_its_exit_code_and_no_other():
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text("utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted((kind.__name__, str(kind.exit_code)) for kind in kinds)


@pytest.mark.parametrize("page", ["docs/recipes.md", "docs/formats.md"])
def test_recipes_in_the_documentation_are_accepted(page):
    examples = blocks(page, "toml")
    assert examples
    for example in examples:
        recipe_from_mapping(tomllib.loads(example), "example")


def test_the_recipe_of_the_recipe_page_converts_the_demo(tmp_path):
    write_lerobot_set(tmp_path / "raw", num_episodes=1, num_steps=24, size=(48, 64))
    (tmp_path / "mine.toml").write_text(blocks("docs/recipes.md", "toml")[0], "utf-8")
    report = convert(tmp_path / "raw", tmp_path / "out", tmp_path / "mine.toml", cluster=ClusterOptions(workers=0))
    assert (report.exit_code, report.num_frames) == (0, 2 * report.total_steps)
