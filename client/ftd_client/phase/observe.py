"""What forwards tell: the order in which units are reached, who reads what outside of its module, and compute times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from torch import nn

from ftd_client.stream.units import Param, Unit

T = TypeVar("T")


class Clock(Protocol):
    """Points in time of the device's compute, taken without waiting for it."""

    def mark(self) -> object:
        """Now, behind everything that this thread's compute stream was given so far."""

    def elapsed_ns(self, start: object, end: object) -> int:
        """Between two marks; waits until the later one has been reached."""


@dataclass(eq=False, slots=True)
class Frame:
    """Something that runs: a module's forward, or a region marked by hand.

    Attributes:
        module: None of a region.
        units: whether units were reached inside of it.
        at: how many units had been reached before it began.
        reads: parameters that it reached for itself though they were not put in place for it.
    """

    name: str
    module: nn.Module | None
    at: int = 0
    units: bool = False
    reads: list[Param] = field(default_factory=list)


class Visit(NamedTuple):
    """A unit was reached: marks before and after the wait for its copy, and the innermost region around it."""

    unit: Unit
    before: object
    after: object
    region: str


class _Running(threading.local):
    """What runs in this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.regions: list[str] = []


#: A forward of more visits is one of pieces that nobody says the end of.
_MOST_VISITS = 100_000


class Observer:
    """Records one forward at a time, whichever threads it runs in.

    Args:
        clock: None where times don't matter.
    """

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._running = _Running()
        self.visits: list[Visit] = []
        self.readers: dict[Param, list[Frame]] = {}
        self.outliving: set[Unit] = set()
        self.region_names: dict[str, None] = {}
        self.begun = False
        self.start: object = None
        self.end: object = None

    def begin(self) -> None:
        """A forward of the whole model begins: what is known of the one before is dropped."""
        self.clear()
        self.begun = True
        self.start = self._clock.mark() if self._clock else None

    def finish(self) -> None:
        self.end = self._clock.mark() if self._clock else None

    def clear(self) -> None:
        """A forward was taken over: what comes now belongs to the next one."""
        self.visits.clear()
        self.begun = False
        self.start = self.end = None

    def push(self, name: str, module: nn.Module | None) -> None:
        running = self._running
        running.frames.append(Frame(name, module, len(self.visits)))
        if module is None:
            running.regions.append(name)
            self.region_names[name] = None

    def pop(self) -> None:
        running = self._running
        frame = running.frames.pop()
        if frame.module is None:
            running.regions.pop()
        for param in frame.reads:
            known = self.readers.setdefault(param, [])
            if all((frame.name, frame.module, frame.units) != (f.name, f.module, f.units) for f in known):
                known.append(frame)

    def reach(self, unit: Unit, wait: Callable[[], None]) -> None:
        """A unit is reached; `wait` makes compute wait for its bytes."""
        running = self._running
        for frame in running.frames:
            frame.units = True
        before = self._clock.mark() if self._clock else None
        wait()
        after = self._clock.mark() if self._clock else None
        if not self.begun:  # pieces of the model are called, and no forward of it began
            self.begun, self.start = True, before
        if len(self.visits) < _MOST_VISITS:
            self.visits.append(Visit(unit, before, after, running.regions[-1] if running.regions else ""))

    def read(self, param: Param) -> None:
        """Somebody reached for a parameter that was not in place."""
        frames = self._running.frames
        if frames:
            frames[-1].reads.append(param)
        else:
            self.readers.setdefault(param, []).append(Frame("", None, len(self.visits), units=True))

    def times(self) -> tuple[int, list[tuple[Unit, int]]]:
        """Of the forward just finished: nanoseconds before the first unit, and of each visit those from the end of its
        wait until the next unit is reached. Waits until the device is there."""
        clock = self._clock
        if clock is None or not self.visits:
            return 0, []
        if self.end is None:
            self.finish()
        ends = [visit.before for visit in self.visits[1:]] + [self.end]
        prefix = clock.elapsed_ns(self.start, self.visits[0].before)
        spans = [clock.elapsed_ns(visit.after, end) for visit, end in zip(self.visits, ends, strict=True)]
        return prefix, [(visit.unit, span) for visit, span in zip(self.visits, spans, strict=True)]


def merge_order(known: Sequence[T], seen: Sequence[T]) -> list[T]:
    """`known`, with what only `seen` has put in behind its predecessor there.

    Of the first forward (`known` is empty) everything stands as often as it was reached; equal neighbours count once.
    """
    collapsed = [item for before, item in zip([None, *seen], seen, strict=False) if item is not before]
    if not known:
        return collapsed
    merged, at = list(known), 0
    for item in collapsed:
        if item in merged:
            at = merged.index(item) + 1
        else:
            merged.insert(at, item)
            at += 1
    return merged
