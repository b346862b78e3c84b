"""Frames as small JPEG pictures inside the page, none larger than its share of the page."""

import base64
import io

import numpy as np
from PIL import Image

from pipeline.markup import Markup, tag

TILE_WIDTH_PX = 224
_STEPS = ((1.0, 82), (1.0, 68), (0.75, 68), (0.5, 60), (0.35, 50), (0.2, 40), (0.1, 30))
"""Size and quality, tried until a picture is small enough."""


def tile(frame: np.ndarray, *, alt: str, most_nbytes: int, width_px: int = TILE_WIDTH_PX) -> Markup:
    """Return an ``<img>`` of at most ``most_nbytes`` of text (or the smallest there is), with its picture inside."""
    picture = Image.fromarray(np.ascontiguousarray(frame))
    width = min(width_px, picture.width)
    data = b""
    for share, quality in _STEPS:
        side = max(1, round(width * share))
        size = (side, max(1, min(4 * side, round(side * picture.height / picture.width))))
        buffer = io.BytesIO()
        picture.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0).save(buffer, "JPEG", quality=quality)
        data = buffer.getvalue()
        if len(data) * 4 / 3 + len(alt) + 100 <= most_nbytes:
            break
    source = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    return tag(
        "img",
        src=source,
        alt=alt,
        width=str(width),
        height=str(round(width * picture.height / picture.width)),
        loading="lazy",
    )
