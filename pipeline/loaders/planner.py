"""Diffusion Planner's training tensors, in the order and the dtypes of its own dataset."""

import json
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
from pipeline.track_arrays import keeps_tracks
from schemas.errors import DatasetError, SchemaError, UsageError
from schemas.planner import TENSORS, Scaling
from tasks.order import uniforms
from tasks.planner_augment import Perturbation, perturb_by, perturbed_rows
from tasks.planner_normalize import (
    denormalize_observation,
    normalization_from_json,
    normalize_observation,
    stored_normalization,
)

_FUTURE_VALID = "ego_agent_future_valid"
_PART = 0x706572
"""Keeps the draws of a perturbation apart from those of the order with the same seed."""
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
    normalization: str | Path = ""
    """A ``normalization.json`` by which observations are handed out; empty for as they are stored."""
    tracks_nbytes: int = 4 << 30
    """Memory for prepared episodes of a dataset that keeps tracks (``store = "tracks"``): where it does not hold them all, take
    ``shuffle="block"``, which stays with a few for a while."""
    perturbation: Perturbation | None = None
    """Diffusion Planner's augmentation of the ego's state, ``Perturbation()`` with its published constants; None for none."""
    perturbation_seed: int = 0
    """With the epoch and the sample, all that decides a perturbation."""

    def __post_init__(self) -> None:
        if min(self.past_neighbor_num, self.predicted_neighbor_num, self.future_len) < 1:
            raise UsageError(
                "expected neighbour numbers and future_len of 1 or more, found one below; correct the call"
            )
        if self.physical and self.normalization:
            raise UsageError("expected physical=True or a normalization, found both; leave one out")


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
        arrays = self.reader.info.arrays
        self._tracks: Any = None
        if keeps_tracks(self.reader.info):
            from pipeline.track_scenes import TrackScenes

            self._tracks = TrackScenes(self.reader.info, options.tracks_nbytes)
        missing = [name for name in TENSORS if name not in arrays and self._tracks is None]
        if missing:
            raise DatasetError(
                f"expected the planner's tensors, found none called {missing}; convert with --recipe diffusion-planner"
            )
        self.options = options
        self._stored = stored_normalization(self.reader.info.recipe["planner"]["normalize"])
        """What observations are stored by."""
        self._given: Mapping[str, Scaling] = {} if options.physical else self._stored
        """What they are handed out by."""
        if options.normalization:
            sizes = {name: self._stored_row(name)[0][-1] for name in TENSORS}
            self._given = read_normalization(options.normalization, sizes)
        self._dtypes = {name: self._stored_row(name)[1] for name in TENSORS}
        self._shapes = {name: self._shape(name, options) for name in TENSORS}
        held = [name for name in (*TENSORS, _FUTURE_VALID) if name in arrays and self._tracks is None]
        self._held = {name: self.reader.rows(name) for name in held if self.reader.spec(name).chunk_steps > 1}

    def _shape(self, name: str, options: PlannerOptions) -> tuple[int, ...]:
        stored, _ = self._stored_row(name)
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

    def _stored_row(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of a tensor, as it is stored or computed, without the batch axis."""
        if self._tracks is not None:
            _, shape, dtype = self._tracks.shapes[name]
            return shape, dtype
        return self.reader.spec(name).row_shape, self.reader.spec(name).dtype

    @property
    def layout(self) -> Layout:
        """Arrays of a batch."""
        arrays = {name: (self._shapes[name], self._dtypes[name]) for name in TENSORS}
        numbers = ["index", *(["epoch"] if self.options.perturbation else [])]
        return {**arrays, **dict.fromkeys(numbers, ((), "int64"))}

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays`` with ``samples``; safe in several threads at once."""
        steps = self.anchors[samples]
        arrays["index"][:] = steps
        block = self._tracks.block(steps) if self._tracks is not None else {}
        for name, shape in self._shapes.items():
            if name in block:
                arrays[name][...] = block[name][(slice(None), *(slice(0, side) for side in shape))]
            elif name not in self._held and shape[1:] == self.reader.spec(name).row_shape[1:]:
                self.reader.gather(name, steps, arrays[name])
            else:
                arrays[name][...] = self._whole(name, steps)[(slice(None), *(slice(0, side) for side in shape))]
        moved, found = (
            self._perturbed(steps, arrays, block) if self.options.perturbation else (np.zeros(0, np.int64), {})
        )
        if self._given != self._stored:
            for name, rows in self._scaled({name: arrays[name] for name in TENSORS}).items():
                arrays[name][...] = rows
        for name, rows in found.items():
            arrays[name][moved] = rows

    def _whole(self, name: str, steps: Int64[np.ndarray, " batch"]) -> np.ndarray:
        if name in self._held:
            held: np.ndarray = self._held[name][steps]
            return held
        spec = self.reader.spec(name)
        whole = np.empty((len(steps), *spec.row_shape), spec.dtype)
        self.reader.gather(name, steps, whole)
        return whole

    def _perturbed(
        self, steps: Int64[np.ndarray, " batch"], arrays: Arrays, block: Mapping[str, np.ndarray]
    ) -> tuple[Int64[np.ndarray, " moved"], dict[str, np.ndarray]]:
        """Return the rows of a batch that are perturbed, and their tensors as they are handed out.

        Whether and how far is decided by seed, epoch and step alone, so that neither batch size nor threads matter.
        """
        perturbation = self.options.perturbation or Perturbation()
        epoch = int(arrays["epoch"][0]) if len(steps) else 0
        uniform = uniforms(steps, 10, seed=self.options.perturbation_seed, epoch=epoch, part=(_PART,))
        ego = {"ego_current_state": arrays["ego_current_state"]}
        decisive = dict(denormalize_observation(ego, _known(self._stored, ego)))
        if block:
            decisive[_FUTURE_VALID] = block[_FUTURE_VALID]
        elif _FUTURE_VALID in self._held:
            decisive[_FUTURE_VALID] = self._held[_FUTURE_VALID][steps]
        moved = np.flatnonzero(perturbed_rows(decisive, uniform, perturbation))
        rows = {name: arrays[name][moved] for name in TENSORS}
        future = block["ego_agent_future"][moved] if block else self._whole("ego_agent_future", steps[moved])
        rows["ego_agent_future"] = future  # longer than what is handed out
        physical = denormalize_observation(rows, _known(self._stored, rows))
        found = perturb_by(physical, uniform[moved], perturbation)
        found["ego_agent_future"] = found["ego_agent_future"][:, : self._shapes["ego_agent_future"][0]]
        return moved, normalize_observation(found, _known(self._given, found))

    def _scaled(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return observations as they are handed out, without those that are stored so."""
        other = {name: block for name, block in rows.items() if self._given.get(name) != self._stored.get(name)}
        physical = denormalize_observation(other, _known(self._stored, other))
        return normalize_observation(physical, _known(self._given, other))

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch: the eleven tensors by name, in Diffusion Planner's order, and ``index``."""
        return {**{name: arrays[name] for name in TENSORS}, "index": arrays["index"]}


def _known(scalings: Mapping[str, Scaling], rows: Mapping[str, np.ndarray]) -> dict[str, Scaling]:
    return {name: scaling for name, scaling in scalings.items() if name in rows}


def read_normalization(path: str | Path, sizes: Mapping[str, int]) -> Mapping[str, Scaling]:
    """Return the scalings of observations that a ``normalization.json`` holds; UsageError says what is wrong with it."""
    try:
        return normalization_from_json(json.loads(Path(path).expanduser().read_text("utf-8")), sizes)[0]
    except (OSError, ValueError, SchemaError) as error:
        raise UsageError(f"expected a normalization.json, found {path}: {error}; correct it") from error


class PlannerLoader(DatasetLoader):
    """Batches of Diffusion Planner's eleven tensors by name, in the order in which its dataset returns them.

    ``tuple(batch[name] for name in TENSORS)`` is the tuple that its training loop unpacks. Observations come normalised
    where the dataset stores them so, futures in metres and radians.

    With ``perturbation=Perturbation()`` every epoch perturbs other samples, the same for any batch size, number of threads or ranks.

    Parameters are those of :class:`~pipeline.loaders.dataset_loader.DatasetLoader`, its options the fields of
    :class:`PlannerOptions`.
    """

    samples_type = PlannerSamples
    options_type = PlannerOptions


class PlannerDataset:
    """A drop-in for Diffusion Planner's ``DiffusionPlannerData``: one sample is the tuple of its eleven tensors.

    Perturbations are those of epoch 0 until :meth:`set_epoch`, which torch's workers see if they are started after it.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        self._path, self._options = path, options
        self._epoch = 0
        self._samples = PlannerSamples(path, PlannerOptions(**options))

    def __len__(self) -> int:
        return self._samples.num

    def set_epoch(self, epoch: int) -> None:
        """Perturb as in ``epoch`` from now on."""
        if epoch < 0:
            raise UsageError(f"expected an epoch of 0 or more, found {epoch}; correct the call")
        self._epoch = epoch

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, found {index}")
        arrays = {name: np.empty((1, *shape), dtype) for name, (shape, dtype) in self._samples.layout.items()}
        if "epoch" in arrays:
            arrays["epoch"][:] = self._epoch
        self._samples.fill(np.array([index % len(self)]), arrays)
        return tuple(arrays[name][0] for name in TENSORS)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self._path, self._options, self._epoch)


def _remake(path: str | Path, options: Mapping[str, Any], epoch: int) -> PlannerDataset:
    dataset = PlannerDataset(path, **options)
    dataset.set_epoch(epoch)
    return dataset
