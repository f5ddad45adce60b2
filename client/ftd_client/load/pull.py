"""Weights by pull: threads copy them from the shared pages into small page-locked slots, and the GPU takes them there.

Registering the segments themselves would take longer than it saves: the kernel looks up every page of theirs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from typing import NamedTuple

from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.shm.segment import HUGE_PAGE_BYTES
from ftd.units import MIB

#: Measured on 16 cores, GB/s of 55 by 4 KiB and by 2 MiB pages: 4 threads 25 and 34, 6 38 and 47, 8 42 and 50, 10 46
#: and 49, 16 45 and 46 (docs/decisions/load.md).
THREADS = 10
#: Smaller ones cost more calls (2 MiB: 31 and 35 GB/s), larger ones leave the caches (8 MiB: 39 and 42).
SLOT_BYTES = 4 * MIB
#: Of a thread: one is filled while the other is copied out.
SLOTS = 2

#: What a thread takes at once: its pages are mapped by one call.
UNIT_BYTES = 16 * MIB

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, from 5.14 on


class Copy(NamedTuple):
    """Bytes of host memory that go to device memory."""

    dst: int
    src: int
    nbytes: int


def pull(cuda: CudaRuntime, ordinal: int, copies: Iterable[Copy], threads: int = 0) -> bool:
    """Returns when all bytes are on the device; whether page-locked slots were to be had. Without, it is slow.

    Args:
        threads: 0 for as many as are good here.

    Raises:
        CudaError: the device refused a copy. None is under way any more.
    """
    work = deque(cut(copies, UNIT_BYTES))  # popleft is atomic: threads share it without a lock
    threads = threads or min(THREADS, len(os.sched_getaffinity(0)))
    failed = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="ftd-pull") as pool:  # the caller's device stays what it is
        try:
            return pool.submit(_carry_all, cuda, ordinal, work, failed, threads).result()
        finally:
            failed.set()  # of no effect on what is done; else, as on Ctrl-C, the threads end soon


def cut(copies: Iterable[Copy], nbytes: int) -> Iterator[Copy]:
    """The same in pieces of at most `nbytes`."""
    for dst, src, total in copies:
        for at in range(0, total, nbytes):
            yield Copy(dst + at, src + at, min(nbytes, total - at))


def _carry_all(cuda: CudaRuntime, ordinal: int, work: deque[Copy], failed: threading.Event, threads: int) -> bool:
    cuda.use_device(ordinal)
    with ExitStack() as undo:
        # one registration: the driver makes them one by one, 2 ms each, and undoes them as slowly
        slots = undo.enter_context(page_locked(cuda, threads * SLOTS, threads))
        # whatever happens its threads have ended before the slots go
        pool = undo.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="ftd-pull"))
        own = [slots[at * SLOTS : (at + 1) * SLOTS] for at in range(threads)]
        futures = [pool.submit(_carry, cuda, ordinal, work, failed, mine) for mine in own]
        wait(futures)
        for future in futures:
            future.result()
        return bool(slots)


def _carry(cuda: CudaRuntime, ordinal: int, work: deque[Copy], failed: threading.Event, slots: Sequence[int]) -> None:
    """Copies what is left to copy, in one of the threads, through these slots; without any the driver stages."""
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
            while not failed.is_set():
                try:
                    unit = work.popleft()
                except IndexError:
                    break
                if not slots:
                    cuda.memcpy_h2d_async(*unit, stream)
                    continue
                populate(unit.src, unit.nbytes, _MADV_POPULATE_READ)
                for dst, src, nbytes in cut([unit], SLOT_BYTES):
                    slot, event = next(free)
                    # of the calls of a slot only this copy lets go of the interpreter lock: ten threads wait for it
                    if not cuda.event_query(event):
                        cuda.event_synchronize(event)
                    ctypes.memmove(slot, src, nbytes)
                    cuda.copy_pinned(dst, slot, nbytes, stream, event)
    except BaseException:
        failed.set()
        raise


def populate(start: int, nbytes: int, how: int) -> None:
    """Maps pages by one call, where they are a fault for every sixteenth. Where it fails, that is what they are."""
    first = start - start % mmap.PAGESIZE
    _LIBC.madvise(first, start + nbytes - first, how)


@contextmanager
def page_locked(cuda: CudaRuntime, count: int = SLOTS, threads: int = 0) -> Iterator[list[int]]:
    """Addresses of slots; none where CUDA locks no memory.

    Args:
        threads: that touch the memory first, each a part of it: one, the driver's, takes longer for that than to lock.
    """
    nbytes = count * SLOT_BYTES
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    slots = [start + number * SLOT_BYTES for number in range(count)]
    if threads:
        with ThreadPoolExecutor(threads, thread_name_prefix="ftd-pull") as pool:
            for slot in slots:
                pool.submit(populate, slot, SLOT_BYTES, _MADV_POPULATE_WRITE)
    try:
        cuda.host_register(start, nbytes)
    except CudaError:
        yield []
        return
    try:
        yield slots
    finally:
        with suppress(CudaError):
            cuda.host_unregister(start)
