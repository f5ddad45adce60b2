"""The states of a namespace, which may follow which, and the one rule that judges a creator.

`start`, `status`, `stop`, `attach` and clean-up all ask `judge`, so they cannot contradict one another:
death is proved by the kernel (the lock is gone), hang by the heartbeat, and everything unsure means alive.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """States as the contract prints them. A creator writes the first five; `hung` is a judgement of others."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"
    HUNG = "hung"


#: What a creator may write after what.
NEXT: dict[State, frozenset[State]] = {
    State.LOADING: frozenset({State.READY, State.FAILED, State.DRAINING}),
    State.READY: frozenset({State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.STOPPED}),
    State.FAILED: frozenset(),
    State.STOPPED: frozenset(),
}


def judge(*, locked: bool, written: State | None, heartbeat_age_s: float, hung_after_s: float) -> State:
    """State of a namespace as others should see it.

    Args:
        locked: whether somebody holds the exclusive lock on `coord`.
        written: what the coordination block says; None where it is empty or cannot be read.
        heartbeat_age_s: since the creator's last stamp; while there is none, since the block was first seen.
        hung_after_s: the age from which a living creator counts as hung.
    """
    if not locked:
        return State.FAILED if written is State.FAILED else State.STOPPED
    if written is None:
        written = State.LOADING  # the lock is taken before the first write
    if written in (State.FAILED, State.STOPPED):
        return written
    return State.HUNG if heartbeat_age_s > hung_after_s else written
