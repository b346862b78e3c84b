"""Statistics files of a dataset, in the formats that training stacks read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.stats import ACTIONS, STATE, ReadRows, Samples, samples_stats, summarize
from pipeline.store.metadata import DatasetInfo, read_info
from pipeline.store.rows import RowReader
from schemas.errors import DatasetError, UsageError, locate
from tasks import stats
from tasks.transforms import AlohaToPi

FORMATS = ("openpi", "lerobot", "lerobot-episodes", "diffusion-policy", "diffusion-planner")

LEROBOT_FEATURES = {STATE: "observation.state", ACTIONS: "action"}
LEROBOT_PERCENTILES = (1, 10, 50, 90, 99)


ADAPTERS = {"aloha": AlohaToPi()}
"""Robot adapters of openpi that act row by row, before relative actions and the statistics."""


class DatasetRows:
    """Rows of a finished dataset, read from its shards and checked against its manifest; threads may share it."""

    def __init__(self, path: str | Path) -> None:
        self.info: DatasetInfo = read_info(path)
        self._rows = RowReader(self.info)

    def read(self, array: str, start: int, stop: int) -> np.ndarray:
        """Return rows ``[start, stop)`` of an array."""
        if array not in self.info.arrays:
            raise DatasetError(
                f"expected one of the arrays {sorted(self.info.arrays)}, found {array!r}; see `headrace info`"
            )
        return self._rows.read(array, start, stop)

    def samples(
        self, *, horizon: int = 1, tail: str = "repeat", delta_mask: Sequence[bool] | None = None, adapter: str = ""
    ) -> Samples:
        """Return what training samples from the dataset, state and actions as a robot adapter of :data:`ADAPTERS` gives them."""
        return Samples(
            read_rows=self._adapted(adapter) if adapter else self.read,
            episode_ends=self.read("episode_ends", 0, self.info.num_episodes),
            valid=self.read("valid", 0, self.info.num_steps),
            horizon=horizon,
            tail=tail,
            delta_mask=None if delta_mask is None else tuple(delta_mask),
        )

    def _adapted(self, name: str) -> ReadRows:
        if name not in ADAPTERS:
            raise UsageError(f"expected an adapter of {', '.join(ADAPTERS)}, found {name!r}; correct --adapter")
        adapter = ADAPTERS[name]

        def read(array: str, start: int, stop: int) -> np.ndarray:
            rows = self.read(array, start, stop)
            return adapter(rows, rows)[0 if array == STATE else 1] if array in (STATE, ACTIONS) else rows

        return read

    def signals(self) -> tuple[str, ...]:
        """Name those of state and actions that the dataset has."""
        return tuple(name for name in (STATE, ACTIONS) if name in self.info.arrays)


def parse_delta(text: str) -> tuple[bool, ...] | None:
    """Parse ``--delta`` as openpi's ``make_bool_mask`` is called; None where it is empty.

    >>> parse_delta("2,-1")
    (True, True, False)
    """
    if not text:
        return None
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [0]
    if 0 in lengths or sum(map(abs, lengths)) > 4096:
        raise UsageError(f"expected --delta as lengths such as 6,-1,6,-1, found {text!r}; correct it")
    return stats.delta_mask(*lengths)


def dataset_norm_stats(
    path: str | Path,
    *,
    horizon: int | None = None,
    delta_mask: Sequence[bool] | None = None,
    tail: str = "repeat",
    adapter: str = "",
    threads: int | None = None,
) -> dict[str, Any]:
    """Return openpi's ``norm_stats.json`` content for a dataset; the horizon is its recipe's unless given."""
    rows = DatasetRows(path)
    chosen = int(rows.info.recipe["horizon"]) if horizon is None else horizon
    samples = rows.samples(horizon=chosen, tail=tail, delta_mask=delta_mask, adapter=adapter)
    found = samples_stats(samples, rows.signals(), threads=threads)
    said = {"generation": rows.info.generation, **({"adapter": adapter} if adapter else {})}
    return {**found, "headrace": {**said, **found["headrace"]}}


def lerobot_stats(
    samples: Samples, arrays: Sequence[str] = (STATE, ACTIONS), *, threads: int | None = None
) -> dict[str, Any]:
    """Return LeRobot's ``stats.json``: every valid step once, exact quantiles. Image features are not in it."""
    return {
        LEROBOT_FEATURES.get(array, array): _lerobot_entry(
            summarize(samples.seen(array), LEROBOT_PERCENTILES, threads=threads)
        )
        for array in arrays
    }


def lerobot_episode_stats(
    samples: Samples, arrays: Sequence[str] = (STATE, ACTIONS), percentiles: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the lines of LeRobot 2.1's ``episodes_stats.jsonl``, over the valid steps of each episode.

    ``episode_index`` is the dataset's. An episode without a valid step has no line, as it has no statistics: an export
    leaves it out, and renumbers.
    """
    start = 0
    for episode, stop in enumerate(map(int, samples.episode_ends)):
        weights = samples.valid[start:stop].astype(np.int64)
        if weights.any():
            features = {}
            for array in arrays:
                rows = samples.rows(array, start, stop, num_dims=samples.num_dims(array))
                with locate(array=array, episode=episode):
                    found = stats.moments(rows, weights)
                    kept = np.where(np.isfinite(rows[weights > 0]), rows[weights > 0], np.nan)
                    quantiles = {
                        percent: np.nanquantile(kept, percent / 100, axis=0, method="inverted_cdf").astype(np.float64)
                        for percent in (percentiles if found.count.all() else ())
                    }
                    summary = stats.finalize(found, quantiles)
                features[LEROBOT_FEATURES.get(array, array)] = _lerobot_entry(summary)
            yield {"episode_index": episode, "stats": features}
        start = stop


def normalizer_values(
    samples: Samples, keys: Mapping[str, str], mode: str = "limits", *, threads: int | None = None
) -> dict[str, list[float]]:
    """Return the ``state_dict`` of diffusion_policy's ``LinearNormalizer``, every valid step counted once.

    Parameters
    ----------
    samples
        Of horizon 1, as that normaliser is fitted to the replay buffer and not to its windows.
    keys
        The policy's name of each array, such as ``{"actions": "action", "state": "agent_pos"}``.
    mode
        ``limits`` or ``gaussian``.
    """
    values = {}
    for array, key in keys.items():
        normalizer = stats.linear_normalizer(summarize(samples.seen(array), (), threads=threads), mode)
        values.update({f"params_dict.{key}.{name}": value.tolist() for name, value in normalizer.items()})
    return values


def stats_file(
    path: str | Path,
    format: str = "openpi",
    *,
    horizon: int | None = None,
    delta_mask: Sequence[bool] | None = None,
    tail: str = "repeat",
    adapter: str = "",
    published: bool = False,
) -> bytes:
    """Return the statistics file of a dataset in one of :data:`FORMATS`, as bytes to be written.

    Horizon, tail, mask and adapter are openpi's; the other formats count every valid step once and refuse them. ``published`` asks for Diffusion
    Planner's own constants in the place of computed ones.
    """
    if format not in FORMATS:
        raise UsageError(f"expected a format of {', '.join(FORMATS)}, found {format!r}; correct --format")
    if published and format != "diffusion-planner":
        raise UsageError(f"expected --published with diffusion-planner alone, found it with {format}; leave it out")
    if format == "openpi":
        content = dataset_norm_stats(path, horizon=horizon, delta_mask=delta_mask, tail=tail, adapter=adapter)
        return _json(content, indent=2) + b"\n"
    if horizon is not None or delta_mask is not None or tail != "repeat" or adapter:
        raise UsageError(
            f"expected --horizon, --delta, --tail and --adapter with openpi alone, found them with {format}; leave them out"
        )
    if format == "diffusion-planner":
        from pipeline.planner_stats import planner_normalization

        return _json(planner_normalization(path, published=published), indent=2) + b"\n"
    rows = DatasetRows(path)
    samples, arrays = rows.samples(), rows.signals()
    if format == "lerobot":
        return _json(lerobot_stats(samples, arrays), indent=4) + b"\n"
    if format == "lerobot-episodes":
        return b"".join(_json(line) + b"\n" for line in lerobot_episode_stats(samples, arrays))
    names = {ACTIONS: "action", STATE: "state"}
    return _json(normalizer_values(samples, {name: names[name] for name in arrays}), indent=2) + b"\n"


def _lerobot_entry(summary: stats.Summary) -> dict[str, list[float]]:
    named = {"min": summary.low, "max": summary.high, "mean": summary.mean, "std": summary.std}
    quantiles = {f"q{percent:02d}": values for percent, values in summary.percentiles.items()}
    entry = {name: values.tolist() for name, values in {**named, **quantiles}.items()}
    return {**entry, "count": [int(summary.count.max())]}


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent, allow_nan=False).encode()


def near_constant_lines(content: Mapping[str, Any]) -> list[str]:
    """Say which dimensions of :func:`dataset_norm_stats` no scaling can serve."""
    return [
        f"dimension {dim} of {array} would be blown up by scaling: {reason}"
        for array, record in content["headrace"]["arrays"].items()
        for dim, reason in record["near_constant"].items()
    ]
