"""A plan as steps: where each block lies, which copies fill it, and which copies its end sets free. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ftd.plan.plan import Placement, Plan


class Turn(NamedTuple):
    """A streamed block of a plan; turns are numbered in the order of execution.

    Attributes:
        block: its index in the plan.
        parts: indices of the problem's blocks in it.
        address: its place, in bytes from the start of the ring.
        due: turns whose copies are submitted when this one ends.
        evicts: turns whose places its place overlaps.
    """

    block: int
    parts: tuple[int, ...]
    address: int
    due: tuple[int, ...]
    evicts: tuple[int, ...]


class Program(NamedTuple):
    """Turns, and those whose copies come before the first forward, in order."""

    turns: tuple[Turn, ...]
    ahead: tuple[int, ...]


def make_program(plan: Plan) -> Program:
    streamed = plan.streamed
    number = {block: turn for turn, block in enumerate(streamed)}
    due: list[list[int]] = [[] for _ in streamed]
    for step in plan.copies:
        # a strategy may name any block; the end of the streamed one before it is what can be noticed
        due[max(bisect_right(streamed, step.after_block) - 1, 0)].append(number[step.block])
    evicts = _overlapping(plan.placements)
    return Program(
        tuple(
            Turn(place.block, plan.parts[place.block], place.address, tuple(due[turn]), evicts[turn])
            for turn, place in enumerate(plan.placements)
        ),
        tuple(number[block] for block in plan.ahead),
    )


def _overlapping(places: Sequence[Placement]) -> list[tuple[int, ...]]:
    """Of each placement, the others that share bytes with it. O(n log n + pairs)."""
    by_address = sorted(range(len(places)), key=lambda i: places[i].address)
    found: list[list[int]] = [[] for _ in places]
    open_places: list[int] = []
    for i in by_address:
        start = places[i].address
        open_places = [j for j in open_places if places[j].address + places[j].nbytes > start]
        for j in open_places:
            found[i].append(j)
            found[j].append(i)
        open_places.append(i)
    return [tuple(sorted(others)) for others in found]
