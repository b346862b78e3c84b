"""A finished dataset as a preview sees it, every byte that it shows checked on the way."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset import open_dataset
from pipeline.preview.subject import SAMPLE_ROWS, TO_UNIT_RANGE, Episode, FactTable, Picture, Refusals, Signal
from pipeline.store.metadata import read_info
from pipeline.store.rows import RowReader
from pipeline.store.tables import read_document, read_table
from pipeline.summaries import nbytes_text
from schemas.dataset import ROW_CHUNK_STEPS
from schemas.errors import Reason
from schemas.source import Fault
from tasks.chart import evenly

MAX_SOURCE_FILES = 20


class DatasetSubject:
    """A dataset, opened."""

    kind = "dataset"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = read_info(path)
        self.reader = RowReader(self.info)
        self.physical = open_dataset(path, physical=True)
        self.num_steps = self.info.num_steps
        self.episodes: Sequence[Episode] = [
            _episode(row) for row in read_table(self.info, "episodes", _COLUMNS).to_pylist()
        ]
        bindings = self.info.attributes["bindings"]["views"]
        self._sources = {view["name"]: list(bindings[view["name"]]) for view in self.info.recipe["views"]}
        self.views: Mapping[str, str] = {
            view: f"{self.info.arrays[f'rgb_{view}'].row_shape[1]} x {self.info.arrays[f'rgb_{view}'].row_shape[0]} px, "
            + (f"from {' or '.join(names)}" if names else "from nothing")
            for view, names in self._sources.items()
        }
        frames = self.info.recipe["frames"]
        known = (tuple(frames["mean"]), tuple(frames["std"])) if frames["mean"] else TO_UNIT_RANGE
        self.frame_scaling: tuple[Sequence[float], Sequence[float]] = known
        self.signals: Sequence[Signal] = list(self._signals())

    def _signals(self) -> Iterator[Signal]:
        scaling = json.loads(read_document(self.info, "norm_stats")).get("norm_stats", {})
        for name in (signal["name"] for signal in self.info.recipe["signals"]):
            if name in self.info.arrays:
                attributes, known = dict(self.info.arrays[name].attributes), scaling.get(name, {})
                features = tuple(attributes["features"])
                yield Signal(
                    name=name,
                    features=features,
                    units=tuple(attributes.get("feature_units", ("",) * len(features))),
                    mean=tuple(known.get("mean", ())),
                    std=tuple(known.get("std", ())),
                )

    def frames(self, episode: int, view: str, steps: np.ndarray) -> list[Picture]:
        """Return frames as the policy sees them, in their physical form."""
        places = steps + self.episodes[episode].start
        present = self.reader.take(f"rgb_{view}_valid", places)
        pictures: list[Picture] = ["masked"] * len(steps)
        if present.any():
            shown = self.physical[f"rgb_{view}"].isel(step=places[present]).values
            for place, frame in zip(np.flatnonzero(present).tolist(), shown, strict=True):
                pictures[place] = frame
        return pictures

    def rows(self, episode: int, names: Sequence[str], steps: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows in float64."""
        places = steps + self.episodes[episode].start
        return {name: self.reader.take(name, places).astype(np.float64) for name in names}

    def times(self, episode: int, steps: np.ndarray) -> np.ndarray:
        """Return the times of the grid."""
        return self.reader.take("timestamp_s", steps + self.episodes[episode].start)

    def lateness(self, episode: int, steps: np.ndarray) -> tuple[str, np.ndarray]:
        """Return how far the recorded step lies from its step of the grid; NaN where a step is not valid."""
        places = steps + self.episodes[episode].start
        error_s = self.reader.take("align_error_s", places).astype(np.float64)
        error_s[~self.reader.take("valid", places)] = np.nan
        return "recorded time minus grid time", error_s

    def sample(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return valid rows of whole chunks from all over the dataset."""
        num_chunks = -(-self.num_steps // ROW_CHUNK_STEPS)
        chunks = evenly(num_chunks, SAMPLE_ROWS // ROW_CHUNK_STEPS)
        steps = (chunks[:, None] * ROW_CHUNK_STEPS + np.arange(ROW_CHUNK_STEPS)).reshape(-1)
        steps = steps[steps < self.num_steps]
        steps = steps[self.reader.take("valid", steps)]
        return {name: self.reader.take(name, steps).astype(np.float64) for name in names}

    def refusals(self, count: int) -> Refusals:
        """Return the quarantine table."""
        rows = read_table(self.info, "quarantine")
        counts = rows.group_by("reason").aggregate([("reason", "count")]).sort_by("reason").to_pylist()
        shown = [
            Fault(reason=Reason(row["reason"]), **{name: row[name] for name in _FAULT})
            for row in rows.slice(0, count).to_pylist()
        ]
        return Refusals(counts={row["reason"]: row["reason_count"] for row in counts}, shown=tuple(shown))

    def near(self, fault: Fault) -> tuple[Picture, str]:
        """Return the last frame that is served before what was refused, or else the first one."""
        found = next((k for k, episode in enumerate(self.episodes) if episode.key == fault.episode), None)
        if found is None:
            return "the episode is not in the dataset", ""
        wanted = [view for view, names in self._sources.items() if fault.stream in names]
        episode = self.episodes[found]
        for view in [*wanted, *(view for view in self.views if view not in wanted and view in episode.views)]:
            places = np.arange(episode.start, episode.start + episode.num_steps)
            served = np.flatnonzero(self.reader.take(f"rgb_{view}_valid", places))
            if served.size:
                recorded = self.reader.take("source_step", places[served])
                step = int(served[max(0, int(np.searchsorted(recorded, fault.start)) - 1)])
                return self.frames(found, view, np.array([step]))[0], f"{view}, step {step:,} of the dataset's episode"
        return "the episode has no frame", ""

    def facts(self) -> list[tuple[str, object]]:
        """Return recipe, generation and invalid steps."""
        sizes = self._sizes()
        raw = self._raw_nbytes()
        ratio = f", {sum(sizes.values()) / raw:.2g} times the raw size of {nbytes_text(raw)}" if raw else ""
        invalid = sum(episode.num_invalid for episode in self.episodes)
        return [
            ("Recipe", self.info.recipe["name"]),
            ("Generation", self.info.generation),
            ("Steps not to be served", f"{invalid:,} of {self.num_steps:,}"),
            ("Size", f"{nbytes_text(sum(sizes.values()))}{ratio}"),
        ]

    def provenance(self, episodes: Sequence[int]) -> list[FactTable]:
        """Return checksums, sources, arrays and their sizes."""
        info, sizes = self.info, self._sizes()
        checksums = [
            ("zarr.json", "", info.attributes["metadata_xxh3"]),
            *((ref.path, f"{ref.nbytes:,}", ref.xxh3) for _, ref in sorted(info.tables.items())),
            *((f"map {town}", "", digest) for town, digest in sorted(info.attributes.get("maps", {}).items())),
        ]
        arrays = [
            (
                name,
                spec.dtype,
                " x ".join(f"{side:,}" for side in (info.lengths[name], *spec.row_shape)),
                spec.codec,
                nbytes_text(sizes.get(name, 0)),
                nbytes_text(spec.row_nbytes * info.lengths[name]),
            )
            for name, spec in info.arrays.items()
        ]
        files = self._manifest().filter(pc.field("kind") == "source")
        shown = files.take(evenly(len(files), MAX_SOURCE_FILES)).to_pylist()
        sources = [(row["path"], row["episode"], f"{row['nbytes']:,}", row["xxh3"] or "none") for row in shown]
        recipe = [(name, _value(value)) for name, value in sorted(info.recipe.items())]
        bound = [(name, ", ".join(columns)) for name, columns in info.attributes["bindings"]["signals"].items()]
        return [
            FactTable(caption="Recipe", headers=("Key", "Value"), rows=recipe),
            FactTable(caption="Where signals come from", headers=("Signal", "Columns"), rows=bound),
            FactTable(caption="Arrays and their sizes", headers=_ARRAY_HEADERS, rows=arrays, numeric=(2, 4, 5)),
            FactTable(
                caption="Checksums (xxh3-128)", headers=("File", "Bytes", "Digest"), rows=checksums, numeric=(1,)
            ),
            FactTable(
                caption=f"Source files, {len(shown):,} of {len(files):,}, {nbytes_text(self._raw_nbytes())} in all",
                headers=("File", "Episode", "Bytes", "xxh3-128"),
                rows=sources,
                numeric=(2,),
            ),
        ]

    def _manifest(self) -> pa.Table:
        return read_table(self.info, "manifest", ["kind", "array", "path", "nbytes", "xxh3", "episode"])

    def _sizes(self) -> dict[str, int]:
        shards = self._manifest().filter(pc.field("kind") == "shard").group_by("array").aggregate([("nbytes", "sum")])
        return dict(zip(shards["array"].to_pylist(), shards["nbytes_sum"].to_pylist(), strict=True))

    def _raw_nbytes(self) -> int:
        sizes = self._manifest().filter((pc.field("kind") == "source") & (pc.field("nbytes") > 0))["nbytes"]
        return int(pc.sum(sizes).as_py() or 0)


_COLUMNS = (
    *("key", "source", "start", "stop", "rate_hz", "rate_measured_hz", "jitter_s"),
    *("instructions", "views", "num_invalid", "valid"),
)
_FAULT = ("message", "episode", "stream", "start", "stop", "path")
_ARRAY_HEADERS = ("Array", "Type", "Shape", "Codec", "On disk", "In memory")


def _episode(row: dict[str, Any]) -> Episode:
    return Episode(
        key=row["key"],
        num_steps=row["stop"] - row["start"],
        rate_hz=row["rate_hz"],
        instructions=tuple(row["instructions"]),
        views=frozenset(row["views"]),
        source=row["source"],
        start=row["start"],
        num_invalid=row["num_invalid"],
        is_served=row["valid"],
        rate_measured_hz=row["rate_measured_hz"],
        jitter_s=row["jitter_s"],
    )


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
