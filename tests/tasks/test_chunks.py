"""Action chunks against the obvious loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tasks.chunks import action_chunks, chunk_stops

lengths = st.lists(st.integers(0, 12), min_size=1, max_size=5)


def obvious_stop(step: int, ends: list[int], valid: list[bool]) -> int:
    stop = step + 1
    while stop not in ends and valid[stop]:
        stop += 1
    return stop


@given(lengths=lengths, horizon=st.integers(1, 15), extra=st.integers(0, 3), data=st.data())
def test_chunks_match_the_obvious_python(lengths, horizon, extra, data):
    ends = np.cumsum(lengths)
    num_steps = int(ends[-1])
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=num_steps, max_size=num_steps)), dtype=bool)
    actions = np.arange(num_steps * 2, dtype="f4").reshape(-1, 2) + 1
    actions.flags.writeable = valid.flags.writeable = ends.flags.writeable = False
    anchors = np.flatnonzero(valid)
    stops = chunk_stops(ends, valid)[anchors]
    is_pad = np.empty((len(anchors), horizon), dtype=bool)
    out = np.full((len(anchors), horizon, 2 + extra), np.nan, dtype="f4")
    action_chunks(actions, anchors, stops, is_pad=is_pad, out=out)
    for row, step in enumerate(anchors.tolist()):
        stop = obvious_stop(step, ends.tolist(), valid.tolist())
        np.testing.assert_array_equal(out[row, :, :2], [actions[min(step + k, stop - 1)] for k in range(horizon)])
        np.testing.assert_array_equal(is_pad[row], [step + k >= stop for k in range(horizon)])
        assert valid[[min(step + k, stop - 1) for k in range(horizon)]].all()
    assert not out[:, :, 2:].any()


def test_a_chunk_does_not_reach_over_an_invalid_step_or_into_the_next_episode():
    valid = np.array([1, 1, 1, 0, 1, 1, 1], dtype=bool)
    np.testing.assert_array_equal(chunk_stops(np.array([5, 7]), valid), [3, 3, 3, 5, 5, 7, 7])


def test_no_episodes_have_no_stops():
    assert chunk_stops(np.array([], dtype=np.int64), np.array([], dtype=bool)).shape == (0,)


@pytest.mark.parametrize("ends", [[3], [5], [3, 2, 4], [-1, 4], []])
def test_episode_ends_that_do_not_fit_the_steps_are_refused(ends):
    with pytest.raises(SchemaError, match="expected episode ends"):
        chunk_stops(np.array(ends, dtype=np.int64), np.ones(4, dtype=bool))


@pytest.mark.parametrize(("anchor", "stop"), [(-1, 2), (2, 5), (2, 2)])
def test_anchors_outside_their_episode_are_refused(anchor, stop):
    buffers = {"is_pad": np.empty((1, 3), dtype=bool), "out": np.empty((1, 3, 2), dtype="f4")}
    with pytest.raises(SchemaError, match="expected anchors"):
        action_chunks(np.zeros((4, 2), "f4"), np.array([anchor]), np.array([stop]), **buffers)


@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 4, 2), (1, 3, 1)])
def test_buffers_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(SchemaError, match="expected chunks of 1 x horizon x 2"):
        action_chunks(
            np.zeros((4, 2), "f4"),
            np.array([0]),
            np.array([1]),
            is_pad=np.empty((1, 3), dtype=bool),
            out=np.empty(shape, dtype="f4"),
        )
