"""What a recipe asks of recordings beyond being readable: which checks refuse, and which episodes are wanted at all."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from schemas.errors import RecipeError

ACTIONS = ("off", "warn", "refuse")
"""``warn``: a row of the quarantine, and nothing else happens. ``refuse``: what it is about is not served (``on_bad_frame``)."""
SUCCESS = ("all", "not-failed", "only")


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise RecipeError unless ``value`` is among ``allowed``."""
    if value not in allowed:
        raise RecipeError(f"expected {key} one of {', '.join(allowed)}, found {value!r}; correct the recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecipe:
    """What is done about recordings that can be read and are odd. ``refuse`` only where no sound recording looks like that."""

    time_gap: str = "warn"
    """Recorded steps further apart than the period and the tolerance, where the output grid is the recorded one."""
    time_jitter: str = "warn"
    """An episode whose periods vary by more than ``max_jitter``."""
    max_jitter: float = 0.5
    """Standard deviation of the time between steps, as a share of the nominal period."""
    pose_jump: str = "refuse"
    """A vehicle that moves or turns faster than any does: it was placed elsewhere, and no motion leads there."""
    max_speed_m_s: float = 100.0
    max_turn_deg_s: float = 360.0
    position: tuple[str, ...] = ()
    """Signals in m whose joined values are the place; empty takes the format's ego pose, where it has one."""
    heading: str = ""
    """Signal with the heading, in rad or degrees as its unit says; empty takes the format's."""
    frozen: str = "warn"
    """One frame again and again for ``frozen_s`` while the vehicle or the state moves."""
    frozen_s: float = 2.0
    constant: str = "warn"
    """An episode whose state never changes while that of others does; numbers that never change at all are told once."""
    duplicate: str = "refuse"
    """An episode with the steps and instructions of another."""
    view_size: str = "warn"
    """A frame of another size than its view declares."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(field.default, str) and field.name != "heading":
                one_of(f"checks.{field.name}", getattr(self, field.name), ACTIONS)
        limits = (self.max_jitter, self.max_speed_m_s, self.max_turn_deg_s, self.frozen_s)
        if not all(0 < limit < 1e9 for limit in limits):
            raise RecipeError(f"expected limits above 0, found {list(limits)}; correct [checks]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRecipe:
    """Which episodes are wanted; the others are left out, which is no fault of theirs."""

    include: tuple[str, ...] = ()
    """Patterns (``*``, ``?``, ``[ab]``) of keys or ``source/key``; empty takes all."""
    exclude: tuple[str, ...] = ()
    success: str = "all"
    """``all``; ``not-failed``: those that are not said to have failed; ``only``: those that are said to have succeeded."""
    success_from: tuple[str, ...] = ("success", "is_success", "next.success", "is_episode_successful")
    """Where that is said: a fact of the episode, or a signal that is true at any of its steps; the first that there is."""
    min_duration_s: float = 0.0

    def __post_init__(self) -> None:
        one_of("filter.success", self.success, SUCCESS)
        if not 0 <= self.min_duration_s < 1e9:
            raise RecipeError(f"expected a min_duration_s of 0 or more, found {self.min_duration_s}; correct [filter]")


DEFAULT_CHECKS, EVERY_EPISODE = CheckRecipe(), FilterRecipe()
