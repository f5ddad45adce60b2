"""Page-locks what a plan streams of shared weights, chunk by chunk, in a thread beside the forwards."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

import torch

from ftd.clock import NS, Deadline, monotonic_ns
from ftd.cuda.pin import Region
from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.shm.slots import Turns
from ftd.units import MIB, format_bytes
from ftd_client.stream.link import Copy
from ftd_client.views import Mapped

log = logging.getLogger(__name__)

#: Less than the daemon's, since copies begin before all is registered, and followers take turns: 46-48 GB/s with 2 MiB
#: pages, 43.6 with chunks of 1 GiB (docs/decisions/load.md).
CHUNK_BYTES = 256 * MIB
#: One registration at a time: the driver serialises them anyway, and the counts of shared pages stay whole. Reentrant,
#: since the collector may drop a host in the midst of another's registration.
REGISTERING = threading.RLock()
#: For a turn: some chunks of a follower or two, at 10 to 20 ms each. One that does not come costs speed, not more.
_TURN_S = 0.25
#: Between two words to whoever watches.
_TELL_NS = NS // 4


class Chunk(NamedTuple):
    """One of the grid of a segment, from its start on."""

    mapped: Mapped
    number: int

    @property
    def region(self) -> Region:
        start = self.number * CHUNK_BYTES
        return Region(self.mapped.address + start, min(CHUNK_BYTES, self.mapped.nbytes - start))


class Pinner:
    """What of a follower's segments is registered for one host, until `close`.

    Chunks are counted in `Mapped.users`: hosts of one follower share them, and the last one undoes them.

    Args:
        turns: among the followers of a namespace; closed by `join`.
        refusal: why nothing can be registered.

    Attributes:
        complete: all that was wanted is registered, and nothing else was. See `Reach`.
        refusal: why no more is registered; empty while it is.
        watch: called by the thread as this changes, at most some times a second, and at its end.
    """

    def __init__(self, cuda: CudaRuntime, ordinal: int, turns: Turns | None = None, refusal: str = "") -> None:
        self._cuda, self._ordinal, self._turns = cuda, ordinal, turns
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._wanted: deque[Chunk] = deque()
        self._asked: set[Chunk] = set()
        self._elsewhere = False
        self._thread: threading.Thread | None = None
        self._is_running = False  # else the thread is over, or about to be
        self._is_patient = True
        self._told_ns = 0
        self._held: list[Chunk] = []
        self._bounds: tuple[list[int], list[int]] = ([], [])  # starts and stops of what is held, replaced as one
        self.complete = False
        self.refusal = refusal
        self.watch: Callable[[], None] = lambda: None
        _alive.add(self)

    @property
    def pinned_bytes(self) -> int:
        return sum(chunk.region.nbytes for chunk in tuple(self._held))

    @property
    def regions(self) -> list[Region]:
        """What is registered for this host."""
        return [chunk.region for chunk in tuple(self._held)]

    def holds(self, copy: Copy) -> bool:
        """Whether a copy, which lies within one chunk, comes from registered memory."""
        starts, stops = self._bounds
        index = bisect_right(starts, copy.src)
        return index > 0 and copy.src < stops[index - 1]

    def first(self, chunk: Chunk) -> None:
        """Registers a chunk now. A refusal is one for all."""
        if self.refusal:
            return
        self._asked.add(chunk)
        with torch.cuda.device(self._ordinal):
            self._try(chunk)

    def want(self, chunks: Iterable[Chunk], *, elsewhere: bool) -> None:
        """Has these registered, in this order, as well as those from before.

        Args:
            elsewhere: copies come from other memory too.
        """
        with self._mutex:
            self._elsewhere = elsewhere
            fresh = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._asked]
            self._asked.update(fresh)
            self._wanted.extend(fresh)
            if self.refusal or self._stop.is_set():
                self._wanted.clear()
            self._judge()
            if self._wanted and not self._is_running:
                thread = threading.Thread(target=self._run, name="ftd-pin", daemon=True)
                thread.start()
                self._thread, self._is_running = thread, True

    def close(self) -> None:
        """Undoes what was registered, in reverse, and lets the thread end. In any thread, in a finalizer too: it does
        not wait for the thread, which registers nothing any more."""
        self._stop.set()
        with REGISTERING, torch.cuda.device(self._ordinal):
            self.complete, self._bounds = False, ([], [])
            while self._held:
                self._give_back(self._held.pop())

    def join(self) -> None:
        """Returns when there is no thread any more. After `close`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._wanted.clear()
        self._asked.clear()
        if self._turns is not None:
            self._turns.close()

    def leave(self) -> None:
        """`close` where copies may still be under way."""
        if self._pid == os.getpid() and (self._held or self._is_running):
            self._stop.set()
            torch.cuda.synchronize(self._ordinal)
            self.close()
            self.join()

    def _run(self) -> None:
        try:
            self._cuda.use_device(self._ordinal)
        except CudaError as error:
            self._refuse(error)
        while (chunk := self._next()) is not None:
            try:
                with self._turn(chunk) as ours:
                    self._try(chunk)
            except OSError as error:  # of the lock, which is there for speed alone
                log.warning("turns of page-locking are not to be had: %s", error)
                ours = False
            if not ours:  # or somebody has it and stands still
                self._is_patient = False
            if chunk not in self._held and not self.refusal and not self._stop.is_set():
                continue  # without a turn this time
            with self._mutex:
                if self._wanted:  # a refusal has taken them all
                    self._wanted.popleft()
            self._tell()
        if self.refusal:
            log.warning("not all of the shared weights can be pinned: %s; the rest is staged", self.refusal)
        self._tell(last=True)

    def _next(self) -> Chunk | None:
        """The next chunk; without one the thread is over, and the next that is wanted starts another."""
        with self._mutex:
            if self._wanted and not self._stop.is_set():
                return self._wanted[0]
            self._judge()
            self._is_running = False
            return None

    def _turn(self, chunk: Chunk) -> AbstractContextManager[bool]:
        """Among followers; none is needed for what is registered already."""
        if self._turns is None or not self._is_patient or chunk.number in chunk.mapped.users:
            return nullcontext(True)
        return self._turns.turn(Deadline.after(_TURN_S), self._stop.is_set)

    def _judge(self) -> None:
        self.complete = not (self._wanted or self._elsewhere or self.refusal or self._stop.is_set())

    def _try(self, chunk: Chunk) -> None:
        try:
            with REGISTERING:
                self._register(chunk)
        except CudaError as error:
            self._refuse(error)

    def _register(self, chunk: Chunk) -> None:
        users, region = chunk.mapped.users, chunk.region
        if self._stop.is_set():
            return
        # before, so that nobody takes it away meanwhile; without a call, after which the collector may close another
        count = users[chunk.number] = users[chunk.number] + 1
        try:
            if count == 1:
                self._cuda.host_register(region.address, region.nbytes, read_only=True)
        except CudaError:
            del users[chunk.number]
            raise
        self._held.append(chunk)
        if self._stop.is_set():  # the collector closed this in here, before it could see the chunk
            if chunk in self._held:
                self._held.remove(chunk)
                self._give_back(chunk)
            return
        starts, stops = list(self._bounds[0]), list(self._bounds[1])
        insort(starts, region.address)
        insort(stops, region.address + region.nbytes)
        self._bounds = starts, stops

    def _give_back(self, chunk: Chunk) -> None:
        users = chunk.mapped.users
        users[chunk.number] -= 1
        if not users[chunk.number]:
            del users[chunk.number]
            with suppress(CudaError):  # the runtime is already gone, and the registration with it
                self._cuda.host_unregister(chunk.region.address)

    def _refuse(self, error: CudaError) -> None:
        self.refusal = f"CUDA refused after {format_bytes(self.pinned_bytes)}: {error.message}"
        with self._mutex:
            self._wanted.clear()
            self._judge()

    def _tell(self, *, last: bool = False) -> None:
        now_ns = monotonic_ns()
        if self._stop.is_set() or not (last or now_ns - self._told_ns >= _TELL_NS):
            return
        self._told_ns = now_ns
        try:
            self.watch()
        except OSError as error:
            log.warning("status is not told of what is pinned: %s", error)


_alive: weakref.WeakSet[Pinner] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Registrations end before their process does."""
    for pinner in list(_alive):
        with suppress(Exception):  # a device that failed, or a runtime that is gone: there is nothing left to undo
            pinner.leave()


os.register_at_fork(after_in_child=REGISTERING._at_fork_reinit)  # type: ignore[attr-defined]
