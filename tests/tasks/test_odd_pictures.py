"""An episode recorded otherwise than the rest is named, and nothing else is."""

import numpy as np
import pytest

from tasks.odd_pictures import mean_picture, odd_pictures

CHANGES = {
    "red and blue were swapped": lambda frame: frame[:, :, ::-1],
    "it were upside down": lambda frame: frame[::-1],
    "it were turned by 180 degrees": lambda frame: frame[::-1, ::-1],
    "it were mirrored": lambda frame: frame[:, ::-1],
}


def scene(seed: int) -> np.ndarray:
    """Return a frame, red above on the left, and noise of its own."""
    y, x = np.mgrid[:48, :64]
    frame = np.stack([220 - 3 * y - x, 60 + y, 30 + x], axis=2)
    return np.clip(frame + np.random.default_rng(seed).integers(-9, 10, frame.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("odd", [0, 2])
def test_the_one_that_is_changed_is_named_with_its_change(what, odd):
    frames = [[scene(10 * episode + k) for k in range(3)] for episode in range(4)]
    frames[odd] = [CHANGES[what](frame) for frame in frames[odd]]
    found = odd_pictures(np.stack([mean_picture(episode) for episode in frames]))
    assert found == [what if episode == odd else "" for episode in range(4)]


def test_of_two_nobody_can_say_which_is_odd():
    means = np.stack([mean_picture([scene(0)]), mean_picture([scene(1)[:, :, ::-1]])])
    assert odd_pictures(means) == ["", ""]


def test_episodes_that_merely_differ_are_let_be():
    colours = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8)
    assert odd_pictures(np.stack([mean_picture([frame]) for frame in colours])) == [""] * 6


def test_a_mean_is_of_places_spread_over_the_frame():
    rows = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None], (32, 16, 3))
    np.testing.assert_array_equal(mean_picture([rows, rows + np.uint8(2)])[:, 0, 0], np.arange(16) * 2 + 2)
