"""Frames of several views, state, action chunks and instruction: what a Pi0-style training loop takes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.anchors import AnchoredSamples, ReadOptions
from pipeline.loaders.buffers import Layout
from pipeline.loaders.dataset_loader import DatasetLoader
from pipeline.loaders.delivery import Arrays, Batch, Texts
from pipeline.loaders.frames import View, view_names
from pipeline.loaders.prompts import Prompts
from pipeline.loaders.vectors import Vectors
from schemas.errors import UsageError
from tasks.transforms import Transform

NORMALIZE = ("", "zscore", "quantile")

_log = logging.getLogger("headrace.loaders")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions(ReadOptions):
    """What a sample is."""

    horizon: int = 50
    """Actions of a chunk: those of the step and of the steps that follow it; the last one of the episode is repeated
    where there are no more, and before a step that is not valid."""
    action_dim: int = 32
    """Width to which state and actions are filled up with zeros; wider ones stay as they are. 0 fills up nothing."""
    views: Sequence[str] = ()
    """Views to serve, all by default: the dataset's arrays ``rgb_<view>``."""
    transforms: Sequence[Transform] = ()
    """What happens to state and actions before they are normalised, in order: see :mod:`tasks.transforms`."""
    normalize: str = ""
    """``zscore`` or ``quantile`` applies the dataset's ``norm_stats`` to state and actions by openpi's formulas;
    empty leaves them in their units."""
    normalize_images: bool = False
    """Hand out float32 in [-1, 1], as ``from_dict`` would make of uint8; else frames come as they are stored."""
    physical: bool = False
    """Hand out uint8 frames also where they are stored normalised."""
    default_prompt: str = ""
    """The instruction of steps that have none."""
    prompt_seed: int | None = None
    """Give each sample one of its episode's instructions, chosen by this seed and the step, where they are several
    for one task (as in DROID); None gives the step's own."""

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.action_dim < 0:
            raise UsageError(
                f"expected a horizon of 1 or more and an action_dim of 0 or more, found {self.horizon} and {self.action_dim}; "
                "correct the call"
            )
        if self.normalize not in NORMALIZE:
            raise UsageError(f"expected normalize one of {NORMALIZE}, found {self.normalize!r}; correct the call")
        if self.normalize_images and self.physical:
            raise UsageError("expected normalize_images or physical, found both; leave one out")


class MultiViewSamples(AnchoredSamples):
    """The samples of a dataset: one a step that may be served, as openpi's ``Observation.from_dict`` takes them.

    Parameters
    ----------
    path
        Folder of the dataset.
    options
        What a sample is.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one that has state, actions, a view and a valid step.
    """

    def __init__(self, path: str | Path, options: SampleOptions) -> None:
        super().__init__(path, options)
        self.horizon = options.horizon
        convert = "symmetric" if options.normalize_images else "pixels" if options.physical else ""
        self._views = [View.of(self.reader, name, convert=convert) for name in options.views or view_names(self.reader)]
        self._vectors = Vectors(self.reader, options.transforms, options.normalize, options.action_dim)
        self._widths = self._vectors.widths
        if max(self._widths) > options.action_dim > 0:
            message = "state or actions are wider than action_dim %d and stay as they are: %s"
            _log.warning(message, options.action_dim, list(self._widths))
        self._prompts = Prompts.read(self.reader, options.default_prompt, options.prompt_seed)

    @property
    def layout(self) -> Layout:
        """Arrays of a batch, flat."""
        frames = {f"image/{view.name}": (view.shape, view.dtype) for view in self._views}
        masks = {f"image_mask/{view.name}": ((), "bool") for view in self._views}
        return {
            **frames,
            **masks,
            "state": ((self._widths[0],), "float32"),
            "actions": ((self.horizon, self._widths[1]), "float32"),
            "actions_is_pad": ((self.horizon,), "bool"),
            "index": ((), "int64"),
        }

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays`` with ``samples``; safe in several threads at once."""
        steps = self.anchors[samples]
        arrays["index"][:] = steps
        self._vectors.fill(steps, state=arrays["state"], actions=arrays["actions"], is_pad=arrays["actions_is_pad"])
        for view in self._views:
            arrays[f"image_mask/{view.name}"][:] = view.mask[steps]
            view.fill(self.reader, steps, arrays[f"image/{view.name}"])

    def texts(self, samples: Int64[np.ndarray, " batch"]) -> dict[str, list[str]]:
        """Return the instruction of each sample, as ``prompt``."""
        return {"prompt": self._prompts.of(self.anchors[samples])}

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch as ``Observation.from_dict`` takes it, with ``actions``, ``actions_is_pad`` and ``index``."""
        return {
            "image": {view.name: arrays[f"image/{view.name}"] for view in self._views},
            "image_mask": {view.name: arrays[f"image_mask/{view.name}"] for view in self._views},
            "state": arrays["state"],
            "actions": arrays["actions"],
            "prompt": texts["prompt"],
            "actions_is_pad": arrays["actions_is_pad"],
            "index": arrays["index"],
        }


class MultiViewLoader(DatasetLoader):
    """Batches of a dataset as openpi's ``Observation.from_dict`` takes them.

    A batch is ``{"image": {view: uint8[b, h, w, 3]}, "image_mask": {view: bool[b]}, "state": float32[b, action_dim],
    "actions": float32[b, horizon, action_dim], "prompt": list of b str, "actions_is_pad": bool[b, horizon],
    "index": int64[b]}``; ``index`` are step numbers of the dataset. A view that a step does not have is zero, its
    mask False.

    Parameters are those of :class:`~pipeline.loaders.dataset_loader.DatasetLoader`, its options the fields of
    :class:`SampleOptions`.

    Examples
    --------
    >>> loader = MultiViewLoader("out.zarr", 32, horizon=50)               # doctest: +SKIP
    >>> for epoch in range(10):                                            # doctest: +SKIP
    ...     for batch in loader:
    ...         train(Observation.from_dict(batch), batch["actions"])
    """

    samples_type = MultiViewSamples
    options_type = SampleOptions
