"""What was committed, as flat arrays: the checksum of every chunk, and where it lies. No object a step."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.store.metadata import DatasetInfo
from pipeline.store.shards import ABSENT, ShardReader, shard_path
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import ChecksumError, DatasetError

CRC_NBYTES = 4
"""Bytes of the checksum that follows every chunk."""

_VERIFY = "run `headrace verify`"


@dataclass(slots=True)
class ChunkTable:
    """The chunks of one array with one step a chunk: 14 or 18 bytes a step."""

    spec: ArraySpec
    row_nbytes: int
    """Decoded bytes of one step."""
    crcs: np.ndarray
    """uint32: the manifest's crc32c of each chunk; 0 where it is absent."""
    absent: np.ndarray
    """bool: the manifest says that there is no chunk."""
    offsets: np.ndarray
    """int64: where the chunk lies in its shard; -1 where it is absent."""
    sizes: np.ndarray
    """int32: stored bytes without the checksum that follows; empty where all are ``row_nbytes``."""
    seen: np.ndarray
    """bool: the chunk has been read and checked."""
    indexed: bytearray
    """1 for each shard whose offsets and sizes are known; of raw arrays all are, by arithmetic."""

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


class Manifest:
    """The shard rows of the manifest table, their checksums as flat arrays.

    Raises
    ------
    ChecksumError
        The table is not the one that was committed.
    """

    def __init__(self, info: DatasetInfo) -> None:
        from pipeline.store.tables import read_table

        # pyarrow.compute, and pandas where there is one, would take longer to import than all of this: see _flat
        table = read_table(info, "manifest", ["kind", "array", "shard", "stop", "chunk_crc32c"])
        is_shard = [kind == "shard" for kind in table["kind"].to_pylist()]
        # source files have rows too, and may be as many as there are frames
        table = table.slice(0, sum(is_shard)) if all(is_shard[: sum(is_shard)]) else table.filter(is_shard)
        table = table.combine_chunks()
        self._crcs, self._absent, ends = _flat(table["chunk_crc32c"].combine_chunks())
        arrays, shards, stops = (table[name].to_pylist() for name in ("array", "shard", "stop"))
        self._lines = {
            (arrays[k], shards[k]): _Line(stop=stops[k], first=ends[k], last=ends[k + 1]) for k in range(len(arrays))
        }

    def row(self, spec: ArraySpec, shard: int, stop: int) -> ShardRow:
        """Return what a shard must hold up to ``stop``; its size and digest are left out, since no reader needs them."""
        crcs, absent = self._checksums(spec, shard, stop)
        listed = [None if gone else crc for crc, gone in zip(crcs.tolist(), absent.tolist(), strict=True)]
        return ShardRow(
            array=spec.name,
            shard=shard,
            start=shard * spec.shard_steps,
            stop=stop,
            path=shard_path(spec, shard),
            nbytes=0,
            xxh3="",
            chunk_crc32c=tuple(listed),
        )

    def chunks(self, spec: ArraySpec, num_steps: int) -> ChunkTable:
        """Return what is known of an array with chunks of one step."""
        crcs, absent = np.empty(num_steps, np.uint32), np.empty(num_steps, np.bool_)
        starts = range(0, num_steps, spec.shard_steps)
        for shard, start in enumerate(starts):
            stop = min(start + spec.shard_steps, num_steps)
            crcs[start:stop], absent[start:stop] = self._checksums(spec, shard, stop)
        is_raw = spec.codec == "raw"
        return ChunkTable(
            spec=spec,
            row_nbytes=spec.row_nbytes,
            crcs=crcs,
            absent=absent,
            offsets=_raw_offsets(spec, absent) if is_raw else np.full(num_steps, -1, np.int64),
            sizes=np.zeros(0 if is_raw else num_steps, np.int32),
            seen=np.zeros(num_steps, np.bool_),
            indexed=bytearray([is_raw]) * len(starts),
        )

    def _checksums(self, spec: ArraySpec, shard: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        expected = -(-(stop - shard * spec.shard_steps) // spec.chunk_steps)
        line = self._lines.get((spec.name, shard), _Line(stop=0, first=0, last=0))
        if (line.stop, line.last - line.first) != (stop, expected):
            raise DatasetError(
                f"expected {expected} checksums of shard {shard} in the manifest, found {line.last - line.first}; {_VERIFY}",
                array=spec.name,
                steps=f"{shard * spec.shard_steps}:{stop}",
            )
        return self._crcs[line.first : line.last], self._absent[line.first : line.last]


@dataclass(frozen=True, slots=True)
class _Line:
    """One shard's row: where its checksums lie among all."""

    stop: int
    first: int
    last: int


def _flat(lists: Any) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the checksums of a ``pyarrow.ListArray``, 0 where there is none, where that is, and the edges of its lists.

    From the buffers, as Arrow's columnar format says they lie: ``to_numpy`` would import pandas, which takes 0.3 s.
    """
    values, (_, offsets) = lists.values, lists.buffers()[:2]
    ends = np.frombuffer(offsets or b"\0\0\0\0", np.int32)[lists.offset : lists.offset + len(lists) + 1]
    inside = slice(values.offset, values.offset + len(values))
    validity, crcs = values.buffers()
    absent = np.zeros(len(values), np.bool_)
    if validity is not None:
        absent = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")[inside] == 0
    return np.where(absent, np.uint32(0), np.frombuffer(crcs or b"", np.uint32)[inside]), absent, ends.tolist()


def _raw_offsets(spec: ArraySpec, absent: Bool[np.ndarray, " step"]) -> Int64[np.ndarray, " step"]:
    """Return where each row lies in its shard: chunks are in step order without gaps, and of one size.

    That spares reading an index of every shard, 16 bytes a chunk, before the first row of it: at random, as many small
    reads as shards. A shard that is laid out otherwise fails at its first checksum.
    """
    before = np.cumsum(~absent, dtype=np.int64) - ~absent
    shard_starts = np.arange(len(absent)) // spec.shard_steps * spec.shard_steps
    return np.where(absent, -1, (before - before[shard_starts]) * (spec.row_nbytes + CRC_NBYTES))
