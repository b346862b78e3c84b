"""Frames of several views, state, action chunks and instruction: what a Pi0-style training loop takes."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.buffers import Layout
from pipeline.loaders.delivery import Arrays, Batch, BatchLoader
from pipeline.loaders.frames import View, view_names
from pipeline.loaders.prompts import Prompts
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.sampler import EpochSampler, FullShuffle, InOrder, rank_and_world_size
from pipeline.loaders.vectors import Vectors
from pipeline.store.atomic import xxh3_hex
from schemas.errors import DatasetError, HeadraceError, UsageError
from tasks.order import Partition
from tasks.transforms import Transform

NORMALIZE = ("", "zscore", "quantile")

_log = logging.getLogger("headrace.loaders")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
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
    check: str = "always"
    """Which checksums to compute: see :class:`~pipeline.loaders.reader.DatasetReader`."""

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


class MultiViewSamples:
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
        self.reader = DatasetReader(path, check=options.check)
        self.horizon = options.horizon
        convert = "symmetric" if options.normalize_images else "pixels" if options.physical else ""
        self._views = [View.of(self.reader, name, convert=convert) for name in options.views or view_names(self.reader)]
        self._vectors = Vectors(self.reader, options.transforms, options.normalize, options.action_dim)
        self._widths = self._vectors.widths
        if max(self._widths) > options.action_dim > 0:
            message = "state or actions are wider than action_dim %d and stay as they are: %s"
            _log.warning(message, options.action_dim, list(self._widths))
        self.anchors = find_anchors(self.reader)
        self.fingerprint = xxh3_hex(self.anchors.view(np.uint8).data)
        self._prompts = Prompts.read(self.reader, options.default_prompt, options.prompt_seed)

    @property
    def num(self) -> int:
        """Number of samples."""
        return len(self.anchors)

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
            try:
                view.fill(self.reader, steps, arrays[f"image/{view.name}"])
            except HeadraceError as error:
                self._name_episode(error)
                raise

    def assemble(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> Batch:
        """Return the batch as ``Observation.from_dict`` takes it, with ``actions``, ``actions_is_pad`` and ``index``."""
        return {
            "image": {view.name: arrays[f"image/{view.name}"] for view in self._views},
            "image_mask": {view.name: arrays[f"image_mask/{view.name}"] for view in self._views},
            "state": arrays["state"],
            "actions": arrays["actions"],
            "prompt": self._prompts.of(self.anchors[samples]),
            "actions_is_pad": arrays["actions_is_pad"],
            "index": arrays["index"],
        }

    def _name_episode(self, error: HeadraceError) -> None:
        step = error.where.get("steps")
        if isinstance(step, int):
            with suppress(DatasetError):  # of the table of episodes: what was wrong first is what counts
                error.where = {"episode": self.reader.episode_of(step), **error.where}


class MultiViewLoader(BatchLoader):
    """Batches of a dataset as openpi's ``Observation.from_dict`` takes them, in an order that survives restarts.

    A batch is ``{"image": {view: uint8[b, h, w, 3]}, "image_mask": {view: bool[b]}, "state": float32[b, action_dim],
    "actions": float32[b, horizon, action_dim], "prompt": list of b str, "actions_is_pad": bool[b, horizon],
    "index": int64[b]}``; ``index`` are step numbers of the dataset. A view that a step does not have is zero, its
    mask False. Batches may be kept: their memory is reused only once nothing refers to it.

    Every ``(seed, epoch)`` has one order, the same for any number of threads and ranks. A global batch is the next
    ``batch_size * world_size`` samples of it, and each rank takes ``batch_size`` in a row of those.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    batch_size
        Samples of a batch on this rank.
    seed, shuffle
        The order of each epoch: by the seed, or as recorded.
    rank, world_size
        Which share is this process's; by default from the environment (``RANK``, ``WORLD_SIZE``), else all.
    tail
        What becomes of the last global batch where it is short: ``drop`` it; ``keep`` it as it is, so that ranks may
        differ by one sample (and the last batch of a rank may be missing); ``pad`` it from the beginning of the order,
        with ``is_repeat`` (bool[b]) in each batch.
    threads, prefetch, on_error
        See :class:`~pipeline.loaders.delivery.BatchLoader`.
    **options
        Fields of :class:`SampleOptions`: what a sample is.

    Examples
    --------
    >>> loader = MultiViewLoader("out.zarr", 32, horizon=50)               # doctest: +SKIP
    >>> for epoch in range(10):                                            # doctest: +SKIP
    ...     for batch in loader:
    ...         train(Observation.from_dict(batch), batch["actions"])
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
        samples = MultiViewSamples(path, SampleOptions(**options))
        partition = Partition(num=samples.num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        order = FullShuffle(samples.num, seed) if shuffle else InOrder(samples.num)
        super().__init__(samples, EpochSampler(order, partition), threads=threads, prefetch=prefetch, on_error=on_error)
        self._recipe = (path, batch_size, {"seed": seed, "shuffle": shuffle, "rank": rank, "world_size": world_size})
        self._options = {"tail": tail, "threads": threads, "prefetch": prefetch, "on_error": on_error, **options}

    def __reduce__(self) -> tuple[Any, ...]:
        path, batch_size, order = self._recipe
        return _remake, (path, batch_size, {**order, **self._options}, self.state_dict())


def find_anchors(reader: DatasetReader) -> Int64[np.ndarray, " sample"]:
    """Return the steps that are samples: valid ones, and of those the ones that ``is_anchor`` names, if there is one."""
    is_sample = reader.rows("valid")
    if "is_anchor" in reader.info.arrays:
        is_sample = is_sample & reader.rows("is_anchor")
    anchors = np.flatnonzero(is_sample)
    if not anchors.size:
        raise DatasetError(
            f"expected at least one step to serve, found none of {reader.num_steps} valid; see the quarantine table"
        )
    return anchors


def _remake(path: Any, batch_size: int, options: Any, state: Mapping[str, Any]) -> MultiViewLoader:
    loader = MultiViewLoader(path, batch_size, **options)
    loader.load_state_dict(state)
    return loader
