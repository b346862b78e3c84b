"""What an index has less of than the recordings held is said by a fault: nothing goes in silence."""

import shutil
from pathlib import Path

import pytest

from pipeline.readers import open_source
from schemas.errors import SourceError
from tests.pipeline.readers.test_damage import WRITERS, check_refusal

NUM_FILES = 16


def held(index):
    """Return what an index promises: steps, views and instructions by episode."""
    return {
        ref.key: (ref.num_steps, {view.name for view in ref.views if view.present}, ref.instructions)
        for ref in index.episodes
    }


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def leave(path: Path) -> None:
    outside = path.parents[len(path.parents) - 3] / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_line(path: Path) -> None:
    """Drop the second half of the lines of a text; other files are cut."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: (len(lines) + 1) // 2]) if path.suffix == ".jsonl" else b"")


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("damage", [folder, leave, empty, cut, cut_line])
def test_an_episode_or_view_that_is_gone_is_said(tmp_path, name, damage):
    if name in ("aloha", "robomimic", "droid"):
        pytest.importorskip("h5py")
    WRITERS[name](tmp_path / "whole")
    reader = open_source(tmp_path / "whole", format=name)
    whole = held(reader.index())
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file())
    for number, file in enumerate(files[:: max(1, len(files) // NUM_FILES)]):
        raw = tmp_path / str(number) / "whole"
        shutil.copytree(tmp_path / "whole", raw)
        damage(raw / file)
        try:
            index = open_source(raw, format=name).index()
        except SourceError as error:
            check_refusal(error)
            continue
        found = held(index)
        lost = {key: (value, found.get(key)) for key, value in whole.items() if found.get(key) != value}
        assert not lost or index.faults, f"{file}: {lost}; notes {index.notes}"
