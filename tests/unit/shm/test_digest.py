import math
import random
import sys
import threading
import time

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftd.shm.digest import (
    PIECE_BYTES,
    STRIDE_BYTES,
    PieceDigester,
    PieceDigests,
    cut,
    strides,
    tensor_digest,
    whole_digest,
)
from ftd.shm.layout import Extent, Placed
from ftd.tensorspec import TensorSpec
from ftd.units import MIB


def reference(data: bytes, piece_bytes: int = PIECE_BYTES) -> bytes:
    """The definition, word by word."""
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    return xxhash.xxh3_128(b"".join(xxhash.xxh3_128(piece).digest() for piece in pieces)).digest()


GOLDEN = {
    b"": "99aa06d3014798d86001c324468d497f",
    b"ftd": "2863448aea3f8084d3c7cde55d2641a0",
    bytes(16 * MIB): "13fffe4a8d10e3180aab83839168376e",
    bytes(16 * MIB) + b"\1": "0ff3edb723728fa857a84b976687a8b4",
}


@pytest.mark.parametrize(("data", "expected"), GOLDEN.items(), ids=lambda value: str(len(value)))
def test_golden_digests(data: bytes, expected: str) -> None:
    assert PieceDigests().of(Extent(0, 0, len(data)), memoryview(data)).hex() == expected


def test_golden_digest_of_a_whole() -> None:
    tensors = [
        Placed(TensorSpec("b", "BF16", (2, 3)), 0, Extent(0, 0, 12)),
        Placed(TensorSpec("a", "F32", ()), 0, Extent(0, 512, 4)),
    ]
    assert whole_digest(tensors, [b"1" * 16, b"2" * 16]).hex() == "d90ec456f77c9e2dfb697c0f50292130"


DATA = st.tuples(st.binary(max_size=200), st.integers(0, 20), st.integers(1, 60))


@given(DATA, st.integers(1, 50), st.randoms())
def test_parts_add_up_to_the_digest_of_the_definition(
    case: tuple[bytes, int, int], stride_bytes: int, rng: random.Random
) -> None:
    """Read in any strides and any order of pieces, and for pieces that nobody read as well."""
    data, before, piece_bytes = case
    segment = memoryview(bytes(before) + data)
    extent = Extent(3, before, len(data))
    pieces = [Extent(3, at, nbytes) for at, nbytes in cut(extent.offset, extent.nbytes, piece_bytes)]
    rng.shuffle(pieces)
    digests, digester = PieceDigests(piece_bytes), PieceDigester()
    for part in (part for stride in strides(pieces[: rng.randint(0, len(pieces))], stride_bytes) for part in stride):
        digester.update(segment[part.offset : part.offset + part.nbytes])
        if part.ends:
            digests.add(part.piece, digester.digest())
            digester.reset()
    assert digests.of(extent, segment) == reference(data, piece_bytes)


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 60))
def test_strides_hold_every_byte_once_in_order(lengths: list[int], stride_bytes: int) -> None:
    pieces = [Extent(0, 1000 * number, nbytes) for number, nbytes in enumerate(lengths)]
    groups = list(strides(pieces, stride_bytes))
    parts = [part for group in groups for part in group]
    assert [at for part in parts for at in range(part.offset, part.offset + part.nbytes)] == [
        at for piece in pieces for at in range(piece.offset, piece.offset + piece.nbytes)
    ]
    assert [part.piece for part in parts if part.ends] == pieces
    sums = [sum(part.nbytes for part in group) for group in groups]
    assert all(total == stride_bytes for total in sums[:-1]) and len(groups) == math.ceil(sum(lengths) / stride_bytes)


def test_a_digest_added_is_not_computed_again() -> None:
    digests = PieceDigests(4)
    digests.add(Extent(0, 8, 4), b"x" * 16)
    view = memoryview(bytes(16))
    assert digests.of(Extent(0, 8, 6), view) == tensor_digest([b"x" * 16, xxhash.xxh3_128(bytes(2)).digest()])


def test_the_whole_tells_weights_apart_and_nothing_else() -> None:
    a = Placed(TensorSpec("a", "F32", (2,)), 0, Extent(0, 0, 8))
    b = Placed(TensorSpec("b", "F32", (2,)), 1, Extent(0, 512, 8))
    one, two = b"1" * 16, b"2" * 16
    whole = whole_digest([a, b], [one, two])
    moved = Placed(b.spec, 0, Extent(7, 4096, 8))
    assert whole_digest([moved, a], [two, one]) == whole
    others = [
        ([a, b], [two, one]),
        ([a], [one]),
        ([a, Placed(TensorSpec("c", "F32", (2,)), 1, b.extent)], [one, two]),
        ([a, Placed(TensorSpec("b", "I32", (2,)), 1, b.extent)], [one, two]),
        ([a, Placed(TensorSpec("b", "F32", (2, 1)), 1, b.extent)], [one, two]),
    ]
    assert len({whole, *(whole_digest(tensors, digests) for tensors, digests in others)}) == 6


def test_digesting_lets_go_of_the_interpreter_lock() -> None:
    """Else the heart would not beat, and threads would wait for one another."""
    data, seen = bytes(STRIDE_BYTES), list[int]()
    before = sys.getswitchinterval()
    until = time.monotonic() + 20

    def digest() -> None:
        digester = PieceDigester()
        while not seen and time.monotonic() < until:
            digester.update(data)
        seen.append(0)

    sys.setswitchinterval(1000)  # nobody gets the lock but from who lets go of it
    try:
        thread = threading.Thread(target=digest)
        thread.start()
        seen.append(1)
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert seen == [1, 0]
