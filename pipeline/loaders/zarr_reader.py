"""Datasets that another program has rewritten, such as ``open_dataset(...).to_zarr(...)``: read through zarr-python.

Slower by far, and without the manifest's checksums, which are of other bytes: a way to train from such a copy, not the way to keep one.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.reader import DatasetReader
from pipeline.store.metadata import DatasetInfo, TableRef
from schemas.dataset import FORMAT_VERSION, ROW_CHUNK_STEPS, ArraySpec
from schemas.errors import DatasetError, UsageError

_HELD_NBYTES = 4096
"""Arrays of smaller rows are read whole, as loaders do with those of our own layout."""

_log = logging.getLogger("headrace.loaders")


def open_reader(path: str | Path, *, check: str = "always") -> DatasetReader:
    """Open a dataset: directly, or, where no array of it lies as we write them, through zarr-python with a warning.

    Raises
    ------
    DatasetError
        As :class:`~pipeline.loaders.reader.DatasetReader`; a dataset of ours that is damaged is never read in another way.
    """
    try:
        return DatasetReader(path, check=check)
    except DatasetError:
        if not _is_rewritten(Path(path)):
            raise
    _log.warning(
        "%s was rewritten by another program: read through zarr-python, slowly and without its checksums", path
    )
    return ZarrReader(path)


class ZarrReader(DatasetReader):
    """Rows of a rewritten dataset, with the methods of :class:`~pipeline.loaders.reader.DatasetReader`.

    Tables are read where ``_tables`` was copied along; without them samples have no instructions of their own.

    Raises
    ------
    DatasetError
        Arrays of other lengths than the dataset had, as after a selection: its episodes no longer fit.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._arrays = dict(_group(self._path).arrays())
        self.check = "never"
        self.info = _info(self._path, dict(_group(self._path).attrs["headrace"]), self._arrays)
        self._rows: dict[str, np.ndarray] = {}
        self._episode_keys: Any = None

    def gather(self, name: str, steps: Int64[np.ndarray, " batch"], out: np.ndarray) -> None:
        """Fill ``out[i]`` with the row of ``steps[i]``."""
        if out.shape[2:] != self.spec(name).row_shape[1:] or out.dtype != self.spec(name).dtype:
            self.spec(name).check(out)
        if len(steps) and not (steps.min() >= 0 and steps.max() < self.num_steps):
            raise UsageError(f"expected steps in [0, {self.num_steps}), found {steps.min()} to {steps.max()}")
        wanted, places = np.unique(steps, return_inverse=True)  # each chunk is read once
        try:
            rows = self._arrays[name].oindex[wanted]
        except (OSError, ValueError, RuntimeError) as error:
            raise DatasetError(
                f"expected to read it, found {error}; rewrite the dataset", array=name, steps=int(wanted[0])
            ) from error
        out[...] = rows[places][:, : out.shape[1]] if out.ndim > 1 else rows[places]

    def close(self) -> None:
        """Do nothing: zarr-python keeps no file open."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrReader, (self._path,)

    def _read_rows(self, spec: ArraySpec) -> np.ndarray:
        rows = np.asarray(self._arrays[spec.name][:], dtype=spec.dtype)  # xarray may store bool as int8
        rows.flags.writeable = False
        return rows


def _group(path: Path) -> Any:
    import zarr  # such a copy was made with it

    return zarr.open_group(path, mode="r")


def _is_rewritten(path: Path) -> bool:
    """Return whether this is a dataset by its attributes, none of whose arrays is sharded as all of ours are."""
    try:
        group = _group(path)
        return "headrace" in group.attrs and all(array.shards is None for _, array in group.arrays())
    except (ImportError, OSError, ValueError, KeyError, TypeError):
        return False  # then what is wrong with it as one of ours is the message


def _info(root: Path, attributes: dict[str, Any], arrays: dict[str, Any]) -> DatasetInfo:
    if attributes.get("format_version") != FORMAT_VERSION:
        raise DatasetError(
            f"expected format_version {FORMAT_VERSION}, found {attributes.get('format_version')!r}; convert again",
            file=root,
        )
    specs = {name: _spec(name, array) for name, array in arrays.items()}
    for spec in specs.values():
        expected, found = attributes[f"num_{spec.dims[0]}s"], arrays[spec.name].shape[0]
        if expected != found:
            raise DatasetError(
                f"expected {expected} rows, as the dataset had, found {found}; rewrite all of it, or use filter= to choose episodes",
                array=spec.name,
                file=root,
            )
    tables = {name: TableRef(**ref) for name, ref in attributes["tables"].items()}
    if "task_index" in specs and not (root / tables["tasks"].path).is_file():
        _log.warning(
            "%s has no _tables: its samples have no instructions; copy _tables of the dataset it was made of", root
        )
        del specs["task_index"]
    return DatasetInfo(
        root=root,
        generation=attributes["generation"],
        num_steps=attributes["num_steps"],
        num_episodes=attributes["num_episodes"],
        shard_steps=attributes["shard_steps"],
        arrays=specs,
        lengths={name: arrays[name].shape[0] for name in specs},
        recipe=attributes["recipe"],
        tables=tables,
        attributes=attributes,
    )


def _spec(name: str, array: Any) -> ArraySpec:
    attributes = dict(array.attrs)
    dims = array.metadata.dimension_names if array.metadata.zarr_format == 3 else attributes.get("_ARRAY_DIMENSIONS")
    dtype = np.dtype(attributes.pop("dtype", array.dtype))  # xarray's note of what it stored as another
    nbytes = dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    chunk_steps = ROW_CHUNK_STEPS if nbytes < _HELD_NBYTES and len(array.shape) < 4 else 1
    return ArraySpec(
        name=name,
        dims=tuple(dims or ()),
        row_shape=tuple(array.shape[1:]),
        dtype=str(dtype),
        chunk_steps=chunk_steps,
        shard_steps=chunk_steps,
        valid_array=attributes.pop("valid_array", "") if chunk_steps == 1 else "",
        attributes=tuple(sorted(attributes.items())),
    )
