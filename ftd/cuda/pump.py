"""Copies from registered host memory into GPU memory of other processes: one thread and one stream a GPU.

What several clients ask for takes turns slice by slice, so that each gets its share of the link whoever came first.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ftd.clock import Deadline
from ftd.cuda.pin import CHUNK_BYTES, Region
from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.errors import FtdError
from ftd.units import MIB

#: Slices end on a grid of the source, and so never straddle two registrations. Long enough for the full speed of the
#: link (64 MiB lose 0.2 % of it, 32 MiB 0.4), short enough for turns.
SLICE_BYTES = min(128 * MIB, CHUNK_BYTES)
#: Slices that are queued at once: the link never waits for this thread, and of a client that dies 7 ms are left.
DEPTH = 3
#: A push that is done waits so long, at most, for others of its client, which may be much longer than it is.
HOLD_S = 1.0
assert CHUNK_BYTES % SLICE_BYTES == 0


#: dst, source, offset, nbytes: bytes of a source, by its number, and where they go, counted from the start of the
#: target's allocation.
Piece = tuple[int, int, int, int]
#: handle, pieces: an allocation of another process, as it exported it, and what is copied into it.
Target = tuple[bytes, Sequence[Piece]]


class _Slice(NamedTuple):
    target: int
    dst: int
    src: int
    nbytes: int


class PushCancelledError(Exception):
    """The push was given up, or the pump takes none any more."""


class PushAbandonedError(Exception):
    """The driver does not return from the push: it may still copy, as long as this process lives."""


class PushRangeError(FtdError):
    """A push would write outside of the allocation that it names."""

    code = "push_range"


@dataclass(eq=False)
class Push:
    """What one client asks for.

    Attributes:
        client: whoever shares its turns.
        done: gives the bytes copied, or raises. Either way nothing is copied any more and every allocation is closed
            again: their owner may free them. Not so where it raises `PushAbandonedError`. It may come with that of the
            client's next pushes: the driver closes nothing before all copies that are queued are done, and nothing is
            queued meanwhile, so that the link would idle.
    """

    client: Hashable
    targets: Sequence[Target]
    done: Future[int] = field(default_factory=Future)
    _error: BaseException | None = None
    _opened: dict[int, int] = field(default_factory=dict)  # target → its address here
    _queued: int = 0  # slices
    _all_queued: bool = False
    _copied_bytes: int = 0

    def cancel(self) -> None:
        """Queues nothing more. From any thread; `done` tells when it is over."""
        self._error = self._error or PushCancelledError()


class Pump:
    """The pushes to one GPU. Its context there is made by the first.

    Args:
        ordinal: of the GPU in this process.
        sources: registered memory, by number; it has to stay so until `close` returns.

    Attributes:
        cuda, ordinal: as given.
        pushed_bytes: so far.
    """

    def __init__(self, cuda: CudaRuntime, ordinal: int, sources: Sequence[Region]) -> None:
        self.cuda, self.ordinal, self._sources = cuda, ordinal, sources
        self._turns: dict[Hashable, deque[tuple[Push, Iterator[_Slice]]]] = {}  # whose turn is next comes first
        self._queue: deque[tuple[Push, _Slice, int]] = deque()  # with the event behind the copy
        self._pushes: dict[Push, None] = {}  # not yet done
        self._uncopied: Counter[Hashable] = Counter()  # of them, by client
        self._held: dict[Hashable, tuple[Deadline, list[Push]]] = {}  # the others, by client
        self._events: list[int] = []
        self._stream = 0
        self._changed = threading.Condition()
        self._closing = False
        self.pushed_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"ftd-push-{ordinal}", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """That have something to copy left."""
        return len(self._turns)

    def submit(self, push: Push) -> None:
        """Queues it; from now on `push.done` cannot be cancelled, only the push."""
        push.done.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                push.done.set_exception(PushCancelledError())
                return
            self._pushes[push] = None
            self._uncopied[push.client] += 1
            self._turns.setdefault(push.client, deque()).append((push, self._slices(push.targets)))
            self._changed.notify()

    def close(self, within_s: float | None = None) -> bool:
        """Cancels what is under way, and tells whether no copy runs any more; what runs on is abandoned.

        Args:
            within_s: for the driver to return; None waits as long as it takes.
        """
        with self._changed:
            self._closing = True
            for push in self._pushes:
                push.cancel()
            self._changed.notify()
        self._thread.join(within_s)
        ended = not self._thread.is_alive()
        with self._changed:
            abandoned, self._pushes = self._pushes, {}
        for push in abandoned:
            push.done.set_exception(PushAbandonedError())
        return ended

    def _slices(self, targets: Sequence[Target]) -> Iterator[_Slice]:
        for number, (_, pieces) in enumerate(targets):
            for dst, source, offset, nbytes in pieces:
                at, end = offset, offset + nbytes
                while at < end:
                    stop = min(end, (at // SLICE_BYTES + 1) * SLICE_BYTES)
                    yield _Slice(number, dst + at - offset, self._sources[source].address + at, stop - at)
                    at = stop

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # a bug; but nobody may wait for ever, nor free memory under a copy
            with self._changed:
                self._closing = True
                self._turns.clear()
            if self._stream:
                with suppress(Exception):
                    self.cuda.stream_synchronize(self._stream)
            for push in list(self._pushes):
                push._error = error
                self._end(push)
            raise

    def _work(self) -> None:
        while (turn := self._next()) is not None or self._queue:
            if turn is not None:
                self._advance(*turn)
            if self._queue and (turn is None or len(self._queue) == DEPTH):
                self._await_oldest()
        with suppress(CudaError):  # of a device that is lost nothing is left to free
            for event in self._events:
                self.cuda.event_destroy(event)
            if self._stream:
                self.cuda.stream_destroy(self._stream)

    def _next(self) -> tuple[Push, Iterator[_Slice]] | None:
        """Whose turn it is; None when nobody's is, and copies are to be awaited or all is over."""
        with self._changed:
            while not (self._turns or self._queue or self._closing):
                self._changed.wait()
            if not self._turns:
                return None
            client = next(iter(self._turns))
            self._turns[client] = self._turns.pop(client)
            return self._turns[client][0]

    def _advance(self, push: Push, slices: Iterator[_Slice]) -> None:
        """Queues the next slice of a push, or ends it."""
        try:
            piece = None if push._error else next(slices, None)
            if piece is not None:
                self._copy(push, piece)
        except (CudaError, PushRangeError) as error:
            push._error, piece = error, None
        if piece is None:
            with self._changed:
                own = self._turns[push.client]
                own.popleft()
                if not own:
                    del self._turns[push.client]
            push._all_queued = True
            self._end_if_done(push)

    def _copy(self, push: Push, piece: _Slice) -> None:
        cuda = self.cuda
        if not self._stream:
            cuda.use_device(self.ordinal)
            self._stream = cuda.stream_create()
        if piece.target not in push._opened:
            handle, pieces = push.targets[piece.target]
            push._opened[piece.target] = cuda.ipc_open(handle)
            _check_range(cuda, push._opened[piece.target], pieces)
        if not self._events:
            self._events.append(cuda.event_create())
        cuda.memcpy_h2d_async(push._opened[piece.target] + piece.dst, piece.src, piece.nbytes, self._stream)
        cuda.event_record(self._events[-1], self._stream)
        event = self._events.pop()
        self._queue.append((push, piece, event))
        push._queued += 1

    def _await_oldest(self) -> None:
        push, piece, event = self._queue.popleft()
        try:
            self.cuda.event_synchronize(event)
        except CudaError as error:
            push._error = error
        else:
            push._copied_bytes += piece.nbytes
            self.pushed_bytes += piece.nbytes
        self._events.append(event)
        push._queued -= 1
        self._end_if_done(push)
        for client in [client for client, (until, _) in self._held.items() if until.expired()]:
            self._end_held(client)

    def _end_if_done(self, push: Push) -> None:
        if push._queued or not push._all_queued:
            return
        if push._error is not None and self._stream:
            with suppress(CudaError):  # a copy whose event was refused has no other end
                self.cuda.stream_synchronize(self._stream)
        self._held.setdefault(push.client, (Deadline.after(HOLD_S), []))[1].append(push)
        with self._changed:
            self._uncopied[push.client] -= 1
            is_last = not self._uncopied[push.client]
            if is_last:
                del self._uncopied[push.client]
        if is_last or push._error is not None:
            self._end_held(push.client)

    def _end_held(self, client: Hashable) -> None:
        for push in self._held.pop(client)[1]:
            self._end(push)

    def _close(self, push: Push, target: int) -> None:
        try:
            self.cuda.ipc_close(push._opened.pop(target))
        except Exception as error:
            push._error = push._error or error

    def _end(self, push: Push) -> None:
        """Lets go of its memory, into which nothing is copied any more, and says so."""
        for target in list(push._opened):
            self._close(push, target)
        with self._changed:
            if push not in self._pushes:  # abandoned
                return
            del self._pushes[push]
        if push._error is None:
            push.done.set_result(push._copied_bytes)
        else:
            push.done.set_exception(push._error)


def _check_range(cuda: CudaRuntime, address: int, pieces: Sequence[Piece]) -> None:
    """
    Raises:
        PushRangeError: a piece leaves the allocation: the copy would end in somebody else's memory.
    """
    start, nbytes = cuda.allocation_of(address)
    end = max(dst + nbytes for dst, _, _, nbytes in pieces)
    if address + end > start + nbytes:
        raise PushRangeError(
            f"a push to {end} bytes of an allocation of {start + nbytes - address}: expected it to stay inside",
            "report it: the other end is no ftd of this release",
        )
