"""The search of the automatic strategy: even spreads at rings of several sizes, then small changes to the best.

Memory mode wants the least time within a budget, and with equal times the least copying. Latency mode wants the least
memory in which no compute waits. Both walk over the same candidates (which blocks stream, how large the ring is) and
score each by a simulated run; a bound on simulated blocks bounds the time that planning takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftd.plan.evaluate import Steady, simulate
from ftd.plan.ring import lay_ring
from ftd.plan.spread import fit, spread
from ftd.plan.workload import Workload

#: Rings that are tried first, in equal ratios from the smallest that works to the largest allowed.
_RINGS = 10
#: Blocks laid out and simulated in one search: some 0.2 s of Python on one core.
_EFFORT = 120_000
_FEWEST_RUNS = 48
_MOST_RUNS = 700
#: How far from the best possible time a search ends: prediction itself is not better.
_NEAR = 1.0005


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of streamed blocks, ascending, and a ring, with what a run of them gave; lower scores are better."""

    streamed: list[int]
    ring_bytes: int
    run: Steady
    gpu_bytes: int
    score: tuple[int, int, int]


class Search:
    """One search over one workload. `best` is None until a candidate fits the budget."""

    def __init__(self, workload: Workload, *, compute_scale: float = 1.0) -> None:
        self.workload = workload
        self.budget = workload.problem.budget_bytes
        self.compute_ns = [round(compute_scale * ns) for ns in workload.compute_ns]
        self.resident_ns = sum(self.compute_ns)
        self.best: Candidate | None = None
        self.runs_left = min(_MOST_RUNS, max(_FEWEST_RUNS, _EFFORT // max(len(workload.blocks), 1)))

    def offer(self, streamed: list[int], ring_bytes: int) -> Candidate | None:
        """Lays out, runs and remembers a candidate; None where it breaks the budget or the bounds of the ring."""
        work = self.workload
        floor = work.ring_floor(streamed)
        ring = lay_ring([work.sizes[i] for i in streamed], min(max(ring_bytes, floor), work.ring_cap))
        ring_bytes = max(ring.nbytes, floor)
        gpu_bytes = work.resident_bytes(streamed) + ring_bytes
        if self.budget is not None and gpu_bytes > self.budget:
            return None
        self.runs_left -= 1
        submits: list[list[int]] = [[] for _ in work.blocks]
        for block, after in zip(streamed, ring.after, strict=True):
            submits[streamed[after]].append(block)
        copy_ns = work.copy_ns
        run = simulate(self.compute_ns, copy_ns, submits, streamed[: ring.first_lap])
        copying = sum(copy_ns[i] for i in streamed)
        late = run.time_ns - self.resident_ns
        score = (late, gpu_bytes, copying) if self.budget is None else (late, copying, gpu_bytes)
        candidate = Candidate(streamed, ring_bytes, run, gpu_bytes, score)
        if self.best is None or score < self.best.score:
            self.best = candidate
        return candidate


def least_time(workload: Workload) -> Candidate:
    """The best found in memory mode; the budget must be one that works."""
    search, budget = Search(workload), workload.problem.budget_bytes
    if budget is None or workload.total_bytes <= budget:
        return _certain(search.offer([], 0))
    smallest = workload.smallest()
    everything = [i for i in workload.streamable if workload.sizes[i] <= smallest.largest]
    search.offer(everything, smallest.ring_bytes)
    offers = _offers(workload, budget - workload.fixed_bytes)
    for eligible in offers:
        for ring_bytes in _rings(workload, eligible, budget - workload.fixed_bytes, _RINGS):
            _fill(search, eligible, ring_bytes)
    _refine_rings(search, offers)
    _change_blocks(search)
    return _certain(search.best)


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
    _change_blocks(search)
    return _certain(search.best)


def _certain(candidate: Candidate | None) -> Candidate:
    assert candidate is not None, "the budget was checked, so a plan exists"
    return candidate


def _offers(workload: Workload, room_bytes: int) -> list[list[int]]:
    """Sets that streamed blocks are chosen from: all; without the small, whose latency costs more than their bytes
    save; without the largest, which force a large ring. What a set leaves out has to leave room for others."""
    sizes, streamable = workload.sizes, workload.streamable
    cost = workload.problem.cost
    offers = [streamable]
    small = 4 * cost.latency_ns * cost.bytes_per_s / 1e9
    large = sorted({sizes[i] for i in streamable}, reverse=True)[1:4]
    for low, high in [(small, large[0] if large else 0), *((0, size) for size in large), (small, max(sizes, default=0))]:
        kept = [i for i in streamable if low <= sizes[i] <= high]
        left_out = sum(sizes[i] for i in streamable) - sum(sizes[i] for i in kept)
        if kept and kept not in offers and 2 * left_out <= room_bytes:
            offers.append(kept)
    return offers


def _rings(workload: Workload, eligible: Sequence[int], room_bytes: int, count: int) -> list[int]:
    """Sizes in equal ratios, from the smallest ring for these blocks to the largest that the limits allow."""
    low = workload.ring_floor(eligible)
    high = max(low, min(workload.ring_cap, room_bytes, sum(workload.sizes[i] for i in eligible)))
    if not low:
        return []
    return sorted({round(low * (high / low) ** (step / (count - 1))) for step in range(count)})


def _fill(search: Search, eligible: Sequence[int], ring_bytes: int) -> Candidate | None:
    """Offers the even spread that leaves exactly as much resident as fits beside such a ring."""
    work, budget = search.workload, search.budget
    assert budget is not None, "memory mode has a budget"
    needed = work.total_bytes - (budget - ring_bytes)
    if search.runs_left <= 0 or needed > sum(work.sizes[i] for i in eligible):
        return None
    return search.offer(fit(work, eligible, spread(work, eligible, needed), needed), ring_bytes)


def _hide(search: Search, eligible: Sequence[int], ring_bytes: int, target: float) -> None:
    """Offers even spreads of less and less until one hides behind compute, then halves towards the last that did not."""
    work = search.workload
    low, high = 0.0, target
    for _ in range(5):
        if search.runs_left <= 0 or target <= 0:
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
    for ratio in (0.9, 1.1, 0.95, 1.05):
        if search.best is None or search.runs_left <= 0:
            return
        for eligible in offers:
            _fill(search, eligible, round(search.best.ring_bytes * ratio))


def _change_blocks(search: Search) -> None:
    """Takes the first small change that scores better, again and again, until none does or the effort is spent."""
    improved = True
    while improved and search.runs_left > 0 and not _near_best(search):
        improved = False
        start = _certain(search.best)
        for streamed, ring_bytes in _changes(search, start):
            if search.runs_left <= 0:
                return
            search.offer(streamed, ring_bytes)
            if search.best is not start:
                improved = True
                break


def _near_best(search: Search) -> bool:
    work, best = search.workload, _certain(search.best)
    if search.budget is None:
        return False
    wire_ns = (work.total_bytes - search.budget) * 1e9 / work.problem.cost.bytes_per_s
    return best.run.time_ns <= _NEAR * max(search.resident_ns, wire_ns)


def _changes(search: Search, start: Candidate) -> Iterator[tuple[list[int], int]]:
    """Neighbours of a candidate: a block more or less, another ring, two blocks that change roles."""
    work = search.workload
    sizes, streamed = work.sizes, set(start.streamed)
    resident = [i for i in work.streamable if i not in streamed]
    waits = sorted(start.streamed, key=lambda i: (-start.run.stall_ns[i], i))
    for laps in (2, 1):
        slot = max((sizes[i] for i in streamed), default=0)
        yield start.streamed, start.ring_bytes - slot // laps
        yield start.streamed, start.ring_bytes + slot // laps
    for block in waits:
        yield [i for i in start.streamed if i != block], start.ring_bytes
    for block in sorted(resident, key=lambda i: (-sizes[i], i)):
        more = sorted([*start.streamed, block])
        yield more, start.ring_bytes
        yield more, max(start.ring_bytes, sizes[block])
    for block in waits:
        for other in sorted(resident, key=lambda i: (abs(i - block), i)):
            yield sorted([*(streamed - {block}), other]), max(start.ring_bytes, sizes[other])
