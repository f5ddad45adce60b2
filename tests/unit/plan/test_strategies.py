"""One suite for every strategy, a user's own included."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.evaluate import evaluate
from ftd.plan.load import STRATEGIES
from ftd.plan.plan import Plan, assemble
from ftd.plan.problem import Problem
from ftd.plan.strategy import EvenSpread, Strategy, StreamOn, make_plan
from ftd.plan.workload import workloads
from tests.unit.plan.bytemap import run_on_bytes
from tests.unit.plan.shapes import LAYER_BYTES, LINK, blocks_of, llama, problems


class LargestStream:
    """A user's own: what is largest streams until the budget is kept, through the smallest ring."""

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[-1]
        work.check_budget()
        smallest = work.smallest()
        streamed = [i for i in work.streamable if work.sizes[i] <= smallest.largest]
        return assemble(work, streamed, smallest.ring_bytes, "largest stream")


ALL: dict[str, Strategy] = {name: made() for name, made in STRATEGIES.items()} | {
    "own": LargestStream(),
    "stream on": StreamOn(range(0, 1000, 3)),
}


@pytest.mark.parametrize("name", ALL)
@given(problem=problems(), above=st.integers(0, 30_000) | st.none())
@settings(max_examples=60, deadline=None)
def test_any_problem(name: str, problem: Problem, above: int | None) -> None:
    smallest = min(work.smallest().nbytes for work in workloads(problem))
    problem = replace(problem, budget_bytes=None if above is None else smallest + above)
    plan = make_plan(problem, ALL[name])  # the check of plans is part of it

    assert sorted((*plan.resident, *plan.streamed)) == list(range(len(plan.blocks)))
    assert sorted(i for part in plan.parts for i in part) == list(range(len(problem.blocks)))
    assert problem.budget_bytes is None or plan.resident_bytes + plan.ring_bytes <= problem.budget_bytes
    assert plan.ring_bytes <= workloads(problem)[0].ring_cap
    tied = {i for group in problem.tied for i in group}
    assert tied.isdisjoint(i for block in plan.streamed for i in plan.parts[block])
    assert plan.predicted == evaluate(plan.blocks, problem.cost, plan.copies)
    run_on_bytes(plan)
    assert ALL[name].plan(problem) == plan


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("budget", [872_415_232, 1_030_000_000, 4_490_000_000, 7_000_000_000, None])
def test_the_llama(name: str, budget: int | None) -> None:
    problem = Problem(llama(4096), LINK, budget, num_blocks=2, min_blocks=2)
    plan = make_plan(problem, ALL[name])
    assert plan.ring_bytes <= 2 * LAYER_BYTES
    assert budget is None or plan.gpu_bytes <= budget
    run_on_bytes(plan, forwards=3)


@pytest.mark.parametrize("name", ["auto", "even_spread"])
def test_memory_that_holds_everything_is_used(name: str) -> None:
    problem = Problem(llama(64), LINK, 8_000_000_000)
    plan = make_plan(problem, ALL[name])
    assert (plan.streamed, plan.ring_bytes, plan.copies) == ((), 0, ())
    assert plan.predicted.time_ns == plan.predicted.resident_ns


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_plan_is_a_plan(name: str) -> None:
    only_compute = (Block(0, "head", "head", 0, 500),)
    for blocks in ((), only_compute):
        plan = make_plan(Problem(blocks, LINK, 0), ALL[name])
        assert plan.gpu_bytes == 0
        assert plan.predicted.time_ns == sum(block.compute_ns for block in blocks)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("min_blocks", [2, 3])
def test_min_blocks_binds_slots_of_layers_alone(name: str, min_blocks: int) -> None:
    sizes = [1024, 2048, 512, 2048, 1536, 1024, 2048, 2048]
    layers = Problem(blocks_of(sizes, [10] * 8), CopyCost(0, 1e9), 10_240, num_blocks=3, min_blocks=min_blocks)
    plan = make_plan(layers, ALL[name])
    assert min_blocks * max(sizes[i] for i in plan.streamed) <= plan.ring_bytes <= 3 * 2048
    finer = replace(layers, blocks=blocks_of(sizes, [10] * 8, per_layer=4), budget_bytes=2048)
    assert make_plan(finer, ALL[name]).ring_bytes == 2048


@pytest.mark.parametrize("name", ALL)
def test_num_blocks_caps_the_ring(name: str) -> None:
    rings = [
        make_plan(Problem(llama(4096), LINK, 4_490_000_000, num_blocks=n, min_blocks=1), ALL[name]).ring_bytes
        for n in (1, 2, 4)
    ]
    assert all(ring <= n * LAYER_BYTES for ring, n in zip(rings, (1, 2, 4), strict=True))
    if name == "all_streamed":
        assert rings[0] < rings[1] < rings[2]


def test_tied_bytes_count_once_and_stay() -> None:
    blocks = blocks_of([4096, 1024, 1024, 1024, 4096], [10] * 5)
    plan = make_plan(Problem(blocks, CopyCost(0, 1e9), 4096 + 2048, 4, 2, tied=((0, 4),)), ALL["auto"])
    assert plan.resident == (0, 4)
    assert plan.resident_bytes == 4096
    assert plan.ring_bytes == 2048


@given(problem=problems(), above=st.integers(0, 30_000), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_in_another_order_what_streams_streams_on(problem: Problem, above: int, order: random.Random) -> None:
    """And nothing comes to be resident: with unmeasured compute that would be a load for nothing."""
    problem = replace(problem, granularity="block")
    problem = replace(problem, budget_bytes=workloads(problem)[0].smallest().nbytes + above)
    before = make_plan(problem, EvenSpread())
    moved = list(range(len(problem.blocks)))
    order.shuffle(moved)  # the block that is now at each place
    now = {old: new for new, old in enumerate(moved)}
    other = replace(
        problem,
        blocks=tuple(replace(problem.blocks[old], index=new) for new, old in enumerate(moved)),
        tied=tuple(tuple(now[i] for i in group) for group in problem.tied),
    )
    streamed = {now[i] for i in before.streamed}
    budget = other.budget_bytes or 0
    for more in (0, budget // 9):
        plan = make_plan(replace(other, budget_bytes=budget + more), StreamOn(streamed))
        assert set(plan.streamed) == streamed or not plan.streamed  # or all of it fits
    smallest = workloads(other)[0].smallest().nbytes
    assert make_plan(replace(other, budget_bytes=smallest), StreamOn(streamed)).gpu_bytes <= smallest
