from dataclasses import replace

import pytest

from ftd.plan.check import check_plan
from ftd.plan.cost import CopyCost
from ftd.plan.errors import PlanError
from ftd.plan.evaluate import CopyStep, evaluate
from ftd.plan.plan import Placement, Plan, assemble
from ftd.plan.problem import Problem
from ftd.plan.workload import Workload
from tests.unit.plan.shapes import blocks_of

PROBLEM = Problem(blocks_of([1024] * 6, [100] * 6, per_layer=6), CopyCost(0, 1e9), 4096, 2, 2)


def _plan(streamed: range = range(1, 6), ring_bytes: int = 3072) -> Plan:
    return assemble(Workload(PROBLEM, layers=False), streamed, ring_bytes, "mine")


def _with_copies(plan: Plan, copies: tuple[CopyStep, ...]) -> Plan:
    return replace(plan, copies=copies, predicted=evaluate(plan.blocks, PROBLEM.cost, copies))


def test_a_sound_plan_passes_and_may_wait_longer_than_it_has_to() -> None:
    check_plan(PROBLEM, _plan())
    plan = _plan(range(1, 6), 3072)
    late = tuple(CopyStep(block, block - 1) for block in plan.streamed)
    check_plan(PROBLEM, _with_copies(plan, late))


def test_every_copy_submitted_one_block_earlier_is_refused() -> None:
    plan = _plan()
    for at, step in enumerate(plan.copies):
        early = CopyStep(step.block, step.after_block - 1)
        copies = (*plan.copies[:at], early, *plan.copies[at + 1 :])
        with pytest.raises(PlanError, match=r"its bytes are used until|order"):
            check_plan(PROBLEM, _with_copies(plan, copies))


def test_a_place_moved_onto_another_is_refused() -> None:
    plan = _plan()
    moved = tuple(Placement(p.block, 0, p.nbytes) for p in plan.placements)
    with pytest.raises(PlanError, match="its bytes are used until"):
        check_plan(PROBLEM, replace(plan, placements=moved))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resident": ()}, "exactly once"),
        ({"resident": (0, 1)}, "exactly once"),
        ({"resident_bytes": 0}, "resident blocks take 1024 bytes, not 0"),
        ({"ring_bytes": 512}, "the ring has 512 bytes, expected 1024 to 12288"),
        ({"ring_bytes": 20480}, "the ring has 20480 bytes"),
        ({"ring_bytes": 8192}, "it takes 9216 bytes of GPU memory, the budget is 4096"),
        ({"blocks": blocks_of([1024] * 6)}, "neither the problem's 6 blocks nor their layers"),
        ({"copies": ()}, "not every streamed block is copied exactly once"),
    ],
)
def test_what_contradicts_the_problem_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(PROBLEM, replace(_plan(), **change))


def test_places_outside_the_ring_and_unaligned_ones_are_refused() -> None:
    plan = _plan()
    first, *rest = plan.placements
    for place in (Placement(1, 256, 1024), Placement(1, 2560, 1024), Placement(1, 0, 512)):
        with pytest.raises(PlanError, match=r"lies at|has a place of"):
            check_plan(PROBLEM, replace(plan, placements=(place, *rest)))
    assert first.block == 1


def test_a_prediction_that_flatters_is_refused() -> None:
    plan = _plan()
    with pytest.raises(PlanError, match="prediction"):
        check_plan(PROBLEM, replace(plan, predicted=replace(plan.predicted, time_ns=1)))


def test_tied_blocks_may_not_stream() -> None:
    tied = replace(PROBLEM, tied=((1, 3),), budget_bytes=None)
    plan = _plan()
    with pytest.raises(PlanError, match="'b1' streams, though"):
        check_plan(tied, plan)
