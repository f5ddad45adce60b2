"""A follower's place in the namespace: its lease, and the record that says how far it is."""

from __future__ import annotations

import threading
from dataclasses import replace

from ftd.clock import monotonic_ns
from ftd.owner import Owner
from ftd.shm.names import Names
from ftd.shm.slots import Lease, SlotRecord


class Seat:
    """Held from the call on, until `leave` or the end of the process. Thread-safe."""

    def __init__(self, names: Names, generation: int) -> None:
        self._mutex = threading.Lock()
        self._lease = Lease.acquire(names)
        now = monotonic_ns()
        self._record = SlotRecord(Owner.current(), "attached", "cpu", generation, now, now)
        try:
            self._lease.write(self._record)
        except BaseException:
            self._lease.release()
            raise

    @property
    def record(self) -> SlotRecord:
        return self._record

    def tell(self, **changes: object) -> None:
        """Writes the record with a fresh heartbeat; nothing after `leave`, and in a forked child."""
        with self._mutex:
            self._record = replace(self._record, heartbeat_ns=monotonic_ns(), **changes)  # type: ignore[arg-type]
            self._lease.write(self._record)

    def leave(self) -> None:
        """Gives the lease back. Under the mutex: a write that is under way must not meet a closed descriptor, whose
        number may be another file's by then."""
        with self._mutex:
            self._lease.release()
