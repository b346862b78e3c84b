"""The dataset's Parquet tables: page checksums, bytes that depend on the rows alone, digests checked at every read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store.atomic import AtomicFile, Bytes, read_regular, xxh3_hex
from pipeline.store.metadata import DatasetInfo, TableRef
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import ChecksumError, DatasetError, SchemaError

ROW_GROUP_ROWS = 65_536
"""Rows a group, however they arrive: memory while writing, and bytes that do not depend on the batches."""

EPISODES = pa.schema(
    [
        ("episode_index", pa.int32()),
        ("key", pa.string()),
        ("source", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("rate_hz", pa.float64()),
        ("rate_measured_hz", pa.float64()),
        ("jitter_s", pa.float64()),
        ("instructions", pa.list_(pa.string())),
        ("views", pa.list_(pa.string())),
        ("num_invalid", pa.int64()),
        ("valid", pa.bool_()),
        ("digest", pa.string()),
        ("details", pa.string()),
        ("generation", pa.int32()),
        ("replaced_by", pa.int32()),
    ]
)
"""One row an episode; ``views`` are the target views it has, ``details`` is JSON, ``generation`` is the one that it came with.

``replaced_by`` is the ``episode_index`` of the episode that stands for it since, or -1; a replaced one is not ``valid``.
"""

TASKS = pa.schema([("task_index", pa.int32()), ("task", pa.string())])
"""One row a distinct instruction."""

MAPS = pa.schema([("town", pa.string()), ("xxh3", pa.string()), ("document", pa.binary())])
"""One row a map of a tracks store: its file as it was given, and the digest of that."""

QUARANTINE = pa.schema(
    [
        ("source", pa.string()),
        ("episode", pa.string()),
        ("stream", pa.string()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("path", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("generation", pa.int32()),
        ("is_warning", pa.bool_()),
    ]
)
"""One row a piece of input that was refused, left out, or (``is_warning``) served all the same; ``[start, stop)`` are recorded steps."""

MANIFEST = pa.schema(
    [
        ("kind", pa.string()),
        ("array", pa.string()),
        ("shard", pa.int64()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("path", pa.string()),
        ("nbytes", pa.int64()),
        ("xxh3", pa.string()),
        ("chunk_crc32c", pa.list_(pa.uint32())),
        ("episode", pa.string()),
        ("episode_index", pa.int32()),
    ]
)
"""One row a shard file (``kind`` shard) and one a source file (``kind`` source), of the episode of that index."""
SOURCES = pa.schema([MANIFEST.field(name) for name in ("episode", "episode_index", "path", "nbytes", "xxh3")])
"""What the manifest says of a source file."""

SCHEMAS = {"episodes": EPISODES, "tasks": TASKS, "maps": MAPS, "quarantine": QUARANTINE, "manifest": MANIFEST}
"""Tables whose columns are the same in every dataset."""

_LEADING = ("episode_index", "step_in_episode", "timestamp_s", "source_step", "task_index", "valid")
_TRAILING = ("align_error_s",)


def steps_schema(specs: Mapping[str, ArraySpec]) -> pa.Schema:
    """Return the schema of the steps table: a column for each array of small rows along ``step``.

    ``step_in_episode`` is added behind ``episode_index``, the mask ``rgb_<view>_valid`` is called ``<view>_valid``,
    and an array of rows with several values becomes one ``fixed_size_list`` column with its features named in the
    field's metadata.
    """
    columns = {
        spec.name: _step_field(spec) for spec in specs.values() if spec.dims[0] == "step" and len(spec.dims) <= 2
    }
    columns["step_in_episode"] = pa.field("step_in_episode", pa.int32())
    masks = sorted({spec.valid_array for spec in specs.values() if spec.valid_array} & columns.keys())
    others = sorted(columns.keys() - {*_LEADING, *_TRAILING, *masks})
    order = [*_LEADING, *masks, *others, *_TRAILING]
    return pa.schema([columns[name] for name in order if name in columns])


def steps_batch(schema: pa.Schema, rows: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Return one batch of the steps table from rows of the dataset's arrays, by array name, and ``step_in_episode``."""
    columns = []
    for field in schema:
        values = np.ascontiguousarray(rows[array_of(field)])
        if pa.types.is_fixed_size_list(field.type):
            flat = pa.array(values.reshape(-1), field.type.value_type)
            columns.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
        else:
            columns.append(pa.array(values, field.type))
    return pa.record_batch(columns, schema=schema)


def array_of(field: pa.Field) -> str:
    """Return the array that a column of the steps table holds."""
    return (field.metadata or {}).get(b"array", field.name.encode()).decode()


def write_table(
    path: Path, rows: pa.Table | Iterable[pa.RecordBatch], tmp: Path, *, schema: pa.Schema | None = None
) -> TableRef:
    """Write a Parquet file atomically and return what the root says of it.

    Parameters
    ----------
    path
        ``<dataset>/_tables/<name>-<generation>.parquet``.
    rows
        A table, or batches as they come: no more than a row group and a batch are held.
    tmp
        Folder for the unfinished file, on the same file system.
    schema
        Expected schema; needed where there may be no batch at all.

    Raises
    ------
    SchemaError
        Batches of another schema, or none of them and no ``schema``.
    """
    batches: Iterator[pa.RecordBatch] = iter(rows.to_batches() if isinstance(rows, pa.Table) else rows)
    if schema is None and isinstance(rows, pa.Table):
        schema = rows.schema
    first = next(batches, None)
    schema = schema or (first.schema if first is not None else None)
    if schema is None:
        raise SchemaError(f"expected a schema or a first batch for {path.name}, found neither; report this as a bug")
    with AtomicFile(path, tmp) as file:
        with pq.ParquetWriter(file, schema, compression="zstd", version="2.6", write_page_checksum=True) as writer:
            for group in _row_groups(first, batches, schema):
                writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
        ref = TableRef(path=f"{path.parent.name}/{path.name}", nbytes=file.nbytes, xxh3=file.xxh3())
        file.commit()
    return ref


def write_document(path: Path, data: Bytes, tmp: Path) -> TableRef:
    """Write a file of ``_tables`` that is no Parquet, such as ``norm_stats-<gen>.json``, like :func:`write_table`."""
    with AtomicFile(path, tmp) as file:
        file.write(data)
        ref = TableRef(path=f"{path.parent.name}/{path.name}", nbytes=file.nbytes, xxh3=file.xxh3())
        file.commit()
    return ref


def read_document(info: DatasetInfo, name: str) -> bytes:
    """Return a file of ``_tables`` whole, size and digest verified."""
    ref = info.tables.get(name)
    if ref is None:
        raise DatasetError(f"expected one of the tables {sorted(info.tables)}, found {name!r}; see `headrace info`")
    try:
        data = read_regular(info.root / ref.path)
    except FileNotFoundError:
        raise DatasetError(
            "expected a table, found no such file; run `headrace verify --repair`", file=ref.path
        ) from None
    except OSError as error:
        raise DatasetError(
            f"expected a table, found: {error.strerror}; run `headrace verify --repair`", file=ref.path
        ) from error
    if len(data) != ref.nbytes:
        raise ChecksumError(
            f"expected {ref.nbytes} bytes, found {len(data)}; run `headrace verify --repair`", file=ref.path
        )
    found = xxh3_hex(data)
    if found != ref.xxh3:
        raise ChecksumError(f"expected xxh3 {ref.xxh3}, found {found}; run `headrace verify --repair`", file=ref.path)
    return data


def read_table(info: DatasetInfo, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a table of the dataset, or some of its columns; digest and page checksums verified.

    Raises
    ------
    DatasetError
        There is no such table or column, or another version of Headrace wrote it with other columns.
    ChecksumError
        The file is not the one that was committed.
    """
    data = read_document(info, name)
    path = info.tables[name].path
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            wanted = dict.fromkeys([*(SCHEMAS[name].names if name in SCHEMAS else ()), *(columns or ())])
            missing = [column for column in wanted if column not in file.schema_arrow.names]
            if missing:
                raise DatasetError(
                    f"expected columns {list(wanted)}, found none called {missing}; convert again, "
                    "or read it with the version of Headrace that wrote it",
                    file=path,
                )
            return file.read(columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError) as error:
        raise ChecksumError(
            f"expected a sound Parquet file, found {error}; run `headrace verify --repair`", file=path
        ) from error


def manifest_table(shards: Iterable[ShardRow], sources: pa.Table) -> pa.Table:
    """Return the manifest: shard rows ordered by array and number, then source files in the order given.

    Parameters
    ----------
    shards
        One row a shard file.
    sources
        Of schema ``SOURCES``: there may be millions of them, of which no Python objects are made.
    """
    ordered = sorted(shards, key=lambda row: row.key)
    columns = {
        "kind": ["shard"] * len(ordered),
        "array": [row.array for row in ordered],
        "shard": [row.shard for row in ordered],
        "start": [row.start for row in ordered],
        "stop": [row.stop for row in ordered],
        "path": [row.path for row in ordered],
        "nbytes": [row.nbytes for row in ordered],
        "xxh3": [row.xxh3 for row in ordered],
        "chunk_crc32c": _crc_lists(ordered),
        "episode": [""] * len(ordered),
        "episode_index": [-1] * len(ordered),
    }
    same = {"kind": "source", "array": "", "shard": 0, "start": 0, "stop": 0, "chunk_crc32c": []}
    files = {
        field.name: _repeated(pa.scalar(same[field.name], field.type), len(sources))
        if field.name in same
        else sources[field.name]
        for field in MANIFEST
    }
    parts = [pa.table(part, schema=MANIFEST) for part in (columns, files)]
    return pa.concat_tables(parts).combine_chunks()


def _repeated(value: pa.Scalar, num: int) -> pa.Array:
    return pa.repeat(value, num) if num else pa.array([], value.type)  # repeat makes no list of lists zero times


def manifest_rows(table: pa.Table) -> dict[tuple[str, int], ShardRow]:
    """Return the manifest's shard rows by array and number."""
    from pyarrow.compute import equal  # loaders do without: importing it takes longer than all else here

    shards = table.filter(equal(table["kind"], "shard")).combine_chunks()
    crcs = _crc_tuples(shards["chunk_crc32c"].combine_chunks())
    columns = shards.drop_columns(["kind", "chunk_crc32c", "episode", "episode_index"]).to_pylist()
    rows = (ShardRow(**values, chunk_crc32c=checksums) for values, checksums in zip(columns, crcs, strict=True))
    return {row.key: row for row in rows}


def _step_field(spec: ArraySpec) -> pa.Field:
    value = pa.from_numpy_dtype(np.dtype(spec.dtype))
    metadata: dict[str, str] = {}
    name = spec.name
    if name.startswith("rgb_") and name.endswith("_valid"):
        name, metadata = name.removeprefix("rgb_"), {"array": spec.name}
    if not spec.row_shape:
        return pa.field(name, value, metadata=metadata or None)
    features = dict(spec.attributes).get("features")
    if features:
        metadata["features"] = ",".join(features)
    return pa.field(name, pa.list_(value, spec.row_shape[0]), metadata=metadata or None)


def _row_groups(
    first: pa.RecordBatch | None, batches: Iterator[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.Table]:
    """Cut batches of any length into groups of exactly ROW_GROUP_ROWS, the last but one excepted."""
    held: list[pa.RecordBatch] = []
    num_rows = 0
    batch = first
    while batch is not None:
        if not batch.schema.equals(schema):
            raise SchemaError(f"expected batches of {schema}, found {batch.schema}; report this as a bug")
        held.append(batch)
        num_rows += batch.num_rows
        while num_rows >= ROW_GROUP_ROWS:
            table = pa.Table.from_batches(held, schema)
            yield table.slice(0, ROW_GROUP_ROWS).combine_chunks()
            held = table.slice(ROW_GROUP_ROWS).to_batches()
            num_rows -= ROW_GROUP_ROWS
        batch = next(batches, None)
    if num_rows:
        yield pa.Table.from_batches(held, schema).combine_chunks()


def _crc_lists(rows: Sequence[ShardRow]) -> pa.Array:
    """Return one list a row; built from flat NumPy buffers, since a million steps are millions of checksums."""
    offsets = np.cumsum([0, *(len(row.chunk_crc32c) for row in rows)], dtype=np.int32)
    values = [crc for row in rows for crc in row.chunk_crc32c]
    absent = np.array([crc is None for crc in values], np.bool_)
    flat = np.array([crc or 0 for crc in values], np.uint32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=absent))


def _crc_tuples(lists: pa.ListArray) -> list[tuple[int | None, ...]]:
    flat = lists.flatten()
    values = flat.fill_null(0).to_numpy(zero_copy_only=False).astype(object)
    values[flat.is_null().to_numpy(zero_copy_only=False)] = None
    ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)).tolist()
    listed = values.tolist()
    return [tuple(listed[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]
