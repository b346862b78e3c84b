"""Orders and mixtures: every sample where it belongs, whatever the ranks, restarts and epochs in between."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.loaders import Blocks, MultiViewLoader, WindowLoader
from pipeline.loaders.orders import BlockShuffle, FullShuffle, Group, InOrder, Order, WeightedOrder
from pipeline.loaders.sampler import EpochSampler
from schemas.errors import ChecksumError, UsageError
from tasks.order import Partition
from tests.pipeline.loaders.test_reader import flip
from tests.pipeline.store_builder import Built, build_dataset


@pytest.fixture(name="pair", scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    folder = tmp_path_factory.mktemp("mixed")
    return build_dataset(folder / "a"), build_dataset(folder / "b", episode_lengths=(4, 3), missing={}, invalid=())


def blocks_of(num: int, seed: int) -> Order:
    return BlockShuffle(np.arange(num) * 2, Blocks(block_steps=6, buffer_blocks=3), seed)


def weighted(num: int, seed: int) -> Order:
    groups = [
        Group(0.7, FullShuffle(9, seed, (1,)), 0),
        Group(0.3, FullShuffle(4, seed, (2,)), np.array([9, 12, 11, 10])),
    ]
    return WeightedOrder(groups, num, seed)


@given(
    make=st.sampled_from([FullShuffle, lambda num, seed: InOrder(num), blocks_of, weighted]),
    num=st.integers(1, 90),
    epoch=st.integers(0, 3),
    runs=st.lists(st.tuples(st.integers(1, 17), st.integers(1, 4), st.integers(0, 6)), max_size=4),
)
def test_stopped_anywhere_and_resumed_on_any_number_of_ranks_the_order_is_that_of_one(make, num, epoch, runs):
    """``runs`` are world size, batch size, and global batches until the stop; the last goes to the end."""
    whole = make(num, 7).at(np.arange(num), epoch).tolist()
    seen: list[int] = []
    for world_size, batch_size, count in [*runs, (3, 2, num)]:
        samplers = [
            EpochSampler(
                make(num, 7), Partition(num=num, batch_size=batch_size, rank=rank, world_size=world_size, tail="keep")
            )
            for rank in range(world_size)
        ]
        for _ in range(count):
            start = len(seen)
            for sampler in samplers:
                seen.extend(sampler.batch(epoch, start)[0].tolist())
            assert samplers[0].stop(start) == len(seen)
    assert seen == whole


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), num=st.integers(1, 60), seed=st.integers(0, 99))
def test_every_group_is_served_whole_before_it_begins_again(lengths, num, seed):
    starts = np.cumsum([0, *lengths]).tolist()
    groups = [
        Group(1.0 + number, FullShuffle(length, seed, (number,)), starts[number])
        for number, length in enumerate(lengths)
    ]
    order = WeightedOrder(groups, num, seed)
    served = np.concatenate([order.at(np.arange(num), epoch) for epoch in range(6)])
    for number, length in enumerate(lengths):
        mine = served[(served >= starts[number]) & (served < starts[number + 1])] - starts[number]
        for start in range(0, len(mine), length):
            once = mine[start : start + length].tolist()
            assert len(set(once)) == len(once)
            assert set(once) <= set(range(length))


def test_a_mixture_keeps_its_shares_over_a_million_draws_and_serves_the_shorter_dataset_more_often():
    groups = [Group(0.7, FullShuffle(1000, 0, (1,)), 0), Group(0.3, FullShuffle(900_000, 0, (2,)), 1000)]
    drawn = WeightedOrder(groups, 1_000_000, 0).at(np.arange(1_000_000), 2)
    counts = np.bincount(drawn[drawn < 1000], minlength=1000)
    assert abs(counts.sum() - 700_000) < 458  # the deviation of a fair draw
    assert counts.max() - counts.min() <= 1
    assert np.bincount(drawn[drawn >= 1000]).max() == 1


def mixed(pair: tuple[Built, Built], weights: tuple[float, float] = (0.7, 0.3), **options: Any) -> MultiViewLoader:
    paths = [(built.root, weight) for built, weight in zip(pair, weights, strict=True)]
    return MultiViewLoader(paths, **{"batch_size": 5, "horizon": 3, "action_dim": 5, "tail": "keep", **options})


def identities(batches: Any) -> list[tuple[int, int]]:
    return [
        (dataset, step)
        for batch in batches
        for dataset, step in zip(batch["dataset"].tolist(), batch["index"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("batch_size", [1, 7, 27])
def test_a_batch_of_two_datasets_holds_each_sample_as_its_own_dataset_has_it(pair, batch_size, monkeypatch):
    monkeypatch.setattr("pipeline.loaders.mixed._PIECE_NBYTES", 500)
    seen = Counter()
    for batch in mixed(pair, batch_size=batch_size):
        for row, (dataset, step) in enumerate(identities([batch])):
            arrays = pair[dataset].arrays
            np.testing.assert_array_equal(batch["image"]["side"][row], arrays["rgb_side"][step])
            np.testing.assert_array_equal(batch["state"][row, :3], arrays["state"][step])
            assert batch["image_mask"]["side"][row] == arrays["rgb_side_valid"][step]
            assert batch["prompt"][row] == f"task {arrays['task_index'][step]}"
            seen[dataset] += 1
    assert sum(seen.values()) == 27
    assert abs(seen[1] - 0.3 * 27) <= 1


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": Blocks(block_steps=4, buffer_blocks=2)}, {"balance": "task"}, {"epoch_samples": 11}]
)
def test_a_mixture_stopped_anywhere_goes_on_exactly_there_on_another_number_of_ranks(pair, options):
    whole = identities(mixed(pair, batch_size=1, **options))
    for stop in range(1, len(whole), 4):
        first = mixed(pair, batch_size=1, **options)
        stream = iter(first)
        seen = [next(stream) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        assert len(json.dumps(state)) < 300
        ranks = [mixed(pair, batch_size=2, rank=rank, world_size=3, **options) for rank in range(3)]
        for rank in ranks:
            rank.load_state_dict(state)
        rests = [list(rank) for rank in ranks]
        rest = [batches[number] for number in range(len(rests[0])) for batches in rests if number < len(batches)]
        assert identities(seen) + identities(rest) == whole
        first.close()


def test_tasks_come_equally_often_when_balanced(tmp_path):
    built = build_dataset(tmp_path / "out", episode_lengths=(40, 4), missing={}, invalid=())
    served = [batch["prompt"][0] for batch in MultiViewLoader(built.root, 1, balance="task")]
    assert Counter(served) == {"task 0": 22, "task 1": 22}
    windows = WindowLoader(built.root, 1, horizon=2, balance="task", seed=1, epoch_samples=30)
    firsts = [int(batch["index"][0]) for batch in windows]
    assert sum(first >= 40 for first in firsts) == 15


def test_blocks_are_steps_and_not_samples(pair):
    order = [
        step // 4
        for batch in MultiViewLoader(pair[0].root, 1, shuffle=Blocks(block_steps=4, buffer_blocks=1))
        for step in batch["index"].tolist()
    ]
    changes = [block for k, block in enumerate(order) if k == 0 or order[k - 1] != block]
    assert sorted(changes) == [0, 1, 2, 3, 4, 5]
    assert sorted(order) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5]  # step 6 is not valid


def test_a_pickled_mixture_goes_on_where_it_was(pair):
    whole = identities(mixed(pair, shuffle="block"))
    stream = mixed(pair, shuffle="block")
    seen = identities([next(iter(stream))])
    assert seen + identities(pickle.loads(pickle.dumps(stream))) == whole
    stream.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"views": ("main",)}, r"found \['image/side', 'image_mask/side'\] in one of .*a and .*other only"),
        ({"size": (8, 4)}, r"expected image/main of uint8\[6, 4, 3\] as in .*a, found uint8\[8, 4, 3\] in .*other"),
        ({"dtype": "float32"}, r"expected image/main of uint8.* found float32"),
        ({"state_dim": 9}, r"expected state of float32\[5\] as in .*, found float32\[9\]"),
    ],
)
def test_datasets_whose_batches_differ_are_refused_with_the_difference(pair, tmp_path, other, message):
    built = build_dataset(tmp_path / "other", **{"missing": {}, **other})
    with pytest.raises(UsageError, match=message):
        mixed((pair[0], built))


def test_states_of_other_weights_or_blocks_are_refused(pair):
    state = mixed(pair).state_dict()
    for other in (
        mixed(pair, (0.6, 0.4)),
        mixed(pair, shuffle="block"),
        mixed(pair, balance="task"),
        mixed(pair, seed=1),
    ):
        with pytest.raises(UsageError, match="with order"):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="with num_samples 9"):
        mixed(pair, epoch_samples=9).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"balance": "episode"},
        {"shuffle": "blocks"},
        {"shuffle": 3},
        {"shuffle": Blocks(block_steps=0)},
        {"shuffle": Blocks(buffer_blocks=0)},
        {"epoch_samples": 0},
    ],
)
def test_impossible_orders_are_refused(pair, wrong):
    with pytest.raises(UsageError, match="expected .* found"):
        mixed(pair, **wrong)
    with pytest.raises(UsageError, match="expected one or more weights above 0"):
        mixed(pair, (1.0, 0.0))
    with pytest.raises(UsageError, match="expected a path, or pairs of path and weight"):
        MultiViewLoader([built.root for built in pair], 2)
    with pytest.raises(UsageError, match="expected a path, or pairs of path and weight"):
        MultiViewLoader([], 2)
    with pytest.raises(UsageError, match="epoch_samples"):
        MultiViewLoader(pair[0].root, 2, epoch_samples=3)


def test_a_damaged_sample_of_a_mixture_is_named_and_skipping_it_leaves_the_others_as_they_were(tmp_path: Path):
    pair = build_dataset(tmp_path / "a"), build_dataset(tmp_path / "b", episode_lengths=(4, 3), missing={}, invalid=())
    whole = identities(mixed(pair))
    flip(pair[1].root / "rgb_main" / "c.0.0.0.0", 30)
    with pytest.raises(ChecksumError) as caught:
        list(mixed(pair))
    expected = {"dataset": str(pair[1].root), "episode": "episode_0", "array": "rgb_main", "steps": 0}
    assert {name: caught.value.where[name] for name in expected} == expected
    stream = mixed(pair, on_error="skip")
    assert identities(stream) == [identity for identity in whole if identity != (1, 0)]
    assert stream.num_skipped == whole.count((1, 0)) == 1
