"""Kernels of openpi's own arithmetic, equal to the bit."""

import numpy as np
from jaxtyping import Float32, UInt8

from tasks.kernels.decorator import kernel


@kernel
def scale_pixels(pixels: UInt8[np.ndarray, " n"], out: Float32[np.ndarray, " n"]) -> None:
    """Fill ``out = pixels.astype(float32) / 255 * 2 - 1``, each operation rounded to float32 as there.

    ``Observation.from_dict`` of openpi's ``models/model.py``. Multiplying by ``2 / 255`` instead differs in the last bit.
    """
    for i in range(np.uintp(pixels.size)):
        out[i] = np.float32(pixels[i]) / np.float32(255) * np.float32(2) - np.float32(1)
