"""Whether a plan, whoever made it, keeps every byte until it has been used, and keeps the budget."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ftd.plan.block import ALIGNMENT
from ftd.plan.errors import PlanError
from ftd.plan.evaluate import evaluate
from ftd.plan.plan import Placement, Plan
from ftd.plan.problem import Problem
from ftd.plan.workload import Workload

_SHOWN = 5


def check_plan(problem: Problem, plan: Plan) -> None:
    """Proves a plan before anything runs by it. O(n log n).

    Knows nothing of how plans are made: places may be any, and copies may wait longer than they have to.

    Raises:
        PlanError: with the first differences found.
    """
    wrong = list(_wrong_parts(problem, plan))
    wrong = wrong or [*_wrong_bytes(problem, plan), *_wrong_places(plan)]
    wrong = wrong or [*_wrong_copies(plan)]
    if not wrong and plan.predicted != evaluate(plan.blocks, problem.cost, plan.copies):
        wrong.append("the prediction is not what evaluate() says")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise PlanError(
            f"the plan of strategy {plan.strategy!r} is refused: {'; '.join(wrong[:_SHOWN])}{more}",
            "put plans together with assemble(), or report this if the strategy is one of ftd's own",
        )


def _wrong_parts(problem: Problem, plan: Plan) -> Iterator[str]:
    matching = [w for w in (Workload(problem, layers=False), Workload(problem, layers=True)) if w.blocks == plan.blocks]
    if not matching or matching[0].parts != plan.parts:
        yield f"its {len(plan.blocks)} blocks are neither the problem's {len(problem.blocks)} blocks nor their layers"
        return
    workload = matching[0]
    if sorted((*plan.resident, *plan.streamed)) != list(range(len(plan.blocks))):
        yield "not every block is exactly once resident or streamed"
        return
    if list(plan.streamed) != sorted(plan.streamed):
        yield "placements are not in the order of execution"
        return
    if stuck := sorted(set(plan.streamed) - set(workload.streamable)):
        yield f"block {plan.blocks[stuck[0]].name!r} streams, though it has no bytes or shares them"
    if plan.resident_bytes != workload.resident_bytes(plan.streamed):
        yield (
            f"resident blocks take {workload.resident_bytes(plan.streamed)} bytes, "
            f"not {plan.resident_bytes} as the plan says"
        )
    floor = workload.ring_floor(plan.streamed)
    if plan.streamed and not floor <= plan.ring_bytes <= workload.ring_cap:
        yield f"the ring has {plan.ring_bytes} bytes, expected {floor} to {workload.ring_cap}"


def _wrong_bytes(problem: Problem, plan: Plan) -> Iterator[str]:
    if problem.budget_bytes is not None and plan.gpu_bytes > problem.budget_bytes:
        yield f"it takes {plan.gpu_bytes} bytes of GPU memory, the budget is {problem.budget_bytes}"


def _wrong_places(plan: Plan) -> Iterator[str]:
    for place in plan.placements:
        name, needed = plan.blocks[place.block].name, plan.blocks[place.block].slot_bytes
        if place.address % ALIGNMENT or place.address < 0 or place.address + place.nbytes > plan.ring_bytes:
            yield f"block {name!r} lies at {place.address} in a ring of {plan.ring_bytes} bytes"
        if place.nbytes != needed:
            yield f"block {name!r} has a place of {place.nbytes} bytes, expected {needed}"


def _wrong_copies(plan: Plan) -> Iterator[str]:
    count = len(plan.blocks)
    if sorted(step.block for step in plan.copies) != sorted(plan.streamed):
        yield "not every streamed block is copied exactly once"
        return
    if any(not 0 <= step.after_block < count for step in plan.copies):
        yield f"a copy follows no block of the {count}"
        return
    if any(a.after_block > b.after_block for a, b in pairwise(plan.copies)):
        yield "copies are not in the order of the computes that they follow"
    # the engine is first in, first out: a copy needed early must not stand behind one that is needed late
    needed = [step.block + count * step.for_next_forward for step in plan.copies]
    if needed != sorted(needed):
        yield "copies are not submitted in the order in which blocks compute"
    free = dict(zip(plan.streamed, _last_users(plan.placements, count), strict=True))
    for step in plan.copies:
        at = step.after_block - count * step.for_next_forward
        if at < free[step.block]:
            after, user = plan.blocks[step.after_block].name, plan.blocks[free[step.block] % count].name
            name = plan.blocks[step.block].name
            yield f"the copy of {name!r} follows {after!r}, but its bytes are used until {user!r} has computed"


def _last_users(places: Sequence[Placement], count: int) -> list[int]:
    """Of each placement, when its bytes are last used before: a block of this forward, or (minus `count`) of the last.

    The map holds disjoint runs of bytes with their latest user; each placement replaces what it covers. After one
    forward it is that of the steady state.
    """
    starts, users = [0], [-(count + 1)]  # run i is [starts[i], starts[i + 1]); -(count + 1): never used
    found: list[int] = []
    for forward in (-count, 0):
        found = []
        for place in places:
            end = place.address + place.nbytes
            low = bisect_right(starts, place.address) - 1
            high = bisect_left(starts, end)
            found.append(max(users[low:high]))
            head = [starts[low]] if starts[low] < place.address else []
            tail = [end] if high == len(starts) or starts[high] > end else []
            rest = users[high - 1]
            users[low:high] = [*users[low : low + len(head)], place.block + forward, *([rest] * len(tail))]
            starts[low:high] = [*head, place.address, *tail]
    return found
