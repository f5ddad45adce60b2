"""How far a load is: told by the loader's threads, read by the loop."""

from __future__ import annotations

import threading

from ftd.clock import monotonic_ns
from ftd.shm.coord import Progress


class LoadProgress:
    """Counters of one load, and whether it was asked to end. Thread-safe.

    Attributes:
        stage: what happens now, for people.
    """

    def __init__(self) -> None:
        self.stage = "reading headers"
        self._cancel = threading.Event()
        self._mutex = threading.Lock()
        self._moved = 0
        self._done = self._total = self._started_ns = self._ended_ns = 0

    def enter(self, stage: str) -> None:
        with self._mutex:
            self.stage = stage
            self._moved += 1

    def reset(self, stage: str) -> None:
        """Back to the beginning: what was counted came to nothing."""
        with self._mutex:
            self.stage = stage
            self._moved += 1
            self._done = self._total = self._started_ns = self._ended_ns = 0

    def start(self, total: int) -> None:
        with self._mutex:
            self._total, self._started_ns = total, monotonic_ns()

    def add(self, nbytes: int) -> None:
        """Counts bytes that are in shared memory."""
        with self._mutex:
            self._done += nbytes
            self._moved += 1

    def tick(self, _: int = 0) -> None:
        """Counts a step of a stage that moves no bytes."""
        with self._mutex:
            self._moved += 1

    def end(self) -> None:
        with self._mutex:
            self._ended_ns = monotonic_ns()

    def cancel(self) -> None:
        self._cancel.set()

    def cancelled(self) -> bool:
        return self._cancel.is_set()

    @property
    def moved(self) -> int:
        """Rises with every step: a load that is slow moves, one that hangs does not."""
        return self._moved

    def snapshot(self) -> Progress:
        with self._mutex:
            return Progress(self._done, self._total, self._started_ns, self._ended_ns)

    def percent(self) -> int:
        with self._mutex:
            return 100 * self._done // self._total if self._total else 0
