"""Places of tensors in a block: every byte is copied from where it is, aligned, and nothing else is touched."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.plan.block import ALIGNMENT, aligned
from ftd_client.stream.layout import Layout, Piece, TransferMode, lay_out

MODES: tuple[TransferMode, ...] = get_args(TransferMode)
NBYTES = st.one_of(st.sampled_from([0, 1, 511, 512, 513, 1024]), st.integers(0, 2000))


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Tensors on a host: disjoint, packed at the alignment or apart, in any order."""
    address, found = draw(st.integers(1, 10)) * ALIGNMENT, []
    for nbytes in draw(st.lists(NBYTES, max_size=10)):
        found.append(Piece(address, nbytes))
        end = address + nbytes
        gap = draw(st.sampled_from([0, 0, 0, 1, 64, ALIGNMENT, 5 * ALIGNMENT]))
        address = (aligned(end) if draw(st.booleans()) else end) + gap
    return draw(st.permutations(found)) if draw(st.booleans()) else found


def _checked(given_pieces: list[Piece], layout: Layout) -> None:
    """Runs the copies byte by byte over tagged memory."""
    place: dict[int, int] = {}
    for run in layout.runs:
        assert run.nbytes > 0
        fills = range(run.offset, run.offset + run.nbytes)
        assert place.keys().isdisjoint(fills), "a byte is written twice"
        place.update(zip(fills, range(run.address, run.address + run.nbytes), strict=True))
    taken: set[int] = set()
    for piece, offset in zip(given_pieces, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        own = range(offset, offset + piece.nbytes)
        assert [place.get(at) for at in own] == list(range(piece.address, piece.address + piece.nbytes))
        assert taken.isdisjoint(own), "two tensors share bytes"
        taken.update(own)
    # beside tensors only padding between them is copied: less than one alignment before each
    extra = sorted(place.keys() - taken)
    assert all(aligned(at) in layout.offsets for at in extra)
    assert all(0 <= at < layout.nbytes for at in place)
    ends = [offset + piece.nbytes for piece, offset in zip(given_pieces, layout.offsets, strict=True)]
    assert layout.nbytes == max(ends, default=0)
    assert [run.offset for run in layout.runs] == sorted(run.offset for run in layout.runs)


@pytest.mark.parametrize("mode", MODES)
@given(given_pieces=pieces())
def test_copies_fill_exactly_the_tensors(mode: TransferMode, given_pieces: list[Piece]) -> None:
    _checked(given_pieces, lay_out(given_pieces, mode))


@pytest.mark.parametrize("mode", MODES)
@given(given_pieces=pieces())
def test_no_place_is_larger_than_its_tensors_at_the_alignment(mode: TransferMode, given_pieces: list[Piece]) -> None:
    assert lay_out(given_pieces, mode).nbytes <= sum(aligned(piece.nbytes) for piece in given_pieces)


@given(pieces())
def test_raw_and_strategy_keep_the_order_given(given_pieces: list[Piece]) -> None:
    for mode in ("raw_block_transfer", "strategy"):
        offsets = lay_out(given_pieces, mode).offsets  # type: ignore[arg-type]
        assert list(offsets) == sorted(offsets)


@given(pieces())
def test_strategy_copies_tensor_by_tensor(given_pieces: list[Piece]) -> None:
    layout = lay_out(given_pieces, "strategy")
    assert [(run.address, run.nbytes) for run in layout.runs] == [tuple(p) for p in given_pieces if p.nbytes]


def _packed(sizes: list[int]) -> list[Piece]:
    address, found = 7 * ALIGNMENT, []
    for nbytes in sizes:
        found.append(Piece(address, nbytes))
        address = aligned(address + nbytes)
    return found


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_lies_together_is_one_copy(sizes: list[int], chance: object) -> None:
    packed = _packed(sizes)
    for mode in ("allocation_block_transfer", "raw_block_transfer"):
        assert len(lay_out(packed, mode).runs) == 1  # type: ignore[arg-type]
    shuffled = list(packed)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert len(lay_out(shuffled, "allocation_block_transfer").runs) == 1


def test_raw_packs_what_lies_in_another_order_by_several_copies() -> None:
    one, other = _packed([512, 512])
    assert len(lay_out([other, one], "raw_block_transfer").runs) == 2


def test_what_lies_apart_on_the_host_lies_together_in_the_place() -> None:
    layout = lay_out([Piece(ALIGNMENT, 10), Piece(100 * ALIGNMENT, 10)], "allocation_block_transfer")
    assert layout.offsets == (0, ALIGNMENT)
    assert len(layout.runs) == 2


def test_nothing_takes_no_place() -> None:
    assert lay_out([], "raw_block_transfer") == Layout((), (), 0)
    assert lay_out([Piece(512, 0)], "raw_block_transfer") == Layout((0,), (), 0)
