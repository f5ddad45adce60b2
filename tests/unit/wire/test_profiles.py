import contextlib
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import FrameError
from ftd.packing import pack, unpack_map
from ftd.wire.profiles import get_args, get_result, identity_asked, profile_got, profile_put, put_args


@given(st.binary(max_size=100))
def test_what_is_said_is_heard(data: bytes) -> None:
    assert profile_put(unpack_map(pack(put_args(data))), 100) == data
    assert profile_got(unpack_map(pack(get_result(data))), 100) == data
    assert identity_asked(unpack_map(pack(get_args({"device": "x"})))) == {"device": "x"}


def test_none_is_an_answer() -> None:
    assert profile_got(get_result(None), 100) is None


def test_the_bound_is_the_readers() -> None:
    assert len(profile_put(put_args(bytes(100)), 100)) == 100
    with pytest.raises(FrameError, match="a profile of more than 100 bytes"):
        profile_put(put_args(bytes(101)), 100)


def test_zeros_without_end_are_not_inflated() -> None:
    bomb = zlib.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="a profile of more than 100 bytes"):
            profile_put({"profile": bomb}, 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'profile' is NoneType: expected bytes"),
        ({"profile": "text"}, "'profile' is str: expected bytes"),
        ({"profile": b""}, "'profile' is cut short: expected one zlib stream"),
        ({"profile": b"no zlib"}, "'profile' is not deflated"),
        ({"profile": zlib.compress(b"abc")[:-1]}, "'profile' is cut short"),
        ({"profile": zlib.compress(b"abc") + b"!"}, "'profile' has something behind it"),
    ],
)
def test_nonsense_is_refused_at_both_ends(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        profile_put(fields, 100)
    with pytest.raises(FrameError, match=message):
        profile_got(fields, 100)


@given(st.binary(max_size=50))
def test_any_bytes_are_refused_or_bounded(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert len(profile_put({"profile": data}, 10)) <= 10


def test_an_identity_that_is_none_is_refused() -> None:
    for args in ({}, {"identity": None}, {"identity": []}):
        with pytest.raises(FrameError, match="'identity' is"):
            identity_asked(args)
