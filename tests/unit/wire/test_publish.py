"""What a process says to have its tensors published."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import FrameError
from ftd.packing import pack, unpack_map
from ftd.tensorspec import DTYPE_BITS, TensorSpec
from ftd.wire import frame
from ftd.wire.publish import (
    DIGEST_BYTES,
    MAX_FILES_BYTES,
    MAX_PARTS,
    MAX_TEXT,
    PART_ALIGNMENT,
    PUBLISH_BEGIN,
    PUBLISH_COMMIT,
    PUBLISH_DESCRIBE,
    PUBLISH_LANE,
    PUBLISH_WAIT,
    TOKEN_BYTES,
    Begin,
    Describe,
    Description,
    Part,
    Published,
    Put,
    Staging,
    is_file_name,
    lane_args,
    lane_of,
    places,
    token_args,
    token_of,
)

TOKEN = b"t" * TOKEN_BYTES
DIGEST = b"d" * DIGEST_BYTES
SIZE = st.integers(0, (1 << 62) - 1)
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
PART = st.builds(
    Part, SIZE, SIZE, SIZE.filter(bool), st.just(b"") | st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
)  # fmt: skip
PUT = st.builds(Put, st.lists(PART, max_size=4).map(tuple))
STAGING = st.builds(Staging, st.just(TOKEN), TEXT, SIZE, *[st.integers(1, 100)] * 3)
PUBLISHED = st.builds(Published, SIZE, TEXT, TEXT, SIZE, SIZE)
BYTE_TYPES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
SPEC = st.builds(
    TensorSpec, TEXT, st.sampled_from(BYTE_TYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)
)  # fmt: skip
DESCRIPTION = st.builds(
    Description,
    st.lists(SPEC, max_size=4, unique_by=lambda spec: spec.name).map(tuple),
    st.just({}),
    TEXT,
    TEXT,
    st.none() | st.lists(TEXT, max_size=2).map(tuple),
    st.dictionaries(st.sampled_from(["config.json", "a/b.json"]), st.binary(max_size=9)),
)
#: What msgpack can carry, keyed as requests are.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=20) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
SMALL = Description(
    (TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "F32", (2, 3))), {"b": "a"}, "t:1", "s", ("l.*",), {"c": b"x"}
)


def test_golden_bytes() -> None:
    """docs/format.md."""
    assert pack(Begin(300, 5).to_args()) == b"\x82\xa5bytes\xcd\x01\x2c\xabdescription\x05"
    assert pack(token_args(TOKEN)) == b"\x81\xa5token\xc4\x10" + TOKEN
    assert pack(Staging(TOKEN, "/s", 7, 3, 2, 4096).to_result()) == (
        b"\x86\xa5token\xc4\x10" + TOKEN + b"\xa4name\xa2/s\xa5inode\x07\xa5lanes\x03\xa5slots\x02"
        b"\xaaslot_bytes\xcd\x10\x00"
    )
    assert pack(Describe(TOKEN, 5, DIGEST).to_args()) == (
        b"\x83\xa5token\xc4\x10" + TOKEN + b"\xa5bytes\x05\xa6digest\xc4\x10" + DIGEST
    )
    assert pack(lane_args(TOKEN, 3)) == b"\x82\xa5token\xc4\x10" + TOKEN + b"\xa4lane\x03"
    assert frame.encode(Put((Part(3, 0, 24, b""), Part(3, 24, 8, DIGEST))).to_map()) == (
        b"\x00\x00\x00\x24\x81\xa5parts\x92\x94\x03\x00\x18\xc4\x00\x94\x03\x18\x08\xc4\x10" + DIGEST
    )
    assert frame.encode(Put(()).to_map()) == b"\x00\x00\x00\x08\x81\xa5parts\x90"
    assert SMALL.encode() == (
        b"\x86\xa7tensors\x92\x93\xa1a\xa3F32\x92\x02\x03\x93\xa1b\xa3F32\x92\x02\x03\xa4ties\x81\xa1b\xa1a"
        b"\xa9transform\xa3t:1\xa6source\xa1s\xa6layers\x91\xa3l.*\xa5files\x81\xa1c\xc4\x01x"
    )
    assert pack(Published(1, "f", "d", 2, 24).to_result()) == (
        b"\x85\xaageneration\x01\xabfingerprint\xa1f\xa6digest\xa1d\xa7tensors\x02\xa5bytes\x18"
    )
    assert (PUBLISH_BEGIN, PUBLISH_WAIT, PUBLISH_DESCRIBE, PUBLISH_LANE, PUBLISH_COMMIT) == (
        "publish_begin", "publish_wait", "publish_describe", "publish_lane", "publish_commit",
    )  # fmt: skip


def carried(fields: dict[str, Any]) -> dict[str, Any]:
    return unpack_map(pack(fields))


@given(st.builds(Begin, SIZE, SIZE), STAGING, PUT, PUBLISHED)
def test_what_is_said_is_heard(begin: Begin, staging: Staging, put: Put, published: Published) -> None:
    assert Begin.from_args(carried(begin.to_args())) == begin
    assert token_of(carried(token_args(TOKEN))) == TOKEN
    assert Staging.from_result(carried(staging.to_result())) == staging
    assert Put.from_map(carried(put.to_map())) == put
    assert lane_of(carried(lane_args(TOKEN, 7))) == 7
    assert Published.from_result(carried(published.to_result())) == published


@given(DESCRIPTION)
def test_what_is_described_is_understood(description: Description) -> None:
    assert Description.decode(description.encode()) == description


def test_ties_are_described_and_do_not_travel() -> None:
    assert Description.decode(SMALL.encode()) == SMALL
    assert SMALL.tensor_bytes == 24


@pytest.mark.parametrize(
    "hear",
    [
        Begin.from_args, token_of, lane_of, Staging.from_result, Describe.from_args, Put.from_map,
        Published.from_result,
    ],
)  # fmt: skip
@given(st.dictionaries(TEXT | st.sampled_from(["token", "bytes", "parts", "slot", "digest", "name"]), ANYTHING))
def test_whatever_is_said_is_understood_or_refused(
    hear: Callable[[dict[str, Any]], object], fields: dict[str, Any]
) -> None:
    with contextlib.suppress(FrameError):
        hear(fields)


PLAUSIBLE = st.fixed_dictionaries(
    {
        "tensors": ANYTHING | st.lists(st.tuples(TEXT, st.sampled_from(BYTE_TYPES), st.just([2]))),
        "ties": ANYTHING | st.dictionaries(TEXT, TEXT),
        "transform": TEXT | ANYTHING,
        "source": TEXT,
        "layers": st.none() | ANYTHING,
        "files": ANYTHING | st.dictionaries(TEXT, st.binary()),
    }
)


@given(st.binary(max_size=60) | PLAUSIBLE.map(pack) | st.dictionaries(TEXT, ANYTHING).map(pack))
def test_whatever_is_described_is_understood_or_refused(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        Description.decode(data)


def changed(**values: Any) -> bytes:
    return pack(unpack_map(SMALL.encode()) | values)


@pytest.mark.parametrize(
    "values",
    [
        {"tensors": [["a", "F32", [1]], ["a", "F32", [1]]], "ties": {}},
        {"tensors": [["a", "F33", [1]]], "ties": {}},
        {"tensors": [["a", "F32", [-1]]], "ties": {}},
        {"tensors": [["a", "F32", [True]]], "ties": {}},
        {"tensors": [["a", "F4", [3]]], "ties": {}},
        {"tensors": [["a", "F32", [1 << 40, 1 << 40]]], "ties": {}},
        {"tensors": [["a", "F32", 7]], "ties": {}},
        {"tensors": [[b"a", "F32", [7]]], "ties": {}},
        {"ties": {"b": "c"}},
        {"ties": {"b": "b"}},
        {"ties": {"a": "b", "b": "a"}},
        {"tensors": [["a", "F32", [2]], ["b", "F32", [1]]]},
        {"tensors": [["a", "F32", [1]], ["b", "I32", [1]]]},
        {"tensors": [["a", "F32", [0]], ["b", "F32", [0]]]},
        {"ties": [["b", "a"]]},
        {"transform": None},
        {"source": "x" * (MAX_TEXT + 1)},
        {"layers": "l"},
        {"layers": [1]},
        {"files": {"../c": b""}},
        {"files": {"/c": b""}},
        {"files": {"c": "text"}},
        {"files": []},
        {"files": {"a": bytes(MAX_FILES_BYTES), "b": b"x"}},
    ],
)
def test_a_description_that_contradicts_itself_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="a description that cannot be read"):
        Description.decode(changed(**values))


def test_another_description_than_the_one_that_was_told_is_refused() -> None:
    told = Describe.of(TOKEN, b"abc")
    told.check(b"abc")
    for data in (b"abd", b"ab", b"abcd"):
        with pytest.raises(FrameError, match="a description of 3 bytes whose digest differs"):
            told.check(data)


@pytest.mark.parametrize(
    "part",
    [
        [0, 0, 0, DIGEST], [0, 0, -1, DIGEST], [0, 0, 1, DIGEST[1:]], [0, 0, 1, "d" * 16], [True, 0, 1, DIGEST],
        [0, 0, 1 << 62, DIGEST], [0, 0, 1], 7,
    ],
)  # fmt: skip
def test_a_part_that_is_none_is_refused(part: object) -> None:
    with pytest.raises(FrameError, match="'parts'"):
        Put.from_map({"parts": [part]})


def test_more_parts_than_a_frame_holds_are_refused_and_as_many_fit() -> None:
    largest = (1 << 62) - 1
    full = Put((Part(largest, largest, largest, DIGEST),) * MAX_PARTS)
    assert Put.from_map(full.to_map()) == full
    assert len(frame.encode(full.to_map())) <= frame.MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="'parts'"):
        Put.from_map(Put(full.parts * 2).to_map())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_parts_lie_one_behind_the_other_each_aligned(sizes: list[int]) -> None:
    *starts, end = places(sizes)
    for start, size, then in zip(starts, sizes, [*starts[1:], end], strict=True):
        assert start % PART_ALIGNMENT == 0
        assert start + size <= then < start + size + PART_ALIGNMENT


@pytest.mark.parametrize("name", ["config.json", "a/b/c", "名.json", "..a"])
def test_names_of_files(name: str) -> None:
    assert is_file_name(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "./a", "a/../b", "..", "a\0b", None, b"a"])
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_file_name(name)
