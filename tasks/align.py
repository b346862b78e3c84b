"""Which recorded steps serve which step of the output grid, and how far off in seconds they are."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from schemas.errors import Reason, SourceError
from tasks.rotations import slerp


@dataclass(frozen=True, slots=True)
class Alignment:
    """For each step of the grid, the recorded rows that make it."""

    lower: Int[np.ndarray, " grid"]
    """Recorded step at or before, or the nearest one."""
    upper: Int[np.ndarray, " grid"]
    """Recorded step with which ``lower`` is mixed; equal to it except for linear and slerp alignment."""
    weight: Float[np.ndarray, " grid"]
    """Share of ``upper`` in the mixture, in [0, 1]."""
    error_s: Float[np.ndarray, " grid"]
    """Time of the nearest contributing recorded step minus time of the grid step."""

    def mix(
        self, lower: Float[np.ndarray, "grid dim"], upper: Float[np.ndarray, "grid dim"], *, is_rotation: bool = False
    ) -> Float[np.ndarray, "grid dim"]:
        """Return ``lower + weight * (upper - lower)``, exact where the weight is 0; of quaternions, four columns each, their slerp."""
        if is_rotation:
            pairs = zip(np.split(lower, lower.shape[1] // 4, axis=1), np.split(upper, upper.shape[1] // 4, axis=1))
            return np.concatenate([slerp(start, stop, self.weight) for start, stop in pairs], axis=1)
        return np.where(self.weight[:, None] == 0, lower, lower + self.weight[:, None] * (upper - lower))


def grid_length(duration_s: float, rate_hz: float) -> int:
    """Return how many steps of ``rate_hz`` fit in ``[0, duration_s]``, both ends included.

    >>> grid_length(1.0, 10.0)
    11
    """
    return int(np.floor(duration_s * rate_hz + 1e-6)) + 1


def align(recorded_s: Float[np.ndarray, " recorded"], grid_s: Float[np.ndarray, " grid"], method: str) -> Alignment:
    """Align increasing recorded times to the output grid by ``nearest``, ``previous``, ``linear`` or ``slerp``.

    Before the first and after the last recorded step that step is held; ``error_s`` says how far away it is.
    Ties of ``nearest`` go to the earlier step. SourceError (time-order) where ``recorded_s`` does not increase.
    """
    if len(recorded_s) == 0:
        raise SourceError("expected at least one recorded step, found none; drop the episode", Reason.EMPTY_EPISODE)
    if not np.all(np.diff(recorded_s) > 0):
        step = int(np.argmin(np.diff(recorded_s) > 0)) + 1
        raise SourceError(
            f"expected increasing timestamps, found {recorded_s[step]:.6f} s after {recorded_s[step - 1]:.6f} s "
            f"at step {step}; repair or drop the episode",
            Reason.TIME_ORDER,
        )
    last = len(recorded_s) - 1
    # Sums of periods differ in their last bits: a recorded step 1 us late still is the one at its grid step.
    after = np.searchsorted(recorded_s, grid_s + 1e-6, side="right")
    lower = np.clip(after - 1, 0, last)
    upper = np.clip(after, 0, last)
    nearest = np.where(np.abs(recorded_s[upper] - grid_s) < np.abs(recorded_s[lower] - grid_s), upper, lower)
    error_s = recorded_s[nearest] - grid_s
    if method == "nearest":
        return Alignment(nearest, nearest, np.zeros(len(grid_s)), error_s)
    if method == "previous":
        return Alignment(lower, lower, np.zeros(len(grid_s)), recorded_s[lower] - grid_s)
    span = recorded_s[upper] - recorded_s[lower]
    weight = np.divide(grid_s - recorded_s[lower], span, out=np.zeros(len(grid_s)), where=span > 0)
    return Alignment(lower, upper, np.clip(weight, 0.0, 1.0), error_s)
