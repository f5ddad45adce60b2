"""A forward as it will run: one copy engine, copies in the order of submission, overlapped with compute.

The model: a copy is submitted when the compute that frees its place has ended, and starts once the copies before it
are done; a streamed block computes once its copy is done and the block before it has computed. Forwards follow one
another without a gap. Times are whole nanoseconds, so that a steady state repeats exactly and can be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftd.plan.block import Block
from ftd.plan.cost import CopyCost

#: A ring and its compute settle within a few forwards; what has not by then alternates, and its mean is taken.
_MOST_FORWARDS = 24


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Submit the copy of `block` once `after_block` has computed.

    With `after_block >= block` it is the copy for the next forward.
    """

    block: int
    after_block: int

    @property
    def for_next_forward(self) -> bool:
        return self.after_block >= self.block


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to do.

    Attributes:
        time_ns: one forward in the steady state, from the end of the forward before it.
        stall_ns: of each block in that forward, how long compute waits for its copy.
        first_ns: the first forward, whose copies start with it.
        resident_ns: one forward with every block resident.
        copy_ns: the copy engine's work in one forward.
    """

    time_ns: int
    stall_ns: tuple[int, ...]
    first_ns: int
    resident_ns: int
    copy_ns: int

    @property
    def copy_busy_fraction(self) -> float:
        return self.copy_ns / self.time_ns if self.time_ns else 0.0


@dataclass(frozen=True, slots=True)
class Steady:
    """A simulated run: the steady forward, waits in it by block (compute for its copy, the engine for its place), and
    the first forward."""

    time_ns: int
    stall_ns: list[int]
    idle_ns: list[int]
    first_ns: int


def evaluate(blocks: Sequence[Block], cost: CopyCost, copies: Iterable[CopyStep]) -> Prediction:
    """Predicts a plan's forwards. O(n) a forward, a few forwards.

    Args:
        copies: in the order of submission, each block at most once.
    """
    steps = tuple(copies)
    copy_ns = [0] * len(blocks)
    submits: list[list[int]] = [[] for _ in blocks]
    for step in steps:
        copy_ns[step.block] = cost.copy_ns(blocks[step.block].nbytes)
        submits[step.after_block].append(step.block)
    compute_ns = [block.compute_ns for block in blocks]
    steady = simulate(compute_ns, copy_ns, submits, [step.block for step in steps if step.for_next_forward])
    return Prediction(
        time_ns=steady.time_ns,
        stall_ns=tuple(steady.stall_ns),
        first_ns=steady.first_ns,
        resident_ns=sum(compute_ns),
        copy_ns=sum(copy_ns),
    )


def simulate(
    compute_ns: Sequence[int],
    copy_ns: Sequence[int],
    submits: Sequence[Sequence[int]],
    ahead: Sequence[int],
) -> Steady:
    """Runs forwards until one repeats the one before it.

    Args:
        compute_ns, copy_ns: by block.
        submits: by block, the blocks whose copies are submitted once it has computed.
        ahead: blocks whose copies a forward finds submitted; before the first forward they start with it.
    """
    arrival = [0] * len(compute_ns)
    engine = 0
    for block in ahead:
        engine += copy_ns[block]
        arrival[block] = engine
    seen: list[tuple[int, ...]] = []
    times: list[int] = []
    stalls: list[int] = []
    idle: list[int] = []
    for _ in range(_MOST_FORWARDS):
        now, stalls, idle = 0, [0] * len(compute_ns), [0] * len(compute_ns)
        for block, compute in enumerate(compute_ns):
            late = arrival[block] - now
            if late > 0:
                stalls[block] = late
                now += late
            now += compute
            for copied in submits[block]:
                if engine < now:
                    idle[copied] = now - engine
                    engine = now
                engine += copy_ns[copied]
                arrival[copied] = engine
        # Times now count from the end of this forward. What has arrived by then holds nothing up, however early.
        engine = max(engine - now, 0)
        for block in ahead:
            arrival[block] -= now
        state = (engine, *(max(arrival[block], 0) for block in ahead))
        times.append(now)
        # The system is monotone: no wait in this forward and no copy later than before it means none ever after.
        settled = seen and all(a <= b for a, b in zip(state, seen[-1], strict=True))
        if state in seen or (settled and not any(stalls)):
            break
        seen.append(state)
    else:
        settled_times = times[_MOST_FORWARDS // 2 :]
        return Steady(round(sum(settled_times) / len(settled_times)), stalls, idle, times[0])
    period = times[seen.index(state) + 1 :] if state in seen else times[-1:]
    return Steady(round(sum(period) / len(period)), stalls, idle, times[0])
