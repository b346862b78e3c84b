"""Shard files as Zarr v3 defines them: written by streaming, read by position, checked at every read.

A shard is its chunks in step order without gaps, each ending in its own crc32c, then the index: offset and length of
every chunk as little-endian uint64 (both 2**64-1 where a chunk is absent), and the crc32c of the index. zarr-python
reads what :class:`ShardWriter` wrote; ``tests/pipeline/test_shards.py`` holds it to that.
"""

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pipeline.store.atomic import AtomicFile, Bytes, crc32c, open_regular
from pipeline.store.chunk_codecs import decode_chunk, encode_chunk
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import ChecksumError, DatasetError, SchemaError

ABSENT = 2**64 - 1
_CRC_NBYTES = 4
_ENTRY_NBYTES = 16
_PARTS = 512
"""Chunks that one call reads at most: two buffers each, of which Linux takes 1024 (IOV_MAX)."""
_UNKNOWN = -1
_REPAIR = "run `headrace verify` to see all that is damaged"


def shard_path(spec: ArraySpec, shard: int) -> str:
    """Return the path of a shard's file within the dataset.

    >>> spec = ArraySpec(name="state", dims=("step", "feature"), row_shape=(7,), dtype="float32",
    ...                  chunk_steps=1024, shard_steps=262144)
    >>> shard_path(spec, 3)
    'state/c.3.0'
    """
    return f"{spec.name}/c.{shard}{'.0' * len(spec.row_shape)}"


class ShardWriter:
    """One shard file, streamed: memory is one chunk. Leaving the context without :meth:`commit` removes it.

    Parameters
    ----------
    root
        Folder of the dataset.
    spec
        The array.
    shard
        Number of the shard along the first axis.
    tmp
        Folder for the unfinished file, on the same file system.
    """

    def __init__(self, root: Path, spec: ArraySpec, shard: int, tmp: Path) -> None:
        self._spec, self._shard = spec, shard
        self._path = shard_path(spec, shard)
        self._file = AtomicFile(root / self._path, tmp)
        self._index = np.full((spec.chunks_per_shard, 2), ABSENT, "<u8")
        self._crcs: list[int | None] = []
        self._num_steps = 0

    def put(self, rows: np.ndarray | None) -> None:
        """Append the next chunk.

        Parameters
        ----------
        rows
            ``dtype[n, *row_shape]``; n below ``chunk_steps`` only in the last chunk, which is then filled with zeros.
            None where the chunk is absent, which only arrays with a ``valid_array`` allow.
        """
        spec = self._spec
        if rows is None:
            if not spec.valid_array:
                raise SchemaError(f"expected every chunk of {spec.name}, found an absent one; report this as a bug")
            self._append((), 1, None)
            return
        spec.check(rows)
        num_steps = len(rows)
        if num_steps < spec.chunk_steps:
            filled = np.zeros((spec.chunk_steps, *spec.row_shape), spec.dtype)
            filled[:num_steps] = rows
            rows = filled
        self.put_stored(encode_chunk(spec, rows), num_steps=num_steps)

    def put_stored(self, payload: Bytes, *, num_steps: int | None = None) -> None:
        """Append a chunk that is encoded already: a source's own JPEG, or what :meth:`ShardReader.chunk` returned.

        Parameters
        ----------
        payload
            Stored bytes without the crc32c, which is added here.
        num_steps
            Committed steps of a last, partly filled chunk; the whole chunk by default.
        """
        spec = self._spec
        num_steps = spec.chunk_steps if num_steps is None else num_steps
        checksum = crc32c(payload)
        committed = checksum
        if num_steps < spec.chunk_steps:
            committed = crc32c(memoryview(payload).cast("B")[: num_steps * spec.row_nbytes])
        self._append((payload, struct.pack("<I", checksum)), num_steps, committed)

    def commit(self) -> ShardRow:
        """Write the index, make the file durable, give it its name, and return its row of the manifest."""
        index = self._index.tobytes()
        self._file.write_all((index, struct.pack("<I", crc32c(index))))
        row = ShardRow(
            array=self._spec.name,
            shard=self._shard,
            start=self._shard * self._spec.shard_steps,
            stop=self._shard * self._spec.shard_steps + self._num_steps,
            path=self._path,
            nbytes=self._file.nbytes,
            xxh3=self._file.xxh3(),
            chunk_crc32c=tuple(self._crcs),
        )
        self._file.commit()
        return row

    def _append(self, stored: tuple[Bytes, ...], num_steps: int, committed: int | None) -> None:
        spec, chunk = self._spec, len(self._crcs)
        if chunk == spec.chunks_per_shard or self._num_steps != chunk * spec.chunk_steps:
            raise SchemaError(
                f"expected {spec.chunks_per_shard} chunks of {spec.chunk_steps} steps in a shard of {spec.name}, "
                f"found another after {self._num_steps} steps; report this as a bug"
            )
        if not 1 <= num_steps <= spec.chunk_steps:
            raise SchemaError(
                f"expected 1 to {spec.chunk_steps} steps a chunk of {spec.name}, found {num_steps}; report this as a bug"
            )
        if stored:
            self._index[chunk, 0] = self._file.nbytes
            self._index[chunk, 1] = self._file.write_all(stored)
        self._crcs.append(committed)
        self._num_steps += num_steps

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.discard()


class ShardReader:
    """One shard file: the index is read and checked once, every chunk at every read.

    Chunks and rows count from the shard's beginning; errors name the dataset's steps. Threads may share one reader.

    Parameters
    ----------
    path
        The file; its name says which shard it is.
    spec
        The array.
    committed
        Its row of the manifest. With it a chunk must also be the one that was committed here, so that two swapped
        files, each sound in itself, are refused.

    Raises
    ------
    DatasetError
        There is no such file.
    ChecksumError
        It is shorter than its index, or the index is damaged.
    """

    def __init__(self, path: Path, spec: ArraySpec, committed: ShardRow | None = None) -> None:
        self.spec, self.committed = spec, committed
        self.path = path
        self._first_step = int(path.name.split(".")[1]) * spec.shard_steps
        try:
            self._descriptor = open_regular(path)
        except FileNotFoundError:
            raise DatasetError("expected a shard file, found none; run verify", **self._where()) from None
        except OSError as error:
            raise DatasetError(
                f"expected a shard file, found: {error.strerror}; run verify", **self._where()
            ) from error
        try:
            self._read_index()
        except BaseException:
            self.close()
            raise

    def chunk(self, chunk: int) -> bytes | None:
        """Return the stored bytes of a chunk without their crc32c, verified; None where it is absent."""
        payload = self.check(chunk, self.stored(chunk))
        return None if payload is None else bytes(payload)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of the shard, verified; rows of absent chunks are zero."""
        spec = self.spec
        first, last = start // spec.chunk_steps, -(-stop // spec.chunk_steps)
        out = np.empty((max(last - first, 0) * spec.chunk_steps, *spec.row_shape), spec.dtype)
        for chunk in range(first, last):
            begin = (chunk - first) * spec.chunk_steps
            self.read_chunk(chunk, out[begin : begin + spec.chunk_steps])
        offset = first * spec.chunk_steps
        return out[start - offset : stop - offset]

    def raw_rows(self, out: np.ndarray) -> bool:
        """Fill ``out`` with the first rows of a shard without codec, in one read; False if a checksum is not the committed one.

        What exactly is wrong, :meth:`rows` says.

        Parameters
        ----------
        out
            Contiguous ``dtype[step, *row_shape]``: all rows that are committed.
        """
        spec, committed = self.spec, self.committed
        if spec.codec != "raw" or committed is None or None in committed.chunk_crc32c:
            return False
        nbytes = spec.chunk_steps * spec.row_nbytes
        stride = nbytes + _CRC_NBYTES
        target, last = (
            out.reshape(-1).view(np.uint8).data,
            bytearray(nbytes),
        )  # the last chunk may hold more than is committed
        payloads = [target[start : start + nbytes] for start in range(0, len(target) - nbytes + 1, nbytes)]
        committed_parts = list(payloads)
        if rest := len(target) % nbytes:
            payloads.append(memoryview(last))
            committed_parts.append(memoryview(last)[:rest])
        trailers = np.empty(len(payloads), "<u4")
        ends = trailers.view(np.uint8).data
        for first in range(0, len(payloads), _PARTS):
            some = range(first, min(first + _PARTS, len(payloads)))
            if any(self.index[k] != (k * stride, stride) for k in some):
                return False
            parts = [part for k in some for part in (payloads[k], ends[k * _CRC_NBYTES : (k + 1) * _CRC_NBYTES])]
            if os.preadv(self._descriptor, parts, first * stride) != len(some) * stride:
                return False
        target[len(target) - rest :] = last[:rest]
        found = [crc32c(payload) for payload in payloads]
        return trailers.tolist() == found and tuple(map(crc32c, committed_parts)) == committed.chunk_crc32c

    def read_chunk(self, chunk: int, out: np.ndarray) -> bool:
        """Fill ``out`` (``dtype[chunk_steps, *row_shape]``, contiguous) with a verified chunk; zeros and False if absent."""
        payload = self.check(chunk, self.stored(chunk))
        if payload is None:
            out[...] = 0
            return False
        try:
            decode_chunk(self.spec, payload, out)
        except DatasetError as error:
            error.where = {**self._where(chunk), **error.where}
            raise
        return True

    def stored(self, chunk: int, buffer: bytearray | None = None) -> memoryview | None:
        """Return a chunk's bytes with their crc32c as they lie in the file, unverified; None where it is absent.

        ``buffer`` is reused if long enough; the view then ends with the next call.
        """
        offset, nbytes = self.index[chunk]
        if nbytes == ABSENT:
            return None
        target = memoryview(buffer if buffer is not None and len(buffer) >= nbytes else bytearray(nbytes))[:nbytes]
        found = os.preadv(self._descriptor, [target], offset)
        while 0 < found < nbytes:  # the kernel may cut long reads
            more = os.preadv(self._descriptor, [target[found:]], offset + found)
            if not more:
                break
            found += more
        if found < nbytes:
            raise ChecksumError(f"expected {nbytes} bytes, found {found}; {_REPAIR}", **self._where(chunk))
        return target

    def check(self, chunk: int, stored: memoryview | None) -> memoryview | None:
        """Return the payload of ``stored``, or raise ChecksumError unless it is sound and, if known, the one committed."""
        expected = self._committed_crc(chunk)
        if stored is None:
            if expected is not _UNKNOWN and expected is not None:
                raise ChecksumError(f"expected a chunk, found it absent; {_REPAIR}", **self._where(chunk))
            return None
        payload = stored[:-_CRC_NBYTES]
        found = crc32c(payload)
        trailing = int.from_bytes(stored[-_CRC_NBYTES:], "little")
        if found != trailing:
            message = f"expected bytes of crc32c {trailing:08x}, found {found:08x}; {_REPAIR}"
            raise ChecksumError(message, **self._where(chunk))
        self._check_committed(chunk, payload, found)
        return payload

    def steps(self, chunk: int) -> tuple[int, int]:
        """Return ``[start, stop)`` of a chunk in steps of the dataset, without those that are not committed yet."""
        start = self._first_step + chunk * self.spec.chunk_steps
        stop = start + self.spec.chunk_steps
        return start, min(stop, self.committed.stop) if self.committed and self.committed.stop > start else stop

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def _read_index(self) -> None:
        num_chunks = self.spec.chunks_per_shard
        expected = num_chunks * _ENTRY_NBYTES + _CRC_NBYTES
        self.nbytes = os.fstat(self._descriptor).st_size
        self.index_bytes = os.pread(self._descriptor, expected, max(self.nbytes - expected, 0))
        if len(self.index_bytes) < expected:
            raise ChecksumError(
                f"expected a file of at least {expected} bytes, found {self.nbytes}; {_REPAIR}", **self._where()
            )
        table, trailing = self.index_bytes[:-_CRC_NBYTES], self.index_bytes[-_CRC_NBYTES:]
        if crc32c(table) != int.from_bytes(trailing, "little"):
            raise ChecksumError(f"expected a sound shard index, found a wrong crc32c; {_REPAIR}", **self._where())
        self.index: list[tuple[int, int]] = list(map(tuple, np.frombuffer(table, "<u8").reshape(-1, 2).tolist()))
        position = 0
        for offset, nbytes in self.index:
            if (offset, nbytes) == (ABSENT, ABSENT):
                continue
            if offset != position or nbytes < _CRC_NBYTES:
                raise ChecksumError("expected chunks in order without gaps, found others; run verify", **self._where())
            position += nbytes
        if position != self.nbytes - expected:
            raise ChecksumError(
                f"expected {position + expected} bytes by the index, found {self.nbytes}; {_REPAIR}", **self._where()
            )

    def _committed_crc(self, chunk: int) -> int | None:
        if self.committed is None or chunk >= len(self.committed.chunk_crc32c):
            return _UNKNOWN
        return self.committed.chunk_crc32c[chunk]

    def _check_committed(self, chunk: int, payload: memoryview, found: int) -> None:
        expected = self._committed_crc(chunk)
        if expected is _UNKNOWN or self.committed is None:
            return
        if expected is None:
            raise ChecksumError(f"expected no chunk, found one; {_REPAIR}", **self._where(chunk))
        if self.spec.chunk_steps > 1:  # only such a chunk can be committed in part
            start, stop = self.steps(chunk)
            if stop - start < self.spec.chunk_steps:
                found = crc32c(payload[: (stop - start) * self.spec.row_nbytes])
        if found != expected:
            raise ChecksumError(
                f"expected the chunk committed here (crc32c {expected:08x}), found another, sound in itself "
                f"({found:08x}): swapped or replaced files; {_REPAIR}",
                **self._where(chunk),
            )

    def _where(self, chunk: int | None = None) -> dict[str, str]:
        if chunk is not None:
            start, stop = self.steps(chunk)
        else:
            start = self._first_step
            stop = self.committed.stop if self.committed else start + self.spec.shard_steps
        return {
            "array": self.spec.name,
            "steps": f"{start}:{stop}",
            "file": f"{self.path.parent.name}/{self.path.name}",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
