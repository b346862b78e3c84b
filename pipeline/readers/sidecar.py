"""What a person may write beside recordings whose format has no place for it: ``meta.json`` with rate and instructions."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.readers.metadata import as_rate, as_text, read_json
from schemas.errors import SourceError
from schemas.source import Fault

NAME = "meta.json"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Content of ``meta.json``."""

    rate_hz: float = 0.0
    """0 where it gives none."""
    instructions: tuple[str, ...] = ()


def read_sidecar(root: Path, folders: Iterable[str], faults: list[Fault]) -> Sidecar:
    """Read ``meta.json`` of each of ``folders`` that has one; a later one overrides an earlier."""
    data: dict[str, Any] = {}
    for folder in dict.fromkeys(folders):
        path = f"{folder}/{NAME}" if folder else NAME
        if not os.path.lexists(root / path):
            continue
        try:
            data.update(read_json(root, path))
        except SourceError as error:
            fault = Fault(reason=error.reason, message=error.message, path=path)
            faults += [fault] if fault not in faults else []
    texts = data.get("instructions", [])
    texts = [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []
    return Sidecar(as_rate(data.get("rate_hz")), tuple(as_text(text) for text in texts if isinstance(text, str)))
