"""Diffusion Planner's caches packed into datasets: what is whole comes through, what is broken is told of."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.export_planner import export_planner
from pipeline.loaders import PlannerDataset, PlannerLoader
from pipeline.preview import write_preview
from pipeline.readers import open_source
from pipeline.readers.planner_npz import RUN_SAMPLES
from pipeline.store.metadata import read_info
from pipeline.store.tables import read_table
from pipeline.verification import verify
from schemas.errors import SourceError, UsageError
from schemas.planner import TENSORS
from tests.pipeline.planner_caches import assert_same, make_sample, read_cache, write_cache
from tests.pipeline.recordings import tree

THREADS = ClusterOptions(workers=0)


def pack(raw: Path | list[Path], out: Path, recipe: str = "planner-npz", **options):
    return convert(raw, out, recipe, **{"cluster": THREADS, "shard_steps": 16, **options})


def quarantine(out: Path) -> dict[str, tuple[str, str]]:
    """Return ``path -> (reason, stream)``."""
    rows = read_table(read_info(out), "quarantine").to_pylist()
    return {row["path"]: (row["reason"], row["stream"]) for row in rows}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    samples = write_cache(folder / "raw", 40)
    report = pack(folder / "raw", folder / "out")
    assert (report.total_steps, report.exit_code) == (40, 0)
    return folder, samples


def test_a_packed_cache_serves_what_its_own_dataset_reads(packed):
    folder, samples = packed
    data = PlannerDataset(folder / "out", past_neighbor_num=2, predicted_neighbor_num=1, future_len=20)
    assert len(data) == 40
    for found, sample in zip((data[k] for k in range(40)), samples.values(), strict=True):
        plain = dict(sample)  # as DiffusionPlannerData cuts them
        plain["neighbor_agents_past"] = plain["neighbor_agents_past"][:2]
        plain["neighbor_agents_future"] = plain["neighbor_agents_future"][:1, :20]
        plain["ego_agent_future"] = plain["ego_agent_future"][:20]
        for name, array in zip(TENSORS, found, strict=True):
            assert array.dtype == plain[name].dtype
            np.testing.assert_array_equal(array, plain[name])
    assert verify(folder / "out").ok
    batch = next(iter(PlannerLoader(folder / "out", 8, past_neighbor_num=3, predicted_neighbor_num=3, future_len=24)))
    keys = list(samples)
    np.testing.assert_array_equal(batch["lanes"], [samples[keys[k]]["lanes"] for k in batch["index"]])


def test_packing_again_finds_nothing_new_and_elsewhere_gives_the_same_bytes(packed, tmp_path):
    folder, _ = packed
    assert pack(folder / "raw", folder / "out").num_episodes == 0
    pack(folder / "raw", tmp_path / "again")
    assert tree(tmp_path / "again") == tree(folder / "out")


def test_a_preview_shows_packed_samples(packed, tmp_path):
    write_preview(packed[0] / "out", tmp_path / "page.html", samples=2)
    assert "plan-view" in (tmp_path / "page.html").read_text("utf-8")


DTYPES = ("float32", "float64", "float16", "int8", "int32", "int64", "uint8", "uint16", "bool")
extras = st.dictionaries(
    st.sampled_from(["ego_agent_past", "goal_pose", "polygons", "turn_indicators", "delay"]),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3)),
)
side = st.integers(1, 6)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(side, side, side, side, st.integers(1, 40), extras)
def test_caches_of_any_sizes_come_back_key_by_key(tmp_path_factory, agents, lanes, points, past, features, more):
    folder = tmp_path_factory.mktemp("any")
    sizes = {"agents": agents, "lanes": lanes, "points": points, "past": past, "lane_features": features}

    def extra(seed):
        rng = np.random.default_rng(seed)
        return {name: np.asarray(rng.integers(0, 120, shape)).astype(dtype) for name, (dtype, shape) in more.items()}

    samples = write_cache(folder / "raw", 3, extra=extra, **sizes)
    pack(folder / "raw", folder / "out", shard_steps=2)
    export_planner(folder / "out", folder / "back")
    assert_same(read_cache(folder / "back"), samples)


def test_contract_sizes_come_back_byte_for_byte(tmp_path):
    sizes = {"agents": 32, "past": 21, "future": 80, "static": 5, "lanes": 70, "routes": 25, "points": 20}

    def extra(seed):  # large arrays of other axes and dtypes
        rows = np.random.default_rng(seed).integers(0, 255, 6000)
        return {
            "flat": rows.astype(np.float64),
            "grid": rows.reshape(60, 100).astype(np.float16),
            "raster": rows.reshape(3, 20, 10, 10).astype(np.uint8),
        }

    samples = write_cache(tmp_path / "raw", 4, extra=extra, **sizes)
    pack(tmp_path / "raw", tmp_path / "out", shard_steps=None)
    export_planner(tmp_path / "out", tmp_path / "back")
    assert_same(read_cache(tmp_path / "back"), samples)
    for name in samples:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "raw" / name).read_bytes()


def rewrite(path: Path, change) -> None:
    with np.load(path) as file:
        sample = dict(file)
    change(sample)
    np.savez(path, **sample)


def with_member(path: Path, name: str, data: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {**members, name: data}.items():
            archive.writestr(member, content)


def with_nan(sample):
    sample["lanes"][0, 0, 0] = np.nan


DAMAGE = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-300]), "truncated", ""),
    "empty": (lambda path: path.write_bytes(b""), "truncated", ""),
    "text": (lambda path: path.write_text("no archive"), "decode", ""),
    "flipped": (lambda path: path.write_bytes(path.read_bytes().replace(b"us-nv"[0:1] + b"\0\0\0", b"x\0\0\0", 1)), "decode", ""),
    "pickled": (lambda path: rewrite(path, lambda s: s.update(lanes=np.array([{}], object))), "unsupported", "lanes"),
    "missing": (lambda path: rewrite(path, lambda s: s.pop("route_lanes")), "missing-file", ""),
    "more": (lambda path: rewrite(path, lambda s: s.update(other=np.zeros(2))), "wrong-shape", ""),
    "shape": (lambda path: rewrite(path, lambda s: s.update(lanes=s["lanes"][:-1])), "wrong-shape", "lanes"),
    "dtype": (lambda path: rewrite(path, lambda s: s.update(lanes=s["lanes"].astype("f8"))), "wrong-shape", "lanes"),
    "endian": (lambda path: rewrite(path, lambda s: s.update(lanes=s["lanes"].astype(">f4"))), "unsupported", "lanes"),
    "nan": (lambda path: rewrite(path, with_nan), "non-finite", "lanes"),
    "name": (lambda path: rewrite(path, lambda s: s.update(token=np.array(7))), "wrong-shape", "token"),
    "bomb": (lambda path: with_member(path, "lanes.npy", bytes(2**22)), "too-large", ""),
    "header": (lambda path: with_member(path, "lanes.npy", b"\x93NUMPY\x01\x00\x08\x00{'descr'"), "decode", "lanes"),
    "promise": (
        lambda path: with_member(
            path, "lanes.npy", b"\x93NUMPY\x01\x00\x46\x00" + f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**50},), }}".ljust(69).encode() + b"\n"
        ),
        "truncated",
        "lanes",
    ),
    "hollow": (lambda path: rewrite(path, lambda s: s.update(lanes=s["lanes"][:0])), "unsupported", "lanes"),
    "texts": (lambda path: rewrite(path, lambda s: s.update(token=np.array(["a", "b"]))), "unsupported", "token"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "unsupported", ""),
    "link": (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "unsupported", ""),
}  # fmt: skip


def test_every_broken_file_is_quarantined_with_its_reason_and_all_others_come_back(tmp_path):
    samples = write_cache(tmp_path / "raw", 40)
    names = list(samples)
    expected = {}
    for name, (damage, reason, stream) in zip(names[1:40:2], DAMAGE.values(), strict=False):
        damage(tmp_path / "raw" / name)
        samples.pop(name)
        if reason:
            expected[name] = (reason, stream)
    report = pack(tmp_path / "raw", tmp_path / "out")
    assert report.exit_code == 3
    assert quarantine(tmp_path / "out") == expected
    assert len(PlannerDataset(tmp_path / "out", past_neighbor_num=3, predicted_neighbor_num=3, future_len=24)) == len(
        samples
    )
    export_planner(tmp_path / "out", tmp_path / "back")
    assert_same(read_cache(tmp_path / "back"), samples)
    with pytest.raises(SourceError, match="the recipe says stop"):
        pack(tmp_path / "raw", tmp_path / "strict", strict=True)


def test_a_list_file_says_which_and_in_which_order(tmp_path):
    samples = write_cache(tmp_path / "raw", 12)
    chosen = [*list(samples)[9:2:-2], "gone.npz", list(samples)[9]]
    (tmp_path / "list.json").write_text(json.dumps(chosen))
    report = pack(tmp_path / "raw", tmp_path / "out", reader={"names": str(tmp_path / "list.json")})
    assert report.total_steps == 5
    assert quarantine(tmp_path / "out") == {
        "gone.npz": ("missing-file", ""),
        str(tmp_path / "list.json"): ("duplicate", ""),
    }
    export_planner(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "diffusion_planner_training.json").read_bytes()) == chosen[:4]
    for wrong in ('{"a": 1}', "[1]", '["a\\n.npz"]', "nonsense"):
        (tmp_path / "raw" / "list.json").write_text(wrong)
        with pytest.raises(SourceError, match="expected a JSON list of file names"):
            open_source(tmp_path / "raw", options={"names": "list.json"}).index()
    (tmp_path / "list.json").write_text(json.dumps(["../list.json"]))
    index = open_source(tmp_path / "raw", options={"names": str(tmp_path / "list.json")}).index()
    assert not index.episodes and index.faults[0].reason == "unsupported"


def test_files_in_folders_and_of_several_caches_keep_their_names(tmp_path):
    one = write_cache(tmp_path / "a" / "train" / "x", 3)
    two = write_cache(tmp_path / "b", 3)  # the same names
    pack([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    export_planner(tmp_path / "out", tmp_path / "back")
    expected = {f"a/train/x/{name}": sample for name, sample in one.items()}
    expected |= {f"b/{name}": sample for name, sample in two.items()}
    assert_same(read_cache(tmp_path / "back"), expected)


def test_episodes_are_runs_of_files_named_in_one_text(tmp_path):
    write_cache(tmp_path / "raw", 1)
    whole = next((tmp_path / "raw").iterdir()).read_bytes()
    for number in range(RUN_SAMPLES + 5):
        (tmp_path / "raw" / f"{number:05d}.npz").write_bytes(whole)
    index = open_source(tmp_path / "raw").index()
    assert [ref.num_steps for ref in index.episodes] == [RUN_SAMPLES, 6]
    assert all(isinstance(ref.details["files"], str) for ref in index.episodes)
    assert index.episodes[0].signals is not None and len(index.tensors) == 13


def test_other_recipes_and_other_caches_are_refused(packed, tmp_path):
    folder, _ = packed
    for recipe in ("pi0", "diffusion-planner"):
        with pytest.raises(UsageError, match="--recipe planner-npz"):
            pack(folder / "raw", tmp_path / recipe, recipe)
    write_cache(tmp_path / "raw", 3, agents=2)
    report = pack([folder / "raw", tmp_path / "raw"], folder / "out")
    assert report.exit_code == 3 and {reason for reason, _ in quarantine(folder / "out").values()} == {"wrong-shape"}


def test_texts_are_kept_with_all_their_letters(tmp_path):
    sample = make_sample(1)
    sample["map_name"], sample["token"] = np.array("Zürich/北京"), np.array("")
    (tmp_path / "raw").mkdir()
    np.savez(tmp_path / "raw" / "one.npz", **sample)
    pack(tmp_path / "raw", tmp_path / "out")
    export_planner(tmp_path / "out", tmp_path / "back")
    assert_same(read_cache(tmp_path / "back"), {"one.npz": sample})
