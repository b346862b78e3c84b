"""What was committed, as flat arrays: the checksum of every chunk, and where it lies. No object a step."""

from dataclasses import dataclass

import numpy as np

from pipeline.store.metadata import DatasetInfo
from pipeline.store.shards import ABSENT, ShardReader, shard_path
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import ChecksumError, DatasetError

CRC_NBYTES = 4
"""Bytes of the checksum that follows every chunk."""

_COLUMNS = ("array", "shard", "start", "stop", "path", "nbytes", "xxh3")
_VERIFY = "run `headrace verify`"


@dataclass(slots=True)
class ChunkTable:
    """The chunks of one array with one step a chunk: 18 bytes a step, most of them touched only once needed."""

    spec: ArraySpec
    crcs: np.ndarray
    """uint32: the manifest's crc32c of each chunk; 0 where it is absent."""
    absent: np.ndarray
    """bool: the manifest says that there is no chunk."""
    offsets: np.ndarray
    """int64: where the chunk lies in its shard; -1 where it is absent."""
    sizes: np.ndarray
    """int32: stored bytes without the checksum that follows."""
    seen: np.ndarray
    """bool: the chunk has been read and checked."""
    indexed: bytearray
    """1 for each shard whose offsets and sizes are known."""

    def index(self, info: DatasetInfo, shard: int) -> None:
        """Read a shard's index, once, and hold what it says is absent against what the manifest says."""
        spec = self.spec
        path = shard_path(spec, shard)
        with ShardReader(info.root / path, spec) as reader:
            index = np.array(reader.index, dtype=np.uint64)
        start = shard * spec.shard_steps
        stop = min(start + spec.shard_steps, info.num_steps)
        index = index[: stop - start]
        absent = index[:, 0] == np.uint64(ABSENT)
        self._check_absent(absent, start, path)
        sizes = np.where(absent, 0, index[:, 1].astype(np.int64) - CRC_NBYTES)
        self._check_sizes(sizes[~absent], path)
        self.offsets[start:stop] = np.where(absent, -1, index[:, 0].astype(np.int64))
        self.sizes[start:stop] = sizes
        self.indexed[shard] = 1

    def _check_absent(self, absent: np.ndarray, start: int, path: str) -> None:
        differ = np.flatnonzero(absent != self.absent[start : start + len(absent)])
        if differ.size:
            first = int(differ[0])
            expected, found = ("a chunk", "none") if absent[first] else ("no chunk", "one")
            raise ChecksumError(
                f"expected {expected}, found {found}: a replaced file; {_VERIFY}",
                array=self.spec.name,
                steps=start + first,
                file=path,
            )

    def _check_sizes(self, sizes: np.ndarray, path: str) -> None:
        if self.spec.codec == "raw" and np.any(sizes != self.spec.row_nbytes):
            raise DatasetError(
                f"expected raw chunks of {self.spec.row_nbytes} bytes, found others; {_VERIFY}",
                array=self.spec.name,
                file=path,
            )


class Manifest:
    """The shard rows of the manifest table, their checksums as flat arrays.

    Raises
    ------
    ChecksumError
        The table is not the one that was committed.
    """

    def __init__(self, info: DatasetInfo) -> None:
        from pipeline.store.tables import read_table

        table = read_table(info, "manifest", ["kind", *_COLUMNS, "chunk_crc32c"])
        lists = table["chunk_crc32c"].combine_chunks()
        flat = lists.flatten()
        self._crcs = flat.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint32, copy=False)
        self._absent = flat.is_null().to_numpy(zero_copy_only=False)
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        self._ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._table = table.select(_COLUMNS)
        arrays, shards = table["array"].to_pylist(), table["shard"].to_pylist()
        is_shard = [kind == "shard" for kind in table["kind"].to_pylist()]
        self._lines = {(arrays[k], shards[k]): k for k in range(len(arrays)) if is_shard[k]}

    def row(self, spec: ArraySpec, shard: int, stop: int) -> ShardRow:
        """Return the manifest's row of a shard, which must reach to ``stop``."""
        crcs, absent = self._checksums(spec, shard, stop)
        line = self._lines[spec.name, shard]
        listed = [None if gone else crc for crc, gone in zip(crcs.tolist(), absent.tolist(), strict=True)]
        values = {name: self._table[name][line].as_py() for name in _COLUMNS}
        return ShardRow(**values, chunk_crc32c=tuple(listed))

    def chunks(self, spec: ArraySpec, num_steps: int) -> ChunkTable:
        """Return the checksums of an array with chunks of one step."""
        crcs, absent = np.empty(num_steps, np.uint32), np.empty(num_steps, np.bool_)
        starts = range(0, num_steps, spec.shard_steps)
        for shard, start in enumerate(starts):
            stop = min(start + spec.shard_steps, num_steps)
            crcs[start:stop], absent[start:stop] = self._checksums(spec, shard, stop)
        return ChunkTable(
            spec=spec,
            crcs=crcs,
            absent=absent,
            offsets=np.full(num_steps, -1, np.int64),
            sizes=np.zeros(num_steps, np.int32),
            seen=np.zeros(num_steps, np.bool_),
            indexed=bytearray(len(starts)),
        )

    def _checksums(self, spec: ArraySpec, shard: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        expected = -(-(stop - shard * spec.shard_steps) // spec.chunk_steps)
        line = self._lines.get((spec.name, shard))
        start, end = (0, 0) if line is None else self._ends[line : line + 2].tolist()
        if end - start != expected:
            raise DatasetError(
                f"expected {expected} checksums of shard {shard} in the manifest, found {end - start}; {_VERIFY}",
                array=spec.name,
                steps=f"{shard * spec.shard_steps}:{stop}",
            )
        return self._crcs[start:end], self._absent[start:end]
