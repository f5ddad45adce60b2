"""Digests of tensors: which bytes a generation holds, told so that any part can be checked again by any thread.

A tensor's digest is the xxh3-128 of the xxh3-128 digests of its pieces, one behind the other. A piece is 16 MiB of
the tensor, from its first byte on; the last one is what is left, and a tensor without bytes has none. They tell apart
what went wrong by itself, and are no proof against somebody who forges weights.

xxh3 takes 0.02 ns a byte while the bytes are in a core's cache, and lets go of the interpreter lock above 64 KiB
(python-xxhash 4.1, which chooses AVX2 or AVX-512 at run time).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from ftd.packing import pack
from ftd.shm.layout import Extent, Placed
from ftd.units import MIB

DIGEST_BYTES = 16
PIECE_BYTES = 16 * MIB
#: What is read before it is digested: few enough bytes that most of them are still in a cache, where digesting costs
#: half of what it does in memory, and so many that sixteen threads don't wait for the interpreter lock, which each of
#: the two calls of a stride lets go of.
STRIDE_BYTES = 4 * MIB

#: Takes the bytes of a piece in parts, by `update`; `digest` gives its digest.
PieceDigester = xxh3_128


def tensor_digest(pieces: Iterable[bytes]) -> bytes:
    """The digest of a tensor from the digests of its pieces, in order."""
    return xxh3_128_digest(b"".join(pieces))


def whole_digest(tensors: Sequence[Placed], digests: Sequence[bytes]) -> bytes:
    """xxh3-128 of names, types, shapes and digests in the order of names: equal for equal weights, whatever the layout.

    Args:
        digests: of `tensors`, in their order.
    """
    rows = sorted([p.spec.name, p.spec.dtype, list(p.spec.shape), d] for p, d in zip(tensors, digests, strict=True))
    return xxh3_128_digest(pack(rows))


def cut(offset: int, nbytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Offset and length of each piece of a tensor that begins at `offset`."""
    end = offset + nbytes
    return [(at, min(piece_bytes, end - at)) for at in range(offset, end, piece_bytes)]


class PieceDigests:
    """Digests of pieces by where they lie. Several threads may add at once, each pieces of its own."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._by_place: dict[tuple[int, int], bytes] = {}

    def add(self, piece: Extent, digest: bytes) -> None:
        self._by_place[piece.segment, piece.offset] = digest

    def of(self, extent: Extent, view: memoryview) -> bytes:
        """The digest of the tensor there; `view` of its segment is asked for pieces that nobody added."""
        return tensor_digest(
            self._by_place.get((extent.segment, at)) or xxh3_128_digest(view[at : at + nbytes])
            for at, nbytes in cut(extent.offset, extent.nbytes, self._piece_bytes)
        )


class Part(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of a segment, which are of `piece`; `ends` says that its last byte is here."""

    piece: Extent
    offset: int
    nbytes: int
    ends: bool


def strides(pieces: Iterable[Extent], stride_bytes: int = STRIDE_BYTES) -> Iterator[list[Part]]:
    """The pieces in order, in groups of parts that hold `stride_bytes` each; the last one holds what is left."""
    parts, room = list[Part](), stride_bytes
    for piece in pieces:
        at, end = piece.offset, piece.offset + piece.nbytes
        while at < end:
            take = min(end - at, room)
            parts.append(Part(piece, at, take, at + take == end))
            at += take
            room -= take
            if not room:
                yield parts
                parts, room = [], stride_bytes
    if parts:
        yield parts
