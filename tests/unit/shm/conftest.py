"""What the tests of shared memory have in common: a namespace's names, and the first words of a creator."""

from __future__ import annotations

import pytest

from ftd.clock import NS, monotonic_ns
from ftd.owner import Owner
from ftd.shm.coord import CoordRecord
from ftd.shm.names import Names
from ftd.shm.state import State


@pytest.fixture
def names(namespace: str) -> Names:
    return Names(namespace)


@pytest.fixture
def first() -> CoordRecord:
    """What a creator says at its start; it counts as hung after a minute."""
    now = monotonic_ns()
    return CoordRecord(
        owner=Owner.current(),
        state=State.LOADING,
        generation=0,
        heartbeat_ns=now,
        heartbeat_interval_ns=NS,
        hung_after_ns=60 * NS,
        started_ns=now,
        socket="/run/ftd/a.sock",
    )
