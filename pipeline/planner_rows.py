"""Stage 6 of the walk for planner datasets: tracks and map of an episode become the tensors of its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.maps import find_map, load_map
from pipeline.plan import PlannedEpisode
from pipeline.planner_arrays import planner_params, planner_shapes
from pipeline.readers.protocol import Reader
from pipeline.store.atomic import xxh3_hex
from schemas.errors import Reason, SourceError, UsageError
from schemas.recipe import PlannerRecipe
from schemas.source import EpisodeRef, Fault, SampleBlock, SignalInfo
from schemas.tracks import Tracks
from schemas.vehicles import vehicle_axles


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Tensors of the samples among some steps of an episode."""

    is_anchor: np.ndarray
    """bool ``[step]``."""
    block: dict[str, np.ndarray]
    """``name -> [step, ...]``: tensors have a row for each True of ``is_anchor``, rows of tracks one for each of ``has_tracks``."""
    faults: tuple[Fault, ...] = ()
    """Of the steps asked for."""
    is_read: np.ndarray | None = None
    """bool ``[step]``: False where a sample that the source holds could not be read; None where samples are computed."""
    has_tracks: np.ndarray | None = None
    """bool ``[step]``: the step lies on the grid of the tracks; None where samples are read."""


def planner_notes(recipe: PlannerRecipe, episodes: Sequence[PlannedEpisode]) -> tuple[str, ...]:
    """Say of which recorded models of the ego the axles are not known, and how many episodes are too short for a sample."""
    models = dict.fromkeys(str(episode.ref.details.get("ego_type", "")) for episode in episodes)
    notes = [note for model in models if (note := _axles_note(recipe, model))]
    least = recipe.past_steps + 1 + (recipe.min_future_steps or recipe.future_steps)
    short = sum(episode.num_steps < least for episode in episodes)
    if short:
        notes.append(
            f"{short} of {len(episodes)} episodes are shorter than the {least} steps of a sample and give none; "
            "min_future_steps in [planner] takes samples with a shorter future"
        )
    return tuple(notes)


def _axles_note(recipe: PlannerRecipe, model: str) -> str:
    """Say what stands for axles of the ego's model that nobody knows; empty where they are known, given, or no model was recorded."""
    if not model or vehicle_axles(model) is not None or (recipe.rear_axle_m and recipe.wheel_base_m):
        return ""
    usual = planner_params(recipe, 10.0)
    return (
        f"the axles of {model} are not known: took a rear axle at {usual.rear_axle[0]:g} m and a wheelbase of {usual.wheel_base_m:g} m; "
        "set rear_axle_m and wheel_base_m in [planner] for others"
    )


def _axles_faults(recipe: PlannerRecipe, ref: EpisodeRef, model: str) -> tuple[Fault, ...]:
    """Warn of axles that are not known, where the model is found in the tracks only: others were noted when the run was planned."""
    note = "" if ref.details.get("ego_type") else _axles_note(recipe, model)
    return (Fault(reason=Reason.UNSUPPORTED, message=note, episode=ref.key, is_warning=True),) if note else ()


def require_tracks(reader: Reader) -> Any:
    """Return the reader's ``read_tracks``; UsageError where the format has none."""
    read = getattr(reader, "read_tracks", None)
    if read is None:
        raise UsageError(
            f"expected a format with tracks of other road users for a planner recipe, found {reader.name!r}; use another recipe"
        )
    return read


def planner_samples(
    reader: Reader, ref: EpisodeRef, steps: range, *, recipe: PlannerRecipe, rate_hz: float, map_path: str
) -> Samples:
    """Compute the samples among ``steps`` of the output grid, observations normalised if the recipe says so, or the rows of its tracks.

    Raises
    ------
    SourceError
        The tracks cannot be read, or there is no map of the town.
    """
    from tasks.planner import planner_block, planner_scene
    from tasks.planner_normalize import normalize_observation, stored_normalization
    from tasks.planner_tracks import planner_anchors
    from tasks.track_rows import track_rows

    tracks = _read_tracks(_Held(reader, ref))
    params = planner_params(recipe, rate_hz, tracks.ego_model)
    graph = load_map(map_path, tracks.town)
    scene = planner_scene(tracks, graph, params)
    anchors = planner_anchors(
        scene.tracks,
        params,
        stride=recipe.anchor_stride,
        min_future_steps=recipe.min_future_steps or -1,
        min_distance_m=recipe.min_distance_m,
    )
    first = _first_step(tracks, rate_hz)
    place = np.arange(steps.start, steps.stop) - first
    has_tracks = (place >= 0) & (place < scene.tracks.num_steps)
    is_anchor = np.isin(place, anchors)
    if recipe.store == "tracks":
        block = track_rows(scene, place[has_tracks], is_anchor[has_tracks], recipe.max_actors)
    else:
        block = planner_block(tracks, graph, place[is_anchor], params)
        block = normalize_observation(block, stored_normalization(recipe.normalize))
        block = {name: block[name] for name in planner_shapes(params)}
    faults = (*tracks.faults, *_axles_faults(recipe, ref, tracks.ego_model)) if steps.start == 0 else ()
    return Samples(is_anchor=is_anchor, has_tracks=has_tracks, block=block, faults=faults)


def packed_samples(reader: Reader, ref: EpisodeRef, steps: range, tensors: Sequence[SignalInfo]) -> Samples:
    """Read the samples that the source holds at ``steps``, unchanged."""
    read: Any = getattr(reader, "read_samples", None)
    if read is None:
        raise UsageError(
            f"expected samples as the dataset has them, found recordings of format {reader.name!r}; convert them into another dataset"
        )
    block: SampleBlock = read(ref, np.arange(steps.start, steps.stop), tensors)
    found = block.is_read
    rows = block.values if found.all() else {name: values[found] for name, values in block.values.items()}
    return Samples(is_anchor=found, block=dict(rows), faults=block.faults, is_read=found)


def _first_step(tracks: Tracks, rate_hz: float) -> int:
    """Return the step of the output grid at which the tracks' own grid begins."""
    first = tracks.time_s[0] * rate_hz
    if abs(first - round(first)) > 1e-3:
        raise SourceError(
            f"expected tracks that begin at a step of {rate_hz:g} Hz, found {tracks.time_s[0]:.6f} s; choose another rate",
            Reason.TIME_GAP,
        )
    return round(first)


class _Held:
    """An episode as a cache key: equal by source and name, so that its shards share its tracks."""

    def __init__(self, reader: Reader, ref: EpisodeRef) -> None:
        self.reader, self.ref = reader, ref
        self.name = (reader.name, str(reader.root), ref.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache(maxsize=4)
def _read_tracks(held: _Held) -> Tracks:
    tracks: Tracks = require_tracks(held.reader)(held.ref)
    if tracks.num_steps == 0:
        raise SourceError("expected tracks of one step or more, found none; drop the episode", Reason.EMPTY_EPISODE)
    return tracks


def map_digest(map_path: str, town: str) -> str:
    """Return the xxh3-128 of the map of a town; SourceError unless it can be read, before anything is made with it."""
    load_map(map_path, town)
    return xxh3_hex(Path(find_map(map_path, town)).read_bytes())
