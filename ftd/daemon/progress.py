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
        self._stage_done = self._stage_total = 0

    def enter(self, stage: str, total: int = 0) -> None:
        """
        Args:
            total: bytes that `tick` will count, of a stage that moves none into shared memory.
        """
        with self._mutex:
            self.stage = stage
            self._stage_done, self._stage_total = 0, total
            self._moved += 1

    def reset(self, stage: str) -> None:
        """Back to the beginning: what was counted came to nothing."""
        with self._mutex:
            self.stage = stage
            self._moved += 1
            self._done = self._total = self._started_ns = self._ended_ns = 0
            self._stage_done = self._stage_total = 0

    def start(self, total: int) -> None:
        with self._mutex:
            self._total, self._started_ns = total, monotonic_ns()

    def add(self, nbytes: int) -> None:
        """Counts bytes that are in shared memory."""
        with self._mutex:
            self._done += nbytes
            self._moved += 1

    def tick(self, nbytes: int = 0) -> None:
        """Counts a step of a stage that moves no bytes into shared memory."""
        with self._mutex:
            self._stage_done += nbytes
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

    def text(self) -> str:
        """The stage, and how far it is where that is known."""
        with self._mutex:
            if self._stage_total:
                return f"{self.stage} {100 * self._stage_done // self._stage_total} %"
            if self._total and not self._ended_ns:
                return f"{self.stage} {100 * self._done // self._total} %"
            return self.stage
