"""Which steps of a dataset are samples: the valid ones, of the episodes that a filter names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.loaders.filters import Filter
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.zarr_reader import open_reader
from pipeline.store.atomic import xxh3_hex
from schemas.errors import DatasetError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a dataset is read, and which of its episodes."""

    check: str = "always"
    """Which checksums to compute: see :class:`~pipeline.loaders.reader.DatasetReader`."""
    filter: str = ""
    """Which episodes to serve, such as ``"task == 'pick' and success"``; all by default. See :mod:`pipeline.loaders.filters`."""


class AnchoredSamples:
    """Samples that are one step each, with what surrounds it.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    options
        Which episodes, and how they are read.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one with a valid step.
    """

    masks: ClassVar[tuple[str, ...]] = ("valid", "is_anchor")
    """Arrays that must all be True of a sample's step, of those that the dataset has."""

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        self.reader = open_reader(path, check=options.check)
        self.anchors = find_anchors(self.reader, options.filter, self.masks)
        self.fingerprint = xxh3_hex(self.anchors.view(np.uint8).data)

    @property
    def num(self) -> int:
        """Number of samples."""
        return len(self.anchors)

    @property
    def steps(self) -> Int64[np.ndarray, " sample"]:
        """The step of each sample, ascending."""
        return self.anchors

    def texts(self, samples: Int64[np.ndarray, " batch"]) -> dict[str, list[str]]:
        """Return what a batch has beside its arrays."""
        return {}


def find_anchors(
    reader: DatasetReader, filter: str = "", masks: Sequence[str] = AnchoredSamples.masks
) -> Int64[np.ndarray, " sample"]:
    """Return the steps that are samples: those that all ``masks`` name, of the episodes that ``filter`` names."""
    is_sample = servable_steps(reader, filter, masks)
    anchors = np.flatnonzero(is_sample)
    if not anchors.size:
        cause = f"change the filter {filter!r}" if filter else "see the quarantine table"
        raise DatasetError(
            f"expected at least one step to serve, found none of {reader.num_steps} valid and asked for; {cause}"
        )
    return anchors


def servable_steps(reader: DatasetReader, filter: str, masks: Sequence[str] = ("valid",)) -> Bool[np.ndarray, " step"]:
    """Return which steps all of ``masks`` name, of those that the dataset has, and belong to an episode that ``filter`` names."""
    servable = np.ones(reader.num_steps, np.bool_)
    for name in masks:
        if name in reader.info.arrays:
            servable &= reader.rows(name)
    reader.info.hide_replaced(servable, np.arange(reader.num_steps))  # which only ``valid`` says by itself
    if not filter:
        return servable
    return servable & np.repeat(Filter(filter).episodes(reader), reader.rows("row_size"))
