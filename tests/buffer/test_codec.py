"""The wire format: what goes in comes out, and nothing else ever does."""

import struct

import numpy as np
import pytest
import xxhash
from buffer_examples import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from buffer import NOT_SAMPLED, FormatError, Status, Trajectory, decode, encode

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def trajectories(draw):
    tokens = draw(st.integers(0, 40))
    mask_T = draw(arrays(np.bool_, tokens))
    versions_T = draw(arrays(np.int32, tokens, elements=st.integers(0, 2**31 - 1)))
    return Trajectory(
        tokens=draw(arrays(np.int32, tokens)),
        loss_mask=mask_T,
        logprobs=draw(arrays(np.float32, tokens)),
        versions=np.where(mask_T, versions_T, np.int32(NOT_SAMPLED)),
        rewards=draw(arrays(np.float32, draw(st.integers(0, 5)))),
        reward=draw(st.floats(allow_nan=False)),
        status=draw(st.sampled_from(Status)),
        task=draw(st.integers(0, 2**60)),
        group=draw(st.text()),
        index=draw(st.integers(0, 1000)),
        sampler=draw(st.text()),
        timings=draw(st.dictionaries(st.text(), st.floats(0, 1e6), max_size=3)),
        metadata=draw(st.dictionaries(st.text(), _JSON, max_size=3)),
    )


def fields_of(example):
    """Everything in a trajectory, arrays bit by bit (NaN included)."""
    values = {name: getattr(example, name) for name in Trajectory.__slots__}
    return {name: (v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for name, v in values.items()}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trajectories())
def test_a_trajectory_comes_back_as_it_was(example):
    assert fields_of(decode(encode(example))) == fields_of(example)


def test_strided_arrays_are_encoded_in_order():
    tokens_T = np.arange(12, dtype=np.int32)[::2]
    example = trajectory("g", 0)
    strided = Trajectory(**{name: getattr(example, name) for name in Trajectory.__slots__} | {"tokens": tokens_T})
    assert decode(encode(strided)).tokens.tolist() == [0, 2, 4, 6, 8, 10]


def test_decoding_copies_nothing_and_cannot_be_written_to():
    payload = encode(trajectory("g", 0, tokens=1000))
    decoded = decode(payload)
    received = np.frombuffer(payload, np.uint8)
    for name in ("tokens", "logprobs", "versions", "rewards", "loss_mask"):
        assert np.shares_memory(getattr(decoded, name), received)
        assert not getattr(decoded, name).flags.writeable


@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_is_a_format_error(bit):
    payload = encode(trajectory("group", 1))
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 1 << bit
        with pytest.raises(FormatError):
            decode(damaged)


def test_any_truncation_or_extension_is_a_format_error():
    payload = encode(trajectory("group", 1))
    for length in range(len(payload)):
        with pytest.raises(FormatError):
            decode(payload[:length])
    with pytest.raises(FormatError):
        decode(payload + b"\0")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_are_a_format_error(noise, with_magic):
    with pytest.raises(FormatError):
        decode((encode(trajectory("g", 0))[:8] if with_magic else b"") + noise)


def sealed(payload):
    """``payload`` with the checksum that fits it: what only a wrong writer could produce."""
    checksum = xxhash.xxh3_64_intdigest(payload[:24] + payload[32:])
    return payload[:24] + struct.pack("<Q", checksum) + payload[32:]


@pytest.mark.parametrize(
    "metadata",
    [b"", b"[]", b"{}", b'{"reward":"x"}', b"\xff\xfe", b"[" * 100_000, b'{"reward":1,"status":"asleep"}', b"1e999"],
)
def test_metadata_that_is_not_a_trajectorys_is_a_format_error(metadata):
    with pytest.raises(FormatError, match="no trajectory"):
        decode(sealed(struct.pack("<4sHHIIIIQ", b"HDRT", 2, 0, 0, 0, len(metadata), 0, 0) + metadata))


def test_a_mask_byte_other_than_0_or_1_is_a_format_error():
    payload = bytearray(encode(trajectory("g", 0, tokens=6)))
    payload[32 + 3 * 4 * 6 + 2 * 4] = 7
    with pytest.raises(FormatError, match="loss mask holds the byte 7"):
        decode(sealed(bytes(payload)))


def test_another_format_number_is_named():
    payload = bytearray(encode(trajectory("g", 0)))
    payload[4:6] = struct.pack("<H", 3)
    with pytest.raises(FormatError, match="format number 3, this version of headrace reads 2"):
        decode(payload)


def test_sizes_are_checked_before_anything_is_allocated():
    header = struct.pack("<4sHHIIIIQ", b"HDRT", 2, 0, 2**32 - 1, 2**32 - 1, 2**20, 0, 0)
    with pytest.raises(FormatError, match="header announces"):
        decode(header + bytes(100))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"array": np.zeros(2)}, "are not JSON"),
        ({"scalar": np.float32(1)}, "float\\(x\\)"),
        ({"text": "x" * (1 << 20)}, "at most"),
    ],
)
def test_metadata_that_cannot_be_written_is_refused_by_the_writer(metadata, message):
    example = trajectory("g", 0)
    example.metadata.update(metadata)
    with pytest.raises(ValueError, match=message):
        encode(example)
