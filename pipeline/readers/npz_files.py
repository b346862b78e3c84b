"""One ``.npz`` file of plain arrays: opened as a source's file, each member checked against what is wanted before it is unpacked.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. Pickled members are refused.
"""

import io
import lzma
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.readers.folders import read_inside
from pipeline.readers.npy_files import NUMBERS, header_fields, header_text
from schemas.errors import Reason, SourceError, locate
from schemas.source import TEXT, SignalInfo

MAX_NBYTES = 2**28
"""Greatest size of a file, and of what its members unpack to."""
MAX_HEADER_NBYTES = 10_000
MAX_AXES = 16
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, KeyError, OSError, struct.error)
"""What zipfile raises where an archive contradicts itself."""


def describe(root: Path, path: str, text_nbytes: int) -> tuple[SignalInfo, ...]:
    """Return the arrays of a file, in its order; texts as ``text_nbytes`` bytes of UTF-8.

    Raises
    ------
    SourceError
        Not a whole file of plain arrays and texts.
    """
    infos = []
    for name, array in _members(root, path, None).items():
        if array.dtype.kind in "US":
            infos.append(SignalInfo(name=name, shape=(text_nbytes,), dtype="uint8", units=TEXT))
        else:
            infos.append(SignalInfo(name=name, shape=array.shape, dtype=array.dtype.name))
    return tuple(infos)


def fill_row(root: Path, path: str, wanted: Sequence[SignalInfo], row: Mapping[str, np.ndarray]) -> None:
    """Fill ``row[name][...]`` with the arrays of a file, which are exactly those wanted.

    Raises
    ------
    SourceError
        Damaged, pickled, or with other arrays than ``wanted``; ``row`` may then hold anything.
    """
    found = _members(root, path, {info.name: info for info in wanted})
    for info in wanted:
        array = found[info.name]
        with locate(file=path, stream=info.name):
            if info.units == TEXT:
                row[info.name][...] = encode_text(array, info.shape[0])
            else:
                _check(array, info)
                row[info.name][...] = array


def encode_text(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Return a text as ``uint8[nbytes]``, UTF-8 and zeros after it."""
    if array.dtype.kind != "U" or array.shape:
        raise SourceError(
            f"expected a text, found {array.dtype}{list(array.shape)}; save it as such", Reason.WRONG_SHAPE
        )
    data = str(array[()]).encode("utf-8", "surrogatepass")
    if len(data) > nbytes:
        raise SourceError(
            f"expected a text of at most {nbytes} bytes, found {len(data)}; pack these files apart", Reason.WRONG_SHAPE
        )
    return np.frombuffer(data.ljust(nbytes, b"\0"), np.uint8)


def decode_text(row: np.ndarray) -> str:
    """Return what :func:`encode_text` was given."""
    return row.tobytes().rstrip(b"\0").decode("utf-8", "surrogatepass")


def _check(array: np.ndarray, info: SignalInfo) -> None:
    if array.shape != info.shape or array.dtype != np.dtype(info.dtype):
        raise SourceError(
            f"expected {info.dtype}{list(info.shape)}, found {array.dtype}{list(array.shape)}; pack files of one kind together",
            Reason.WRONG_SHAPE,
        )


def _members(root: Path, path: str, wanted: Mapping[str, SignalInfo] | None) -> dict[str, np.ndarray]:
    data = read_inside(root, path, MAX_NBYTES)
    with locate(file=path):
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                _check_names(infos, archive, wanted)
                return {name: _array(archive.read(info), name) for name, info in infos.items()}
        except _DAMAGE as error:
            is_begun = data.startswith(b"PK") and b"PK\x05\x06" not in data[-65_557:]
            reason = Reason.TRUNCATED if is_begun or isinstance(error, EOFError) else Reason.DECODE
            raise SourceError(f"expected a whole .npz file, found: {error}; copy or write it again", reason) from error
        except (NotImplementedError, RuntimeError) as error:  # a compression that zipfile lacks, or a password
            raise SourceError(
                f"expected an .npz file, found: {error}; save it with np.savez", Reason.UNSUPPORTED
            ) from error


def _check_names(
    infos: Mapping[str, zipfile.ZipInfo], archive: zipfile.ZipFile, wanted: Mapping[str, SignalInfo] | None
) -> None:
    if len(infos) != len(archive.infolist()) or not all(info.filename.endswith(".npy") for info in infos.values()):
        raise SourceError(
            f"expected arrays by different names, found {sorted(archive.namelist())[:8]}; check the file",
            Reason.UNSUPPORTED,
        )
    if wanted is not None and infos.keys() != wanted.keys():
        missing, more = sorted(wanted.keys() - infos.keys()), sorted(infos.keys() - wanted.keys())
        reason = Reason.MISSING_FILE if missing else Reason.WRONG_SHAPE
        text = " and ".join([*([f"none called {missing}"] if missing else []), *([f"also {more}"] if more else [])])
        raise SourceError(f"expected the arrays of the other files, found {text}; write it again", reason)
    nbytes = sum(info.file_size for info in infos.values())
    limit = MAX_NBYTES if wanted is None else sum(_limit(info) for info in wanted.values())
    if nbytes > limit:
        raise SourceError(
            f"expected at most {limit} bytes when unpacked, found {nbytes}; check the file", Reason.TOO_LARGE
        )


def _limit(info: SignalInfo) -> int:
    return 4 * info.size * np.dtype(info.dtype).itemsize + 2 * MAX_HEADER_NBYTES  # four: texts are UTF-32 there


def _array(data: bytes, name: str) -> np.ndarray:
    with locate(stream=name):
        if len(data) < 12 or data[:6] != b"\x93NUMPY":
            raise SourceError(f"expected an .npy array, found {data[:6]!r}; write it again", Reason.DECODE)
        text, begin = header_text(data)
        fields = header_fields(text)
        if fields is None or begin > len(data):
            raise SourceError(f"expected the header of an array, found {text[:80]!r}; write it again", Reason.DECODE)
        (order, kind, size), is_fortran, shape = fields
        if kind == "O":
            raise SourceError(
                "expected plain numbers or a text, found pickled objects; save them as such", Reason.UNSUPPORTED
            )
        if order == ">" or (kind not in "SU" and (kind, size) not in NUMBERS) or len(size) > 9:
            raise SourceError(
                f"expected little-endian numbers or a text, found {order}{kind}{size}; save them as such",
                Reason.UNSUPPORTED,
            )
        if len(shape) > MAX_AXES or 0 in shape or (kind in "SU" and (shape or size == "0")):
            raise SourceError(
                f"expected arrays of numbers, none empty, and single texts, found {order}{kind}{size}{list(shape)}; leave it out",
                Reason.UNSUPPORTED,
            )
        dtype, count = np.dtype(f"{order}{kind}{size}"), math.prod(shape)
        if len(data) - begin != count * dtype.itemsize:
            raise SourceError(
                f"expected {count * dtype.itemsize} bytes of {dtype}{list(shape)}, found {len(data) - begin}; write it again",
                Reason.TRUNCATED,
            )
        return np.frombuffer(data, dtype, count, begin).reshape(shape, order="F" if is_fortran else "C")


def most_common(found: Sequence[tuple[SignalInfo, ...]]) -> tuple[SignalInfo, ...]:
    """Return what most files hold; of equals the first."""
    return Counter(found).most_common(1)[0][0]


def npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the bytes that ``np.savez`` writes of arrays, equal for equal arrays."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getvalue()
