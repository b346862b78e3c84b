"""The ego's trajectory of a planner dataset as one more array of windows: poses seen from a window's first step."""

import numpy as np
from jaxtyping import Bool, Float32, Int64

from pipeline.loaders.anchors import find_anchors
from pipeline.loaders.reader import DatasetReader
from schemas.errors import DatasetError, UsageError
from tasks.windows import Windows

EGO = "ego_trajectory"
"""Name by which windows ask for it."""
FUTURE = "ego_agent_future"
NUM_FEATURES = 4
"""x and y in m, cosine and sine of the heading."""


class EgoTrajectory:
    """Poses of the rear axle at the steps of a window that begins at a sample: the step itself, then its recorded future.

    Raises
    ------
    DatasetError
        Not a planner dataset.
    UsageError
        A horizon longer than the future.
    """

    def __init__(self, reader: DatasetReader, horizon: int) -> None:
        if FUTURE not in reader.info.arrays:
            raise DatasetError(
                f"expected the planner's tensors for {EGO}, found none; convert with --recipe diffusion-planner"
            )
        length = reader.spec(FUTURE).row_shape[0]
        if horizon > length + 1:
            raise UsageError(f"expected a horizon of at most {length + 1} steps of {EGO}, found {horizon}; shorten it")
        self.horizon, self._future = horizon, reader.rows(FUTURE)
        name = f"{FUTURE}_valid"
        self._valid = reader.rows(name) if name in reader.info.arrays else None

    def fill(
        self,
        steps: Int64[np.ndarray, " batch"],
        is_pad: Bool[np.ndarray, "batch horizon"],
        out: Float32[np.ndarray, "batch horizon 4"],
        *,
        is_zero: bool,
    ) -> None:
        """Fill ``out`` with the poses of the windows that begin at ``steps``.

        Parameters
        ----------
        is_pad
            Receives which poses were not recorded.
        is_zero
            Zeros there; else the last recorded pose again.
        """
        num = is_pad.shape[1]
        future = self._future[steps, : num - 1]
        out[:, 0], out[:, 1:, :2] = (0.0, 0.0, 1.0, 0.0), future[..., :2]
        np.cos(future[..., 2], out=out[:, 1:, 2])
        np.sin(future[..., 2], out=out[:, 1:, 3])
        is_pad[:] = self.pads(steps, num)
        if is_zero:
            out[is_pad] = 0.0
        else:
            last = np.maximum.accumulate(np.where(is_pad, 0, np.arange(num)), axis=1)
            out[:] = np.take_along_axis(out, last[..., None], axis=1)

    def pads(self, steps: Int64[np.ndarray, " batch"], num: int) -> Bool[np.ndarray, "batch num"]:
        """Return which of the first ``num`` poses of the windows were not recorded."""
        is_pad = np.zeros((len(steps), num), np.bool_)
        if self._valid is not None:
            is_pad[:, 1:] = ~self._valid[steps, : num - 1]
        return is_pad


def ego_windows(reader: DatasetReader, horizon: int, filter: str = "") -> Windows:
    """Return one window a sample, which ends with its episode at the latest."""
    anchors = find_anchors(reader, filter, ("is_anchor",))
    ends = reader.rows("episode_ends")
    stops = np.minimum(anchors + horizon, ends[np.searchsorted(ends, anchors, side="right")])
    return Windows(starts=anchors, stops=stops, ends=np.arange(1, len(anchors) + 1), lead=0)
