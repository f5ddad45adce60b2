"""Small changes to the best candidates, as long as they help and the effort lasts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from ftd.plan.candidates import Candidate, Search
from ftd.plan.spread import fit

#: Candidates that are changed further.
_STARTS = 3
#: Resident blocks on either side that change roles with a streamed one.
_NEAR_BLOCKS = 4


def change_blocks(search: Search) -> None:
    """Improves the best candidates of different rings by small changes; each gets a share of the effort that is left.

    The best ring before such changes is often not the best after them.
    """
    starts = sorted(search.by_ring.values(), key=lambda candidate: candidate.score)[:_STARTS]
    for tried, start in enumerate(starts):
        if not search.near_best():
            _climb(search, start, search.runs_left // (len(starts) - tried))


def _climb(search: Search, start: Candidate, runs: int) -> None:
    """Takes the first small change that scores better, again and again, until none does or the effort is spent."""
    least = search.runs_left - runs
    improved = True
    while improved:
        improved = False
        for streamed, ring_bytes in _changes(search, start):
            if search.runs_left <= least:
                return
            found = search.offer(streamed, ring_bytes)
            if found is not None and found.score < start.score:
                start, improved = found, True
                break


def _changes(search: Search, start: Candidate) -> Iterator[tuple[list[int], int]]:
    """Neighbours of a candidate, those that may help most first."""
    work, ring_bytes = search.workload, start.ring_bytes
    sizes, streamed = work.sizes, set(start.streamed)
    resident = [i for i in work.streamable if i not in streamed]
    slot = max((sizes[i] for i in streamed), default=0)
    fitted = _fitted if search.budget is not None else _as_given
    for change in (-slot // 4, slot // 4, -slot // 2, slot // 2, -slot, slot):
        yield fitted(search, start.streamed, ring_bytes + change)
    if search.budget is None:
        for block in sorted(resident, key=lambda i: (-sizes[i], i)):
            yield sorted([*start.streamed, block]), max(ring_bytes, sizes[block])
    for block in _trouble(search, start):
        at = bisect_left(resident, block)
        near = resident[max(at - _NEAR_BLOCKS, 0) : at + _NEAR_BLOCKS]
        for other in sorted(near, key=lambda i: (abs(i - block), i)):
            yield fitted(search, sorted([*(streamed - {block}), other]), max(ring_bytes, sizes[other]))


def _trouble(search: Search, start: Candidate) -> list[int]:
    """Streamed blocks, those first that stand next to the longest waits: of the engine where copies are the longer
    work, else of compute."""
    work, blocks = search.workload, start.streamed
    bound_by_copies = sum(work.copy_ns[i] for i in blocks) > search.resident_ns
    waits = start.run.idle_ns if bound_by_copies else start.run.stall_ns
    order = sorted(range(len(blocks)), key=lambda at: (-waits[blocks[at]], at))
    # a wait at one block is often cured at the one before it, or two before
    return list(dict.fromkeys(blocks[(at - back) % len(blocks)] for at in order for back in (0, 1, 2)))


def _as_given(_: Search, streamed: list[int], ring_bytes: int) -> tuple[list[int], int]:
    return streamed, ring_bytes


def _fitted(search: Search, streamed: list[int], ring_bytes: int) -> tuple[list[int], int]:
    """The blocks, changed until the budget is used up beside such a ring."""
    work, budget = search.workload, search.budget or 0
    return fit(work, work.streamable, streamed, work.total_bytes - budget + ring_bytes), ring_bytes
