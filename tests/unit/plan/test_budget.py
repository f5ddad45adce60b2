import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ftd.errors import EXIT_MEMORY
from ftd.plan.cost import CopyCost
from ftd.plan.errors import BudgetError, PlanError
from ftd.plan.load import STRATEGIES
from ftd.plan.problem import Problem
from ftd.plan.strategy import make_plan
from ftd.plan.workload import workloads
from tests.unit.plan.shapes import LAYER_BYTES, LINK, UNIT, blocks_of, llama, problems


@pytest.mark.parametrize("name", STRATEGIES)
@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_the_smallest_budget_works_and_one_byte_less_does_not(name: str, problem: Problem) -> None:
    smallest = min(work.smallest().nbytes for work in workloads(problem))
    plan = make_plan(replace(problem, budget_bytes=smallest), STRATEGIES[name]())
    assert plan.gpu_bytes == smallest
    if smallest:
        with pytest.raises(BudgetError) as refused:
            make_plan(replace(problem, budget_bytes=smallest - 1), STRATEGIES[name]())
        assert refused.value.smallest_bytes == smallest
        assert str(smallest) in refused.value.message


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_no_choice_of_blocks_needs_less_than_the_smallest(problem: Problem) -> None:
    for work in workloads(problem):
        few = work.streamable[:9]
        chosen = ([few[i] for i in range(len(few)) if bits >> i & 1] for bits in range(1 << len(few)))
        least = min(work.resident_bytes(streamed) + work.ring_floor(streamed) for streamed in chosen)
        assert work.smallest().nbytes <= least
        if len(few) == len(work.streamable):
            assert work.smallest().nbytes == least


def test_the_smallest_budgets_of_the_llama() -> None:
    problem = Problem(llama(64), LINK, budget_bytes=0, num_blocks=4, min_blocks=3)
    for granularity, smallest in (("block", 14 * UNIT), ("auto", 14 * UNIT), ("layer", 3 * LAYER_BYTES)):
        with pytest.raises(BudgetError) as refused:
            make_plan(replace(problem, granularity=granularity), STRATEGIES["auto"]())
        assert refused.value.smallest_bytes == smallest


def test_a_giant_layer_stays_where_slots_of_it_would_take_more() -> None:
    problem = Problem(blocks_of([512, 512, 8192, 512, 512, 512]), CopyCost(0, 1e9), 8192 + 1024, 4, 2)
    plan = make_plan(problem, STRATEGIES["auto"]())
    assert plan.resident == (2,)
    assert plan.ring_bytes == 1024


def test_the_error_survives_a_pickle_and_is_one_of_memory() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("no", "more", 7)))
    assert (error.message, error.remedy, error.smallest_bytes, error.exit_status) == ("no", "more", 7, EXIT_MEMORY)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_blocks": 2, "min_blocks": 3}, "min_blocks is 3, expected 1 to num_blocks, which is 2"),
        ({"transfer_budget_scale": 0.0}, "transfer_budget_scale is 0.0"),
        ({"budget_bytes": -1}, "the budget is -1 bytes"),
        ({"granularity": "tensor"}, "granularity is 'tensor', expected one of block, layer, auto"),
        ({"tied": ((0, 1), (1,))}, "not disjoint groups"),
        ({"tied": ((6,),)}, "not disjoint groups of indices below 6"),
        ({"blocks": blocks_of([1, 2])[1:]}, "'b1' at position 0 has index 1"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said.replace("(", r"\(")):
        replace(Problem(blocks_of([512] * 6), CopyCost(0, 1e9)), **change)
