"""Strategies: what a user may put in the planner's place, and the three that come with it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ftd.plan.check import check_plan
from ftd.plan.errors import PlanError
from ftd.plan.evaluate import evaluate
from ftd.plan.plan import Plan, assemble, put_together
from ftd.plan.problem import Problem
from ftd.plan.search import least_memory, least_time
from ftd.plan.spread import fit, spread
from ftd.plan.workload import Workload, workloads


@runtime_checkable
class Strategy(Protocol):
    """Chooses what streams.

    A strategy is called once for each plan, from the thread that runs the model, and must give equal plans for equal
    problems. It need not prove anything: whoever asks it checks the plan. The short way to a valid one:

        class FirstHalfResident:
            def plan(self, problem):
                work = workloads(problem)[0]
                half = work.streamable[len(work.streamable) // 2 :]
                return assemble(work, half, work.ring_cap, "first half resident")
    """

    def plan(self, problem: Problem) -> Plan:
        """A plan for the problem.

        Raises:
            BudgetError: no plan fits the budget.
        """


def make_plan(problem: Problem, strategy: Strategy) -> Plan:
    """The strategy's plan, once it is proved.

    Raises:
        BudgetError: no plan fits the budget; the error carries the smallest that works.
        PlanError: the strategy gave something that is no plan, or one that would corrupt a forward.
    """
    plan = strategy.plan(problem)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"strategy {type(strategy).__name__} returned {type(plan).__name__}, expected a Plan",
            "return what assemble() gives",
        )
    check_plan(problem, plan)
    return plan


class Auto:
    """Searches: least time within a budget, or least memory in which nothing waits, at the better granularity."""

    name = "auto"

    def plan(self, problem: Problem) -> Plan:
        find = least_memory if problem.budget_bytes is None else least_time
        found = [(find(work), work) for work in _affordable(problem)]
        best, work = min(found, key=lambda one: one[0].score)  # of equals the first: whole layers
        return put_together(work, best.streamed, best.ring, best.ring_bytes, self.name)


class EvenSpread:
    """An even share of every stretch of compute streams, through a ring of a few blocks, without a search.

    Plans in a fraction of auto's time, and its plans change little when measurements do.
    """

    name = "even_spread"
    _SLOTS = 3  # docs/decisions/ring-and-planner.md

    def plan(self, problem: Problem) -> Plan:
        work = _affordable(problem)[-1]
        largest = max((work.sizes[i] for i in work.streamable), default=0)
        ring_bytes = min(max(self._SLOTS * largest, work.ring_floor(work.streamable)), work.ring_cap)
        if problem.budget_bytes is None:
            return self._hidden(work, ring_bytes)
        if work.total_bytes <= problem.budget_bytes:
            return assemble(work, [], 0, self.name)
        needed = work.total_bytes - problem.budget_bytes + ring_bytes
        if needed > sum(work.sizes[i] for i in work.streamable):
            return _smallest_plan(work, self.name)
        return self._within(work, needed, ring_bytes)

    def _within(self, work: Workload, needed_bytes: int, ring_bytes: int) -> Plan:
        """The plan in which at least `needed_bytes` stream, and hardly more."""
        return assemble(work, _even(work, work.streamable, needed_bytes), ring_bytes, self.name)

    def _hidden(self, work: Workload, ring_bytes: int) -> Plan:
        hidden_ns = work.problem.transfer_budget_scale * sum(work.compute_ns)
        copying_ns = sum(work.copy_ns[i] for i in work.streamable)
        share = min(1.0, hidden_ns / max(copying_ns, 1))
        offered = sum(work.sizes[i] for i in work.streamable)
        streamed = spread(work, work.streamable, int(share * offered)) if share else []
        return assemble(work, streamed, ring_bytes, self.name)


class StreamOn(EvenSpread):
    """As even_spread; but in memory mode what streams already streams on. More does where memory is short, and less
    where much of it would stay free: while compute is unmeasured, no other choice is known to be worth a load. Unless
    gaps between what streams could cost much.

    Args:
        streamed: indices of the problem's blocks.
    """

    _FREE_SHARE = 1 / 8  # of the budget; activations that were not measured may have had half of that
    _SLOWER = 1.15  # than an even spread, at most; a load of half of what is resident costs about as many forwards

    def __init__(self, streamed: Container[int]) -> None:
        self._before = streamed

    def _within(self, work: Workload, needed_bytes: int, ring_bytes: int) -> Plan:
        kept = assemble(work, self._kept(work, needed_bytes), ring_bytes, self.name)
        even = super()._within(work, needed_bytes, ring_bytes)
        # gaps cost most where compute takes as long as copying
        cost = work.problem.cost
        each_ns = cost.copy_ns(needed_bytes) / max(sum(work.sizes), 1)
        blocks = [replace(block, compute_ns=round(block.nbytes * each_ns)) for block in work.blocks]
        kept_ns, even_ns = (evaluate(blocks, cost, plan.copies).time_ns for plan in (kept, even))
        return kept if kept_ns <= self._SLOWER * even_ns else even

    def _kept(self, work: Workload, needed_bytes: int) -> list[int]:
        before: list[int] = []
        others: list[int] = []
        for i in work.streamable:
            (before if any(part in self._before for part in work.parts[i]) else others).append(i)
        free_bytes = sum(work.sizes[i] for i in before) - needed_bytes
        if free_bytes < 0:
            return sorted(before + _even(work, others, -free_bytes))
        if free_bytes <= self._FREE_SHARE * (work.problem.budget_bytes or 0):
            return before
        return _even(work, before, needed_bytes)


class AllStreamed:
    """Every block streams, through the largest ring that the limits allow: the least that is ever resident.

    The plan to start with while compute is unmeasured.
    """

    name = "all_streamed"

    def plan(self, problem: Problem) -> Plan:
        work = _affordable(problem)[-1]
        budget = problem.budget_bytes
        if budget is not None and work.fixed_bytes + work.ring_floor(work.streamable) > budget:
            return _smallest_plan(work, self.name)
        room = work.ring_cap if budget is None else min(work.ring_cap, budget - work.fixed_bytes)
        # two laps at least: a ring that holds everything would be resident memory that is copied all the same
        half = -(-sum(work.sizes[i] for i in work.streamable) // 2)
        return assemble(work, work.streamable, min(room, max(half, work.ring_floor(work.streamable))), self.name)


def _even(work: Workload, eligible: Sequence[int], needed_bytes: int) -> list[int]:
    return fit(work, eligible, spread(work, eligible, needed_bytes), needed_bytes)


def _smallest_plan(work: Workload, name: str) -> Plan:
    smallest = work.smallest()
    streamed = [i for i in work.streamable if work.sizes[i] <= smallest.largest]
    return assemble(work, streamed, smallest.ring_bytes, name)


def _affordable(problem: Problem) -> list[Workload]:
    """Workloads that the budget allows; the finest stands last.

    Raises:
        BudgetError: none.
    """
    choices = workloads(problem)
    budget = problem.budget_bytes
    fitting = [work for work in choices if budget is None or work.smallest().nbytes <= budget]
    if not fitting:
        min(choices, key=lambda work: work.smallest().nbytes).check_budget()
    return fitting
