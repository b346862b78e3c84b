"""The reader of a new HDF5 layout that the documentation shows is short, and works."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipeline.graph import frames, signals
from pipeline.readers.protocol import Reader
from schemas.errors import Reason
from tests.pipeline.readers.builders import colour

PAGE = Path(__file__).parents[3] / "docs" / "formats.md"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) < 60
    (tmp_path / "kitchen_reader.py").write_text(code)
    spec = spec_from_file_location("kitchen_reader", tmp_path / "kitchen_reader.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kitchen_reader", module)
    spec.loader.exec_module(module)
    (tmp_path / "raw").mkdir()
    return module.KitchenReader(tmp_path / "raw")


def test_the_documented_reader_reads(reader: Reader) -> None:
    with h5py.File(reader.root / "day.h5", "w") as file:
        for run, num_steps in (("run_10", 3), ("run_0", 4)):
            file[f"{run}/joints"] = np.arange(num_steps * 2.0).reshape(num_steps, 2)
            file[f"{run}/torques"] = np.ones((num_steps, 2))
            file[f"{run}/pixels/front"] = np.stack([colour(3, step) for step in range(num_steps)])
    (reader.root / "cut.h5").write_bytes((reader.root / "day.h5").read_bytes()[:-9])
    assert reader.sniff(reader.root) == ""
    index = reader.index()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [("day/run_0", 4), ("day/run_10", 3)]
    assert [(fault.path, fault.reason) for fault in index.faults] == [("cut.h5", Reason.TRUNCATED)]
    rows, faults = signals(reader, index.episodes[1], ["joints", "torques", "timestamp_s"], np.array([1, 2]))
    assert faults == ()
    np.testing.assert_allclose(rows, [[2, 3, 1, 1, 1 / 30], [4, 5, 1, 1, 2 / 30]])
    (frame,) = frames(reader, index.episodes[0], "front", np.array([3]))
    np.testing.assert_array_equal(frame, colour(3, 3))
