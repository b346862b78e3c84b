"""Errors a user can act on, and the reasons why a piece of input was refused.

Every message reads ``expected ..., found ...; next step``. *Where* it happened is attached on the way up
by :func:`locate`, so that a parser need not know which episode it is parsing for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Reason(StrEnum):
    """Why a frame, a step or an episode was refused: the ``reason`` column of the quarantine table."""

    MISSING_FILE = "missing-file"
    """A file that the recording's own metadata promises is not there."""
    TRUNCATED = "truncated"
    """A file ends before its format says it should."""
    DECODE = "decode"
    """A file is whole, as far as can be told, and still cannot be decoded."""
    TOO_LARGE = "too-large"
    """Decoding would need more memory than a frame or file of this format may."""
    UNSUPPORTED = "unsupported"
    """A valid file of a kind that Headrace does not read, such as a CMYK image or a pickle."""
    COUNT_MISMATCH = "count-mismatch"
    """Two streams of one episode disagree about its number of steps."""
    NON_FINITE = "non-finite"
    """NaN or infinity in a field that the recipe uses."""
    WRONG_SHAPE = "wrong-shape"
    """An array or image of another shape or size than its stream declares."""
    TIME_ORDER = "time-order"
    """Timestamps that do not increase."""
    TIME_GAP = "time-gap"
    """A step of the output grid has no recorded step within the tolerance."""
    TIME_JITTER = "time-jitter"
    """The time between steps varies more than the recipe allows."""
    POSE_JUMP = "pose-jump"
    """Position or heading change faster than any vehicle moves."""
    FROZEN = "frozen"
    """A view shows one frame again and again while vehicle or state move."""
    CONSTANT = "constant"
    """Numbers that never change where they should."""
    EMPTY_EPISODE = "empty-episode"
    """An episode of no steps."""
    DUPLICATE = "duplicate"
    """The same recording, or the same frame or row of it, appears twice."""
    BAD_METADATA = "bad-metadata"
    """The files that describe the recording contradict themselves or cannot be parsed."""
    LEFT_OUT = "left-out"
    """Sound, and left out by a rule that was asked for, such as that of driven routes by their results."""
    LEFT_OUT_NAME = "left-out-name"
    """Left out by `include` or `exclude`."""
    LEFT_OUT_SUCCESS = "left-out-success"
    """Left out by what the recording says of its own success."""
    LEFT_OUT_LENGTH = "left-out-length"
    """Shorter than the recipe asks for."""
    IO = "io"
    """The operating system refused to read: permission, a broken disk, a lost mount."""
    WORKER_DIED = "worker-died"
    """The process that worked on it died, alone and more than once: a crash in a decoder, or memory."""

    @property
    def is_wish(self) -> bool:
        """Whether it says what somebody asked for, and nothing against the recording."""
        return self.value.startswith("left-out")


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose; ``where`` says for which input.

    Parameters
    ----------
    message
        ``expected ..., found ...; next step``.
    where
        Ordered pairs such as ``episode="route_00"``, ``steps="0:64"``; outer ones are put in front by :func:`locate`.
    """

    exit_code = 1

    def __init__(self, message: str, **where: object) -> None:
        super().__init__(message)
        self.message = message
        self.where: dict[str, object] = where

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return f"{place}: {self.message}" if place else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.where, self._extra()))

    def _extra(self) -> dict[str, object]:
        return {}


class UsageError(HeadraceError):
    """Wrong flags or arguments (exit code 2)."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that does not validate; the message names the key and the nearest known one."""


class SourceError(HeadraceError):
    """Recorded input that cannot be used; ``reason`` becomes the quarantine code."""

    def __init__(self, message: str, reason: Reason = Reason.BAD_METADATA, **where: object) -> None:
        super().__init__(message, **where)
        self.reason = reason

    def _extra(self) -> dict[str, object]:
        return {"reason": self.reason}


class SchemaError(HeadraceError):
    """A value of another shape, dtype or range than its specification."""


class PlanError(HeadraceError):
    """A conversion that cannot run as asked: it does not fit, or source or recipe changed under an unfinished plan."""


class DatasetError(HeadraceError):
    """A dataset that is unfinished, of a foreign version, or damaged."""


class ChecksumError(DatasetError):
    """Stored bytes differ from what was committed; ``where`` names array, steps and file."""


class LockedError(HeadraceError):
    """Another run holds the dataset (exit code 75: try again later)."""

    exit_code = 75


class Stopped(BaseException):
    """A signal asked the program to stop; no library takes it for a KeyboardInterrupt that it may answer itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return "stopped; what was finished is kept, and the same command continues"


class MissingExtraError(HeadraceError):
    """An optional dependency is absent; the message names the extra to install."""


def _rebuild(
    kind: type[HeadraceError], message: str, where: dict[str, object], extra: dict[str, object]
) -> HeadraceError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.message = message
    error.where = where
    for name, value in extra.items():
        setattr(error, name, value)
    return error


@contextmanager
def locate(**where: object) -> Iterator[None]:
    """Attach ``where`` to any :class:`HeadraceError` that passes through; inner values win.

    >>> try:
    ...     with locate(source="pusht", episode="episode_000003"):
    ...         raise SourceError("expected 7 columns, found 6; check the recording")
    ... except SourceError as error:
    ...     print(error)
    source pusht, episode episode_000003: expected 7 columns, found 6; check the recording
    """
    try:
        yield
    except HeadraceError as error:
        error.where = {**where, **error.where}
        raise
