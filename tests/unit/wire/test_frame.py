"""The frame codec: golden bytes, round trips, and every way of being no frame."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import FrameError
from ftd.packing import pack
from ftd.wire import frame

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
MAPS = st.dictionaries(st.text(), VALUES, max_size=6)


def decode(data: bytes) -> dict[str, object]:
    length = frame.payload_bytes(data[: frame.HEADER_BYTES])
    return frame.decode(data[frame.HEADER_BYTES :], length)


def test_golden_bytes() -> None:
    data = frame.encode({"v": [1, 0], "op": "status", "args": {}})
    assert data.hex() == "0000001683a176920100a26f70a6737461747573a46172677380"
    assert decode(data) == {"v": [1, 0], "op": "status", "args": {}}


@given(MAPS)
def test_round_trip(fields: dict[str, object]) -> None:
    assert decode(frame.encode(fields)) == fields


@given(st.binary(max_size=64))
def test_random_bytes_are_a_map_or_a_frame_error(data: bytes) -> None:
    try:
        fields = decode(data)
    except FrameError:
        return
    assert isinstance(fields, dict)


def test_the_largest_frame_passes_and_one_byte_more_does_not() -> None:
    overhead = len(pack({"x": b"\0" * 70000})) - 70000
    largest = {"x": b"\0" * (frame.MAX_FRAME_BYTES - overhead)}
    data = frame.encode(largest)
    assert len(data) == frame.HEADER_BYTES + frame.MAX_FRAME_BYTES
    assert decode(data) == largest
    with pytest.raises(FrameError, match=f"{frame.MAX_FRAME_BYTES + 1} payload bytes"):
        frame.encode({"x": largest["x"] + b"\0"})


@pytest.mark.parametrize("length", [0, frame.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_bad_length_is_refused_by_the_header_alone(length: int) -> None:
    with pytest.raises(FrameError, match=f"a frame of {length} payload bytes: expected 1 to 1048576"):
        frame.payload_bytes(struct.pack(">I", length))


def test_a_textual_protocol_is_refused_by_the_header_alone() -> None:
    with pytest.raises(FrameError):
        frame.payload_bytes(b"GET ")


def test_what_is_cut_short_is_named() -> None:
    with pytest.raises(FrameError, match="cut short: 3 of 4 header bytes"):
        frame.payload_bytes(b"\0\0\0")
    with pytest.raises(FrameError, match="cut short: 1 of 9 payload bytes"):
        frame.decode(b"\x80", 9)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x81",
        b"\x93\x01\x02\x03",
        pack({1: 2}),
        pack({b"k": 1}),
        b"\x80\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1\xff\x01",
    ],
    ids=["reserved", "cut", "list", "int-key", "bytes-key", "trailing", "huge-array", "deep", "no-utf8"],
)
def test_what_is_no_map_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        frame.decode(payload, len(payload))
