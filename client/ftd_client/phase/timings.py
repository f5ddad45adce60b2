"""Compute times of many forwards, by unit, and how far they can be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ftd_client.stream.units import Unit

#: Forwards below which a median says little: one late kernel is then a third of the evidence.
_FEW_FORWARDS = 3
#: Spread of a forward's total above which the machine was busy with something else.
_WIDE_SPREAD = 0.10


@dataclass(frozen=True, slots=True)
class Quality:
    """What the measurements are worth.

    Attributes:
        forwards: how many were measured.
        spread: half the range between the quartiles of a forward's total, as a fraction of its median.
        problems: what makes a plan from them doubtful; empty where nothing does.
    """

    forwards: int
    spread: float
    problems: tuple[str, ...]


class Timings:
    """Compute times, forward by forward. Positions are the visits of units in the order of execution."""

    def __init__(self) -> None:
        self._prefixes: list[int] = []
        self._times: dict[tuple[Unit, int], list[int]] = defaultdict(list)
        self._totals: list[int] = []

    @property
    def forwards(self) -> int:
        return len(self._totals)

    def add(self, prefix_ns: int, spans: Sequence[tuple[Unit, int]]) -> None:
        """One forward: the time before the first unit, and of each visit in order."""
        turns: dict[Unit, int] = defaultdict(int)
        for unit, span in spans:
            self._times[unit, turns[unit]].append(span)
            turns[unit] += 1
        self._prefixes.append(prefix_ns)
        self._totals.append(prefix_ns + sum(span for _, span in spans))

    def clear(self) -> None:
        self._prefixes.clear()
        self._times.clear()
        self._totals.clear()

    def prefix_ns(self) -> int:
        return round(median(self._prefixes)) if self._prefixes else 0

    def compute_ns(self, order: Sequence[Unit]) -> list[int]:
        """Of each position in `order`, the median over forwards. A unit that some forwards skip counts with the share
        of forwards that reached it; further visits of a unit that stands once in the order are added to it."""
        turns: dict[Unit, int] = defaultdict(int)
        last = {unit: position for position, unit in enumerate(order)}
        found = []
        for position, unit in enumerate(order):
            wanted = [turns[unit]]
            turns[unit] += 1
            if last[unit] == position:
                wanted += [turn for known, turn in self._times if known is unit and turn >= turns[unit]]
            found.append(round(sum(self._typical(unit, turn) for turn in wanted)))
        return found

    def _typical(self, unit: Unit, turn: int) -> float:
        times = self._times.get((unit, turn))
        return median(times) * len(times) / self.forwards if times else 0.0

    def durations(self) -> list[tuple[str, list[int]]]:
        """What was measured of each visit, in nanoseconds; the second one of a unit is called `name#2`."""
        visits = self._times.items()
        return [(unit.name if not turn else f"{unit.name}#{turn + 1}", list(times)) for (unit, turn), times in visits]

    def quality(self) -> Quality:
        totals = sorted(self._totals)
        count = len(totals)
        spread = 0.0
        if count >= _FEW_FORWARDS and median(totals) > 0:
            spread = (totals[(3 * count) // 4] - totals[count // 4]) / 2 / median(totals)
        problems = []
        if count < _FEW_FORWARDS:
            problems.append(f"{count} forward{'s' * (count != 1)} measured, {_FEW_FORWARDS} or more expected")
        if spread > _WIDE_SPREAD:
            problems.append(f"forwards differ by {spread:.0%} of their median, at most {_WIDE_SPREAD:.0%} expected")
        return Quality(count, spread, tuple(problems))
