"""JSON that describes recordings: parsed within limits, every refusal with its place."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.readers.folders import open_inside, read_inside
from schemas.errors import Reason, SourceError
from schemas.source import Fault

MAX_FILE_NBYTES = 64 * 2**20
MAX_LINE_NBYTES = 16 * 2**20


def read_json(root: Path, path: str) -> dict[str, Any]:
    """Read a JSON object of the source; SourceError where it is none."""
    data = read_inside(root, path, MAX_FILE_NBYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"expected JSON, found: {str(error)[:120]}; restore the file", Reason.BAD_METADATA, file=path
        ) from error
    if not isinstance(value, dict):
        raise SourceError(f"expected a JSON object, found a {type(value).__name__}; restore the file", file=path)
    return value


def read_lines(root: Path, path: str, faults: list[Fault]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)`` of a JSON Lines file; a broken line is a fault and costs no other line."""
    with os.fdopen(open_inside(root, path), "rb") as file:
        number = 0
        try:
            while line := file.readline(MAX_LINE_NBYTES):
                number += 1
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    faults.append(line_fault(path, number, f"expected a JSON object, found: {str(error)[:80]}"))
                    continue
                if isinstance(value, dict):
                    yield number, value
                else:
                    faults.append(line_fault(path, number, f"expected a JSON object, found a {type(value).__name__}"))
        except OSError as error:
            raise SourceError(
                f"expected a readable file, found: {error.strerror}; check the disk", Reason.IO, file=path
            ) from error


def line_fault(path: str, number: int, message: str, reason: Reason = Reason.BAD_METADATA) -> Fault:
    """Return the fault of one line."""
    return Fault(reason=reason, message=f"line {number}: {message}; restore the file", path=path)


def as_rate(value: Any) -> float:
    """Return a rate in Hz that metadata gives, or 0 where it gives none that can be."""
    is_rate = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e6
    return float(value) if is_rate else 0.0


def as_text(value: Any) -> str:
    """Return text that can be written as UTF-8: a lone surrogate, which JSON can spell, becomes ``?``."""
    return str(value).encode("utf-8", "replace").decode()
