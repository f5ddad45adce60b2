from typing import Any

import pytest

from ftd.plan.errors import PlanError
from ftd.plan.load import STRATEGIES, load_strategy
from ftd.plan.problem import Problem
from ftd.plan.strategy import Strategy, make_plan
from tests.unit.plan.shapes import LINK, blocks_of
from tests.unit.plan.test_strategies import LargestStream


class NoPlan:
    """Looks like a strategy and returns something else."""

    def plan(self, problem: Problem) -> Any:
        return list(problem.blocks)


READY = LargestStream()


def test_none_is_auto_and_names_are_names() -> None:
    assert load_strategy(None).__class__ is STRATEGIES["auto"]
    for name, made in STRATEGIES.items():
        assert load_strategy(name).__class__ is made


@pytest.mark.parametrize(
    "given",
    [READY, f"{__name__}.READY", f"{__name__}:READY", "tests.unit.plan.test_strategies.LargestStream"],
)
def test_a_users_own_is_found_and_plans(given: str | Strategy) -> None:
    plan = make_plan(Problem(blocks_of([512] * 6), LINK, 2048), load_strategy(given))
    assert plan.strategy == "largest stream"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("autos", "nearest: auto"),
        ("no.such_module.Thing", "module 'no.such_module' cannot be imported"),
        (f"{__name__}.Missing", "has no 'Missing'"),
        (f"{__name__}.LINK", "CopyCost without a method plan"),
        (LargestStream, "class LargestStream without"),
        (7, "int without"),
    ],
)
def test_what_is_no_strategy_is_refused(given: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        load_strategy(given)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="NoPlan returned list, expected a Plan"):
        make_plan(Problem(blocks_of([512]), LINK), NoPlan())
