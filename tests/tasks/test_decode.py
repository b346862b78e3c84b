import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from schemas.errors import Reason, SourceError
from tasks.decode import MAX_PIXELS, decode_depth, decode_frame, decode_labels, encode_jpeg, frame_size


def picture(height: int = 60, width: int = 84) -> Image.Image:
    rng = np.random.default_rng(3)
    smooth = np.cumsum(rng.normal(0, 4, (height, width, 3)), axis=1) + 128
    return Image.fromarray(np.clip(smooth, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, scanlines: bytes) -> bytes:
    """Write a PNG by hand, of kinds that Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(scanlines)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def refused(data: bytes, decode=decode_frame) -> Reason:
    with pytest.raises(SourceError, match="^expected") as caught:
        decode(data)
    assert " at 0x" not in caught.value.message
    return caught.value.reason


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x112] = orientation
    return tags


ORDINARY = {
    "jpeg": encoded(picture(), "JPEG", quality=90),
    "jpeg q20": encoded(picture(), "JPEG", quality=20),
    "jpeg 4:4:4": encoded(picture(), "JPEG", subsampling=0),
    "jpeg 4:2:2": encoded(picture(), "JPEG", subsampling=1),
    "jpeg odd size": encoded(picture(37, 51), "JPEG"),
    "jpeg progressive": encoded(picture(), "JPEG", progressive=True),
    "jpeg grey": encoded(picture().convert("L"), "JPEG"),
    "jpeg stored as RGB": encoded(picture(), "JPEG", keep_rgb=True),
    "jpeg with restart markers": encoded(picture(), "JPEG", restart_marker_blocks=2),
    "jpeg turned by its tag": encoded(picture(), "JPEG", exif=exif(6)),
    "jpeg followed by junk": encoded(picture(), "JPEG") + b"junk",
    "jpeg of 1 pixel": encoded(picture(1, 1), "JPEG"),
    "png": encoded(picture(), "PNG"),
    "png alpha": encoded(picture().convert("RGBA"), "PNG"),
    "png grey": encoded(picture().convert("L"), "PNG"),
    "png grey alpha": encoded(picture().convert("LA"), "PNG"),
    "png palette": encoded(picture().convert("P"), "PNG"),
    "png palette with a transparent colour": encoded(picture().convert("P"), "PNG", transparency=3),
    "png 1 bit": encoded(picture().convert("1"), "PNG"),
    "png 16-bit colour": png(2, 1, 16, 2, b"\0" + bytes.fromhex("0180 7fff ff00 8000 00ff fffe".replace(" ", ""))),
    "webp": encoded(picture(), "WEBP", quality=80),
    "webp lossless": encoded(picture(), "WEBP", lossless=True),
    "webp alpha": encoded(picture().convert("RGBA"), "WEBP"),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_images_equal_pillows_rgb(name):
    data = ORDINARY[name]
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    found = decode_frame(data)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.uint8
    assert frame_size(data) == expected.shape[:2]
    np.testing.assert_array_equal(decode_frame(memoryview(data)), expected)
    out = np.zeros(expected.shape, np.uint8)
    decode_frame(data, out)
    np.testing.assert_array_equal(out, expected)


def test_a_harmless_oddity_that_simplejpeg_refuses_is_left_to_pillow():
    data = bytearray(ORDINARY["jpeg"])
    data[11] = 9  # JFIF revision 9.01
    np.testing.assert_array_equal(decode_frame(bytes(data)), decode_frame(ORDINARY["jpeg"]))


def bomb_jpeg() -> bytes:
    data = bytearray(ORDINARY["jpeg"])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 30000, 30000)
    return bytes(data)


def bomb_webp(kind: bytes) -> bytes:
    size = (16383 - 1).to_bytes(3, "little")
    body = {
        b"VP8X": b"\0\0\0\0" + size + size,
        b"VP8L": b"\x2f" + ((16382 << 14) | 16382).to_bytes(4, "little") + bytes(5),
        b"VP8 ": b"\x30\x01\x00\x9d\x01\x2a" + (16383).to_bytes(2, "little") * 2,
    }[kind]
    chunk = kind + len(body).to_bytes(4, "little") + body
    return b"RIFF" + (4 + len(chunk)).to_bytes(4, "little") + b"WEBP" + chunk


JPEG, PNG, WEBP = ORDINARY["jpeg"], ORDINARY["png"], ORDINARY["webp"]
HOSTILE = {
    "nothing": (b"", Reason.TRUNCATED),
    "a few bytes": (JPEG[:5], Reason.TRUNCATED),
    "jpeg cut in its header": (JPEG[:150], Reason.TRUNCATED),
    "jpeg cut in the middle": (JPEG[: len(JPEG) // 2], Reason.TRUNCATED),
    "jpeg without its last two bytes": (JPEG[:-2], Reason.TRUNCATED),
    "jpeg closed early": (JPEG[: len(JPEG) // 2] + b"\xff\xd9", Reason.DECODE),
    "png cut in its header": (PNG[:20], Reason.TRUNCATED),
    "png cut in the middle": (PNG[: len(PNG) // 2], Reason.TRUNCATED),
    "png without its end": (PNG[: len(PNG) // 2] + bytes(50), Reason.TRUNCATED),
    "png with a broken header": (PNG[:24] + b"\x09" + PNG[25:], Reason.DECODE),
    "webp cut in its header": (WEBP[:20], Reason.TRUNCATED),
    "webp cut in the middle": (WEBP[: len(WEBP) // 2], Reason.TRUNCATED),
    "zeros": (bytes(5000), Reason.UNSUPPORTED),
    "a web page": (b"<!DOCTYPE html><html>404</html>", Reason.UNSUPPORTED),
    "a bitmap named .jpg": (encoded(picture(), "BMP"), Reason.UNSUPPORTED),
    "a gif named .png": (encoded(picture(), "GIF"), Reason.UNSUPPORTED),
    "jpeg cmyk": (encoded(picture().convert("CMYK"), "JPEG"), Reason.UNSUPPORTED),
    "png 16-bit grey": (encoded(Image.fromarray(np.arange(999, 2199, dtype=np.uint16).reshape(30, 40)), "PNG"), Reason.UNSUPPORTED),
    "jpeg header bomb": (bomb_jpeg(), Reason.TOO_LARGE),
    "png header bomb": (png(30000, 30000, 8, 2, b"\0"), Reason.TOO_LARGE),
    "png of one endless row": (png(60_000_000, 1, 8, 2, b"\0"), Reason.TOO_LARGE),
    "webp header bomb": (bomb_webp(b"VP8X"), Reason.TOO_LARGE),
    "webp lossless header bomb": (bomb_webp(b"VP8L"), Reason.TOO_LARGE),
    "webp lossy header bomb": (bomb_webp(b"VP8 "), Reason.TOO_LARGE),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_end_in_a_reason(name):
    data, reason = HOSTILE[name]
    assert refused(data) == reason


def test_a_header_bomb_allocates_next_to_nothing():
    import tracemalloc

    tracemalloc.start()
    try:
        for name in HOSTILE:
            if "bomb" in name:
                refused(HOSTILE[name][0])
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert MAX_PIXELS * 3 < 2**28


@given(st.sampled_from(["jpeg", "jpeg progressive", "png", "png palette", "webp", "webp lossless"]), st.data())
def test_damaged_bytes_give_pixels_or_a_reason_and_never_anything_else(name, draw):
    data = bytearray(ORDINARY[name])
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    stop = draw.draw(st.integers(0, len(data)) | st.just(len(data)))
    for decode in (decode_frame, decode_labels, decode_depth):
        try:
            found = decode(bytes(data[:stop]))
        except SourceError:
            continue
        assert found.shape[0] * found.shape[1] <= MAX_PIXELS


def test_an_image_of_another_size_than_its_place_is_refused_and_leaves_it_alone():
    out = np.full((10, 10, 3), 5, np.uint8)
    for name in ("jpeg", "png", "webp"):
        with pytest.raises(SourceError) as caught:
            decode_frame(ORDINARY[name], out)
        assert caught.value.reason == Reason.WRONG_SHAPE
    assert (out == 5).all()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((50, 80), (100, 160)),
        ((40, 60), (100, 160)),
        ((101, 40), (400, 640)),
        ((200, 320), (400, 640)),
        ((100, 160), (200, 320)),
    ],
)
def test_fast_decoding_leaves_at_least_twice_the_target_on_both_sides(target, expected):
    data = encoded(picture(400, 640), "JPEG")
    assert decode_frame(data, fast_target=target).shape == (*expected, 3)
    assert decode_frame(encoded(picture(400, 640), "PNG"), fast_target=target).shape == (400, 640, 3)


def test_jpeg_encoding_keeps_full_colour_resolution_and_is_deterministic():
    frame = np.asarray(picture())
    data = encode_jpeg(frame, 95)
    assert data == encode_jpeg(frame.copy(), 95)
    assert Image.open(io.BytesIO(data)).layer == [(1, 1, 1, 0), (2, 1, 1, 1), (3, 1, 1, 1)]
    assert np.abs(decode_frame(data).astype(int) - frame).mean() < 3
    assert len(encode_jpeg(frame, 50)) < len(data)
    assert encode_jpeg(frame[:, ::-1], 95) != data


def test_carla_depth_is_decoded_to_metres():
    """Red is the low byte: (R + 256 G + 65536 B) / (2^24 - 1) * 1000, from CARLA's sensors reference."""
    pixels = np.array([[[0, 0, 0], [255, 255, 255], [1, 0, 0], [0, 0, 128]]], np.uint8)
    metres = decode_depth(encoded(Image.fromarray(pixels), "PNG"))
    np.testing.assert_allclose(metres, [[0.0, 1000.0, 1000 / 16777215, 128 * 65536 / 16777215 * 1000]], rtol=1e-6)
    assert metres.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_depth_is_linear_to_its_far_plane(dtype):
    greatest = np.iinfo(dtype).max
    data = encoded(Image.fromarray(np.array([[0, greatest // 5, greatest]], dtype)), "PNG")
    np.testing.assert_allclose(decode_depth(data), [[0, 10, 50]], rtol=1e-6)
    np.testing.assert_allclose(decode_depth(data, grey_far_m=100.0), [[0, 20, 100]], rtol=1e-6)


def test_labels_come_as_stored():
    ids = np.arange(24, dtype=np.uint8).reshape(4, 6)
    red = np.stack([ids, ids * 0 + 77, ids * 0 + 88], axis=2)
    palette = Image.fromarray(ids, "L").convert("P")
    palette.putpalette([value for index in range(256) for value in (255 - index, index, 0)])
    palette.frombytes(ids.tobytes())
    for image in (Image.fromarray(red), Image.fromarray(ids), palette):
        found = decode_labels(encoded(image, "PNG"))
        np.testing.assert_array_equal(found, ids)
        assert found.dtype == np.uint8
    deep = ids.astype(np.uint16) * 1000
    np.testing.assert_array_equal(decode_labels(encoded(Image.fromarray(deep), "PNG")), deep)


@pytest.mark.parametrize("decode", [decode_depth, decode_labels])
def test_depth_and_labels_refuse_what_has_no_values(decode):
    assert refused(encoded(picture().convert("LA"), "PNG"), decode) == Reason.UNSUPPORTED
    assert refused(PNG[:100], decode) == Reason.TRUNCATED
