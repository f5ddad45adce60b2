"""Pinning: page-locking the weights for DMA, by CUDA where it is there, else by mlock, else not at all.

Every refusal costs speed and never correctness: it is undone in reverse, warned about once, and shown in status.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ftd.cuda.runtime import ABSENT, NO_GPU, CudaError, CudaRuntime, load_runtime
from ftd.units import GIB, format_bytes

#: One registration of 512 GiB fails on drivers from r580 on, and hundreds of GB in one call stall other CUDA calls
#: of the node; 1 GiB costs about 0.1 s and no speed.
CHUNK_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class Region:
    """Mapped memory; `address` is page-aligned."""

    address: int
    nbytes: int


@dataclass
class Pinned:
    """What was pinned and how; `close` undoes it in reverse.

    Attributes:
        why_not_cuda: where the kind is another.
        cuda, ordinal: whose context pins, where the kind is `cuda` and `pin` made it.
    """

    kind: str = "none"
    why_not_cuda: str = ""
    cuda: CudaRuntime | None = None
    ordinal: int = 0
    chunks: list[Region] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _undo: Callable[[Region], None] | None = None

    def bytes_in(self, region: Region) -> int:
        """Pinned bytes of a region."""
        return sum(c.nbytes for c in self.chunks if region.address <= c.address < region.address + region.nbytes)

    def close(self) -> None:
        while self.chunks:
            chunk = self.chunks.pop()
            if self._undo is not None:
                self._undo(chunk)
        self.kind = "none"


def pin(
    regions: Sequence[Region],
    *,
    how: str,
    device: int | None,
    cancelled: Callable[[], bool],
    progress: Callable[[int], None],
    runtime: Callable[[], tuple[CudaRuntime | None, str]] = load_runtime,
) -> Pinned:
    """Pins the regions, in chunks, as well as it can be done here.

    Runs in a thread of its own: it makes `device` that thread's CUDA device.

    Args:
        how: `auto`, `cuda`, `mlock` or `none`; `auto` does not warn on a host without a GPU, only of one that should
            be there.
        device: CUDA ordinal whose context pins; None is the first that takes a context.
        cancelled: asked between chunks; then what was pinned so far is returned.
        progress: told the bytes of each chunk.
    """
    pinned = Pinned(why_not_cuda=f"its configuration says pin: {how}")
    if how in ("auto", "cuda"):
        cuda, reason = runtime()
        if cuda is not None:
            pinned = _pin_cuda(cuda, regions, device, cancelled, progress)
            if pinned.kind == "cuda":
                return pinned
        else:
            pinned.why_not_cuda = reason
            if how == "cuda" or reason not in ABSENT:
                pinned.warnings.append(f"pin: cuda is not possible: {reason}; mlock is tried instead")
    if how != "none":
        _pin_mlock(regions, pinned, cancelled, progress)
    return pinned


def register(
    cuda: CudaRuntime,
    regions: Sequence[Region],
    *,
    read_only: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda _: None,
) -> Pinned:
    """Registers the regions, in chunks, with the calling thread's device: all of them, or none and one warning.

    Args:
        read_only: they may not be written; see `CudaRuntime.host_register`.
        cancelled, progress: as of `pin`.
    """

    def undo(chunk: Region) -> None:
        with contextlib.suppress(CudaError):  # the runtime is already gone, and the registration with it
            cuda.host_unregister(chunk.address)

    pinned = Pinned("cuda", _undo=undo)
    try:
        for chunk in _chunks(regions):
            if cancelled():
                break
            cuda.host_register(chunk.address, chunk.nbytes, read_only=read_only)
            pinned.chunks.append(chunk)
            progress(chunk.nbytes)
    except CudaError as error:
        done = sum(chunk.nbytes for chunk in pinned.chunks)
        pinned.close()
        pinned.why_not_cuda = error.message
        pinned.warnings.append(f"CUDA refused to pin the weights after {format_bytes(done)}: {error.message}")
    return pinned


def pages_within(ranges: Iterable[tuple[int, int]], least: int = mmap.PAGESIZE) -> list[Region]:
    """The pages that lie wholly within the given (address, bytes), in runs of at least `least` bytes.

    Not the pages at the rims: what else lies on them would be registered in part, and CUDA refuses every copy whose
    source lies in registered pages in part, by whomever.
    """
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if merged and address <= merged[-1][1]:
            start, stop = merged.pop()
            merged.append((start, max(stop, address + nbytes)))
        else:
            merged.append((address, address + nbytes))
    regions = []
    for address, stop in merged:
        first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, stop - stop % mmap.PAGESIZE
        if last - first >= least:
            regions.append(Region(first, last - first))
    return regions


def _pin_cuda(
    cuda: CudaRuntime,
    regions: Sequence[Region],
    device: int | None,
    cancelled: Callable[[], bool],
    progress: Callable[[int], None],
) -> Pinned:
    try:
        ordinal = _use_device(cuda, device)
    except CudaError as error:
        return Pinned(why_not_cuda=error.message, warnings=[f"CUDA refused to pin the weights: {error.message}"])
    pinned = register(cuda, regions, cancelled=cancelled, progress=progress)
    pinned.cuda, pinned.ordinal = cuda, ordinal
    return pinned


def _use_device(cuda: CudaRuntime, device: int | None) -> int:
    """The device, whose context the calling thread now has."""
    if device is not None:
        cuda.use_device(device)
        return device
    refused: CudaError | None = None
    for ordinal in range(cuda.device_count()):
        try:
            cuda.use_device(ordinal)
        except CudaError as error:  # full, or in exclusive use by another process
            refused = error
        else:
            return ordinal
    raise refused or CudaError(NO_GPU)


def _pin_mlock(
    regions: Sequence[Region], pinned: Pinned, cancelled: Callable[[], bool], progress: Callable[[int], None]
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def undo(chunk: Region) -> None:
        libc.munlock(chunk.address, chunk.nbytes)

    pinned.kind, pinned._undo = "mlock", undo
    for chunk in _chunks(regions):
        if cancelled():
            return
        if libc.mlock(chunk.address, chunk.nbytes) != 0:
            reason = os.strerror(ctypes.get_errno()).lower()
            done = sum(c.nbytes for c in pinned.chunks)
            pinned.close()
            pinned.warnings.append(
                f"mlock of the weights failed after {format_bytes(done)}: {reason} (limit {_memlock_limit()}); they"
                " may be swapped out. Raise it: LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker"
            )
            return
        pinned.chunks.append(chunk)
        progress(chunk.nbytes)


def _chunks(regions: Sequence[Region]) -> list[Region]:
    return [
        Region(region.address + at, min(CHUNK_BYTES, region.nbytes - at))
        for region in regions
        for at in range(0, region.nbytes, CHUNK_BYTES)
    ]


def _memlock_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
