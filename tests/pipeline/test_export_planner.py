"""Exports of planner samples: interrupted and finished, from datasets of recordings too."""

import json

import numpy as np
import pytest

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.export import export_dataset
from pipeline.export_planner import export_planner
from schemas.errors import DatasetError, UsageError
from schemas.planner import TENSORS
from tests.pipeline.loaders.test_planner import ANCHORS, WHOLE, build
from tests.pipeline.planner_caches import assert_same, read_cache, write_cache
from tests.pipeline.store_builder import build_dataset

TINY = {"agents": 1, "past": 1, "future": 2, "static": 1, "lanes": 1, "routes": 1, "points": 2}


class Interrupted(BaseException):
    """Ends an export as a signal does."""


def test_an_interrupted_export_goes_on_where_it_was(tmp_path):
    samples = write_cache(tmp_path / "raw", 300, **TINY)
    convert(tmp_path / "raw", tmp_path / "out", "planner-npz", cluster=ClusterOptions(workers=0), shard_steps=64)

    def stop(done, total):
        assert (done, total) == (256, 300)
        raise Interrupted

    with pytest.raises(Interrupted):
        export_planner(tmp_path / "out", tmp_path / "back", progress=stop)
    assert not (tmp_path / "back" / "diffusion_planner_training.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "back").glob("*.npz")}
    assert len(before) == 256
    write_cache(tmp_path / "other", 2, **TINY)
    convert(tmp_path / "other", tmp_path / "two", "planner-npz", cluster=ClusterOptions(workers=0), shard_steps=64)
    with pytest.raises(UsageError, match="found one of another"):
        export_planner(tmp_path / "two", tmp_path / "back")
    report = export_planner(tmp_path / "out", tmp_path / "back")
    assert (report.num_samples, report.num_resumed) == (300, 256)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert_same(read_cache(tmp_path / "back"), samples)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*samples, "diffusion_planner_training.json"}
    with pytest.raises(UsageError, match="there already"):
        export_planner(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize("normalize", ["none", "published"])
def test_samples_of_recordings_become_a_cache_in_their_units(tmp_path, normalize):
    root, physical = build(tmp_path / "out", normalize)
    report = export_planner(root, tmp_path / "back")
    whole = ANCHORS[:WHOLE]
    assert report.left_out == {"short-future": len(ANCHORS) - WHOLE} and report.num_samples == WHOLE
    files = json.loads((tmp_path / "back" / "diffusion_planner_training.json").read_bytes())
    found = read_cache(tmp_path / "back")
    assert set(found) == set(files) and len(files) == WHOLE
    for step, name in zip(whole, files, strict=True):
        sample = found[name]
        assert list(sample) == ["map_name", "token", *TENSORS]
        assert name == f"{sample['map_name']}_{sample['token']}.npz" and len(str(sample["token"])) == 16
        for key in TENSORS:
            assert (sample[key].dtype, sample[key].shape) == (physical[key].dtype, physical[key][step].shape)
            np.testing.assert_allclose(sample[key], physical[key][step], atol=1e-5, err_msg=key)
            if normalize == "none":
                np.testing.assert_array_equal(sample[key], physical[key][step])


def test_what_cannot_be_exported_is_refused(tmp_path):
    root, _ = build(tmp_path / "out")
    with pytest.raises(UsageError, match="outside the dataset"):
        export_planner(root, root / "back")
    with pytest.raises(UsageError, match="lerobot-v3 or planner-npz"):
        export_dataset(root, tmp_path / "back", "csv")
    with pytest.raises(UsageError, match="with lerobot alone"):
        export_dataset(root, tmp_path / "back", "planner-npz", images="jpeg")
    with pytest.raises(DatasetError, match="none called"):
        export_dataset(build_dataset(tmp_path / "frames").root, tmp_path / "back", "planner-npz")
    assert export_dataset(root, tmp_path / "back", "planner-npz")["num_samples"] == WHOLE
