"""A record that one process rewrites while others read it, and that is readable whenever its writer stops.

Two copies stand side by side; a write goes to the older one. A writer that is killed or stopped half-way leaves
the other copy whole, so a reader never waits for a writer. Layout of a copy, little-endian:

    u64 sequence · u32 length · u32 zero · 8 bytes BLAKE2b of (sequence, length, payload) · payload

Copies are moved by pread and pwrite: a hole or a truncated segment is then an error and never a SIGBUS.
"""

from __future__ import annotations

import hashlib
import os
import struct

_HEAD = struct.Struct("<QII8s")
HEAD_BYTES = _HEAD.size


def encode_copy(sequence: int, payload: bytes, copy_bytes: int) -> bytes:
    """A whole copy, zero-padded to `copy_bytes`.

    Raises:
        ValueError: the payload is too long.
    """
    if HEAD_BYTES + len(payload) > copy_bytes:
        raise ValueError(f"payload of {len(payload)} bytes: expected at most {copy_bytes - HEAD_BYTES}")
    head = _HEAD.pack(sequence, len(payload), 0, _digest(sequence, payload))
    return (head + payload).ljust(copy_bytes, b"\0")


def decode_copy(data: bytes) -> tuple[int, bytes] | None:
    """(sequence, payload), or None where the copy is empty, torn or damaged."""
    if len(data) < HEAD_BYTES:
        return None
    sequence, length, _, digest = _HEAD.unpack_from(data)
    payload = data[HEAD_BYTES : HEAD_BYTES + length]
    if sequence == 0 or len(payload) != length or digest != _digest(sequence, payload):
        return None
    return sequence, payload


def newest(data: bytes, copy_bytes: int) -> tuple[int, bytes] | None:
    """(sequence, payload) of the newest whole one of both copies; None where nothing was ever written."""
    copies = [decode_copy(data[start : start + copy_bytes]) for start in (0, copy_bytes)]
    return max((copy for copy in copies if copy), default=None, key=lambda copy: copy[0])


def _digest(sequence: int, payload: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<QI", sequence, len(payload)) + payload, digest_size=8).digest()


class DoubleRecord:
    """The two copies at `offset` of an open file. One process writes, from one thread at a time."""

    def __init__(self, fd: int, offset: int, copy_bytes: int) -> None:
        self._fd, self._offset, self._copy_bytes = fd, offset, copy_bytes
        self._sequence: int | None = None

    def read(self) -> bytes | None:
        """Payload of the newest whole copy; None where nothing was ever written."""
        found = self._newest()
        return found[1] if found else None

    def write(self, payload: bytes) -> None:
        """Replaces the older copy.

        Raises:
            ValueError: the payload is too long.
            OSError: the write failed; the newest copy stands as it was.
        """
        if self._sequence is None:
            found = self._newest()
            self._sequence = found[0] if found else 0
        sequence = self._sequence + 1
        copy = encode_copy(sequence, payload, self._copy_bytes)
        os.pwrite(self._fd, copy, self._offset + (sequence % 2) * self._copy_bytes)
        self._sequence = sequence

    def clear(self) -> None:
        """Forgets what stands there, for a writer that does not trust whoever wrote before: to it and to readers
        nothing was ever written."""
        os.pwrite(self._fd, bytes(2 * self._copy_bytes), self._offset)
        self._sequence = 0

    def _newest(self) -> tuple[int, bytes] | None:
        return newest(os.pread(self._fd, 2 * self._copy_bytes, self._offset), self._copy_bytes)
