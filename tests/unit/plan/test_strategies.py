"""One suite for every strategy, a user's own included."""

import math
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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("min_blocks", [4, 6])
def test_whole_layers_have_room_for_min_blocks_within_the_budget(name: str, min_blocks: int) -> None:
    problem = Problem(blocks_of([512] * 20), LINK, 512 * 10, num_blocks=6, min_blocks=min_blocks)
    plan = make_plan(problem, ALL[name])
    assert 512 * min_blocks <= plan.ring_bytes


class WhateverGapsCost(StreamOn):
    _SLOWER = math.inf


def _reordered(problem: Problem, moved: list[int]) -> Problem:
    """With the block that each place now has."""
    now = {old: new for new, old in enumerate(moved)}
    return replace(
        problem,
        blocks=tuple(replace(problem.blocks[old], index=new) for new, old in enumerate(moved)),
        tied=tuple(tuple(now[i] for i in group) for group in problem.tied),
    )


@given(problem=problems(), above=st.integers(0, 30_000), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_in_another_order_what_streams_streams_on(problem: Problem, above: int, order: random.Random) -> None:
    """And nothing comes to be resident: with unmeasured compute that would be a load for nothing."""
    problem = replace(problem, granularity="block")
    problem = replace(problem, budget_bytes=workloads(problem)[0].smallest().nbytes + above)
    before = make_plan(problem, EvenSpread())
    moved = list(range(len(problem.blocks)))
    order.shuffle(moved)
    other = _reordered(problem, moved)
    streamed = {moved.index(i) for i in before.streamed}
    budget = other.budget_bytes or 0
    for more in (0, budget // 9):
        plan = make_plan(replace(other, budget_bytes=budget + more), WhateverGapsCost(streamed))
        assert set(plan.streamed) == streamed or not plan.streamed  # or all of it fits
    smallest = workloads(other)[0].smallest().nbytes
    assert make_plan(replace(other, budget_bytes=smallest), StreamOn(streamed)).gpu_bytes <= smallest


_ORDERS = {
    "reversed": lambda i: -i,
    "mlp before attention": lambda i: (i // 7, i % 7 < 4),
    "by kind": lambda i: (i % 7, i),
    "attention first": lambda i: (i % 7 >= 4, i),
    "at random": lambda i: random.Random(i).random(),
}


@pytest.mark.parametrize("name", _ORDERS)
@pytest.mark.parametrize("budget", [2_000_000_000, 4_490_000_000, 6_000_000_000])
@pytest.mark.parametrize("share", [0.75, 0.9, 1.0, 1.25])
def test_what_streams_on_is_about_as_fast_as_an_even_spread(name: str, budget: int, share: float) -> None:
    """Also where memory turns out to be scarcer, which loads nothing, or less scarce."""
    true = llama(4096)
    blind = Problem(tuple(replace(block, compute_ns=0) for block in true), LINK, budget)
    registered = sorted(range(len(true)), key=_ORDERS[name])
    streamed = {registered[i] for i in make_plan(_reordered(blind, registered), EvenSpread()).streamed}
    now = replace(blind, budget_bytes=int(budget * share))
    kept, even = make_plan(now, StreamOn(streamed)), make_plan(now, EvenSpread())
    kept_ns, even_ns = (evaluate(true, LINK, plan.copies).time_ns for plan in (kept, even))
    assert kept_ns <= 1.15 * even_ns
    assert set(kept.streamed) >= streamed or share > 1 or kept.streamed == even.streamed


def test_what_streams_in_one_stretch_does_not_stream_on() -> None:
    problem = Problem(tuple(replace(block, compute_ns=0) for block in llama(64)), LINK, 4_490_000_000)
    even = make_plan(problem, EvenSpread())
    assert make_plan(problem, StreamOn(range(len(even.streamed)))) == even
