"""Which pages of a private file mapping this process has written to.

The kernel copies such a page at the first write: from then on it is anonymous, which /proc/self/pagemap tells. So
every write is found, whoever made it: torch, `.data`, numpy, a kernel of somebody's own. Kernels from 6.7 on scan the
page tables themselves, which takes nothing where nothing was touched; others give an entry for each page, 3 ms a GiB.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from ftd.errors import os_reason

log = logging.getLogger(__name__)

_PAGEMAP = "/proc/self/pagemap"
#: One entry a page, in the machine's byte order: Documentation/admin-guide/mm/pagemap.rst of the kernel.
_ENTRY_BYTES = 8
#: Of entries read at once: those of 1 GiB of 4 KiB pages.
_READ_BYTES = 2 << 20
# In the entry's last byte (little-endian): bit 63 present, 62 swapped, 61 page of a file or shared. An entry that is
# neither present nor swapped is a page that was never touched, or one of the file that the kernel took back.
_PRESENT, _SWAPPED, _FILE = 0x80, 0x40, 0x20
_WRITTEN = bytes(bool(top & (_PRESENT | _SWAPPED)) and not top & _FILE for top in range(256))
_RUN = re.compile(rb"\x01+")

#: PAGEMAP_SCAN with its pm_scan_arg and page_region: include/uapi/linux/fs.h, pagemap.rst.
_SCAN = 0xC0606610
_SCAN_ARG = struct.Struct("=12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGION = struct.Struct("=3Q")
_REGIONS = 1024
#: Of an ioctl that the kernel does not know.
_NO_SCAN = frozenset({errno.ENOTTY, errno.EINVAL, errno.ENOSYS})


def written(address: int, nbytes: int) -> list[tuple[int, int]]:
    """The written pages that hold `nbytes` from `address`, as ascending, disjoint address ranges [start, stop).

    A page that was written with what it held before counts as written. Where the kernel does not tell, all of it
    does, with a warning in the log: whoever asks then reads the private mapping, which is always right.
    """
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    ranges: list[tuple[int, int]] = []
    try:
        for start, stop in _runs(first, last):
            across = ranges and ranges[-1][1] == start  # a run that two reads have a part of each
            ranges.append((ranges.pop()[0] if across else start, stop))
    except OSError as error:
        log.warning("%s cannot be read (%s): all weights count as changed in this process", _PAGEMAP, os_reason(error))
        return [(first * mmap.PAGESIZE, last * mmap.PAGESIZE)] if nbytes else []
    return ranges


def touches(ranges: Sequence[tuple[int, int]], address: int, nbytes: int) -> bool:
    """Whether `nbytes` from `address` meet one of the ranges that `written` gave."""
    # of the ranges that start before the bytes end, the last one reaches furthest
    index = bisect_right(ranges, address + nbytes - 1, key=lambda each: each[0])
    return nbytes > 0 and index > 0 and ranges[index - 1][1] > address


def _runs(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs of written pages among those of the given numbers, as address ranges."""
    fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            yield from _scanned(fd, first, last)
        except OSError as error:
            if error.errno not in _NO_SCAN:
                raise
        else:
            return
        yield from _read(fd, first, last)
    finally:
        os.close(fd)


def _scanned(fd: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs by the kernel's own scan.

    Raises:
        OSError: it has none; nothing was yielded then.
    """
    vector = ctypes.create_string_buffer(_REGION.size * _REGIONS)
    at, end = first * mmap.PAGESIZE, last * mmap.PAGESIZE
    while at < end:
        # pages of no file (that category is inverted) that are present or swapped
        size, flags, at_most, inverted, every, any_of = (
            _SCAN_ARG.size,
            0,
            0,
            _IS_FILE,
            _IS_FILE,
            _IS_PRESENT | _IS_SWAPPED,
        )
        wanted = (inverted, every, any_of, any_of)
        argument = bytearray(
            _SCAN_ARG.pack(size, flags, at, end, 0, ctypes.addressof(vector), _REGIONS, at_most, *wanted)
        )
        count = fcntl.ioctl(fd, _SCAN, argument, True)
        for number in range(count):
            start, stop, _ = _REGION.unpack_from(vector, number * _REGION.size)
            yield start, stop
        at = _SCAN_ARG.unpack(argument)[4]  # how far it came: the vector may have been full


def _read(fd: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs by an entry for each page."""
    buffer = bytearray(_READ_BYTES)
    page = first
    while page < last:
        window = memoryview(buffer)[: min(_READ_BYTES, (last - page) * _ENTRY_BYTES)]
        count = os.preadv(fd, [window], page * _ENTRY_BYTES) // _ENTRY_BYTES
        if not count:
            raise OSError(0, "it ends too early")
        marks = buffer[_ENTRY_BYTES - 1 : count * _ENTRY_BYTES : _ENTRY_BYTES].translate(_WRITTEN)
        for run in _RUN.finditer(marks):
            yield (page + run.start()) * mmap.PAGESIZE, (page + run.end()) * mmap.PAGESIZE
        page += count
