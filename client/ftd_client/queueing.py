"""Attachments of one process, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ftd.packing import no_collection

# may be taken again by the thread that has it: a signal handler may attach as well
_turn = threading.RLock()
os.register_at_fork(after_in_child=_turn._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """For what an attachment does and does not wait in. Threads that do it at once hand the interpreter's lock on at
    each system call, and take twice the CPU time for it."""
    with _turn, no_collection():
        yield
