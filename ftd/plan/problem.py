"""What a strategy is asked to solve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.errors import PlanError

#: Blocks as they are given, neighbours of a layer joined, or whichever of the two plans better.
Granularity = Literal["block", "layer", "auto"]
GRANULARITIES: tuple[Granularity, ...] = ("block", "layer", "auto")


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks of a forward, what moving them costs, and the GPU memory that there is.

    Args:
        blocks: in the order of execution. A module that a forward calls twice stands there twice, as tied blocks.
        cost: of copies to this GPU.
        budget_bytes: GPU memory for resident blocks and the ring (memory mode: least time); None: latency mode,
            least memory in which no compute waits for a copy.
        num_blocks: the ring is at most this many times the largest layer.
        min_blocks: where blocks are whole layers, the ring has room for at least this many of the largest one that
            streams. Finer blocks know no such floor.
        transfer_budget_scale: latency mode counts compute as this many times what was measured: 0.95 leaves 5 % for
            noise, above 1 trades time for memory. Memory mode uses it up to 1 only: more would cost time there.
        granularity: of what streams. Where it is `"layer"`, a plan's blocks are not the problem's.
        tied: groups of indices of blocks whose bytes are the same memory. Such blocks stay resident, since one
            parameter has one address, and their bytes count once. A group of one just stays resident.

    Raises:
        PlanError: the parts contradict one another.
    """

    blocks: tuple[Block, ...]
    cost: CopyCost
    budget_bytes: int | None = None
    num_blocks: int = 4
    min_blocks: int = 4
    transfer_budget_scale: float = 1.0
    granularity: Granularity = "auto"
    tied: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        problems = [*self._block_problems(), *self._number_problems()]
        if problems:
            raise PlanError("nothing can be planned: " + "; ".join(problems), "correct what is passed to the planner")

    def _block_problems(self) -> list[str]:
        problems = [
            f"block {block.name!r} at position {i} has index {block.index}, {block.nbytes} bytes and "
            f"{block.compute_ns} ns, expected index {i} and numbers of 0 or more"
            for i, block in enumerate(self.blocks)
            if block.index != i or block.nbytes < 0 or block.compute_ns < 0
        ][:3]
        members = [index for group in self.tied for index in group]
        if len(set(members)) != len(members) or not set(members) <= set(range(len(self.blocks))):
            problems.append(f"tied blocks {self.tied} are not disjoint groups of indices below {len(self.blocks)}")
        return problems

    def _number_problems(self) -> list[str]:
        problems = []
        if not 1 <= self.min_blocks <= self.num_blocks:
            problems.append(f"min_blocks is {self.min_blocks}, expected 1 to num_blocks, which is {self.num_blocks}")
        if not (math.isfinite(self.transfer_budget_scale) and self.transfer_budget_scale > 0):
            problems.append(f"transfer_budget_scale is {self.transfer_budget_scale}, expected a number above 0")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            problems.append(f"the budget is {self.budget_bytes} bytes, expected 0 or more")
        if self.granularity not in GRANULARITIES:
            problems.append(f"granularity is {self.granularity!r}, expected one of {', '.join(GRANULARITIES)}")
        return problems
