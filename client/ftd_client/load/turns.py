"""Short turns of the interpreter lock while weights travel.

A thread that starts copies waits up to 5 ms, the interpreter's own interval, for each turn beside one that binds the
model; a whole load takes 160.
"""

from __future__ import annotations

import os
import sys
import threading

_INTERVAL_S = 0.0002


class _ShortTurns:
    """A context manager for any thread, nested and side by side: the last one out puts the interval back.

    In a forked child only the thread that forked is still within, if it was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[int] = []  # threads, as often as they are within
        self._before_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(_INTERVAL_S)
            self._users.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users.remove(threading.get_ident())
            if not self._users:
                sys.setswitchinterval(self._before_s)

    def after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        if self._users:
            self._users = [thread for thread in self._users if thread == threading.get_ident()]
            if not self._users:
                sys.setswitchinterval(self._before_s)


#: One for the process, as the interval is.
short_turns = _ShortTurns()
os.register_at_fork(after_in_child=short_turns.after_fork)
