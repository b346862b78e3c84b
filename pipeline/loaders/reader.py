"""Verified rows of a finished dataset, at the speed of memory: no Zarr, no Dask, no object a step.

A raw shard is its rows one after the other, each followed by its crc32c, so a random row is one ``preadv`` of row and
checksum, straight into the batch. A memory map would save the call, and kill the process where a file was cut short.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.handles import FileHandles, read_into
from pipeline.loaders.manifest import CRC_NBYTES, ChunkTable, Manifest
from pipeline.store.atomic import crc32c
from pipeline.store.chunk_codecs import decode_chunk, scratch
from pipeline.store.metadata import DatasetInfo, read_info
from pipeline.store.shards import ShardReader, shard_path
from schemas.dataset import ArraySpec
from schemas.errors import ChecksumError, DatasetError, SchemaError, SourceError, UsageError

CHECKS = ("always", "first", "never")

_RUN_NBYTES = 1 << 20
"""Bytes of neighbouring rows that one call reads: few calls, and the rows are still in the cache when checked."""
_VERIFY = "run `headrace verify`"


class DatasetReader:
    """Rows of a finished dataset, each checked against its own checksum and against the manifest.

    The manifest's checksum of every chunk binds content to place: two shards that were swapped, each sound in itself,
    are refused. Threads may share a reader; a forked child opens its own files; a pickled one opens the dataset
    again and refuses another generation of it.

    Parameters
    ----------
    path
        Folder of the dataset.
    check
        ``always`` computes the checksum of every row read, ``first`` of every row when it is first read by this
        process, ``never`` of none. The stored checksum is compared to the manifest's in any case, which costs nothing.

    Raises
    ------
    DatasetError
        Not a finished dataset of this format version, or damaged.
    """

    def __init__(self, path: str | Path, *, check: str = "always") -> None:
        if check not in CHECKS:
            raise UsageError(f"expected check one of {', '.join(CHECKS)}, found {check!r}; correct the call")
        self.check = check
        self.info: DatasetInfo = read_info(path)
        self._manifest = Manifest(self.info)
        self._handles = FileHandles(self.info.root)
        self._rows: dict[str, np.ndarray] = {}
        self._chunks: dict[str, ChunkTable] = {}
        self._episode_keys: Any = None

    @property
    def num_steps(self) -> int:
        """Steps of the dataset, valid or not."""
        return self.info.num_steps

    def spec(self, name: str) -> ArraySpec:
        """Return the specification of an array; DatasetError names those there are."""
        spec = self.info.arrays.get(name)
        if spec is None:
            raise DatasetError(
                f"expected one of the arrays {sorted(self.info.arrays)}, found {name!r}; see `headrace info`"
            )
        return spec

    def rows(self, name: str) -> np.ndarray:
        """Return an array of small rows whole, verified, read-only; read once and kept. Replaced steps are not ``valid``."""
        if name not in self._rows:
            self._rows[name] = self._read_rows(self.spec(name))
        return self._rows[name]

    def gather(self, name: str, steps: Int64[np.ndarray, " batch"], out: np.ndarray) -> None:
        """Fill ``out[i]`` with the stored row of ``steps[i]``; zeros where its chunk is absent.

        Parameters
        ----------
        name
            An array whose chunks are single steps, such as the frames of a view.
        steps
            In any order; neighbours that follow each other are read together.
        out
            Contiguous ``dtype[batch, *row_shape]``; its second axis may be shorter, for the first of each row. All of a row
            is read and checked in any case.

        Raises
        ------
        ChecksumError
            A row is not what was committed; ``where`` names array, step and file.
        """
        chunks = self._chunks.get(name) or self._chunks_of(name)
        spec = chunks.spec
        if out.dtype != spec.dtype or out.shape[2:] != spec.row_shape[1:] or out.shape[1:2] > spec.row_shape[:1]:
            spec.check(out)
        if len(out) != len(steps) or not out.flags.c_contiguous:
            raise SchemaError(f"expected {len(steps)} contiguous rows, found {list(out.shape)}; correct the call")
        wanted = steps.tolist()
        if wanted and not (min(wanted) >= 0 and max(wanted) < self.num_steps):
            raise UsageError(
                f"expected steps in [0, {self.num_steps}), found {min(wanted)} to {max(wanted)}; correct the call"
            )
        shards = list({step // spec.shard_steps for step in wanted})
        paths = [shard_path(spec, shard) for shard in shards]
        try:
            for shard in shards:
                if not chunks.indexed[shard]:
                    chunks.index(self.info, shard)
            files = dict(zip(shards, self._handles.acquire(paths), strict=True))
            try:
                if spec.codec != "raw":
                    self._gather_encoded(chunks, steps, files, out)
                elif out.shape[1:] == spec.row_shape:
                    self._gather_raw(chunks, steps, files, out)
                else:
                    whole = scratch(len(out) * spec.row_nbytes).view(spec.dtype).reshape(len(out), *spec.row_shape)
                    self._gather_raw(chunks, steps, files, whole)
                    out[...] = whole[:, : out.shape[1]]
            finally:
                self._handles.release(paths)
        except DatasetError as error:
            if not isinstance(error.where.get("steps"), int):  # of a whole file: name the first step wanted of it
                shard = shards[paths.index(str(error.where["file"]))]
                error.where = _where(spec, next(step for step in wanted if step // spec.shard_steps == shard))
            with suppress(DatasetError):  # of the table of episodes: what was wrong first is what counts
                error.where = {"episode": self.episode_of(int(str(error.where["steps"]))), **error.where}
            raise

    def episode_of(self, step: int) -> str:
        """Return the key of the episode that a step belongs to."""
        row = int(np.searchsorted(self.rows("episode_ends"), step, side="right"))
        if self._episode_keys is None:
            self._episode_keys = self.table("episodes", ["key"])["key"]
        return str(self._episode_keys[row].as_py())

    def table(self, name: str, columns: list[str] | None = None) -> Any:
        """Return a table of the dataset as ``pyarrow.Table``, verified."""
        from pipeline.store.tables import read_table

        return read_table(self.info, name, columns)

    def close(self) -> None:
        """Close the open files; the next read opens them again."""
        self._handles.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.info.root, self.check, self.info.attributes["metadata_xxh3"])

    def _chunks_of(self, name: str) -> ChunkTable:
        spec = self.spec(name)
        if spec.chunk_steps != 1 or spec.dims[0] != "step":
            raise UsageError(f"expected an array with chunks of one step, found {name!r}; use rows()")
        chunks = self._manifest.chunks(spec, self.num_steps)
        gone = chunks.absent & self.rows(spec.valid_array) if spec.valid_array else chunks.absent
        if gone.any():
            raise DatasetError(
                f"expected a chunk of every step that is valid, found none of step {int(gone.argmax())}; {_VERIFY}",
                array=name,
            )
        return self._chunks.setdefault(name, chunks)  # another thread may have been faster: all must share one

    def _read_rows(self, spec: ArraySpec) -> np.ndarray:
        length = self.info.lengths[spec.name]
        out = np.empty((length, *spec.row_shape), spec.dtype)
        for shard, start in enumerate(range(0, length, spec.shard_steps)):
            stop = min(start + spec.shard_steps, length)
            committed = self._manifest.row(spec, shard, stop)
            with ShardReader(self.info.root / committed.path, spec, committed=committed) as reader:
                if not reader.raw_rows(out[start:stop]):
                    out[start:stop] = reader.rows(0, stop - start)
        if spec.name == "valid":
            self.info.hide_replaced(out, np.arange(length))
        out.flags.writeable = False
        return out

    def _gather_raw(self, chunks: ChunkTable, steps: np.ndarray, files: Mapping[int, int], out: np.ndarray) -> None:
        # Python lists: of a few rows each, NumPy's calls would cost more than the rows
        nbytes, shard_steps = chunks.row_nbytes, chunks.spec.shard_steps
        target = out.reshape(-1).view(np.uint8).data
        trailers = bytearray(CRC_NBYTES * len(steps))
        ends = memoryview(trailers)
        wanted, offsets, unchecked = steps.tolist(), chunks.offsets[steps].tolist(), self._unchecked(chunks, steps)
        committed = chunks.crcs[steps].tolist()
        computed = committed.copy()
        for first, last in _runs(wanted, offsets, (nbytes + CRC_NBYTES, shard_steps)):
            if offsets[first] < 0:
                out[first:last] = 0
                continue
            parts = []
            for row in range(first, last):
                parts.append(target[row * nbytes : (row + 1) * nbytes])
                parts.append(ends[row * CRC_NBYTES : (row + 1) * CRC_NBYTES])
            _read(chunks.spec, wanted[first], files[wanted[first] // shard_steps], offsets[first], parts)
            for row in range(first, last):
                if unchecked[row]:
                    computed[row] = crc32c(parts[2 * (row - first)])
        self._compare(chunks, steps, np.frombuffer(trailers, "<u4").tolist(), computed)

    def _gather_encoded(self, chunks: ChunkTable, steps: np.ndarray, files: Mapping[int, int], out: np.ndarray) -> None:
        spec = chunks.spec
        sizes, offsets, unchecked = chunks.sizes[steps], chunks.offsets[steps].tolist(), self._unchecked(chunks, steps)
        committed = chunks.crcs[steps].tolist()
        buffer = memoryview(bytearray(int(sizes.max(initial=0)) + CRC_NBYTES))
        for row, (step, size) in enumerate(zip(steps.tolist(), sizes.tolist(), strict=True)):
            if offsets[row] < 0:
                out[row] = 0
                continue
            payload = buffer[:size]
            _read(spec, step, files[step // spec.shard_steps], offsets[row], [buffer[: size + CRC_NBYTES]])
            trailer = int.from_bytes(buffer[size : size + CRC_NBYTES], "little")
            computed = crc32c(payload) if unchecked[row] else committed[row]
            if not trailer == computed == committed[row]:  # before a decoder sees it
                self._compare(chunks, steps[row : row + 1], [trailer], [computed])
            _decode(spec, step, payload, out[row : row + 1])
        if self.check == "first":
            chunks.seen[steps] = True

    def _unchecked(self, chunks: ChunkTable, steps: np.ndarray) -> list[bool]:
        """Return for which steps a checksum is to be computed."""
        if self.check == "first":
            return [not seen for seen in chunks.seen[steps].tolist()]
        return [self.check == "always"] * len(steps)

    def _compare(self, chunks: ChunkTable, steps: np.ndarray, stored: list[int], computed: list[int]) -> None:
        """Hold stored and computed checksums against the committed ones; ChecksumError for the first that differs.

        Absent rows have zeros in all three.
        """
        committed = chunks.crcs[steps].tolist()
        if stored == committed and computed == committed:
            if self.check == "first":
                chunks.seen[steps] = True
            return
        triples = enumerate(zip(committed, stored, computed, strict=True))
        row, wrong = next((row, triple) for row, triple in triples if len(set(triple)) > 1)
        is_sound = self.check != "never" and wrong[1] == wrong[2]
        cause = "another chunk, sound in itself: swapped or replaced files" if is_sound else "damaged bytes"
        found = wrong[2] if wrong[2] != wrong[0] else wrong[1]
        raise ChecksumError(
            f"expected crc32c {wrong[0]:08x}, found {found:08x}, {cause}; {_VERIFY}",
            **_where(chunks.spec, int(steps[row])),
        )


def _reopen(root: Path, check: str, metadata_xxh3: str) -> DatasetReader:
    reader = DatasetReader(root, check=check)
    if reader.info.attributes["metadata_xxh3"] != metadata_xxh3:
        raise DatasetError(
            f"expected the generation that was pickled, found generation {reader.info.generation} of {root}; "
            "open the dataset again, since the order of its steps has changed"
        )
    return reader


def _runs(steps: list[int], offsets: list[int], strides: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield ``[first, last)`` of rows that lie one after the other in one file, or of one absent row.

    ``strides`` are the stored bytes of a row and the steps of a file.
    """
    stride, shard_steps = strides
    longest = max(1, _RUN_NBYTES // stride)
    first = 0
    for row in range(1, len(steps)):
        follows = steps[row] == steps[row - 1] + 1 and steps[row] % shard_steps
        if (
            not (follows and offsets[row] == offsets[row - 1] + stride and offsets[first] >= 0)
            or row - first == longest
        ):
            yield first, row
            first = row
    if steps:
        yield first, len(steps)


def _read(spec: ArraySpec, step: int, descriptor: int, offset: int, parts: list[memoryview]) -> None:
    """Fill ``parts`` from a file, at ``offset``."""
    expected = sum(map(len, parts))
    try:
        found = read_into(descriptor, parts, offset)
    except OSError as error:
        raise DatasetError(
            f"expected {expected} bytes, found the error {error.strerror!r}; check the disk", **_where(spec, step)
        ) from error
    if found != expected:
        raise ChecksumError(
            f"expected {expected} bytes, found {found}, a file cut short; {_VERIFY}", **_where(spec, step)
        )


def _decode(spec: ArraySpec, step: int, payload: memoryview, out: np.ndarray) -> None:
    try:
        decode_chunk(spec, payload, out)
    except (DatasetError, SourceError) as error:
        raise DatasetError(error.message, **_where(spec, step)) from error


def _where(spec: ArraySpec, step: int) -> dict[str, object]:
    return {"array": spec.name, "steps": step, "file": shard_path(spec, step // spec.shard_steps)}
