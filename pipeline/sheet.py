"""One labelled picture of many frames: views as rows, time as columns."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

Tile = UInt8[np.ndarray, "height width 3"] | Image.Image | None
"""A frame, or None where there is none."""

_INK, _FAINT, _PAPER, _GAP = (36, 41, 47), (110, 119, 129), (255, 255, 255), (234, 238, 242)


def contact_sheet(
    frames: Mapping[str, Sequence[Tile]],
    *,
    columns: Sequence[str] = (),
    title: str = "",
    tile_width_px: int = 240,
    missing: str = "no frame",
) -> Image.Image:
    """Lay out frames in one picture, each view a row and each column an instant.

    Parameters
    ----------
    frames
        ``view -> frames``; rows may differ in size and proportions, and None is drawn as an empty tile.
    columns
        What to write above the columns, such as ``"1.2 s"``.
    title
        A line above everything.
    tile_width_px
        Width to which every frame is scaled.
    missing
        What to write into an empty tile.
    """
    margin, gap, text_px = 12, 4, max(11, tile_width_px // 17)
    font, bold = ImageFont.load_default(text_px), ImageFont.load_default(round(text_px * 1.25))
    gutter = margin + round(max((font.getlength(view) for view in frames), default=0)) + 10
    heights = {view: _row_height(tiles, tile_width_px) for view, tiles in frames.items()}
    num_columns = max((len(tiles) for tiles in frames.values()), default=0)
    top = margin + (2 * text_px if title else 0) + (round(1.7 * text_px) if columns else 0)
    width = gutter + num_columns * (tile_width_px + gap) - gap + margin
    sheet = Image.new("RGB", (width, top + sum(heights.values()) + gap * (len(frames) - 1) + margin), _PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((margin, margin - 2), title, _INK, bold)
    for column, label in enumerate(columns):
        middle = gutter + column * (tile_width_px + gap) + tile_width_px / 2
        draw.text((middle, top - 0.35 * text_px), label, _FAINT, font, anchor="ms")
    for view, tiles in frames.items():
        draw.text((gutter - 10, top + heights[view] / 2), view, _INK, font, anchor="rm")
        for column in range(num_columns):
            tile = tiles[column] if column < len(tiles) else None
            left = gutter + column * (tile_width_px + gap)
            _put(sheet, tile, (left, top, tile_width_px, heights[view]), missing, font)
        top += heights[view] + gap
    return sheet


def _row_height(tiles: Sequence[Tile], width_px: int) -> int:
    """Return the height of a row's tallest tile; a row without any frame is as high as 3:4."""
    sizes = [_picture(tile).size for tile in tiles if tile is not None]
    return max((round(width_px * height / width) for width, height in sizes), default=round(0.75 * width_px))


def _picture(tile: Tile) -> Image.Image:
    return tile if isinstance(tile, Image.Image) else Image.fromarray(np.asarray(tile))


def _put(
    sheet: Image.Image,
    tile: Tile,
    place: tuple[int, int, int, int],
    missing: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Scale a frame into its place, or mark the place as empty."""
    left, top, width, height = place
    if tile is None:
        draw = ImageDraw.Draw(sheet)
        draw.rectangle((left, top, left + width - 1, top + height - 1), _GAP)
        draw.text((left + width / 2, top + height / 2), missing, _FAINT, font, anchor="mm")
        return
    picture = _picture(tile)
    scaled = picture.resize((width, round(width * picture.height / picture.width)), Image.Resampling.LANCZOS)
    sheet.paste(scaled, (left, top + (height - scaled.height) // 2))
