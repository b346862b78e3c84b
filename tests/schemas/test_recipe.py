"""Recipes: what validates, what is refused and how, and that JSON keeps them whole."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipes import BUILT_IN, load_recipe, override, parse_flags, recipe_text
from schemas.errors import RecipeError
from schemas.recipe import (
    ALIGNMENTS,
    DECODES,
    FILTERS,
    MISSING,
    ON_BAD_FRAME,
    RESIZES,
    FrameRecipe,
    Recipe,
    SignalRecipe,
    ViewRecipe,
    recipe_from_mapping,
    recipe_to_mapping,
)

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
views = st.builds(
    ViewRecipe,
    name=names,
    candidates=st.lists(names, max_size=3).map(tuple),
    height_px=st.integers(1, 512),
    width_px=st.integers(1, 512),
    resize=st.sampled_from(RESIZES),
    filter=st.sampled_from(FILTERS),
    decode=st.sampled_from(DECODES),
    missing=st.sampled_from(MISSING),
)
signals = st.builds(
    SignalRecipe,
    name=names,
    columns=st.lists(names, max_size=3).map(tuple),
    align=st.tuples(st.sampled_from(ALIGNMENTS)),
)
frame_recipes = st.one_of(
    st.builds(FrameRecipe, codec=st.sampled_from(["raw", "zstd", "jpeg:1", "jpeg:95", "jpeg:100"])),
    st.builds(
        FrameRecipe,
        codec=st.sampled_from(["raw", "zstd"]),
        dtype=st.sampled_from(["float16", "float32"]),
        mean=st.tuples(*[st.floats(0, 1)] * 3),
        std=st.tuples(*[st.floats(0.01, 1)] * 3),
    ),
)
recipes = st.builds(
    Recipe,
    name=names,
    views=st.lists(views, max_size=4, unique_by=lambda view: view.name).map(tuple),
    signals=st.lists(signals, max_size=3, unique_by=lambda signal: signal.name).map(tuple),
    frames=frame_recipes,
    rate_hz=st.floats(0, 100),
    tolerance_s=st.floats(0, 1),
    horizon=st.integers(1, 100),
    action_dim=st.integers(1, 64),
    min_steps=st.integers(1, 10),
    on_bad_frame=st.sampled_from(ON_BAD_FRAME),
)


@given(recipe=recipes)
def test_a_recipe_comes_back_equal_through_sorted_json(recipe):
    text = json.dumps(recipe_to_mapping(recipe), sort_keys=True)
    assert recipe_from_mapping(json.loads(text), "other") == recipe


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes_load(name):
    assert load_recipe(name).name == name


def test_pi0_has_openpi_view_names_in_openpi_order():
    # openpi src/openpi/models/model.py IMAGE_KEYS, commit 15a9616a
    assert [view.name for view in load_recipe("pi0").views] == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert {(view.height_px, view.width_px, view.resize) for view in load_recipe("pi0").views} == {(224, 224, "pad")}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"horizn": 3}, ["'horizn'", "did you mean 'horizon'"]),
        ({"views": {"a": {"sise": 3}}}, ["views.a", "'sise'", "did you mean 'size'"]),
        ({"frames": {"codek": "raw"}}, ["'codek'", "did you mean 'codec'"]),
        ({"viewz": {}}, ["did you mean 'views'"]),
        ({"frames": {"codec": "jpg"}}, ["jpeg:Q", "'jpg'"]),
        ({"frames": {"codec": "jpeg:0"}}, ["jpeg:Q"]),
        ({"frames": {"codec": "jpeg:95", "dtype": "float16", "mean": [0, 0, 0], "std": [1, 1, 1]}}, ["uint8"]),
        ({"frames": {"dtype": "float16"}}, ["`mean` and `std`"]),
        ({"frames": {"dtype": "float16", "mean": [0, 0, 0], "std": [0, 1, 1]}}, ["above 0"]),
        ({"horizon": "3"}, ["expected int", "'3'"]),
        ({"horizon": True}, ["expected int", "True"]),
        ({"horizon": 0}, ["1 or more"]),
        ({"rate_hz": -1}, ["0 to 10000 Hz"]),
        ({"rate_hz": float("nan")}, ["0 to 10000 Hz"]),
        ({"views": 3}, ["table [views]"]),
        ({"views": {"a": {"size": [1, 2, 3]}}}, ["[height, width]"]),
        ({"views": {"a": {"size": 0}}}, ["1 to 8192 px"]),
        ({"views": {"a/b": {}}}, ["letters, digits"]),
        ({"views": {"a": {"resize": "padd"}}}, ["pad, stretch, crop", "'padd'"]),
        ({"views": [{"name": "a"}, {"name": "a"}]}, ["names to differ"]),
        ({"signals": {"s": {"from": [1]}}}, ["signals.s.from", "found 1"]),
        ({"signals": {"s": {"align": "spline"}}}, ["nearest, previous, linear"]),
        ({"on_bad_frame": "skip"}, ["mask, drop-episode, stop"]),
    ],
)
def test_a_wrong_recipe_is_refused_naming_key_and_cure(data, words):
    with pytest.raises(RecipeError) as refused:
        recipe_from_mapping(data, "x")
    for word in words:
        assert word in str(refused.value)


def test_a_recipe_file_names_itself_in_its_error(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("horizn = 3\n")
    with pytest.raises(RecipeError, match=r"recipe mine\.toml.*horizon"):
        load_recipe(path)
    path.write_text("horizon = \n")
    with pytest.raises(RecipeError, match="expected TOML"):
        load_recipe(path)


def test_the_printed_recipe_is_the_recipe(tmp_path):
    path = tmp_path / "copy.toml"
    path.write_text(recipe_text("pi0"))
    assert load_recipe(path) == load_recipe("pi0")
    assert tomllib.loads(recipe_text("pi0"))["views"]["base_0_rgb"]["size"] == [224, 224]


def test_flags_change_what_they_name_and_nothing_else():
    before = load_recipe("pi0")
    after = override(before, {"views": {"base_0_rgb": "top"}, "size": 96, "codec": "jpeg:90", "rate_hz": 10.0})
    assert after.view("base_0_rgb").candidates == ("top",)
    assert after.view("left_wrist_0_rgb").candidates == before.view("left_wrist_0_rgb").candidates
    assert {(view.height_px, view.width_px) for view in after.views} == {(96, 96)}
    assert (after.frames.codec, after.rate_hz, after.horizon) == ("jpeg:90", 10.0, before.horizon)
    assert override(before, {}) == before


def test_a_flag_for_an_unknown_view_is_refused():
    with pytest.raises(RecipeError, match="base_0_rgb.*'nose'"):
        override(load_recipe("pi0"), {"views": {"nose": "rgb"}})


@pytest.mark.parametrize("flags", [["base_0_rgb"], ["=rgb"], ["base_0_rgb="], ["a=b", "a=c"]])
def test_malformed_view_flags_are_refused(flags):
    with pytest.raises(RecipeError, match="expected"):
        parse_flags("--view", flags)


def test_each_column_may_be_aligned_in_its_own_way():
    table = {"signals": {"state": {"from": ["a", "b"], "align": ["linear", "slerp"]}, "actions": {"align": "previous"}}}
    recipe = recipe_from_mapping(table, "x")
    assert [recipe.signals[0].method(place) for place in (0, 1)] == ["linear", "slerp"]
    assert [recipe.signals[1].method(place) for place in (0, 5)] == ["previous", "previous"]
    assert recipe_from_mapping(recipe_to_mapping(recipe), "x") == recipe
    assert recipe_to_mapping(recipe)["signals"][1]["align"] == "previous"
    for align in (["linear"] * 3, [], "spline", ["linear", "spline"]):
        with pytest.raises(RecipeError, match=r"align|spline"):
            recipe_from_mapping({"signals": {"state": {"from": ["a", "b"], "align": align}}}, "x")
