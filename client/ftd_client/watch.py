"""A follower's second thread: its heartbeat, and its eye on the creator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ftd.errors import FtdError
from ftd.shm.coord import CoordReader, CoordRecord, Observation
from ftd.shm.names import Names
from ftd.shm.segment import inode_of
from ftd.shm.state import State
from ftd_client.seat import Seat

log = logging.getLogger("ftd_client")

#: Death shows within a tick, since the kernel drops the lock at once.
TICK_S = 0.5


class Watch:
    """Beats and looks from `start` until it is stopped; once the creator is lost it only beats.

    Args:
        reader: the creator's block, which this owns from now on.
        record: what it said when it was ready.
        seat: given back when the thread ends.
        on_lost: called once, in this thread, with a reason: `stopped`, `died`, or `replaced`. What it raises is
            logged.
    """

    def __init__(
        self,
        names: Names,
        reader: CoordReader,
        record: CoordRecord,
        seat: Seat,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self._names, self._reader, self._record = names, reader, record
        self._seat, self._on_lost = seat, on_lost
        self.lost: str | None = None
        self._hung = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ftd-{names.namespace}", daemon=True)

    def start(self) -> None:
        """Once. Waits until the thread has begun, which can take milliseconds where no core is free."""
        self._thread.start()

    def end(self) -> None:
        """Lets the thread end by itself, soon; safe in a finalizer."""
        self._stop.set()

    def stop(self) -> None:
        """Gives the seat back and ends the thread; may be called from `on_lost` itself."""
        self._stop.set()
        self._seat.leave()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5 * TICK_S)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self._seat.tell()
                if self.lost is None:
                    self._look()
            except (OSError, FtdError) as error:
                log.warning("heartbeat of namespace %s: %s", self._names.namespace, error)
        self._seat.leave()
        self._reader.close()

    def _look(self) -> None:
        seen = self._reader.look()
        reason = self._why_lost(seen)
        if reason is None:
            self._note_hang(seen)
            return
        self.lost = reason
        log.info("the creator of namespace %s %s; its weights stay usable here", self._names.namespace, reason)
        if self._on_lost is not None:
            try:
                self._on_lost(reason)
            except Exception:
                log.exception("on_lost of namespace %s failed", self._names.namespace)

    def _why_lost(self, seen: Observation) -> str | None:
        if not seen.locked or seen.state in (State.STOPPED, State.FAILED):
            ended = seen.record is not None and seen.record.state in (State.DRAINING, State.STOPPED)
            return "stopped" if ended else "died"
        if seen.record is not None and seen.record.generation != self._record.generation:
            return "replaced"
        # gone: it is about to end, which the next look shows, or a stranger took the name and the creator lives on
        return None if inode_of(self._names.coord) in (None, self._reader.inode) else "replaced"

    def _note_hang(self, seen: Observation) -> None:
        hung = seen.state is State.HUNG
        if hung and not self._hung:
            log.warning("the creator of namespace %s is hung; its weights stay usable here", self._names.namespace)
        self._hung = hung
