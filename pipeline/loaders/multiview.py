"""Frames of several views, state, action chunks and instruction: what a Pi0-style training loop takes."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from jaxtyping import Bool, Float32, Int64

from pipeline.loaders.buffers import Layout
from pipeline.loaders.delivery import Arrays, Batch, BatchLoader
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.sampler import EpochSampler, FullShuffle, InOrder, rank_and_world_size
from pipeline.store.atomic import xxh3_hex
from schemas.errors import DatasetError, HeadraceError, UsageError
from tasks.chunks import action_chunks, chunk_stops
from tasks.order import Partition

FRAMES = "rgb_"
NORMALIZE = ("", "zscore", "quantile")

_PIECE_NBYTES = 1 << 19
"""Frames that are converted after reading go through a piece of this size, which stays in the core's cache."""
_log = logging.getLogger("headrace.loaders")


class SampleOptions(TypedDict, total=False):
    """What a sample is; see :class:`MultiViewSamples`."""

    horizon: int
    action_dim: int
    views: Sequence[str]
    normalize: str
    normalize_images: bool
    physical: bool
    default_prompt: str
    check: str


class MultiViewSamples:
    """The samples of a dataset: one a step that may be served, as openpi's ``Observation.from_dict`` takes them.

    Parameters
    ----------
    path
        Folder of the dataset.
    horizon
        Actions of a chunk: those of the step and of the steps that follow it; the last one of the episode is
        repeated where there are no more, and before a step that is not valid.
    action_dim
        Width to which state and actions are filled up with zeros; wider ones stay as they are.
    views
        Views to serve, all by default: the dataset's arrays ``rgb_<view>``.
    normalize
        ``zscore`` or ``quantile`` applies the dataset's ``norm_stats`` to state and actions by openpi's formulas;
        empty leaves them in their units.
    normalize_images
        Hand out float32 in [-1, 1], as ``from_dict`` would make of uint8; else frames come as they are stored.
    physical
        Hand out uint8 frames also where they are stored normalised.
    default_prompt
        The instruction of steps that have none.
    check
        Which checksums to compute: see :class:`~pipeline.loaders.reader.DatasetReader`.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one that has state, actions, a view and a valid step.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        horizon: int = 50,
        action_dim: int = 32,
        views: Sequence[str] = (),
        normalize: str = "",
        normalize_images: bool = False,
        physical: bool = False,
        default_prompt: str = "",
        check: str = "always",
    ) -> None:
        if horizon < 1 or action_dim < 1 or normalize not in NORMALIZE or (normalize_images and physical):
            raise UsageError(
                "expected a horizon and an action_dim of 1 or more, normalize one of '', 'zscore', 'quantile', and one of "
                f"normalize_images and physical, found {horizon}, {action_dim}, {normalize!r}, {normalize_images} and "
                f"{physical}; correct the call"
            )
        self.reader = DatasetReader(path, check=check)
        self.horizon = horizon
        self._views = [_View.of(self.reader, name, normalize_images, physical) for name in views or view_names(self.reader)]
        self._state, self._actions = (_features(self.reader, name, normalize) for name in ("state", "actions"))
        self._widths = [max(action_dim, rows.shape[1]) for rows in (self._state, self._actions)]
        if max(self._widths) > action_dim:
            _log.warning("state or actions are wider than action_dim %d and stay as they are: %s", action_dim, self._widths)
        valid = self.reader.rows("valid")
        self._stops = chunk_stops(self.reader.rows("episode_ends"), valid)
        self.anchors = find_anchors(self.reader)
        self._task_index, self._prompts = _prompts(self.reader, default_prompt)

    @property
    def num(self) -> int:
        """Number of samples."""
        return len(self.anchors)

    @property
    def fingerprint(self) -> str:
        """Digest of which steps are samples, in which order."""
        return xxh3_hex(self.anchors.view(np.uint8))

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
        width = self._state.shape[1]
        arrays["state"][:, :width] = self._state[steps]
        arrays["state"][:, width:] = 0
        action_chunks(self._actions, steps, self._stops[steps], is_pad=arrays["actions_is_pad"], out=arrays["actions"])
        for view in self._views:
            arrays[f"image_mask/{view.name}"][:] = view.mask[steps]
            try:
                view.fill(self.reader, steps, arrays[f"image/{view.name}"])
            except HeadraceError as error:
                step = error.where.get("steps")
                if isinstance(step, int):
                    error.where = {"episode": self.reader.episode_of(step), **error.where}
                raise

    def assemble(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> Batch:
        """Return the batch as ``Observation.from_dict`` takes it, with ``actions``, ``actions_is_pad`` and ``index``."""
        tasks = self._task_index[self.anchors[samples]].tolist()
        return {
            "image": {view.name: arrays[f"image/{view.name}"] for view in self._views},
            "image_mask": {view.name: arrays[f"image_mask/{view.name}"] for view in self._views},
            "state": arrays["state"],
            "actions": arrays["actions"],
            "prompt": [self._prompts[task] for task in tasks],
            "actions_is_pad": arrays["actions_is_pad"],
            "index": arrays["index"],
        }


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
        What a sample is: see :class:`MultiViewSamples`.

    Examples
    --------
    >>> loader = MultiViewLoader("out.zarr", 32, horizon=50)               # doctest: +SKIP
    >>> for epoch in range(10):                                            # doctest: +SKIP
    ...     for batch in loader:
    ...         train(Observation.from_dict(batch), batch["actions"])
    """

    def __init__(
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
        **options: Unpack[SampleOptions],
    ) -> None:
        rank, world_size = rank_and_world_size(rank, world_size)
        samples = MultiViewSamples(path, **options)
        partition = Partition(num=samples.num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        order = FullShuffle(samples.num, seed) if shuffle else InOrder(samples.num)
        super().__init__(samples, EpochSampler(order, partition), threads=threads, prefetch=prefetch, on_error=on_error)
        self._recipe = (path, batch_size, {"seed": seed, "shuffle": shuffle, "rank": rank, "world_size": world_size})
        self._options = {"tail": tail, "threads": threads, "prefetch": prefetch, "on_error": on_error, **options}

    def __reduce__(self) -> tuple[Any, ...]:
        path, batch_size, order = self._recipe
        return _remake, (path, batch_size, {**order, **self._options}, self.state_dict())


class MultiViewDataset:
    """The same samples one by one, for those who keep their ``torch.utils.data.DataLoader``.

    Map-style: torch needs no more than ``__len__`` and ``__getitem__``, and ``__getitems__`` reads a whole batch at
    once. Forked and spawned workers open their own files. torch is imported by :meth:`collate` alone.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    **options
        What a sample is: see :class:`MultiViewSamples`.

    Examples
    --------
    >>> dataset = MultiViewDataset("out.zarr")                             # doctest: +SKIP
    >>> loader = DataLoader(dataset, 32, shuffle=True, collate_fn=dataset.collate, num_workers=2)   # doctest: +SKIP
    """

    def __init__(self, path: str | Path, **options: Unpack[SampleOptions]) -> None:
        self._path, self._options = path, options
        self.samples = MultiViewSamples(path, **options)

    def __len__(self) -> int:
        return self.samples.num

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> "SampleList":
        """Read several samples together: a sequence of samples whose ``batch`` is all of them, uncopied."""
        wanted = np.asarray(samples, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"expected samples in [0, {len(self)}), found {list(samples)[:8]}")
        arrays = {name: np.empty((len(wanted), *shape), dtype) for name, (shape, dtype) in self.samples.layout.items()}
        self.samples.fill(wanted, arrays)
        return SampleList(self.samples.assemble(wanted, arrays), len(wanted))

    @staticmethod
    def collate(samples: "SampleList") -> dict[str, Any]:
        """Return the batch as torch tensors that share its memory; for ``collate_fn``."""
        return to_torch(samples.batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake_dataset, (self._path, self._options, self.samples.fingerprint)


class SampleList(Sequence[dict[str, Any]]):
    """The samples of one batch, cut out of it when asked for."""

    def __init__(self, batch: Batch, num: int) -> None:
        self.batch = batch
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[k] for k in range(*row.indices(self._num))]
        if not -self._num <= row < self._num:
            raise IndexError(row)
        return _cut(self.batch, row)


def view_names(reader: DatasetReader) -> list[str]:
    """Return the views of a dataset: its arrays ``rgb_<view>`` without the prefix."""
    arrays = reader.info.arrays.values()
    names = sorted(spec.name.removeprefix(FRAMES) for spec in arrays if spec.name.startswith(FRAMES) and len(spec.dims) == 4)
    if not names:
        raise DatasetError("expected a dataset with frames, found no array rgb_<view>; see `headrace info`")
    return names


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


def to_torch(batch: Any) -> Any:
    """Return ``batch`` with its arrays as torch tensors over the same memory."""
    import torch

    if isinstance(batch, Mapping):
        return {name: to_torch(value) for name, value in batch.items()}
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else batch


@dataclass(frozen=True, slots=True)
class _View:
    """One view: where its frames are, and what becomes of them."""

    name: str
    mask: np.ndarray
    shape: tuple[int, ...]
    stored: str
    """dtype on disk."""
    dtype: str
    """dtype handed out."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, reader: DatasetReader, name: str, normalize_images: bool, physical: bool) -> "_View":
        known = view_names(reader)
        if name not in known:
            raise UsageError(f"expected views of {known}, found {name!r}; correct `views`")
        spec = reader.spec(FRAMES + name)
        normalization = dict(spec.attributes).get("normalization", {"mean": (), "std": ()})
        if spec.dtype != "uint8" and (physical or normalize_images) and not normalization["mean"]:
            raise DatasetError(
                f"expected the attribute `normalization` of {spec.dtype} frames, found none; ask for them as they are stored",
                array=spec.name,
            )
        mask = reader.rows(spec.valid_array) if spec.valid_array else np.ones(reader.num_steps, np.bool_)
        dtype = "float32" if normalize_images else "uint8" if physical else spec.dtype
        return cls(name, mask, spec.row_shape, spec.dtype, dtype, tuple(normalization["mean"]), tuple(normalization["std"]))

    def fill(self, reader: DatasetReader, steps: Int64[np.ndarray, " batch"], out: np.ndarray) -> None:
        """Fill ``out`` with the frames of ``steps``."""
        if self.dtype == self.stored:
            reader.gather(FRAMES + self.name, steps, out)
            return
        frame_nbytes = int(np.prod(self.shape)) * np.dtype(self.stored).itemsize
        num = max(1, _PIECE_NBYTES // frame_nbytes)
        piece = np.empty((min(num, len(steps)), *self.shape), self.stored)
        for start in range(0, len(steps), num):
            part = steps[start : start + num]
            reader.gather(FRAMES + self.name, part, piece[: len(part)])
            self._convert(piece[: len(part)], self.mask[part], out[start : start + len(part)])

    def _convert(self, stored: np.ndarray, mask: Bool[np.ndarray, " piece"], out: np.ndarray) -> None:
        frames = stored
        if stored.dtype != np.uint8:
            from tasks.normalize import denormalize_images

            frames = denormalize_images(stored, np.array(self.mean), np.array(self.std))
            frames[~mask] = 0  # zero means "no frame" in either form
        if self.dtype == "uint8":
            out[...] = frames
            return
        # openpi's words, `x.astype(float32) / 255 * 2 - 1`, to the bit; frames that are missing become -1 there too
        np.divide(frames, np.float32(255), out=out, dtype=np.float32)
        out *= np.float32(2)
        out -= np.float32(1)


def _features(reader: DatasetReader, name: str, normalize: str) -> Float32[np.ndarray, "step dim"]:
    """Return state or actions whole; normalised once here, not for every batch."""
    rows = reader.rows(name)
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise DatasetError(f"expected float32[step, dim], found {rows.dtype}{list(rows.shape)}; see `headrace info`", array=name)
    if not normalize:
        return rows
    stats = _norm_stats(reader, name)
    keys = ("mean", "std") if normalize == "zscore" else ("q01", "q99")
    if any(stats.get(key) is None or len(stats[key]) < rows.shape[1] for key in keys):
        raise DatasetError(
            f"expected {' and '.join(keys)} of {rows.shape[1]} dimensions in norm_stats, found others; run `headrace stats`",
            array=name,
        )
    first, second = (np.asarray(stats[key], np.float64)[: rows.shape[1]] for key in keys)
    # openpi's Normalize, in its order of operations and in float64 as there
    values = (rows - first) / (second + 1e-6) if normalize == "zscore" else (rows - first) / (second - first + 1e-6) * 2 - 1
    return values.astype(np.float32)


def _norm_stats(reader: DatasetReader, name: str) -> Mapping[str, Any]:
    from pipeline.store.tables import read_document

    content = json.loads(read_document(reader.info, "norm_stats"))
    if name == "actions" and any(content.get("headrace", {}).get("delta_mask") or ()):
        raise DatasetError(
            "expected norm_stats of actions as they are stored, found those of actions relative to the state; "
            "leave `normalize` out, or run `headrace stats` without a delta mask"
        )
    stats = content.get("norm_stats", {}).get(name)
    if stats is None:
        raise DatasetError(f"expected norm_stats of {name}, found none; run `headrace stats`")
    return dict(stats)


def _prompts(reader: DatasetReader, default: str) -> tuple[np.ndarray, list[str]]:
    """Return the task of every step and the instruction of every task; the last one serves steps without a task."""
    if "task_index" not in reader.info.arrays:
        return np.full(reader.num_steps, -1), [default]
    index = reader.rows("task_index")
    tasks = reader.table("tasks")
    known = dict(zip(tasks["task_index"].to_pylist(), tasks["task"].to_pylist(), strict=True))
    prompts = [known.get(task) or default for task in range(max(known, default=-1) + 1)]
    if index.size and not (index.min() >= -1 and index.max() < len(prompts)):
        raise DatasetError(
            f"expected a task_index in [-1, {len(prompts)}), found {index.min()} to {index.max()}; run `headrace verify`"
        )
    return index, [*prompts, default]


def _cut(value: Any, row: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, row) for name, part in value.items()}
    return value[row]


def _remake(path: Any, batch_size: int, options: Any, state: Mapping[str, Any]) -> MultiViewLoader:
    loader = MultiViewLoader(path, batch_size, **options)
    loader.load_state_dict(state)
    return loader


def _remake_dataset(path: Any, options: Any, fingerprint: str) -> MultiViewDataset:
    dataset = MultiViewDataset(path, **options)
    if dataset.samples.fingerprint != fingerprint:
        raise DatasetError("expected the samples that were pickled, found others; open the dataset again")
    return dataset
