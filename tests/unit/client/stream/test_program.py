"""A plan as turns: each copy is due once, after its place is free and in the plan's order; overlaps are all known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.plan.errors import BudgetError
from ftd.plan.evaluate import CopyStep, evaluate
from ftd.plan.plan import Plan
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, Auto, EvenSpread, Strategy, make_plan
from ftd_client.stream.program import Program, make_program
from tests.unit.plan.shapes import LINK, blocks_of, problems

STRATEGIES = st.sampled_from([AllStreamed(), Auto(), EvenSpread()])


def _plan(problem: Problem, strategy: Strategy, budget: int | None) -> Plan | None:
    try:
        return make_plan(replace(problem, budget_bytes=budget), strategy)
    except BudgetError:
        return None


@given(problems(), STRATEGIES, st.none() | st.integers(0, 60_000))
def test_turns_are_the_streamed_blocks_in_order(problem: Problem, strategy: Strategy, budget: int | None) -> None:
    plan = _plan(problem, strategy, budget)
    if plan is None:
        return
    program = make_program(plan)
    assert [turn.block for turn in program.turns] == list(plan.streamed)
    assert [turn.parts for turn in program.turns] == [plan.parts[block] for block in plan.streamed]
    assert [turn.address for turn in program.turns] == [place.address for place in plan.placements]


@given(problems(), STRATEGIES, st.none() | st.integers(0, 60_000))
def test_each_copy_is_due_once_in_the_plans_order(problem: Problem, strategy: Strategy, budget: int | None) -> None:
    plan = _plan(problem, strategy, budget)
    if plan is None:
        return
    program = make_program(plan)
    due = [program.turns[turn].block for each in program.turns for turn in each.due]
    assert due == [step.block for step in plan.copies]
    assert [program.turns[turn].block for turn in program.ahead] == list(plan.ahead)


@given(problems(), STRATEGIES, st.none() | st.integers(0, 60_000))
def test_evicts_names_every_overlap(problem: Problem, strategy: Strategy, budget: int | None) -> None:
    plan = _plan(problem, strategy, budget)
    if plan is None:
        return
    places = plan.placements
    for turn, one in zip(make_program(plan).turns, places, strict=True):
        mine = range(one.address, one.address + one.nbytes)
        overlaps = [
            i
            for i, other in enumerate(places)
            if other is not one and max(mine.start, other.address) < min(mine.stop, other.address + other.nbytes)
        ]
        assert list(turn.evicts) == overlaps


def _run(program: Program, forwards: int) -> None:
    """Runs forwards in order: what is reached is there, and nothing is overwritten before it has been used."""
    there = set()

    def submit(turn: int) -> None:
        there.difference_update(program.turns[turn].evicts)
        there.add(turn)

    for turn in program.ahead:
        submit(turn)
    for forward in range(forwards):
        for turn, each in enumerate(program.turns):
            assert turn in there, f"turn {turn} of forward {forward} finds nothing"
            for due in each.due:
                submit(due)


@given(problems(), STRATEGIES, st.none() | st.integers(0, 60_000))
def test_every_turn_finds_its_bytes(problem: Problem, strategy: Strategy, budget: int | None) -> None:
    plan = _plan(problem, strategy, budget)
    if plan is not None:
        _run(make_program(plan), 3)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_copy_after_a_block_that_stays_is_due_with_the_streamed_one_before_it(after: int) -> None:
    """Strategies may name any block; only ends of turns are noticed."""
    problem = Problem(blocks_of([0, 512, 0, 512, 512], [10] * 5), LINK, num_blocks=3, min_blocks=1, granularity="block")
    plan = make_plan(problem, AllStreamed())
    assert plan.streamed == (1, 3, 4)
    last = plan.copies[-1].block
    copies = tuple(CopyStep(step.block, after) for step in plan.copies)
    moved = replace(plan, copies=copies, predicted=evaluate(plan.blocks, LINK, copies))
    program = make_program(moved)
    # before the first streamed block nothing ends: its own end is the first that is noticed
    assert [len(turn.due) for turn in program.turns] == [3, 0, 0]
    assert program.turns[program.turns[0].due[-1]].block == last


def test_a_plan_that_streams_nothing_has_no_turns() -> None:
    problem = Problem(blocks_of([512, 512]), LINK, budget_bytes=10_000)
    assert make_program(make_plan(problem, Auto())) == Program((), ())
