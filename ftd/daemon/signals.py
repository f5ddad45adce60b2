"""SIGTERM, SIGINT and SIGHUP: handlers only record; the loop acts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Recorded from `__enter__` on, so that a signal before the loop runs is not lost; restored at the end.

    Args:
        for_good: ignored at the end instead, where only the interpreter's own end is left to come: the second signal
            of somebody impatient must not make a failure of an orderly stop.

    Attributes:
        received: name of the first signal, or None.
        count: how many came.
    """

    def __init__(self, *, for_good: bool = False) -> None:
        self.received: str | None = None
        self.count = 0
        self._for_good = for_good
        self._wake: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and `&` of a shell without job control
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._for_good else handler)

    def on_receive(self, wake: Callable[[], object]) -> None:
        """Calls `wake` (which must be safe in a signal handler) at the next signal; at once if one came already."""
        self._wake = wake
        if self.received:
            wake()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        self.count += 1
        if self._wake is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended: nobody is left to wake
                self._wake()
