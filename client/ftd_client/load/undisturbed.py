"""The interpreter while weights travel: no garbage collection, and short turns of its lock.

A collection of a process with a large model takes 60 ms, half of a load. A thread that starts copies waits up to
5 ms, the interpreter's own interval, for each turn beside one that binds the model.
"""

from __future__ import annotations

import gc
import sys
import threading

_INTERVAL_S = 0.0002


class _Undisturbed:
    """A context manager for any thread, nested and side by side: the last one out puts everything back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._collects, self._interval_s = True, _INTERVAL_S

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._collects, self._interval_s = gc.isenabled(), sys.getswitchinterval()
                gc.disable()
                sys.setswitchinterval(_INTERVAL_S)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._interval_s)
                if self._collects:
                    gc.enable()


#: One for the process, as what it changes is.
undisturbed = _Undisturbed()
