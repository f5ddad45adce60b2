from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.packing import pack, unpack, unpack_map

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(VALUES)
def test_a_view_unpacks_as_its_bytes_do(value: Any) -> None:
    assert unpack(memoryview(pack(value))) == value


def test_text_and_bytes_are_told_apart() -> None:
    assert unpack(pack(["a", b"a"])) == ["a", b"a"]


def test_maps_keep_their_order() -> None:
    assert list(unpack_map(pack({"b": 1, "a": 2}))) == ["b", "a"]
    assert pack({"b": 1, "a": 2}) != pack({"a": 2, "b": 1})


@given(VALUES, st.data())
def test_bytes_that_are_cut_short_are_refused(value: Any, data: st.DataObject) -> None:
    packed = pack(value)
    with pytest.raises(ValueError):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(VALUES, st.binary(min_size=1))
def test_bytes_behind_the_value_are_refused(value: Any, rest: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(pack(value) + rest)


@given(st.binary(max_size=64))
def test_garbage_is_a_value_or_a_value_error(data: bytes) -> None:
    try:
        unpack(data)
    except ValueError as error:
        assert str(error).startswith("no msgpack: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",  # never used by the format
        msgpack.packb({1: "a"}),  # a key that is no text
        msgpack.packb({"a": {2: 3}}),
        b"\xa1\xff",  # text that is not UTF-8
        b"\x91" * 100_000,  # nested deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # a list that announces four billion elements
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb([{"a": msgpack.ExtType(5, b"x")}]),
    ],
)
def test_what_no_peer_writes_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no msgpack"):
        unpack(data)


@pytest.mark.parametrize(("value", "found"), [([], "list"), (None, "NoneType"), (3, "int"), ("a", "str")])
def test_a_map_is_asked_for(value: Any, found: str) -> None:
    with pytest.raises(ValueError, match=f"expected a map with text keys, found {found}"):
        unpack_map(pack(value))


def test_byte_keys_are_no_text() -> None:
    with pytest.raises(ValueError, match="text keys"):
        unpack_map(msgpack.packb({b"a": 1}))
