"""SIGTERM and SIGINT: handlers only record; the loop acts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Recorded from `__enter__` on, so that a signal before the loop runs is not lost; restored at the end.

    Attributes:
        received: name of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._wake: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def install(self) -> None:
        """Records from now on. For good, where the process ends with what is asked for: a second signal, of somebody
        impatient, then cannot tear the end of the interpreter."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._record)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_receive(self, wake: Callable[[], object]) -> None:
        """Calls `wake` (which must be safe in a signal handler) at the next signal; at once if one came already."""
        self._wake = wake
        if self.received:
            wake()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if self._wake is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended: nobody is left to wake
                self._wake()
