"""Where weights come to lie on a device."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ftd.shm.layout import Extent
from ftd_client.load.arenas import ALIGNMENT, Arena, plan_arenas

#: Multiples of the alignment mostly, as the layout gives them; anything where a view is part of a tensor.
OFFSET = st.integers(0, 60).map(lambda at: at * ALIGNMENT) | st.integers(0, 30_000)
EXTENT = st.builds(Extent, st.integers(0, 2), OFFSET, st.integers(0, 1200))
ARENA_BYTES = st.integers(1, 20_000)


def _filled(arena: Arena) -> dict[int, tuple[int, int]]:
    """(segment, offset) of what each byte of an arena gets; no byte twice."""
    got: dict[int, tuple[int, int]] = {}
    for run in arena.runs:
        for at in range(run.nbytes):
            assert run.dst + at not in got, "written twice"
            got[run.dst + at] = run.segment, run.offset + at
    return got


@given(st.lists(EXTENT, max_size=8), ARENA_BYTES)
@example([Extent(0, 0, 10_000), Extent(0, 512, 512), Extent(0, 1024, 9000)], 1 << 20)
@example([Extent(0, 512, 7), Extent(0, 512, 7)], 1 << 20)
def test_every_extent_lies_in_one_arena_whole_aligned_and_alone(wanted: list[Extent], arena_bytes: int) -> None:
    arenas = plan_arenas(wanted, arena_bytes)
    numbers = [number for arena in arenas for number in arena.places]
    assert sorted(numbers) == [number for number, extent in enumerate(wanted) if extent.nbytes]
    for arena in arenas:
        filled, taken = _filled(arena), set[int]()
        assert max(filled) < arena.nbytes, "nothing beyond the allocation"
        for number, start in arena.places.items():
            extent = wanted[number]
            assert start % ALIGNMENT == 0
            for at in range(extent.nbytes):
                assert filled[start + at] == (extent.segment, extent.offset + at)
                assert start + at not in taken, "shared by two"
                taken.add(start + at)


@given(st.lists(EXTENT, max_size=8), ARENA_BYTES)
def test_an_arena_is_closed_once_it_is_large_enough(wanted: list[Extent], arena_bytes: int) -> None:
    arenas = plan_arenas(wanted, arena_bytes)
    assert all(arena.nbytes >= arena_bytes for arena in arenas[:-1])
    for arena in arenas:
        last = max(arena.places, key=lambda number: arena.places[number])
        assert arena.places[last] < arena_bytes + 4096 + ALIGNMENT, "no other was put behind"


@given(st.lists(EXTENT, max_size=8))
def test_copies_take_little_that_nobody_asked_for(wanted: list[Extent]) -> None:
    asked = {(e.segment, e.offset + at) for e in wanted for at in range(e.nbytes)}
    runs = [run for arena in plan_arenas(wanted) for run in arena.runs]
    ends = {(e.segment, e.offset + e.nbytes) for e in wanted if e.nbytes}
    for run in runs:
        assert (run.segment, run.offset) in asked
        assert (run.segment, run.offset + run.nbytes) in ends
    extra = [
        place
        for run in runs
        for place in ((run.segment, run.offset + at) for at in range(run.nbytes))
        if place not in asked
    ]
    assert len(extra) <= 4096 * len(wanted)


def test_a_layer_that_lies_together_is_one_copy_and_memory_is_hardly_more() -> None:
    extents, at = [], 0
    for nbytes in (1000, 512, 4096, 3, 70_000, 513):
        extents.append(Extent(0, at, nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    (arena,) = plan_arenas(extents[::-1])
    assert [(run.dst, run.offset) for run in arena.runs] == [(0, 0)]
    assert arena.nbytes == extents[-1].offset + extents[-1].nbytes
    far = Extent(0, at + 4096 + ALIGNMENT, 9)
    assert len(plan_arenas([*extents, far])[0].runs) == 2, "padding is skipped where it is much"


def test_nothing_needs_no_arena() -> None:
    assert plan_arenas([]) == []
    assert plan_arenas([Extent(0, 0, 0)]) == []
