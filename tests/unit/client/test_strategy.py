"""The example of `ftd_client.strategy` runs as it stands, and plans any problem."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.config.offload import OffloadConfig
from ftd_client import strategy
from tests.unit.plan.bytemap import run_on_bytes
from tests.unit.plan.shapes import problems


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the docstring's example leaves behind."""
    found = doctest.DocTestParser().get_doctest(strategy.__doc__, dict(vars(strategy)), "strategy", None, 0)
    runner = doctest.DocTestRunner()
    said: list[str] = []
    runner.run(found, out=said.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    assert found.examples
    return found.globs


def test_the_example_is_a_strategy_of_the_configuration(example: dict[str, Any]) -> None:
    user = example["CheapestToHide"]()
    assert isinstance(user, strategy.Strategy)
    assert strategy.load_strategy(OffloadConfig(load_strategy=user).load_strategy) is user


@given(problem=problems(), above=st.integers(0, 30_000) | st.none())
def test_the_example_plans_any_problem(example: dict[str, Any], problem: strategy.Problem, above: int | None) -> None:
    smallest = min(work.smallest().nbytes for work in strategy.workloads(problem)[-1:])
    problem = replace(problem, budget_bytes=None if above is None else smallest + above)
    run_on_bytes(strategy.make_plan(problem, example["CheapestToHide"]()))


def test_every_name_is_there() -> None:
    assert set(strategy.__all__) <= set(vars(strategy))
    assert sorted(strategy.__all__, key=str.casefold) == sorted(set(strategy.__all__), key=str.casefold)
