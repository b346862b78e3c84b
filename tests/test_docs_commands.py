"""The commands that the documentation shows are run, page by page, in a folder that has what they name."""

import json
import os
import re
import subprocess
import sys

import pytest

from pipeline.demo.bench2drive import write_bench2drive_clip
from pipeline.demo.lerobot import write_lerobot_set
from pipeline.demo.town import write_town_map
from tests.conftest import REPOSITORY


def robot(folder):
    write_lerobot_set(folder / "recordings", num_episodes=2, num_steps=24, size=(48, 64))


def nightly(folder):
    robot(folder)
    (folder / "night.toml").write_text('sources = ["recordings"]\ndataset = "night.zarr"\n[cluster]\nworkers = 0\n')


def town(folder):
    write_bench2drive_clip(folder / "recordings", num_steps=110, size=(18, 32), cameras=("rgb_front",))
    write_town_map(folder / "maps" / "Town01.xodr")


FOLDERS = {
    "README.md": robot,
    "docs/getting-started.md": robot,
    "docs/operations.md": nightly,
    "docs/planner.md": town,
    "docs/preview.md": robot,
}
"""What each page's commands are run on."""

GIVEN = {"docs/preview.md": ["headrace convert recordings/ dataset.zarr --recipe pi0"]}
"""What a page takes for done."""


def commands(page):
    text = (REPOSITORY / page).read_text("utf-8")
    shown = "".join(re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
    return [line.split("#")[0].strip() for line in shown.splitlines() if re.match(r"(\.venv/bin/)?headrace ", line)]


def test_every_page_with_commands_is_run():
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("pipeline/*.md")]
    assert {str(page.relative_to(REPOSITORY)) for page in pages if commands(page)} == set(FOLDERS)


RUN = """
import json, sys
from pipeline.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["headrace", *words]
    try:
        main()
    except SystemExit as stopped:
        if stopped.code:
            sys.exit(f"{' '.join(words)}: exit code {stopped.code}")
"""


@pytest.mark.parametrize(
    "page", ["README.md", "docs/getting-started.md", "docs/operations.md"]
)  # notebooks 2 and 4 make the other pages' calls
def test_the_commands_of_a_page_work_in_threads_of_one_process(page, tmp_path):
    FOLDERS[page](tmp_path)
    shown = [command.split()[1:] for command in [*GIVEN.get(page, []), *commands(page)]]
    words = [[*line, "--workers", "0"] if line[0] == "convert" else line for line in shown]
    run(tmp_path, [sys.executable, "-c", RUN, json.dumps(words)])


@pytest.mark.soak
@pytest.mark.parametrize("page", FOLDERS)
def test_the_commands_of_a_page_work_as_shown(page, tmp_path):
    FOLDERS[page](tmp_path)
    for command in [*GIVEN.get(page, []), *commands(page)]:
        run(tmp_path, [sys.executable, "-m", "pipeline", *command.split()[1:]])


def run(folder, command):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
