"""What the bench reports: the loaders that fit, real counts, and a verdict that follows from the figures."""

import re

import pytest

from pipeline.bench import LOADERS, bench_dataset, verdict
from pipeline.screens import print_bench
from schemas.errors import DatasetError, UsageError
from tests.pipeline.store_builder import build_dataset


def row(threads: int, **other: float) -> dict[str, float]:
    base = {"samples_per_s": 1000.0, "of_copy": 0.1, "busy_cores": threads, "copy_busy_cores": threads}
    return {"threads": threads, **base, **other}


@pytest.mark.parametrize(
    ("rows", "without_checksums", "codecs", "expected"),
    [
        ([row(1, of_copy=0.4), row(2, of_copy=0.6, samples_per_s=2000)], 2.0, {"jpeg"}, "memory bandwidth: 60 %"),
        ([row(1), row(2, busy_cores=0.3, samples_per_s=1001)], 2.0, {"zstd"}, "the disk: threads wait"),
        ([row(1), row(2, samples_per_s=1900)], 2.0, {"zstd"}, "the number of threads"),
        ([row(1), row(2), row(4, samples_per_s=1900)], 2.0, {"zstd", "jpeg"}, "decoding jpeg and zstd"),
        ([row(1), row(4, samples_per_s=1900)], 1.5, set(), "checksums: 10 % of copying the same bytes; .* 1.5 times"),
        ([row(1), row(4, samples_per_s=1900)], 1.1, set(), "the CPU"),
    ],
)
def test_the_verdict_follows_from_the_figures(rows, without_checksums, codecs, expected):
    assert re.match(expected, verdict(rows, without_checksums, codecs, 4))


def test_every_loader_with_samples_is_measured_and_no_other(tmp_path, capsys):
    built = build_dataset(tmp_path / "out", episode_lengths=(20, 20))
    measured = bench_dataset(built.root, batch_size=64, max_threads=2, seconds=0.01)
    assert measured["loaders"].keys() == {"MultiViewLoader", "WindowLoader"}
    assert measured["not_measured"].keys() == LOADERS.keys() - measured["loaders"].keys()
    assert "expected the planner's tensors" in measured["not_measured"]["PlannerLoader"]
    loader = measured["loaders"]["MultiViewLoader"]
    # two views of 6 x 4 x 3, their masks, state and 50 actions of 32 float32, their padding, the index
    assert loader["sample_nbytes"] == 2 * (72 + 1) + 32 * 4 + 50 * (32 * 4 + 1) + 8
    assert (loader["num_samples"], loader["batch_size"]) == (39, 39)
    for row in loader["threads"]:
        assert row["nbytes_per_s"] == pytest.approx(row["samples_per_s"] * loader["sample_nbytes"])
        assert row["of_copy"] == pytest.approx(row["samples_per_s"] / row["copy_samples_per_s"])
    assert [row["threads"] for row in loader["threads"]] == [1, 2]
    print_bench(measured)
    shown = capsys.readouterr().out
    assert "MultiViewLoader" in shown
    assert shown.count("bound by") == 2


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="expected the folder of a dataset"):
        bench_dataset(tmp_path / "none")
    built = build_dataset(tmp_path / "out", episode_lengths=(3,), invalid=(0, 1, 2))
    with pytest.raises(DatasetError, match="expected samples for one of MultiViewLoader"):
        bench_dataset(built.root)
    with pytest.raises(UsageError, match="expected positive sizes"):
        bench_dataset(built.root, seconds=0)
