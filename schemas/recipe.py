"""What to make of a source: the validated form of a recipe file."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, get_args, get_origin

from schemas.errors import RecipeError
from schemas.quality import DEFAULT_CHECKS, EVERY_EPISODE, CheckRecipe, FilterRecipe, one_of

T = TypeVar("T")

RESIZES = ("pad", "stretch", "crop")
FILTERS = ("bilinear", "bicubic", "box")
DECODES = ("exact", "fast")
MISSING = ("mask", "drop-episode", "stop")
ALIGNMENTS = ("nearest", "previous", "linear", "slerp")
PLANNER_NORMALIZE = ("published", "none")
GIVEN_NORMALIZATION = ".json"
"""End of the name of a file of Diffusion Planner's that a recipe may name instead."""
ON_BAD_FRAME = ("mask", "drop-episode", "stop")
FRAME_DTYPES = ("uint8", "float16", "float32")


def _identifier(kind: str, name: str) -> None:
    if not name.replace("-", "_").isidentifier():
        raise RecipeError(f"expected a {kind} name of letters, digits, _ and -, found {name!r}; rename it")


def _check_codec(codec: str, normalised: bool) -> None:
    kind, _, quality = codec.partition(":")
    if kind == "jpeg" and not normalised and quality.isdigit() and 1 <= int(quality) <= 100:
        return
    if codec not in ("raw", "zstd"):
        raise RecipeError(
            f"expected codec raw, zstd or (for uint8 frames) jpeg:Q with Q of 1 to 100, found {codec!r}; correct [frames]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRecipe:
    """One view of the dataset, as the policy sees it."""

    name: str
    candidates: tuple[str, ...] = ()
    """Source views that may serve it, best first."""
    height_px: int = 224
    width_px: int = 224
    resize: str = "pad"
    filter: str = "bilinear"
    decode: str = "exact"
    """``exact``, or ``fast``: large JPEGs at a part of their size, within 45 dB of the exact frame; never the default."""
    missing: str = "mask"
    """Where no source view serves it: mask the frames, drop the episode, or stop."""

    def __post_init__(self) -> None:
        one_of("resize", self.resize, RESIZES)
        one_of("filter", self.filter, FILTERS)
        one_of("decode", self.decode, DECODES)
        one_of("missing", self.missing, MISSING)
        _identifier("view", self.name)
        if not (1 <= self.height_px <= 8192 and 1 <= self.width_px <= 8192):
            raise RecipeError(
                f"expected a size of 1 to 8192 px a side for view {self.name!r}, "
                f"found {self.height_px}x{self.width_px}; correct `size`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRecipe:
    """One numeric array of the dataset: columns of the source, joined in order."""

    name: str
    columns: tuple[str, ...] = ()
    """Source signals to join; empty takes the format's documented default."""
    align: tuple[str, ...] = ("nearest",)
    """How recorded rows become rows of the output grid, where the rates differ: one way, or one for each column."""

    def method(self, place: int) -> str:
        """Return how the column at ``place`` is aligned."""
        return self.align[place if len(self.align) > 1 else 0]

    def __post_init__(self) -> None:
        for method in self.align:
            one_of("align", method, ALIGNMENTS)
        if len(self.align) != 1 and len(self.align) != len(self.columns):
            raise RecipeError(
                f"expected one `align`, or one for each of the columns {list(self.columns)}, found {list(self.align)}; correct signals.{self.name}"
            )
        _identifier("signal", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRecipe:
    """How frames are stored."""

    codec: str = "raw"
    """``raw``, ``zstd``, ``jpeg:Q``."""
    dtype: str = "uint8"
    """``uint8``, or a float dtype of frames normalised before writing."""
    mean: tuple[float, ...] = ()
    """Per channel, on values in [0, 1]."""
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, FRAME_DTYPES)
        normalised = self.dtype != "uint8"
        if normalised != bool(self.mean) or len(self.mean) != len(self.std) or len(self.mean) not in (0, 3):
            raise RecipeError(
                "expected `mean` and `std` of 3 values each together with dtype float16 or float32, "
                f"found dtype {self.dtype}, mean {list(self.mean)}, std {list(self.std)}; correct [frames]"
            )
        if any(not value > 0 for value in self.std):
            raise RecipeError(f"expected every `std` above 0, found {list(self.std)}; correct [frames]")
        _check_codec(self.codec, normalised)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRecipe:
    """Diffusion Planner's tensors: which steps are samples, how many of what they hold, how they are kept."""

    anchor_stride: int = 1
    """Every so many of the steps that qualify is a sample."""
    min_distance_m: float = 0.0
    """Least way that the ego drives in a sample's future."""
    past_steps: int = 20
    future_steps: int = 80
    min_future_steps: int = 0
    """Least future of a sample, the rest of which is masked; 0 asks for all ``future_steps``."""
    num_agents: int = 32
    num_static: int = 5
    num_lanes: int = 70
    num_route_lanes: int = 25
    rear_axle_m: float = 0.0
    """Rear axle of the ego, forward of the vehicle's origin; 0 takes the recorded model's, or where that is not known the MKZ 2020's."""
    wheel_base_m: float = 0.0
    """For the steering angle; 0 takes the recorded model's, or where that is not known nuPlan's Pacifica's, the contract's."""
    normalize: str = "published"
    """``published`` stores observations normalised by Diffusion Planner's constants, ``none`` in their units; or the name of a
    ``normalization.json``, in the place of which a loaded recipe has its content."""
    store: str = "samples"
    """``samples`` keeps every sample's tensors; ``tracks`` keeps tracks and map once, and the loader computes the same tensors."""
    max_actors: int = 512
    """Of a ``tracks`` store: actors that a step has room for; an episode with more is refused. Room costs next to nothing on disk."""
    codec: str = "zstd"
    """Of the large tensors: ``zstd``, ``lz4`` (a little larger, decoded twice as fast) or ``raw``."""

    def __post_init__(self) -> None:
        if not (self.normalize.endswith(GIVEN_NORMALIZATION) or self.normalize.startswith("{")):
            one_of("normalize", self.normalize, (*PLANNER_NORMALIZE, "the name of a .json file"))
        one_of("planner store", self.store, ("samples", "tracks"))
        one_of("planner codec", self.codec, ("zstd", "lz4", "raw"))
        counts = (self.anchor_stride, self.future_steps, self.num_agents, self.num_static, self.num_lanes)
        if min(*counts, self.num_route_lanes, self.max_actors) < 1 or self.past_steps < 0:
            raise RecipeError("expected planner sizes of 1 or more, found one below; correct [planner]")
        if not 0 <= self.min_future_steps <= self.future_steps:
            raise RecipeError(
                f"expected min_future_steps of 0 to {self.future_steps}, found {self.min_future_steps}; correct [planner]"
            )
        if not (abs(self.rear_axle_m) < 100 and 0 <= self.wheel_base_m < 100):
            raise RecipeError(
                f"expected rear_axle_m within 100 m and wheel_base_m of 0 to 100 m, found {self.rear_axle_m} and {self.wheel_base_m}; correct [planner]"
            )
        if not 0 <= self.min_distance_m < 1e6:
            raise RecipeError(f"expected a min_distance_m of 0 or more, found {self.min_distance_m}; correct [planner]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to make of a source. See ``docs/recipes.md`` for the file."""

    name: str
    views: tuple[ViewRecipe, ...] = ()
    signals: tuple[SignalRecipe, ...] = (SignalRecipe(name="state"), SignalRecipe(name="actions"))
    frames: FrameRecipe = FrameRecipe()
    planner: PlannerRecipe | None = None
    """Diffusion Planner's tensors, for sources with tracks and a map; None for none."""
    checks: CheckRecipe = DEFAULT_CHECKS
    filter: FilterRecipe = EVERY_EPISODE
    rate_hz: float = 0.0
    """Rate of the output grid; 0 takes the source's."""
    tolerance_s: float = 0.0
    """Greatest distance of a recorded step from its step of the grid; 0 takes three quarters of the usual recorded period."""
    horizon: int = 50
    """Steps of an action chunk, for the statistics."""
    action_dim: int = 32
    """Width to which the loader pads state and actions."""
    min_steps: int = 1
    """Shorter episodes are left out."""
    on_bad_frame: str = "mask"

    def __post_init__(self) -> None:
        one_of("on_bad_frame", self.on_bad_frame, ON_BAD_FRAME)
        for kind, names in (("view", [v.name for v in self.views]), ("signal", [s.name for s in self.signals])):
            if len(set(names)) != len(names):
                raise RecipeError(f"expected {kind} names to differ, found {names}; rename one")
        if not (0 <= self.rate_hz <= 10_000 and 0 <= self.tolerance_s < 3600):
            raise RecipeError(
                f"expected a rate of 0 to 10000 Hz and a tolerance of 0 to 3600 s, "
                f"found {self.rate_hz} Hz and {self.tolerance_s} s; correct the recipe"
            )
        if self.horizon < 1 or self.action_dim < 1 or self.min_steps < 1:
            raise RecipeError("expected horizon, action_dim and min_steps of 1 or more; correct the recipe")

    def view(self, name: str) -> ViewRecipe:
        """Return the view called ``name``; RecipeError names those there are."""
        for view in self.views:
            if view.name == name:
                return view
        raise RecipeError(f"expected one of the views {[v.name for v in self.views]}, found {name!r}; correct --view")


TABLES: Mapping[str, type[FrameRecipe | PlannerRecipe | CheckRecipe | FilterRecipe]] = {
    "frames": FrameRecipe,
    "planner": PlannerRecipe,
    "checks": CheckRecipe,
    "filter": FilterRecipe,
}
"""Tables of a recipe that there is one of."""


def recipe_from_mapping(data: Mapping[str, Any], name: str) -> Recipe:
    """Validate parsed TOML strictly: unknown keys and wrong types are refused with the nearest known key named.

    ``[views.NAME]`` and ``[signals.NAME]`` are tables by name (or ``[[views]]`` with a ``name`` each), ``[frames]`` and others (:data:`TABLES`) one table each, the rest are top-level keys.
    ``from`` spells ``candidates`` and ``columns``; ``size = [height, width]`` or one number spells both sides.
    """
    data = dict(data)
    parts: dict[str, Any] = {"name": data.pop("name", name)}
    if "views" in data:
        parts["views"] = tuple(_view(key, value) for key, value in _tables(data.pop("views"), "views"))
    if "signals" in data:
        parts["signals"] = tuple(_signal(key, value) for key, value in _tables(data.pop("signals"), "signals"))
    for key, kind in TABLES.items():
        if key in data:
            parts[key] = _build(kind, _table(data.pop(key), key), key)
    return _build(Recipe, {**parts, **data}, "the recipe")


def recipe_to_mapping(recipe: Recipe) -> dict[str, Any]:
    """Return the mapping that :func:`recipe_from_mapping` reads back to an equal recipe: JSON and TOML values only."""
    out: dict[str, Any] = {
        key: getattr(recipe, key)
        for key in ("name", "rate_hz", "tolerance_s", "horizon", "action_dim", "min_steps", "on_bad_frame")
    }
    out["frames"] = {
        "codec": recipe.frames.codec,
        "dtype": recipe.frames.dtype,
        "mean": list(recipe.frames.mean),
        "std": list(recipe.frames.std),
    }
    if recipe.planner is not None:
        out["planner"] = asdict(recipe.planner)
    for key in ("checks", "filter"):
        out[key] = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(getattr(recipe, key)).items()}
    out["views"] = [  # lists, since sorted JSON would lose the order of tables by name
        {
            "name": view.name,
            "from": list(view.candidates),
            "size": [view.height_px, view.width_px],
            "resize": view.resize,
            "filter": view.filter,
            "decode": view.decode,
            "missing": view.missing,
        }
        for view in recipe.views
    ]
    out["signals"] = [
        {"name": s.name, "from": list(s.columns), "align": list(s.align) if len(s.align) > 1 else s.align[0]}
        for s in recipe.signals
    ]
    return out


def _view(name: str, value: Any) -> ViewRecipe:
    table = dict(_table(value, f"views.{name}"))
    if "from" in table:
        table["candidates"] = table.pop("from")
    if "size" in table:
        size = table.pop("size")
        pair = [size, size] if isinstance(size, int) else size
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(type(side) is int for side in pair)):
            raise RecipeError(f"expected `size` as one number or [height, width] in views.{name}, found {size!r}")
        table["height_px"], table["width_px"] = pair
    return _build(ViewRecipe, {"name": name, **table}, f"views.{name}")


def _signal(name: str, value: Any) -> SignalRecipe:
    table = dict(_table(value, f"signals.{name}"))
    if "from" in table:
        table["columns"] = table.pop("from")
    return _build(SignalRecipe, {"name": name, **table}, f"signals.{name}")


def _tables(value: Any, where: str) -> list[tuple[str, Any]]:
    """Return named tables in order: ``[views.NAME]`` tables, or a list of tables with a ``name``."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = [dict(_table(item, where)) for item in value]
        if not all(isinstance(item.get("name"), str) for item in items):
            raise RecipeError(f"expected a name in each table of [[{where}]], found one without; name it")
        return [(item.pop("name"), item) for item in items]
    return list(_table(value, where).items())


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"expected a table [{where}], found {value!r}; see `headrace recipe show pi0`")
    return value


_SPELLED = {"candidates": "from", "columns": "from", "height_px": "size", "width_px": "size"}
_TYPES: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}


def unknown_key(key: str, known: Sequence[str], where: str) -> str:
    """Return what to say of a key that nobody knows: with the nearest one that is known, or all of them.

    >>> unknown_key("horizn", ["horizon", "name"], "the recipe")
    "expected a known key in the recipe, found 'horizn'; did you mean 'horizon'?"
    """
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"expected a known key in {where}, found {key!r}; {hint}"


def _build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    known = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            spelled = sorted(
                {_SPELLED.get(k, k) for k in known} | ({"views", "signals", *TABLES} if kind is Recipe else set())
            )
            raise RecipeError(unknown_key(key, spelled, where))
        values[key] = _convert(value, known[key], f"{where}.{_SPELLED.get(key, key)}")
    return kind(**values)


def _convert(value: Any, annotation: Any, where: str) -> Any:
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        items = [value] if isinstance(value, str) and inner is str else value
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise RecipeError(f"expected a list for {where}, found {value!r}; correct the recipe")
        return tuple(_scalar(item, inner, where) for item in items)
    return _scalar(value, annotation, where)


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if kind not in _TYPES:  # a dataclass built by the caller
        return value
    if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
        raise RecipeError(f"expected {kind.__name__} for {where}, found {value!r}; correct the recipe")
    return float(value) if kind is float else value  # type: ignore[arg-type]
