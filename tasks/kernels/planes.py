"""Kernel of feature planes: tables whose columns were stored one after the other."""

import numpy as np
from jaxtyping import Shaped

from tasks.kernels.decorator import kernel


@kernel
def planes_to_rows(planes: Shaped[np.ndarray, "feature row"], out: Shaped[np.ndarray, "row feature"]) -> None:
    """Fill ``out[i, k] = planes[k, i]`` for as many rows as ``out`` has."""
    size = np.uintp(planes.shape[0])
    for i in range(np.uintp(out.shape[0])):
        for k in range(size):
            out[i, k] = planes[k, i]
