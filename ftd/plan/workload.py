"""A problem at one granularity, as numbers: what may stream, what that costs, what the ring may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ftd.plan.block import Block, Joined, by_layer
from ftd.plan.errors import BudgetError
from ftd.plan.problem import Problem
from ftd.units import format_bytes


class Smallest(NamedTuple):
    """The plan of least memory: what is no larger than `largest` streams through a ring of `ring_bytes`."""

    nbytes: int
    largest: int
    ring_bytes: int


class Workload:
    """The arrays that a search walks over; all indices are those of `blocks`.

    Attributes:
        blocks: the problem's, or its layers.
        parts: by block, the indices of the problem's blocks in it.
        sizes: slot bytes by block.
        copy_ns, compute_ns: by block, as measured.
        streamable: indices of blocks that have bytes and share them with nobody.
        fixed_bytes: what is resident in every plan.
        total_bytes: what is resident when nothing streams.
        layer_sized: every streamable block is a whole layer, so that `min_blocks` binds.
        ring_cap: the largest ring that `num_blocks` allows.
    """

    def __init__(self, problem: Problem, *, layers: bool) -> None:
        tied = {index for group in problem.tied for index in group}
        joined = by_layer(problem.blocks, tied) if layers else [Joined(b, (b.index,)) for b in problem.blocks]
        self.problem = problem
        self.blocks: tuple[Block, ...] = tuple(block for block, _ in joined)
        self.parts: tuple[tuple[int, ...], ...] = tuple(parts for _, parts in joined)
        self.sizes = [block.slot_bytes for block in self.blocks]
        self.copy_ns = [problem.cost.copy_ns(block.nbytes) for block in self.blocks]
        self.compute_ns = [block.compute_ns for block in self.blocks]
        self.streamable = [i for i, size in enumerate(self.sizes) if size and tied.isdisjoint(self.parts[i])]
        self.fixed_bytes = sum(max(problem.blocks[i].slot_bytes for i in group) for group in problem.tied if group)
        self.total_bytes = self.fixed_bytes + sum(self.sizes[i] for i in self.streamable)
        a_layer = Counter(self.blocks[i].layer for i in self.streamable)
        self.layer_sized = layers or all(count == 1 for count in a_layer.values())
        self.ring_cap = problem.num_blocks * _largest_layer(problem)

    def ring_floor(self, streamed: Sequence[int]) -> int:
        """The smallest ring that these blocks may have: what the largest needs, or `min_blocks` of it."""
        if not streamed:
            return 0
        largest = max(self.sizes[i] for i in streamed)
        if not self.layer_sized:
            return largest
        return min(self.problem.min_blocks * largest, sum(self.sizes[i] for i in streamed))

    def resident_bytes(self, streamed: Sequence[int]) -> int:
        return self.total_bytes - sum(self.sizes[i] for i in streamed)

    def smallest(self) -> Smallest:
        """The least memory of any plan, exactly.

        A plan whose largest streamed block is of `c` bytes takes least when everything of up to `c` streams, so one
        candidate for each size is enough. O(n log n).
        """
        best = Smallest(self.total_bytes, 0, 0)
        slots = self.problem.min_blocks if self.layer_sized else 1
        below = 0
        sizes = Counter(self.sizes[i] for i in self.streamable)
        for size in sorted(sizes):
            below += size * sizes[size]
            ring_bytes = min(slots * size, below)
            best = min(best, Smallest(self.total_bytes - below + ring_bytes, size, ring_bytes))
        return best

    def check_budget(self) -> None:
        """Refuses a budget that no plan can keep.

        Raises:
            BudgetError: with the smallest budget that works.
        """
        budget, smallest = self.problem.budget_bytes, self.smallest()
        if budget is None or budget >= smallest.nbytes:
            return
        needed = smallest.nbytes
        raise BudgetError(
            f"{len(self.streamable)} blocks of {format_bytes(self.total_bytes)} cannot run in {budget} bytes of GPU "
            f"memory ({format_bytes(budget)}): the smallest budget that works is {needed} bytes "
            f"({format_bytes(needed)})",
            f"allow at least {needed} bytes, or manage finer blocks"
            + (f", or lower min_blocks, which is {self.problem.min_blocks}" if self.layer_sized else ""),
            needed,
        )


def workloads(problem: Problem) -> list[Workload]:
    """The granularities that a problem lets its strategy choose from; layers first, since they cost fewer hooks."""
    if problem.granularity == "layer":
        return [Workload(problem, layers=True)]
    fine = Workload(problem, layers=False)
    if problem.granularity == "block" or fine.layer_sized:
        return [fine]
    return [Workload(problem, layers=True), fine]


def _largest_layer(problem: Problem) -> int:
    again = {index for group in problem.tied for index in group[1:]}
    layers: dict[str, int] = {}
    for block in problem.blocks:
        if block.index not in again:
            layers[block.layer] = layers.get(block.layer, 0) + block.slot_bytes
    return max(layers.values(), default=0)
