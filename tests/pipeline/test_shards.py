"""Shards are what Zarr v3 says, streamed and atomic; zarr-python reads them, for ever."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zarr
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.atomic import AtomicFile, crc32c, write_atomic, xxh3_hex
from pipeline.store.chunk_codecs import decode_chunk, encode_chunk
from pipeline.store.metadata import array_document
from pipeline.store.shards import ABSENT, ShardReader, ShardWriter, shard_path
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import ChecksumError, DatasetError, SchemaError


def castagnoli(data: bytes) -> int:
    """Return the crc32c bit by bit, as RFC 3720 defines it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def frames(
    codec: str = "raw", dtype: str = "uint8", *, shard_steps: int = 4, size: tuple[int, int] = (3, 2)
) -> ArraySpec:
    return ArraySpec(
        name="rgb_main",
        dims=("step", "height_main", "width_main", "rgb"),
        row_shape=(*size, 3),
        dtype=dtype,
        chunk_steps=1,
        shard_steps=shard_steps,
        codec=codec,
        valid_array="rgb_main_valid",
    )


def rows(
    dtype: str = "float32", shape: tuple[int, ...] = (2,), *, chunk_steps: int = 3, shard_steps: int = 6
) -> ArraySpec:
    dims = ("step", *(f"feature{k}" for k in range(len(shape))))
    return ArraySpec(
        name="state", dims=dims, row_shape=shape, dtype=dtype, chunk_steps=chunk_steps, shard_steps=shard_steps
    )


def values_of(spec: ArraySpec, length: int) -> np.ndarray:
    """Return rows whose values encode their position, of any dtype."""
    flat = np.arange(1, 1 + length * int(np.prod(spec.row_shape)))
    dtype = np.dtype(spec.dtype)
    if dtype.kind in "biu":
        flat = flat % (2 if dtype.kind == "b" else 120)
    return flat.reshape(length, *spec.row_shape).astype(dtype)


def write(root: Path, spec: ArraySpec, values: np.ndarray, absent: tuple[int, ...] = ()) -> list[ShardRow]:
    written = []
    for shard, start in enumerate(range(0, len(values), spec.shard_steps)):
        with ShardWriter(root, spec, shard, root / "tmp") as writer:
            for step in range(start, min(start + spec.shard_steps, len(values)), spec.chunk_steps):
                block = values[step : min(step + spec.chunk_steps, start + spec.shard_steps)]
                writer.put(None if step in absent else block)
            written.append(writer.commit())
    write_atomic(root / spec.name / "zarr.json", array_document(spec, len(values)), root / "tmp")
    return written


DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "uint64", "float16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_zarr_reads_rows_of_every_dtype_with_a_partly_filled_last_chunk(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    spec = rows(dtype, shape)
    for length in (1, 3, 6, 7, 17):
        root = tmp_path / str(length)
        values = values_of(spec, length)
        write(root, spec, values)
        array = zarr.open_array(root / spec.name, mode="r")
        assert array.dtype == values.dtype
        np.testing.assert_array_equal(array[:], values)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "blosc:zstd", "blosc:lz4"])
def test_zarr_reads_frames_absent_chunks_and_wholly_absent_shards(tmp_path: Path, codec: str, dtype: str) -> None:
    spec = frames(codec, dtype)
    values = values_of(spec, 14)
    absent = (1, 4, 5, 6, 7, 13)
    written = write(tmp_path, spec, values, absent)
    expected = values.copy()
    expected[list(absent)] = 0
    np.testing.assert_array_equal(zarr.open_array(tmp_path / spec.name, mode="r")[:], expected)
    assert [row.chunk_crc32c.count(None) for row in written] == [1, 4, 0, 1]
    assert written[1].nbytes == 4 * 16 + 4
    assert sorted(os.listdir(tmp_path / spec.name)) == [*(f"c.{k}.0.0.0" for k in range(4)), "zarr.json"]


@pytest.mark.parametrize("codec", ["raw", "zstd", "blosc:zstd", "blosc:lz4"])
def test_the_bytes_are_those_that_zarr_would_write(tmp_path: Path, codec: str) -> None:
    spec = frames(codec, "float32")
    values = values_of(spec, 8)
    write(tmp_path, spec, values)
    document = json.loads(array_document(spec, 8))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "zarr.json").write_text(json.dumps(document))
    zarr.open_array(tmp_path / "other", mode="r+")[:] = values
    for name in ("c.0.0.0.0", "c.1.0.0.0"):
        assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "rgb_main" / name).read_bytes()


@given(
    length=st.integers(1, 40),
    chunk_steps=st.integers(1, 5),
    chunks_per_shard=st.integers(1, 5),
    bounds=st.tuples(st.integers(0, 25), st.integers(0, 25)),
)
def test_rows_are_slices_of_what_was_put(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    chunk_steps: int,
    chunks_per_shard: int,
    bounds: tuple[int, int],
) -> None:
    root = tmp_path_factory.mktemp("rows")
    spec = rows(chunk_steps=chunk_steps, shard_steps=chunk_steps * chunks_per_shard)
    values = values_of(spec, length)
    for row in write(root, spec, values):
        with ShardReader(root / row.path, spec, row) as reader:
            held = values[row.start : row.stop]
            start, stop = (min(bound, len(held)) for bound in sorted(bounds))
            np.testing.assert_array_equal(reader.rows(start, stop), held[start:stop])
            whole = np.empty_like(held)
            assert reader.raw_rows(whole)
            np.testing.assert_array_equal(whole, held)


def test_rows_in_one_read_are_none_if_anything_is_not_as_committed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.store.shards._PARTS", 2)
    spec = rows(chunk_steps=3, shard_steps=12)
    path, row = tmp_path / shard_path(spec, 1), write(tmp_path, spec, values_of(spec, 23))[1]
    data, out = path.read_bytes(), np.empty((11, 2), np.float32)
    for position in range(4 * (3 * 8 + 4)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with ShardReader(path, spec, row) as reader:
            assert not reader.raw_rows(out)
    path.write_bytes((tmp_path / shard_path(spec, 0)).read_bytes())
    with ShardReader(path, spec, row) as reader:
        assert not reader.raw_rows(out)
        assert not reader.raw_rows(out[:8])  # fewer chunks than are committed
    path.write_bytes(data)
    with ShardReader(path, spec, row) as reader:
        assert reader.raw_rows(out)
        os.truncate(path, 40)
        assert not reader.raw_rows(out)


def test_a_manifest_row_holds_the_files_digest_and_each_chunks_checksum(tmp_path: Path) -> None:
    spec = rows()
    values = values_of(spec, 10)
    full, partial = write(tmp_path, spec, values)
    for row in (full, partial):
        data = (tmp_path / row.path).read_bytes()
        assert row.nbytes == len(data)
        assert row.xxh3 == xxhash.xxh3_128_hexdigest(data)
    assert (full.start, full.stop, full.path) == (0, 6, "state/c.0.0")
    assert (partial.start, partial.stop, partial.path) == (6, 10, "state/c.1.0")
    assert full.chunk_crc32c == tuple(castagnoli(values[k : k + 3].tobytes()) for k in (0, 3))
    # the last chunk holds one committed row: its checksum is of that row alone, though zeros fill the chunk
    assert partial.chunk_crc32c == tuple(castagnoli(values[a:b].tobytes()) for a, b in ((6, 9), (9, 10)))


def test_chunks_lie_in_step_order_without_gaps_and_the_index_says_where(tmp_path: Path) -> None:
    spec = frames()
    (row,) = write(tmp_path, spec, values_of(spec, 4), absent=(1,))
    data = (tmp_path / row.path).read_bytes()
    index = np.frombuffer(data[-68:-4], "<u8").reshape(4, 2).tolist()
    assert index == [[0, 22], [ABSENT, ABSENT], [22, 22], [44, 22]]
    assert struct.unpack("<I", data[-4:])[0] == castagnoli(data[-68:-4])
    assert struct.unpack("<I", data[18:22])[0] == castagnoli(data[:18])


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for codec in ("raw", "zstd"):
        spec = frames(codec)
        first = write(tmp_path / "a" / codec, spec, values_of(spec, 7))
        assert write(tmp_path / "b" / codec, spec, values_of(spec, 7)) == first


def test_appending_leaves_the_beginning_of_a_shard_as_it_was(tmp_path: Path) -> None:
    for spec in (rows(), frames("zstd", shard_steps=6)):
        values = values_of(spec, 6)
        (before,) = write(tmp_path, spec, values[:4])
        with (
            ShardReader(tmp_path / before.path, spec, before) as old,
            ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as new,
        ):
            whole = 4 // spec.chunk_steps
            for chunk in range(whole):
                payload = old.chunk(chunk)
                assert payload is not None
                new.put_stored(payload)
            rest = old.rows(whole * spec.chunk_steps, 4)
            joined = np.concatenate([rest, values[4:]])
            for start in range(0, len(joined), spec.chunk_steps):
                new.put(joined[start : start + spec.chunk_steps])
            after = new.commit()
        assert after.chunk_crc32c[: 4 // spec.chunk_steps] == before.chunk_crc32c[: 4 // spec.chunk_steps]
        with ShardReader(tmp_path / after.path, spec, before) as reader:  # judged by the older generation's manifest
            np.testing.assert_array_equal(reader.rows(0, 4), values[:4])
        with ShardReader(tmp_path / after.path, spec, after) as reader:
            np.testing.assert_array_equal(reader.rows(0, 6), values)


def test_encoded_chunks_are_copied_verbatim_and_decode(tmp_path: Path) -> None:
    spec = frames("zstd")
    values = values_of(spec, 2)
    payloads = [bytes(encode_chunk(spec, values[k : k + 1])) for k in range(2)]
    with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
        for payload in payloads:
            writer.put_stored(payload)
        row = writer.commit()
    with ShardReader(tmp_path / row.path, spec, row) as reader:
        assert [reader.chunk(k) for k in range(2)] == payloads
    out = np.empty((1, *spec.row_shape), np.uint8)
    decode_chunk(spec, payloads[1], out)
    np.testing.assert_array_equal(out[0], values[1])


def test_jpeg_frames_come_back_as_the_decoder_sees_them(tmp_path: Path) -> None:
    spec = frames("jpeg:95", size=(16, 24))
    y, x, c = np.indices(spec.row_shape)
    values = np.stack([(y * 5 + x * 3 + c * 40 + step * 9) % 200 for step in range(3)]).astype(np.uint8)
    (row,) = write(tmp_path, spec, values, absent=(1,))
    with ShardReader(tmp_path / row.path, spec, row) as reader:
        found = reader.rows(0, 3)
        payload = reader.chunk(0)
    assert payload is not None
    assert payload[:2] == b"\xff\xd8"
    assert np.abs(found[[0, 2]].astype(int) - values[[0, 2]]).mean() < 4
    assert not found[1].any()
    codecs = json.loads(array_document(spec, 3))["codecs"][0]["configuration"]["codecs"]
    assert codecs == [
        {"name": "imagecodecs_jpeg", "configuration": {"level": 95, "subsampling": "444"}},
        {"name": "crc32c"},
    ]


def test_zarr_with_imagecodecs_reads_jpeg_frames(tmp_path: Path) -> None:
    pytest.importorskip("imagecodecs.zarr", reason="imagecodecs registers its Zarr codecs from Python 3.12 on")
    spec = frames("jpeg:95", size=(16, 24))
    y, x, c = np.indices(spec.row_shape)
    values = np.stack([(y * 5 + x * 3 + c * 40 + step * 9) % 200 for step in range(5)]).astype(np.uint8)
    written = write(tmp_path, spec, values, absent=(1,))
    found = zarr.open_array(tmp_path / spec.name, mode="r")[:]
    for row in written:
        with ShardReader(tmp_path / row.path, spec, row) as reader:
            expected = reader.rows(0, row.stop - row.start)
        # two builds of libjpeg-turbo may round differently by one
        assert np.abs(found[row.start : row.stop].astype(int) - expected).max() <= 1


def shard_of(tmp_path: Path) -> tuple[ArraySpec, ShardRow, Path]:
    spec = frames(shard_steps=8)
    values = values_of(spec, 16)
    write(tmp_path, spec, values, absent=(11,))
    path = tmp_path / shard_path(spec, 1)
    row = write(tmp_path, spec, values, absent=(11,))[1]
    return spec, row, path


@pytest.mark.parametrize("position", range(0, 7 * 22 + 8 * 16 + 4, 3))
def test_a_flipped_bit_is_found_and_placed(tmp_path: Path, position: int) -> None:
    spec, row, path = shard_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ChecksumError) as caught, ShardReader(path, spec, row) as reader:
        reader.rows(0, 8)
    assert caught.value.where["array"] == "rgb_main"
    assert caught.value.where["file"] == "rgb_main/c.1.0.0.0"
    stored = [8, 9, 10, 12, 13, 14, 15]
    step = stored[position // 22] if position < 7 * 22 else None
    assert caught.value.where["steps"] == (f"{step}:{step + 1}" if step else "8:16")


def test_truncated_grown_and_missing_files_are_found(tmp_path: Path) -> None:
    spec, row, path = shard_of(tmp_path)
    data = path.read_bytes()
    for changed in (b"", data[:50], data[:-1], data + b"\0", b"\0" + data, data[22:]):
        path.write_bytes(changed)
        with pytest.raises(ChecksumError, match="array rgb_main, steps 8:16, file rgb_main/c.1.0.0.0"):
            ShardReader(path, spec, row)
    path.unlink()
    with pytest.raises(DatasetError, match="found none"):
        ShardReader(path, spec, row)


def test_a_sound_shard_in_another_shards_place_is_found(tmp_path: Path) -> None:
    spec, row, path = shard_of(tmp_path)
    path.write_bytes((tmp_path / shard_path(spec, 0)).read_bytes())
    with ShardReader(path, spec, row) as reader, pytest.raises(ChecksumError, match="swapped or replaced"):
        reader.rows(0, 1)
    with ShardReader(path, spec, row) as reader, pytest.raises(ChecksumError, match="expected no chunk, found one"):
        reader.rows(3, 4)


def test_a_file_cut_short_after_it_was_opened_is_found(tmp_path: Path) -> None:
    spec, row, path = shard_of(tmp_path)
    with ShardReader(path, spec, row) as reader:
        os.truncate(path, 30)
        with pytest.raises(ChecksumError, match="steps 9:10"):
            reader.rows(1, 2)


def test_sound_bytes_that_do_not_decode_are_refused(tmp_path: Path) -> None:
    for codec, payload in (
        ("raw", b"123"),
        ("zstd", b"no zstd frame"),
        ("blosc:lz4", b"no frame"),
        ("blosc:zstd", bytes(40)),
        ("jpeg:90", b"\xff\xd8no jpeg"),
    ):
        spec = frames(codec)
        with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
            writer.put_stored(payload)
            row = writer.commit()
        with ShardReader(tmp_path / row.path, spec, row) as reader, pytest.raises(DatasetError) as caught:
            reader.rows(0, 1)
        assert caught.value.where["steps"] == "0:1"


def test_what_a_shard_cannot_hold_is_refused(tmp_path: Path) -> None:
    spec = rows()
    with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
        for wrong in (
            np.zeros((3, 3), np.float32),
            np.zeros((3, 2)),
            np.zeros((4, 2), np.float32),
            np.zeros((0, 2), np.float32),
        ):
            with pytest.raises(SchemaError):
                writer.put(wrong)
        with pytest.raises(SchemaError, match="absent"):
            writer.put(None)
        writer.put(values_of(spec, 2))
        with pytest.raises(SchemaError, match="after 2 steps"):
            writer.put(values_of(spec, 3))
    with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
        for _ in range(2):
            writer.put(values_of(spec, 3))
        with pytest.raises(SchemaError, match="2 chunks"):
            writer.put(values_of(spec, 3))


def test_inputs_are_only_read(tmp_path: Path) -> None:
    for spec in (rows(), frames(), frames("zstd", "float16")):
        values = values_of(spec, 5)
        values.flags.writeable = False
        write(tmp_path, spec, values)
        backwards = values_of(spec, 5)[::-1]  # not contiguous
        write(tmp_path, spec, backwards)
        np.testing.assert_array_equal(zarr.open_array(tmp_path / spec.name, mode="r")[:], backwards)


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    spec = frames()
    with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
        writer.put(values_of(spec, 1))
        assert len(os.listdir(tmp_path / "tmp")) == 1
    assert os.listdir(tmp_path / "tmp") == os.listdir(tmp_path / "rgb_main") == []


def test_a_shard_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    spec = frames()
    (before,) = write(tmp_path, spec, values_of(spec, 2))
    old = (tmp_path / before.path).read_bytes()
    with ShardWriter(tmp_path, spec, 0, tmp_path / "tmp") as writer:
        writer.put(values_of(spec, 1))
        assert (tmp_path / before.path).read_bytes() == old
        row = writer.commit()
        assert xxh3_hex((tmp_path / row.path).read_bytes()) == row.xxh3 != before.xxh3


def test_an_atomic_file_replaces_in_one_step_and_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_atomic(path, b"old", tmp_path / "tmp")
    with AtomicFile(path, tmp_path / "tmp") as file:
        assert file.write(b"ne") == 2
        file.write_all((b"w", memoryview(b"er"), bytearray(b"!")))
        assert path.read_bytes() == b"old"
        assert file.xxh3() == xxhash.xxh3_128_hexdigest(b"newer!")
        file.commit()
        assert file.closed
    assert path.read_bytes() == b"newer!"
    assert os.listdir(tmp_path / "tmp") == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda descriptor, views: os.write(descriptor, bytes(views[0])[:1]))
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, bytes(data)[:2]))
    with AtomicFile(tmp_path / "file", tmp_path / "tmp") as file:
        file.write_all((b"abc", b"defgh"))
        file.commit()
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, row, path = shard_of(tmp_path)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, offset: real(descriptor, [views[0][:5]], offset))
    with ShardReader(path, spec, row) as reader:
        np.testing.assert_array_equal(reader.rows(0, 3), values_of(spec, 16)[8:11])


@given(st.binary(max_size=300))
def test_crc32c_is_castagnoli(data: bytes) -> None:
    assert crc32c(data) == castagnoli(data)
    assert crc32c(memoryview(data)) == crc32c(bytearray(data)) == crc32c(data)
    assert xxh3_hex(data) == xxhash.xxh3_128_hexdigest(data)
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, appendix B.4, and every catalogue of checksums
