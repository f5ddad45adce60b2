"""A plan in the log: where each block is, what it was measured to take, and what it is predicted to wait for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ftd.plan.cost import CopyCost
from ftd.plan.plan import Plan
from ftd.units import format_bytes, format_seconds
from ftd_client.phase.course import Phase
from ftd_client.phase.timings import Timings
from ftd_client.wording import count

_log = logging.getLogger("ftd")

_HEADS = ("block", "bytes", "place", "compute", "copy", "stall", "copied after")


def describe(plan: Plan, phase: Phase) -> str:
    """A plan in one line."""
    return (
        f"{phase}: {count(len(plan.streamed), 'block')} of {format_bytes(plan.streamed_bytes)} stream through "
        f"{format_bytes(plan.ring_bytes)}, {format_bytes(plan.resident_bytes)} are resident; a forward is predicted to "
        f"take {format_seconds(plan.predicted.time_ns / 1e9)} (strategy {plan.strategy})"
    )


def log_plan(plan: Plan, cost: CopyCost, timings: Timings) -> None:
    """Logs the plan's table, and the compute times behind it where they were measured here."""
    _log.info("blocks of the plan (strategy %s):\n%s", plan.strategy, assignment_table(plan, cost))
    if timings.forwards:
        _log.info("compute per unit:\n%s", durations_table(timings.durations()))


def assignment_table(plan: Plan, cost: CopyCost) -> str:
    """One line for each block in the order of execution, aligned for people.

    A place is `resident`, or the block's bytes in the ring as `[from, to)`; `-` stands for nothing that could be said:
    compute that was not measured, a copy that does not take place.
    """
    after = {step.block: step for step in plan.copies}
    places = {place.block: place for place in plan.placements}
    rows = []
    for block in plan.blocks:
        place, step = places.get(block.index), after.get(block.index)
        rows.append((
            block.name,
            format_bytes(block.nbytes),
            "resident" if place is None else f"[{place.address:,}, {place.address + place.nbytes:,})",
            _time(block.compute_ns),
            _time(cost.copy_ns(block.nbytes)) if place is not None else "-",
            _time(plan.predicted.stall_ns[block.index]),
            "-" if step is None else plan.blocks[step.after_block].name + " (before)" * step.for_next_forward,
        ))  # fmt: skip
    return "\n".join(_aligned([_HEADS, *rows]))


def durations_table(durations: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Spread of measured compute times.

    Args:
        durations: nanoseconds by name, each measured at least once.
    """
    rows = []
    for name, measured in durations:
        spans = sorted(measured)
        typical = (spans[(len(spans) - 1) // 2] + spans[len(spans) // 2]) // 2
        rows.append((name, str(len(spans)), _time(spans[0]), _time(typical), _time(spans[-1])))
    return "\n".join(_aligned([("block", "forwards", "least", "median", "most"), *rows]))


def _time(span_ns: int) -> str:
    return format_seconds(span_ns / 1e9) if span_ns else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
