"""Filling segments: parallel preadv from the checkpoint's files straight into the mappings.

The kernel does the touching: a full tmpfs is EFAULT from preadv and never a SIGBUS. Nothing is copied through
private memory but tensors that lie otherwise in their file (`ftd/source/strided.py`), and bytes that lie together in a
file are read by one request wherever they go. What was read is digested at once, while it is in the core's cache
(`docs/decisions/digests.md`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ftd.errors import MemoryShortError, SourceChangedError, SourceError, os_reason
from ftd.shm.digest import PIECE_BYTES, PieceDigester, PieceDigests, strides
from ftd.shm.layout import Extent
from ftd.shm.names import SHM_DIR
from ftd.shm.segment import PAGE_BYTES, space_text
from ftd.source.access import open_readable
from ftd.source.base import SourceFile, StoredTensor
from ftd.source.strided import pieces, span, spread
from ftd.tensorspec import DTYPE_BITS
from ftd.units import MIB

_IOV_MAX = 1024  # <limits.h>: buffers that one preadv takes


@dataclass(frozen=True, slots=True)
class Gather:
    """One tensor whose elements do not lie in the file as they will lie in the segment."""

    tensor: StoredTensor
    extent: Extent

    @property
    def file(self) -> int:
        return self.tensor.file

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes


@dataclass(frozen=True, slots=True)
class Read:
    """One request: bytes of a file from `offset` on, scattered over the segments in whole pieces of tensors."""

    file: int
    offset: int
    pieces: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def plan_reads(
    tensors: Sequence[StoredTensor], extents: Mapping[str, Extent], piece_bytes: int = PIECE_BYTES
) -> list[Read | Gather]:
    """Requests that read every tensor once, in file order; tensors that adjoin in a file share requests.

    A request has at most the bytes of one piece: long enough to be sequential for a disk, short enough to stop soon.
    """
    reads: list[Read | Gather] = []
    file, start, end, pieces = -1, 0, 0, list[Extent]()

    def flush() -> None:
        if pieces:
            reads.append(Read(file, start, tuple(pieces)))
            pieces.clear()

    for tensor in sorted(tensors, key=lambda t: (t.file, t.offset)):
        extent = extents[tensor.spec.name]
        if tensor.strides is not None:
            reads.append(Gather(tensor, extent))
            continue
        done = 0
        while done < extent.nbytes:
            at = tensor.offset + done
            take = min(extent.nbytes - done, piece_bytes)  # never less: a thread digests what it read
            if tensor.file != file or at != end or end - start + take > piece_bytes or len(pieces) == _IOV_MAX:
                flush()
                file, start, end = tensor.file, at, at
            pieces.append(Extent(extent.segment, extent.offset + done, take))
            done += take
            end += take
    flush()
    return reads


class Filler:
    """Carries out reads with several threads; stops at the first error or when asked to.

    Args:
        files: of the checkpoint, by index.
        views: writable mappings of the segments, by index.
        done: told the bytes of each finished request, from any thread.
        digests: told the digest of every piece; without, nothing is digested.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        views: Sequence[memoryview],
        *,
        threads: int,
        cancelled: Callable[[], bool],
        done: Callable[[int], None],
        digests: PieceDigests | None = None,
    ) -> None:
        self._files, self._views, self._threads = files, views, threads
        self._cancelled, self._done, self._digests = cancelled, done, digests
        self._failed = threading.Event()

    def run(self, reads: Sequence[Read | Gather]) -> None:
        """Fills the views.

        Raises:
            MemoryShortError: /dev/shm ran full.
            SourceChangedError: a file is not what its header was read from.
            SourceError: a file cannot be read.
        """
        queue = deque(reads)  # popleft is atomic: threads share it without a lock
        fds: list[int] = []
        try:
            for file in self._files:
                fds.append(_open(file))
                file.check_unchanged(fds[-1])
            # a thread's stack is mapped when no other thread has pages mapped: all are started before one reads
            started = threading.Event()
            with ThreadPoolExecutor(self._threads, thread_name_prefix="ftd-fill") as pool:
                try:
                    futures = [pool.submit(self._work, started, queue, fds) for _ in range(self._threads)]
                finally:
                    started.set()
                for future in futures:
                    future.result()
            for file, fd in zip(self._files, fds, strict=True):
                file.check_unchanged(fd)
        finally:
            for fd in fds:
                os.close(fd)

    def _work(self, started: threading.Event, queue: deque[Read | Gather], fds: Sequence[int]) -> None:
        started.wait()
        try:
            while not self._failed.is_set() and not self._cancelled():
                try:
                    read = queue.popleft()
                except IndexError:
                    return
                if isinstance(read, Gather):
                    self._gather(fds[read.file], read)
                else:
                    self._read(fds[read.file], read)
                self._done(read.nbytes)
        except BaseException:
            self._failed.set()
            raise

    def _read(self, fd: int, read: Read) -> None:
        if self._digests is None:
            buffers = [self._views[piece.segment][piece.offset : piece.offset + piece.nbytes] for piece in read.pieces]
            self._fetch(fd, self._files[read.file], buffers, read.offset)
            return
        at, digester = read.offset, PieceDigester()
        for parts in strides(read.pieces):
            buffers = [self._views[part.piece.segment][part.offset : part.offset + part.nbytes] for part in parts]
            self._fetch(fd, self._files[read.file], buffers, at)
            at += sum(part.nbytes for part in parts)
            for part, buffer in zip(parts, buffers, strict=True):
                digester.update(buffer)
                if part.ends:
                    self._digests.add(part.piece, digester.digest())
                    digester.reset()

    def _gather(self, fd: int, gather: Gather) -> None:
        """Digests nothing: the pieces of the tensor are whole only at the end."""
        tensor, file = gather.tensor, self._files[gather.file]
        spec, offset = tensor.spec, gather.extent.offset
        target = self._views[gather.extent.segment][offset : offset + gather.nbytes]
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            # the kernel touches first: what is copied below would end in a SIGBUS where the tmpfs is full
            self._fetch(zeros.fileno(), file, [target], 0)
        itemsize = DTYPE_BITS[spec.dtype] // 8
        buffer = memoryview(bytearray(min(PIECE_BYTES, span(spec.shape, tensor.strides or ()) * itemsize)))
        for piece in pieces(spec.shape, tensor.strides or (), tensor.offset, itemsize, PIECE_BYTES):
            if self._cancelled():
                return
            source = buffer[: piece.nbytes]
            self._fetch(fd, file, [source], piece.offset)
            spread(piece, source, target, itemsize)

    def _fetch(self, fd: int, file: SourceFile, buffers: Sequence[memoryview], at: int) -> None:
        try:
            end = fetch(fd, buffers, at)
        except OSError as error:
            raise SourceError(
                f"{file.path} cannot be read: {os_reason(error)}", "check the disk or the mount"
            ) from None
        if end is not None:
            raise SourceChangedError(
                f"{file.path} ended at byte {end} while it was read: expected {file.bytes} bytes",
                "start again once the file is whole",
            )


def fetch(fd: int, buffers: Sequence[memoryview], at: int) -> int | None:
    """Fills the buffers, which may lie in segments without pages yet, from byte `at` of a file on.

    Returns:
        where the file ends, if that is before the buffers are full.

    Raises:
        MemoryShortError: /dev/shm ran full.
        OSError: the file cannot be read.
    """
    rest = list(buffers)
    while rest:
        try:
            count = os.preadv(fd, rest, at)
        except OSError as error:
            if error.errno not in (errno.EFAULT, errno.ENOSPC, errno.ENOMEM):
                raise
            rest.clear()  # the error's frames would keep the mapping
            raise MemoryShortError(
                f"{SHM_DIR} ran full while the weights were read into it ({space_text()})",
                "free or enlarge it, then start again",
            ) from None
        if count == 0:
            return at
        at += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]
    return None


def pad(fd: int, gaps: Sequence[Extent]) -> None:
    """Writes zeros to the padding of one segment: a published segment has no hole.

    By pwrite, after the tensors: pages that a tensor shares are there already (with their size), and a full tmpfs is
    an error. Gaps inside a page need nothing.

    Raises:
        MemoryShortError: /dev/shm ran full.
    """
    zeros = bytes(1 * MIB)
    for gap in gaps:
        at, end = gap.offset, gap.offset + gap.nbytes
        if at // PAGE_BYTES == (end - 1) // PAGE_BYTES and at % PAGE_BYTES:
            continue
        while at < end:
            try:
                at += os.pwrite(fd, memoryview(zeros)[: end - at], at)
            except OSError as error:
                raise MemoryShortError(
                    f"{SHM_DIR} ran full while the padding was written: {os_reason(error)} ({space_text()})",
                    "free or enlarge it, then start again",
                ) from None


def _open(file: SourceFile) -> int:
    try:
        return open_readable(file.path)
    except OSError as error:
        raise SourceError(f"{file.path} cannot be opened: {os_reason(error)}", "check the path and its mode") from None
