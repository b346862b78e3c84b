"""Batches' memory: reused when free, never while anybody looks."""

import multiprocessing

import numpy as np
import pytest

from pipeline.loaders.buffers import BatchBuffers

LAYOUT = {"image": ((4, 3), "uint8"), "state": ((2,), "float32"), "flag": ((), "bool")}


def address(arrays: dict[str, np.ndarray]) -> int:
    return arrays["image"].ctypes.data


def test_arrays_have_their_shapes_and_do_not_overlap():
    arrays = BatchBuffers(LAYOUT, 5, num_kept=1).lease(5)
    assert {name: (array.shape, str(array.dtype)) for name, array in arrays.items()} == {
        "image": ((5, 4, 3), "uint8"),
        "state": ((5, 2), "float32"),
        "flag": ((5,), "bool"),
    }
    for number, array in enumerate(arrays.values()):
        array[...] = number
    assert [float(array.mean()) for array in arrays.values()] == [0, 1, 1]
    assert all(array.flags.writeable and array.ctypes.data % 64 == 0 for array in arrays.values())


@pytest.mark.parametrize("keep", ["image", "state", "flag"])
def test_a_batch_is_reused_only_when_its_last_view_is_gone(keep):
    buffers = BatchBuffers(LAYOUT, 5, num_kept=2)
    arrays = buffers.lease(5)
    first = address(arrays)
    held = arrays[keep][1:3][::2].T
    del arrays
    other = buffers.lease(5)
    assert address(other) != first
    del held
    assert address(buffers.lease(5)) == first


def test_no_more_buffers_are_kept_than_asked():
    buffers = BatchBuffers(LAYOUT, 5, num_kept=2)
    leases = [buffers.lease(5) for _ in range(5)]
    del leases
    assert len(buffers._free) == 2


def test_batches_outlive_their_pool():
    arrays = BatchBuffers(LAYOUT, 5, num_kept=2).lease(3)
    arrays["image"][...] = 7
    assert arrays["image"].sum() == 7 * 36


def _overwrite(arrays: dict[str, np.ndarray]) -> None:
    arrays["image"][...] = 9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_write_into_its_parents_batches():
    arrays = BatchBuffers(LAYOUT, 5, num_kept=2).lease(5)
    arrays["image"][...] = 1
    child = multiprocessing.get_context("fork").Process(target=_overwrite, args=(arrays,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert arrays["image"].max() == 1
