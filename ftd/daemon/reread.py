"""Digests of what lies in open files, read once more by several threads: of segments and checkpoints alike.

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
