"""Tables: bytes that depend on the rows alone, damage that is always found."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store import tables
from pipeline.store.metadata import DatasetInfo, TableRef, read_info
from pipeline.store.tables import (
    manifest_rows,
    manifest_table,
    read_document,
    read_table,
    steps_batch,
    steps_schema,
    write_table,
)
from schemas.dataset import ShardRow
from schemas.errors import ChecksumError, DatasetError, SchemaError
from tests.pipeline.store_builder import Built, build_dataset


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("tables") / "out")


@pytest.fixture(scope="module")
def info(built: Built) -> DatasetInfo:
    return read_info(built.root)


def test_the_steps_table_holds_the_arrays_row_by_row(built: Built, info: DatasetInfo) -> None:
    table = read_table(info, "steps")
    assert table.column_names == [
        "episode_index",
        "step_in_episode",
        "timestamp_s",
        "source_step",
        "task_index",
        "valid",
        "main_valid",
        "side_valid",
        "actions",
        "state",
        "align_error_s",
    ]
    assert table.schema.field("state").type == pa.list_(pa.float32(), 3)
    assert table.schema.field("main_valid").type == pa.bool_()
    for column in table.column_names:
        array = {"main_valid": "rgb_main_valid", "side_valid": "rgb_side_valid"}.get(column, column)
        if array in built.arrays:
            np.testing.assert_array_equal(np.array(table[column].to_pylist()), built.arrays[array])
    assert table["step_in_episode"].to_pylist() == [*range(5), *range(9), *range(7)]


def test_any_parquet_reader_reads_the_tables(built: Built, info: DatasetInfo) -> None:
    for name in ("episodes", "steps", "tasks", "manifest", "quarantine"):
        assert pq.read_table(built.root / info.tables[name].path).equals(read_table(info, name))


def test_columns_can_be_chosen_and_unknown_ones_are_refused(info: DatasetInfo) -> None:
    assert read_table(info, "episodes", ["stop", "key"]).column_names == ["stop", "key"]
    with pytest.raises(DatasetError, match="nonsense"):
        read_table(info, "episodes", ["key", "nonsense"])
    with pytest.raises(DatasetError, match="expected one of the tables"):
        read_table(info, "nonsense")


@pytest.mark.parametrize("name", ["episodes", "tasks", "quarantine", "manifest"])
def test_a_table_of_another_version_is_refused_with_its_columns_named(name, info, tmp_path):
    whole = read_table(info, name)
    for column in whole.column_names:
        ref = write_table(tmp_path / "_tables" / f"{name}-1.parquet", whole.drop_columns([column]), tmp_path)
        older = replace(info, root=tmp_path, tables={**info.tables, name: ref})
        with pytest.raises(DatasetError, match=rf"found none called \['{column}'\]; convert again"):
            read_table(older, name)
        with pytest.raises(DatasetError, match=rf"found none called \['{column}'\]"):
            read_table(older, name, whole.column_names[:1])


def schema() -> pa.Schema:
    return pa.schema(
        [
            ("a", pa.int64()),
            ("b", pa.bool_()),
            ("s", pa.string()),
            ("v", pa.list_(pa.float32(), 2)),
            ("n", pa.list_(pa.uint32())),
        ]
    )


def rows_of(start: int, stop: int) -> pa.RecordBatch:
    steps = range(start, stop)
    columns = [
        pa.array(steps, pa.int64()),
        pa.array([step % 3 == 0 for step in steps], pa.bool_()),
        pa.array([f"text {step % 7}" for step in steps], pa.string()),
        pa.array([[step, -step] for step in steps], pa.list_(pa.float32(), 2)),
        pa.array([[step, None] if step % 2 else [] for step in steps], pa.list_(pa.uint32())),
    ]
    return pa.record_batch(columns, schema=schema())


@given(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_bytes_do_not_depend_on_how_the_rows_arrive(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    root = tmp_path_factory.mktemp("batches")
    bounds = [0, *sorted(cuts), 60]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROW_GROUP_ROWS", 16)
        whole = write_table(root / "_tables" / "t-1.parquet", pa.Table.from_batches([rows_of(0, 60)]), root / "tmp")
        pieces = (rows_of(start, stop) for start, stop in pairwise(bounds))
        streamed = write_table(root / "_tables" / "t-1.parquet", pieces, root / "tmp", schema=schema())
    assert streamed == whole
    file = pq.ParquetFile(root / "_tables" / "t-1.parquet")
    assert [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)] == [16, 16, 16, 12]
    assert file.read().equals(pa.Table.from_batches([rows_of(0, 60)]))


def peak_nbytes(path: Path, num_rows: int) -> int:
    """Return the most memory Arrow held while a stream of ``num_rows`` was written."""
    numbers = pa.schema([("x", pa.int64())])
    before, peak = pa.total_allocated_bytes(), 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal peak
        for start in range(0, num_rows, 10_000):
            peak = max(peak, pa.total_allocated_bytes() - before)
            yield pa.record_batch([np.arange(start, start + 10_000)], schema=numbers)

    write_table(path, batches(), path.parent / "tmp", schema=numbers)
    assert pq.read_metadata(path).num_rows == num_rows
    return peak


def test_memory_does_not_grow_with_the_rows_that_stream(tmp_path: Path) -> None:
    path = tmp_path / "_tables" / "x-1.parquet"
    assert peak_nbytes(path, 2_000_000) <= 1.2 * peak_nbytes(path, 500_000)


def test_an_empty_table_needs_a_schema_and_other_batches_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "_tables" / "t-1.parquet"
    write_table(path, iter(()), tmp_path / "tmp", schema=schema())
    assert pq.read_table(path).schema.equals(schema())
    with pytest.raises(SchemaError, match="found neither"):
        write_table(path, iter(()), tmp_path / "tmp")
    other = pa.record_batch({"x": pa.array([1])})
    with pytest.raises(SchemaError, match="expected batches"):
        write_table(path, iter([rows_of(0, 2), other]), tmp_path / "tmp")
    assert pq.read_table(path).num_rows == 0  # what was there stays


def test_pages_carry_checksums(built: Built, info: DatasetInfo, tmp_path: Path) -> None:
    data = bytearray((built.root / info.tables["episodes"].path).read_bytes())
    chunk = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0).column(3)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size - 3] ^= 1
    (tmp_path / "_tables").mkdir()
    (tmp_path / "_tables" / "episodes-1.parquet").write_bytes(data)
    ref = TableRef(path="_tables/episodes-1.parquet", nbytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
    # the digest is of the damaged file, and so hides the damage from the first check
    damaged = replace(info, root=tmp_path, tables={"episodes": ref})
    with pytest.raises(ChecksumError, match="expected a sound Parquet file"):
        read_table(damaged, "episodes")


def test_damaged_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    built = build_dataset(tmp_path / "out", episode_lengths=(3,))
    info = read_info(built.root)
    for name, ref in info.tables.items():
        path = built.root / ref.path
        data = path.read_bytes()
        for changed in (data[:-1], b"", data + b"\0", data[:9] + bytes([data[9] ^ 4]) + data[10:]):
            path.write_bytes(changed)
            with pytest.raises(ChecksumError, match=ref.path):
                read_document(info, name)
        path.unlink()
        with pytest.raises(DatasetError, match=f"file {ref.path}: expected a table"):
            read_document(info, name)


def shard_row(array: str, shard: int, crcs: Sequence[int | None]) -> ShardRow:
    path = f"{array}/c.{shard}.0.0.0"
    return ShardRow(
        array=array,
        shard=shard,
        start=8 * shard,
        stop=8 * shard + len(crcs),
        path=path,
        nbytes=shard,
        xxh3="ab",
        chunk_crc32c=tuple(crcs),
    )


checksums = st.lists(st.none() | st.integers(0, 2**32 - 1), max_size=5)


@given(st.lists(checksums, max_size=5))
def test_manifest_rows_come_back_by_array_and_shard(lists: list[list[int | None]]) -> None:
    written = [shard_row("ab"[k % 2], k, crcs) for k, crcs in enumerate(lists)]
    sources = [{"episode": "e", "episode_index": 0, "path": "p", "nbytes": 3, "xxh3": "cd"}]
    table = manifest_table(reversed(written), pa.Table.from_pylist(sources, tables.SOURCES))
    assert table.schema.equals(tables.MANIFEST)
    assert manifest_rows(table) == {row.key: row for row in written}
    keys = [(array, shard) for array, shard in zip(table["array"].to_pylist(), table["shard"].to_pylist(), strict=True)]
    assert keys[:-1] == sorted(keys[:-1])
    assert table.slice(table.num_rows - 1).to_pylist()[0]["kind"] == "source"
    split = pa.concat_tables([table.slice(k, 1) for k in range(table.num_rows)])
    assert manifest_rows(split) == manifest_rows(table)


def test_steps_batches_of_no_rows_and_of_other_features_work(built: Built) -> None:
    names = steps_schema(built.specs)
    assert names.field("main_valid").metadata == {b"array": b"rgb_main_valid"}
    batch = steps_batch(
        names, {name: values[:0] for name, values in built.arrays.items()} | {"step_in_episode": np.zeros(0, np.int32)}
    )
    assert batch.num_rows == 0
