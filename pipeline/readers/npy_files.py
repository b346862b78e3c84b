"""One ``.npy`` file: its header checked against its size before anything is mapped, its rows copied out of the map.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. The header is matched, not evaluated; an
object array is a pickle and is refused.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.readers.folders import open_inside
from schemas.errors import Reason, SourceError

MAX_HEADER_NBYTES = 2**16

NUMBERS = {(kind, str(size)) for kind in "iuf" for size in (1, 2, 4, 8)} - {("f", "1")} | {("b", "1")}
"""Kind and size of the dtypes that are read."""
_DESCR = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?)([a-zA-Z?])(\d*)['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(((?:\s*\d{1,18}L?\s*,?)*)\s*\)""", re.ASCII)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What the header of an ``.npy`` file says."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int
    """Where the numbers begin."""

    @property
    def num_steps(self) -> int:
        """Length of the first axis."""
        return self.shape[0]


def read_header(root: Path, path: str) -> NpyHeader:
    """Read and check the header of a file of the source; SourceError says why it cannot be mapped."""
    with _opened(root, path) as (_, header):
        return header


@contextmanager
def mapped(root: Path, path: str) -> Iterator[np.ndarray]:
    """Map an array for as long as the context lasts. Copy what is to outlive it."""
    with _opened(root, path) as (file, header):
        if 0 in header.shape:
            yield np.zeros(header.shape, header.dtype)
            return
        order: Literal["C", "F"] = "F" if header.is_fortran else "C"
        try:
            yield np.memmap(file, header.dtype, "r", header.offset, header.shape, order)
        except (OSError, OverflowError) as error:
            raise SourceError(
                f"expected a file that can be mapped, found: {error}; check the disk", Reason.IO, file=path
            ) from error


@contextmanager
def _opened(root: Path, path: str) -> Iterator[tuple[Any, NpyHeader]]:
    with os.fdopen(open_inside(root, path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        header = _parse(file.read(MAX_HEADER_NBYTES), nbytes, path)
        wanted = header.offset + math.prod(header.shape) * header.dtype.itemsize
        if nbytes < wanted:
            message = f"expected {wanted} bytes as its header says, found {nbytes}; copy or write it again"
            raise SourceError(message, Reason.TRUNCATED, file=path)
        yield file, header


def _parse(head: bytes, nbytes: int, path: str) -> NpyHeader:
    if len(head) < 12:
        raise SourceError(
            f"expected an .npy file, found {nbytes} bytes; copy or write it again", Reason.TRUNCATED, file=path
        )
    if not head.startswith(b"\x93NUMPY"):
        raise SourceError(
            f"expected an .npy file, found one that begins with {head[:6]!r}; check it", Reason.DECODE, file=path
        )
    text, offset = header_text(head)
    if offset > len(head):
        reason = Reason.TRUNCATED if offset > nbytes else Reason.UNSUPPORTED
        raise SourceError(
            f"expected a header of at most {MAX_HEADER_NBYTES} bytes, found {offset}; check it", reason, file=path
        )
    fields = header_fields(text)
    if fields is None or fields[0][1] not in "biuf":
        message = f"expected an array of plain numbers, found {text.strip()[:80]!r}; save it as such (object arrays are pickles)"
        raise SourceError(message, Reason.UNSUPPORTED, file=path)
    (order, kind, size), is_fortran, sides = fields
    if (kind, size) not in NUMBERS:
        raise SourceError(
            f"expected numbers of 1 to 8 bytes, found {order}{kind}{size}; save it as such",
            Reason.UNSUPPORTED,
            file=path,
        )
    if not sides:
        raise SourceError(
            "expected an array along steps, found a single number; move it to meta.json", Reason.UNSUPPORTED, file=path
        )
    return NpyHeader(np.dtype(f"{order}{kind}{size}"), sides, is_fortran, offset)


def header_text(head: bytes) -> tuple[str, int]:
    """Return the text of a header and where the numbers begin; ``head`` is 12 bytes or more."""
    start = 10 if head[6] == 1 else 12
    offset = start + int.from_bytes(head[8:start], "little")
    return head[start:offset].decode("latin-1"), offset


def header_fields(text: str) -> tuple[tuple[str, str, str], bool, tuple[int, ...]] | None:
    """Return byte order, kind and size of the dtype, whether columns come first, and the shape; None where the text does not say them."""
    descr, order, shape = _DESCR.search(text), _ORDER.search(text), _SHAPE.search(text)
    if not (descr and order and shape):
        return None
    sides = tuple(int(side) for side in re.findall(r"\d+", shape[1]))
    return (descr[1], descr[2], descr[3]), order[1] == "True", sides
