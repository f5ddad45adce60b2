"""The search of the automatic strategy: even spreads at rings of several sizes, then small changes to the best.

Memory mode wants the least time within a budget, and with equal times the least copying. Latency mode wants the least
memory in which no compute waits. Both walk over the same candidates and score each by a simulated run; a bound on the
blocks that are simulated bounds the time that planning takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftd.plan.candidates import Candidate, Search
from ftd.plan.climb import change_blocks
from ftd.plan.spread import fit, spread
from ftd.plan.workload import Workload

#: Rings that are tried first, in equal ratios from the smallest that works to the largest allowed.
_RINGS = 10
#: Rings tried around the best of those.
_RATIOS = (0.93, 1.07, 0.86, 1.14, 0.8, 1.22, 0.97, 1.03)
#: Sizes of the largest block that are tried; of many sizes, orders of size.
_CAPS = 7
#: Shares of small and large blocks that are tried; see `spread`.
_LEANS = (0.0, -0.5, -2.0)


def least_time(workload: Workload) -> Candidate:
    """The best found in memory mode; the budget must be one that works."""
    problem = workload.problem
    search, budget = Search(workload, compute_scale=min(problem.transfer_budget_scale, 1.0)), problem.budget_bytes
    if budget is None or workload.total_bytes <= budget:
        search.offer([], 0)
        return search.found()
    smallest = workload.smallest()
    everything = [i for i in workload.streamable if workload.sizes[i] <= smallest.largest]
    search.offer(everything, smallest.ring_bytes)
    offers = _offers(workload, budget - workload.fixed_bytes)
    for eligible in offers:
        for ring_bytes in _rings(workload, eligible, budget - workload.fixed_bytes, _RINGS):
            for lean in _LEANS:
                _fill(search, eligible, ring_bytes, lean)
    _refine_rings(search, offers)
    change_blocks(search)
    return search.found()


def least_memory(workload: Workload) -> Candidate:
    """The best found in latency mode."""
    search = Search(workload, compute_scale=workload.problem.transfer_budget_scale)
    search.offer([], 0)
    hidden = sum(search.compute_ns)
    for eligible in _offers(workload, workload.total_bytes):
        copying = sum(workload.copy_ns[i] for i in eligible)
        offered = sum(workload.sizes[i] for i in eligible)
        for ring_bytes in _rings(workload, eligible, workload.total_bytes, _RINGS):
            _hide(search, eligible, ring_bytes, offered * min(hidden / max(copying, 1), 1.0))
    change_blocks(search)
    return search.found()


def _offers(workload: Workload, room_bytes: int) -> list[list[int]]:
    """Sets that streamed blocks are chosen from: all; without the small, whose latency costs more than their bytes
    save; without the large, of one size or order of size more each time, since they force a large ring. What a set
    leaves out has to leave room for a ring."""
    sizes, streamable = workload.sizes, workload.streamable
    cost = workload.problem.cost
    offers = [streamable]
    small = round(4 * cost.latency_ns * cost.bytes_per_s / 1e9)
    caps = sorted({sizes[i] for i in streamable}, reverse=True)
    if len(caps) > _CAPS:
        caps = sorted({size.bit_length(): size for size in reversed(caps)}.values(), reverse=True)[:_CAPS]
    for low, high in [(small, cap) for cap in caps] + [(0, cap) for cap in caps[1:]]:
        kept = [i for i in streamable if low <= sizes[i] <= high]
        left_out = sum(sizes[i] for i in streamable) - sum(sizes[i] for i in kept)
        if kept and kept not in offers and left_out + workload.ring_floor(kept) <= room_bytes:
            offers.append(kept)
    return offers


def _rings(workload: Workload, eligible: Sequence[int], room_bytes: int, count: int) -> list[int]:
    """Sizes in equal ratios, from the smallest ring for these blocks to the largest that the limits allow; every third
    first, since the effort may not last."""
    low = workload.ring_floor(eligible)
    high = max(low, min(workload.ring_cap, room_bytes, sum(workload.sizes[i] for i in eligible)))
    if not low:
        return []
    sizes = sorted({round(low * (high / low) ** (step / (count - 1))) for step in range(count)})
    return [*sizes[2::3], *sizes[0::3], *sizes[1::3]]


def _fill(search: Search, eligible: Sequence[int], ring_bytes: int, lean: float) -> Candidate | None:
    """Offers the even spread that leaves exactly as much resident as fits beside such a ring."""
    work, budget = search.workload, search.budget
    assert budget is not None, "memory mode has a budget"
    needed = work.total_bytes - (budget - ring_bytes)
    if not search.exploring or search.near_best() or needed > sum(work.sizes[i] for i in eligible):
        return None
    return search.offer(fit(work, eligible, spread(work, eligible, needed, lean), needed), ring_bytes)


def _hide(search: Search, eligible: Sequence[int], ring_bytes: int, target: float) -> None:
    """Offers even spreads of ever fewer bytes until one hides, then goes halfway back to the last that did not."""
    work = search.workload
    low, high = 0.0, target
    for _ in range(5):
        if not search.exploring or target <= 0:
            return
        found = search.offer(spread(work, eligible, round(target)), ring_bytes)
        if found is None or found.score[0] > 0:
            high = target
            late = found.score[0] if found else 0
            hidden = target - 1.5 * late * work.problem.cost.bytes_per_s / 1e9
            target = hidden if low < hidden else (low + high) / 2
        elif target == high:
            return
        else:
            low = target
            target = (low + high) / 2


def _refine_rings(search: Search, offers: Sequence[Sequence[int]]) -> None:
    """Rings between the best of the first ones and its neighbours."""
    for ratio in _RATIOS:
        if search.best is None or not search.exploring:
            return
        for eligible in offers:
            for lean in _LEANS:
                _fill(search, eligible, round(search.best.ring_bytes * ratio), lean)
