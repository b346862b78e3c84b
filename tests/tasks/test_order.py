"""The order of samples: a bijection, the same everywhere, shared out without holes or repeats."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import UsageError
from tasks.kernels.order import permute
from tasks.order import NUM_ROUNDS, TAILS, Partition, epoch_keys, shuffled

WORD = (1 << 64) - 1


def feistel(position: int, num: int, keys: list[int], bits: int) -> int:
    """Compute one position in Python integers, from the description alone."""
    low_bits = bits // 2
    value = position
    while True:
        low, high = value % (1 << low_bits), value >> low_bits
        for number, key in enumerate(keys):
            mixed = ((low if number % 2 else high) + key) & WORD
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
            mixed ^= mixed >> 31
            if number % 2:
                high ^= mixed % (1 << (bits - low_bits))
            else:
                low ^= mixed % (1 << low_bits)
        value = (high << low_bits) | low
        if value < num:
            return value


@given(num=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_epoch_serves_every_sample_exactly_once(num, seed, epoch):
    order = shuffled(np.arange(num), num, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(num))


@given(bits=st.integers(1, 9), keys=st.lists(st.integers(0, WORD), min_size=1, max_size=9), data=st.data())
def test_the_kernel_permutes_any_domain_with_any_keys(bits, keys, data):
    num = data.draw(st.integers(1, 1 << bits))
    out = np.full(num, -1)
    permute(np.arange(num), np.uint64(num), np.uint64(bits), np.array(keys, np.uint64), out)
    assert out.tolist() == [feistel(position, num, keys, bits) for position in range(num)]
    assert sorted(out) == list(range(num))


@given(num=st.integers(1, 2**62), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=50)
def test_positions_of_astronomic_epochs_agree_with_python_integers(num, seed, data):
    position = data.draw(st.integers(0, num - 1))
    keys = [int(key) for key in epoch_keys(seed, 3)]
    expected = feistel(position, num, keys, max(10, (num - 1).bit_length()))
    assert shuffled(np.array([position]), num, seed=seed, epoch=3).tolist() == [expected]


def test_the_order_is_the_same_on_every_platform_and_release():
    assert [int(key) for key in epoch_keys(7, 2)[:2]] == [17559002276220262541, 3147876876828449332]
    assert shuffled(np.arange(10), 10, seed=7, epoch=2).tolist() == [1, 3, 8, 5, 6, 0, 2, 9, 4, 7]
    expected = [493593054, 244584302, 637854137, 967240402, 785038953]
    assert shuffled(np.arange(5), 10**9, seed=0, epoch=0).tolist() == expected


def test_a_piece_of_the_order_is_that_piece_of_the_whole_order():
    whole = shuffled(np.arange(1000), 1000, seed=1, epoch=5)
    np.testing.assert_array_equal(shuffled(np.array([999, 3, 3, 500]), 1000, seed=1, epoch=5), whole[[999, 3, 3, 500]])


def test_epochs_and_seeds_give_unrelated_orders():
    orders = [shuffled(np.arange(500), 500, seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) < 10  # 1 expected, 10 with a chance of 1e-7


def test_all_orders_of_four_samples_are_equally_likely():
    counts = Counter(tuple(shuffled(np.arange(4), 4, seed=seed, epoch=0).tolist()) for seed in range(4800))
    chi_square = sum((counts[order] - 200) ** 2 / 200 for order in itertools.permutations(range(4)))
    assert chi_square < 49.7  # 0.1 % of chi-square with 23 degrees of freedom lies above


def test_neighbours_in_an_epoch_are_not_neighbours_in_the_recording():
    order = shuffled(np.arange(100_000), 100_000, seed=0, epoch=0)
    steps = np.abs(np.diff(order))
    assert np.count_nonzero(steps < 10) < 300  # 180 expected
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("positions", [[-1], [5]])
def test_a_position_outside_the_epoch_is_refused(positions):
    with pytest.raises(UsageError, match=r"expected positions in \[0, 5\)"):
        shuffled(np.array(positions), 5, seed=0, epoch=0)


def test_negative_seeds_are_refused():
    with pytest.raises(UsageError, match="seed"):
        epoch_keys(-1, 0)
    assert len(epoch_keys(0, 0)) == NUM_ROUNDS


def walk(num: int, batch_size: int, world_size: int, tail: str, start: int = 0):
    """Yield (positions, new) of every global batch over all ranks, rank by rank."""
    ranks = [
        Partition(num=num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        for rank in range(world_size)
    ]
    while (stop := ranks[0].stop(start)) > start:
        yield [rank.positions(start) for rank in ranks]
        start = stop


@given(
    num=st.integers(0, 200),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 17),
    tail=st.sampled_from(TAILS),
    start=st.integers(0, 200),
)
def test_all_ranks_together_see_every_position_once_in_order(num, batch_size, world_size, tail, start):
    start = min(start, num)
    batches = list(walk(num, batch_size, world_size, tail, start))
    new = [position for batch in batches for positions, count in batch for position in positions[:count].tolist()]
    left_out = (num - start) % (batch_size * world_size) if tail == "drop" else 0
    assert new == list(range(start, num - left_out))
    sizes = [[len(positions) for positions, _ in batch] for batch in batches]
    assert all(max(row) - min(row) <= 1 for row in sizes)
    assert all(set(row) == {batch_size} for row in sizes[: None if tail != "keep" else -1])
    for rank in range(world_size):
        partition = Partition(num=num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        assert partition.num_batches(start) == sum(row[rank] > 0 for row in sizes)


@given(num=st.integers(1, 60), batch_size=st.integers(1, 9), world_size=st.integers(1, 17))
def test_a_padded_tail_repeats_the_beginning_of_the_order(num, batch_size, world_size):
    *_, last = walk(num, batch_size, world_size, "pad")
    positions = [position for rank, _ in last for position in rank.tolist()]
    start = num - num % len(positions) if num % len(positions) else num - len(positions)
    assert positions == [(start + k) % num for k in range(len(positions))]


@pytest.mark.parametrize(
    "wrong", [{"tail": "wrap"}, {"rank": 2, "world_size": 2}, {"rank": -1}, {"batch_size": 0}, {"num": -1}]
)
def test_impossible_partitions_are_refused(wrong):
    with pytest.raises(UsageError, match="expected .* found"):
        Partition(**{"num": 10, "batch_size": 2, **wrong})
