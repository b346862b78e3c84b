"""The metadata is canonical, carries its own digest, and is what Zarr and xarray expect."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import xxhash
import zarr

from pipeline.store.metadata import array_document, array_metadata, read_info, root_document, spec_of
from schemas.dataset import ArraySpec
from schemas.errors import ChecksumError, DatasetError, SchemaError
from tests.pipeline.store_builder import Built, build_dataset, frame_spec, row_spec


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("metadata") / "out")


def test_zarr_opens_the_group_with_names_and_attributes(built: Built) -> None:
    group = zarr.open_group(built.root, mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert set(group.array_keys()) == set(built.specs)
    for name, spec in built.specs.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert array.metadata.dimension_names == spec.dims  # type: ignore[union-attr]
        expected = {**dict(spec.attributes), **({"valid_array": spec.valid_array} if spec.valid_array else {})}
        assert dict(array.attrs) == expected
        np.testing.assert_array_equal(array[...], built.arrays[name])
        alone = zarr.open_array(built.root / name, mode="r")
        assert alone.shape == array.shape


def test_xarray_opens_it_with_coordinates_and_without_a_warning(built: Built) -> None:
    for chunks in ({}, None):
        ds = xr.open_zarr(built.root, chunks=chunks)
        assert set(ds.coords) == {"episode_index", "timestamp_s"}
        assert ds.sizes["step"] == 21
        assert ds.timestamp_s.attrs["units"] == "s"
        assert ds.rgb_main.dtype == np.uint8
        for name, values in built.arrays.items():
            np.testing.assert_array_equal(ds[name].values, values)


def test_the_root_is_canonical_json_with_the_digest_of_its_zeroed_self(built: Built) -> None:
    raw = (built.root / "zarr.json").read_bytes()
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode("ascii")
    digest = json.loads(raw)["attributes"]["headrace"]["metadata_xxh3"]
    assert raw.count(digest.encode()) == 1
    assert xxhash.xxh3_128_hexdigest(raw.replace(digest.encode(), b"0" * 32)) == digest


def test_an_arrays_document_is_its_entry_in_the_root(built: Built) -> None:
    raw = (built.root / "zarr.json").read_bytes()
    for name in built.specs:
        assert (built.root / name / "zarr.json").read_bytes() in raw


def test_info_says_what_was_written(built: Built) -> None:
    info = read_info(built.root)
    assert read_info(str(built.root)) == info
    assert (info.generation, info.num_steps, info.num_episodes, info.shard_steps) == (1, 21, 3, 8)
    assert info.recipe == {"name": "test", "action_dim": 32, "horizon": 4}
    assert info.lengths == {name: len(values) for name, values in built.arrays.items()}
    assert info.tables["steps"].path == "_tables/steps-1.parquet"
    assert info.tables["steps"].nbytes == (built.root / "_tables" / "steps-1.parquet").stat().st_size
    assert info.arrays.keys() == built.specs.keys()
    for name, spec in built.specs.items():
        assert dict(info.arrays[name].attributes) == dict(spec.attributes)
        assert array_metadata(info.arrays[name], 5) == array_metadata(spec, 5)


@pytest.mark.parametrize("codec", ["raw", "zstd", "blosc:zstd", "blosc:lz4", "jpeg:90"])
def test_a_specification_comes_back_from_its_metadata(codec: str) -> None:
    dtypes = ["uint8"] if codec.startswith("jpeg") else ["uint8", "float16", "float32"]
    for dtype in dtypes:
        spec = frame_spec("main", (6, 4), shard_steps=8, codec=codec, dtype=dtype)
        assert spec_of("rgb_main", json.loads(array_document(spec, 3))) == sorted_attributes(spec)


def sorted_attributes(spec: ArraySpec) -> ArraySpec:
    from dataclasses import replace

    return replace(spec, attributes=tuple(sorted(spec.attributes)))


def test_the_order_of_arrays_and_attributes_does_not_matter() -> None:
    specs = {name: row_spec(name, "float32", (2,), chunk_steps=4, shard_steps=8) for name in ("b", "a")}
    attributes: dict[str, Any] = {
        "num_steps": 3,
        "num_episodes": 1,
        "generation": 1,
        "shard_steps": 8,
        "tables": {},
        "recipe": {},
    }
    first = root_document({name: (spec, 3) for name, spec in specs.items()}, attributes)
    backwards = {name: (specs[name], 3) for name in reversed(specs)}
    assert root_document(backwards, dict(reversed(attributes.items()))) == first


def test_arrays_of_other_lengths_than_the_dataset_are_refused() -> None:
    spec = row_spec("state", "float32", (2,), chunk_steps=4, shard_steps=8)
    with pytest.raises(SchemaError, match="expected state of 3 steps"):
        root_document({"state": (spec, 4)}, {"num_steps": 3, "num_episodes": 1, "tables": {}})


def edited(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the root changed and with a right digest, as another writer might make it."""
    document = json.loads(raw)
    change(document)
    headrace = document["attributes"]["headrace"]
    headrace["metadata_xxh3"] = "0" * 32
    dump = {"sort_keys": True, "separators": (",", ":")}
    headrace["metadata_xxh3"] = xxhash.xxh3_128_hexdigest(json.dumps(document, **dump).encode())  # type: ignore[arg-type]
    return json.dumps(document, **dump).encode()  # type: ignore[arg-type]


def test_the_editor_of_these_tests_keeps_the_digest_right(built: Built, tmp_path: Path) -> None:
    raw = (built.root / "zarr.json").read_bytes()
    assert edited(raw, lambda document: None) == raw


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["attributes"]["headrace"].pop("generation"),
        lambda d: d["attributes"]["headrace"].update(tables=[]),
        lambda d: d["attributes"]["headrace"].update(tables={"steps": {"path": "x"}}),
        lambda d: d["attributes"]["headrace"]["tables"]["steps"].update(path="../../secrets"),
        lambda d: d.update(consolidated_metadata=None),
        lambda d: d["consolidated_metadata"]["metadata"]["state"].update(codecs=[]),
        lambda d: d["consolidated_metadata"]["metadata"]["state"].update(shape=[]),
        lambda d: d["consolidated_metadata"]["metadata"]["state"].update(dimension_names=None),
        lambda d: d["consolidated_metadata"]["metadata"]["state"].update(fill_value=1.0),
        lambda d: d["consolidated_metadata"]["metadata"]["state"].update(data_type="complex64"),
        lambda d: d["consolidated_metadata"]["metadata"].update(
            {"../x": d["consolidated_metadata"]["metadata"]["state"]}
        ),
        lambda d: d["consolidated_metadata"]["metadata"]["state"]["shape"].__setitem__(0, 20),
    ],
)
def test_metadata_of_another_writer_is_refused_in_one_line(
    built: Built, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    (tmp_path / "zarr.json").write_bytes(edited((built.root / "zarr.json").read_bytes(), change))
    with pytest.raises(DatasetError, match="expected metadata as this version writes it") as caught:
        read_info(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_foreign_version_is_refused_by_its_number(built: Built, tmp_path: Path) -> None:
    raw = (built.root / "zarr.json").read_bytes()
    for version in (99, "1", None):
        changed = edited(raw, lambda document, v=version: document["attributes"]["headrace"].update(format_version=v))
        (tmp_path / "zarr.json").write_bytes(changed)
        with pytest.raises(DatasetError, match=re.escape(f"expected format_version 1, found {version!r}")):
            read_info(tmp_path)


def test_any_change_of_the_bytes_is_refused(built: Built, tmp_path: Path) -> None:
    raw = (built.root / "zarr.json").read_bytes()
    (tmp_path / "zarr.json").write_bytes(raw)
    assert read_info(tmp_path).num_steps == 21
    changes = [
        raw[:-1],
        raw[: len(raw) // 2],
        raw + b" ",
        raw + b"\n",
        b" " + raw,
        raw.replace(b'"generation":1', b'"generation":2'),
    ]
    changes += [raw.replace(b'"generation":1', b'"generation":1,"generation":1'), raw.replace(b"[21]", b"[22]")]
    changes += [raw.replace(b'"num_steps":21', b'"num_steps":NaN'), raw.replace(b"21", b"2e1")]
    for changed in changes:
        (tmp_path / "zarr.json").write_bytes(changed)
        with pytest.raises(DatasetError, match=re.escape("zarr.json")):
            read_info(tmp_path)
    (tmp_path / "zarr.json").write_bytes(raw.replace(b"rgb_main", b"rgb_mbin"))
    with pytest.raises(ChecksumError):
        read_info(tmp_path)


def test_what_is_no_dataset_is_refused_with_what_it_is(built: Built, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / ".zgroup").write_text('{"zarr_format":2}')
    zarr.open_group(tmp_path / "foreign", mode="w", zarr_format=3)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished.work").mkdir()
    (tmp_path / "unfinished.work" / "plan.json").write_text("{}")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "zarr.json").write_bytes((built.root / "zarr.json").read_bytes()[:1000])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "zarr.json").write_bytes(b"[" * 100_000)
    expected = {
        "absent": "found nothing",
        "file": "found a file",
        "empty": "found no zarr.json",
        "v2": "found a Zarr v2 store",
        "foreign": "found other Zarr metadata",
        "unfinished": "found an unfinished conversion",
        "half": "expected JSON",
        "deep": "expected JSON",
    }
    for name, message in expected.items():
        with pytest.raises(DatasetError, match=message) as caught:
            read_info(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert ";" in str(caught.value)  # says what to do next
