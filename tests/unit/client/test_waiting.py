"""What somebody who waits makes of a creator that ends, whatever was seen of it before."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftd.clock import NS, monotonic_ns
from ftd.errors import CreatorDiedError
from ftd.owner import Owner
from ftd.shm.coord import CoordRecord, CoordWriter
from ftd.shm.names import Names
from ftd.shm.segment import Access
from ftd.shm.state import State
from ftd_client.waiting import Waiter


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("looks", range(8))
def test_a_creator_that_is_stopped(namespace: str, runtime_dir: Path, looks: int, publishes: bool) -> None:
    """In the midst of its load it ends the wait; once it has published, the next one is waited for.

    Args:
        looks: bits: while it loads or is ready, while it drains, once it is stopped.
    """
    now = monotonic_ns()
    record = CoordRecord(Owner.current(), State.LOADING, 0, now, NS, 1000 * NS, now, str(runtime_dir / "ns.sock"))
    names = Names(namespace)
    creator, waiter = CoordWriter(names, Access(), record), Waiter(names, 60)
    waiter._look()  # it was alive when the wait began
    try:
        if publishes:
            creator.publish(1, 0, b"")
        for bit, go_on in enumerate((lambda: None, creator.drain, creator.stopped)):
            go_on()
            if looks & (1 << bit):
                waiter._look()
    finally:
        creator.unlink()
        creator.close()
    if publishes:
        assert waiter._look() is None
    else:
        with pytest.raises(CreatorDiedError, match="was stopped while it loaded"):
            waiter._look()
    waiter._drop()
