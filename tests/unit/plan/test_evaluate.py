import pytest
from hypothesis import given, settings

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.evaluate import CopyStep, evaluate
from ftd.plan.plan import Plan, assemble
from ftd.plan.problem import Problem
from ftd.plan.workload import Workload
from tests.unit.plan.shapes import LINK, blocks_of, llama, problems

SLOW = CopyCost(0, 512e9 / 100)  # 512 bytes take 100 ns


def _forwards(plan: Plan, cost: CopyCost, forwards: int) -> list[int]:
    """End times of forwards by an event-by-event reckoning that knows no steady state."""
    count = len(plan.blocks)
    computed: dict[tuple[int, int], int] = {}
    arrived: dict[tuple[int, int], int] = {}
    order = [(0, block, None) for block in plan.ahead] + [
        (forward + step.for_next_forward, step.block, (forward, step.after_block))
        for forward in range(forwards)
        for step in plan.copies
    ]
    engine, now, at, ends = 0, 0, 0, []
    for forward in range(forwards):
        for index in range(count):
            while at < len(order) and (order[at][2] is None or order[at][2] in computed):
                of, block, freed = order[at]
                engine = max(engine, 0 if freed is None else computed[freed]) + cost.copy_ns(plan.blocks[block].nbytes)
                arrived[of, block] = engine
                at += 1
            now = max(now, arrived.get((forward, index), 0)) + plan.blocks[index].compute_ns
            computed[forward, index] = now
        ends.append(now)
    return ends


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_steady_state_is_that_of_a_long_run(problem: Problem) -> None:
    work = Workload(problem, layers=False)
    plan = assemble(work, work.streamable, 2 * max(work.sizes, default=0), "test")
    ends = _forwards(plan, problem.cost, 120)
    assert plan.predicted.first_ns == ends[0]
    assert plan.predicted.time_ns == pytest.approx((ends[-1] - ends[59]) / 60, rel=2e-3, abs=2)


def test_copies_alone_take_the_time_of_the_link() -> None:
    work = Workload(Problem(blocks_of([512] * 4), SLOW, min_blocks=1), layers=False)
    plan = assemble(work, range(4), 1024, "test")
    assert plan.predicted.time_ns == 400
    assert plan.predicted.stall_ns == (100, 100, 100, 100)
    assert plan.predicted.copy_busy_fraction == 1.0
    assert plan.predicted.resident_ns == 0


def test_a_single_place_makes_copy_and_compute_take_turns() -> None:
    work = Workload(Problem(blocks_of([512] * 3, [50] * 3), SLOW, min_blocks=1), layers=False)
    plan = assemble(work, range(3), 512, "test")
    assert plan.predicted.time_ns == 3 * (100 + 50)
    assert plan.predicted.first_ns == 3 * (100 + 50)


def test_two_places_hide_copies_that_are_shorter_than_compute() -> None:
    work = Workload(Problem(blocks_of([512] * 4, [120] * 4), SLOW, min_blocks=1), layers=False)
    plan = assemble(work, range(4), 1024, "test")
    assert plan.predicted.time_ns == plan.predicted.resident_ns == 480
    assert plan.predicted.first_ns == 480 + 100  # the first copy has nothing to hide behind
    assert not any(plan.predicted.stall_ns)


def test_time_is_compute_and_stalls() -> None:
    work = Workload(Problem(llama(64), LINK), layers=False)
    plan = assemble(work, work.streamable, work.ring_cap, "test")
    predicted = plan.predicted
    assert predicted.time_ns == predicted.resident_ns + sum(predicted.stall_ns)
    assert predicted.copy_ns == sum(LINK.copy_ns(block.nbytes) for block in plan.blocks)


def test_blocks_that_stay_never_stall() -> None:
    blocks = (Block(0, "a", "x", 512, 10), Block(1, "b", "y", 512, 10), Block(2, "c", "z", 512, 10))
    predicted = evaluate(blocks, SLOW, [CopyStep(1, 1)])
    assert predicted.stall_ns == (0, 80, 0)  # submitted when the block itself has computed, 20 ns before it is due
