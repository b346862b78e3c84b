"""Recipes by name or file, and the flags that change them."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.selection import read_names
from schemas.errors import RecipeError, SchemaError, UsageError
from schemas.recipe import GIVEN_NORMALIZATION, FrameRecipe, Recipe, ViewRecipe, recipe_from_mapping

BUILT_IN = ("pi0", "three-view", "diffusion-planner", "planner-npz")


def recipe_text(name: str) -> str:
    """Return the TOML text of a built-in recipe."""
    if name not in BUILT_IN:
        raise RecipeError(
            f"expected one of the recipes {', '.join(BUILT_IN)}, found {name!r}; see `headrace recipe list`"
        )
    return resources.files(__package__).joinpath(f"{name}.toml").read_text("utf-8")


def load_recipe(name_or_file: str | Path | Recipe) -> Recipe:
    """Load a built-in recipe by name, or one from a TOML file; RecipeError says what is wrong with it."""
    if isinstance(name_or_file, Recipe):
        return _with_normalization(name_or_file, Path())
    name = str(name_or_file)
    if name in BUILT_IN:
        return recipe_from_mapping(tomllib.loads(recipe_text(name)), name)
    path = Path(name)
    if not path.is_file():
        raise RecipeError(
            f"expected a recipe file or one of {', '.join(BUILT_IN)}, found {name!r}; see `headrace recipe list`"
        )
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"expected TOML, found {error}; correct the file", recipe=path.name) from error
    try:
        return _with_normalization(_with_lists(recipe_from_mapping(data, path.stem), path.parent), path.parent)
    except UsageError as error:
        error.where = {"recipe": path.name, **error.where}
        raise


def _with_lists(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with the files of episode names (``@FILE``, from its folder) read: a dataset keeps the names, not the file."""
    include, exclude = (
        tuple(name for pattern in patterns for name in read_names(pattern, folder))
        for patterns in (recipe.filter.include, recipe.filter.exclude)
    )
    return replace(recipe, filter=replace(recipe.filter, include=include, exclude=exclude))


def _with_normalization(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with the ``normalization.json`` that it names read, from its folder: a dataset keeps the numbers, not the file."""
    if recipe.planner is None or not recipe.planner.normalize.endswith(GIVEN_NORMALIZATION):
        return recipe
    from tasks.planner_normalize import normalization_from_json

    path = folder / Path(recipe.planner.normalize).expanduser()
    try:
        data = json.loads(path.read_text("utf-8"))
        normalization_from_json(data)
    except (OSError, ValueError, SchemaError) as error:
        raise RecipeError(f"expected a normalization.json in {path}, found: {error}; correct `normalize`") from error
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return replace(recipe, planner=replace(recipe.planner, normalize=text))


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return ``recipe`` with command-line flags applied.

    ``changes`` may hold ``views`` (``target -> source``), ``size`` (pixels a side) and ``decode`` of every view, ``rate_hz``,
    ``codec``, ``on_bad_frame`` and ``planner_store``; None means not given.
    """
    views = tuple(_override_view(view, changes) for view in recipe.views)
    for target in changes.get("views") or {}:
        recipe.view(target)
    given = {key: changes[key] for key in ("rate_hz", "on_bad_frame") if changes.get(key) is not None}
    if changes.get("codec") is not None:
        frames = recipe.frames
        given["frames"] = FrameRecipe(codec=changes["codec"], dtype=frames.dtype, mean=frames.mean, std=frames.std)
    if changes.get("planner_store") is not None:
        if recipe.planner is None:
            raise RecipeError("expected a recipe with [planner] for --planner-store, found none; use diffusion-planner")
        given["planner"] = replace(recipe.planner, store=changes["planner_store"])
    return replace(recipe, views=views, **given)


def parse_flags(name: str, flags: Sequence[str]) -> dict[str, str]:
    """Parse flags such as ``--view target=source``.

    >>> parse_flags("--view", ["base_0_rgb=rgb_front"])
    {'base_0_rgb': 'rgb_front'}
    """
    values: dict[str, str] = {}
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not (key and equals and value):
            raise RecipeError(f"expected {name} key=value, found {flag!r}; for example --view base_0_rgb=rgb_front")
        if key in values:
            raise RecipeError(f"expected one {name} for {key!r}, found two; keep one")
        values[key] = value
    return values


def _override_view(view: ViewRecipe, changes: Mapping[str, Any]) -> ViewRecipe:
    source = (changes.get("views") or {}).get(view.name)
    if source is not None:
        view = replace(view, candidates=(source,))
    if changes.get("decode") is not None:
        view = replace(view, decode=changes["decode"])
    if changes.get("size") is not None:
        view = replace(view, height_px=changes["size"], width_px=changes["size"])
    return view
