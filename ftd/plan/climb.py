"""Small changes to the best candidates, as long as they help and the effort lasts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import combinations, zip_longest

from ftd.plan.candidates import Candidate, Search
from ftd.plan.spread import fit

#: Candidates that share the effort; what they leave goes to the next ones.
_STARTS = 5
#: Resident blocks on either side that change roles with a streamed one.
_NEAR_BLOCKS = 4


def change_blocks(search: Search) -> None:
    """Improves the best candidates of different rings by small changes; each gets a share of the effort that is left.

    The best ring before such changes is often not the best after them.
    """
    known = sorted(search.by_ring.values(), key=lambda candidate: candidate.score)
    if search.budget is None:
        # less memory that does not hide yet is often closer to the best than what does: take turns
        least = search.found().gpu_bytes
        late = [one for one in known if one.score[0] > 0 and one.gpu_bytes < least]
        hidden = [one for one in known if one.score[0] <= 0]
        known = [one for pair in zip_longest(hidden, late) for one in pair if one is not None]
    for tried, start in enumerate(known):
        if search.runs_left <= 0 or search.near_best():
            return
        _climb(search, start, -(-search.runs_left // max(_STARTS - tried, 1)))


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
            more = sorted([*start.streamed, block])
            yield more, max(ring_bytes, sizes[block])
            yield more, ring_bytes + sizes[block]
        if not streamed:  # one block alone saves nothing, since its ring is as large
            for pair in combinations(resident, 2):
                yield list(pair), max(sizes[i] for i in pair)
    for block in _trouble(search, start):
        if search.budget is None and start.score[0] > 0:
            yield [i for i in start.streamed if i != block], ring_bytes
        at = bisect_left(resident, block)
        near = resident[max(at - _NEAR_BLOCKS, 0) : at + _NEAR_BLOCKS]
        for other in sorted(near, key=lambda i: (abs(i - block), i)):
            changed = sorted([*(streamed - {block}), other])
            needed = max(sizes[i] for i in changed)
            yield fitted(search, changed, max(ring_bytes + needed - slot, needed))


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
