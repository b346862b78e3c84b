"""Numeric signals out of one JSON record a step, as CARLA's recorders write them."""

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, SignalBlock, SignalInfo

ROAD_OPTIONS: Mapping[int, str] = {
    4: "Follow the lane.",
    1: "Turn left at the next intersection.",
    2: "Turn right at the next intersection.",
    3: "Go straight at the next intersection.",
    5: "Change to the left lane.",
    6: "Change to the right lane.",
}
"""CARLA's RoadOption as an instruction; VOID (-1) and numbers that CARLA does not define are served by the first."""

INSTRUCTIONS = tuple(ROAD_OPTIONS.values())

_PYTHON = re.compile(r"""(?s)'((?:[^'\\]|\\.)*+)'|"(?:[^"\\]|\\.)*+"|\\.|\b(True|False|None|nan|inf)\b|[()]""")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null", "nan": "NaN", "inf": "Infinity", "(": "[", ")": "]"}


@dataclass(frozen=True, slots=True)
class Field:
    """One numeric field of a record and the signal that it becomes. Always float64, so that a broken record is NaN."""

    name: str
    units: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    get: Callable[[Mapping[str, Any]], Any] | None = None
    """How to find the value in the record; its top-level key ``name`` if None. Raises LookupError or TypeError if absent."""

    @property
    def info(self) -> SignalInfo:
        """Return the signal's description."""
        return SignalInfo(name=self.name, shape=self.shape, dtype="float64", names=self.names, units=self.units)

    def value(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the value as ``float64[shape]``, NaN kept; SourceError where the record has no such value."""
        try:
            found = self.get(record) if self.get else record[self.name]
        except (LookupError, TypeError, AttributeError) as error:
            raise SourceError(f"expected the field {self.name!r}, found none; read another signal") from error
        try:
            row = np.array(np.nan if found is None else found, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise SourceError(
                f"expected a number or list in {self.name!r}, found {str(found)[:40]!r}; check the record"
            ) from error
        if row.shape != self.shape:
            raise SourceError(
                f"expected {list(self.shape)} values in {self.name!r}, found {list(row.shape)}; check the record",
                Reason.WRONG_SHAPE,
            )
        return row


def unzip(data: bytes, limit_nbytes: int) -> bytes:
    """Unpack gzip, its own checksum checked and never to more than ``limit_nbytes``; return anything else as it is."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    unpacker = zlib.decompressobj(wbits=31)
    try:
        out = unpacker.decompress(data, limit_nbytes)
    except zlib.error as error:
        raise SourceError(f"expected gzip, found: {error}; download the file again", Reason.DECODE) from error
    if unpacker.eof:
        return out
    if len(out) >= limit_nbytes:
        raise SourceError(
            f"expected at most {limit_nbytes} bytes unpacked, found more; check the file", Reason.TOO_LARGE
        )
    raise SourceError(
        f"expected a whole gzip file, found {len(data)} bytes of one; download it again", Reason.TRUNCATED
    )


def parse_record(data: bytes) -> Mapping[str, Any]:
    """Parse a JSON object, or the ``repr`` of a Python dict of plain values; nothing is evaluated.

    Standard JSON first, whose NaN and Infinity literals Python's parser takes. What it refuses is rewritten token by token
    (``'x'`` to ``"x"``, True to true, nan to NaN, tuples to lists) and parsed again: unlike ``ast.literal_eval`` that knows
    nan, cannot overflow the parser's stack, and is 4 times faster.
    """
    try:
        text = data.decode("utf-8-sig")
        try:
            record = json.loads(text)
        except ValueError:
            record = json.loads(_PYTHON.sub(_as_json, text))
    except (ValueError, RecursionError) as error:
        reason = Reason.DECODE if data.rstrip().endswith(b"}") else Reason.TRUNCATED
        raise SourceError(f"expected a JSON object, found: {str(error)[:120]}; record it again", reason) from error
    if not isinstance(record, dict):
        raise SourceError(
            f"expected a JSON object, found a {type(record).__name__}; check the recording", Reason.DECODE
        )
    return record


def _as_json(match: re.Match[str]) -> str:
    if match[1] is not None:
        return json.dumps(match[1].replace("\\'", "'"))
    return _JSON_WORDS.get(match[0], match[0])


def instruction_index(record: Mapping[str, Any], key: str) -> int:
    """Return which of :data:`INSTRUCTIONS` the record's RoadOption asks for."""
    command = record[key]
    if isinstance(command, int | float) and command in ROAD_OPTIONS:
        return list(ROAD_OPTIONS).index(int(command))
    return 0


def read_records(
    load: Callable[[int], Mapping[str, Any]], fields: Sequence[Field], ref: EpisodeRef, steps: np.ndarray
) -> SignalBlock:
    """Read one record for each distinct step and take ``fields`` of it; what fails is NaN and a fault."""
    values = {field.name: np.full((len(steps), *field.shape), np.nan) for field in fields}
    faults: list[Fault] = []
    if not fields:
        return SignalBlock(values={})  # time alone is asked for, and no record says it
    wanted, first, repeats = np.unique(steps, return_index=True, return_counts=True)
    for step, start, stop in zip(wanted.tolist(), first.tolist(), (first + repeats).tolist(), strict=True):
        try:
            record = load(step)
        except SourceError as error:
            faults.append(fault_at(error, ref, step))
            continue
        for field in fields:
            try:
                values[field.name][start:stop] = field.value(record)
            except SourceError as error:
                faults.append(fault_at(error, ref, step, field.name))
    return SignalBlock(values=values, faults=tuple(join_faults(faults)))


def fault_at(error: SourceError, ref: EpisodeRef, step: int, stream: str = "") -> Fault:
    """Return ``error`` as the fault of one step."""
    path = str(error.where.get("file", ""))
    return Fault(
        reason=error.reason, message=error.message, episode=ref.key, stream=stream, start=step, stop=step + 1, path=path
    )


def join_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Join faults of neighbouring steps that say the same of one stream; the first one's file stands for them."""
    joined: list[Fault] = []
    for fault in sorted(faults, key=lambda fault: (fault.stream, fault.start)):
        last = joined[-1] if joined else None
        if last and (last.stream, last.reason, last.message, last.stop) == (
            fault.stream,
            fault.reason,
            fault.message,
            fault.start,
        ):
            joined[-1] = replace(last, stop=fault.stop)
        else:
            joined.append(fault)
    return joined
