import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from schemas.errors import SchemaError
from tasks.decode import decode_frame
from tasks.resize import decode_resized, place, resize_frame, warm
from tests.tasks.pillow_reference import resample, resize_with_pad

PILLOW_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
}
PILLOW_IS_THE_REFERENCE = int(PIL.__version__.split(".")[0]) < 12
CAMERA_SIZES = [
    (480, 640), (720, 1280), (1080, 1920), (900, 1600), (360, 640), (240, 320), (180, 320), (256, 256), (96, 96), (144, 256),
    (512, 1024), (256, 1024), (600, 800), (480, 848), (376, 672), (720, 960), (84, 84), (128, 128), (64, 64), (1200, 1920),
]  # fmt: skip
sides = st.integers(1, 80) | st.sampled_from([127, 128, 129, 223, 224, 225, 256, 300])


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Half plain noise, half only 0 and 255, where rounding and clipping show most."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    image[height // 2 :] = (image[height // 2 :] > 127) * np.uint8(255)
    image.flags.writeable = False
    return image


def resized(image: np.ndarray, height: int, width: int, **options: str) -> np.ndarray:
    out = np.full((height, width, image.shape[2]), 7, np.uint8)
    resize_frame(image, out, **options)
    return out


def by_pillow(image: np.ndarray, height: int, width: int, filter: str = "bilinear") -> np.ndarray:
    modes = {1: "L", 3: "RGB", 4: "RGBX"}
    flat = image[..., 0] if image.shape[2] == 1 else image
    picture = Image.frombytes(modes[image.shape[2]], (image.shape[1], image.shape[0]), flat.tobytes())
    return np.asarray(picture.resize((width, height), PILLOW_FILTERS[filter])).reshape(height, width, -1)


@given(sides, sides, sides, sides, st.sampled_from([1, 3, 4]), st.sampled_from(list(PILLOW_FILTERS)))
def test_stretch_equals_the_transcription_of_pillow_11_bit_for_bit(
    height, width, out_height, out_width, channels, filter
):
    image = noise(height, width, channels, height * 1000 + width)
    found = resized(image, out_height, out_width, method="stretch", filter=filter)
    np.testing.assert_array_equal(found, resample(image, out_height, out_width, filter))


@given(sides, sides, sides, sides)
def test_pad_equals_openpis_resize_with_pad_bit_for_bit(height, width, out_height, out_width):
    ratio = max(width / out_width, height / out_height)
    if int(height / ratio) < 1 or int(width / ratio) < 1:
        return  # Pillow refuses an empty image; Headrace keeps one row
    image = noise(height, width, 3, height * 1000 + width)
    np.testing.assert_array_equal(resized(image, out_height, out_width), resize_with_pad(image, out_height, out_width))


@pytest.mark.parametrize("size", CAMERA_SIZES, ids=str)
@pytest.mark.parametrize("method", ["pad", "stretch"])
def test_camera_sizes_equal_the_installed_pillow_whichever_it_is(size, method):
    image = noise(*size)
    placement = place(size, (224, 224), method)
    top, left, height, width = placement.target
    found = resized(image, 224, 224, method=method)
    np.testing.assert_array_equal(found[top : top + height, left : left + width], by_pillow(image, height, width))


@given(sides, sides, sides, sides)
def test_odd_shapes_are_within_one_least_bit_of_the_installed_pillow(height, width, out_height, out_width):
    image = noise(height, width, 3, height * 1000 + width)
    found = resized(image, out_height, out_width, method="stretch").astype(int)
    most = 0 if PILLOW_IS_THE_REFERENCE else 1
    assert np.abs(found - by_pillow(image, out_height, out_width)).max() <= most


@pytest.mark.soak
@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 512),
    st.integers(1, 512),
    st.sampled_from(list(PILLOW_FILTERS)),
)
def test_large_frames_equal_the_transcription_too(height, width, out_height, out_width, filter):
    image = noise(height, width, 3, height * 1000 + width)
    found = resized(image, out_height, out_width, method="stretch", filter=filter)
    np.testing.assert_array_equal(found, resample(image, out_height, out_width, filter))


@pytest.mark.parametrize("size", [(4096, 3), (3, 4096), (4096, 1), (1, 4096), (1, 1), (2160, 3840)], ids=str)
def test_extreme_shapes_equal_the_transcription(size):
    image = noise(*size)
    np.testing.assert_array_equal(resized(image, 64, 48, method="stretch"), resample(image, 64, 48, "bilinear"))


@given(sides, sides, sides, sides, st.sampled_from(["bilinear", "box"]))
def test_crop_is_a_centred_crop_of_the_targets_aspect_and_then_a_stretch(height, width, out_height, out_width, filter):
    image = noise(height, width, 3, height * 1000 + width)
    top, left, part_height, part_width = place((height, width), (out_height, out_width), "crop").source
    assert part_height == height or part_width == width
    assert abs((height - part_height) - 2 * top) <= 1
    assert abs((width - part_width) - 2 * left) <= 1
    if part_height < height:  # one row more would be taller than the target's aspect
        assert (part_height + 1) * out_width > width * out_height
        assert part_height * out_width <= width * out_height or part_height == 1
    part = image[top : top + part_height, left : left + part_width]
    found = resized(image, out_height, out_width, method="crop", filter=filter)
    np.testing.assert_array_equal(found, resample(part, out_height, out_width, filter))


@pytest.mark.parametrize("long_side", [225, 246, 253, 281, 288, 309, 330, 450, 457, 464])
def test_openpis_truncation_leaves_223_of_224(long_side):
    assert place((long_side, long_side), (224, 224)).target == (0, 0, 223, 223)


@pytest.mark.parametrize(
    ("size", "target"),
    [
        ((480, 640), (28, 0, 168, 224)),
        ((180, 320), (49, 0, 126, 224)),
        ((720, 1280), (49, 0, 126, 224)),
        ((256, 256), (0, 0, 224, 224)),
        ((640, 480), (0, 28, 224, 168)),
        ((1, 4000), (111, 0, 1, 224)),
    ],
)
def test_pad_places_known_cameras_where_openpi_does(size, target):
    assert place(size, (224, 224)).target == target


@pytest.mark.parametrize("method", ["pad", "stretch", "crop"])
def test_a_frame_of_the_right_size_is_copied(method):
    image = noise(24, 32)
    np.testing.assert_array_equal(resized(image, 24, 32, method=method), image)


def test_every_pixel_of_the_output_is_written_and_nothing_around_it():
    batch = np.full((3, 30, 40, 3), 9, np.uint8)
    resize_frame(noise(50, 20), batch[1])
    assert (batch[0] == 9).all()
    assert (batch[2] == 9).all()
    top, left, height, width = place((50, 20), (30, 40)).target
    border = batch[1].copy()
    border[top : top + height, left : left + width] = 0
    assert not border.any()


def test_views_that_are_not_contiguous_serve_as_input_and_output():
    image = noise(60, 90)
    wide = np.full((40, 100, 3), 9, np.uint8)
    resize_frame(image[::2, ::3], wide[:, 20:70], method="stretch")
    np.testing.assert_array_equal(wide[:, 20:70], resample(np.ascontiguousarray(image[::2, ::3]), 40, 50, "bilinear"))
    assert (wide[:, :20] == 9).all()
    assert (wide[:, 70:] == 9).all()
    mirrored = resized(image[:, ::-1, ::-1], 20, 30, method="stretch")
    np.testing.assert_array_equal(mirrored, resample(image[:, ::-1, ::-1], 20, 30, "bilinear"))


def test_threads_give_what_one_thread_gives():
    images = [noise(97 + i, 131 + 2 * i, 3, i) for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda image: resized(image, 56, 56), images))
    for image, found in zip(images, together, strict=True):
        np.testing.assert_array_equal(found, resized(image, 56, 56))


@pytest.mark.parametrize(
    ("frame", "out", "options"),
    [
        (np.zeros((4, 4, 3), np.float32), np.zeros((2, 2, 3), np.uint8), {}),
        (np.zeros((4, 4), np.uint8), np.zeros((2, 2, 3), np.uint8), {}),
        (np.zeros((4, 4, 4), np.uint8), np.zeros((2, 2, 3), np.uint8), {}),
        (np.zeros((0, 4, 3), np.uint8), np.zeros((2, 2, 3), np.uint8), {}),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((2, 2, 3), np.uint8), {"method": "letterbox"}),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((2, 2, 3), np.uint8), {"filter": "lanczos"}),
    ],
)
def test_wrong_input_is_refused_before_a_kernel_sees_it(frame, out, options):
    with pytest.raises(SchemaError, match="expected"):
        resize_frame(frame, out, **options)


def photograph(height: int, width: int) -> np.ndarray:
    """Soft clouds of several scales with a few hard edges: the spectrum of a photograph, more or less."""
    rng = np.random.default_rng(5)
    image = np.zeros((height, width, 3))
    for cell in (4, 16, 64, 256):
        small = rng.normal(0, cell**0.7, (height // cell + 2, width // cell + 2, 3))
        image += np.repeat(np.repeat(small, cell, 0), cell, 1)[:height, :width]
    soft = (
        Image.fromarray(np.clip(image + 128, 0, 255).astype(np.uint8))
        .resize((width // 2, height // 2))
        .resize((width, height))
    )
    return np.asarray(soft)


def jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return file.getvalue()


@pytest.mark.parametrize("size", [(1080, 1920), (900, 1600), (1082, 1918), (1200, 1920)], ids=str)
@pytest.mark.parametrize("method", ["pad", "stretch", "crop"])
def test_fast_decoding_is_near_the_exact_pixels_and_in_the_same_place(size, method):
    data = jpeg(photograph(*size))
    exact, fast = np.empty((224, 224, 3), np.uint8), np.empty((224, 224, 3), np.uint8)
    decode_resized(data, exact, method=method)
    decode_resized(data, fast, method=method, fast=True)
    np.testing.assert_array_equal(exact, resized(decode_frame(data), 224, 224, method=method))
    assert not np.array_equal(exact, fast)
    squared = np.mean((exact.astype(float) - fast) ** 2)
    assert 10 * np.log10(255**2 / squared) >= 45.0
    top, left, height, width = place(size, (224, 224), method).target
    fast[top : top + height, left : left + width] = 0
    assert not fast.any()


def test_fast_decoding_of_a_small_image_is_exact():
    data = jpeg(photograph(480, 640))
    exact, fast = np.empty((224, 224, 3), np.uint8), np.empty((224, 224, 3), np.uint8)
    decode_resized(data, exact)
    decode_resized(data, fast, fast=True)
    np.testing.assert_array_equal(exact, fast)


def test_warming_compiles_all_that_a_frame_needs():
    from tasks.kernels.pixels import filter_columns, filter_rows

    warm()
    compiled = len(filter_columns.signatures), len(filter_rows.signatures)
    writable = noise(40, 50).copy()
    for image in (writable, noise(40, 50)):
        for options in ({"method": "pad"}, {"method": "stretch", "filter": "box"}, {"method": "crop"}):
            resized(image, 24, 24, **options)
    assert (len(filter_columns.signatures), len(filter_rows.signatures)) == compiled
