"""What a follower says to have its weights pushed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import FrameError
from ftd.packing import pack, unpack_map
from ftd.wire import frame
from ftd.wire.messages import Request
from ftd.wire.push import (
    GPU_BYTES,
    HANDLE_BYTES,
    MAX_PIECES,
    MAX_TARGETS,
    PUSH,
    PushPiece,
    PushRequest,
    PushTarget,
    bytes_pushed,
    push_result,
    requests,
)

SIZE = st.integers(0, (1 << 62) - 1)
PIECE = st.builds(PushPiece, SIZE, SIZE, SIZE, SIZE.filter(bool))
TARGET = st.builds(
    PushTarget,
    st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES),
    st.lists(PIECE, min_size=1, max_size=4).map(tuple),
)
REQUEST = st.builds(
    PushRequest,
    SIZE,
    st.lists(SIZE, max_size=3).map(tuple),
    st.binary(min_size=GPU_BYTES, max_size=GPU_BYTES),
    st.lists(TARGET, min_size=1, max_size=4).map(tuple),
)
SMALL = PushRequest(
    7,
    (11, 12),
    b"g" * GPU_BYTES,
    (PushTarget(b"h" * HANDLE_BYTES, (PushPiece(512, 1, 4096, 300), PushPiece(0, 0, 0, 1))),),
)


def test_golden_bytes() -> None:
    """docs/format.md."""
    assert pack(SMALL.to_args()) == (
        b"\x84"
        b"\xaageneration\x07"
        b"\xa6inodes\x92\x0b\x0c"
        b"\xa3gpu\xc4\x10" + b"g" * 16 + b"\xa7targets\x91\x92\xc4\x40" + b"h" * 64 + b"\x92"
        b"\x94\xcd\x02\x00\x01\xcd\x10\x00\xcd\x01\x2c"
        b"\x94\x00\x00\x00\x01"
    )
    assert pack(push_result(301)) == b"\x81\xa5bytes\xcd\x01\x2d"
    assert (PUSH, SMALL.nbytes) == ("push", 301)


@given(REQUEST)
def test_what_is_asked_is_heard(request: PushRequest) -> None:
    assert PushRequest.from_args(unpack_map(pack(request.to_args()))) == request


@given(SIZE)
def test_what_is_answered_is_heard(nbytes: int) -> None:
    assert bytes_pushed(unpack_map(pack(push_result(nbytes)))) == nbytes


@pytest.mark.parametrize("nbytes", [None, True, -1, 1.0, "1", 1 << 62])
def test_an_answer_that_is_none_is_refused(nbytes: object) -> None:
    with pytest.raises(FrameError, match="an answer to push"):
        bytes_pushed({"bytes": nbytes})
    with pytest.raises(FrameError):
        bytes_pushed({})


NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every part of a message."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(deeper for key in keys for deeper in _paths(value[key], (*path, key)))]


@given(st.data())
def test_whatever_stands_in_a_message_is_refused_as_a_bad_frame_or_true(data: st.DataObject) -> None:
    args = SMALL.to_args()
    *above, last = data.draw(st.sampled_from(_paths(args)[1:]))
    inside: Any = args
    for key in above:
        inside = inside[key]
    inside[last] = data.draw(NONSENSE)
    with contextlib.suppress(FrameError):
        request = PushRequest.from_args(unpack_map(pack(args)))
        assert request.to_args() == args, "heard as it was said"
        assert all(
            type(value) is int and 0 <= value < 1 << 62
            for target in request.targets
            for piece in target.pieces
            for value in piece
        )
        assert all(piece.nbytes for target in request.targets for piece in target.pieces)


@given(st.dictionaries(st.sampled_from(["generation", "inodes", "gpu", "targets", "x"]), NONSENSE))
def test_nonsense_is_refused_as_a_bad_frame(args: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        PushRequest.from_args(args)


@pytest.mark.parametrize("key", ["generation", "inodes", "gpu", "targets"])
def test_every_field_is_required(key: str) -> None:
    args = SMALL.to_args()
    del args[key]
    with pytest.raises(FrameError):
        PushRequest.from_args(args)


@pytest.mark.parametrize("piece", [[0, 0, 0, 0], [0, 0, 0], [0, 0, 0, 1, 1], [0, 0, -1, 1], [0, True, 0, 1], (0, 0, 0)])
def test_a_piece_has_four_sizes_and_some_bytes(piece: object) -> None:
    args = SMALL.to_args()
    args["targets"][0][1][1] = piece
    with pytest.raises(FrameError, match="well-formed"):
        PushRequest.from_args(args)


@pytest.mark.parametrize(
    ("segments", "good"),
    [((1, 4396), True), ((1, 4395), False), ((0, 4396), False), ((1,), False), ((), False), ((9, 9000, 0), True)],
)
def test_no_piece_leaves_its_segment(segments: tuple[int, ...], good: bool) -> None:
    with contextlib.nullcontext() if good else pytest.raises(FrameError, match=f"one of {len(segments)} segments"):
        SMALL.check_pieces(segments)


@given(REQUEST, st.lists(st.integers(0, 1 << 63), max_size=3))
def test_what_passes_lies_inside(request: PushRequest, segments: list[int]) -> None:
    with contextlib.suppress(FrameError):
        request.check_pieces(segments)
        for _, segment, offset, nbytes in (piece for target in request.targets for piece in target.pieces):
            assert 0 <= offset < offset + nbytes <= segments[segment]


# --- as few as hold it -----------------------------------------------------------------------------------------------


def _targets(counts: list[int]) -> list[PushTarget]:
    numbers = iter(range(1, 10**9))
    return [
        PushTarget(bytes([index % 256]) * HANDLE_BYTES, tuple(PushPiece(next(numbers), 0, 0, 1) for _ in range(count)))
        for index, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1], 1),
        ([MAX_PIECES], 1),
        ([MAX_PIECES + 1], 2),
        ([MAX_PIECES - 1, 1], 1),
        ([MAX_PIECES - 1, 2], 2),
        ([MAX_PIECES, 1], 2),
        ([3 * MAX_PIECES + 5, 7], 4),
        ([1] * MAX_TARGETS, 1),
        ([1] * (MAX_TARGETS + 1), 2),
        ([0, 20, 0, MAX_PIECES, 3], 2),
    ],
)
def test_requests_hold_all_pieces_in_order_and_each_is_a_good_one(counts: list[int], expected: int) -> None:
    targets = _targets(counts)
    made = list(requests(3, [5], b"g" * GPU_BYTES, targets))
    assert len(made) == expected
    said = [(target.handle, piece) for target in targets for piece in target.pieces]
    assert [(target.handle, piece) for each in made for target in each.targets for piece in target.pieces] == said
    for each in made:
        assert (each.generation, each.inodes, each.gpu) == (3, (5,), b"g" * GPU_BYTES)
        assert PushRequest.from_args(each.to_args()) == each


def test_the_largest_request_fits_into_a_frame() -> None:
    most = (1 << 62) - 1
    pieces = (PushPiece(most, most, most, most),) * (MAX_PIECES // MAX_TARGETS)
    request = PushRequest(
        most, (most,) * 1000, b"g" * GPU_BYTES, (PushTarget(b"h" * HANDLE_BYTES, pieces),) * MAX_TARGETS
    )
    assert len(frame.encode(Request(PUSH, request.to_args()).to_map())) < frame.MAX_FRAME_BYTES


@pytest.mark.parametrize(("targets", "pieces"), [(MAX_TARGETS + 1, 1), (2, MAX_PIECES // 2 + 1)])
def test_more_than_a_request_holds_is_refused(targets: int, pieces: int) -> None:
    args = PushRequest(1, (), b"g" * GPU_BYTES, tuple(_targets([pieces] * targets))).to_args()
    with pytest.raises(FrameError, match="expected"):
        PushRequest.from_args(args)
