"""Expressions over the episodes table: what they choose, and that they are nothing else than expressions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.loaders import DatasetReader, MultiViewLoader, WindowLoader
from pipeline.loaders.filters import Filter
from schemas.errors import DatasetError, UsageError
from tests.pipeline.store_builder import Built, build_dataset

LENGTHS = (5, 9, 7, 4)
DETAILS = ({"success": True, "robot": "ur5"}, {"success": False}, {"robot": "franka", "score": 0.5}, {"success": True})


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("filters") / "out", episode_lengths=LENGTHS, details=DETAILS)


@pytest.fixture(name="reader", scope="module")
def _reader(built: Built) -> DatasetReader:
    return DatasetReader(built.root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task == 'task 0'", [0, 2]),
        ("task != 'task 0'", [1, 3]),
        ("task == 'task 0' and success", [0]),
        ("not success", [1, 2]),
        ("success == False", [1]),
        ("success == None", [2]),
        ("num_steps >= 7 or key == 'episode_3'", [1, 2, 3]),
        ("not (num_steps < 7) and not num_invalid", [2]),
        ("robot in ('ur5', 'franka')", [0, 2]),
        ("robot not in ['ur5']", [1, 2, 3]),
        ("score > -1 and score < 1", [2]),
        ("'side' in views and 'top' not in views", [0, 1, 2, 3]),
        ("'ur' in robot", [0]),
        ("task in ('task 1', 'other')", [1, 3]),
        ("'episode_2' <= key", [2, 3]),
        ("'task 1' == instructions", [1, 3]),
        ("True", [0, 1, 2, 3]),
        ("episode_index > 100", []),
    ],
)
def test_an_expression_chooses_episodes(reader, text, expected):
    assert np.flatnonzero(Filter(text).episodes(reader)).tolist() == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task ==",
        "__import__('os').system('true')",
        "key.upper() == 'A'",
        "views[0] == 'main'",
        "lambda: 1",
        "1 < num_steps < 9",
        "num_steps + 1 > 3",
        "(key := 'a') == 'a'",
        "[key for key in views]",
        "f'{key}' == 'a'",
        "num_steps is None",
        "robot in (robot, 'a')",
        "b'a' == key",
        "not " * 700,
        "(" * 500 + "key" + ")" * 500,
        "key\x00",
        "k" * 3000,
    ],
)
def test_what_is_no_expression_of_the_grammar_is_refused(text):
    with pytest.raises(UsageError, match="expected"):
        Filter(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taks == 'a'", r"expected names among .*'success'.*found \['taks'\]"),
        ("key < 3", "expected two numbers or two texts to compare, found 'episode_0' and 3"),
        ("'a' in num_steps", "expected a list or a text behind `in`, found 5"),
        ("3 in key", "expected a list or a text behind `in`"),
    ],
)
def test_an_expression_that_does_not_fit_the_table_says_why(reader, text, message):
    with pytest.raises(UsageError, match=message):
        Filter(text).episodes(reader)


@given(low=st.integers(0, 10), high=st.integers(0, 10), success=st.booleans(), invert=st.booleans())
def test_expressions_choose_as_python_does(reader, low, high, success, invert):
    text = f"{'not ' * invert}({low} <= num_steps and num_steps < {high} or success == {success})"
    plain = [
        (low <= length < high or details.get("success") == success) != invert
        for length, details in zip(LENGTHS, DETAILS, strict=True)
    ]
    assert Filter(text).episodes(reader).tolist() == plain


@pytest.mark.parametrize("text", ["details == 'a' or x", "x" * 10])
def test_no_details_is_no_name(tmp_path: Path, text):
    built = build_dataset(tmp_path / "out")
    with pytest.raises(UsageError, match="expected names among"):
        Filter(text).episodes(DatasetReader(built.root))


def test_loaders_serve_the_chosen_episodes_alone(built):
    steps = [step for batch in MultiViewLoader(built.root, 3, filter="success", tail="keep") for step in batch["index"]]
    assert sorted(steps) == [0, 1, 2, 3, 4, 21, 22, 23, 24]
    windows = WindowLoader(built.root, 1, filter="not success", horizon=3, shuffle=False)
    assert [int(batch["index"][0]) for batch in windows] == [*range(7, 12), *range(14, 19)]
    for kind in (MultiViewLoader, WindowLoader):
        with pytest.raises(DatasetError, match="expected at least one step"):
            kind(built.root, 1, filter="num_steps > 99")
