"""What a dataset is on disk. ``pipeline/DESIGN.md`` is the specification in prose."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import SchemaError

FORMAT_VERSION = 1
"""Raised when a reader of the previous version would misread."""

ROW_CHUNK_STEPS = 1024
"""Inner chunk of arrays of small rows: one read serves many steps, and a short dataset wastes little."""

ROW_SHARD_STEPS = 1024 * 256
"""Shard of arrays of small rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of the dataset; its first axis is ``step`` (or ``episode``) and grows."""

    name: str
    dims: tuple[str, ...]
    """Dimension names; ``dims[0]`` is ``step`` or ``episode``."""
    row_shape: tuple[int, ...]
    """Shape without the first axis."""
    dtype: str
    """NumPy name of a plain little-endian dtype: ``uint8``, ``float32``, ``bool``, ..."""
    chunk_steps: int
    """First side of an inner chunk; 1 for frames, so that a random step is one read."""
    shard_steps: int
    """First side of a shard: a multiple of ``chunk_steps``."""
    codec: str = "raw"
    """``raw``, ``zstd``, ``blosc:zstd``, ``blosc:lz4`` or ``jpeg:Q``; ``crc32c`` always follows."""
    valid_array: str = ""
    """Name of the bool array by which a chunk may be absent; empty where none may. Only with ``chunk_steps`` 1."""
    attributes: tuple[tuple[str, Any], ...] = ()
    """``units``, ``long_name`` and the like, as they stand in the array's metadata."""

    def __post_init__(self) -> None:
        if len(self.dims) != 1 + len(self.row_shape):
            raise SchemaError(
                f"expected {1 + len(self.row_shape)} dimension names for {self.name!r}, found {self.dims}"
            )
        if self.chunk_steps < 1 or self.shard_steps % self.chunk_steps:
            raise SchemaError(
                f"expected shards of whole chunks for {self.name!r}, found {self.shard_steps} and {self.chunk_steps} steps"
            )
        if self.chunk_steps > 1 and (self.codec != "raw" or self.valid_array):
            raise SchemaError(f"expected chunks of many steps to be raw and always present, found {self.name!r}")
        if np.dtype(self.dtype).hasobject:
            raise SchemaError(f"expected a plain dtype for {self.name!r}, found {self.dtype}")

    @property
    def row_nbytes(self) -> int:
        """Decoded bytes of one step."""
        return np.dtype(self.dtype).itemsize * math.prod(self.row_shape)

    @property
    def chunks_per_shard(self) -> int:
        """Number of inner chunks of one shard."""
        return self.shard_steps // self.chunk_steps

    def check(self, block: np.ndarray) -> None:
        """Raise SchemaError unless ``block`` is ``dtype[n, *row_shape]``."""
        if block.shape[1:] != self.row_shape or block.dtype != np.dtype(self.dtype):
            raise SchemaError(
                f"expected {self.dtype}[{self.dims[0]}, {', '.join(map(str, self.row_shape))}] for {self.name}, "
                f"found {block.dtype}{list(block.shape)}; report this as a bug of the reader or recipe"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """What was written of one array by one task: a row of the manifest."""

    array: str
    shard: int
    """Number of the shard along the first axis."""
    start: int
    """First step that it holds."""
    stop: int
    """One past the last committed step."""
    path: str
    """File, relative to the dataset."""
    nbytes: int
    """Size of the file."""
    xxh3: str
    """xxh3-128 of the whole file, hexadecimal."""
    chunk_crc32c: tuple[int | None, ...]
    """For each chunk with a committed step, crc32c of its stored bytes before the trailing checksum; for a last
    chunk that is partly filled, crc32c of its committed rows alone; None where the chunk is absent."""

    @property
    def key(self) -> tuple[str, int]:
        """Identity within one generation."""
        return self.array, self.shard
