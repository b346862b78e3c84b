"""Samples one by one, for those who keep their ``torch.utils.data.DataLoader``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.loaders.delivery import Batch
from pipeline.loaders.multiview import MultiViewSamples, SampleOptions
from schemas.errors import DatasetError


class MultiViewDataset:
    """The same samples one by one, for those who keep their ``torch.utils.data.DataLoader``.

    Map-style: torch needs no more than ``__len__`` and ``__getitem__``, and ``__getitems__`` reads a whole batch at
    once. Forked and spawned workers open their own files. torch is imported by :meth:`collate` alone.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    **options
        Fields of :class:`SampleOptions`: what a sample is.

    Examples
    --------
    >>> dataset = MultiViewDataset("out.zarr")                             # doctest: +SKIP
    >>> loader = DataLoader(dataset, 32, shuffle=True, collate_fn=dataset.collate, num_workers=2)   # doctest: +SKIP
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        self._path, self._options = path, options
        self.samples = MultiViewSamples(path, SampleOptions(**options))

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
        return SampleList(self.samples.assemble(arrays, self.samples.texts(wanted)), len(wanted))

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


def to_torch(batch: Any) -> Any:
    """Return ``batch`` with its arrays as torch tensors over the same memory."""
    import torch

    if isinstance(batch, Mapping):
        return {name: to_torch(value) for name, value in batch.items()}
    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else batch


def to_jax(batch: Any) -> Any:
    """Return ``batch`` with its arrays as JAX arrays on the CPU, over the same memory where JAX can; 64-bit ones as its default takes them."""
    import jax

    if isinstance(batch, Mapping):
        return {name: to_jax(value) for name, value in batch.items()}
    if not isinstance(batch, np.ndarray):
        return batch
    return jax.numpy.asarray(batch) if batch.dtype.itemsize == 8 else jax.dlpack.from_dlpack(batch)


def _cut(value: Any, row: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, row) for name, part in value.items()}
    return value[row]


def _remake_dataset(path: Any, options: Any, fingerprint: str) -> MultiViewDataset:
    dataset = MultiViewDataset(path, **options)
    if dataset.samples.fingerprint != fingerprint:
        raise DatasetError("expected the samples that were pickled, found others; open the dataset again")
    return dataset
