"""Candidates of a search: which blocks stream through how large a ring, laid out, run and scored."""

from __future__ import annotations

from dataclasses import dataclass

from ftd.plan.evaluate import Steady, simulate
from ftd.plan.ring import Ring, lay_ring
from ftd.plan.workload import Workload

#: Blocks laid out and run in one search: some 0.15 s of Python on one core.
_EFFORT = 60_000
_FEWEST_RUNS = 36
_MOST_RUNS = 500
#: Part of the effort that is kept for small changes.
_SHARE_OF_CHANGES = 0.4
#: How far from the best possible time a search ends: predictions are not better than that.
_NEAR = 1.0005


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of streamed blocks, ascending, and a ring, with what a run of them gave; lower scores are better.

    `ring_bytes` is the ring's memory, which a floor may keep above what the ring uses.
    """

    streamed: list[int]
    ring: Ring
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
        self.by_ring: dict[int, Candidate] = {}
        self.runs_left = min(_MOST_RUNS, max(_FEWEST_RUNS, _EFFORT // max(len(workload.blocks), 1)))
        self._runs_for_changes = int(_SHARE_OF_CHANGES * self.runs_left)

    def offer(self, streamed: list[int], ring_bytes: int) -> Candidate | None:
        """Lays out, runs and remembers a candidate; None where it breaks the budget or the bounds of the ring."""
        work = self.workload
        resident, floor = work.resident_bytes(streamed), work.ring_floor(streamed)
        room = work.ring_cap if self.budget is None else min(work.ring_cap, self.budget - resident)
        if floor > room:
            return None
        self.runs_left -= 1
        ring = lay_ring([work.sizes[i] for i in streamed], min(max(ring_bytes, floor), room))
        ring_bytes = max(ring.nbytes, floor)
        gpu_bytes = resident + ring_bytes
        submits: list[list[int]] = [[] for _ in work.blocks]
        for block, after in zip(streamed, ring.after, strict=True):
            submits[streamed[after]].append(block)
        copy_ns = work.copy_ns
        run = simulate(self.compute_ns, copy_ns, submits, streamed[: ring.first_lap])
        copying = sum(copy_ns[i] for i in streamed)
        late = run.time_ns - self.resident_ns
        score = (late, gpu_bytes, copying) if self.budget is None else (late, copying, gpu_bytes)
        candidate = Candidate(streamed, ring, ring_bytes, run, gpu_bytes, score)
        if self.best is None or score < self.best.score:
            self.best = candidate
        known = self.by_ring.get(ring_bytes)
        if known is None or score < known.score:
            self.by_ring[ring_bytes] = candidate
        return candidate

    @property
    def exploring(self) -> bool:
        """Whether effort is left for candidates of other kinds; the rest is for changes to the best ones."""
        return self.runs_left > self._runs_for_changes

    def near_best(self) -> bool:
        """Whether nothing better is worth a search: the budget's own limit is reached. Latency mode knows no limit."""
        if self.budget is None or self.best is None:
            return False
        wire_ns = (self.workload.total_bytes - self.budget) * 1e9 / self.workload.problem.cost.bytes_per_s
        return self.best.run.time_ns <= _NEAR * max(self.resident_ns, wire_ns)

    def found(self) -> Candidate:
        """The best; only asked once a candidate that certainly fits was offered."""
        assert self.best is not None, "the budget was checked, so a plan exists"
        return self.best
