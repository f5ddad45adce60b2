"""Tensors that lie otherwise in their file: any strides, cut into pieces of any size, as NumPy sees them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.source.strided import is_row_major, overlaps, pieces, row_major, span, spread
from ftd.units import MIB

_DTYPES = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """A view of a row-major array: permuted, cut with steps, expanded."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    count = math.prod(shape)
    view = np.arange(1, count + 1).astype(_DTYPES[itemsize]).reshape(shape)
    view = view.transpose(draw(st.permutations(range(len(shape)))))
    cuts = tuple(slice(draw(st.integers(0, 3)), None, draw(st.integers(1, 3))) for _ in shape)
    view = view[cuts]
    for _ in range(draw(st.integers(0, 2))):
        axis = draw(st.integers(0, view.ndim))
        view = np.expand_dims(view, axis)
        view = np.broadcast_to(view, (*view.shape[:axis], draw(st.integers(1, 5)), *view.shape[axis + 1 :]))
    return view


def strides_of(view: np.ndarray) -> tuple[int, ...]:
    return tuple(stride // view.itemsize for stride in view.strides)


def gathered(view: np.ndarray, limit_bytes: int) -> np.ndarray:
    """The row-major array that pieces of the view's own memory make."""
    base = view
    while base.base is not None:
        base = base.base
    raw = memoryview(np.ascontiguousarray(base).reshape(-1)).cast("B")
    begin = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    target = memoryview(bytearray(view.size * view.itemsize))
    written = 0
    for piece in pieces(view.shape, strides_of(view), begin, view.itemsize, limit_bytes):
        assert 0 < piece.nbytes <= max(limit_bytes, view.itemsize)
        assert piece.offset >= 0 and piece.offset + piece.nbytes <= len(raw)
        spread(piece, raw[piece.offset : piece.offset + piece.nbytes], target, view.itemsize)
        written += math.prod(axis.size for axis in piece.axes)
    assert written == view.size, "every element once"
    return np.frombuffer(target, view.dtype).reshape(view.shape)


@settings(max_examples=300, deadline=None)
@given(views(), st.integers(1, 200))
def test_pieces_of_any_size_make_the_row_major_array(view: np.ndarray, limit_bytes: int) -> None:
    """TL-06."""
    assert not overlaps(view.shape, strides_of(view))
    assert np.array_equal(gathered(view, limit_bytes), view)


@settings(max_examples=200, deadline=None)
@given(views())
def test_what_is_row_major_and_how_far_it_reaches(view: np.ndarray) -> None:
    strides = strides_of(view)
    assert is_row_major(view.shape, strides) == view.flags.c_contiguous
    if view.size:
        index = np.zeros(1, dtype=np.int64)
        for size, stride in zip(view.shape, strides, strict=True):
            index = (index[:, None] + np.arange(size) * stride).reshape(-1)
        assert span(view.shape, strides) == index.max() + 1
    else:
        assert span(view.shape, strides) == 0


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 4), (2, 1), True),
        ((3, 2), (2, 1), False),
        ((4, 4), (1, 1), True),
        ((4, 4), (0, 1), False),
        ((1, 4), (1, 1), False),
        ((2, 3, 2), (2, 4, 1), False),
        ((2, 3, 2), (3, 4, 1), True),  # no two meet, but that is not worth telling
        ((), (), False),
    ],
)
def test_overlaps(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert overlaps(shape, strides) is expected


def test_a_large_repetition_takes_little_memory() -> None:
    target = memoryview(bytearray(8 * MIB))
    (piece,) = pieces((2 * MIB,), (0,), 0, 4, 64)
    spread(piece, memoryview(b"abcd"), target, 4)
    assert target == b"abcd" * (2 * MIB)


def test_the_strides_of_rows() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1) and row_major(()) == () and row_major((2, 0, 3)) == (3, 3, 1)
