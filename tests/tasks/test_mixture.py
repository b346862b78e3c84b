"""Weighted sequences: the right shares, counted by hand, and nothing that depends on the way one came."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import UsageError
from tasks.mixture import Mixture

weights_lists = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@given(weights=weights_lists, seed=st.integers(0, 2**63), start=st.integers(0, 2**45), num=st.integers(1, 300))
def test_a_piece_anywhere_is_that_piece_of_the_sequence_and_counts_every_group(weights, seed, start, num):
    mixture = Mixture.of(weights, seed)
    groups, served = mixture.begin(start).at(np.arange(num))
    counts = mixture.begin(start).counts.tolist()
    assert sum(counts) == start
    for group, before in zip(groups.tolist(), served.tolist(), strict=True):
        assert before == counts[group]
        counts[group] += 1
    assert mixture.begin(start + num).counts[: len(weights)].tolist() == counts[: len(weights)]
    assert counts[len(weights) :] == [0] * len(counts[len(weights) :])


@given(weights=weights_lists, seed=st.integers(0, 1000), num=st.integers(1, 2000))
def test_no_group_is_ever_further_from_its_share_than_the_tree_is_high(weights, seed, num):
    groups, _ = Mixture.of(weights, seed).begin(0).at(np.arange(num))
    total = sum(map(Fraction, weights))
    for group, weight in enumerate(weights):
        seen = np.cumsum(groups == group).tolist()
        assert all(abs(count - (k + 1) * Fraction(weight) / total) <= 4.001 for k, count in enumerate(seen))


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 1, 1], [5, 0.01, 2, 2, 1]])
def test_a_million_draws_have_their_shares_within_the_error_of_a_fair_draw(weights):
    groups, _ = Mixture.of(weights, 1).begin(123_456_789).at(np.arange(1_000_000))
    shares = np.array(weights) / sum(weights)
    deviations = np.sqrt(1e6 * shares * (1 - shares))
    assert (np.abs(np.bincount(groups, minlength=len(weights)) - 1e6 * shares) < deviations).all()


@settings(max_examples=5)
@given(position=st.integers(0, 10**9))
def test_over_seeds_each_position_has_each_group_as_often_as_its_weight_says(position):
    seeds = 2000
    drawn = [int(Mixture.of([0.6, 0.25, 0.15], seed).begin(position).at(np.array([0]))[0][0]) for seed in range(seeds)]
    expected = np.array([0.6, 0.25, 0.15]) * seeds
    chi_square = ((np.bincount(drawn, minlength=3) - expected) ** 2 / expected).sum()
    assert chi_square < 27.6  # 1e-6 of chi-square with 2 degrees of freedom lies above


def test_the_sequence_is_the_same_on_every_platform():
    groups, served = Mixture.of([0.7, 0.3], 0).begin(1000).at(np.arange(8))
    assert groups.tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert served.tolist() == [300, 700, 701, 301, 702, 703, 704, 302]


@pytest.mark.parametrize("weights", [[], [0.0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(UsageError, match="expected one or more weights above 0"):
        Mixture.of(weights, 0)
