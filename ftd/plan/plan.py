"""A plan, how it is put together, and the check that every plan has to pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from ftd.plan.block import Block
from ftd.plan.evaluate import CopyStep, Prediction, evaluate
from ftd.plan.ring import Ring, lay_ring
from ftd.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a streamed block lies in the ring: bytes `[address, address + nbytes)`, whole multiples of 512."""

    block: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What a strategy chose. All indices are those of `blocks`.

    Attributes:
        strategy: name of the strategy, for people.
        blocks: what the plan moves: the problem's blocks, or its layers.
        parts: by block, the indices of the problem's blocks that it consists of.
        resident: indices of blocks that stay on the GPU, ascending; blocks of no bytes among them.
        placements: of streamed blocks, in the order of execution.
        copies: in the order in which a forward submits them; one for each streamed block. Those with
            `after_block >= block` are for the next forward; before the first forward they are submitted first.
        ring_bytes: size of the ring.
        resident_bytes: GPU memory of resident blocks, tied bytes once.
        predicted: what the evaluator says of exactly these blocks and copies.
    """

    strategy: str
    blocks: tuple[Block, ...]
    parts: tuple[tuple[int, ...], ...]
    resident: tuple[int, ...]
    placements: tuple[Placement, ...]
    copies: tuple[CopyStep, ...]
    ring_bytes: int
    resident_bytes: int
    predicted: Prediction

    @property
    def gpu_bytes(self) -> int:
        """What is compared with the budget."""
        return self.resident_bytes + self.ring_bytes

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        return tuple(placement.block for placement in self.placements)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross the link in one forward."""
        return sum(self.blocks[block].nbytes for block in self.streamed)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Blocks whose copies a forward finds submitted; before the first forward they are submitted in this order."""
        return tuple(step.block for step in self.copies if step.for_next_forward)


def assemble(workload: Workload, streamed: Collection[int], ring_bytes: int, strategy: str) -> Plan:
    """The plan in which `streamed` pass through a ring of at most `ring_bytes` and everything else is resident.

    Args:
        ring_bytes: raised to the floor where it is below it; what the ring does not need is not part of the plan.

    Raises:
        PlanError: a block is larger than the ring.
    """
    order = sorted(streamed)
    floor = workload.ring_floor(order)
    ring = lay_ring([workload.sizes[i] for i in order], max(ring_bytes, floor))
    return put_together(workload, order, ring, max(ring.nbytes, floor), strategy)


def put_together(workload: Workload, streamed: Sequence[int], ring: Ring, ring_bytes: int, strategy: str) -> Plan:
    """As `assemble`, of ascending blocks whose ring is laid out already."""
    steps = [CopyStep(block, streamed[after]) for block, after in zip(streamed, ring.after, strict=True)]
    copies = (*steps[ring.first_lap :], *steps[: ring.first_lap])
    chosen, sizes = set(streamed), workload.sizes
    return Plan(
        strategy=strategy,
        blocks=workload.blocks,
        parts=workload.parts,
        resident=tuple(i for i in range(len(workload.blocks)) if i not in chosen),
        placements=tuple(Placement(i, at, sizes[i]) for i, at in zip(streamed, ring.addresses, strict=True)),
        copies=copies,
        ring_bytes=ring_bytes,
        resident_bytes=workload.resident_bytes(streamed),
        predicted=evaluate(workload.blocks, workload.problem.cost, copies),
    )
