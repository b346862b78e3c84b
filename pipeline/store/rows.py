"""Rows of any array of a finished dataset, by step, across shards, verified against the manifest."""

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jaxtyping import Int64

from pipeline.store.metadata import DatasetInfo
from pipeline.store.shards import ShardReader, shard_path
from pipeline.store.tables import manifest_rows, read_table
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import DatasetError

OPEN_SHARDS = 32
"""Shard files kept open; one that is dropped while a thread reads it closes when that thread is done."""


class RowReader:
    """Reads rows of a dataset; nothing is read before the first rows are asked for. Threads may share it.

    Parameters
    ----------
    info
        The dataset, as :func:`pipeline.store.metadata.read_info` returns it.
    """

    def __init__(self, info: DatasetInfo) -> None:
        self.info = info
        self._lock = threading.Lock()
        self._manifest: pa.Table | None = None
        self._open: OrderedDict[tuple[str, int], ShardReader] = OrderedDict()

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of an array; zeros where a chunk is absent."""
        return self.take(name, np.arange(start, stop))

    def take(self, name: str, steps: Int64[np.ndarray, " n"]) -> np.ndarray:
        """Return the rows of ``steps``, in any order, repeats allowed; zeros where a chunk is absent.

        Steps of replaced episodes are not ``valid``.

        Raises
        ------
        DatasetError
            A row is not what was committed; ``where`` names array, steps and file.
        """
        spec = self.info.arrays[name]
        out = np.empty((len(steps), *spec.row_shape), spec.dtype)
        chunks = steps // spec.chunk_steps
        if spec.chunk_steps == 1:
            for row, chunk in enumerate(chunks.tolist()):
                self._read_chunk(spec, chunk, out[row : row + 1])
            return out
        buffer = np.empty((spec.chunk_steps, *spec.row_shape), spec.dtype)
        order = np.argsort(chunks, kind="stable")
        wanted, firsts = np.unique(chunks[order], return_index=True)
        for chunk, places in zip(wanted.tolist(), np.split(order, firsts[1:]), strict=False):
            self._read_chunk(spec, chunk, buffer)
            out[places] = buffer[steps[places] - chunk * spec.chunk_steps]
        if name == "valid":
            self.info.hide_replaced(out, steps)
        return out

    def _read_chunk(self, spec: ArraySpec, chunk: int, out: np.ndarray) -> None:
        shard, within = divmod(chunk, spec.chunks_per_shard)
        self._shard(spec, shard).read_chunk(within, out)

    def _shard(self, spec: ArraySpec, shard: int) -> ShardReader:
        key = (spec.name, shard)
        with self._lock:
            reader = self._open.pop(key, None)
            if reader is None:
                path = shard_path(spec, shard)
                reader = ShardReader(self.info.root / path, spec, self._committed(path))
            self._open[key] = reader
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return reader

    def _committed(self, path: str) -> ShardRow:
        """Return one row of the manifest; all of them would be three million numbers for a million steps."""
        if self._manifest is None:
            self._manifest = read_table(self.info, "manifest")
        rows = manifest_rows(self._manifest.filter(pa.compute.equal(self._manifest["path"], path)))
        if len(rows) != 1:
            raise DatasetError(f"expected one row of the manifest for {path}, found {len(rows)}; run `headrace verify`")
        return next(iter(rows.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return RowReader, (self.info,)
