"""A reader written from ``pipeline/DESIGN.md`` alone, without Headrace and Zarr, reads what was written and finds every checksum right."""

import io
import json
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from PIL import Image

from tests.pipeline.store_builder import build_dataset, row_spec, write_dataset

ABSENT = 2**64 - 1


class PlainReader:
    """All arrays and tables of a dataset, each checksum compared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        data = (root / "zarr.json").read_bytes()
        document = json.loads(data)
        self.attributes = document["attributes"]["headrace"]
        digest = self.attributes["metadata_xxh3"].encode()
        assert data.count(digest) == 1
        assert xxhash.xxh3_128_hexdigest(data.replace(digest, b"0" * 32)).encode() == digest
        self.metadata = document["consolidated_metadata"]["metadata"]
        for name, entry in self.metadata.items():
            alone = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
            assert (root / name / "zarr.json").read_bytes() == alone
        self.tables = {name: self._table(name, ref) for name, ref in self.attributes["tables"].items()}
        self.shards = {(row["array"], row["shard"]): row for row in self.tables["manifest"] if row["kind"] == "shard"}
        self.present: dict[str, np.ndarray] = {}
        self.arrays = {name: self._array(name) for name in self.metadata}

    def _table(self, name, ref):
        data = (self.root / ref["path"]).read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (ref["nbytes"], ref["xxh3"])
        if name != "steps":
            assert (self.root / "_copies" / Path(ref["path"]).name).read_bytes() == data
        return pq.read_table(io.BytesIO(data)).to_pylist() if ref["path"].endswith(".parquet") else json.loads(data)

    def _array(self, name):
        entry = self.metadata[name]
        num_rows, shard = entry["shape"][0], entry["chunk_grid"]["configuration"]["chunk_shape"]
        config = entry["codecs"][0]["configuration"]
        chunk, per_shard = config["chunk_shape"], shard[0] // config["chunk_shape"][0]
        values = np.zeros(entry["shape"], np.dtype(entry["data_type"]))
        self.present[name] = np.zeros(-(-num_rows // chunk[0]), bool)
        for number in range(-(-num_rows // shard[0])):
            path, row = f"{name}/c.{number}{'.0' * (len(shard) - 1)}", self.shards[name, number]
            data = (self.root / path).read_bytes()
            assert (row["path"], row["nbytes"], row["xxh3"]) == (path, len(data), xxhash.xxh3_128_hexdigest(data))
            assert (row["start"], row["stop"]) == (number * shard[0], min(num_rows, (number + 1) * shard[0]))
            index = np.frombuffer(checked(data[-16 * per_shard - 4 :]), "<u8").reshape(per_shard, 2)
            end = 0
            for place, checksum in enumerate(row["chunk_crc32c"]):
                offset, nbytes = index[place].tolist()
                assert (offset == ABSENT) == (checksum is None)
                if checksum is not None:
                    assert offset == end
                    end += nbytes
                    first = row["start"] + place * chunk[0]
                    rows = decoded(checked(data[offset:end]), config["codecs"], chunk, entry["data_type"])
                    partly = rows[: num_rows - first].tobytes()
                    last = int.from_bytes(data[end - 4 : end], "little")
                    assert checksum == (last if first + chunk[0] <= num_rows else google_crc32c.value(partly))
                    values[first : first + chunk[0]] = rows[: num_rows - first]
                    self.present[name][first // chunk[0]] = True
            assert end == len(data) - 16 * per_shard - 4
        return values

    def check(self) -> None:
        """Compare masks with the chunks that there are, and episodes with their digests."""
        mask_of = {name: entry["attributes"].get("valid_array") for name, entry in self.metadata.items()}
        for name, mask in mask_of.items():
            np.testing.assert_array_equal(self.present[name], self.arrays[mask] if mask else True)
        left_out = {"episode_index", "task_index", "valid", *mask_of.values()}
        of_steps = (name for name, entry in self.metadata.items() if entry["dimension_names"][0] == "step")
        names = sorted(set(of_steps) - left_out)
        for episode in self.tables["episodes"]:
            digests = b""
            for step in range(episode["start"], episode["stop"]):
                given = [name for name in names if not mask_of[name] or self.arrays[mask_of[name]][step]]
                digests += xxhash.xxh3_128_digest(b"".join(self.arrays[name][step].tobytes() for name in given))
            assert xxhash.xxh3_128_hexdigest(digests) == episode["digest"]


def checked(data):
    """Return the bytes before a crc32c, once it is right."""
    assert int.from_bytes(data[-4:], "little") == google_crc32c.value(data[:-4])
    return data[:-4]


def decoded(data, codecs, chunk, dtype):
    """Undo the codecs of a chunk, last first."""
    order = next((codec["configuration"]["order"] for codec in codecs if codec["name"] == "transpose"), None)
    for codec in reversed(codecs):
        if codec["name"] == "imagecodecs_jpeg":
            return np.asarray(Image.open(io.BytesIO(data))).reshape(chunk)
        if codec["name"] in ("zstd", "blosc"):
            data = getattr(numcodecs, codec["name"].title())().decode(data)
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if order is None:
        return values.reshape(chunk)
    return values.reshape([chunk[axis] for axis in order]).transpose(np.argsort(order))


@pytest.mark.parametrize(
    ("codec", "dtype"), [("raw", "uint8"), ("zstd", "uint8"), ("jpeg:90", "uint8"), ("zstd", "float16")]
)
def test_frames_rows_and_tables_read_as_the_specification_says(tmp_path, codec, dtype):
    built = build_dataset(tmp_path / "out", codec=codec, dtype=dtype, size=(16, 24))
    compare(built)


@pytest.mark.parametrize("codec", ["blosc:zstd", "blosc:lz4", "raw"])
def test_planner_tensors_read_as_the_specification_says(tmp_path, codec):
    plain = build_dataset(tmp_path / "plain")
    num_steps = len(plain.arrays["state"])
    anchor = np.arange(num_steps) % 3 == 1
    lanes = np.arange(num_steps * 60, dtype=np.float32).reshape(num_steps, 4, 5, 3) * anchor[:, None, None, None]
    spec = replace(
        row_spec("lanes", "float32", (4, 5, 3), chunk_steps=1, shard_steps=8),
        dims=("step", "lane", "point", "lanes_feature"),
        codec=codec,
        valid_array="is_anchor",
    )
    specs = {**plain.specs, "lanes": spec, "is_anchor": replace(plain.specs["valid"], name="is_anchor")}
    arrays = {**plain.arrays, "lanes": lanes, "is_anchor": anchor}
    compare(write_dataset(tmp_path / "out", specs, arrays, plain.episode_lengths, shard_steps=8))


def compare(built) -> None:
    reader = PlainReader(built.root)
    reader.check()
    assert reader.arrays.keys() == built.arrays.keys()
    for name, values in built.arrays.items():
        np.testing.assert_array_equal(reader.arrays[name], values, err_msg=name)
        assert reader.arrays[name].dtype == values.dtype
    steps = reader.tables["steps"]
    np.testing.assert_array_equal([row["state"] for row in steps], built.arrays["state"])
    np.testing.assert_array_equal([row["main_valid"] for row in steps], built.arrays["rgb_main_valid"])
    assert [row["stop"] - row["start"] for row in reader.tables["episodes"]] == list(built.episode_lengths)
