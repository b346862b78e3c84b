"""How far a dataset, or what was appended to it, lies from the statistics that a policy was trained with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.stats import Samples, SeenRows, reduce_tiles, summarize
from pipeline.stats_export import DatasetRows
from schemas.errors import UsageError
from tasks.drift import MAX_OUTSIDE, MAX_SHIFT_STD, MAX_STD_RATIO, DimensionDrift, drift
from tasks.quantiles import Brackets, keys_of_values

KEYS = ("mean", "std")
QUANTILES = ("q01", "q99")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """A dataset beside frozen statistics."""

    against: str
    first_episode: int
    """First episode that was compared: the frozen statistics are of those before it; 0 where all were compared."""
    num_episodes: int
    """Episodes of the dataset."""
    num_anchors: int
    """Samples that were compared."""
    horizon: int
    tail: str
    delta_mask: tuple[bool, ...] | None
    dims: tuple[DimensionDrift, ...]

    @property
    def drifted(self) -> bool:
        """Whether a dimension is flagged."""
        return any(row.flags for row in self.dims)

    def to_json(self) -> dict[str, Any]:
        """Return the report with its verdict and the bounds it was reached by."""
        bounds = {"shift_std": MAX_SHIFT_STD, "std_ratio": MAX_STD_RATIO, "outside": MAX_OUTSIDE}
        return {"drifted": self.drifted, "bounds": bounds, **asdict(self)}


def drift_report(
    path: str | Path,
    against: str | Path,
    *,
    horizon: int | None = None,
    delta_mask: Sequence[bool] | None = None,
    tail: str = "repeat",
    adapter: str = "",
) -> DriftReport:
    """Compare a dataset with a frozen ``norm_stats.json``, without decoding anything.

    A file that ``headrace stats`` wrote for an earlier generation of the dataset is compared with the episodes that have come since;
    any other with all episodes. What such a file says of horizon, tail, delta mask and adapter is taken from it.

    Raises
    ------
    UsageError
        The file is no ``norm_stats.json``, or not of arrays like the dataset's; or what it says is given beside it.
    DatasetError
        No step to compare.
    """
    frozen, record = _read_frozen(Path(against))
    rows = DatasetRows(path)
    given = {
        "horizon": horizon,
        "tail": None if tail == "repeat" else tail,
        "delta_mask": delta_mask,
        "adapter": adapter or None,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    if record and asked:
        raise UsageError(
            f"expected horizon, tail, mask and adapter of {against}, found {', '.join(asked)} given beside it; leave them out"
        )
    seen = (
        {name: record[name] for name in given}
        if record
        else {"delta_mask": delta_mask, "adapter": adapter, "tail": tail}
    )
    samples = rows.samples(**{"horizon": horizon or int(rows.info.recipe["horizon"]), **seen})
    first = _first_new(samples, record)
    valid = samples.valid.copy()
    valid[: samples.episode_ends[first - 1] if first else 0] = False
    samples = replace(samples, valid=valid)
    names = [name for name in rows.signals() if name in frozen]
    if not names:
        raise UsageError(
            f"expected statistics of {' or '.join(rows.signals())} in {against}, found {sorted(frozen)}; give another file"
        )
    return DriftReport(
        against=str(against),
        first_episode=first,
        num_episodes=len(samples.episode_ends),
        num_anchors=int(samples.runs().num_anchors.sum()),
        horizon=samples.horizon,
        tail=samples.tail,
        delta_mask=samples.delta_mask,
        dims=tuple(row for name in names for row in _drift(samples.seen(name), frozen[name])),
    )


def _first_new(samples: Samples, record: Mapping[str, Any]) -> int:
    """Return the number of the first episode that came after the file, if that is of an earlier generation; else 0."""
    known, ends = record.get("num_episodes", 0), samples.episode_ends
    is_older = 0 < known < len(ends) and int(ends[known - 1]) == record["num_steps"]
    return known if is_older and samples.valid[ends[known - 1] :].any() else 0


def _drift(seen: SeenRows, frozen: Mapping[str, np.ndarray]) -> list[DimensionDrift]:
    if len(frozen["mean"]) != seen.num_dims:
        raise UsageError(
            f"expected statistics of {seen.num_dims} dimensions of {seen.array}, found {len(frozen['mean'])}; "
            "give the file that belongs to this dataset"
        )
    found = summarize(seen)
    outside = _count_outside(seen, *(frozen[key] for key in QUANTILES)) if frozen.keys() >= {*QUANTILES} else None
    return drift(seen.array, frozen, found, outside)


def _count_outside(seen: SeenRows, q01: np.ndarray, q99: np.ndarray) -> np.ndarray:
    """Count the values below ``q01`` and above ``q99``: those outside of brackets of one key each."""
    low, high = q01.astype(np.float32), q99.astype(np.float32)
    low = np.where(low < q01, np.nextafter(low, np.float32(np.inf)), low)  # the least float32 that is not below
    high = np.where(high > q99, np.nextafter(high, np.float32(-np.inf)), high)
    keys = np.stack([keys_of_values(low), keys_of_values(high)], axis=1)
    brackets = Brackets(percentiles=(1, 99), low=keys, high=keys, is_found=np.zeros(keys.shape, np.bool_))
    counts = reduce_tiles(seen, range(seen.num_tiles), brackets, with_moments=False).counts
    outside: np.ndarray = counts.outside.sum(axis=1)
    return outside


def _read_frozen(path: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Return ``array -> statistic -> float64[dim]`` and what the file says of itself, which openpi's own does not."""
    try:
        content = json.loads(path.read_bytes())
        entries = content["norm_stats"]
        frozen = {
            str(name): {
                key: np.array(entry[key], np.float64) for key in (*KEYS, *QUANTILES) if key in KEYS or entry.get(key)
            }
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"expected openpi's norm_stats.json, found {path}: {str(error)[:80]}; give another file"
        ) from error
    for name, entry in frozen.items():
        shapes = {values.shape for values in entry.values()}
        if (
            len(shapes) != 1
            or len(shapes.pop()) != 1
            or not all(np.isfinite(values).all() for values in entry.values())
        ):
            raise UsageError(
                f"expected lists of numbers, as long as each other, of {name} in {path}; give another file"
            )
    return frozen, _record(content)


def _record(content: Mapping[str, Any]) -> dict[str, Any]:
    record = content.get("headrace")
    wanted = {"horizon": int, "tail": str, "num_episodes": int, "num_steps": int}
    if not isinstance(record, dict) or any(type(record.get(key)) is not kind for key, kind in wanted.items()):
        return {}
    return {
        "delta_mask": record.get("delta_mask"),
        "adapter": record.get("adapter", ""),
        **{key: record[key] for key in wanted},
    }
