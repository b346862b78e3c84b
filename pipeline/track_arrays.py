"""The arrays of a tracks store: see :mod:`tasks.track_rows`."""

from pipeline.store.metadata import DatasetInfo
from schemas.dataset import ArraySpec
from schemas.recipe import PlannerRecipe

HAS_TRACKS = "has_tracks"
"""Row array of a tracks store that says which steps have rows of tracks."""

_TRACK_AXES = {
    "tracks_ego": (
        ("time_s", *"xyz", "roll", "pitch", "yaw", "vx", "vy", "ax", "ay", "rear_axle_x", "wheel_base"),
        "float64",
    ),
    "tracks_flags": (("valid", "is_break", "is_interpolated"), "bool"),
    "tracks_actors": (("x", "y", "heading", "vx", "vy", "width", "length"), "float64"),
    "tracks_actor_numbers": (("column", "id", "class"), "int64"),
    "tracks_lights": (("lane", "state"), "int32"),
}
"""Features and dtype of the arrays of a tracks store."""

_LONG_NAMES = {
    "tracks_ego": "the ego's origin on the grid, in the frame of the map",
    "tracks_flags": "whether the ego was recorded, jumped since the step before, and lies between recorded steps",
    "tracks_actors": "centres of the boxes of all actors, in the frame of the map; zero where there are fewer",
    "tracks_actor_numbers": "place of the actor in its episode, recorded id and class; -1 where there are fewer",
    "tracks_lights": "lights of the sample's lanes: driving lane of the map and state; -1 where there are fewer",
}
_UNITS = {
    "time_s": "s",
    **dict.fromkeys((*"xyz", "rear_axle_x", "wheel_base", "width", "length"), "m"),
    **dict.fromkeys(("roll", "pitch", "yaw", "heading"), "rad"),
    **dict.fromkeys(("vx", "vy"), "m/s"),
    **dict.fromkeys(("ax", "ay"), "m/s2"),
}


def keeps_tracks(info: DatasetInfo) -> bool:
    """Return whether a dataset keeps tracks in the place of samples."""
    return (info.recipe.get("planner") or {}).get("store", "samples") == "tracks"


def track_specs(recipe: PlannerRecipe, shard_steps: int) -> list[ArraySpec]:
    """Return the specifications of a tracks store."""
    slots = {
        "tracks_actors": ("track", recipe.max_actors),
        "tracks_actor_numbers": ("track", recipe.max_actors),
        "tracks_lights": ("lane", recipe.num_lanes),
    }
    specs = []
    for name, (features, dtype) in _TRACK_AXES.items():
        axes = (*([slots[name]] if name in slots else []), (f"{name}_feature", len(features)))
        is_large = name in slots
        attributes = {
            "long_name": _LONG_NAMES[name],
            "features": list(features),
            "feature_units": [_UNITS.get(feature, "1") for feature in features],
        }
        specs.append(
            ArraySpec(
                name=name,
                dims=("step", *(axis for axis, _ in axes)),
                row_shape=tuple(size for _, size in axes),
                dtype=dtype,
                chunk_steps=1 if is_large else shard_steps,
                shard_steps=shard_steps,
                codec="raw" if recipe.codec == "raw" or not is_large else f"blosc:{recipe.codec}",
                valid_array=("is_anchor" if name == "tracks_lights" else HAS_TRACKS) if is_large else "",
                attributes=tuple(attributes.items()),
            )
        )
    return specs
