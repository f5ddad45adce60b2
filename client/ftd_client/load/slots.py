"""Page-locked memory that weights pass through on their way to a GPU, a slot at a time."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.shm.segment import HUGE_PAGE_BYTES
from ftd.units import MIB

#: Smaller ones cost more calls (2 MiB: 31 and 35 GB/s of 55 by 4 KiB and by 2 MiB pages), larger ones leave the caches
#: (8 MiB: 39 and 42).
SLOT_BYTES = 4 * MIB
#: Of a thread: one is filled while the other is copied out.
SLOTS = 2

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, from 5.14 on

#: What CUDA would not unlock: what came to lie there next would be taken for page-locked, and copied as what was there.
_locked_for_good: list[mmap.mmap] = []


class Slots:
    """Private memory for so many slots; page-locked between `lock` and `unlock`.

    Attributes:
        addresses: of the slots, one behind the other.
    """

    def __init__(self, count: int) -> None:
        self._nbytes = count * SLOT_BYTES
        self._memory = mmap.mmap(-1, self._nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        here = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._start = -(-here // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.addresses = [self._start + number * SLOT_BYTES for number in range(count)]

    def lock(self, cuda: CudaRuntime) -> bool:
        """Whether CUDA locks it. One registration: the driver makes them one by one, 2 ms each, and undoes them as
        slowly."""
        try:
            cuda.host_register(self._start, self._nbytes)
        except CudaError:
            return False
        return True

    def unlock(self, cuda: CudaRuntime) -> None:
        try:
            cuda.host_unregister(self._start)
        except CudaError:
            _locked_for_good.append(self._memory)


@contextmanager
def page_locked(cuda: CudaRuntime) -> Iterator[list[int]]:
    """Addresses of the slots of a thread; none where CUDA locks no memory."""
    slots = Slots(SLOTS)
    if not slots.lock(cuda):
        yield []
        return
    try:
        yield slots.addresses
    finally:
        slots.unlock(cuda)


def map_for_reading(start: int, nbytes: int) -> None:
    """Maps the pages by one call, where they are a fault for every sixteenth. Where it fails, that is what they are."""
    _populate(start, nbytes, _MADV_POPULATE_READ)


def map_for_writing(start: int, nbytes: int) -> None:
    """Likewise, of memory that nobody has touched: the kernel clears it."""
    _populate(start, nbytes, _MADV_POPULATE_WRITE)


def _populate(start: int, nbytes: int, how: int) -> None:
    first = start - start % mmap.PAGESIZE
    _LIBC.madvise(first, start + nbytes - first, how)
