"""What a copy to the GPU costs: a latency and a rate, fitted to measured copies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ftd.plan.errors import PlanError

#: Rounds of reweighting; the weights of the six sizes of FACTS' table stand still after three.
_ROUNDS = 8


class Sample(NamedTuple):
    """One measured copy."""

    nbytes: int
    elapsed_ns: float


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Time of one copy as a latency plus bytes over a rate.

    Args:
        latency_ns: time of a copy of no bytes; 0 or more.
        bytes_per_s: rate of a long copy; above 0.
    """

    latency_ns: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_ns) and self.latency_ns >= 0):
            raise PlanError(f"a copy's latency is {self.latency_ns} ns, expected 0 or more", "measure the link again")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise PlanError(
                f"the link's rate is {self.bytes_per_s} bytes/s, expected above 0", "measure the link again"
            )

    def copy_ns(self, nbytes: int) -> int:
        """Time of a copy of `nbytes`, never below what the line says; 0 for no bytes."""
        return math.ceil(self.latency_ns + nbytes * 1e9 / self.bytes_per_s) if nbytes else 0

    @staticmethod
    def fit(samples: Iterable[Sample | tuple[int, float]]) -> CopyCost:
        """The cost that explains measured copies best.

        Least squares weighted by the inverse of the time: weighted by its square, copies of 256 KiB, which no line
        describes (17 to 30 GB/s in one run), spoil 1 MiB by up to 26 %; unweighted, only the longest copy counts. The
        median stands for each size, and sizes further off the line than the median size lose weight (Huber). Both
        parameters are kept from turning negative, so that more bytes never cost less.

        Raises:
            PlanError: no sample has bytes and a time.
        """
        by_size: dict[int, list[float]] = defaultdict(list)
        for nbytes, elapsed_ns in samples:
            if nbytes > 0 and elapsed_ns > 0:
                by_size[nbytes].append(elapsed_ns)
        if not by_size:
            raise PlanError("no measured copy has bytes and a time", "measure at least one copy of 1 MiB or more")
        points = [(float(nbytes), median(times)) for nbytes, times in sorted(by_size.items())]
        trust = [1.0] * len(points)
        for _ in range(_ROUNDS):
            latency_ns, ns_per_byte = _line(points, trust)
            errors = [abs(latency_ns + ns_per_byte * x - y) / y for x, y in points]
            bound = max(median(errors), 1e-6)
            trust = [min(1.0, bound / error) if error else 1.0 for error in errors]
        return CopyCost(latency_ns, 1e9 / ns_per_byte)


def _line(points: list[tuple[float, float]], trust: list[float]) -> tuple[float, float]:
    """Latency and ns per byte of least squares, each weighted by trust over time; neither of them negative."""
    weights = [w / y for w, (_, y) in zip(trust, points, strict=True)]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    shared = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = shared / spread if spread > 0 else 0.0
    latency = mean_y - slope * mean_x
    if latency < 0 or slope <= 0:  # through the origin instead
        squares = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        return 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
    return latency, slope
