"""Whatever happens to a file of a dataset: verify finds it, loaders refuse it, repair puts it back byte for byte."""

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.cli import main
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.dataset import open_dataset
from pipeline.loaders.reader import DatasetReader
from pipeline.repair import RepairReport, repair
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import DatasetError, LockedError
from tests.pipeline.recordings import tree, write_recipe, write_route

THREADS = ClusterOptions(workers=0)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A dataset of two generations, 12 + 4 steps in shards of 4, and its recordings."""
    folder = tmp_path_factory.mktemp("repair")
    recipe = write_recipe(folder)
    for routes in ((2, 7), (3, 5)), ((4, 3),):
        for route, num_steps in routes:
            write_route(folder / "raw", route, num_steps)
        convert(folder / "raw", folder / "out", recipe, shard_steps=4, cluster=THREADS)
    return folder


@pytest.fixture
def place(converted, tmp_path) -> Path:
    shutil.copytree(converted, tmp_path / "place")
    return tmp_path / "place"


def mend(place: Path, raw: str = "raw") -> RepairReport:
    return repair(place / "out", place / raw, cluster=THREADS)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def make_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_bytes(b"x")


def swap(path: Path, other: Path) -> None:
    held = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(held)


def copy_over(path: Path, other: Path) -> None:
    other.write_bytes(path.read_bytes())


def copy_beside(path: Path, other: Path) -> None:
    shutil.copyfile(path, other.with_name(f"{other.name}.copy"))


Damage = tuple[str, Callable[[Path], None]]


def damages(root: Path, rng: random.Random) -> Iterator[Damage]:
    """Yield a name and an act for every kind of damage to every file, and to every pair of neighbours in a shuffled order."""
    paths = sorted(tree(root))
    for path in paths:
        for act in (flip, cut, delete, make_folder):
            yield f"{act.__name__} {path}", lambda to, act=act, path=path: act(to / path, rng)
    others = rng.sample(paths, len(paths))
    for path, other in zip(paths, others, strict=True):
        for act in (swap, copy_over, copy_beside):
            yield f"{act.__name__} {path} {other}", lambda to, act=act, p=path, o=other: act(to / p, to / o)


def read_everything(root: Path) -> None:
    """Touch every array and every table as loaders do."""
    reader = DatasetReader(root)
    for name, spec in reader.info.arrays.items():
        if spec.chunk_steps > 1:
            reader.rows(name)
        else:
            steps = np.arange(reader.num_steps)
            reader.gather(name, steps, np.empty((len(steps), *spec.row_shape), spec.dtype))
    for name in reader.info.tables:
        if name != "norm_stats":
            reader.table(name)
    open_dataset(root).load()


def is_touched(name: str) -> bool:
    """Whether a loader reads the file: not copies, the arrays' own metadata, statistics, older generations, or unknown files."""
    if name.startswith("copy_beside"):
        return False
    touched = name.split()[1:] if name.startswith("swap") else name.split()[-1:]
    return any(
        not path.startswith("_copies/")
        and "norm_stats" not in path
        and "/zarr-" not in path
        and not (path.startswith("_tables/") and path.split("-")[1].startswith("1."))
        and (path == "zarr.json" or not path.endswith("/zarr.json"))
        for path in touched
    )


def check_damage(place: Path, before: dict[str, str], name: str, act: Callable[[Path], None]) -> None:
    """Damage the dataset, and check that it is found, raised and repaired."""
    out = place / "out"
    act(out)
    if tree(out) == before:
        return  # the two files were equal
    assert not verify(out).ok, name
    if is_touched(name):
        with pytest.raises(DatasetError):
            read_everything(out)
    report = mend(place)
    assert (report.ok, report.left) == (True, ()), (name, report)
    assert tree(out) == before, name
    assert report.damaged and (report.repaired or report.moved), name


def check_matrix(place: Path, chosen: Callable[[list[Damage]], list[Damage]], seed: int) -> int:
    rng = random.Random(seed)
    before, tried = tree(place / "out"), 0
    for name, act in chosen(list(damages(place / "out", rng))):
        check_damage(place, before, name, act)
        tried += 1
    return tried


def test_a_sample_of_all_faults_is_found_raised_and_repaired(place):
    assert check_matrix(place, lambda all_: all_[:: len(all_) // 23], seed=0) >= 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_every_fault_of_every_file_is_found_raised_and_repaired(place, seed):
    assert check_matrix(place, lambda all_: all_, seed) > 300


def test_many_files_at_once_are_repaired(place):
    before, rng = tree(place / "out"), random.Random(3)
    for path in ("zarr.json", "_tables/manifest-2.parquet", "_copies/episodes-2.parquet", "state/zarr.json"):
        flip(place / "out" / path, rng)
    for path in ("rgb_main/c.0.0.0.0", "rgb_left/c.2.0.0.0", "state/c.0.0", "valid/c.0"):
        flip(place / "out" / path, rng)
    shutil.rmtree(place / "out" / "actions")
    report = mend(place)
    assert report.left == ()
    assert tree(place / "out") == before
    assert set(tree(place / "out.work")) <= {"seen.json"}


def test_rows_whose_table_is_damaged_too_are_made_from_the_recordings(place):
    before = tree(place / "out")
    (place / "out" / "state" / "c.0.0").unlink()
    (place / "out" / "_tables" / "steps-2.parquet").unlink()
    assert mend(place).ok is True
    assert tree(place / "out") == before


def test_only_what_is_damaged_is_rewritten(place):
    out = place / "out"
    times = {path: (out / path).stat().st_mtime_ns for path in tree(out)}
    data = bytearray((out / "rgb_main/c.1.0.0.0").read_bytes())
    data[200] ^= 1
    (out / "rgb_main/c.1.0.0.0").write_bytes(data)
    report = mend(place)
    assert [(p.array, p.start, p.stop) for p in report.damaged] == [("rgb_main", 5, 6)]
    assert report.repaired == ("rgb_main/c.1.0.0.0",)
    assert {path for path in times if (out / path).stat().st_mtime_ns != times[path]} == {"rgb_main/c.1.0.0.0"}


@pytest.mark.parametrize("codec", ["zstd", "jpeg:90"])
def test_encoded_frames_are_made_again_to_the_same_bytes(converted, tmp_path, codec):
    convert(converted / "raw", tmp_path / "out", converted / "tiny.toml", shard_steps=4, codec=codec, cluster=THREADS)
    before = tree(tmp_path / "out")
    flip(tmp_path / "out" / "rgb_main" / "c.0.0.0.0", random.Random(2))
    (tmp_path / "out" / "rgb_left" / "c.1.0.0.0").unlink()
    assert repair(tmp_path / "out", converted / "raw", cluster=THREADS).left == ()
    assert tree(tmp_path / "out") == before


def test_a_damaged_mask_accuses_no_frame(place):
    before = tree(place / "out")
    (place / "out" / "rgb_main_valid" / "c.0").unlink()
    assert {problem.path for problem in verify(place / "out").problems} == {"rgb_main_valid/c.0"}
    assert mend(place).repaired == ("rgb_main_valid/c.0",)
    assert tree(place / "out") == before


def test_a_recording_that_changed_is_refused_with_the_difference_and_nothing_is_written(place):
    out = place / "out"
    write_route(place / "raw", 2, 7, views=["rgb_right"])
    picture = place / "raw" / "route_02" / "rgb" / "0001.png"
    shutil.copyfile(place / "raw" / "route_02" / "rgb" / "0002.png", picture)
    flip(out / "rgb_main" / "c.0.0.0.0", random.Random(1))
    flip(out / "rgb_left" / "c.2.0.0.0", random.Random(1))
    damaged = tree(out)
    report = mend(place)
    (left,) = report.left
    assert (left.array, report.repaired, report.ok) == ("rgb_main", ("rgb_left/c.2.0.0.0",), False)
    assert "the recording raw/route_02 is not what was converted: expected route_02/rgb/0001.png of" in left.message
    assert tree(out) == {**damaged, "rgb_left/c.2.0.0.0": tree(place / "out")["rgb_left/c.2.0.0.0"]}


def test_recordings_that_were_moved_are_known_by_content_and_absent_ones_are_named(place):
    before = tree(place / "out")
    (place / "raw" / "route_02").rename(place / "raw" / "renamed")
    shutil.rmtree(place / "raw" / "route_04")
    for name in ("rgb_main/c.0.0.0.0", "rgb_main/c.3.0.0.0"):
        (place / "out" / name).unlink()
    report = mend(place)
    assert report.repaired == ("rgb_main/c.0.0.0.0",)
    assert [problem.path for problem in report.left] == ["rgb_main/c.3.0.0.0"]
    assert "raw/route_04 is not in the raw folders given" in report.left[0].message
    assert (place / "out" / "rgb_main" / "c.0.0.0.0").exists() and tree(place / "out").items() <= before.items()


def test_a_replaced_episode_is_repaired_where_its_chunks_are_whole(place):
    write_route(place / "raw", 3, 6)
    convert(place / "raw", place / "out", place / "tiny.toml", shard_steps=4, cluster=THREADS, replace=["route_03"])
    before = tree(place / "out")
    (place / "out" / "valid" / "c.0").unlink()
    shard = place / "out" / "rgb_main" / "c.1.0.0.0"  # steps 4 to 6 of route 2, 7 of the replaced route 3
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    assert mend(place).left == ()
    assert tree(place / "out") == before
    data = bytearray(shard.read_bytes())
    data[3 * 148 + 10] ^= 1
    shard.write_bytes(data)
    (left,) = mend(place).left
    assert "the recording raw/route_03 is not what was converted" in left.message


def test_a_root_that_is_lost_with_its_copies_is_refused_saying_so(place):
    (place / "out" / "zarr.json").unlink()
    (place / "out" / "_copies" / "zarr-2.json").unlink()
    (place / "out" / "_tables" / "zarr-2.json").unlink()
    before = tree(place / "out")
    with pytest.raises(DatasetError, match="expected a copy of the root of generation 2, found that of 1 only"):
        mend(place)
    (place / "out" / "_copies" / "zarr-1.json").unlink()
    (place / "out" / "_tables" / "zarr-1.json").unlink()
    with pytest.raises(DatasetError, match="found neither whole"):
        mend(place)
    assert tree(place / "out").items() <= before.items()


def test_an_older_root_in_the_place_of_the_newest_is_refused_and_repaired(place):
    before = tree(place / "out")
    shutil.copyfile(place / "out" / "_copies" / "zarr-1.json", place / "out" / "zarr.json")
    with pytest.raises(DatasetError, match="expected generation 2"):
        DatasetReader(place / "out")
    assert mend(place).ok is True
    assert tree(place / "out") == before


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test takes it."""


def test_a_repair_killed_at_any_write_leaves_nothing_worse_and_the_next_finishes(place, monkeypatch):
    out, before, rng = place / "out", tree(place / "out"), random.Random(5)
    real, replaces, kills = os.replace, 0, 0
    for kill_at in (*range(1, 12, 2), 10**9):
        for path in ("_tables/quarantine-2.parquet", "rgb_main/c.0.0.0.0", "state/c.0.0", "zarr.json"):
            flip(out / path, rng)
        damaged, replaces = tree(out), 0

        def kill(source, target, kill_at=kill_at):
            nonlocal replaces
            if threading.current_thread() is threading.main_thread():  # not the workers', whose death is another test's
                replaces += 1
                if replaces == kill_at:
                    raise Killed
            real(source, target)

        monkeypatch.setattr(os, "replace", kill)
        try:
            mend(place)
        except Killed:
            kills += 1
        monkeypatch.setattr(os, "replace", real)
        assert {path for path, digest in tree(out).items() if digest != before[path]} <= {
            path for path, digest in damaged.items() if digest != before[path]
        }
        assert mend(place).ok is True
        assert tree(out) == before
    assert kills >= 3


def test_a_repair_waits_for_no_conversion_and_says_who_holds_the_dataset(place):
    from pipeline.workspace import Lock, Workspace

    with Lock(Workspace(place / "out")), pytest.raises(LockedError, match="process"):
        mend(place)


def test_the_command_reports_what_was_damaged_repaired_and_left(place, capsys, monkeypatch):
    def headrace(*arguments) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["headrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), capsys.readouterr().out

    out, raw = place / "out", place / "raw"
    (out / "rgb_main" / "c.0.0.0.0").unlink()
    (out / "notes.txt").write_text("mine")
    code, said = headrace("verify", out, "--repair", raw, "--workers", 0)
    assert code == 0
    assert "repaired: rgb_main/c.0.0.0.0" in said
    assert f"moved away: notes.txt -> {out}.work/unknown/notes.txt" in said
    assert Path(f"{out}.work/unknown/notes.txt").read_text() == "mine"
    (out / "rgb_main" / "c.0.0.0.0").unlink()
    (raw / "route_02" / "rgb" / "0001.png").unlink()
    code, said = headrace("verify", out, "--repair", raw, "--workers", 0, "--json")
    report = json.loads(said)
    assert (code, report["ok"], report["repaired"]) == (1, False, [])
    assert [problem["path"] for problem in report["left"]] == ["rgb_main/c.0.0.0.0"]
    assert headrace("verify", out, "--quick", "--repair", raw)[0] == 2
    assert headrace("verify", place / "nothing", "--repair", raw)[0] == 1
    assert not (place / "nothing.work").exists()


def test_zarr_python_shows_black_frames_where_headrace_raises(place):
    """The reason for all of this: a missing shard is zeros to every Zarr reader."""
    out = place / "out"
    group = zarr.open_group(out, mode="r")
    assert group["rgb_main"][0].any()
    (out / "rgb_main" / "c.0.0.0.0").unlink()
    assert not group["rgb_main"][:4].any()
    with pytest.raises(DatasetError, match="expected a shard file, found none"):
        open_dataset(out).rgb_main[0].load()
    assert [problem.path for problem in verify(out).problems] == ["rgb_main/c.0.0.0.0"]
    assert read_info(out).num_steps == 15
