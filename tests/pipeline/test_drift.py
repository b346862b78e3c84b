"""How far data lies from frozen statistics: values worked out by hand, and by NumPy over the values that training sees."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.drift import drift_report
from pipeline.stats import norm_stats
from pipeline.stats_export import dataset_norm_stats, stats_file
from schemas.errors import UsageError
from tasks.drift import drift, near_constant
from tasks.stats import Summary
from tasks.transforms import AlohaToPi, DeltaActions
from tests.pipeline.store_builder import Built, build_dataset


def summary(**columns: list[float]) -> Summary:
    """A summary of the given columns; those that are not given say nothing of interest."""
    num = len(columns["std"])
    array = {name: np.array(values, np.float64) for name, values in columns.items()}
    zeros, ones = np.zeros(num), np.ones(num)
    return Summary(
        count=np.full(num, 100),
        num_non_finite=np.zeros(num, np.int64),
        mean=array.get("mean", zeros),
        std=array["std"],
        low=array.get("low", -ones),
        high=array.get("high", ones),
        percentiles={1: array.get("q01", -ones), 99: array.get("q99", ones)},
    )


def test_each_bound_flags_what_passes_it_and_nothing_else() -> None:
    frozen = {"mean": np.array([0.0, 1, 2, 3, 0]), "std": np.array([1.0, 2, 1, 0, 0])}
    found = summary(mean=[0.4, 2.2, 2, 4, 0], std=[1.9, 2, 0.4, 0, 0])
    rows = drift("state", frozen, found, np.array([10, 11, 2, 0, 0]))
    assert [row.flags for row in rows] == [(), ("shift", "outside"), ("std",), ("shift",), ()]
    assert [row.shift_std for row in rows] == pytest.approx([0.4, 0.6, 0, None, 0])
    assert [row.std_ratio for row in rows] == pytest.approx([1.9, 1, 0.4, 1, 1])
    assert [row.outside for row in rows] == [0.1, 0.11, 0.02, 0, 0]


def test_dimensions_that_scaling_would_blow_up_are_named_with_the_reason() -> None:
    found = summary(
        std=[0.5, 0, 0.01, 5e-5, 0.001], low=[-1, 2, 0, -1e-4, -1], high=[1, 2, 1, 1e-4, 2], q01=[-1, 2, 0, -1, -1], q99=[1, 2, 0, 1, 1]
    )  # fmt: skip
    reasons = near_constant(found)
    assert list(reasons) == [1, 2, 3, 4]
    assert (
        "always 2" in reasons[1]
        and "both 0" in reasons[2]
        and "below 0.0001" in reasons[3]
        and "2000 std" in reasons[4]
    )


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("drift") / "out", episode_lengths=(40, 30, 20), invalid=(45,))


def write_frozen(path: Path, built: Built, num_episodes: int, **options: object) -> Path:
    """Write what `headrace stats` gave when the dataset had its first episodes alone."""
    ends = np.array([40, 70, 90])[:num_episodes]
    arrays = {name: built.arrays[name][: ends[-1]] for name in ("state", "actions", "valid")}
    found = norm_stats(
        lambda array, start, stop: arrays[array][start:stop], ends, arrays["valid"], horizon=4, **options  # type: ignore[arg-type]
    )  # fmt: skip
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize("mask", [None, (True, False)])
def test_what_was_appended_is_compared_with_the_statistics_of_before(
    built: Built, tmp_path: Path, mask: tuple[bool, ...] | None
) -> None:
    frozen = write_frozen(tmp_path / "norm_stats.json", built, 1, delta_mask=mask)
    report = drift_report(built.root, frozen)
    assert (report.first_episode, report.num_episodes, report.num_anchors, report.horizon) == (1, 3, 49, 4)
    valid, ends = built.arrays["valid"], [45, 70, 90]  # where runs of valid steps end
    chunks = []
    for step in np.flatnonzero(valid[40:]) + 40:
        last = next(end for end in ends if step < end) - 1
        chunk = built.arrays["actions"][np.minimum(step + np.arange(4), last)]
        offset = built.arrays["state"][step, :2] * np.array(mask or (False, False))
        chunks.append((chunk - offset).astype(np.float32))
    values = {"actions": np.concatenate(chunks), "state": built.arrays["state"][40:][valid[40:]]}
    old = json.loads(frozen.read_text())["norm_stats"]
    for row in report.dims:
        column, entry = (
            values[row.array][:, row.dim].astype(np.float64),
            {k: v[row.dim] for k, v in old[row.array].items()},
        )
        assert row.shift_std == pytest.approx((column.mean() - entry["mean"]) / entry["std"])
        assert row.std_ratio == pytest.approx(column.std() / entry["std"])
        assert row.outside == ((column < entry["q01"]) | (column > entry["q99"])).mean()


def test_all_episodes_are_compared_with_the_statistics_of_another_dataset(built: Built, tmp_path: Path) -> None:
    frozen = tmp_path / "norm_stats.json"
    frozen.write_bytes(stats_file(built.root, "openpi", horizon=4))
    report = drift_report(built.root, frozen)
    assert (report.first_episode, report.num_anchors, report.drifted) == (0, 89, False)
    assert {row.shift_std for row in report.dims} == {0.0}
    assert all(row.outside is not None and row.outside <= 0.021 for row in report.dims)
    content = json.loads(frozen.read_text())
    content["norm_stats"]["state"].update(q01=None, q99=None)  # as openpi writes them where it has none
    frozen.write_text(json.dumps({"norm_stats": content["norm_stats"]}))
    report = drift_report(built.root, frozen, horizon=4)
    assert [row.outside is None for row in report.dims] == [row.array == "state" for row in report.dims]


def test_a_file_that_does_not_fit_is_refused(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "norm_stats.json"
    good = {"mean": [0.0] * 3, "std": [1.0] * 3}
    for wrong in (
        {}, {"norm_stats": {}}, {"norm_stats": {"state": good | {"std": [1.0]}}}, {"norm_stats": {"state": [1]}},
        {"norm_stats": {"state": {"mean": [0.0], "std": [1.0]}}}, {"norm_stats": {"state": good | {"mean": [0, "x", 1]}}},
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="give"):
            drift_report(built.root, path)
    with pytest.raises(UsageError, match="leave them out"):
        drift_report(built.root, write_frozen(path, built, 1), horizon=3)


def test_statistics_of_aloha_are_of_what_pi0_sees_and_drift_knows_it(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", episode_lengths=(6,), state_dim=14, action_dim=14, invalid=())
    frozen = tmp_path / "norm_stats.json"
    frozen.write_bytes(stats_file(built.root, horizon=1, delta_mask=(True,) * 6, adapter="aloha"))
    state, actions = AlohaToPi()(built.arrays["state"], built.arrays["actions"][:, None])
    _, actions = DeltaActions((True,) * 6)(state, actions)
    found = json.loads(frozen.read_text())
    assert found["headrace"]["adapter"] == "aloha"
    for name, values in (("state", state), ("actions", actions[:, 0])):
        np.testing.assert_allclose(found["norm_stats"][name]["mean"], values.mean(axis=0, dtype=np.float64), rtol=1e-6)
        np.testing.assert_array_equal(found["norm_stats"][name]["q99"], values.max(axis=0))
    assert {row.shift_std for row in drift_report(built.root, frozen).dims} == {0.0}
    with pytest.raises(UsageError, match="of aloha, found 'droid'"):
        stats_file(built.root, adapter="droid")


def test_statistics_say_of_which_generation_they_are_and_name_constant_dimensions(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", episode_lengths=(1,))
    record = dataset_norm_stats(built.root)["headrace"]
    assert record["generation"] == 1
    assert record["arrays"]["state"]["near_constant"].keys() == {"0", "1", "2"}
