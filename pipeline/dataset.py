"""Open a finished dataset as a lazy, self-explaining :class:`xarray.Dataset`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

import pipeline.accessor  # noqa: F401 - registers ds.headrace
from pipeline.store.metadata import COORDINATES, array_metadata, read_info
from pipeline.store.rows import RowReader
from schemas.dataset import ArraySpec
from schemas.errors import UsageError

Chunks = int | str | dict[Any, Any] | None


def open_dataset(
    path: str | Path,
    *,
    chunks: Chunks = None,
    physical: bool = False,
    normalized: bool = False,
    generation: int | None = None,
) -> xr.Dataset:
    """Open a dataset lazily: a value is read, and its checksum and place are verified, when it is asked for.

    Parameters
    ----------
    path
        Folder of the dataset.
    chunks
        None for no Dask. ``{}`` for Dask arrays of whole shards; else as :meth:`xarray.Dataset.chunk` takes it.
        A Dask chunk a step is slow.
    physical
        Give arrays that were normalised before writing in the units they had: frames as uint8.
    normalized
        Give arrays whose attributes name a normalisation normalised, also where they are stored as uint8.
        Frames that are absent are zero either way.
    generation
        An older generation, as long as ``headrace gc`` has not removed it; the newest by default.

    Raises
    ------
    DatasetError
        Not a finished dataset of this version, or damaged metadata; when values are read, damaged or missing ones.

    Examples
    --------
    >>> ds = open_dataset("out")  # doctest: +SKIP
    >>> ds.rgb_main.isel(step=7).plot.imshow()  # doctest: +SKIP
    """
    if physical and normalized:
        raise UsageError("expected one of physical and normalized, found both; choose one")
    info = read_info(path, generation)
    reader = RowReader(info)
    form = "physical" if physical else "normalized" if normalized else "stored"
    variables = {name: _variable(reader, name, form) for name in info.arrays}
    coordinates = {name: variables.pop(name) for name in COORDINATES if name in variables}
    dataset = xr.Dataset(variables, coordinates, {"headrace": dict(info.attributes)})
    dataset.encoding["source"] = str(info.root)
    if chunks is None:
        return dataset
    return dataset.chunk({"step": info.shard_steps} if chunks == {} else chunks)


def _variable(reader: RowReader, name: str, form: str) -> xr.Variable:
    info = reader.info
    spec = info.arrays[name]
    attributes = array_metadata(spec, info.lengths[name])["attributes"]
    data = _StoredArray(reader, spec, _conversion(spec, form))
    if data.conversion is not None:
        attributes["units"] = data.conversion.units
    encoding = {"preferred_chunks": dict(zip(spec.dims, (spec.shard_steps, *spec.row_shape), strict=True))}
    return xr.Variable(spec.dims, indexing.LazilyIndexedArray(data), attributes, encoding)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What is done to frames on the way out."""

    form: str
    dtype: np.dtype
    units: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, frames: np.ndarray) -> np.ndarray:
        from tasks.normalize import denormalize_images, normalize_images

        mean, std = np.array(self.mean), np.array(self.std)
        if self.form == "physical":
            return denormalize_images(frames, mean, std)
        out = np.empty(frames.shape, self.dtype)
        normalize_images(frames, mean, std, out)
        return out


def _conversion(spec: ArraySpec, form: str) -> _Conversion | None:
    """Return how to bring an array from the form it is stored in to ``form``; None where it is in it already."""
    normalization = dict(spec.attributes).get("normalization")
    stored = "physical" if spec.dtype == "uint8" else "normalized"
    if normalization is None or form in ("stored", stored):
        return None
    dtype, units = ("uint8", "1") if form == "physical" else ("float32", "standard deviations")
    return _Conversion(form, np.dtype(dtype), units, tuple(normalization["mean"]), tuple(normalization["std"]))


class _StoredArray(BackendArray):
    """An array of the dataset as xarray's lazy indexing wants it."""

    def __init__(self, reader: RowReader, spec: ArraySpec, conversion: _Conversion | None) -> None:
        self.reader, self.spec, self.conversion = reader, spec, conversion
        self.shape = (reader.info.lengths[spec.name], *spec.row_shape)
        self.dtype = np.dtype(spec.dtype) if conversion is None else conversion.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        steps = _resolve(key[0], self.shape[0])
        values = self._rows(np.atleast_1d(steps))
        if steps.ndim == 0:
            values = values[0]
            return _select(values, key[1:], 0)
        return _select(values, key[1:], 1)

    def _rows(self, steps: np.ndarray) -> np.ndarray:
        name, mask = self.spec.name, self.spec.valid_array
        values = self.reader.take(name, steps)
        if self.conversion is None:
            return values
        values = self.conversion(values)
        if mask:
            values[~self.reader.take(mask, steps)] = 0  # an absent frame stays black, in both forms
        return values

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        info = self.reader.info
        return str(info.root), info.attributes["metadata_xxh3"], self.spec.name, str(self.conversion)


def _resolve(key: Any, length: int) -> np.ndarray:
    """Return the indices that one axis of an outer key names, as int64 of no or one dimension."""
    if isinstance(key, slice):
        return np.arange(*key.indices(length))
    index = np.asarray(key, np.int64)
    index = np.where(index < 0, index + length, index)
    if ((index < 0) | (index >= length)).any():
        raise IndexError(f"expected steps in [0, {length}), found {key}")
    return index


def _select(values: np.ndarray, key: tuple[Any, ...], first_axis: int) -> np.ndarray:
    """Apply an outer key to the axes from ``first_axis``; the last first, since an integer removes its axis."""
    for axis in reversed(range(len(key))):
        values = values[(slice(None),) * (first_axis + axis) + (key[axis],)]
    return values
