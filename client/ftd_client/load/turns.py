"""Short turns of the interpreter lock while weights travel.

A thread that starts copies waits up to 5 ms, the interpreter's own interval, for each turn beside one that binds the
model; a whole load takes 160.
"""

from __future__ import annotations

import os
import sys
import threading


class _Interval:
    """The interpreter's, of which there is one: the shortest that anybody within wants, and in the end what it was.

    In a forked child only the thread that forked is still within, if it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[tuple[int, float]] = []  # by threads, as often as they are within
        self._before_s = 0.0

    def enter(self, interval_s: float) -> None:
        with self._lock:
            if not self._wanted:
                self._before_s = sys.getswitchinterval()
            self._wanted.append((threading.get_ident(), interval_s))
            self._set()

    def leave(self, interval_s: float) -> None:
        with self._lock:
            self._wanted.remove((threading.get_ident(), interval_s))
            self._set()

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        if self._wanted:
            me = threading.get_ident()
            self._wanted = [(thread, interval_s) for thread, interval_s in self._wanted if thread == me]
            self._set()

    def _set(self) -> None:
        sys.setswitchinterval(min((interval_s for _, interval_s in self._wanted), default=self._before_s))


_interval = _Interval()
os.register_at_fork(after_in_child=_interval.after_fork)


class ShortTurns:
    """A context manager for any thread, nested and side by side."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def __enter__(self) -> None:
        _interval.enter(self._interval_s)

    def __exit__(self, *_: object) -> None:
        _interval.leave(self._interval_s)


#: A pull of 8 GiB beside the thread that binds the model, on 16 cores: 221 ms with turns of 0.2 ms, 206 with these.
while_loading = ShortTurns(0.00005)
#: Of threads that live as long as a model that streams: the whole process pays for it.
while_staging = ShortTurns(0.0002)
