"""Block shuffle: a permutation in which little is open at a time, and what it costs in shuffling."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import UsageError
from tasks.blocks import BlockOrder, block_bounds
from tasks.order import shuffled
from tasks.shuffle_quality import shuffle_quality


@given(
    gaps=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    block_steps=st.integers(1, 40),
    buffer_blocks=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_once_and_no_more_blocks_than_the_buffer_holds_are_open(
    gaps, block_steps, buffer_blocks, seed, epoch
):
    steps = np.cumsum(gaps)
    order = BlockOrder.of(block_bounds(steps, block_steps), buffer_blocks, seed=seed, epoch=epoch)
    samples = order.at(np.arange(len(steps)))
    assert sorted(samples.tolist()) == list(range(len(steps)))
    blocks = (steps[samples] // block_steps).tolist()
    first = {block: blocks.index(block) for block in blocks}
    last = {block: len(blocks) - 1 - blocks[::-1].index(block) for block in blocks}
    open_blocks = [sum(first[block] <= k <= last[block] for block in first) for k in range(len(blocks))]
    assert max(open_blocks) <= buffer_blocks
    some = np.array([len(steps) - 1, 0, len(steps) // 2])
    assert order.at(some).tolist() == samples[some].tolist()


def test_blocks_and_the_samples_in_them_change_places_with_the_epoch():
    bounds = block_bounds(np.arange(640), 10)
    orders = [BlockOrder.of(bounds, 8, seed=0, epoch=epoch).at(np.arange(640)) for epoch in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.count_nonzero(orders[one] == orders[other]) < 10


@pytest.mark.parametrize("wrong", [-1, 640])
def test_a_position_outside_the_epoch_is_refused(wrong):
    order = BlockOrder.of(block_bounds(np.arange(640), 10), 8, seed=0, epoch=0)
    with pytest.raises(UsageError, match=r"expected positions in \[0, 640\)"):
        order.at(np.array([wrong]))


def test_impossible_sizes_are_refused():
    with pytest.raises(UsageError, match="expected blocks of 1 step or more"):
        block_bounds(np.arange(4), 0)
    with pytest.raises(UsageError, match="expected a buffer of 1 block or more"):
        BlockOrder.of(block_bounds(np.arange(4), 1), 0, seed=0, epoch=0)


def test_the_quality_of_orders_whose_figures_are_known():
    numpys = shuffle_quality(np.random.default_rng(0).permutation(100_000), 64)
    assert numpys.displacement == pytest.approx(1, abs=0.01)
    assert numpys.serial_correlation == pytest.approx(0, abs=0.01)
    assert numpys.batch_spread == pytest.approx(1, abs=0.06)
    recorded = shuffle_quality(np.arange(100_000), 64)
    assert recorded.displacement == 0
    assert recorded.serial_correlation == pytest.approx(1)
    assert recorded.batch_spread == pytest.approx(8, rel=0.01)  # the root of 64: a batch says as much as one sample
    assert (numpys.near_pairs < 0.03, recorded.near_pairs) == (True, 1)
    backwards = shuffle_quality(np.arange(100_000)[::-1], 64)
    assert backwards.displacement == pytest.approx(1.5, rel=0.001)  # (n / 2) / (n / 3)
    with pytest.raises(UsageError, match="expected 2 batches"):
        shuffle_quality(np.arange(3), 2)


def test_larger_buffers_shuffle_better_and_a_full_shuffle_best():
    num, bounds = 100_000, block_bounds(np.arange(100_000), 64)
    spreads = [
        shuffle_quality(BlockOrder.of(bounds, blocks, seed=0, epoch=0).at(np.arange(num)), 64).batch_spread
        for blocks in (1, 16, 256)
    ]
    spreads.append(shuffle_quality(shuffled(np.arange(num), num, seed=0, epoch=0), 64).batch_spread)
    assert spreads[0] > 7 > spreads[1] > 1.5 > spreads[2] > spreads[3]
    assert spreads[3] == pytest.approx(1, abs=0.06)
