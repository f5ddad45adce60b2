"""The one clock that participants compare: CLOCK_MONOTONIC, the same for every process of one boot.

Wall clocks jump, so they only appear in texts for people. The clock stops in suspend, which is what heartbeats
want: nobody made progress while the machine slept.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

NS = 1_000_000_000


def monotonic_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC; comparable between processes of one boot."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def wall_s() -> float:
    """Seconds since the epoch, for people to read; never compared."""
    return time.time()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time that travels down a call chain in place of timeouts. `at_ns` of None never comes."""

    at_ns: int | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """`seconds` from now; None and infinity are never."""
        return Deadline(None if seconds in (None, math.inf) else monotonic_ns() + int(seconds * NS))

    def remaining_s(self) -> float | None:
        """Seconds left, not below zero; None where there is no end."""
        return None if self.at_ns is None else max(0.0, (self.at_ns - monotonic_ns()) / NS)

    def expired(self) -> bool:
        return self.at_ns is not None and monotonic_ns() >= self.at_ns

    def pause(self, seconds: float) -> None:
        """Sleeps `seconds`, but not beyond the deadline: the beat of a bounded poll."""
        left = self.remaining_s()
        time.sleep(seconds if left is None else min(seconds, left))
