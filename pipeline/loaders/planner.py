"""Diffusion Planner's training tensors, in the order and the dtypes of its own dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.anchors import AnchoredSamples, ReadOptions
from pipeline.loaders.buffers import Layout
from pipeline.loaders.dataset_loader import DatasetLoader
from pipeline.loaders.delivery import Arrays, Batch, Texts
from schemas.errors import DatasetError, UsageError
from schemas.planner import NORMALIZATION, TENSORS

_CUT = {"neighbor_agents_past": "past_neighbor_num", "neighbor_agents_future": "predicted_neighbor_num"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions(ReadOptions):
    """What a planner sample is."""

    past_neighbor_num: int = 32
    """Neighbours of ``neighbor_agents_past``, nearest first."""
    predicted_neighbor_num: int = 10
    """Neighbours of ``neighbor_agents_future``."""
    future_len: int = 80
    """Steps of both futures."""
    physical: bool = False
    """Hand out observations in their units also where they are stored normalised, as Diffusion Planner's own files hold them."""

    def __post_init__(self) -> None:
        if min(self.past_neighbor_num, self.predicted_neighbor_num, self.future_len) < 1:
            raise UsageError(
                "expected neighbour numbers and future_len of 1 or more, found one below; correct the call"
            )


class PlannerSamples(AnchoredSamples):
    """The samples of a planner dataset: one a step that ``is_anchor`` names.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one with the planner's tensors.
    """

    masks: ClassVar[tuple[str, ...]] = ("is_anchor",)
    """Not ``valid``: that asks for state and actions too, which no tensor has: a NaN brake, or a measurement that was bridged, costs no sample."""

    def __init__(self, path: str | Path, options: PlannerOptions) -> None:
        super().__init__(path, options)
        missing = [name for name in TENSORS if name not in self.reader.info.arrays]
        if missing:
            raise DatasetError(
                f"expected the planner's tensors, found none called {missing}; convert with --recipe diffusion-planner"
            )
        stored = self.reader.info.recipe["planner"]["normalize"] == "published"
        self._scaled = tuple(NORMALIZATION) if options.physical and stored else ()
        self._shapes = {name: self._shape(name, options) for name in TENSORS}
        self._held = {name: self.reader.rows(name) for name in TENSORS if self.reader.spec(name).chunk_steps > 1}

    def _shape(self, name: str, options: PlannerOptions) -> tuple[int, ...]:
        stored = self.reader.spec(name).row_shape
        shape = list(stored)
        if name in _CUT:
            shape[0] = getattr(options, _CUT[name])
        if name.endswith("_future"):
            shape[-2] = options.future_len
        if any(wanted > found for wanted, found in zip(shape, stored, strict=True)):
            raise UsageError(
                f"expected at most {list(stored)} of {name}, found {shape}; ask for fewer, or convert with more"
            )
        return tuple(shape)

    @property
    def layout(self) -> Layout:
        """Arrays of a batch."""
        arrays = {name: (self._shapes[name], self.reader.spec(name).dtype) for name in TENSORS}
        return {**arrays, "index": ((), "int64")}

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays`` with ``samples``; safe in several threads at once."""
        steps = self.anchors[samples]
        arrays["index"][:] = steps
        for name, shape in self._shapes.items():
            spec = self.reader.spec(name)
            cut = (slice(None), *(slice(0, side) for side in shape))
            if name in self._held:
                arrays[name][...] = self._held[name][steps][cut]
            elif shape == spec.row_shape:
                self.reader.gather(name, steps, arrays[name])
            else:
                whole = np.empty((len(steps), *spec.row_shape), spec.dtype)
                self.reader.gather(name, steps, whole)
                arrays[name][...] = whole[cut]
        if self._scaled:
            from tasks.planner_normalize import denormalize_observation

            for name, rows in denormalize_observation({name: arrays[name] for name in self._scaled}).items():
                arrays[name][...] = rows

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch: the eleven tensors by name, in Diffusion Planner's order, and ``index``."""
        return {**{name: arrays[name] for name in TENSORS}, "index": arrays["index"]}


class PlannerLoader(DatasetLoader):
    """Batches of Diffusion Planner's eleven tensors by name, in the order in which its dataset returns them.

    ``tuple(batch[name] for name in TENSORS)`` is the tuple that its training loop unpacks. Observations come normalised
    where the dataset stores them so, futures in metres and radians.

    Parameters are those of :class:`~pipeline.loaders.dataset_loader.DatasetLoader`, its options the fields of
    :class:`PlannerOptions`.
    """

    samples_type = PlannerSamples
    options_type = PlannerOptions


class PlannerDataset:
    """A drop-in for Diffusion Planner's ``DiffusionPlannerData``: one sample is the tuple of its eleven tensors."""

    def __init__(self, path: str | Path, **options: Any) -> None:
        self._path, self._options = path, options
        self._samples = PlannerSamples(path, PlannerOptions(**options))

    def __len__(self) -> int:
        return self._samples.num

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, found {index}")
        arrays = {name: np.empty((1, *shape), dtype) for name, (shape, dtype) in self._samples.layout.items()}
        self._samples.fill(np.array([index % len(self)]), arrays)
        return tuple(arrays[name][0] for name in TENSORS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self._path, self._options)


def _remake(path: str | Path, options: Mapping[str, Any]) -> PlannerDataset:
    return PlannerDataset(path, **options)
