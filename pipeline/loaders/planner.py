"""Diffusion Planner's training tensors, in the order and the dtypes of its own dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.buffers import Layout
from pipeline.loaders.delivery import Arrays, Batch, BatchLoader
from pipeline.loaders.multiview import find_anchors
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.sampler import EpochSampler, FullShuffle, InOrder, rank_and_world_size
from pipeline.store.atomic import xxh3_hex
from schemas.errors import DatasetError, UsageError
from schemas.planner import NORMALIZATION, TENSORS
from tasks.order import Partition

_CUT = {"neighbor_agents_past": "past_neighbor_num", "neighbor_agents_future": "predicted_neighbor_num"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """What a planner sample is."""

    past_neighbor_num: int = 32
    """Neighbours of ``neighbor_agents_past``, nearest first."""
    predicted_neighbor_num: int = 10
    """Neighbours of ``neighbor_agents_future``."""
    future_len: int = 80
    """Steps of both futures."""
    physical: bool = False
    """Hand out observations in their units also where they are stored normalised, as Diffusion Planner's own files hold them."""
    check: str = "always"
    """Which checksums to compute: see :class:`~pipeline.loaders.reader.DatasetReader`."""

    def __post_init__(self) -> None:
        if min(self.past_neighbor_num, self.predicted_neighbor_num, self.future_len) < 1:
            raise UsageError(
                "expected neighbour numbers and future_len of 1 or more, found one below; correct the call"
            )


class PlannerSamples:
    """The samples of a planner dataset: one a step that ``is_anchor`` names.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one with the planner's tensors.
    """

    def __init__(self, path: str | Path, options: PlannerOptions) -> None:
        self.reader = DatasetReader(path, check=options.check)
        missing = [name for name in TENSORS if name not in self.reader.info.arrays]
        if missing:
            raise DatasetError(
                f"expected the planner's tensors, found none called {missing}; convert with --recipe diffusion-planner"
            )
        self.anchors = find_anchors(self.reader)
        self.fingerprint = xxh3_hex(self.anchors.view(np.uint8).data)
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
    def num(self) -> int:
        """Number of samples."""
        return len(self.anchors)

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

    def assemble(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> Batch:
        """Return the batch: the eleven tensors by name, in Diffusion Planner's order, and ``index``."""
        return {**{name: arrays[name] for name in TENSORS}, "index": arrays["index"]}


class PlannerLoader(BatchLoader):
    """Batches of Diffusion Planner's eleven tensors by name, in the order in which its dataset returns them.

    ``tuple(batch[name] for name in TENSORS)`` is the tuple that its training loop unpacks. Observations come normalised
    where the dataset stores them so, futures in metres and radians.

    Parameters
    ----------
    path
        Folder of a dataset made with a planner recipe.
    batch_size
        Samples of this rank's batch.
    seed, shuffle, rank, world_size, tail, threads, prefetch, on_error
        As for :class:`~pipeline.loaders.multiview.MultiViewLoader`.
    options
        Fields of :class:`PlannerOptions`.
    """

    def __init__(  # noqa: PLR0913 - a keyword is an option, as in torch's DataLoader
        self,
        path: str | Path,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "drop",
        threads: int = 2,
        prefetch: int = 2,
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        rank, world_size = rank_and_world_size(rank, world_size)
        samples = PlannerSamples(path, PlannerOptions(**options))
        order = FullShuffle(samples.num, seed) if shuffle else InOrder(samples.num)
        partition = Partition(num=samples.num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        super().__init__(samples, EpochSampler(order, partition), threads=threads, prefetch=prefetch, on_error=on_error)


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
