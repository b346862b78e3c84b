"""Samples of a planner dataset in pieces that memory holds, in their units."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pipeline.store.metadata import DatasetInfo, read_info
from pipeline.store.rows import RowReader
from pipeline.track_arrays import keeps_tracks
from pipeline.track_scenes import TrackScenes
from schemas.errors import DatasetError
from schemas.planner import TENSORS, Scaling
from tasks.planner_normalize import denormalize_observation, stored_normalization

BLOCK_SAMPLES = 256
FUTURE_VALID = "ego_agent_future_valid"


class PlannerBlocks:
    """The samples that a planner dataset serves, those of replaced episodes left out.

    Raises
    ------
    DatasetError
        Not a planner dataset.
    """

    def __init__(self, path: str | Path) -> None:
        self.info: DatasetInfo = read_info(path)
        missing = [name for name in (*TENSORS, "is_anchor") if name not in self.info.arrays]
        self._tracks = TrackScenes(self.info) if keeps_tracks(self.info) else None
        if missing and self._tracks is None:
            raise DatasetError(
                f"expected the planner's tensors, found none called {missing}; convert with --recipe diffusion-planner or planner-npz"
            )
        self._rows = RowReader(self.info)
        self._scalings: Mapping[str, Scaling] = stored_normalization(self.info.recipe["planner"]["normalize"])
        is_sample = self._rows.read("is_anchor", 0, self.info.num_steps)
        self.info.hide_replaced(is_sample, np.arange(self.info.num_steps))
        self.anchors: Int64[np.ndarray, " sample"] = np.flatnonzero(is_sample)
        """Steps that are samples."""

    def read(self, names: Sequence[str], steps: Int64[np.ndarray, " sample"]) -> dict[str, np.ndarray]:
        """Return arrays ``[sample, ...]`` of some steps, in their units."""
        block = self._block(names, steps)
        return denormalize_observation(block, {name: self._scalings[name] for name in names if name in self._scalings})

    def _block(self, names: Sequence[str], steps: np.ndarray) -> dict[str, np.ndarray]:
        if self._tracks is None:
            return {name: self._rows.take(name, steps) for name in names}
        block = self._tracks.block(steps)
        return {name: block[name] for name in names}

    def whole(self) -> Int64[np.ndarray, " sample"]:
        """Return the samples of which the ego's whole future was recorded."""
        if FUTURE_VALID not in self.info.arrays and self._tracks is None:
            return self.anchors
        kept = [self._block((FUTURE_VALID,), steps)[FUTURE_VALID].all(axis=1) for steps in pieces(self.anchors)]
        return self.anchors[np.concatenate(kept)] if kept else self.anchors


def pieces(steps: Int64[np.ndarray, " sample"]) -> Iterator[Int64[np.ndarray, " piece"]]:
    """Yield steps in pieces of :data:`BLOCK_SAMPLES`, in order."""
    for start in range(0, len(steps), BLOCK_SAMPLES):
        yield steps[start : start + BLOCK_SAMPLES]
