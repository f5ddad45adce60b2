"""Forwards run cell by cell on a map of the ring: the plainest statement of what a plan must never do."""

from math import gcd

from ftd.plan.plan import Plan


def run_on_bytes(plan: Plan, forwards: int = 5) -> None:
    """Runs forwards and asserts that every streamed block finds all of its bytes, of this forward's copy.

    A copy overwrites its place the moment it is submitted, which is the earliest that it may: bytes that are still
    needed are then missing when their block computes.
    """
    unit = gcd(plan.ring_bytes, *(n for p in plan.placements for n in (p.address, p.nbytes)))  # the coarsest map
    cells: list[tuple[int, int] | None] = [None] * (plan.ring_bytes // unit if unit else 0)
    place = {p.block: range(p.address // unit, (p.address + p.nbytes) // unit) for p in plan.placements}

    def copy(block: int, forward: int) -> None:
        for cell in place[block]:
            cells[cell] = (block, forward)

    for block in plan.ahead:
        copy(block, 0)
    for forward in range(forwards):
        for index in range(len(plan.blocks)):
            if index in place:
                found = {cells[cell] for cell in place[index]}
                assert found == {(index, forward)}, f"block {index} of forward {forward} finds {found}"
            for step in plan.copies:
                if step.after_block == index:
                    copy(step.block, forward + step.for_next_forward)
