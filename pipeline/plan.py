"""From episodes and a recipe to steps, shards, bytes and memory: decided before anything runs, and immutable after."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pipeline.arrays import frame_specs, row_specs, sample_specs
from pipeline.readers.protocol import Reader
from pipeline.views import Bindings
from schemas.errors import PlanError, Reason, SourceError
from schemas.recipe import Recipe, recipe_from_mapping, recipe_to_mapping
from schemas.source import EpisodeRef, Fault, SignalInfo, ViewInfo
from tasks.align import grid_length

SHARD_NBYTES = 64 * 2**20
"""Aim of the largest array's shard: a task of seconds, a file that fits object stores and retries cheaply."""

PROCESS_NBYTES = 260 * 2**20
"""Anonymous memory of a worker with its imports and compiled kernels, before it holds a frame (Linux x86-64, Python 3.11, 2026-12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpisode:
    """One episode and its place on the step axis."""

    source: str
    """Name of its source within the dataset."""
    ref: EpisodeRef
    start: int
    """First step in the dataset."""
    num_steps: int
    """Length on the output grid."""
    rate_hz: float
    """Rate of the output grid; 0 where the recording has none."""
    fingerprint: str
    """Digest of path, size and modification time of its files, by which a change under an unfinished plan is seen."""
    replaces: int = -1
    """``episode_index`` of the episode that it takes the place of; -1 for a new one."""

    @property
    def stop(self) -> int:
        """One past the last step."""
        return self.start + self.num_steps

    @property
    def is_resampled(self) -> bool:
        """Whether the output grid differs from the recorded steps."""
        return self.rate_hz != self.ref.rate_hz

    @property
    def name(self) -> tuple[str, str]:
        """Identity within the dataset."""
        return self.source, self.ref.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One generation of a dataset, to be made."""

    generation: int
    first_step: int
    """Steps already committed."""
    first_episode: int
    shard_steps: int
    recipe: Recipe
    bindings: Bindings
    sources: tuple[str, ...]
    """Names of the sources it reads."""
    episodes: tuple[PlannedEpisode, ...]
    faults: tuple[tuple[str, Fault], ...] = ()
    """``(source, fault)`` found while indexing."""
    maps: tuple[tuple[str, str], ...] = ()
    """``(town, xxh3)`` of the maps that planner tensors are made from."""

    @property
    def num_steps(self) -> int:
        """Steps of the dataset when this generation is committed."""
        return self.episodes[-1].stop if self.episodes else self.first_step

    @property
    def shards(self) -> range:
        """Numbers of the frame shards to write; the first may begin with committed steps."""
        return range(self.first_step // self.shard_steps, -(-self.num_steps // self.shard_steps))


def default_shard_steps(recipe: Recipe, bindings: Bindings) -> int:
    """Return the power of two of steps, 16 to 4096, whose largest frame shard is nearest below :data:`SHARD_NBYTES`.

    A task holds a shard's planner tensors at once, all of them: their sum counts there.
    """
    largest = max((spec.row_nbytes for spec in frame_specs(recipe, bindings, 1)), default=16384)
    largest = max(largest, sum(spec.row_nbytes for spec in sample_specs(recipe, bindings, 1)))
    return int(2 ** np.clip(np.floor(np.log2(SHARD_NBYTES / largest)), 4, 12))


def place(
    episodes: Sequence[tuple[str, EpisodeRef, str]], recipe: Recipe, first_step: int, reader_of: Any
) -> list[PlannedEpisode]:
    """Lay episodes end to end along the step axis, on the recipe's grid."""
    placed: list[PlannedEpisode] = []
    start = first_step
    for source, ref, fingerprint in episodes:
        rate_hz = recipe.rate_hz or ref.rate_hz
        num_steps = ref.num_steps
        if rate_hz != ref.rate_hz:
            num_steps = grid_length(_duration_s(ref, reader_of(source)), rate_hz)
        placed.append(
            PlannedEpisode(
                source=source, ref=ref, start=start, num_steps=num_steps, rate_hz=rate_hz, fingerprint=fingerprint
            )
        )
        start += num_steps
    return placed


def _duration_s(ref: EpisodeRef, reader: Reader) -> float:
    """Return the time of the last recorded step: from its timestamp where that can be read, else from the nominal rate."""
    last = reader.read_signals(ref, ["timestamp_s"], np.array([ref.num_steps - 1])).values["timestamp_s"]
    seconds = float(np.asarray(last, np.float64).reshape(-1)[0])
    if np.isfinite(seconds) and 0 <= seconds < 1e7:
        return seconds
    if ref.rate_hz > 0:
        return (ref.num_steps - 1) / ref.rate_hz
    raise SourceError("expected a last timestamp or a nominal rate, found neither; drop the episode", Reason.TIME_ORDER)


def usable(ref: EpisodeRef, recipe: Recipe, bindings: Bindings) -> Fault | None:
    """Return why an episode cannot be planned, or None."""
    if ref.num_steps < 1:
        message = "expected at least 1 step, found 0; drop the recording"
        return Fault(reason=Reason.EMPTY_EPISODE, message=message, episode=ref.key)
    offered = {signal.name: signal.size for signal in ref.signals}
    for name, columns in bindings.signals.items():
        found = sum(offered.get(column, 0) for column in columns)
        if found != bindings.sizes[name] or any(column not in offered for column in columns):
            message = f"expected {bindings.sizes[name]} values in {list(columns)} for {name!r}, found {found}; name other columns"
            return Fault(reason=Reason.WRONG_SHAPE, message=message, episode=ref.key, stream=name)
    for view in recipe.views:
        if view.missing != "mask" and not bindings.view(ref, view.name):
            message = (
                f"expected one of {list(bindings.views[view.name])} for view {view.name!r}, found none in this episode"
            )
            if view.missing == "stop":
                raise SourceError(f"{message}; map another with --view", Reason.MISSING_FILE, episode=ref.key)
            return Fault(
                reason=Reason.MISSING_FILE, message=f"{message}; the recipe drops it", episode=ref.key, stream=view.name
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan will cost, printed before it runs."""

    num_episodes: int
    num_steps: int
    num_shards: int
    num_frames: int
    dataset_nbytes: int
    """Upper bound for this generation; exact for codec raw without masked frames."""
    memory_nbytes: int
    """Peak of anonymous memory, over all workers and the driver."""
    free_nbytes: int


def estimate(plan: Plan, workers: int, root: Path) -> Estimate:
    """Estimate bytes on disk and peak memory; see :func:`refuse_if_too_large`."""
    frames = frame_specs(plan.recipe, plan.bindings, plan.shard_steps)
    steps = plan.num_steps - plan.first_step
    served = {
        spec.name: sum(e.num_steps for e in plan.episodes if plan.bindings.view(e.ref, spec.name.removeprefix("rgb_")))
        for spec in frames
    }
    rows = row_specs(plan.recipe, plan.bindings, {name: [] for name in plan.bindings.sizes})
    per_step = sum(spec.row_nbytes for spec in rows)
    ratio = {"raw": 1.0, "zstd": 0.8}.get(plan.recipe.frames.codec, 0.25)
    frame_nbytes = int(sum(served[spec.name] * (spec.row_nbytes * ratio + 20) for spec in frames))
    samples = sum(spec.row_nbytes for spec in sample_specs(plan.recipe, plan.bindings, plan.shard_steps))
    largest = max((view.height_px * view.width_px * 3 for e in plan.episodes for view in e.ref.views), default=0)
    chunk = max((spec.row_nbytes for spec in frames), default=0)
    task_nbytes = 2 * (largest or 3840 * 2160 * 3) + 4 * chunk + (2 * per_step + 3 * samples) * plan.shard_steps
    return Estimate(
        num_episodes=len(plan.episodes),
        num_steps=steps,
        num_shards=len(plan.shards),
        num_frames=sum(served.values()),
        dataset_nbytes=frame_nbytes + 3 * steps * per_step + int(steps * samples * _sample_ratio(plan.recipe)),
        memory_nbytes=max(1, workers) * (PROCESS_NBYTES + task_nbytes) + PROCESS_NBYTES,
        free_nbytes=shutil.disk_usage(_existing(root)).free,
    )


def _sample_ratio(recipe: Recipe) -> float:
    """Return what is left of planner arrays, at most, when they are compressed; a step of tracks has room for many that are not there."""
    if recipe.planner is None or recipe.planner.codec == "raw":
        return 1.0
    return 0.4 if recipe.planner.store == "samples" else 0.2


def refuse_if_too_large(cost: Estimate, codec: str) -> None:
    """Raise PlanError where the disk cannot hold the dataset; only for codec raw is the estimate sure enough to refuse."""
    total = psutil.virtual_memory().total
    if cost.memory_nbytes > total:
        raise PlanError(
            f"expected {cost.memory_nbytes / 1e9:.1f} GB of memory, found {total / 1e9:.1f} GB; lower --workers or --shard-steps"
        )
    if codec == "raw" and cost.dataset_nbytes > cost.free_nbytes:
        raise PlanError(
            f"expected {cost.dataset_nbytes / 1e9:.2f} GB of free disk, found {cost.free_nbytes / 1e9:.2f} GB; "
            "free some, choose another place, or --codec jpeg:95"
        )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values; :func:`plan_from_json` reads it back to an equal plan."""
    return {
        "generation": plan.generation,
        "first_step": plan.first_step,
        "first_episode": plan.first_episode,
        "shard_steps": plan.shard_steps,
        "recipe": recipe_to_mapping(plan.recipe),
        "bindings": bindings_to_json(plan.bindings),
        "sources": list(plan.sources),
        "episodes": [{**asdict(episode), "ref": _ref_to_json(episode.ref)} for episode in plan.episodes],
        "faults": [[source, asdict(fault)] for source, fault in plan.faults],
        "maps": [list(entry) for entry in plan.maps],
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """Read back what :func:`plan_to_json` wrote."""
    return Plan(
        **{key: data[key] for key in ("generation", "first_step", "first_episode", "shard_steps")},
        recipe=recipe_from_mapping(data["recipe"], data["recipe"]["name"]),
        bindings=bindings_from_json(data["bindings"]),
        sources=tuple(data["sources"]),
        episodes=tuple(
            PlannedEpisode(**{**episode, "ref": _ref_from_json(episode["ref"])}) for episode in data["episodes"]
        ),
        faults=tuple((source, fault_from_json(fault)) for source, fault in data["faults"]),
        maps=tuple((town, xxh3) for town, xxh3 in data["maps"]),
    )


def bindings_to_json(bindings: Bindings) -> dict[str, Any]:
    """Return bindings as JSON values."""
    tensors = {"tensors": [asdict(tensor) for tensor in bindings.tensors]} if bindings.tensors else {}
    return {
        "views": {name: list(views) for name, views in bindings.views.items()},
        "signals": {name: list(columns) for name, columns in bindings.signals.items()},
        "sizes": dict(bindings.sizes),
        **tensors,
    }


def bindings_from_json(data: Mapping[str, Any]) -> Bindings:
    """Read back bindings."""
    return Bindings(
        {name: tuple(views) for name, views in data["views"].items()},
        {name: tuple(columns) for name, columns in data["signals"].items()},
        dict(data["sizes"]),
        tuple(map(_signal_from_json, data.get("tensors", ()))),
    )


def fault_from_json(data: Mapping[str, Any]) -> Fault:
    """Read back a fault written as ``asdict``."""
    return Fault(**{**data, "reason": Reason(data["reason"])})


def _ref_to_json(ref: EpisodeRef) -> dict[str, Any]:
    value = asdict(ref)
    json.dumps(value["details"])  # a reader that puts in anything else is found here, not at resume
    return value


def _ref_from_json(data: Mapping[str, Any]) -> EpisodeRef:
    views = tuple(ViewInfo(**view) for view in data["views"])
    signals = tuple(map(_signal_from_json, data["signals"]))
    return EpisodeRef(**{**data, "views": views, "signals": signals, "instructions": tuple(data["instructions"])})


def _signal_from_json(data: Mapping[str, Any]) -> SignalInfo:
    return SignalInfo(**{**data, "shape": tuple(data["shape"]), "names": tuple(data["names"])})
