"""Windows: as many as the papers' code makes, in its order, and filled as it fills them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.readers.diffusion_policy import _ends
from pipeline.readers.zarr_files import FolderFiles
from schemas.errors import SchemaError, UsageError
from tasks.windows import (
    create_indices,
    diffuser_windows,
    padded_windows,
    split_at_invalid,
    window_rows,
    window_steps,
)
from tests.conftest import shared_data

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def bounds_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(lengths)
    return ends - lengths, ends


def obvious_indices(lengths: list[int], horizon: int, pad_before: int, pad_after: int) -> list[list[int]]:
    """Walk as diffusion_policy's create_indices does, one window after the other."""
    before, after = (min(max(pad, 0), horizon - 1) for pad in (pad_before, pad_after))
    found, start = [], 0
    for length in lengths:
        for first in range(-before, length - horizon + after + 1):
            buffer_start = max(first, 0) + start
            buffer_stop = min(first + horizon, length) + start
            lead = buffer_start - (first + start)
            rest = (first + horizon + start) - buffer_stop
            found.append([buffer_start, buffer_stop, lead, horizon - rest])
        start += length
    return found


@given(lengths=LENGTHS, horizon=st.integers(1, 9), pad_before=st.integers(-1, 10), pad_after=st.integers(-1, 10))
def test_windows_are_those_of_the_obvious_walk(lengths, horizon, pad_before, pad_after):
    found = create_indices(np.cumsum(lengths), horizon, pad_before=pad_before, pad_after=pad_after)
    expected = obvious_indices(lengths, horizon, pad_before, pad_after)
    np.testing.assert_array_equal(found, np.array(expected, np.int64).reshape(-1, 4))


@pytest.mark.parametrize(("padding", "count"), [((0, 0), 22_560), ((1, 7), 24_208), ((15, 15), 28_740)])
def test_pusht_has_the_windows_that_diffusion_policy_counts(padding, count):
    ends = _ends(FolderFiles(shared_data("diffusion_policy_zarr"), "pusht_cchi_v7_replay.zarr"))
    assert len(create_indices(ends, 16, pad_before=padding[0], pad_after=padding[1])) == count


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    horizon=st.integers(1, 9),
    pad_before=st.integers(0, 10),
    pad_after=st.integers(0, 10),
    seed=st.integers(0, 99),
)
def test_rows_are_repeated_at_the_edges_as_sample_sequence_does(lengths, horizon, pad_before, pad_after, seed):
    windows = padded_windows(bounds_of(lengths), horizon, pad_before=pad_before, pad_after=pad_after)
    rows = np.random.default_rng(seed).normal(size=(sum(lengths), 2)).astype(np.float32)
    rows.flags.writeable = False
    numbers = np.random.default_rng(seed).permutation(windows.num)
    out = np.full((len(numbers), horizon, 2), np.nan, np.float32)
    is_pad = np.zeros(out.shape[:2], np.bool_)
    window_rows(rows, windows.at(numbers), is_zero=False, is_pad=is_pad, out=out)
    steps = window_steps(*windows.at(numbers), count=horizon)
    for row, number in enumerate(numbers):
        start, stop, lead, end = obvious_indices(lengths, horizon, pad_before, pad_after)[number]
        sample = rows[start:stop]
        expected = np.empty((horizon, 2), np.float32)
        expected[lead:end], expected[:lead], expected[end:] = sample, sample[0], sample[-1]
        np.testing.assert_array_equal(out[row], expected)
        np.testing.assert_array_equal(rows[steps[row]], expected)
        np.testing.assert_array_equal(is_pad[row], [not lead <= k < end for k in range(horizon)])


@given(lengths=LENGTHS, horizon=st.integers(1, 9), max_steps=st.integers(12, 20), use_padding=st.booleans())
def test_diffuser_has_the_windows_of_its_make_indices_and_zeros_after_the_end(lengths, horizon, max_steps, use_padding):
    expected = []
    for episode, length in enumerate(lengths):
        max_start = min(length - 1, max_steps - horizon)
        if not use_padding:
            max_start = min(max_start, length - horizon)
        expected += [(episode, start) for start in range(max_start)]
    windows = diffuser_windows(bounds_of(lengths), horizon, max_steps=max_steps, use_padding=use_padding)
    assert windows.num == len(expected)
    rows = np.arange(1, sum(lengths) + 1, dtype=np.float32)[:, None]
    out, is_pad = np.empty((windows.num, horizon, 1), np.float32), np.empty((windows.num, horizon), np.bool_)
    window_rows(rows, windows.at(np.arange(windows.num)), is_zero=True, is_pad=is_pad, out=out)
    starts = bounds_of(lengths)[0]
    for row, (episode, start) in enumerate(expected):
        dense = np.zeros(max_steps + horizon)  # Diffuser's buffer: an episode, then zeros
        dense[: lengths[episode]] = rows[starts[episode] : starts[episode] + lengths[episode], 0]
        np.testing.assert_array_equal(out[row, :, 0], dense[start : start + horizon])


@given(lengths=LENGTHS, data=st.data())
def test_a_step_that_is_not_valid_ends_one_piece_and_begins_another(lengths, data):
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))), np.bool_)
    starts, stops = split_at_invalid(np.cumsum(lengths), valid)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    expected, piece = [], []
    for step in range(sum(lengths)):
        if piece and (not valid[step] or episode[step] != episode[piece[-1]]):
            expected.append((piece[0], piece[-1] + 1))
            piece = []
        piece += [step] if valid[step] else []
    expected += [(piece[0], piece[-1] + 1)] if piece else []
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == expected


def test_numbers_and_shapes_that_cannot_be_are_refused():
    windows = padded_windows(bounds_of([4]), 2)
    with pytest.raises(UsageError, match=r"windows in \[0, 3\)"):
        windows.at(np.array([3]))
    with pytest.raises(UsageError, match="horizon of 1"):
        padded_windows(bounds_of([4]), 0)
    with pytest.raises(SchemaError, match="up to 5 steps"):
        split_at_invalid(np.array([4]), np.ones(5, np.bool_))
    with pytest.raises(SchemaError, match="expected windows"):
        window_rows(
            np.zeros((4, 2), np.float32),
            windows.at(np.array([0])),
            is_zero=False,
            is_pad=np.zeros((1, 2), np.bool_),
            out=np.zeros((1, 2, 3), np.float32),
        )
