"""Where weights come to lie on a device, so that few large copies bring them there. Pure.

Neighbours in a segment stay neighbours: a layer that was laid out together is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftd.shm.layout import Extent
from ftd.units import GIB

#: Libraries choose kernels by alignment, and the segments keep this one.
ALIGNMENT = 512
#: An arena is one allocation, which lives until its last tensor goes: large enough that making, exporting and opening
#: it (0.3 ms) is nothing beside the copy (19 ms), small enough that parts of a large model can be freed.
ARENA_BYTES = 1 * GIB
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
    order = sorted((i for i, e in enumerate(wanted) if e.nbytes), key=lambda i: (wanted[i].segment, wanted[i].offset))
    for number in order:
        extent = wanted[number]
        if not arenas or arenas[-1].nbytes >= arena_bytes:
            arenas.append(Arena())
        arena = arenas[-1]
        last = arena.runs[-1] if arena.runs else None
        if last is not None and _continues(last, extent):
            start = last.dst + extent.offset - last.offset
            arena.runs[-1] = last._replace(nbytes=extent.offset + extent.nbytes - last.offset)
        else:
            start = -(-arena.nbytes // ALIGNMENT) * ALIGNMENT
            arena.runs.append(Run(start, extent.segment, extent.offset, extent.nbytes))
        arena.places[number] = start
        arena.nbytes = start + extent.nbytes
    return arenas


def _continues(run: Run, extent: Extent) -> bool:
    gap = extent.offset - (run.offset + run.nbytes)
    return run.segment == extent.segment and 0 <= gap <= _GAP_BYTES and (extent.offset - run.offset) % ALIGNMENT == 0
