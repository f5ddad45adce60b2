"""A cyclic ring at fixed addresses: where each streamed block lands, and when its bytes are free.

A forward fills the ring an integral number of times; one filling is a *lap*. Every lap starts at address 0, so a block
has the same place in every forward, and the seam between two forwards is a change of lap like any other. Laps are
made even: a short last lap would leave the first copies of the next forward waiting for the last blocks of this one.

All positions here count streamed blocks only, from 0, in the order of execution.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ftd.plan.errors import PlanError
from ftd.units import format_bytes

#: Halvings on the way to the smallest ring for a number of laps: to a hundredth of what there is to gain.
_PROBES = 7


@dataclass(frozen=True, slots=True)
class Ring:
    """Places of streamed blocks.

    Attributes:
        addresses: of each block, in bytes from the start of the ring.
        after: of each block, the position of the block whose compute must have ended before the copy may start. For
            the first lap that compute is the previous forward's.
        first_lap: how many blocks the first lap has: those that a cold ring takes at once.
        nbytes: bytes used, at most those asked for.
    """

    addresses: tuple[int, ...]
    after: tuple[int, ...]
    first_lap: int
    nbytes: int


EMPTY = Ring((), (), 0, 0)


def lay_ring(sizes: Sequence[int], ring_bytes: int) -> Ring:
    """Places for blocks of `sizes` in a ring of at most `ring_bytes`.

    As few laps as fit, then as small a ring as those laps allow. O(n + laps · log n).

    Args:
        sizes: bytes of each streamed block, multiples of the alignment, above 0.

    Raises:
        PlanError: a block is larger than the ring.
    """
    if not sizes:
        return EMPTY
    largest = max(sizes)
    if largest > ring_bytes:
        raise PlanError(
            f"a ring of {ring_bytes} bytes cannot hold the largest block of {largest} bytes",
            f"give the ring at least {largest} bytes ({format_bytes(largest)})",
        )
    ends = [0, *accumulate(sizes)]
    laps = len(_reach(ends, ring_bytes)) - 1
    cuts = _even_cuts(ends, laps, _small(ends, laps, max(largest, -(-ends[-1] // laps)), ring_bytes))
    return _placed(ends, cuts)


def _reach(ends: Sequence[int], ring_bytes: int) -> list[int]:
    """Cuts of laps that are filled as far as they go: 0, the end of each lap."""
    cuts, last = [0], len(ends) - 1
    while cuts[-1] < last:
        cuts.append(bisect_right(ends, ends[cuts[-1]] + ring_bytes, cuts[-1]) - 1)
    return cuts


def _small(ends: Sequence[int], laps: int, low: int, high: int) -> int:
    """A ring in which as many laps suffice, near the smallest such; `high` suffices, and nothing below `low`."""
    for probe in range(_PROBES):
        middle = (low + high) // 2 if probe else low  # equal blocks often fit the first guess
        if len(_reach(ends, middle)) - 1 <= laps:
            high = middle
        else:
            low = middle + 1
        if low >= high:
            break
    return high


def _even_cuts(ends: Sequence[int], laps: int, ring_bytes: int) -> list[int]:
    """Cuts nearest to even laps among those that keep every lap within the ring."""
    latest = _reach(ends, ring_bytes)
    total, last = ends[-1], len(ends) - 1
    backwards = [total - end for end in reversed(ends)]
    earliest = [last - cut for cut in reversed(_reach(backwards, ring_bytes))]
    cuts = [0]
    for lap in range(1, laps):
        # what the lap before reaches bounds this cut too, and so does what the laps after it still need
        high = min(latest[lap], bisect_right(ends, ends[cuts[-1]] + ring_bytes) - 1)
        low = max(earliest[lap], cuts[-1] + 1)
        near = bisect_right(ends, total * lap // laps)
        if near > low and total * lap - ends[near - 1] * laps <= ends[min(near, last)] * laps - total * lap:
            near -= 1
        cuts.append(min(max(near, low), high))
    return [*cuts, last]


def _placed(ends: Sequence[int], cuts: Sequence[int]) -> Ring:
    addresses: list[int] = []
    after: list[int] = []
    before, before_end = cuts[-2], cuts[-1]  # the lap before the first is the last one
    for start, end in pairwise(cuts):
        offset, under = ends[start], before
        for position in range(start, end):
            address, limit = ends[position] - offset, ends[position + 1] - offset
            while under + 1 < before_end and ends[under + 1] - ends[before] < limit:
                under += 1
            addresses.append(address)
            # Beyond the end of a shorter lap lie bytes of older laps, computed before `under`, which is then its last
            # block: the block in front of this one waits for that already, and copies go in order.
            after.append(under)
        before, before_end = start, end
    longest = max(ends[end] - ends[start] for start, end in pairwise(cuts))
    return Ring(tuple(addresses), tuple(after), cuts[1], longest)
