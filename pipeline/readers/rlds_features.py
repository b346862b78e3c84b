"""What ``features.json`` and ``dataset_info.json`` of a TFDS folder say, read with the tolerance that foreign writers need."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.readers.folders import natural_key
from pipeline.readers.metadata import as_text, read_json
from schemas.errors import Reason, SourceError
from schemas.source import Fault, SignalInfo, ViewInfo

FEATURES = "features.json"
INFO = "dataset_info.json"
MAX_ROW_SIZE = 2**16
"""Greatest number of elements of one row of a signal."""
MAX_DEPTH = 32
COUNTERS = ("is_first", "is_last", "is_terminal")
"""Flags that RLDS has once a step, by which steps are counted; the first that features.json declares."""
INSTRUCTION = re.compile(r"(natural_)?language_instruction(_\d)?", re.ASCII)
OWN_NAMES = ("timestamp_s", "instruction_index")
"""Names that every reader offers itself."""

_NUMBERS = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of one dataset."""

    counter: str
    """Key of the flag by which steps are counted."""
    views: tuple[ViewInfo, ...]
    signals: tuple[SignalInfo, ...]
    instructions: tuple[str, ...]
    """Keys of the texts that are instructions, the main one first."""
    facts: tuple[str, ...]
    """Keys of single numbers and texts of an episode."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    key: str
    """As it stands in the Example, parts joined by ``/``."""
    kind: str
    """``image``, ``text``, ``number``, or why it is left alone."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    encoding: str = ""


def read_features(root: Path, path: str) -> Features:
    """Read and check ``features.json``; SourceError only where nothing can be read without it."""
    data = read_json(root, path)
    leaves = list(_leaves(data, "", 0))
    keys = {leaf.key for leaf in leaves}
    steps = [leaf for leaf in leaves if leaf.key.startswith("steps/")]
    counter = next((f"steps/{name}" for name in COUNTERS if f"steps/{name}" in keys), "")
    if not counter:
        raise SourceError(
            f"expected steps with {COUNTERS[0]}, as RLDS has, found {sorted(keys)[:3]}; this is another kind of TFDS dataset",
            file=path,
        )
    names = {leaf.key: step_name(leaf.key, keys) for leaf in steps}
    views = [_view(leaf, names[leaf.key]) for leaf in steps if leaf.kind == "image"]
    signals = [leaf for leaf in steps if leaf.kind == "number" and names[leaf.key] not in OWN_NAMES]
    texts = sorted((leaf.key for leaf in steps if leaf.kind == "text"), key=lambda key: (len(key), key))
    return Features(
        counter=counter,
        views=tuple(sorted(views, key=lambda view: natural_key(view.name))),  # a message's fields come in any order
        signals=tuple(SignalInfo(name=names[leaf.key], shape=leaf.shape, dtype=leaf.dtype) for leaf in signals),
        instructions=tuple(key for key in texts if INSTRUCTION.fullmatch(key.rpartition("/")[2])),
        facts=tuple(
            leaf.key for leaf in leaves if leaf not in steps and leaf.kind in ("number", "text") and not leaf.shape
        ),
        notes=tuple(_notes(leaves)),
    )


def step_name(key: str, keys: set[str]) -> str:
    """Return the name of a feature of a step: its path, without ``observation/`` where that leaves it unique.

    >>> step_name("steps/observation/state", {"steps/observation/state"})
    'state'
    """
    path = key.removeprefix("steps/")
    short = path.removeprefix("observation/")
    return path if f"steps/{short}" in keys else short


def feature_key(name: str, keys: Mapping[str, Any]) -> str:
    """Return the key of the feature that :func:`step_name` named."""
    return f"steps/{name}" if f"steps/{name}" in keys else f"steps/observation/{name}"


def _view(leaf: _Leaf, name: str) -> ViewInfo:
    encoding = "jpeg" if leaf.encoding == "jpeg" else "png"
    return ViewInfo(name=name, height_px=max(leaf.shape[0], 0), width_px=max(leaf.shape[1], 0), encoding=encoding)


def _notes(leaves: list[_Leaf]) -> Iterator[str]:
    others: dict[str, list[str]] = {}
    for leaf in leaves:
        if leaf.kind not in ("image", "text", "number"):
            others.setdefault(leaf.kind, []).append(leaf.key)
    for kind, keys in others.items():
        shown = ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")
        yield f"{len(keys)} features were left alone, {kind}: {shown}"


def _leaves(node: Any, key: str, depth: int) -> Iterator[_Leaf]:
    """Walk the tree of features: dicts and the sequence of steps are folders, all else is a leaf."""
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        yield _Leaf(key=key, kind="not described")
        return
    table = node.get("featuresDict")
    if isinstance(table, dict) and isinstance(table.get("features"), dict):
        for name, feature in table["features"].items():
            name = as_text(name)
            yield from _leaves(feature, f"{key}/{name}" if key else name, depth + 1)
        return
    sequence = node.get("sequence")
    if isinstance(sequence, dict):
        yield from _sequence(node, sequence, key, depth)
        return
    yield _leaf(node, key)


def _sequence(node: Mapping[str, Any], sequence: Mapping[str, Any], key: str, depth: int) -> Iterator[_Leaf]:
    """Unfold ``steps``; a sequence inside of a step is a longer row where its length is fixed, else ragged."""
    if key == "steps":
        yield from _leaves(sequence.get("feature"), key, depth + 1)
        return
    length = _side(sequence.get("length"))
    for leaf in _leaves(sequence.get("feature"), key, depth + 1):
        if length < 0:
            yield _Leaf(key=leaf.key, kind="ragged")
        elif leaf.kind == "number":
            yield _checked(_Leaf(key=leaf.key, kind="number", shape=(length, *leaf.shape), dtype=leaf.dtype))
        else:
            yield _Leaf(key=leaf.key, kind="sequences of images or texts")


def _leaf(node: Mapping[str, Any], key: str) -> _Leaf:
    image, tensor = node.get("image"), node.get("tensor")
    if "text" in node:
        return _Leaf(key=key, kind="text")
    if "classLabel" in node:
        return _Leaf(key=key, kind="number", dtype="int64")
    if isinstance(image, dict):
        shape, dtype = _shape(image), str(image.get("dtype", "uint8"))
        if len(shape) != 3 or shape[2] != 3 or dtype != "uint8":
            return _Leaf(key=key, kind="images that are not uint8 RGB")
        return _Leaf(key=key, kind="image", shape=shape, encoding=str(image.get("encodingFormat", "")).lower())
    if isinstance(tensor, dict):
        dtype = str(tensor.get("dtype", ""))
        if dtype in ("string", "object"):
            return _Leaf(key=key, kind="text" if not _shape(tensor) else "arrays of texts")
        if str(tensor.get("encoding", "none")).lower() not in ("none", ""):
            return _Leaf(key=key, kind="encoded tensors")
        return _checked(_Leaf(key=key, kind="number", shape=_shape(tensor), dtype=dtype))
    return _Leaf(key=key, kind=f"of type {str(node.get('pythonClassName', '')).rpartition('.')[2][:40] or 'unknown'}")


def _checked(leaf: _Leaf) -> _Leaf:
    dtype = "float32" if leaf.dtype == "bfloat16" else leaf.dtype  # floats of any width are stored as float32
    if dtype not in _NUMBERS:
        return _Leaf(key=leaf.key, kind=f"of dtype {leaf.dtype[:20] or 'unknown'}")
    if any(side < 0 for side in leaf.shape):
        return _Leaf(key=leaf.key, kind="ragged")
    if math.prod(leaf.shape) > MAX_ROW_SIZE:
        return _Leaf(key=leaf.key, kind=f"more than {MAX_ROW_SIZE} numbers a step")
    return _Leaf(key=leaf.key, kind="number", shape=() if leaf.shape == (1,) else leaf.shape, dtype=dtype)


def _shape(node: Mapping[str, Any]) -> tuple[int, ...]:
    shape = node.get("shape")
    sides = shape.get("dimensions", []) if isinstance(shape, dict) else []
    return tuple(_side(side) for side in sides) if isinstance(sides, list) else (-1,)


def _side(value: Any) -> int:
    """Return a length, which the JSON form of int64 spells as a string; -1 where it is not fixed."""
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else -1


def default_columns(signals: tuple[SignalInfo, ...]) -> dict[str, tuple[str, ...]]:
    """Return which columns make ``state`` and ``actions``: DROID's joints as openpi takes them, else by RLDS's names."""
    offered = [signal.name for signal in signals]
    droid: dict[str, tuple[str, ...]] = {
        "state": ("joint_position", "gripper_position"),
        "actions": ("action_dict/joint_position", "action_dict/gripper_position"),
    }
    if all(name in offered for names in droid.values() for name in names):
        return droid
    state = next(((name,) for name in ("state", "proprio", "observation/state") if name in offered), ())
    actions = next(((name,) for name in ("action", "actions") if name in offered), ())
    return {"state": state, "actions": actions or tuple(name for name in offered if name.startswith("action/"))}


@dataclass(frozen=True, slots=True)
class Split:
    """One split as ``dataset_info.json`` declares it."""

    name: str
    shard_lengths: tuple[int, ...]
    """Records of each shard."""
    num_bytes: int
    """Payload bytes of all records; -1 where it is not said."""


def read_splits(root: Path, path: str, faults: list[Fault]) -> tuple[str, dict[str, Split]]:
    """Return the dataset's name and its splits by name; a split that cannot be read is a fault."""
    data = read_json(root, path)
    if str(data.get("fileFormat", "tfrecord")).lower() != "tfrecord":
        found = str(data["fileFormat"])[:20]
        raise SourceError(f"expected fileFormat tfrecord, found {found}; build the dataset as tfrecord", file=path)
    splits: dict[str, Split] = {}
    listed = data.get("splits", [])
    for item in listed if isinstance(listed, list) else []:
        item = item if isinstance(item, dict) else {}
        name, lengths = item.get("name"), item.get("shardLengths")
        counts = [_side(length) for length in lengths] if isinstance(lengths, list) else [-1]
        if not isinstance(name, str) or min(counts, default=0) < 0:
            message = f"expected splits with name and shardLengths, found {str(item)[:60]}; restore the file"
            faults.append(Fault(reason=Reason.BAD_METADATA, message=message, path=path))
            continue
        num_bytes = str(item.get("numBytes", ""))
        is_number = re.fullmatch(r"\d{1,18}", num_bytes, re.ASCII) is not None
        splits[as_text(name)] = Split(as_text(name), tuple(counts), int(num_bytes) if is_number else -1)
    return as_text(data.get("name") or ""), splits
