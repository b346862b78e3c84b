"""Which steps of a dataset are samples: the valid ones, of the episodes that a filter names."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.loaders.filters import Filter
from pipeline.loaders.reader import DatasetReader
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

    def __init__(self, path: str | Path, options: ReadOptions) -> None:
        self.reader = DatasetReader(path, check=options.check)
        self.anchors = find_anchors(self.reader, options.filter)
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


def find_anchors(reader: DatasetReader, filter: str = "") -> Int64[np.ndarray, " sample"]:
    """Return the steps that are samples: valid ones, and of those the ones that ``is_anchor`` names, if there is one."""
    is_sample = servable_steps(reader, filter)
    if "is_anchor" in reader.info.arrays:
        is_sample = is_sample & reader.rows("is_anchor")
    anchors = np.flatnonzero(is_sample)
    if not anchors.size:
        cause = f"change the filter {filter!r}" if filter else "see the quarantine table"
        raise DatasetError(
            f"expected at least one step to serve, found none of {reader.num_steps} valid and asked for; {cause}"
        )
    return anchors


def servable_steps(reader: DatasetReader, filter: str) -> Bool[np.ndarray, " step"]:
    """Return which steps are valid and belong to an episode that ``filter`` names."""
    valid: np.ndarray = reader.rows("valid")
    if not filter:
        return valid
    return valid & np.repeat(Filter(filter).episodes(reader), reader.rows("row_size"))
