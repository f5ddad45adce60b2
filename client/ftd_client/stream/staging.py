"""Copies from memory that the GPU cannot read by itself: threads carry them through small page-locked slots.

A submit that needs it becomes a *batch*, and its thread goes on. The batch's pieces are copied on streams of the
threads' own, behind all that the copy stream held at the submit and behind the batch before; once the last piece is
queued, the copy stream waits for all of them. So a place gets its bytes in the order of submission, and whatever waits
for the copy stream waits for staged copies too.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd_client.load import pull, slots
from ftd_client.load.turns import while_staging
from ftd_client.stream.link import Copy, LinkError, Reach


class Event(Protocol):
    """Lives as long as somebody may ask for what it holds."""

    @property
    def event(self) -> int: ...


class Batch:
    """The copies of one submit.

    Args:
        start: holds what all of its copies run behind, but for those of `previous`.
        end: to be recorded behind all of its copies, once they are queued.
        stream: the copy stream.
        pieces: that it is carried in.

    Attributes:
        queued: set once its copies are, or one has failed.
    """

    __slots__ = ("_cuda", "_ends", "_left", "_lock", "_previous", "_start", "_stream", "end", "error", "queued")

    def __init__(
        self, cuda: CudaRuntime, start: Event, end: Event, stream: int, previous: Batch | None, pieces: int
    ) -> None:
        self._cuda, self._start, self._stream, self._previous = cuda, start, stream, previous
        self._left, self._lock = pieces, threading.Lock()
        self._ends: dict[int, int] = {}  # stream → the event behind the last of its copies
        self.end = end
        self.error: BaseException | None = None
        self.queued = threading.Event()

    def wait(self) -> None:
        """
        Raises:
            LinkError: a copy failed.
        """
        if not self.queued.is_set():
            self.queued.wait()
        if self.error is not None:
            raise LinkError(f"a staged copy failed: {type(self.error).__name__}: {self.error}") from self.error

    def behind(self, stream: int) -> None:
        """What the stream gets next runs when the batch's copies may."""
        if stream in self._ends:
            return
        if self._previous is not None:
            self._previous.queued.wait()
            self._cuda.stream_wait_event(stream, self._previous.end.event)
        self._cuda.stream_wait_event(stream, self._start.event)

    def copied(self, stream: int, event: int) -> None:
        """A copy of it is queued, and the event behind it."""
        self._ends[stream] = event

    def done(self) -> None:
        """One piece less. Behind the last one the copy stream waits for all."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            if self._previous is not None:
                self._previous.queued.wait()
            for event in self._ends.values():
                self._cuda.stream_wait_event(self._stream, event)
            self._cuda.event_record(self.end.event, self._stream)
        except BaseException as error:
            self.error = self.error or error
            for stream in self._ends:
                with suppress(CudaError):  # nobody could wait for them otherwise
                    self._cuda.stream_synchronize(stream)
        finally:
            self._previous = None
            self.queued.set()


class _Piece(NamedTuple):
    batch: Batch
    copy: Copy
    is_direct: bool


class Staging:
    """Threads and their slots, from the first batch on until `rest`. Called with the link's lock held.

    Args:
        reach: what of the host's memory needs no slots.
        stream: of the link.
        threads: 0 for as many as are good here.
    """

    def __init__(self, cuda: CudaRuntime, ordinal: int, reach: Reach, stream: int, threads: int = 0) -> None:
        self._cuda, self._ordinal, self._reach, self._stream = cuda, ordinal, reach, stream
        self._count = threads or min(pull.THREADS, len(os.sched_getaffinity(0)))
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ended: list[threading.Thread] = []  # or about to
        self._last: Batch | None = None
        # the threads don't hold it: one that is dropped ends them too
        self._end = weakref.finalize(self, _end, self._pieces, self._threads)
        self._end.atexit = False

    def takes(self, copies: Sequence[Copy]) -> bool:
        """Whether these have to become a batch: the GPU cannot read all of them, or would overtake one that is not
        queued yet."""
        if self._last is not None and not self._last.queued.is_set():
            return any(copy.nbytes for copy in copies)
        holds = self._reach.holds
        for copy in copies:
            if not holds(copy) and copy.nbytes:
                return True
        if self._threads and self._reach.complete:
            self.rest()
        return False

    def put(self, copies: Sequence[Copy], start: Event, end: Event) -> Batch:
        """Has the copies made. Returns at once.

        Args:
            copies: of a byte at least.
            start, end: as of `Batch`; both are recorded here.
        """
        direct = [self._reach.holds(copy) for copy in copies]
        pieces = [
            (piece, is_direct)
            for copy, is_direct in zip(copies, direct, strict=True)
            for piece in ([copy] if is_direct else pull.cut([copy], slots.SLOT_BYTES))
        ]
        last = self._last
        previous = None if last is None or last.queued.is_set() else last
        # in this order: one that is queued from here on is waited for, and of all others this holds the end
        self._cuda.event_record(start.event, self._stream)
        batch = Batch(self._cuda, start, end, self._stream, previous, len(pieces))
        self._start()
        puts = map(self._pieces.put, [_Piece(batch, piece, is_direct) for piece, is_direct in pieces])
        self._last = batch
        deque(puts, maxlen=0)  # in one call: an interrupt finds all of them put, or no batch
        return batch

    def settle(self) -> None:
        """Returns once all batches are queued, failed ones included."""
        if self._last is not None:
            self._last.queued.wait()

    def rest(self) -> None:
        """Lets the threads end, when they have carried what there is, and give their slots back."""
        _end(self._pieces, self._threads)
        self._ended = [thread for thread in self._ended if thread.is_alive()] + self._threads
        self._threads.clear()

    def close(self) -> None:
        """Returns when no thread is left, nor a slot."""
        self.rest()
        for thread in self._ended:
            thread.join()
        self._ended.clear()

    def _start(self) -> None:
        while len(self._threads) < self._count:
            thread = threading.Thread(
                target=_work, args=(self._pieces, self._cuda, self._ordinal), name="ftd-stage", daemon=True
            )
            thread.start()
            self._threads.append(thread)


def _end(pieces: SimpleQueue[_Piece | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        pieces.put(None)


def _work(pieces: SimpleQueue[_Piece | None], cuda: CudaRuntime, ordinal: int) -> None:
    """A thread: carries pieces until it is told to end."""
    carrier: _Carrier | BaseException
    queued = None  # once the last batch that it carried for is: somebody waits for its events until then
    # the forward's own thread would keep each of them waiting for 5 ms a slot
    with while_staging, ExitStack() as undo:
        try:
            carrier = _Carrier(cuda, ordinal, undo)
        except BaseException as error:  # told to whoever waits for what it was to carry
            carrier = error
        while (piece := pieces.get()) is not None:
            batch = piece.batch
            queued = batch.queued
            try:
                if isinstance(carrier, BaseException):
                    raise carrier
                if batch.error is None:
                    carrier.carry(piece)
            except BaseException as error:
                batch.error = error
                if isinstance(carrier, _Carrier):
                    carrier.settle()
            finally:
                batch.done()
            del piece, batch  # held until the next one comes, else
        if queued is not None:
            queued.wait()


class _Carrier:
    """A stream and slots of one thread; without slots, where CUDA locks no memory, the driver stages."""

    def __init__(self, cuda: CudaRuntime, ordinal: int, undo: ExitStack) -> None:
        self._cuda = cuda
        cuda.use_device(ordinal)
        own = undo.enter_context(slots.page_locked(cuda))
        self._stream = cuda.stream_create()
        undo.callback(_quietly, cuda.stream_destroy, self._stream)
        undo.callback(_quietly, cuda.stream_synchronize, self._stream)
        pairs: list[tuple[int, int]] = []
        for slot in own or [0]:
            event = cuda.event_create()
            undo.callback(_quietly, cuda.event_destroy, event)
            pairs.append((slot, event))
        self._free = cycle(pairs)

    def carry(self, piece: _Piece) -> None:
        """Queues a piece behind what it has to run behind."""
        cuda, stream, batch = self._cuda, self._stream, piece.batch
        dst, src, nbytes = piece.copy
        slot, event = next(self._free)
        if piece.is_direct or not slot:
            batch.behind(stream)
            if piece.is_direct:
                cuda.copy_pinned(dst, src, nbytes, stream, event)
            else:
                cuda.memcpy_h2d_async(dst, src, nbytes, stream)
                cuda.event_record(event, stream)
        else:
            # of the calls of a slot only the copy into it lets go of the interpreter lock, see load/pull.py
            if not cuda.event_query(event):
                cuda.event_synchronize(event)
            ctypes.memmove(slot, src, nbytes)
            batch.behind(stream)
            cuda.copy_pinned(dst, slot, nbytes, stream, event)
        batch.copied(stream, event)

    def settle(self) -> None:
        """After an error: what was queued, and may have no event behind it, is done."""
        _quietly(self._cuda.stream_synchronize, self._stream)


def _quietly(call: object, handle: int) -> None:
    with suppress(CudaError):  # a device that failed refuses all, and has nothing left to free
        call(handle)  # type: ignore[operator]
