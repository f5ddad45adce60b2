"""Tensors whose elements do not lie row by row in their file: transposed, channels last, expanded, cut out of others.

They are read in pieces of bounded size, in the order of the file, and each piece is spread over the row-major bytes
that followers see. Values only: the reading is the caller's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

#: Elements from neighbour to neighbour in each dimension; None where the elements lie row by row.
Strides = tuple[int, ...] | None

#: How one element of so many bytes is called by memoryview.
_Form = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Form] = {1: "B", 2: "H", 4: "I", 8: "Q"}
#: Bytes that one step of a repetition copies.
_REPEATED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension: its size, and how many elements apart its neighbours lie in the file and in the target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[offset, offset + nbytes)` of the file, and where their elements go.

    Attributes:
        axes: of the elements that it holds, from the first of them.
        target: index of the first one among the elements of the tensor.
    """

    offset: int
    nbytes: int
    axes: tuple[Axis, ...]
    target: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor whose rows lie one behind the other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie one behind the other; strides of dimensions that are never stepped don't count."""
    if 0 in shape:
        return True
    return all(size == 1 or own == whole for size, own, whole in zip(shape, strides, row_major(shape), strict=True))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to behind the last; 0 without elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether steps of different dimensions may meet in one element, as in a window that slides over a tensor.

    A dimension of stride 0 repeats the others and is no overlap.
    """
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def pieces(
    shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int, limit_bytes: int
) -> Iterator[Piece]:
    """Pieces of at most `limit_bytes` that together hold every element once.

    Args:
        strides: in elements; without overlap.
        offset: of the first element, in bytes of the file.
    """
    if 0 in shape:
        return
    axes = [Axis(*each) for each in zip(shape, strides, row_major(shape), strict=True) if each[0] > 1]
    axes.sort(key=lambda axis: -axis.source)
    yield from _split(axes, offset, 0, itemsize, max(1, limit_bytes // itemsize))


def spread(piece: Piece, source: memoryview, target: memoryview, itemsize: int) -> None:
    """Copies the elements of `piece` from its bytes to their places in the bytes of the whole tensor."""
    form = _FORMATS[itemsize]
    here, there = source.cast("B").cast(form), target.cast("B").cast(form)
    if not piece.axes:
        there[piece.target] = here[0]
        return
    longest = max(piece.axes, key=lambda axis: axis.size)
    others = list(piece.axes)
    others.remove(longest)
    for index in itertools.product(*(range(axis.size) for axis in others)):
        begin = sum(i * axis.source for i, axis in zip(index, others, strict=True))
        at = piece.target + sum(i * axis.target for i, axis in zip(index, others, strict=True))
        if longest.source:
            row = here[begin : begin + (longest.size - 1) * longest.source + 1 : longest.source]
            there[at : at + (longest.size - 1) * longest.target + 1 : longest.target] = row
        else:
            _repeat(here[begin : begin + 1].tobytes(), there, at, longest, form)


def _repeat(element: bytes, there: memoryview, at: int, axis: Axis, form: _Form) -> None:
    most = min(axis.size, _REPEATED_BYTES // len(element))
    row = memoryview(element * most).cast(form)
    for done in range(0, axis.size, most):
        count = min(most, axis.size - done)
        first = at + done * axis.target
        there[first : first + (count - 1) * axis.target + 1 : axis.target] = row[:count]


def _split(axes: Sequence[Axis], offset: int, target: int, itemsize: int, limit: int) -> Iterator[Piece]:
    """Cuts the outermost dimension (of the file's order) until a piece spans at most `limit` elements."""
    elements = 1 + sum((axis.size - 1) * axis.source for axis in axes)
    if elements <= limit:
        yield Piece(offset, elements * itemsize, tuple(axes), target)
        return
    outer, inner = axes[0], axes[1:]
    within = 1 + sum((axis.size - 1) * axis.source for axis in inner)
    # as many steps of it as fit; a step that does not fit alone is cut further inside
    steps = max(1, 1 + (limit - within) // outer.source)
    for begin in range(0, outer.size, steps):
        size = min(steps, outer.size - begin)
        rest = [Axis(size, outer.source, outer.target), *inner] if size > 1 else inner
        at = offset + begin * outer.source * itemsize
        yield from _split(rest, at, target + begin * outer.target, itemsize, limit)
