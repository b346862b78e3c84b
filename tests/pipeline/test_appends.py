"""A reader beside a writer: whatever it opens, and whenever, is one generation whole."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.dataset import open_dataset
from pipeline.loaders.reader import DatasetReader
from pipeline.verification import verify
from tests.pipeline.recordings import frame, write_recipe, write_route

APPENDS = """
import sys
from pathlib import Path
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from tests.pipeline.recordings import write_route

folder, times = Path(sys.argv[1]), int(sys.argv[2])
for route in range(1, times + 1):
    write_route(folder / "raw", route, 3 + route % 3)
    convert(folder / "raw", folder / "out", folder / "tiny.toml", shard_steps=4, cluster=ClusterOptions(workers=0))
"""


def check(root: Path) -> int:
    """Open the dataset three ways and check that each is whole; return the newest generation seen."""
    reader = DatasetReader(root)
    routes = range(reader.info.num_episodes)
    steps = [(route, step) for route in routes for step in range(3 + route % 3)]
    assert reader.info.generation == len(routes)
    np.testing.assert_array_equal(reader.rows("state")[:, 0], [1000 * route + step for route, step in steps])
    out = np.empty((len(steps), 6, 8, 3), np.uint8)
    reader.gather("rgb_main", np.arange(len(steps)), out)
    np.testing.assert_array_equal(out, [frame(route, step, 0) for route, step in steps])
    ds = open_dataset(root)
    assert ds.sizes["step"] == int(ds.row_size.sum()) >= len(steps)
    assert ds.rgb_main[-1].values.any() and ds.valid.values.all()
    group = zarr.open_group(root, mode="r")
    assert group["rgb_main"][group["rgb_main"].shape[0] - 1].any()
    assert len({group[name].shape[0] for name in ("rgb_main", "rgb_left", "state", "valid")}) == 1
    return reader.info.generation


def check_appends(folder: Path, times: int) -> None:
    write_route(folder / "raw", 0, 3)
    convert(folder / "raw", folder / "out", write_recipe(folder), shard_steps=4, cluster=ClusterOptions(workers=0))
    writer = subprocess.Popen(
        [sys.executable, "-c", APPENDS, str(folder), str(times)], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE
    )
    seen = set()
    while writer.poll() is None:
        seen.add(check(folder / "out"))
        time.sleep(0.1)  # two cores: the writer shall have its turn
    _, said = writer.communicate()
    assert writer.returncode == 0, said.decode()
    assert len(seen) >= times // 2
    assert check(folder / "out") == times + 1
    assert verify(folder / "out").ok


def test_a_reader_beside_three_appends_sees_one_generation_whole_each_time(tmp_path):
    check_appends(tmp_path, 3)


@pytest.mark.soak
def test_a_reader_beside_ten_appends_sees_one_generation_whole_each_time(tmp_path):
    check_appends(tmp_path, 10)
