"""One picture of many frames."""

import numpy as np
import pytest
from PIL import Image

from pipeline.sheet import contact_sheet

RED, BLUE = (200, 20, 20), (20, 20, 200)


def frame(colour: tuple[int, int, int], height: int, width: int) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3))


def columns_of(sheet: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    return np.flatnonzero((np.asarray(sheet) == colour).all(axis=2).any(axis=0))


def rows_of(sheet: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    return np.flatnonzero((np.asarray(sheet) == colour).all(axis=2).any(axis=1))


def test_views_are_rows_and_instants_are_columns() -> None:
    sheet = contact_sheet({"front": [frame(RED, 9, 16)] * 3, "back": [frame(BLUE, 9, 16)] * 3}, tile_width_px=160)
    red, blue = rows_of(sheet, RED), rows_of(sheet, BLUE)
    assert len(red) == len(blue) == 90
    assert red.max() < blue.min()
    assert len(columns_of(sheet, RED)) == 3 * 160


def test_rows_keep_their_own_proportions() -> None:
    sheet = contact_sheet({"wide": [frame(RED, 10, 40)], "square": [frame(BLUE, 30, 30)]}, tile_width_px=120)
    assert (len(rows_of(sheet, RED)), len(rows_of(sheet, BLUE))) == (30, 120)


def test_a_missing_frame_leaves_a_marked_gap() -> None:
    tiles = {"front": [frame(RED, 9, 16), None, frame(RED, 9, 16)], "wrist": [None, None, None]}
    sheet = contact_sheet(tiles, tile_width_px=160, missing="masked")
    assert len(columns_of(sheet, RED)) == 2 * 160
    assert len(rows_of(sheet, (234, 238, 242))) >= 90 + 120


def test_labels_make_room_for_themselves() -> None:
    plain = contact_sheet({"front": [frame(RED, 9, 16)]}, tile_width_px=160)
    labelled = contact_sheet({"front": [frame(RED, 9, 16)]}, tile_width_px=160, columns=["0.0 s"], title="A drive")
    longer = contact_sheet({"front camera, left": [frame(RED, 9, 16)]}, tile_width_px=160)
    assert labelled.height > plain.height
    assert longer.width > plain.width
    assert len(rows_of(labelled, RED)) == len(rows_of(plain, RED)) == 90


def test_pictures_and_arrays_give_the_same_sheet() -> None:
    array = np.random.default_rng(0).integers(0, 255, (18, 32, 3), np.uint8)
    array.flags.writeable = False
    sheets = [contact_sheet({"front": [tile]}) for tile in (array, Image.fromarray(array))]
    assert sheets[0].tobytes() == sheets[1].tobytes()


@pytest.mark.parametrize("frames", [{}, {"front": []}])
def test_nothing_gives_an_empty_sheet(frames: dict[str, list[np.ndarray]]) -> None:
    assert contact_sheet(frames).width > 0
