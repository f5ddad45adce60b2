"""What offloaded models have to forget in a forked child."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else runs there."""


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()


def forget_after_fork(one: Forkable) -> None:
    """Calls `one.after_fork()` in every child that this process forks while `one` lives."""
    _alive.add(one)


def _forget() -> None:
    for one in _alive:
        one.after_fork()


os.register_at_fork(after_in_child=_forget)
