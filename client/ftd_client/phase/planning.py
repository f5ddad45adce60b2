"""From units and measurements to a plan that the strategy chose and the check has passed."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ftd.config.offload import OffloadConfig
from ftd.plan.block import Block
from ftd.plan.cost import CopyCost
from ftd.plan.errors import BudgetError
from ftd.plan.load import load_strategy
from ftd.plan.plan import Plan
from ftd.plan.problem import Problem
from ftd.plan.strategy import AllStreamed, EvenSpread, StreamOn, make_plan
from ftd_client.stream.units import Unit


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a forward's times; all zero while nothing is.

    Attributes:
        prefix_ns: before the first unit.
        compute_ns: of each unit in the order, until the next one is reached.
        activation_bytes: device memory at the peak of a forward, beyond what is there before it; None while unknown.
    """

    prefix_ns: int
    compute_ns: tuple[int, ...]
    activation_bytes: int | None

    @staticmethod
    def nothing(count: int) -> Measured:
        return Measured(0, (0,) * count, None)

    def reordered(self, before: Sequence[Unit], now: Sequence[Unit], activation_bytes: int | None) -> Measured:
        """What is known of the units of another order, where both have units of the same names."""
        spans = {unit.name: span for unit, span in zip(before, self.compute_ns, strict=True)}
        compute_ns = tuple(spans.pop(unit.name, 0) for unit in now)
        return Measured(self.prefix_ns, compute_ns, activation_bytes)

    @property
    def known(self) -> bool:
        return self.prefix_ns > 0 or any(self.compute_ns)


def choose_plan(
    config: OffloadConfig,
    order: Sequence[Unit],
    measured: Measured,
    cost: CopyCost,
    budget_bytes: int | None,
    nbytes: Callable[[Unit], int],
    streamed: Container[Unit] = (),
) -> tuple[Plan, list[Unit | None]]:
    """A plan for a forward of `order`, and what its problem's blocks are: None is the compute before the first unit.

    A unit that the order holds twice stays resident; where the budget does not allow that, only its first visit is
    planned, and the others load it on demand.

    Args:
        budget_bytes: for what is managed; None is latency mode.
        nbytes: the place that a unit takes.
        streamed: what the plan at work, if there is one, does not keep resident.

    Raises:
        BudgetError: no plan fits; it names the smallest budget that one does.
    """
    strategy = load_strategy(config.load_strategy)
    try:
        problem, units = _problem(config, order, measured, cost, budget_bytes, nbytes)
        if not measured.known and budget_bytes is None:
            # in latency mode, what hides behind compute streams: of unknown compute that would be nothing
            strategy = AllStreamed()
        elif not measured.known and config.load_strategy is None:
            # at once, and within a sixth of what a search finds, until there is something to search
            before = {index for index, unit in enumerate(units) if unit is not None and unit in streamed}
            strategy = StreamOn(before) if before else EvenSpread()
        return make_plan(problem, strategy), units
    except BudgetError:
        if len(set(order)) == len(order):
            raise
    first = list(dict.fromkeys(order))
    spans = dict.fromkeys(first, 0)
    for unit, span in zip(order, measured.compute_ns, strict=True):
        spans[unit] += span
    once = Measured(measured.prefix_ns, tuple(spans.values()), measured.activation_bytes)
    return choose_plan(config, first, once, cost, budget_bytes, nbytes, streamed)


def _problem(
    config: OffloadConfig,
    order: Sequence[Unit],
    measured: Measured,
    cost: CopyCost,
    budget_bytes: int | None,
    nbytes: Callable[[Unit], int],
) -> tuple[Problem, list[Unit | None]]:
    blocks = [Block(0, "(before the first block)", "", 0, measured.prefix_ns)]
    visits: dict[Unit, list[int]] = {}
    for unit, compute_ns in zip(order, measured.compute_ns, strict=True):
        index, turns = len(blocks), visits.setdefault(unit, [])
        name = unit.name if not turns else f"{unit.name}#{len(turns) + 1}"
        turns.append(index)
        blocks.append(Block(index, name, unit.layer, nbytes(unit), compute_ns))
    tied = tuple(tuple(turns) for unit, turns in visits.items() if unit.resident or len(turns) > 1)
    problem = Problem(
        tuple(blocks),
        cost,
        budget_bytes,
        num_blocks=config.num_blocks,
        min_blocks=config.min_blocks,
        transfer_budget_scale=config.transfer_budget_scale,
        tied=tied,
    )
    return problem, [None, *order]
