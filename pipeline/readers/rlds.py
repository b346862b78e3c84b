"""RLDS datasets as TensorFlow Datasets writes them (Open X-Embodiment, DROID, LIBERO, Octo), read without TensorFlow.

``docs/formats.md`` describes the layout and what is read of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.readers.folders import SNIFF_FOLDERS, Folder, natural_key, source_root, walk_folders
from pipeline.readers.rlds_features import (
    FEATURES,
    INFO,
    Features,
    Split,
    default_columns,
    feature_key,
    read_features,
    read_splits,
)
from pipeline.readers.rlds_records import Record, ShardFile, Summary, as_text, open_shard
from pipeline.readers.sidecar import read_sidecar
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, SourceIndex
from tasks.tfrecord import byte_values, float_values, int64_values

KNOWN_RATES_HZ = {"droid": 15.0, "bridge": 5.0, "libero": 20.0, "fractal20220817_data": 3.0}
"""Rates by the beginning of the dataset's name, as its authors publish them; the format has no place for one."""
DEFAULT_RATE_HZ = 1.0
TIME = SignalInfo(name="timestamp_s", shape=(), dtype="float64", units="s")
INSTRUCTION = SignalInfo(name="instruction_index", shape=(), dtype="int64")

_SHARD = re.compile(r"(?P<dataset>\w+)-(?P<split>[^/]+)\.tfrecord-(?P<shard>\d{5,9})-of-(?P<count>\d{5,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RldsReader:
    """Datasets below ``root``, which may be one version's folder, a dataset of several, or a folder of datasets."""

    name: ClassVar[str] = "rlds"

    root: Path
    rate_hz: float = 0.0
    """Rate of all recordings; 0 takes that of ``meta.json``, else the known one of the dataset's name, else 1 Hz."""

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a dataset lies at or below ``root``, else what is missing."""
        folders = islice(walk_folders(root, lambda folder: not _is_dataset(folder)), SNIFF_FOLDERS)
        return "" if any(_is_dataset(folder) for folder in folders) else f"no folder with {FEATURES} and *.tfrecord-*"

    def index(self) -> SourceIndex:
        """List the episodes by the framing of each shard and the keys of each record; no image is read."""
        root = source_root(self.root)
        found = _Index(root, self.rate_hz)
        for folder in walk_folders(root, lambda folder: not _is_dataset(folder)):
            if isinstance(folder, Fault):
                found.faults.append(folder)
            elif _is_dataset(folder):
                found.add(folder)
        columns = default_columns(found.signals)
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(found.episodes),
            faults=tuple(found.faults),
            state=columns["state"],
            actions=columns["actions"],
            notes=found.all_notes(),
        )

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``; the record is read whole and checked once. Time costs no read."""
        steps = np.asarray(steps, np.int64)
        values = {name: _unread(ref.signal(name), len(steps)) for name in names}
        if TIME.name in values:
            values[TIME.name] = steps / ref.rate_hz
        wanted = [name for name in values if name != TIME.name]
        faults: list[Fault] = []
        if not wanted:
            return SignalBlock(values=values)
        try:
            example = self._example(ref)
        except SourceError as error:
            return SignalBlock(values=values, faults=(_fault(ref, error),))
        for name in wanted:
            try:
                values[name] = _rows(example, ref, ref.signal(name))[steps]
            except SourceError as error:
                faults.append(_fault(ref, error, name))
        return SignalBlock(values=values, faults=tuple(faults))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the encoded image of each step, or a fault."""
        wanted = np.asarray(steps, np.int64).tolist()
        try:
            if not ref.view(view).present:
                message = "expected images of the view, found none or a placeholder; choose another view"
                raise SourceError(message, Reason.MISSING_FILE)
            images = _images(self._example(ref), ref, view)
        except SourceError as error:
            yield from (_fault(ref, error, view, step) for step in wanted)
            return
        for step in wanted:
            yield bytes(images[step])

    def _example(self, ref: EpisodeRef) -> Mapping[str, memoryview]:
        with open_shard(self.root, ref.details["path"]) as file:
            return file.read_example(Record(ref.details["offset"], ref.details["nbytes"], 0))

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the shard."""
        return str(ref.details["path"])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the shard."""
        yield Path(ref.details["path"])


def _is_dataset(folder: object) -> bool:
    return isinstance(folder, Folder) and FEATURES in folder.files and (INFO in folder.files or bool(_shards(folder)))


def _shards(folder: Folder) -> list[re.Match[str]]:
    matches = [_SHARD.fullmatch(name) for name in sorted(folder.files, key=natural_key)]
    return [match for match in matches if match]


def _unread(signal: SignalInfo, count: int) -> np.ndarray:
    dtype = np.dtype(signal.dtype)
    return np.full((count, *signal.shape), np.nan if dtype.kind == "f" else 0, dtype)


def _fault(ref: EpisodeRef, error: SourceError, stream: str = "", step: int = -1) -> Fault:
    start, stop = (step, step + 1) if step >= 0 else (0, ref.num_steps)
    return Fault(
        reason=error.reason,
        message=error.message,
        episode=ref.key,
        stream=stream,
        start=start,
        stop=stop,
        path=ref.details["path"],
    )


def _feature(example: Mapping[str, memoryview], name: str) -> memoryview:
    key = feature_key(name, example)
    if key not in example:
        message = f"expected the feature {name!r}, which {FEATURES} declares, found none; check the record"
        raise SourceError(message, Reason.MISSING_FILE)
    return example[key]


def _rows(example: Mapping[str, memoryview], ref: EpisodeRef, signal: SignalInfo) -> np.ndarray:
    """Return all rows of a signal, in the dtype that features.json declares."""
    if signal.name == INSTRUCTION.name:
        return _instruction_index(example, ref)
    feature, dtype = _feature(example, signal.name), np.dtype(signal.dtype)
    found = float_values(feature) if dtype.kind == "f" else int64_values(feature)
    if len(found) != ref.num_steps * signal.size:
        message = (
            f"expected {ref.num_steps} rows of {signal.size} numbers in {signal.name!r}, found {len(found)} numbers; "
            "check the record"
        )
        raise SourceError(message, Reason.WRONG_SHAPE)
    with np.errstate(over="ignore"):  # a float16 beyond its range becomes infinity, which is refused where it is used
        rows = found.astype(dtype)
    if dtype.kind in "iu" and dtype != np.uint64 and not np.array_equal(rows, found):
        message = f"expected {dtype} in {signal.name!r}, found {found.min()} to {found.max()}; check {FEATURES}"
        raise SourceError(message, Reason.BAD_METADATA)
    return rows.reshape(ref.num_steps, *signal.shape)


def _instruction_index(example: Mapping[str, memoryview], ref: EpisodeRef) -> np.ndarray:
    """Return each step's place among the episode's instructions; a step without a text is served by the first."""
    key = ref.details["instruction"]
    texts = [as_text(value) for value in byte_values(_feature(example, key))]
    if len(texts) != ref.num_steps:
        message = f"expected {ref.num_steps} texts in {key!r}, found {len(texts)}; check the record"
        raise SourceError(message, Reason.COUNT_MISMATCH)
    places = {text: place for place, text in enumerate(ref.instructions)}
    return np.array([places.get(text, 0) for text in texts], np.int64)


def _images(example: Mapping[str, memoryview], ref: EpisodeRef, view: str) -> list[memoryview]:
    images = byte_values(_feature(example, view))
    if len(images) != ref.num_steps:
        message = f"expected {ref.num_steps} images in {view!r}, found {len(images)}, so none can be told its step; check the record"
        raise SourceError(message, Reason.COUNT_MISMATCH)
    return images


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dataset:
    """One folder of shards."""

    folder: str
    name: str
    rate_hz: float
    features: Features
    splits: Mapping[str, Split] | None
    """None where no dataset_info.json says."""

    def join(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


@dataclass(slots=True)
class _Index:
    """An index as it grows."""

    root: Path
    rate_hz: float
    episodes: list[EpisodeRef] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signals: tuple[SignalInfo, ...] = ()
    seen: dict[tuple[int, int], str] = field(default_factory=dict)
    """``(length, crc) -> key`` of every record: equal records are one recording."""
    placeholders: dict[str, int] = field(default_factory=dict)

    def add(self, folder: Folder) -> None:
        """Add the shards of one folder."""
        try:
            dataset = self._describe(folder)
        except SourceError as error:
            path = str(error.where.get("file", folder.path))
            self.faults.append(Fault(reason=error.reason, message=error.message, path=path))
            return
        shards = _shards(folder)
        self._compare_files(dataset, shards)
        num_bytes: dict[str, int] = {}
        for match in shards:
            nbytes = self._add_shard(dataset, match)
            num_bytes[match["split"]] = num_bytes.get(match["split"], 0) + nbytes
        self._compare_bytes(dataset, shards, num_bytes)
        others = len(folder.files) - len(shards) - len(folder.files & {FEATURES, INFO, "meta.json"})
        self.notes += [f"{others} files beside the shards were ignored"] if others else []

    def all_notes(self) -> tuple[str, ...]:
        """Return what a person should know."""
        views = (
            f"view {name!r} holds one and the same image in every step of {count} episodes: left out as a placeholder"
            for name, count in self.placeholders.items()
        )
        return tuple(dict.fromkeys([*self.notes, *views]))

    def _describe(self, folder: Folder) -> _Dataset:
        name, splits = "", None
        if INFO in folder.files:
            name, splits = read_splits(self.root, folder.join(INFO), self.faults)
        else:
            self.notes.append(f"no {INFO}, so nothing says how many records there should be")
        features = read_features(self.root, folder.join(FEATURES))
        self.notes += features.notes
        self.signals = self.signals or features.signals
        shards = _shards(folder)
        name = name or (shards[0]["dataset"] if shards else "")
        rate_hz = (
            self.rate_hz or read_sidecar(self.root, ("", folder.path), self.faults).rate_hz or self._known_rate(name)
        )
        return _Dataset(folder=folder.path, name=name, rate_hz=rate_hz, features=features, splits=splits)

    def _known_rate(self, name: str) -> float:
        for prefix, rate_hz in KNOWN_RATES_HZ.items():
            if name.startswith(prefix):
                self.notes.append(f"the format has no rate; took {rate_hz:g} Hz, which sets called {prefix} have")
                return rate_hz
        self.notes.append("the format has no rate and meta.json gives no rate_hz: one step counts as one second")
        return DEFAULT_RATE_HZ

    def _compare_files(self, dataset: _Dataset, shards: Sequence[re.Match[str]]) -> None:
        """Report declared shards that are not there, once for each split."""
        for split in (dataset.splits or {}).values():
            found = {int(match["shard"]) for match in shards if match["split"] == split.name}
            missing = [shard for shard in range(len(split.shard_lengths)) if shard not in found]
            if missing:
                count, records = len(split.shard_lengths), sum(split.shard_lengths[shard] for shard in missing)
                name = f"{dataset.name}-{split.name}.tfrecord-{missing[0]:05d}-of-{count:05d}"
                message = (
                    f"expected {count} shards of split {split.name!r}, found {count - len(missing)}: "
                    f"{records} episodes are missing; complete the download"
                )
                self.faults.append(Fault(reason=Reason.MISSING_FILE, message=message, path=dataset.join(name)))

    def _compare_bytes(self, dataset: _Dataset, shards: Sequence[re.Match[str]], num_bytes: Mapping[str, int]) -> None:
        """Compare the payload bytes of each split that is whole with what dataset_info.json says."""
        for split in (dataset.splits or {}).values():
            whole = sum(match["split"] == split.name for match in shards) == len(split.shard_lengths)
            found = num_bytes.get(split.name, 0)
            if whole and split.num_bytes >= 0 and found != split.num_bytes:
                message = f"expected {split.num_bytes} bytes in split {split.name!r}, found {found}; download it again"
                self.faults.append(Fault(reason=Reason.COUNT_MISMATCH, message=message, path=dataset.join(INFO)))

    def _add_shard(self, dataset: _Dataset, match: re.Match[str]) -> int:
        """Add the episodes of a shard; return the payload bytes of its records."""
        path, prefix = dataset.join(match[0]), dataset.join(f"{match['split']}-{match['shard']}")
        count = nbytes = 0
        repeats: list[str] = []
        try:
            with open_shard(self.root, path) as file:
                for record in file.records():
                    self._add_record(
                        dataset, file, record, (path, f"{prefix}/episode_{count:06d}", match["split"]), repeats
                    )
                    count += 1
                    nbytes += record.nbytes
        except SourceError as error:
            message = f"after {count} records: {error.message}"
            self.faults.append(Fault(reason=error.reason, message=message, path=path))
        if repeats:
            message = (
                f"expected each episode once, found {len(repeats)} of {count} records again that were found before "
                f"(the first is {repeats[0]}); they were left out"
            )
            self.faults.append(Fault(reason=Reason.DUPLICATE, message=message, path=path))
        self._compare_length(dataset, match, count)
        return nbytes

    def _compare_length(self, dataset: _Dataset, match: re.Match[str], count: int) -> None:
        split = (dataset.splits or {}).get(match["split"])
        shard = int(match["shard"])
        if dataset.splits is None:
            return
        if split is None or shard >= len(split.shard_lengths):
            message = f"{match[0]} is not declared in {INFO}; it was read all the same"
            self.notes.append(message)
        elif count != split.shard_lengths[shard]:
            message = f"expected {split.shard_lengths[shard]} records, found {count}; download the shard again"
            self.faults.append(Fault(reason=Reason.COUNT_MISMATCH, message=message, path=dataset.join(match[0])))

    def _add_record(
        self, dataset: _Dataset, file: ShardFile, record: Record, place: tuple[str, str, str], repeats: list[str]
    ) -> None:
        path, key, split = place
        earlier = self.seen.setdefault((record.nbytes, record.crc), key)
        if earlier != key:
            repeats.append(earlier)
            return
        try:
            summary = file.glance(record).summarize(dataset.features)
            if not summary.num_steps:
                raise SourceError("expected an episode of 1 step or more, found none; drop it", Reason.EMPTY_EPISODE)
        except SourceError as error:
            self.faults.append(Fault(reason=error.reason, message=error.message, episode=key, path=path))
            return
        for name in summary.placeholders:
            self.placeholders[name] = self.placeholders.get(name, 0) + 1
        details = {**summary.facts, "path": path, "offset": record.offset, "nbytes": record.nbytes, "split": split}
        self.episodes.append(_episode(key, dataset, summary, details))


def _episode(key: str, dataset: _Dataset, summary: Summary, details: dict[str, object]) -> EpisodeRef:
    extra = (TIME, INSTRUCTION) if summary.has_index else (TIME,)
    if summary.has_index:
        details["instruction"] = dataset.features.instructions[0].removeprefix("steps/")
    return EpisodeRef(
        key=key,
        num_steps=summary.num_steps,
        rate_hz=dataset.rate_hz,
        views=summary.views,
        signals=(*dataset.features.signals, *extra),
        instructions=summary.instructions,
        details=details,
    )
