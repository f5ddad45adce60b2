"""From units and times to a plan: repeated units, budgets that do not hold them, and plans before anything is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.plan.cost import CopyCost
from ftd.plan.errors import BudgetError
from ftd.plan.plan import Plan
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, Auto, EvenSpread, Strategy
from ftd_client import OffloadConfig
from ftd_client.phase.planning import Measured, choose_plan
from ftd_client.stream.units import Unit

from .units import unit

COST = CopyCost(100.0, 1e9)
KIB = 1024


class Asked:
    """A strategy that keeps the problem it was asked to solve."""

    def __init__(self, asks: Strategy | None = None) -> None:
        self._asks = asks or Auto()
        self.problems: list[Problem] = []

    def plan(self, problem: Problem) -> Plan:
        self.problems.append(problem)
        return self._asks.plan(problem)


def measured(order: Sequence[Unit], each_ns: int = 10_000, prefix_ns: int = 7) -> Measured:
    return Measured(prefix_ns, (each_ns,) * len(order), None)


def config(**fields: Any) -> OffloadConfig:
    return OffloadConfig(**({"num_blocks": 2, "min_blocks": 2} | fields))


def nbytes(each: Unit) -> int:
    return each.nbytes


def chosen(
    order: Sequence[Unit], known: Measured | None = None, budget: int | None = None, **fields: Any
) -> tuple[Plan, list[Unit | None]]:
    return choose_plan(config(**fields), order, known or measured(order), COST, budget, nbytes)


def resident(plan: Plan, units: Sequence[Unit | None]) -> list[str]:
    found = [units[part] for index in plan.resident for part in plan.parts[index]]
    return list(dict.fromkeys(each.name for each in found if each is not None))


def streamed(plan: Plan, units: Sequence[Unit | None]) -> list[str]:
    found = [units[part] for index in plan.streamed for part in plan.parts[index]]
    return [each.name for each in found if each is not None]


def test_the_problem_says_what_is_known() -> None:
    asked = Asked()
    order = [unit("a", layer="l", nbytes=KIB), unit("b", layer="l", nbytes=2 * KIB)]
    _, units = chosen(
        order,
        Measured(7, (10, 20), None),
        5000,
        load_strategy=asked,
        num_blocks=3,
        min_blocks=2,
        transfer_budget_scale=0.5,
    )
    (problem,) = asked.problems
    assert [(b.name, b.layer, b.nbytes, b.compute_ns) for b in problem.blocks] == [
        ("(before the first block)", "", 0, 7),
        ("a", "l", KIB, 10),
        ("b", "l", 2 * KIB, 20),
    ]
    assert (problem.cost, problem.budget_bytes) == (COST, 5000)
    assert (problem.num_blocks, problem.min_blocks, problem.transfer_budget_scale) == (3, 2, 0.5)
    assert problem.tied == ()
    assert units == [None, *order]


def test_before_anything_is_measured_everything_streams() -> None:
    order = [unit(name, nbytes=KIB) for name in "abcd"]
    asked = Asked()
    plan, units = chosen(order, Measured.nothing(4), load_strategy=asked)
    assert not asked.problems
    assert streamed(plan, units) == list("abcd")
    assert plan.strategy == AllStreamed.name


def test_with_a_budget_the_strategy_chooses_from_the_first_plan_on() -> None:
    order = [unit(name, nbytes=KIB) for name in "abcd"]
    asked = Asked()
    plan, units = chosen(order, Measured.nothing(4), 10**6, load_strategy=asked)
    assert len(asked.problems) == 1
    assert streamed(plan, units) == []
    assert resident(plan, units) == list("abcd")


@pytest.mark.parametrize("strategy", [None, Auto(), AllStreamed(), EvenSpread()])
def test_a_unit_that_may_not_stream_does_not(strategy: Any) -> None:
    order = [unit("a", nbytes=KIB), unit("b", nbytes=KIB, resident="for a reason"), unit("c", nbytes=KIB)]
    for known in (measured(order, 10**6), Measured.nothing(3)):
        plan, units = chosen(order, known, load_strategy=strategy)
        assert "b" in resident(plan, units)
        assert "b" not in streamed(plan, units)


def test_a_unit_that_is_visited_twice_is_one_tensor_that_stays() -> None:
    asked = Asked(AllStreamed())
    a, b, c = (unit(name, nbytes=KIB) for name in "abc")
    plan, units = chosen([a, b, c, a], load_strategy=asked)
    (problem,) = asked.problems
    assert problem.tied == ((1, 4),)
    assert [block.name for block in problem.blocks[1:]] == ["a", "b", "c", "a#2"]
    assert resident(plan, units) == ["a"]
    assert plan.resident_bytes == KIB, "its bytes count once"


def test_where_the_budget_is_too_small_for_it_only_the_first_visit_is_planned() -> None:
    asked = Asked()
    a = unit("a", layer="l", nbytes=64 * KIB)
    small = [unit(name, layer="l", nbytes=KIB) for name in "bcd"]
    budget = 64 * KIB + 512
    order = [a, *small, a, *small]
    plan, units = chosen(order, Measured(3, (10, 1, 1, 1, 20, 2, 2, 2), None), budget, load_strategy=asked)
    problem = asked.problems[-1]
    assert len(asked.problems) == 2
    assert problem.tied == ()
    assert [(block.name, block.compute_ns) for block in problem.blocks[1:]] == [("a", 30), ("b", 3), ("c", 3), ("d", 3)]
    assert units == [None, a, *small]
    assert plan.gpu_bytes <= budget
    assert "a" in streamed(plan, units)


def test_what_must_stay_stays_where_only_first_visits_are_planned() -> None:
    a, stuck = unit("a", layer="l", nbytes=64 * KIB), unit("s", layer="l", nbytes=KIB, resident="for a reason")
    small = unit("b", layer="l", nbytes=KIB)
    plan, units = chosen([a, stuck, small, a], budget=65 * KIB)
    assert "s" in resident(plan, units)
    assert "a" in streamed(plan, units)


def test_a_budget_that_nothing_fits_is_refused_with_the_smallest_that_works() -> None:
    order = [unit(name, nbytes=KIB) for name in "abcd"]
    for repeated in (order, [*order, order[0]]):
        with pytest.raises(BudgetError) as caught:
            chosen(repeated, budget=512)
        smallest = caught.value.smallest_bytes
        assert smallest > 512
        assert chosen(repeated, budget=smallest)[0].gpu_bytes <= smallest
        with pytest.raises(BudgetError):
            chosen(repeated, budget=smallest - 1)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(0, 12_000),
    st.lists(st.integers(1, 5000), min_size=6, max_size=6),
)
def test_a_plan_holds_every_unit_once_and_keeps_the_budget(visits: list[int], budget: int, sizes: list[int]) -> None:
    made = [unit(f"u{i}", nbytes=size) for i, size in enumerate(sizes)]
    order = [made[i] for i in visits]
    try:
        plan, units = chosen(order, budget=budget)
    except BudgetError as error:
        assert budget < error.smallest_bytes
        return
    there, through = resident(plan, units), streamed(plan, units)
    assert sorted([*there, *through]) == sorted({each.name for each in order}), "each is in one place"
    assert plan.gpu_bytes <= budget


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(0, 12_000),
    st.lists(st.integers(1, 5000), min_size=6, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(0, 6),
)
def test_so_does_one_that_goes_on_from_another(
    visits: list[int], budget: int, sizes: list[int], before: set[int], stuck: int
) -> None:
    """Whatever streamed, and whatever of it is visited twice now, or must stay."""
    made = [unit(f"u{i}", nbytes=size, resident="for a reason" if i == stuck else "") for i, size in enumerate(sizes)]
    order = [made[i] for i in visits]
    try:
        plan, units = choose_plan(
            config(), order, Measured.nothing(len(order)), COST, budget, nbytes, {made[i] for i in before}
        )
    except BudgetError as error:
        assert budget < error.smallest_bytes
        return
    assert sorted([*resident(plan, units), *streamed(plan, units)]) == sorted({each.name for each in order})
    assert f"u{stuck}" not in streamed(plan, units)
    assert plan.gpu_bytes <= budget


def test_times_go_along_to_another_order_by_name() -> None:
    a, b, c = unit("a"), unit("b"), unit("c")
    known = Measured(7, (10, 20), 5)
    again = known.reordered([a, b], [c, unit("b"), a, a], 9)
    assert again == Measured(7, (0, 20, 10, 0), 9)


@pytest.mark.parametrize(
    ("known", "what"), [(False, Measured.nothing(2)), (True, Measured(1, (0, 0), None)), (True, Measured(0, (0, 1), 4))]
)
def test_known_is_any_time_at_all(known: bool, what: Measured) -> None:
    assert what.known is known
