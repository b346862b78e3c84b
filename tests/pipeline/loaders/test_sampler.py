"""Which rank takes which sample, as the environment or the caller says."""

import pytest

from pipeline.loaders.sampler import rank_and_world_size
from schemas.errors import UsageError


def test_a_process_alone_takes_everything(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert rank_and_world_size(None, None) == (0, 1)


def test_a_launcher_says_which_rank_this_is_and_the_caller_knows_better(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_and_world_size(None, None) == (3, 8)
    assert rank_and_world_size(1, 2) == (1, 2)
    assert rank_and_world_size(0, None) == (0, 8)


@pytest.mark.parametrize(("rank", "world_size"), [("1", ""), ("", "2"), ("one", "2"), ("-1", "2")])
def test_half_an_environment_is_refused(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(UsageError, match="expected numbers in both RANK and WORLD_SIZE"):
        rank_and_world_size(None, None)
    assert rank_and_world_size(0, 1) == (0, 1)
