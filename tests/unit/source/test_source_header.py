"""The rules of the safetensors header, one broken at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoint_files import entry

from ftd.errors import SourceError
from ftd.source.header import parse_header
from ftd.tensorspec import DTYPE_BITS, TensorSpec


def parse(header: Any, data_bytes: int = 0) -> list[tuple[TensorSpec, int]]:
    raw = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else None
    raw = json.dumps(header).encode() if raw is None else raw
    return parse_header(raw, 8 + len(raw) + data_bytes)


def refusal(header: Any, data_bytes: int = 0) -> str:
    with pytest.raises(SourceError) as caught:
        parse(header, data_bytes)
    assert caught.value.remedy
    return caught.value.message


def test_tensors_come_by_offset_with_absolute_positions() -> None:
    header = {"b": entry("F32", [2], 3, 11), "a": entry("U8", [3], 0, 3)}
    start = 8 + len(json.dumps(header).encode())
    assert parse(header, 11) == [(TensorSpec("a", "U8", (3,)), start), (TensorSpec("b", "F32", (2,)), start + 3)]


@pytest.mark.parametrize(
    "header", [{}, {"__metadata__": {}}, {"__metadata__": None}, {"__metadata__": {"format": "pt"}}]
)
def test_metadata_is_no_tensor(header: dict[str, Any]) -> None:
    """ST-06: absent, empty and null metadata all load."""
    assert parse(header) == []
    assert [spec.name for spec, _ in parse({**header, "a": entry("U8", [1], 0, 1)}, 1)] == ["a"]


@pytest.mark.parametrize(
    ("metadata", "found"), [([], "an array"), ("pt", "a string"), (0, "a number"), (False, "a boolean")]
)
def test_metadata_must_be_an_object(metadata: Any, found: str) -> None:
    assert f"has {found} as __metadata__" in refusal({"__metadata__": metadata})


def test_scalars_and_empty_tensors_keep_their_shapes() -> None:
    """ST-01, ST-03: two empty tensors at one offset and a scalar are three tensors."""
    header = {"s": entry("F32", [], 0, 4), "e": entry("F16", [0], 4, 4), "f": entry("I64", [3, 0], 4, 4)}
    specs = {spec.name: spec for spec, _ in parse(header, 4)}
    assert specs["s"] == TensorSpec("s", "F32", ()) and specs["s"].nbytes == 4
    assert specs["e"] == TensorSpec("e", "F16", (0,))
    assert specs["f"] == TensorSpec("f", "I64", (3, 0))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_type_is_read(dtype: str) -> None:
    """ST-21: eight elements of each type fill as many bytes as an element has bits."""
    bits = DTYPE_BITS[dtype]
    assert parse({"t": entry(dtype, [8], 0, bits)}, bits)[0][0] == TensorSpec("t", dtype, (8,))


def test_a_name_given_twice_is_named() -> None:
    """ST-04."""
    first, second = (json.dumps(entry("U8", [1], i, i + 1)) for i in (0, 1))
    text = f'{{"a.weight":{first},"a.weight":{second}}}'
    assert "tensor 'a.weight' more than once" in refusal(text, 2)


def test_a_key_given_twice_in_a_tensor_is_named() -> None:
    message = refusal('{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1)
    assert "tensor 'a'" in message and "'dtype' more than once" in message


def test_a_key_given_twice_in_the_metadata_does_not_matter() -> None:
    assert parse('{"__metadata__":{"a":"1","a":"2"}}') == []


def test_the_empty_name_is_a_name() -> None:
    assert parse({"": entry("U8", [1], 0, 1)}, 1)[0][0].name == ""


def test_a_lone_surrogate_is_no_name_but_a_pair_is() -> None:
    assert "lone surrogate" in refusal('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')
    assert parse('{"\\ud83d\\ude00":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')[0][0].name == "😀"


@pytest.mark.parametrize(
    ("shape", "offsets", "data_bytes", "words"),
    [
        ([1 << 32, 1 << 32], [0, 0], 0, "more than 2^63-1 elements"),
        ([1 << 62, 1 << 62, 0], [0, 0], 0, "more than 2^63-1 elements"),
        ([3] * 64, [0, 0], 0, "64 in all], more than 2^63-1 elements"),
        ([1] * 65, [0, 1], 1, "has 65 dimensions, at most 64"),
        ([1 << 63], [0, 0], 0, "has 9223372036854775808 in its shape"),
        ([-1, 4], [0, 0], 0, "has -1 in its shape"),
        ([4.0], [0, 4], 4, "has a number (4.0) in its shape"),
        ([True], [0, 1], 1, "has a boolean (True) in its shape"),
        ([[1]], [0, 1], 1, "has an array in its shape"),
        (None, [0, 1], 1, "has null as shape"),
        ("4", [0, 4], 4, "has a string as shape"),
        ([4], [8, 0], 8, "has data_offsets [8, 0], expected [begin, end] with begin <= end"),
        ([4], [0], 4, "has data_offsets [0]"),
        ([4], [0, 4, 4], 4, "has data_offsets [0, 4, 4]"),
        ([4], [0, "4"], 4, "has a string in its data_offsets"),
        ([4], [-4, 0], 4, "has -4 in its data_offsets"),
        ([4], [0, False], 4, "has a boolean (False) in its data_offsets"),
        ([4], {"begin": 0}, 4, "has an object as data_offsets"),
        ([4], [0, 3], 3, "needs 4 bytes, its data_offsets [0, 3] hold 3"),
        ([0], [0, 1], 1, "needs 0 bytes, its data_offsets [0, 1] hold 1"),
        ([], [0, 0], 0, "needs 1 bytes, its data_offsets [0, 0] hold 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_add_up_are_refused_by_tensor_name(
    shape: Any, offsets: Any, data_bytes: int, words: str
) -> None:
    """ST-19."""
    message = refusal({"layer.weight": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}, data_bytes)
    assert "tensor 'layer.weight'" in message and words in message
    assert len(message) < 500


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_a_tensor_must_be_an_object(value: Any) -> None:
    assert "tensor 'a' is" in refusal({"a": value})


@pytest.mark.parametrize("dtype", [None, 1, ["F32"], {"F32": 1}])
def test_a_type_must_be_a_string(dtype: Any) -> None:
    assert "as dtype, expected a string" in refusal({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}, 4)


def test_overlap_and_hole_name_the_tensors() -> None:
    """ST-19."""
    overlap = refusal({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6)
    assert "tensor 'b' begins at 2 and overlaps it: tensor 'a' ends at 4" in overlap
    hole = refusal({"a": entry("U8", [4], 0, 4), "b": entry("U8", [2], 6, 8)}, 8)
    assert "tensor 'b' begins at 6 and leaves a hole: tensor 'a' ends at 4" in hole
    assert "the data begins at 0" in refusal({"a": entry("U8", [2], 1, 3)}, 3)
    inside = refusal({"a": entry("U8", [4], 0, 4), "e": entry("U8", [0], 2, 2)}, 4)
    assert "tensor 'e' begins at 2 and overlaps it" in inside
    twice = refusal({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4)
    assert "tensor 'b'" in twice and "tensor 'a'" in twice


def test_elements_below_eight_bits_fill_whole_bytes() -> None:
    assert parse({"a": entry("F4", [2, 3], 0, 3)}, 3)[0][0].nbytes == 3
    assert "3 F4 elements of 4 bits, which do not fill whole bytes" in refusal({"a": entry("F4", [3], 0, 2)}, 2)


def test_an_unknown_type_is_named_and_never_guessed() -> None:
    """ST-20: with a valid range it is an error of its own; bounds are checked before."""
    message = refusal({"w": entry("F7", [8], 0, 7)}, 7)
    assert "tensor 'w' has the unknown element type 'F7'" in message
    beyond = refusal({"w": entry("F7", [8], 0, 7000)}, 7)
    assert "6993 bytes are missing" in beyond and "tensor 'w'" in beyond
    assert "leaves a hole" in refusal({"w": entry("F7", [8], 1, 8)}, 8)


def test_the_file_must_end_with_its_last_tensor() -> None:
    """ST-09: expected and actual size."""
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}
    start = 8 + len(json.dumps(header).encode())
    assert (
        f"file is {start + 7} bytes, its header needs {start + 8}: 1 bytes are missing, from tensor 'b' on"
        in refusal(header, 7)
    )
    assert "from tensor 'a' on" in refusal(header, 3)
    assert f"file is {start + 9} bytes, its header needs {start + 8}: 1 bytes too many" in refusal(header, 9)


def test_json_errors_give_the_byte_in_the_file() -> None:
    """ST-07: what one release wrote for metadata without tensors is refused with the byte's position."""
    assert "is not JSON at byte 10: extra data" in refusal('{},"__metadata__":{"key":"value"}}   ')
    assert "is not JSON at byte 17" in refusal('{"ü": 1 2}')  # two bytes of one character, counted as two
    assert "is not UTF-8 at byte 10" in refusal(b'{"\xff":1}')
    assert "is JSON but an array, expected an object" in refusal("[1]")


def test_hostile_json_raises_nothing_else() -> None:
    assert "nested too deeply" in refusal('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "thousands of digits" in refusal('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,0]}}')
    # nested as deep as the decoder lets through, where `repr` of it would not come back
    for depth in (300, 600, 900):
        assert "in its shape" in refusal(
            '{"a":{"dtype":"U8","shape":[' + "[" * depth + "]" * depth + '],"data_offsets":[0,0]}}'
        )
    assert "a number (nan) in its shape" in refusal('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}')


def test_names_in_messages_are_escaped_and_cut() -> None:
    message = refusal({"a\x1b[31m\n" + "x" * 10_000: entry("U8", [2], 0, 1)}, 1)
    assert "\x1b" not in message and "\\x1b[31m\\n" in message
    assert len(message) < 500
