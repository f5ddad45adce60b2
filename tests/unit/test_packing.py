import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.packing import no_collection, pack, unpack, unpack_map

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


# --- the collector -----------------------------------------------------------------------------------------------


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """Generations that the collector looked at since, where a pass over the young is due after 1,000 new objects, and
    over older ones whenever that comes."""
    before, seen = gc.get_threshold(), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.set_threshold(1000, 1, 1)
    gc.collect()
    for _ in range(3):
        gc.collect(0)
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def _objects(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def test_many_new_objects_set_off_a_pass_over_them_alone(passes: list[int]) -> None:
    with no_collection():
        kept = _objects(10_000)
        assert passes == []
    kept += _objects(100)
    assert passes == [0]


def test_a_few_set_off_none(passes: list[int]) -> None:
    with no_collection():
        kept = _objects(10)
    assert passes == [] and kept


def test_a_collector_that_was_off_stays_off_and_unused(passes: list[int]) -> None:
    gc.disable()
    try:
        with no_collection():
            kept = _objects(10_000)
        assert not gc.isenabled()
        assert passes == [] and kept
    finally:
        gc.enable()


def test_one_that_is_never_to_run_by_itself_does_not(passes: list[int]) -> None:
    gc.set_threshold(0)
    with no_collection():
        kept = _objects(10_000)
    assert passes == [] and kept


def test_a_child_collects_whatever_other_threads_of_its_parent_do(in_child: Callable[..., Any]) -> None:
    within, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with no_collection():
            within.set()
            assert leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert within.wait(60)
        assert not gc.isenabled()
        assert in_child(gc.isenabled)
    finally:
        leave.set()
        thread.join()
    assert gc.isenabled()


def test_a_child_that_is_forked_within_is_within(in_child: Callable[..., Any]) -> None:
    with no_collection():
        assert not in_child(gc.isenabled)
