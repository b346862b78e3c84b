"""Array specifications refuse what the format cannot hold."""

import numpy as np
import pytest

from schemas.dataset import ArraySpec
from schemas.errors import SchemaError

FRAMES = {
    "name": "rgb_a",
    "dims": ("step", "h", "w", "rgb"),
    "row_shape": (2, 3, 3),
    "dtype": "uint8",
    "chunk_steps": 1,
    "shard_steps": 8,
    "valid_array": "rgb_a_valid",
}


@pytest.mark.parametrize(
    "change",
    [
        {"dims": ("step",)},
        {"shard_steps": 0, "chunk_steps": 0},
        {"chunk_steps": 3},
        {"chunk_steps": 2},
        {"chunk_steps": 2, "valid_array": "", "codec": "zstd"},
        {"dtype": "object"},
    ],
)
def test_impossible_specifications_are_refused(change):
    with pytest.raises(SchemaError):
        ArraySpec(**{**FRAMES, **change})


def test_sizes_come_from_shape_and_dtype():
    spec = ArraySpec(**FRAMES)
    assert (spec.row_nbytes, spec.chunks_per_shard) == (2 * 3 * 3, 8)


@pytest.mark.parametrize(
    "block", [np.zeros((4, 2, 3, 4), np.uint8), np.zeros((4, 2, 3, 3), np.float32), np.zeros((2, 3, 3), np.uint8)]
)
def test_blocks_of_another_shape_or_dtype_are_refused(block):
    with pytest.raises(SchemaError, match=r"expected uint8\[step, 2, 3, 3\] for rgb_a"):
        ArraySpec(**FRAMES).check(block)


def test_a_block_as_specified_passes():
    ArraySpec(**FRAMES).check(np.zeros((4, 2, 3, 3), np.uint8))
