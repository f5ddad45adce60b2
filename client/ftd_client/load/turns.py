"""Short turns of the interpreter lock while weights travel.

A thread that starts copies waits up to 5 ms, the interpreter's own interval, for each turn beside one that binds the
model; a whole load takes 160.
"""

from __future__ import annotations

import sys
import threading

_INTERVAL_S = 0.0002


class _ShortTurns:
    """A context manager for any thread, nested and side by side: the last one out puts the interval back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(_INTERVAL_S)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before_s)


#: One for the process, as the interval is.
short_turns = _ShortTurns()
