"""Samples of several datasets as if they were one."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.buffers import BatchBuffers, Layout
from pipeline.loaders.delivery import Arrays, Batch, Samples, Texts
from pipeline.store.atomic import xxh3_hex
from schemas.errors import HeadraceError, UsageError

_PIECE_NBYTES = 1 << 23
"""Samples that do not lie side by side in a batch are read into memory of this size first, and copied to their rows. (A quarter of this
costs more in calls than it saves by staying in the core's cache: 2.3 against 1.7 times one dataset's time; 2 vCPU, 2026-12.)"""


class MixedSamples:
    """The samples of the first dataset, then those of the second, and so on; batches say of which (``dataset``).

    Parameters
    ----------
    parts
        The datasets' samples, alike in what a batch of them is.
    names
        What errors call the datasets.

    Raises
    ------
    UsageError
        The batches of two of them differ; the message says in what.
    """

    def __init__(self, parts: Sequence[Samples], names: Sequence[str]) -> None:
        self.parts, self.names = parts, names
        self._check_alike()
        self.starts = np.cumsum([0, *(part.num for part in parts)])
        self.num = int(self.starts[-1])
        self.fingerprint = xxh3_hex(" ".join(part.fingerprint for part in parts).encode())
        layout = parts[0].layout
        self.layout: Layout = {**layout, "dataset": ((), "int64")}
        nbytes = sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
        self._piece = max(1, _PIECE_NBYTES // nbytes)
        self._buffers = BatchBuffers(layout, self._piece, num_kept=4)

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays`` with ``samples``; safe in several threads at once."""
        arrays["dataset"][:] = numbers = self._numbers(samples)
        mine = {name: array for name, array in arrays.items() if name != "dataset"}
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            try:
                self._fill(number, samples, rows, mine)
            except HeadraceError as error:
                error.where = {"dataset": self.names[number], **error.where}
                raise

    def texts(self, samples: Int64[np.ndarray, " batch"]) -> dict[str, list[str]]:
        """Return what ``samples`` have beside arrays."""
        numbers = self._numbers(samples)
        merged: dict[str, list[str]] = {}
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            for name, texts in self.parts[number].texts(samples[rows] - self.starts[number]).items():
                column = merged.setdefault(name, [""] * len(samples))
                for row, text in zip(rows.tolist(), texts, strict=True):
                    column[row] = text
        return merged

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch as that of one dataset, with ``dataset``: int64, which of them each sample is of."""
        return {**self.parts[0].assemble(arrays, texts), "dataset": arrays["dataset"]}

    def _numbers(self, samples: Int64[np.ndarray, " batch"]) -> Int64[np.ndarray, " batch"]:
        return np.searchsorted(self.starts, samples, side="right") - 1

    def _fill(self, number: int, samples: np.ndarray, rows: np.ndarray, arrays: Arrays) -> None:
        part, wanted = self.parts[number], samples[rows] - self.starts[number]
        if rows[-1] - rows[0] < len(rows):
            part.fill(wanted, {name: array[rows[0] : rows[-1] + 1] for name, array in arrays.items()})
            return
        for start in range(0, len(rows), self._piece):
            some = rows[start : start + self._piece]
            piece = self._buffers.lease(len(some))
            if "epoch" in piece:
                piece["epoch"][:] = arrays["epoch"][some]
            part.fill(wanted[start : start + self._piece], piece)
            for name, array in arrays.items():
                array[some] = piece[name]

    def _check_alike(self) -> None:
        first = self.parts[0].layout
        for name, part in zip(self.names, self.parts, strict=True):
            only = sorted(first.keys() ^ part.layout.keys())
            if only:
                raise UsageError(
                    f"expected the same arrays in batches of all datasets, found {only} in one of {self.names[0]} and {name} only; "
                    "choose views that both have"
                )
            for array, (shape, dtype) in part.layout.items():
                if (shape, dtype) != first[array]:
                    raise UsageError(
                        f"expected {array} of {first[array][1]}{list(first[array][0])} as in {self.names[0]}, found "
                        f"{dtype}{list(shape)} in {name}; convert it with the same recipe, or give options that make them alike"
                    )
