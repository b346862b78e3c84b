"""Kernel of action chunks: the rows they take."""

import numpy as np
from jaxtyping import Bool, Float32, Int64

from tasks.kernels.decorator import kernel


@kernel
def gather_chunks(
    rows: Float32[np.ndarray, "step dim"],
    anchors: Int64[np.ndarray, " batch"],
    stops: Int64[np.ndarray, " batch"],
    is_pad: Bool[np.ndarray, "batch horizon"],
    out: Float32[np.ndarray, "batch horizon wide"],
) -> None:
    """Fill ``out[b, k, :dim] = rows[min(anchors[b] + k, stops[b] - 1)]``, the rest of ``wide`` with 0.

    ``is_pad[b, k] = anchors[b] + k >= stops[b]``. ``wide >= dim``.
    """
    dim = np.uintp(rows.shape[1])
    wide = np.uintp(out.shape[2])
    for b in range(np.uintp(anchors.size)):
        last = np.uintp(stops[b] - 1)
        for k in range(np.uintp(out.shape[1])):
            step = np.uintp(anchors[b]) + k
            is_pad[b, k] = step > last
            step = min(step, last)
            for d in range(dim):
                out[b, k, d] = rows[step, d]
            for d in range(dim, wide):
                out[b, k, d] = np.float32(0)
