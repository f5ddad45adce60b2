"""Reading once more, by several threads, what lies in open files: segments and checkpoints alike.

By pread into a little private memory and never through a mapping: a file that is cut short meanwhile is a short read
and no SIGBUS, and the memory of whoever looks does not grow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from ftd.errors import os_reason
from ftd.shm.digest import PIECE_BYTES, STRIDE_BYTES, PieceDigester, cut, tensor_digest

_BATCH_PIECES = 1024  # of tiny tensors: handing work to a thread costs as much as digesting some


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one tensor in an open file."""

    fd: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a span has no digest; for the middle of a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """A tensor where it lies, and the digest that it should have; `place` names the segment or file."""

    name: str
    place: str
    span: Span
    expected: bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not what it should be.

    Attributes:
        place: the segment or file that was read, "" where there is none.
        offset, bytes: where in it.
    """

    name: str
    place: str
    offset: int
    bytes: int
    problem: str


def compare(checks: Sequence[Check], *, threads: int, step: Callable[[int], None]) -> list[Difference]:
    """The tensors whose digest is another, or that cannot be read; `step` as in `digests_of`."""
    found = digests_of([check.span for check in checks], threads=threads, step=step)
    return [
        Difference(check.name, check.place, check.span.offset, check.span.nbytes, _problem(digest, check.expected))
        for check, digest in zip(checks, found, strict=True)
        if digest != check.expected
    ]


def _problem(found: bytes | Unread, expected: bytes) -> str:
    if isinstance(found, Unread):
        return found.reason
    return f"digest {found.hex()}, expected {expected.hex()}"


class _Piece(NamedTuple):
    span: int
    fd: int
    offset: int
    nbytes: int


def digests_of(spans: Sequence[Span], *, threads: int, step: Callable[[int], None]) -> list[bytes | Unread]:
    """The digest of each span.

    Args:
        step: told the bytes of each batch, by the calling thread; what it raises ends it all.
    """
    found: list[list[bytes | Unread]] = [[] for _ in spans]
    with ThreadPoolExecutor(threads, thread_name_prefix="ftd-reread") as pool:
        try:
            batches = list(_batches(spans))
            for batch, results in zip(batches, pool.map(_digest, batches), strict=True):
                for piece, result in zip(batch, results, strict=True):
                    found[piece.span].append(result)
                step(sum(piece.nbytes for piece in batch))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [_joined(results) for results in found]


def _batches(spans: Iterable[Span]) -> Iterator[list[_Piece]]:
    batch, nbytes = list[_Piece](), 0
    for number, span in enumerate(spans):
        for offset, length in cut(span.offset, span.nbytes):
            if batch and (nbytes + length > PIECE_BYTES or len(batch) == _BATCH_PIECES):
                yield batch
                batch, nbytes = [], 0
            batch.append(_Piece(number, span.fd, offset, length))
            nbytes += length
    if batch:
        yield batch


def _digest(batch: Sequence[_Piece]) -> list[bytes | Unread]:
    buffer = memoryview(bytearray(min(STRIDE_BYTES, max(piece.nbytes for piece in batch))))
    return [_digest_piece(piece, buffer) for piece in batch]


def _digest_piece(piece: _Piece, buffer: memoryview) -> bytes | Unread:
    digester = PieceDigester()
    at, end = piece.offset, piece.offset + piece.nbytes
    while at < end:
        try:
            count = os.preadv(piece.fd, [buffer[: end - at]], at)
        except OSError as error:
            return Unread(f"cannot be read: {os_reason(error)}")
        if not count:
            return Unread(f"ends at byte {at}")
        digester.update(buffer[:count])
        at += count
    return digester.digest()


def _joined(results: Sequence[bytes | Unread]) -> bytes | Unread:
    unread = next((result for result in results if isinstance(result, Unread)), None)
    return unread or tensor_digest(result for result in results if isinstance(result, bytes))
