"""Streaming by access: each block is fetched once while it is wanted, ahead within the window, and waited for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd_client.stream.link import Copy, Ticket
from ftd_client.stream.loose import Loose
from ftd_client.stream.units import Param
from tests.unit.client.phase.units import param

from .toys import LazyLink


class Source:
    """Blocks of one or two parameters, filled by a link that copies as late as it may."""

    def __init__(self, sizes: Sequence[Sequence[int]], window_bytes: int) -> None:
        self.link = LazyLink()
        self.blocks = [[param(f"{i}.{j}", n) for j, n in enumerate(block)] for i, block in enumerate(sizes)]
        for number, each in enumerate(p for block in self.blocks for p in block):
            each.tensor.fill_(number % 250 + 1)
        self.submitted: list[int] = []
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.loose = Loose(self.blocks, window_bytes, self.link, self._submit)

    def _submit(self, params: Sequence[Param]) -> tuple[list[torch.Tensor], Ticket]:
        tensors = [torch.zeros_like(p.tensor) for p in params]
        copies = [Copy(t.data_ptr(), p.tensor.data_ptr(), p.nbytes) for t, p in zip(tensors, params, strict=True)]
        self.submitted.append(next(i for i, block in enumerate(self.blocks) if block[0] is params[0]))
        self.made += [weakref.ref(t) for t in tensors]
        return tensors, self.link.submit(copies)

    def read(self, block: int, at: int = 0) -> torch.Tensor:
        found = self.loose.fetch(self.blocks[block][at])
        assert found is not None
        assert torch.equal(found, self.blocks[block][at].tensor), "read before it was there"
        return found

    @property
    def held_bytes(self) -> int:
        return sum(t.nbytes for ref in self.made if (t := ref()) is not None)


@given(
    st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=2), min_size=1, max_size=6),
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3)), max_size=30),
)
def test_any_access_finds_its_bytes_within_the_window(
    sizes: list[list[int]], window: int, reads: list[tuple[int, int]]
) -> None:
    source = Source(sizes, window)
    largest = max(sum(block) for block in sizes)
    for number, runs in reads:
        block = number % len(sizes)
        source.link.run(runs)
        source.read(block, number % len(sizes[block]))
        assert source.held_bytes <= window + largest
    source.loose.close()
    assert source.held_bytes == 0


def test_blocks_come_ahead_in_order_and_round_the_end() -> None:
    source = Source([[10]] * 5, window_bytes=20)
    source.read(0)
    assert source.submitted == [0, 1, 2]
    source.read(1)
    assert source.submitted == [0, 1, 2, 3]
    source.read(4)
    assert source.submitted == [0, 1, 2, 3, 4, 0], "1 is there still"


def test_a_block_is_copied_once_however_often_it_is_read() -> None:
    source = Source([[10, 10], [10]], window_bytes=0)
    first = source.read(0)
    assert source.read(0) is first
    source.read(0, 1)
    assert source.submitted == [0]
    source.read(1)
    source.read(0)
    assert source.submitted == [0, 1, 0]


def test_prepare_waits_for_the_block_alone() -> None:
    source = Source([[10]] * 4, window_bytes=30)
    source.loose.prepare(source.blocks[0][0])
    assert [job.done for job in source.link.jobs] == [True, False, False, False]


def test_what_somebody_holds_stays_right_after_it_was_dropped() -> None:
    source = Source([[10]] * 4, window_bytes=0)
    held = source.read(0)
    for block in (1, 2, 3):
        source.read(block)
    assert torch.equal(held, source.blocks[0][0].tensor)


def test_no_memory_is_dropped_under_a_copy_on_its_way() -> None:
    source = Source([[10]] * 4, window_bytes=20)
    source.read(0)
    waiting = source.link.jobs[1:]
    source.read(3)
    # block 2 is out of the window [3, 0, 1] now
    assert waiting[1].done, "its memory may be somebody else's by now"
    source.loose.close()
    assert all(job.done for job in source.link.jobs)


def test_a_parameter_of_no_block_is_not_its_business() -> None:
    source = Source([[10]], window_bytes=0)
    assert source.loose.fetch(param("other")) is None
    assert source.submitted == []
