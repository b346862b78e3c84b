"""What happens to state and actions between the dataset and the policy, each step with its exact inverse.

A transform takes ``state`` (``float[*batch, dim]``) and ``actions`` (``float[*batch, horizon, dim]``: the chunk that begins
at that state) and returns both; ``invert`` takes what the policy gives and leads back. Inputs are never written to, and
what a transform does not change is handed through. The order is openpi's (``src/openpi/training/data_loader.py``,
``transform_dataset``): robot adapter, delta, normalise, pad.

>>> chain = Chain((AlohaToPi(), DeltaActions(delta_mask(6, -1, 6, -1)), PadToModel(14, 14)))
>>> state, actions = chain(np.zeros((1, 14), np.float32), np.zeros((1, 50, 14), np.float32))
>>> state.shape, actions.shape
((1, 32), (1, 50, 32))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from schemas.errors import SchemaError
from tasks.normalize import Scaling, denormalize, normalize, quantile, z_score
from tasks.rotations import SIZES, convert_rotation
from tasks.stats import delta_mask

__all__ = [
    "AlohaToPi",
    "Chain",
    "ConvertRotation",
    "DeltaActions",
    "Inverse",
    "Normalize",
    "PadToModel",
    "ScaleColumns",
    "Transform",
    "delta_mask",
]

State = Float[np.ndarray, "*batch dim"]
Actions = Float[np.ndarray, "*batch horizon dim"]
Pair = tuple[np.ndarray, np.ndarray]


class Transform(Protocol):
    """One step of the way, and the same step back."""

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Return state and actions as the next step, at last the model, takes them."""

    def invert(self, state: State, actions: Actions) -> Pair:
        """Return state and actions as the step before takes them."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Transforms one after the other; back in the opposite order."""

    transforms: tuple[Transform, ...]

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Apply the first transform first."""
        for transform in self.transforms:
            state, actions = transform(state, actions)
        return state, actions

    def invert(self, state: State, actions: Actions) -> Pair:
        """Undo the last transform first."""
        for transform in reversed(self.transforms):
            state, actions = transform.invert(state, actions)
        return state, actions


@dataclass(frozen=True, slots=True)
class Inverse:
    """A transform taken backwards: openpi's ``AbsoluteActions(mask)`` is ``Inverse(DeltaActions(mask))``."""

    transform: Transform

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Take the transform backwards."""
        return self.transform.invert(state, actions)

    def invert(self, state: State, actions: Actions) -> Pair:
        """Take the transform forwards."""
        return self.transform(state, actions)


@dataclass(frozen=True, slots=True)
class DeltaActions:
    """Actions relative to the state at the chunk's start: ``actions[..., k, d] - state[..., d]`` where the mask is True.

    The whole chunk refers to one state, as in openpi's ``DeltaActions``, and not every action to the one before it.
    A mask may be shorter than the actions. In floating point the way back is exact to half a unit in the last place
    of the greater of the two.
    """

    mask: tuple[bool, ...]
    """By dimension; :func:`delta_mask` spells it: ``delta_mask(6, -1, 6, -1)`` for ALOHA, ``(7, -1)`` for DROID joint
    positions, ``(6, -1)`` for LIBERO where its actions are absolute."""

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Subtract the state."""
        return state, actions - self._offsets(state, actions)

    def invert(self, state: State, actions: Actions) -> Pair:
        """Add the state again."""
        return state, actions + self._offsets(state, actions)

    def _offsets(self, state: np.ndarray, actions: np.ndarray) -> np.ndarray:
        size = len(self.mask)
        if size > min(state.shape[-1], actions.shape[-1]):
            raise SchemaError(
                f"expected state and actions of {size} or more dimensions, as the mask has, found {state.shape[-1]} and "
                f"{actions.shape[-1]}; correct the mask"
            )
        offsets = np.zeros((*actions.shape[:-2], 1, actions.shape[-1]), actions.dtype)
        offsets[..., 0, :size] = np.where(self.mask, state[..., :size], 0)
        return offsets


_FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float64)
_GRIPPERS = [6, 13]
_PUPPET_POSITION_M = (0.01844, 0.05800)
"""PUPPET_GRIPPER_POSITION_CLOSE and _OPEN of ALOHA's constants.py: what state 0 and 1 are in metres."""
_HORN_M, _ARM_M = 0.022, 0.036
"""Lengths of the gripper's crank, from Interbotix: ``position = horn * sin(a) + sqrt(arm^2 - (horn * cos(a))^2)``."""
_PI_ANGLE_RAD = (0.5476, 1.6296)
"""What pi0's gripper 0 and 1 are: encoder counts 2405 and 3110 of 4096, from a zero at 2048."""
_PUPPET_JOINT_RAD = (-0.6213, 1.4910)
"""PUPPET_GRIPPER_JOINT_CLOSE and _OPEN of ALOHA's constants.py: what action 0 and 1 are in radians."""


@dataclass(frozen=True, slots=True)
class AlohaToPi:
    """openpi's ``adapt_to_pi`` for ALOHA (``policies/aloha_policy.py``): joint directions and grippers as pi0 was trained on them.

    Two arms of seven: joints 1 and 2 of each are turned round. Gripper positions are linear in ALOHA and angles in pi0:
    the state's goes through the crank (``_gripper_to_angular``), the action's only changes range
    (``_gripper_from_angular_inv``), since ALOHA's commands are angles already. Statistics belong after it.

    Above 1 (fully open) the crank has no angle; openpi clips there and so does this, and only such a state does not come back.
    """

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Return joint directions and grippers of pi0."""
        low, high = _PUPPET_JOINT_RAD
        return (
            _adapted(state, _angle_from_opening),
            _adapted(actions, lambda value: value * (high - low) + low - _PI_ANGLE_RAD[0]),
        )

    def invert(self, state: State, actions: Actions) -> Pair:
        """Return joint directions and grippers of ALOHA, as ``AlohaOutputs`` does for actions."""
        low, high = _PUPPET_JOINT_RAD
        return (
            _adapted(state, _opening_from_angle),
            _adapted(actions, lambda value: (value + _PI_ANGLE_RAD[0] - low) / (high - low)),
        )


def _adapted(values: np.ndarray, gripper: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Turn joints and convert grippers; no gripper is turned, so either order is the same."""
    if values.shape[-1] != len(_FLIPS):
        raise SchemaError(f"expected 14 dimensions of two ALOHA arms, found {values.shape[-1]}; name the right columns")
    out = values.astype(np.float64) * _FLIPS
    out[..., _GRIPPERS] = gripper(out[..., _GRIPPERS])
    return out.astype(values.dtype)


def _angle_from_opening(opening: np.ndarray) -> np.ndarray:
    low, high = _PUPPET_POSITION_M
    position_m = opening * (high - low) + low
    sine = (_HORN_M**2 + position_m**2 - _ARM_M**2) / (2 * _HORN_M * position_m)
    least, greatest = _PI_ANGLE_RAD
    angle: np.ndarray = (np.arcsin(np.clip(sine, -1.0, 1.0)) - least) / (greatest - least)
    return angle


def _opening_from_angle(angle: np.ndarray) -> np.ndarray:
    least, greatest = _PI_ANGLE_RAD
    angle_rad = angle * (greatest - least) + least
    position_m = _HORN_M * np.sin(angle_rad) + np.sqrt(_ARM_M**2 - (_HORN_M * np.cos(angle_rad)) ** 2)
    low, high = _PUPPET_POSITION_M
    opening: np.ndarray = (position_m - low) / (high - low)
    return opening


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleColumns:
    """``x * scale + offset`` in some columns: gripper conventions, units.

    >>> state, _ = ScaleColumns.between((-1, 1), (0, 1), actions=(6,), state=(0,))(np.array([0.5]), np.zeros((1, 7)))
    >>> state.tolist()
    [0.75]
    """

    scale: float
    offset: float = 0.0
    state: tuple[int, ...] = ()
    """Columns of the state."""
    actions: tuple[int, ...] = ()
    """Columns of the actions."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.scale) and np.isfinite(self.offset) and self.scale != 0):
            raise SchemaError(f"expected a finite scale that is not 0, found {self.scale}, {self.offset}; correct it")

    @classmethod
    def between(
        cls,
        source: tuple[float, float],
        target: tuple[float, float],
        *,
        state: tuple[int, ...] = (),
        actions: tuple[int, ...] = (),
    ) -> "ScaleColumns":
        """Map one range onto another; ``(0, 1)`` onto ``(1, 0)`` makes an open gripper's 1 its 0."""
        if source[0] == source[1] or target[0] == target[1]:
            raise SchemaError(f"expected two ranges of some width, found {source} and {target}; correct them")
        scale = (target[1] - target[0]) / (source[1] - source[0])
        return cls(scale=scale, offset=target[0] - source[0] * scale, state=state, actions=actions)

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Return ``x * scale + offset``."""
        return self._apply(state, self.state, self._forward), self._apply(actions, self.actions, self._forward)

    def invert(self, state: State, actions: Actions) -> Pair:
        """Return ``(y - offset) / scale``."""
        return self._apply(state, self.state, self._back), self._apply(actions, self.actions, self._back)

    def _forward(self, values: np.ndarray) -> np.ndarray:
        return values * self.scale + self.offset

    def _back(self, values: np.ndarray) -> np.ndarray:
        return (values - self.offset) / self.scale

    @staticmethod
    def _apply(values: np.ndarray, columns: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        if not columns:
            return values
        if not 0 <= min(columns) <= max(columns) < values.shape[-1]:
            raise SchemaError(f"expected columns in [0, {values.shape[-1]}), found {columns}; correct them")
        out = values.copy()
        out[..., list(columns)] = change(values[..., list(columns)].astype(np.float64))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRotation:
    """Rotations in some columns, in another representation of :data:`tasks.rotations.SIZES`; the columns after it move along."""

    source: str
    target: str
    state: tuple[int, ...] = ()
    """Columns at which rotations of the state begin, before the conversion, ascending."""
    actions: tuple[int, ...] = ()
    """Columns at which rotations of the actions begin, before the conversion, ascending."""

    def __post_init__(self) -> None:
        for starts in (self.state, self.actions):
            if any(after < start + SIZES.get(self.source, 0) for start, after in pairwise(starts)):
                raise SchemaError(
                    f"expected rotations one after the other, found them at {starts}; correct the columns"
                )

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Return the other representation, at columns that move along."""
        names = (self.source, self.target)
        return _converted(state, self.state, *names), _converted(actions, self.actions, *names)

    def invert(self, state: State, actions: Actions) -> Pair:
        """Return the representation that was, at its columns."""
        grown = SIZES[self.target] - SIZES[self.source]
        starts = [tuple(start + k * grown for k, start in enumerate(columns)) for columns in (self.state, self.actions)]
        names = (self.target, self.source)
        return _converted(state, starts[0], *names), _converted(actions, starts[1], *names)


def _converted(values: np.ndarray, starts: tuple[int, ...], source: str, target: str) -> np.ndarray:
    parts, done = [], 0
    for start in starts:
        stop = start + SIZES.get(source, 0)
        if not done <= start <= stop <= values.shape[-1]:
            raise SchemaError(
                f"expected {source} at columns {start} to {stop} of {values.shape[-1]}, found fewer columns; correct them"
            )
        parts += [values[..., done:start], convert_rotation(values[..., start:stop], source, target)]
        done = stop
    return np.concatenate([*parts, values[..., done:]], axis=-1) if starts else values


@dataclass(frozen=True, slots=True)
class Normalize:
    """Normalise by one scaling each; one that is absent leaves its values alone."""

    state: Scaling | None = None
    actions: Scaling | None = None

    @classmethod
    def from_norm_stats(cls, content: Mapping[str, Any], method: str) -> "Normalize":
        """Read the content of openpi's ``norm_stats.json``; ``zscore`` (pi0) or ``quantile`` (pi0.5, pi0-FAST)."""
        known: dict[str, tuple[Callable[..., Scaling], tuple[str, str]]] = {
            "zscore": (z_score, ("mean", "std")),
            "quantile": (quantile, ("q01", "q99")),
        }
        if method not in known:
            raise SchemaError(f"expected zscore or quantile, found {method!r}; correct the call")
        make, keys = known[method]
        scalings = {}
        for name, stats in content.get("norm_stats", content).items():
            if name in ("state", "actions"):
                if any(stats.get(key) is None for key in keys):
                    raise SchemaError(
                        f"expected {' and '.join(keys)} of {name}, found none; run `headrace stats` again"
                    )
                scalings[name] = make(*(stats[key] for key in keys))
        if not scalings:
            raise SchemaError("expected norm_stats of state or actions, found neither; see `headrace stats`")
        return cls(**scalings)

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Return normalised values."""
        return (
            state if self.state is None else normalize(state, self.state),
            actions if self.actions is None else normalize(actions, self.actions),
        )

    def invert(self, state: State, actions: Actions) -> Pair:
        """Return units."""
        return (
            state if self.state is None else denormalize(state, self.state),
            actions if self.actions is None else denormalize(actions, self.actions),
        )


@dataclass(frozen=True, slots=True)
class PadToModel:
    """Fill up with zeros to the width of the model; what is wider stays as it is, as in openpi's ``PadStatesAndActions``."""

    state_dim: int
    action_dim: int
    model_dim: int = 32

    def __call__(self, state: State, actions: Actions) -> Pair:
        """Append zeros."""
        if (state.shape[-1], actions.shape[-1]) != (self.state_dim, self.action_dim):
            raise SchemaError(
                f"expected {self.state_dim} and {self.action_dim} dimensions, found {state.shape[-1]} and "
                f"{actions.shape[-1]}; correct the transform"
            )
        return self._pad(state), self._pad(actions)

    def invert(self, state: State, actions: Actions) -> Pair:
        """Cut the padding off, whatever the model put there."""
        return state[..., : self.state_dim], actions[..., : self.action_dim]

    def _pad(self, values: np.ndarray) -> np.ndarray:
        missing = max(0, self.model_dim - values.shape[-1])
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
