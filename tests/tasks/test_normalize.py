import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tasks.normalize import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SIGNED_MEAN,
    SIGNED_STD,
    UNIT_MEAN,
    UNIT_STD,
    denormalize,
    denormalize_images,
    gaussian,
    min_max,
    normalize,
    normalize_images,
    quantile,
    z_score,
)

CONSTANTS = {
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "unit": (UNIT_MEAN, UNIT_STD),
    "signed": (SIGNED_MEAN, SIGNED_STD),
    "odd": ((0.1, 0.7, 0.33), (0.21, 0.5, 1.7)),
    "a mean that is a pixel value": ((128 / 255, 1 / 255, 254 / 255), (0.25, 0.25, 0.25)),
}
DTYPES = [np.float32, np.float16, np.uint16]
EVERY_VALUE = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1).reshape(2, 8, 16, 3)
"""Every byte in every channel."""


def formula(frames: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    return (frames.astype(np.float64) / 255.0 - np.array(mean)) / np.array(std)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 by looking for the nearest of the two neighbours, ties to the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    below, above = low.view(np.float32).astype(float), (low + np.uint32(0x10000)).view(np.float32).astype(float)
    exact = values.astype(np.float32).astype(float)
    odd = (low >> 16) & 1
    up = np.where(abs(above - exact) == abs(exact - below), odd == 1, abs(above - exact) < abs(exact - below))
    return ((low >> 16) + up).astype(np.uint16)


def normalized(frames: np.ndarray, constants: str, dtype: type, first: bool = False) -> np.ndarray:
    *batch, height, width, _ = frames.shape
    out = np.full((*batch, 3, height, width) if first else frames.shape, 99, dtype)
    normalize_images(frames, *CONSTANTS[constants], out)
    return out


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_float32_is_within_one_unit_in_the_last_place_of_the_float64_formula(constants, first):
    found = normalized(EVERY_VALUE, constants, np.float32, first)
    found = np.moveaxis(found, -3, -1) if first else found
    exact = formula(EVERY_VALUE, *CONSTANTS[constants])
    error = np.abs(found.astype(np.float64) - exact)
    assert (error <= np.maximum(0.52 * np.spacing(np.abs(exact).astype(np.float32)), 1e-15)).all()


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_half_precisions_are_the_float32_values_rounded_to_nearest_even(constants, first):
    single = normalized(EVERY_VALUE, constants, np.float32, first)
    np.testing.assert_array_equal(normalized(EVERY_VALUE, constants, np.float16, first), single.astype(np.float16))
    np.testing.assert_array_equal(normalized(EVERY_VALUE, constants, np.uint16, first), bfloat16_bits(single))


@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
@pytest.mark.parametrize(
    ("dtype", "constants"),
    [(dtype, name) for dtype in (np.float32, np.float16) for name in CONSTANTS]
    + [(np.uint16, "imagenet"), (np.uint16, "signed")],
)
def test_denormalising_gives_every_byte_back(constants, dtype, first):
    found = denormalize_images(
        normalized(EVERY_VALUE, constants, dtype, first), *CONSTANTS[constants], channels_first=first
    )
    np.testing.assert_array_equal(found, EVERY_VALUE)


@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 40),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_any_shape_is_normalised_pixel_by_pixel(batch, height, width, first, dtype):
    rng = np.random.default_rng(height * 100 + width)
    frames = rng.integers(0, 256, (*batch, height, width, 3), dtype=np.uint8)
    frames.flags.writeable = False
    table = normalized(EVERY_VALUE, "imagenet", dtype).reshape(256, 3)
    expected = np.stack([table[frames[..., channel], channel] for channel in range(3)], axis=-1)
    found = normalized(frames, "imagenet", dtype, first)
    if first and found.shape != frames.shape:
        found = np.moveaxis(found, -3, -1)
    np.testing.assert_array_equal(found, expected)


def test_signed_is_openpis_conversion_to_within_rounding():
    openpi = EVERY_VALUE.astype(np.float32) / 255.0 * 2.0 - 1.0
    np.testing.assert_allclose(normalized(EVERY_VALUE, "signed", np.float32), openpi, atol=1.2e-7)


def test_frames_that_are_not_contiguous_are_normalised_as_they_look():
    frames = np.ascontiguousarray(EVERY_VALUE[0])[::2, ::-1]
    np.testing.assert_array_equal(
        normalized(frames, "odd", np.float32), normalized(np.ascontiguousarray(frames), "odd", np.float32)
    )


@pytest.mark.parametrize(
    ("frames", "out", "constants"),
    [
        (np.zeros((4, 5, 3), np.float32), np.zeros((4, 5, 3), np.float32), UNIT_MEAN),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((4, 5, 3), np.float64), UNIT_MEAN),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((5, 4, 3), np.float32), UNIT_MEAN),
        (np.zeros((4, 5, 4), np.uint8), np.zeros((4, 5, 4), np.float32), UNIT_MEAN),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((4, 10, 3), np.float32)[:, ::2], UNIT_MEAN),
        (np.zeros((4, 5, 3), np.uint8), np.zeros((4, 5, 3), np.float32), (0.5,)),
    ],
)
def test_wrong_arrays_are_refused_before_a_kernel_sees_them(frames, out, constants):
    with pytest.raises(SchemaError, match="expected"):
        normalize_images(frames, constants, UNIT_STD, out)


def rows(num: int, dim: int, dtype: type = np.float32) -> np.ndarray:
    values = np.random.default_rng(dim).normal(3, 5, (num, dim)).astype(dtype)
    values.flags.writeable = False
    return values


def assert_close(found: np.ndarray, exact: np.ndarray) -> None:
    """Within one unit in the last place; near a zero crossing, within the rounding of float64."""
    bound = np.maximum(np.spacing(np.abs(exact).astype(found.dtype)).astype(np.float64), 1e-14)
    assert (np.abs(found.astype(np.float64) - exact) <= bound).all()


MEAN, STD = np.array([1.0, -2.0, 3e5, 0.0]), np.array([2.0, 0.1, 7.0, 1e-3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_z_score_is_openpis_formula(dtype):
    values = rows(50, 4, dtype)
    found = normalize(values, z_score(MEAN, STD))
    assert found.dtype == dtype
    assert_close(found, (values.astype(np.float64) - MEAN) / (STD + 1e-6))
    np.testing.assert_allclose(
        denormalize(found, z_score(MEAN, STD)), values, rtol=2e-6, atol=0.1 if dtype == np.float32 else 1e-9
    )


def test_quantile_is_openpis_formula_unclipped():
    values, low, high = rows(50, 4), MEAN - 3 * STD, MEAN + 2 * STD
    found = normalize(values, quantile(low, high))
    assert_close(found, (values.astype(np.float64) - low) / (high - low + 1e-6) * 2 - 1)
    assert np.abs(found).max() > 1
    constant = normalize(np.array([[0.0032]], np.float32), quantile([0.0], [0.0]))
    np.testing.assert_allclose(constant, [[6399.0]], rtol=1e-6)  # it explodes there too: openpi issue 814


def test_min_max_is_diffusion_policys_range_rule():
    """Transcribed from ``LinearNormalizer._fit`` with mode limits: scale and offset in its own order."""
    least, greatest = np.array([0.0, -1.0, 5.0]), np.array([10.0, 3.0, 5.0 + 1e-5])
    input_range = greatest - least
    ignore = input_range < 1e-4
    input_range[ignore] = 2.0
    scale = 2.0 / input_range
    offset = -1.0 - scale * least
    offset[ignore] = 0.0 - least[ignore]
    values = rows(40, 3)
    np.testing.assert_allclose(
        normalize(values, min_max(least, greatest)), values * scale + offset, rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(normalize(least[None], min_max(least, greatest)), [[-1, -1, 0]], atol=1e-12)
    np.testing.assert_allclose(normalize(greatest[None], min_max(least, greatest)), [[1, 1, 1e-5]], atol=1e-12)
    np.testing.assert_allclose(normalize(np.array([[5.00001]]), min_max([5], [5.00001], range_epsilon=1e-7)), [[1.0]])


def test_gaussian_is_diffusion_policys_rule_for_a_constant():
    found = normalize(np.array([[3.0, 3.0]]), gaussian([1.0, 1.0], [2.0, 1e-5]))
    np.testing.assert_allclose(found, [[1.0, 2.0]])


def test_zero_rows_stay_zero_both_ways_where_asked():
    """Diffusion Planner's ``ObservationNormalizer``: a row that is all zero is padding, one that has any value is not."""
    scaling = z_score([10.0, 0.0], [20.0, 5.0], epsilon=0.0, keep_zero_rows=True)
    values = np.array([[[0, 0], [10, 0]], [[0, 1], [-0.0, 0]]], np.float32)
    found = normalize(values, scaling)
    np.testing.assert_allclose(found, [[[0, 0], [0, 0]], [[-0.5, 0.2], [0, 0]]], rtol=1e-6)
    np.testing.assert_allclose(denormalize(found, scaling)[1, 0], [0, 1], atol=1e-6)
    assert not denormalize(np.zeros((3, 2), np.float32), scaling).any()
    assert normalize(np.zeros((1, 2), np.float32), z_score([10.0, 0.0], [20.0, 5.0])).any()


def test_a_row_of_nan_is_not_taken_for_padding():
    scaling = z_score([10.0, 0.0], [20.0, 5.0], keep_zero_rows=True)
    assert np.isnan(normalize(np.full((1, 2), np.nan, np.float32), scaling)).all()


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 12))
def test_the_inverse_gives_float64_values_back(batch, dim):
    rng = np.random.default_rng(dim)
    values = rng.normal(0, 100, (*batch, dim))
    low, high = rng.normal(0, 10, dim), rng.normal(100, 10, dim)
    for scaling in (z_score(low, high), quantile(low, high), min_max(low, high), gaussian(low, high)):
        np.testing.assert_allclose(denormalize(normalize(values, scaling), scaling), values, rtol=1e-12, atol=1e-11)


def test_statistics_of_more_dimensions_are_cut_to_the_values_as_openpi_does():
    wide = z_score(np.arange(32.0), np.ones(32))
    np.testing.assert_array_equal(
        normalize(rows(5, 4), wide), normalize(rows(5, 4), z_score(np.arange(4.0), np.ones(4)))
    )


def test_out_may_be_a_wider_dtype_and_is_returned():
    out = np.empty((5, 4), np.float64)
    assert normalize(rows(5, 4), z_score(MEAN, STD), out) is out
    np.testing.assert_allclose(out, (rows(5, 4).astype(np.float64) - MEAN) / (STD + 1e-6), rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: normalize(rows(5, 6), z_score(MEAN, STD)),
        lambda: normalize(rows(5, 4).astype(np.int64), z_score(MEAN, STD)),
        lambda: normalize(rows(5, 4), z_score(MEAN, STD), np.empty((4, 4), np.float32)),
        lambda: normalize(rows(5, 4), z_score(MEAN, STD), np.empty((5, 8), np.float32)[:, ::2]),
        lambda: z_score([1.0], [0.0], epsilon=0.0),
        lambda: z_score([np.nan], [1.0]),
        lambda: z_score([1.0, 2.0], [1.0]),
        lambda: quantile([1.0, 2.0], [1.0]),
    ],
)
def test_statistics_that_do_not_fit_are_refused(make):
    with pytest.raises(SchemaError, match="expected"):
        make()
