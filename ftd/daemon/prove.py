"""What `verify: full` asks before weights are published: is memory what was read, and was the file what its publisher
says? Both are answered from the segments themselves, since they are what followers get."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ftd.daemon.reread import Check, Span, compare
from ftd.errors import SegmentError, SourceChangedError, SourceDamagedError, SourceError
from ftd.shm.digest import STRIDE_BYTES
from ftd.shm.layout import Extent, Layout
from ftd.shm.segment import Segment
from ftd.source.access import opened, read_exactly
from ftd.source.base import Checkpoint, SourceFile, StoredTensor
from ftd.source.publisher import stated_hashes
from ftd.source.wording import DOWNLOAD_AGAIN, plural, quoted, shown, some

log = logging.getLogger("ftd")


def prove_memory(
    layout: Layout, segments: Sequence[Segment], digests: Sequence[bytes], threads: int, step: Callable[[], None]
) -> None:
    """Reads the segments again.

    Args:
        digests: of `layout.tensors`, as they were when they had been read.
        step: called often; what it raises ends it.

    Raises:
        SegmentError: some tensor has another digest by now.
    """
    checks = [
        Check(p.spec.name, "", Span(segments[p.extent.segment].fileno(), p.extent.offset, p.extent.nbytes), digest)
        for p, digest in zip(layout.tensors, digests, strict=True)
        if p.extent.nbytes
    ]
    changed = compare(checks, threads=threads, step=lambda _: step())
    if changed:
        raise SegmentError(
            f"{plural(len(changed), 'tensor')} changed in shared memory after they were read:"
            f" {some([quoted(difference.name) for difference in changed], 8)}",
            "look for memory errors in the kernel's log, and for who writes to /dev/shm",
        )


def prove_files(
    checkpoint: Checkpoint,
    layout: Layout,
    views: Sequence[memoryview],
    threads: int,
    step: Callable[[], None],
    note: Callable[[str], None],
) -> None:
    """Compares each file with what its publisher states, side by side.

    The bytes of tensors are taken from the segments and what lies between them from the file, so that the hash is one
    of what will be published.

    Args:
        step: called often, from any thread; what it raises ends it.
        note: told which files nobody states a hash of.

    Raises:
        SourceDamagedError: some file has another hash; all of them are named.
        SourceError: a stated hash, or a file, cannot be read.
        SourceChangedError: a file changed since.
    """
    stated = [stated_hashes(file) for file in checkpoint.files]
    unstated = [file.name for file, hashes in zip(checkpoint.files, stated, strict=True) if not hashes]
    if unstated:
        note(f"verify: full found no stated hash of {plural(len(unstated), 'file')}: {some(unstated, 8)}")
    extents = {placed.spec.name: placed.extent for placed in layout.tensors}

    def prove(number: int) -> list[str]:
        if not stated[number]:
            return []
        file = checkpoint.files[number]
        # of a tensor that lies otherwise in its file, the bytes there are not those of the segment
        tensors = [tensor for tensor in checkpoint.tensors if tensor.file == number and tensor.strides is None]
        found = _sha256(file, tensors, extents, views, step)
        return [
            f"{shown(file.path)} has SHA-256 {found}, {shown(place)} says {expected}"
            for place, expected in stated[number].items()
            if found != expected
        ]

    with ThreadPoolExecutor(threads, thread_name_prefix="ftd-prove") as pool:
        problems = [text for texts in pool.map(prove, range(len(stated))) for text in texts]
    if problems:
        raise SourceDamagedError("; ".join(problems), DOWNLOAD_AGAIN)
    log.info("verify: %d of %d files are what their publishers state", len(stated) - len(unstated), len(stated))


def _sha256(
    file: SourceFile,
    tensors: Sequence[StoredTensor],
    extents: Mapping[str, Extent],
    views: Sequence[memoryview],
    step: Callable[[], None],
) -> str:
    digester = hashlib.sha256()
    try:
        with opened(file.path) as fd:
            file.check_unchanged(fd)
            for data in _bytes_of(fd, file, tensors, extents, views):
                digester.update(data)
                step()
            file.check_unchanged(fd)
    except SourceChangedError:
        raise
    except SourceError as error:
        raise SourceError(f"{shown(file.path)} {error.message}", error.remedy) from None
    return digester.hexdigest()


def _bytes_of(
    fd: int,
    file: SourceFile,
    tensors: Sequence[StoredTensor],
    extents: Mapping[str, Extent],
    views: Sequence[memoryview],
) -> Iterator[bytes | memoryview]:
    """The file from its first byte to its last, in strides."""
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        yield from _read(fd, at, tensor.offset)
        extent = extents[tensor.spec.name]
        begin = max(at, tensor.offset) - tensor.offset  # tensors may share bytes
        for start in range(begin, extent.nbytes, STRIDE_BYTES):
            stop = min(extent.nbytes, start + STRIDE_BYTES)
            yield views[extent.segment][extent.offset + start : extent.offset + stop]
        at = max(at, tensor.offset + extent.nbytes)
    yield from _read(fd, at, file.bytes)


def _read(fd: int, begin: int, end: int) -> Iterator[bytes]:
    for start in range(begin, end, STRIDE_BYTES):
        yield read_exactly(fd, min(STRIDE_BYTES, end - start), start)
