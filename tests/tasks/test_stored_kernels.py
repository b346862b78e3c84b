"""Compiled kernels on disk: made by one process, used by all, and never in the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = """
import json
import numpy as np
from tasks.kernels.planes import planes_to_rows
found = []
for dtype in ("float32", "int64"):
    planes, out = np.arange(6, dtype=dtype).reshape(2, 3), np.zeros((3, 2), dtype)
    planes_to_rows(planes, out)
    found.append(out.tolist())
stats = planes_to_rows.stats
print(json.dumps([found, sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""
EXPECTED = [[[0, 3], [1, 4], [2, 5]]] * 2


def start(folder):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE)


def result(process):
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def test_of_processes_that_start_together_one_compiles_and_the_others_load(tmp_path):
    found = [result(process) for process in [start(tmp_path) for _ in range(3)]]
    assert [values for values, _, _ in found] == [EXPECTED] * 3
    assert sum(misses for _, _, misses in found) >= 2  # both dtypes, once or more: a miss is counted before the wait
    assert result(start(tmp_path)) == [EXPECTED, 2, 0]


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_file_that_is_not_what_was_saved_is_compiled_again_and_replaced(tmp_path, damage):
    result(start(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".nbc", ".nbi")]
    assert len(files) == 3
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    assert result(start(tmp_path))[0] == EXPECTED
    assert result(start(tmp_path)) == [EXPECTED, 2, 0]


def test_without_a_place_for_it_kernels_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert result(start(tmp_path / "file"))[:2] == [EXPECTED, 0]


def test_a_folder_that_others_may_write_is_not_trusted(tmp_path):
    result(start(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert result(start(tmp_path))[:2] == [EXPECTED, 0]


def test_another_source_has_another_folder(tmp_path, monkeypatch):
    from tasks.kernels import stored

    names = set()
    for text in (b"a", b"b"):
        (tmp_path / "kernel.py").write_bytes(text)
        monkeypatch.setattr(stored, "__file__", str(tmp_path / "stored.py"))
        names.add(stored._folder.__wrapped__().name)
    assert len(names) == 2


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks are those of POSIX")
