"""TFRecord and Example: what an encoder wrote comes back; what is broken is refused with a reason."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Reason, SourceError
from tasks.tfrecord import (
    byte_values,
    check_payload,
    decode_varints,
    find_features,
    float_values,
    int64_values,
    masked_crc32c,
    parse_example,
    payload_nbytes,
    read_varint,
)
from tests.tasks.example_encoder import (
    bytes_list,
    delimited,
    example,
    float_list,
    int64_list,
    mask,
    record,
    varint,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def test_the_checksum_is_that_of_the_standard_masked_as_leveldb_does():
    assert mask(0xE3069283) == masked_crc32c(b"123456789")  # crc32c of RFC 3720


@given(st.lists(INT64))
def test_whole_numbers_come_back_in_both_encodings(values):
    for packed in (True, False):
        found = int64_values(int64_list(values, packed=packed))
        assert found.dtype == np.int64
        assert found.tolist() == values


@given(st.lists(st.integers(0, 127)))
def test_flags_and_small_numbers_come_back(values):
    assert int64_values(int64_list(values)).tolist() == values


@given(st.lists(FLOAT32))
def test_floats_come_back_in_both_encodings(values):
    for packed in (True, False):
        found = float_values(float_list(values, packed=packed))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, np.array(values, np.float32))


@given(st.lists(st.binary(max_size=200)))
def test_strings_come_back(values):
    assert [bytes(value) for value in byte_values(bytes_list(values))] == values


@given(st.dictionaries(st.text(max_size=20), st.lists(st.binary(max_size=300), max_size=4), max_size=8))
def test_an_example_comes_back_under_its_keys(features):
    found = parse_example(example({key: bytes_list(values) for key, values in features.items()}))
    assert {key: [bytes(value) for value in byte_values(feature)] for key, feature in found.items()} == features


def test_a_list_written_in_two_pieces_is_one_list():
    assert int64_values(int64_list([1, -2]) + int64_list([300], packed=False)).tolist() == [1, -2, 300]


def test_an_empty_feature_is_an_empty_list_of_any_kind():
    found = parse_example(example({"none": b""}))
    assert byte_values(found["none"]) == []
    assert len(float_values(found["none"])) == len(int64_values(found["none"])) == 0


def test_fields_that_are_not_known_are_skipped():
    entry = (
        varint(7 << 3)
        + varint(2**40)
        + delimited(1, b"a")
        + varint(9 << 3 | 5)
        + b"abcd"
        + delimited(2, int64_list([5]))
    )
    payload = delimited(3, b"later") + delimited(1, delimited(1, entry)) + varint(4 << 3 | 1) + bytes(8)
    assert int64_values(parse_example(payload)["a"]).tolist() == [5]


def test_a_walk_over_keys_fetches_no_value():
    images = [bytes([k]) * 50_000 for k in range(3)]
    payload = example({"steps/image": bytes_list(images), "steps/is_first": int64_list([1, 0, 0])})
    fetched = []

    def fetch(at, nbytes):
        fetched.append(nbytes)
        return payload[at : at + nbytes]

    extents = find_features(fetch, len(payload))
    start, stop = extents["steps/is_first"]
    assert int64_values(payload[start:stop]).tolist() == [1, 0, 0]
    assert sum(fetched) < 300


def test_a_list_of_another_kind_is_refused():
    for decode, feature in (
        (float_values, int64_list([1])),
        (int64_values, bytes_list([b"1"])),
        (byte_values, float_list([1])),
    ):
        with pytest.raises(SourceError, match="expected a .*_list, found a"):
            decode(feature)


@pytest.mark.parametrize("data", [b"\x80", b"\xff" * 11, b"\x01\x80", b"\x80" * 10 + b"\x01"])
def test_numbers_that_do_not_end_or_are_too_long_are_refused(data):
    with pytest.raises(SourceError, match="found"):
        decode_varints(data)
    with pytest.raises(SourceError, match="found"):
        read_varint(data, len(data) - 1 if data == b"\x01\x80" else 0)


@given(st.binary(max_size=120))
def test_any_bytes_are_parsed_or_refused(data):
    for decode in (parse_example, byte_values, float_values, int64_values, decode_varints):
        with contextlib.suppress(SourceError):
            decode(data)


@given(st.data())
def test_a_damaged_example_is_parsed_or_refused(data):
    payload = bytearray(
        example({"steps/a": int64_list([1, 300]), "steps/b": bytes_list([b"x" * 20]), "c": float_list([1.5])})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    features = {}
    with contextlib.suppress(SourceError):
        features = parse_example(payload)
    for feature in features.values():
        for decode in (byte_values, float_values, int64_values):
            with contextlib.suppress(SourceError):
                decode(feature)


def test_a_key_of_a_megabyte_is_refused():
    with pytest.raises(SourceError, match="a key of at most") as caught:
        parse_example(example({"k" * 2**20: b""}))
    assert caught.value.reason == Reason.TOO_LARGE


# -- framing -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_a_record_comes_back(payload):
    data = record(payload)
    assert payload_nbytes(data[:12], len(data)) == len(payload)
    check_payload(data[12:-4], data[-4:])


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_flipped_bit_is_found_wherever_it_is(payload, data):
    damaged = bytearray(record(payload))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SourceError, match="checksum"):
        payload_nbytes(damaged[:12], len(damaged))
        check_payload(damaged[12:-4], damaged[-4:])


@given(st.binary(max_size=60), st.data())
def test_a_record_cut_short_is_truncated(payload, data):
    whole = record(payload)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(SourceError) as caught:
        payload_nbytes(cut[:12], len(cut))
    assert caught.value.reason == Reason.TRUNCATED


def test_a_length_beyond_what_protobuf_allows_is_refused_before_memory_is():
    length = struct.pack("<Q", 2**40)
    with pytest.raises(SourceError, match="at most") as caught:
        payload_nbytes(length + struct.pack("<I", masked_crc32c(length)), 2**50)
    assert caught.value.reason == Reason.TOO_LARGE
