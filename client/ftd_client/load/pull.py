"""Weights by pull: threads copy them from the shared pages into small page-locked slots, and the GPU takes them there.

Registering the segments themselves would take longer than it saves: the kernel looks up every page of theirs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import cycle
from queue import SimpleQueue
from typing import NamedTuple

from ftd.cuda.runtime import CudaRuntime
from ftd.units import MIB
from ftd_client.interrupts import uninterrupted
from ftd_client.load import slots as slots_module
from ftd_client.load.slots import SLOTS, Slots, map_for_reading, map_for_writing

#: Measured on 16 cores, GB/s of 55 by 4 KiB and by 2 MiB pages: 4 threads 25 and 34, 6 38 and 47, 8 42 and 50, 10 46
#: and 49, 16 45 and 46 (docs/decisions/load.md).
THREADS = 10
#: What a thread takes at once: its pages are mapped by one call.
UNIT_BYTES = 16 * MIB


class _Carried(NamedTuple):
    """What came of it, once nothing is under way any more.

    Attributes:
        locked: through page-locked slots.
    """

    locked: bool
    nbytes: int


class Copy(NamedTuple):
    """Bytes of host memory that go to device memory."""

    dst: int
    src: int
    nbytes: int


class PullCancelledError(Exception):
    """The pull was given up."""


def pull(cuda: CudaRuntime, ordinal: int, copies: Iterable[Copy], threads: int = 0) -> bool:
    """As `Pull`, of copies that are known: returns when all bytes are on the device, with what `Pull.result` says.

    Args:
        threads: 0 for as many as are good for them.
    """
    copies = list(copies)
    threads = threads or threads_for(sum(copy.nbytes for copy in copies))
    pulling: Pull | None = None
    try:
        with uninterrupted():  # or its threads would wait as long as somebody keeps the error
            pulling = Pull(cuda, ordinal, threads)
        pulling.put(copies)
        pulling.finish()
        return pulling.result()
    finally:
        if pulling is not None:
            pulling.cancel()


class Pull:
    """Copies to one GPU. Its slots are made from now on, while it is still found out what is to be copied.

    Whoever makes one, uninterrupted, calls `finish` or `cancel` in the end, or drops it.
    """

    def __init__(self, cuda: CudaRuntime, ordinal: int, threads: int) -> None:
        self._units: SimpleQueue[Copy | None] = SimpleQueue()
        self._carried: Future[_Carried | None] = Future()
        self._nbytes = 0
        self._failed = threading.Event()
        self._threads, self._is_finished = threads, False
        # the threads don't hold it, and wait no longer than it lives; what they write to outlives it with them
        memory: list[object] = []
        self._memory = memory
        self._carried.add_done_callback(lambda _: memory.clear())
        weakref.finalize(self, _finish, self._units, threads).atexit = False
        threading.Thread(  # the caller's device stays what it is
            target=_carry_all,
            args=(cuda, ordinal, self._units, self._failed, threads, self._carried),
            name="ftd-pull",
            daemon=False,
        ).start()

    def put(self, copies: Iterable[Copy], memory: object = None) -> None:
        """Has these copied, too; before `finish`.

        Args:
            memory: stays until nothing is under way any more.
        """
        if self._is_finished:
            raise RuntimeError("copies are put when no more were to come")
        self._memory.append(memory)
        for unit in cut(copies, UNIT_BYTES):
            self._nbytes += unit.nbytes
            self._units.put(unit)

    def finish(self) -> None:
        """No more is put. From any thread, as often as one likes."""
        self._is_finished = True
        _finish(self._units, self._threads)  # whole each time: an interrupt may have ended the one before

    def cancel(self) -> None:
        """Copies no more; of no effect when all is there. Returns when nothing is under way any more."""
        with uninterrupted():
            self._failed.set()
            self.finish()
            wait([self._carried])

    def result(self) -> bool:
        """Returns, after `finish`, when everything that was put is on the device: whether page-locked slots were to be
        had. Without, it is slow. The slots are given back a little later.

        Raises:
            CudaError: the device refused a copy. None is under way any more.
            PullCancelledError: likewise.
        """
        carried = self._carried.result()
        if carried is None:
            raise PullCancelledError  # one for each who asks: its traceback refers to this, and would be referred to
        if carried.nbytes != self._nbytes:
            raise RuntimeError(f"{carried.nbytes} bytes were pulled: expected {self._nbytes}")
        return carried.locked


def threads_for(nbytes: int) -> int:
    """As many as are good here for so many bytes."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0)), -(-nbytes // UNIT_BYTES)))


def cut(copies: Iterable[Copy], nbytes: int) -> Iterator[Copy]:
    """The same in pieces of at most `nbytes`."""
    for dst, src, total in copies:
        for at in range(0, total, nbytes):
            yield Copy(dst + at, src + at, min(nbytes, total - at))


def _finish(units: SimpleQueue[Copy | None], threads: int) -> None:
    """Each thread takes one; more do no harm."""
    for _ in range(threads):
        units.put(None)


class _Start:
    """How threads begin together.

    Attributes:
        all_run: set when they do. Those that are started while others have pages mapped wait for these.
        mapped: released by each whose slots are.
        ready: set when the slots are locked, or cannot be.
        locked: which.
    """

    def __init__(self) -> None:
        self.all_run, self.ready = threading.Event(), threading.Event()
        self.mapped = threading.Semaphore(0)
        self.locked = False


def _carry_all(
    cuda: CudaRuntime,
    ordinal: int,
    units: SimpleQueue[Copy | None],
    failed: threading.Event,
    threads: int,
    carried: Future[_Carried | None],
) -> None:
    try:
        with ExitStack() as undo:
            cuda.use_device(ordinal)
            slots, start = Slots(threads * SLOTS), _Start()
            # whatever happens its threads have ended before the slots go
            pool = undo.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="ftd-pull"))
            undo.callback(start.ready.set)
            undo.callback(start.all_run.set)
            try:
                own = [slots.addresses[at * SLOTS : (at + 1) * SLOTS] for at in range(threads)]
                futures = [pool.submit(_carry, cuda, ordinal, units, failed, mine, start) for mine in own]
                start.all_run.set()
                for _ in futures:
                    start.mapped.acquire()
                if slots.lock(cuda):
                    start.locked = True
                    undo.callback(slots.unlock, cuda)
                start.ready.set()
                wait(futures)
                nbytes = sum(future.result() for future in futures)
            except BaseException:
                failed.set()
                raise
            carried.set_result(None if failed.is_set() else _Carried(start.locked, nbytes))
    except BaseException as error:
        if not carried.done():
            carried.set_exception(error)


def _carry(
    cuda: CudaRuntime,
    ordinal: int,
    units: SimpleQueue[Copy | None],
    failed: threading.Event,
    slots: Sequence[int],
    start: _Start,
) -> int:
    """Copies what there is to copy, in one of the threads, through these slots; where none is locked the driver
    stages. How many bytes."""
    carried = 0
    start.all_run.wait()
    try:
        map_for_writing(slots[0], len(slots) * slots_module.SLOT_BYTES)
    finally:
        start.mapped.release()
    try:
        cuda.use_device(ordinal)
        with ExitStack() as undo:
            stream = cuda.stream_create()
            undo.callback(cuda.stream_destroy, stream)
            undo.callback(cuda.stream_synchronize, stream)
            events: list[int] = []
            for _ in slots:
                events.append(cuda.event_create())
                undo.callback(cuda.event_destroy, events[-1])
            free = cycle(zip(slots, events, strict=True))
            start.ready.wait()
            while (unit := units.get()) is not None and not failed.is_set():
                carried += unit.nbytes
                if not start.locked:
                    cuda.memcpy_h2d_async(*unit, stream)
                    continue
                map_for_reading(unit.src, unit.nbytes)
                for dst, src, nbytes in cut([unit], slots_module.SLOT_BYTES):
                    slot, event = next(free)
                    # of the calls of a slot only this copy lets go of the interpreter lock: ten threads wait for it
                    if not cuda.event_query(event):
                        cuda.event_synchronize(event)
                    ctypes.memmove(slot, src, nbytes)
                    cuda.copy_pinned(dst, slot, nbytes, stream, event)
    except BaseException:
        failed.set()
        raise
    return carried
