"""The arrays that a recipe makes: their names, shapes, chunks and attributes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.views import Bindings
from schemas.dataset import ROW_CHUNK_STEPS, ROW_SHARD_STEPS, ArraySpec
from schemas.errors import UsageError
from schemas.recipe import Recipe
from schemas.source import EpisodeRef, SignalInfo


def frame_specs(recipe: Recipe, bindings: Bindings, shard_steps: int) -> list[ArraySpec]:
    """Return the specifications of the frame arrays."""
    specs = []
    for view in recipe.views:
        attributes: dict[str, Any] = {"long_name": f"camera frames, view {view.name}", "resize": view.resize}
        attributes["source_views"] = list(bindings.views.get(view.name, ()))
        if recipe.frames.mean:
            attributes["normalization"] = {"mean": list(recipe.frames.mean), "std": list(recipe.frames.std)}
            attributes["units"] = "standard deviations"
        else:
            attributes["units"] = "1"
        spec = ArraySpec(
            name=f"rgb_{view.name}",
            dims=("step", f"height_{view.name}", f"width_{view.name}", "rgb"),
            row_shape=(view.height_px, view.width_px, 3),
            dtype=recipe.frames.dtype,
            chunk_steps=1,
            shard_steps=shard_steps,
            codec=recipe.frames.codec,
            valid_array=f"rgb_{view.name}_valid",
            attributes=tuple(attributes.items()),
        )
        specs.append(spec)
    return specs


def sample_specs(recipe: Recipe, bindings: Bindings, shard_steps: int) -> list[ArraySpec]:
    """Return the specifications of the planner's arrays; none where the recipe has no planner."""
    if recipe.planner is None:
        return []
    from pipeline.planner_arrays import packed_specs, planner_params, planner_specs
    from pipeline.track_arrays import track_specs
    from tasks.planner_normalize import stored_normalization

    if recipe.planner.store == "tracks":
        if bindings.tensors:
            raise UsageError(
                "expected recordings with tracks for store = tracks, found finished samples; use store = samples"
            )
        return track_specs(recipe.planner, shard_steps)
    if bindings.tensors:
        return packed_specs(bindings.tensors, shard_steps, codec=recipe.planner.codec)
    params = planner_params(recipe.planner, recipe.rate_hz or 10.0)
    scaled = tuple(stored_normalization(recipe.planner.normalize))
    return planner_specs(params, shard_steps, codec=recipe.planner.codec, scaled=scaled)


def row_specs(
    recipe: Recipe,
    bindings: Bindings,
    features: Mapping[str, Sequence[str]],
    units: Mapping[str, Sequence[str]] | None = None,
) -> list[ArraySpec]:
    """Return the specifications of the arrays of small rows, ``features`` naming the columns of each signal, ``units`` their units."""
    specs = []
    for name, size in bindings.sizes.items():
        known = list((units or {}).get(name, ()))
        attributes: dict[str, Any] = {"feature_units": known} if any(known) else {}
        attributes.update(long_name=name, columns=list(bindings.signals[name]), features=list(features[name]))
        specs.append(_row(name, "float32", (size,), "step", **attributes))
    specs += [
        _row("timestamp_s", "float64", units="s", long_name="time from the start of the episode"),
        _row("align_error_s", "float32", units="s", long_name="recorded time minus grid time"),
        _row("episode_index", "int32", long_name="row of the episodes table"),
        _row("task_index", "int32", long_name="row of the tasks table: the instruction"),
        _row("source_step", "int32", long_name="recorded step that serves this step"),
        _row("valid", "bool", long_name="whether the step may be served"),
    ]
    masks = [
        _row(f"rgb_{view.name}_valid", "bool", long_name=f"image mask of view {view.name}") for view in recipe.views
    ]
    if recipe.planner is not None:
        masks.append(_row("is_anchor", "bool", long_name="whether the step is a sample: its tensors are there"))
        if recipe.planner.store == "tracks":
            masks.append(_row("has_tracks", "bool", long_name="whether the step has rows of tracks"))
    return specs + masks


def episode_specs() -> list[ArraySpec]:
    """Return the specifications of the arrays along the episode axis."""
    return [
        _row("row_size", "int64", dim="episode", long_name="steps of the episode", sample_dimension="step"),
        _row("episode_ends", "int64", dim="episode", long_name="one past the last step of the episode"),
    ]


def _row(name: str, dtype: str, shape: tuple[int, ...] = (), dim: str = "step", **attributes: Any) -> ArraySpec:
    return ArraySpec(
        name=name,
        dims=(dim, *(f"{name}_feature" for _ in shape)),
        row_shape=shape,
        dtype=dtype,
        chunk_steps=ROW_CHUNK_STEPS,
        shard_steps=ROW_SHARD_STEPS,
        attributes=tuple(attributes.items()),
    )


def feature_names(bindings: Bindings, refs: Sequence[EpisodeRef]) -> dict[str, list[str]]:
    """Return a name for each feature of each signal: the source's own, else ``column[0]``, ``column[1]``, ..."""
    offered = _offered(refs)
    return {
        name: [label for column in columns for label in _labels(offered[column])]
        for name, columns in bindings.signals.items()
    }


def feature_units(bindings: Bindings, refs: Sequence[EpisodeRef]) -> dict[str, list[str]]:
    """Return the unit of each feature of each signal, empty where the source does not say it."""
    offered = _offered(refs)
    return {
        name: [offered[column].units for column in columns for _ in range(offered[column].size)]
        for name, columns in bindings.signals.items()
    }


def _offered(refs: Sequence[EpisodeRef]) -> dict[str, SignalInfo]:
    offered: dict[str, SignalInfo] = {}
    for ref in reversed(refs):
        offered.update((signal.name, signal) for signal in ref.signals)
    return offered


def _labels(signal: SignalInfo) -> list[str]:
    if len(signal.names) == signal.size:
        return [label if label.startswith(signal.name) else f"{signal.name}.{label}" for label in signal.names]
    return [signal.name] if signal.size == 1 else [f"{signal.name}[{k}]" for k in range(signal.size)]
