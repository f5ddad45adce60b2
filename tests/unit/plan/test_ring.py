from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.plan.cost import CopyCost
from ftd.plan.errors import PlanError
from ftd.plan.plan import assemble
from ftd.plan.problem import Problem
from ftd.plan.ring import lay_ring
from ftd.plan.workload import Workload
from tests.unit.plan.bytemap import run_on_bytes
from tests.unit.plan.shapes import blocks_of, llama

SIZES = st.lists(st.integers(1, 40).map(lambda n: n * 512), min_size=1, max_size=24)


@given(SIZES, st.integers(0, 100), st.sets(st.integers(0, 23)))
@settings(max_examples=300)
def test_no_byte_is_overwritten_before_its_compute(sizes: list[int], more: int, kept: set[int]) -> None:
    work = Workload(Problem(blocks_of(sizes, per_layer=30), CopyCost(0, 1e9), num_blocks=100), layers=False)
    streamed = [i for i in range(len(sizes)) if i not in kept]
    plan = assemble(work, streamed, max((sizes[i] for i in streamed), default=0) + more * 512, "test")
    run_on_bytes(plan)


@given(SIZES, st.integers(0, 100))
def test_the_ring_is_within_what_was_asked_and_fully_used(sizes: list[int], more: int) -> None:
    asked = max(sizes) + more * 512
    ring = lay_ring(sizes, asked)
    ends = [address + size for address, size in zip(ring.addresses, sizes, strict=True)]
    assert max(ends) == ring.nbytes <= asked
    assert all(address % 512 == 0 for address in ring.addresses)


@given(st.integers(1, 60), st.integers(1, 20))
def test_laps_of_equal_blocks_differ_by_one_block(count: int, slots: int) -> None:
    ring = lay_ring([512] * count, slots * 512)
    starts = [at for at, address in enumerate(ring.addresses) if address == 0]
    laps = [b - a for a, b in zip(starts, [*starts[1:], count], strict=True)]
    assert max(laps) - min(laps) <= 1
    assert len(laps) == -(-count // slots)
    assert ring.first_lap == laps[0]


@given(SIZES, st.integers(0, 100))
def test_a_copy_waits_for_no_more_than_it_has_to(sizes: list[int], more: int) -> None:
    ring = lay_ring(sizes, max(sizes) + more * 512)
    count = len(sizes)
    ends = [address + size for address, size in zip(ring.addresses, sizes, strict=True)]

    def last_user(at: int) -> int:
        """When the bytes of a block were last used before it, counted from its forward's first block."""
        return max(
            user
            for user in range(at - count, at)
            if ring.addresses[user % count] < ends[at] and ring.addresses[at] < ends[user % count]
        )

    # copies go in order, so each also waits for what those before it wait for
    expected = list(accumulate((last_user(at) for at in range(count)), max))
    found = [after if after < at else after - count for at, after in enumerate(ring.after)]
    assert found == expected


def test_the_places_of_a_small_ring() -> None:
    # two laps: [3, 1, 2] and [2, 2, 2]; the last of the second lies over the last of the first alone
    ring = lay_ring([3 * 512, 512, 2 * 512, 2 * 512, 2 * 512, 2 * 512], 6 * 512)
    assert ring.addresses == (0, 1536, 2048, 0, 1024, 2048)
    assert ring.after == (4, 4, 5, 0, 1, 2)
    assert (ring.first_lap, ring.nbytes) == (3, 3072)


def test_the_seam_looks_as_far_ahead_as_the_rest() -> None:
    blocks = llama(64)
    work = Workload(Problem(blocks, CopyCost(0, 1e9)), layers=False)
    ring = lay_ring(work.sizes, 600 * 2**20)
    count = len(work.sizes)
    ahead = [at - after if after < at else at - after + count for at, after in enumerate(ring.after)]
    assert min(ahead) >= 4  # eight linears of a layer's mix fit; 600 MiB is more than one layer


def test_a_ring_smaller_than_a_block_names_the_least() -> None:
    with pytest.raises(PlanError, match="at least 2048 bytes"):
        lay_ring([512, 2048, 512], 1536)


def test_no_blocks_need_no_ring() -> None:
    assert lay_ring([], 0).nbytes == 0
