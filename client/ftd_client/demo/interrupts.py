"""Signals to the demo: recorded when they come, raised where it waits."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from ftd_client.demo.problems import InterruptedDemoError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signals recorded from `__enter__` on; `check` raises what came. Handlers are restored at the end."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises InterruptedDemoError once a signal has come."""
        if self._received is not None:
            raise InterruptedDemoError(self._received, signal.Signals(self._received).name)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self._received = self._received or number
