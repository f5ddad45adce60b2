"""Where a block's tensors lie in its place on the device, and which copies fill them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ftd.plan.block import aligned

TransferMode = Literal["allocation_block_transfer", "raw_block_transfer", "strategy"]


class Piece(NamedTuple):
    """One tensor's bytes: where they are on the host, and how many."""

    address: int
    nbytes: int


class Run(NamedTuple):
    """One copy of a block: `nbytes` from `address` of the host to `offset` in the block's place."""

    offset: int
    address: int
    nbytes: int


class Layout(NamedTuple):
    """A block's place.

    Attributes:
        offsets: of each piece, in the order given; multiples of the alignment.
        runs: copies that fill it, ascending by offset.
        nbytes: its size, alignment between the pieces included.
    """

    offsets: tuple[int, ...]
    runs: tuple[Run, ...]
    nbytes: int


def lay_out(pieces: Sequence[Piece], mode: TransferMode) -> Layout:
    """Packs pieces, each at a multiple of the alignment, and merges the copies that the host's layout allows.

    `allocation_block_transfer` takes the order of the host's addresses, so that what lies together there is one copy.
    `raw_block_transfer` keeps the order given; what lies in that order on the host is one copy, the rest is packed in
    the place by several. `strategy` copies tensor by tensor.
    """
    order = range(len(pieces))
    if mode == "allocation_block_transfer":
        order = sorted(order, key=lambda i: pieces[i].address)  # type: ignore[assignment]
    offsets = [0] * len(pieces)
    runs: list[Run] = []
    end = 0
    for i in order:
        piece = pieces[i]
        offset = offsets[i] = aligned(end)
        end = offset + piece.nbytes
        last = runs[-1] if runs and mode != "strategy" else None
        # the host's padding between neighbours is copied along: it is less than one alignment
        if last is not None and piece.address - last.address == offset - last.offset:
            runs[-1] = Run(last.offset, last.address, end - last.offset)
        elif piece.nbytes:
            runs.append(Run(offset, piece.address, piece.nbytes))
    return Layout(tuple(offsets), tuple(runs), end)
