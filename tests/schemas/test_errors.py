"""Errors carry where they happened, and cross process borders whole."""

import pickle

import pytest

from schemas.errors import ChecksumError, HeadraceError, LockedError, Reason, SourceError, UsageError, locate


def test_inner_places_win_and_outer_ones_come_first():
    with pytest.raises(SourceError) as raised, locate(source="pusht", episode="outer"):
        with locate(episode="7", steps="0:64"):
            raise SourceError("expected a, found b; do c", Reason.DECODE, file="x.png")
    assert list(raised.value.where) == ["source", "episode", "steps", "file"]
    assert str(raised.value) == "source pusht, episode 7, steps 0:64, file x.png: expected a, found b; do c"


@pytest.mark.parametrize("kind", [HeadraceError, UsageError, LockedError, ChecksumError])
def test_errors_survive_pickling_with_their_place(kind):
    error = pickle.loads(pickle.dumps(kind("expected a, found b", array="state", steps="0:8")))
    assert type(error) is kind
    assert (error.message, error.where) == ("expected a, found b", {"array": "state", "steps": "0:8"})
    assert str(error) == "array state, steps 0:8: expected a, found b"


def test_a_source_error_keeps_its_reason_through_pickling():
    error = pickle.loads(pickle.dumps(SourceError("m", Reason.TRUNCATED, file="f")))
    assert (error.reason, error.where) == (Reason.TRUNCATED, {"file": "f"})


def test_exit_codes_are_the_documented_ones():
    assert (HeadraceError("m").exit_code, UsageError("m").exit_code, LockedError("m").exit_code) == (1, 2, 75)


def test_other_exceptions_pass_through_locate_untouched():
    with pytest.raises(ZeroDivisionError), locate(source="s"):
        1 / 0  # noqa: B018
