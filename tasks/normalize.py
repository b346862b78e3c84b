"""Normalise images and feature vectors, each with its inverse beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Float64, Shaped, UInt8

from schemas.errors import SchemaError
from tasks.kernels.affine import CHANNELS_FIRST, CHANNELS_LAST, NUM_TERMS, Terms, affine_rows, split_terms
from tasks.kernels.lines import LINE_NBYTES

Constants = Sequence[float] | Float64[np.ndarray, " dim"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""torchvision's constants, on values in [0, 1]."""
UNIT_MEAN, UNIT_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
"""To [0, 1]."""
SIGNED_MEAN, SIGNED_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""To [-1, 1], as openpi's ``Observation.from_dict``."""

_PAST_CACHES_NBYTES = 1 << 24
"""Batches from this size on are written past the caches, where they would not be found again anyway."""


def normalize_images(
    frames: UInt8[np.ndarray, "*batch h w 3"], mean: Constants, std: Constants, out: Shaped[np.ndarray, "*batch _ _ _"]
) -> None:
    """Fill ``out`` with ``(frames / 255 - mean) / std``, within 0.51 units in the last place of the float64 formula.

    Parameters
    ----------
    frames
        Pixels, channels last.
    mean, std
        Per channel, on values in [0, 1].
    out
        float32, float16, or uint16 for the bits of bfloat16 (``torch.from_numpy(out).view(torch.bfloat16)``); C-contiguous,
        of the shape of ``frames`` or with the channel before height and width.
    """
    name = {"uint16": "bfloat16"}.get(str(out.dtype), str(out.dtype))
    if name not in CHANNELS_LAST or not out.flags.c_contiguous or frames.dtype != np.uint8 or frames.ndim < 3:
        raise SchemaError(
            "expected uint8[..., h, w, 3] into a C-contiguous float32, float16 or uint16 (bfloat16), "
            f"found {frames.dtype}{list(frames.shape)} into {out.dtype}{list(out.shape)}; allocate the batch so"
        )
    pixels = np.ascontiguousarray(frames).view()
    pixels.flags.writeable = False  # one compilation serves read-only and writable arrays
    *batch, height, width, channels = frames.shape
    if channels == 3 and out.shape == frames.shape:
        run, terms = CHANNELS_LAST, _terms(_three(mean), _three(std), NUM_TERMS // 3)
        pixels = pixels.reshape(-1)
    elif channels == 3 and out.shape == (*batch, 3, height, width):
        run, terms = CHANNELS_FIRST, _terms(_three(mean), _three(std), 1)
        pixels = pixels.reshape(-1, 3 * height * width)
    else:
        raise SchemaError(
            f"expected out of shape {list(frames.shape)} or channels first, found {list(out.shape)}; reshape it"
        )
    if out.size:
        bits = out.reshape(-1).view(np.uint16 if out.dtype == np.float16 else out.dtype)
        run[name](pixels, terms, out.ctypes.data % LINE_NBYTES, out.nbytes >= _PAST_CACHES_NBYTES, bits)


def denormalize_images(
    frames: Shaped[np.ndarray, "*batch _ _ _"], mean: Constants, std: Constants, *, channels_first: bool = False
) -> UInt8[np.ndarray, "*batch h w 3"]:
    """Return the uint8 frames, channels last, that :func:`normalize_images` made ``frames`` of.

    Exact for every byte in float32 and float16, and in bfloat16 with ImageNet's or the signed constants.
    """
    values = np.moveaxis(frames, -3, -1) if channels_first else frames
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    pixels: np.ndarray = (values.astype(np.float64) * np.asarray(_three(std)) + np.asarray(_three(mean))) * 255.0
    frames_uint8: np.ndarray = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
    return frames_uint8


@lru_cache(maxsize=64)
def _terms(mean: tuple[float, ...], std: tuple[float, ...], repeats: int) -> Terms:
    """Return the kernels' constants, for every channel ``repeats`` times over; making them costs as much as a small frame."""
    centers, scales = 255.0 * np.asarray(mean), 1.0 / (255.0 * np.asarray(std))
    return split_terms(np.tile(centers, repeats), np.tile(scales, repeats))


def _three(values: Constants) -> tuple[float, ...]:
    constants = tuple(float(value) for value in values)
    if len(constants) != 3:
        raise SchemaError(f"expected one constant a channel, found {len(constants)}; give three")
    return constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A normalisation feature by feature: ``(x - center) / spread * gain + bias``."""

    center: Float64[np.ndarray, " dim"]
    spread: Float64[np.ndarray, " dim"]
    gain: float = 1.0
    bias: float = 0.0
    keep_zero_rows: bool = False
    """A row of zeros marks padding and stays zero both ways, as in Diffusion Planner's ``ObservationNormalizer``."""

    def __post_init__(self) -> None:
        if self.center.ndim != 1 or self.center.shape != self.spread.shape:
            raise SchemaError(
                f"expected center and spread of one length, found {self.center.shape} and {self.spread.shape}; check the statistics"
            )
        if not (np.isfinite(self.center).all() and np.isfinite(self.spread).all() and (self.spread != 0).all()):
            raise SchemaError(
                "expected finite statistics and no spread of 0, found others; recompute them, or give an epsilon"
            )


def _pair(first: Constants, second: Constants) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if left.ndim != 1 or left.shape != right.shape:
        raise SchemaError(
            f"expected two statistics of one length, found {left.shape} and {right.shape}; recompute them"
        )
    return left, right


def z_score(mean: Constants, std: Constants, *, epsilon: float = 1e-6, keep_zero_rows: bool = False) -> Scaling:
    """Return ``(x - mean) / (std + epsilon)``: openpi's with 1e-6, constants as published with 0."""
    center, spread = _pair(mean, std)
    return Scaling(center=center, spread=spread + epsilon, keep_zero_rows=keep_zero_rows)


def gaussian(mean: Constants, std: Constants, *, std_epsilon: float = 1e-4) -> Scaling:
    """Return diffusion_policy's ``LinearNormalizer(mode="gaussian")``: a std below ``std_epsilon`` counts as 1."""
    center, spread = _pair(mean, std)
    return Scaling(center=center, spread=np.where(spread < std_epsilon, 1.0, spread))


def quantile(q01: Constants, q99: Constants, *, epsilon: float = 1e-6) -> Scaling:
    """Return openpi's ``(x - q01) / (q99 - q01 + epsilon) * 2 - 1``; nothing is clipped, and a constant dimension explodes."""
    low, high = _pair(q01, q99)
    return Scaling(center=low, spread=high - low + epsilon, gain=2.0, bias=-1.0)


def min_max(low: Constants, high: Constants, *, range_epsilon: float = 1e-4) -> Scaling:
    """Return diffusion_policy's ``LinearNormalizer(mode="limits")`` to [-1, 1].

    A range below ``range_epsilon`` (1e-4 in its ``_fit``, 1e-7 in ``get_range_normalizer_from_stat``) is a constant
    dimension: its least value maps to 0 with slope 1.
    """
    least, greatest = _pair(low, high)
    half = (greatest - least) / 2.0
    is_constant = greatest - least < range_epsilon
    return Scaling(center=np.where(is_constant, least, least + half), spread=np.where(is_constant, 1.0, half))


def normalize(
    values: Float[np.ndarray, "*batch dim"], scaling: Scaling, out: Float[np.ndarray, "*batch dim"] | None = None
) -> Float[np.ndarray, "*batch dim"]:
    """Normalise the last axis in float64 and round once to the dtype of ``values``.

    Statistics of more dimensions than ``values`` has are cut to it, as openpi does.
    """
    center, spread = _fit(values, scaling)
    return _affine(
        values, center, scaling.gain / spread, np.full(len(center), scaling.bias), scaling.keep_zero_rows, out
    )


def denormalize(
    values: Float[np.ndarray, "*batch dim"], scaling: Scaling, out: Float[np.ndarray, "*batch dim"] | None = None
) -> Float[np.ndarray, "*batch dim"]:
    """Undo :func:`normalize`: ``(y - bias) / gain * spread + center``."""
    center, spread = _fit(values, scaling)
    return _affine(
        values, np.full(len(center), scaling.bias), spread / scaling.gain, center, scaling.keep_zero_rows, out
    )


def _fit(values: np.ndarray, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    dim = values.shape[-1] if values.ndim else 0
    if dim == 0 or dim > len(scaling.center) or values.dtype not in (np.float32, np.float64):
        raise SchemaError(
            f"expected float32 or float64[..., 1 to {len(scaling.center)}], found {values.dtype}{list(values.shape)}; "
            "use the statistics of this array"
        )
    return scaling.center[:dim], scaling.spread[:dim]


def _affine(
    values: np.ndarray,
    before: np.ndarray,
    scales: np.ndarray,
    after: np.ndarray,
    keep_zero_rows: bool,
    out: np.ndarray | None,
) -> np.ndarray:
    result = np.empty(values.shape, values.dtype) if out is None else out
    if result.shape != values.shape or not result.flags.c_contiguous or result.dtype not in (np.float32, np.float64):
        raise SchemaError(
            f"expected a C-contiguous float out of {list(values.shape)}, found {result.dtype}{list(result.shape)}; allocate it so"
        )
    dim = values.shape[-1]
    affine_rows(
        np.ascontiguousarray(values).reshape(-1, dim), before, scales, after, keep_zero_rows, result.reshape(-1, dim)
    )
    return result
