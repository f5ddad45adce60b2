"""Where weights come to lie on a device, so that few large copies bring them there. Pure.

Neighbours in a segment stay neighbours: a layer that was laid out together is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftd.plan.block import ALIGNMENT, aligned
from ftd.shm.layout import Extent
from ftd.units import GIB

#: An arena is one allocation, which lives until its last tensor goes: large enough that making, exporting and opening
#: it (0.5 ms, in which nothing is copied) is nothing beside the copy (78 ms), small enough that parts of a large model
#: can be freed.
ARENA_BYTES = 4 * GIB
#: Padding that is copied along rather than skipped: a copy of its own costs about as much as 128 KiB.
_GAP_BYTES = 4096


class Run(NamedTuple):
    """Bytes of a segment that go to `dst` of an arena in one piece."""

    dst: int
    segment: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class Arena:
    """One allocation.

    Attributes:
        nbytes: of it.
        runs: what is copied into it.
        places: wanted extent, by its number → where it starts.
    """

    nbytes: int = 0
    runs: list[Run] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)


def plan_arenas(wanted: Sequence[Extent], arena_bytes: int = ARENA_BYTES) -> list[Arena]:
    """Arenas that hold every extent with bytes once, each wholly in one; extents that overlap lie apart.

    Args:
        arena_bytes: an arena that has as many takes no more.
    """
    arenas: list[Arena] = []
    arena = Arena(arena_bytes)  # full: the first extent gets one of its own
    dst = segment = first = end = -1  # of the run at work: its place in the arena, and its bytes of a segment
    order = sorted(((e.segment, e.offset, e.nbytes, i) for i, e in enumerate(wanted) if e.nbytes))
    for there, offset, nbytes, number in order:
        gap = offset - end
        joins = there == segment and 0 <= gap <= _GAP_BYTES and (offset - first) % ALIGNMENT == 0
        if arena.nbytes >= arena_bytes:
            arena, joins = Arena(), False
            arenas.append(arena)
        if not joins:
            dst, segment, first = aligned(arena.nbytes), there, offset
            arena.runs.append(Run(dst, segment, first, nbytes))
        else:
            arena.runs[-1] = Run(dst, segment, first, offset + nbytes - first)
        end = offset + nbytes
        arena.places[number] = dst + offset - first
        arena.nbytes = dst + end - first
    return arenas
