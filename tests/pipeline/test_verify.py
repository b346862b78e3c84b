"""Whatever happens to a file of a dataset, verify names the array and the steps, or the file."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.store.atomic import write_atomic
from pipeline.store.metadata import read_info
from pipeline.store.shards import ShardReader, ShardWriter
from pipeline.verification import VerifyReport, verify
from schemas.errors import DatasetError
from tests.pipeline.store_builder import Built, build_dataset

NUM_STEPS = 21
"""Steps of the builder's dataset: frame shards of 8, so the last holds 5; row shards of 16, chunks of 4."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("verify") / "out")


def files_of(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def steps_of(built: Built, path: str) -> tuple[int, int]:
    """Return the steps (or episodes) that a shard file holds."""
    name, file = path.split("/")
    spec = built.specs[name]
    start = int(file.split(".")[1]) * spec.shard_steps
    return start, min(start + spec.shard_steps, len(built.arrays[name]))


def is_shard(path: str) -> bool:
    return path.split("/")[-1].startswith("c.")


def check_named(built: Built, path: str, report: VerifyReport) -> None:
    """Check that a report names ``path``, its array and steps within it."""
    assert not report.ok
    named = [problem for problem in report.problems if problem.path == path]
    assert named, (path, report.problems)
    if is_shard(path):
        start, stop = steps_of(built, path)
        for problem in named:
            assert problem.array == path.split("/")[0]
            assert start <= problem.start < problem.stop <= stop, (path, problem)
            assert f"{problem.array}, steps {problem.start}:{problem.stop}" in str(problem)
    elif path.count("/") == 1 and path.endswith("/zarr.json"):
        assert named[0].array == path.split("/")[0]


def test_a_finished_dataset_is_sound(built: Built) -> None:
    report = verify(built.root)
    assert report.problems == ()
    assert report.ok
    files = files_of(built.root)
    assert report.num_files == len(files)
    assert report.nbytes == sum((built.root / path).stat().st_size for path in files)
    assert verify(built.root, quick=True) == report


@pytest.mark.parametrize(("codec", "dtype"), [("zstd", "uint8"), ("raw", "float16"), ("zstd", "float32")])
def test_other_codecs_and_dtypes_are_sound(tmp_path: Path, codec: str, dtype: str) -> None:
    built = build_dataset(tmp_path / "out", codec=codec, dtype=dtype)
    assert verify(built.root, workers=3).problems == ()


def test_jpeg_frames_are_sound_and_digested_as_they_decode(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", codec="jpeg:90", size=(16, 24))
    assert verify(built.root).problems == ()


def test_an_empty_dataset_and_empty_episodes_are_sound(tmp_path: Path) -> None:
    assert verify(build_dataset(tmp_path / "none", episode_lengths=()).root).problems == ()
    assert verify(build_dataset(tmp_path / "some", episode_lengths=(0, 3, 0)).root).problems == ()


def flip(path: Path, position: int) -> bytes:
    """Flip one bit and return the bytes as they were."""
    original = path.read_bytes()
    changed = bytearray(original)
    changed[position] ^= 1 << (position % 8)
    path.write_bytes(changed)
    return original


def check_flips(tmp_path: Path, stride_of: Callable[[str, int], int]) -> int:
    """Flip a bit of every ``stride``-th byte of every file, one at a time; return how many were tried."""
    built = build_dataset(tmp_path / "out", episode_lengths=(2, 4), size=(2, 2), shard_steps=4, row_shard_steps=8)
    tried = 0
    for path in files_of(built.root):
        nbytes = (built.root / path).stat().st_size
        for position in range(0, nbytes, stride_of(path, nbytes)):
            original = flip(built.root / path, position)
            check_named(built, path, verify(built.root, workers=1))
            (built.root / path).write_bytes(original)
            tried += 1
    assert verify(built.root).ok
    return tried


def test_every_flipped_byte_of_every_kind_of_file_is_found(tmp_path: Path) -> None:
    whole = ("rgb_side/", "state/", "rgb_side_valid/", "row_size/")
    # metadata and tables stand under one digest of the whole file, so a sample of their bytes is as good as all
    tried = check_flips(
        tmp_path,
        lambda path, nbytes: (1 if path.startswith(whole) else 7) if is_shard(path) else max(nbytes // 10, 1),
    )
    assert tried > 600


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_flipped_byte_of_every_file_is_found(tmp_path: Path) -> None:
    assert check_flips(tmp_path, lambda path, nbytes: 1) > 10_000


def test_a_flipped_byte_of_a_chunk_names_exactly_its_steps(built: Built) -> None:
    frame_nbytes = 6 * 4 * 3 + 4
    for path, position, steps in [
        ("rgb_main/c.1.0.0.0", 2 * frame_nbytes + 5, (10, 11)),
        ("rgb_main/c.2.0.0.0", 4 * frame_nbytes + frame_nbytes - 1, (20, 21)),
        ("state/c.0.0", 4 * 3 * 4 + 4 + 1, (4, 8)),
        ("state/c.1.0", 4 * 3 * 4 + 4 + 47, (20, 21)),
    ]:
        original = flip(built.root / path, position)
        (problem,) = verify(built.root).problems
        (built.root / path).write_bytes(original)
        assert (problem.path, problem.start, problem.stop) == (path, *steps)
        assert "expected bytes of crc32c" in problem.message
        assert "verify" not in problem.message


def test_every_missing_file_is_found(built: Built) -> None:
    for quick in (False, True):
        for path in files_of(built.root):
            original = (built.root / path).read_bytes()
            (built.root / path).unlink()
            check_named(built, path, verify(built.root, quick=quick))
            (built.root / path).write_bytes(original)
    assert verify(built.root).ok


def test_every_truncated_or_grown_file_is_found(built: Built) -> None:
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: b"\0" + data,
    ]
    for quick in (False, True):
        for path in files_of(built.root):
            original = (built.root / path).read_bytes()
            for change in changes[2:4] if quick else changes:
                (built.root / path).write_bytes(change(original))
                check_named(built, path, verify(built.root, quick=quick))
            (built.root / path).write_bytes(original)
    assert verify(built.root).ok


def test_two_swapped_shards_are_found_with_both_their_steps(built: Built) -> None:
    pairs = [
        (a, b) for a in files_of(built.root) for b in files_of(built.root) if is_shard(a) and is_shard(b) and a < b
    ]
    tried = 0
    for first, second in pairs:
        before = [(built.root / path).read_bytes() for path in (first, second)]
        if before[0] == before[1] or len(before[0]) != len(before[1]):
            continue
        for path, data in zip((first, second), reversed(before), strict=True):
            (built.root / path).write_bytes(data)
        report = verify(built.root)
        check_named(built, first, report)
        check_named(built, second, report)
        for path, data in zip((first, second), before, strict=True):
            (built.root / path).write_bytes(data)
        tried += 1
    assert tried >= 3
    assert any(first.startswith("rgb_main") and second.startswith("rgb_main") for first, second in pairs)


def test_unknown_files_are_found(built: Built) -> None:
    names = [
        "notes.txt",
        ".hidden",
        "state/c.2.0",
        "state/c.0.0.partial",
        "rgb_main/c.3.0.0.0",
        "rgb_main/sub/c.0",
        "other/zarr.json",
        "_tables/steps-2.parquet",
        "_tables/other-0.parquet",
    ]
    for name in names:
        file = built.root / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
        report = verify(built.root)
        file.unlink()
        assert [problem.path for problem in report.problems] == [name]
    shutil.rmtree(built.root / "other")
    shutil.rmtree(built.root / "rgb_main" / "sub")


def test_what_an_unfinished_append_leaves_is_no_problem(tmp_path: Path) -> None:
    root = build_dataset(tmp_path / "out").root
    left = ["rgb_main/c.3.0.0.0", "state/c.2.0", "_tables/steps-2.parquet"]
    for name in left:
        (root / name).write_bytes(b"x")
    assert [problem.path for problem in verify(root).problems] == sorted(left)
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "plan.json").write_bytes(b"{}")
    assert verify(root).ok
    assert verify(root, quick=True).ok


def append_to_last_shard(built: Built, name: str, extra: int) -> None:
    """Replace the partly filled last shard by one with the same beginning and ``extra`` steps more."""
    spec = built.specs[name]
    values = built.arrays[name]
    shard = len(values) // spec.shard_steps
    rows = np.concatenate([values[shard * spec.shard_steps :], np.ones((extra, *spec.row_shape), spec.dtype)])
    with ShardWriter(built.root, spec, shard, built.root.parent / "tmp") as writer:
        for start in range(0, len(rows), spec.chunk_steps):
            writer.put(rows[start : start + spec.chunk_steps])
        writer.commit()


def test_a_last_shard_that_an_unfinished_append_replaced_is_judged_by_its_committed_steps(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    for name in ("rgb_main", "state"):
        append_to_last_shard(built, name, 3)
    assert verify(built.root).problems == ()
    assert verify(built.root, quick=True).problems == ()
    of_an_uncommitted_step = 7 * (6 * 4 * 3 + 4) - 9
    original = flip(built.root / "rgb_main/c.2.0.0.0", of_an_uncommitted_step)
    assert not verify(built.root).ok
    (built.root / "rgb_main/c.2.0.0.0").write_bytes(original)
    changed = Built(root=built.root, specs=built.specs, arrays={**built.arrays}, episode_lengths=built.episode_lengths)
    changed.arrays["state"] = built.arrays["state"] + 1
    append_to_last_shard(changed, "state", 3)
    assert [(p.array, p.start, p.stop) for p in verify(built.root).problems] == [("state", 16, 21)]


def test_a_last_shard_with_fewer_steps_than_committed_is_found(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    short = Built(root=built.root, specs=built.specs, arrays=dict(built.arrays), episode_lengths=built.episode_lengths)
    short.arrays["rgb_main"] = built.arrays["rgb_main"][:19]
    append_to_last_shard(short, "rgb_main", 0)
    for quick in (False, True):
        assert [(p.array, p.start, p.stop) for p in verify(built.root, quick=quick).problems] == [("rgb_main", 19, 21)]


def rewrite_shard(
    built: Built, name: str, shard: int, change: Callable[[int, np.ndarray | None], np.ndarray | None]
) -> None:
    """Rewrite a shard of frames soundly but with other content."""
    spec = built.specs[name]
    path = built.root / name / f"c.{shard}.0.0.0"
    with ShardReader(path, spec) as reader:
        present = [nbytes != 2**64 - 1 for _, nbytes in reader.index]
        rows = [reader.rows(k, k + 1) if there else None for k, there in enumerate(present)]
    with ShardWriter(built.root, spec, shard, built.root.parent / "tmp") as writer:
        for k, row in enumerate(rows):
            writer.put(change(k, row))
        writer.commit()


def test_a_frame_that_is_absent_though_its_mask_is_true_is_found(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    rewrite_shard(built, "rgb_side", 0, lambda k, row: None if k == 5 else row)
    for quick in (False, True):
        problems = [p for p in verify(built.root, quick=quick).problems if p.start == 5]
        assert [(p.array, p.start, p.stop, p.path) for p in problems] == [("rgb_side", 5, 6, "rgb_side/c.0.0.0.0")]


def test_a_frame_that_is_present_though_its_mask_is_false_is_found(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    black = np.zeros((1, 6, 4, 3), np.uint8)
    rewrite_shard(built, "rgb_side", 0, lambda k, row: black if k == 3 else row)
    for quick in (False, True):
        problems = [p for p in verify(built.root, quick=quick).problems if p.start == 3]
        assert [(p.array, p.start, p.stop, p.path) for p in problems] == [("rgb_side", 3, 4, "rgb_side/c.0.0.0.0")]


def test_without_a_readable_manifest_the_shards_are_still_checked(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    flip(built.root / "_tables/manifest-1.parquet", 100)
    flip(built.root / "rgb_main/c.0.0.0.0", 5)
    rewrite_shard(built, "rgb_side", 2, lambda k, row: None)
    assert {(p.path, p.start, p.stop) for p in verify(built.root).problems} == {
        ("_tables/manifest-1.parquet", 0, 0),
        ("rgb_main/c.0.0.0.0", 0, 1),
        ("rgb_side/c.2.0.0.0", 16, 21),
    }


def test_an_episode_of_another_digest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.pipeline import store_builder

    honest = store_builder.episode_digest
    monkeypatch.setattr(
        store_builder, "episode_digest", lambda specs, arrays, start, stop: honest(specs, arrays, 0, stop)
    )
    built = build_dataset(tmp_path / "out")
    problems = verify(built.root).problems
    assert [(p.start, p.stop, p.path) for p in problems] == [
        (5, 14, "_tables/episodes-1.parquet"),
        (14, 21, "_tables/episodes-1.parquet"),
    ]
    assert "'episode_1'" in problems[0].message


def test_digests_hold_across_row_shards_and_units_of_any_size(tmp_path: Path) -> None:
    for k, (frames, rows, chunk) in enumerate([(2, 4, 2), (4, 16, 4), (16, 4, 4), (1, 64, 64), (8, 8, 8)]):
        built = build_dataset(
            tmp_path / f"out{k}",
            shard_steps=frames,
            row_shard_steps=rows,
            row_chunk_steps=chunk,
            episode_lengths=(1, 17, 6),
        )
        assert verify(built.root, workers=2).problems == ()


def test_progress_counts_every_byte_once(built: Built) -> None:
    for quick in (False, True):
        calls: list[tuple[int, int]] = []
        report = verify(built.root, quick=quick, progress=lambda done, total: calls.append((done, total)))
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert {total for _, total in calls} == {report.nbytes}
        assert calls[-1] == (report.nbytes, report.nbytes)


def test_a_damaged_root_is_reported_as_the_file(built: Built) -> None:
    for change in (b"", b"{", b"[]", b'{"attributes":{}}', b"\xff\xfe"):
        original = (built.root / "zarr.json").read_bytes()
        (built.root / "zarr.json").write_bytes(change)
        report = verify(built.root)
        (built.root / "zarr.json").write_bytes(original)
        assert [problem.path for problem in report.problems] == ["zarr.json"]


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="found nothing"):
        verify(tmp_path / "absent")
    with pytest.raises(DatasetError, match=re.escape("no zarr.json")):
        verify(tmp_path)


def test_arrays_metadata_older_than_the_root_is_reported(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out")
    info = read_info(built.root)
    old = (built.root / "state" / "zarr.json").read_bytes().replace(b"[21,3]", b"[20,3]")
    write_atomic(built.root / "state" / "zarr.json", old, tmp_path / "tmp")
    assert info.lengths["state"] == NUM_STEPS
    assert [(p.array, p.path) for p in verify(built.root).problems] == [("state", "state/zarr.json")]
