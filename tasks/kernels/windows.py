"""Kernels of windows: rows around a first step, repeated or zero beyond the bounds."""

import numpy as np
from jaxtyping import Bool, Float32, Int64

from tasks.kernels.decorator import kernel


@kernel
def gather_windows(
    rows: Float32[np.ndarray, "step dim"],
    firsts: Int64[np.ndarray, " batch"],
    lows: Int64[np.ndarray, " batch"],
    highs: Int64[np.ndarray, " batch"],
    is_zero: bool,
    is_pad: Bool[np.ndarray, "batch horizon"],
    out: Float32[np.ndarray, "batch horizon dim"],
) -> None:
    """Fill ``out[b, k] = rows[clip(firsts[b] + k, lows[b], highs[b] - 1)]``, or zeros there where ``is_zero`` and clipped.

    ``is_pad[b, k]`` says whether the step was clipped.
    """
    dim = np.uintp(out.shape[2])
    for b in range(np.uintp(firsts.size)):
        low, last = lows[b], highs[b] - 1
        for k in range(np.uintp(out.shape[1])):
            wanted = firsts[b] + np.int64(k)
            step = np.uintp(min(max(wanted, low), last))
            clipped = wanted < low or wanted > last
            is_pad[b, k] = clipped
            if clipped and is_zero:
                for d in range(dim):
                    out[b, k, d] = np.float32(0)
            else:
                for d in range(dim):
                    out[b, k, d] = rows[step, d]
