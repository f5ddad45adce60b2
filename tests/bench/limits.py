"""What the machine can do, measured by the plainest code; each function runs in a process of its own."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ftd.shm.segment import Access, Segment
from tests.bench.child import Found, Skip

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
_STEP = 16 * MIB  # as long as the daemon's requests
_MADV_POPULATE_READ = 22  # <bits/mman-map-flags-generic.h>, Linux 5.14


def link(device: str) -> Found:
    import torch  # here alone: the other limits start without its seconds

    return {"bytes_per_s": link_bytes_per_s(torch.device(device))}


def link_bytes_per_s(device: torch.device) -> float:
    """The best of five copies of 1 GiB from pinned memory; on a CPU, of 64 MiB from memory to memory."""
    import torch

    cuda = device.type == "cuda"
    source = torch.ones(1 << (30 if cuda else 26), dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device, pin_memory=False)
    best = 0.0
    for _ in range(6):  # the first one warms up, and cannot be the best
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.current_stream(device).synchronize()
        best = max(best, source.nbytes / (time.perf_counter() - begun))
    return best


def memcpy(threads: int, nbytes: int) -> Found:
    """From touched memory to touched memory, the best of five."""
    source, target = (mmap.mmap(-1, nbytes) for _ in range(2))
    start, to = _address(source), _address(target)
    _copy(threads, nbytes, lambda at, size: ctypes.memset(start + at, 1, size))
    rates = [_copy(threads, nbytes, lambda at, size: ctypes.memmove(to + at, start + at, size)) for _ in range(6)]
    return {"bytes_per_s": max(rates[1:])}


def plain_copy(file: str, threads: int, huge: bool) -> Found:
    """The file's cached pages into fresh shared memory, in 2 MiB pages if `huge` and the mount gives them."""
    size = Path(file).stat().st_size
    with Segment.create(f"/ftd-bench-{os.getpid()}", size, Access()) as segment, Path(file).open("rb") as opened:
        segment.unlink()  # nothing stays, whenever this process is killed
        # writable for ctypes only; faulted in before the clock starts: the copy is not to pay for its source
        source = mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        source.madvise(_MADV_POPULATE_READ)
        target = segment.map_shared(writable=True, huge=huge)
        start, to = _address(source), _address(target)
        rate = _copy(threads, size, lambda at, nbytes: ctypes.memmove(to + at, start + at, nbytes))
    return {"bytes_per_s": rate}


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(threads: int, nbytes: int, move: Callable[[int, int], object]) -> float:
    """Bytes per second of `move(offset, bytes)` over all of them; ctypes calls without the interpreter lock."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # threads exist before the clock starts
        begun = time.perf_counter()
        list(pool.map(lambda at: move(at, min(_STEP, nbytes - at)), range(0, nbytes, _STEP)))
        return nbytes / (time.perf_counter() - begun)


def disk(file: str) -> Found:
    """The file from end to end past the page cache, one request of 16 MiB after the other."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise Skip("this filesystem has no direct reads") from None
        raise
    buffer = mmap.mmap(-1, _STEP)  # aligned, as such reads want it
    at = 0
    begun = time.perf_counter()
    while count := os.preadv(fd, [buffer], at):
        at += count
        if count % mmap.PAGESIZE:
            break  # the file's end: what is left of it begins at no boundary
    return {"bytes_per_s": at / (time.perf_counter() - begun)}
