"""The frame codec of the control socket: a length, then one msgpack map. Pure.

    offset  size  field
    0       4     length of the payload, unsigned, big-endian
    4       n     payload: one msgpack map with text keys

The cap makes the first byte of every frame zero, so that a peer who speaks anything textual is refused by its first
four bytes, before a payload is read or memory is reserved for one. Versions live in the map (`messages.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ftd.errors import FrameError
from ftd.packing import pack, unpack_map
from ftd.units import MIB

#: A status of thousands of followers is a few hundred KiB; bulk data travels in shared memory, never here.
MAX_FRAME_BYTES = 1 * MIB

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


def encode(fields: Mapping[str, Any]) -> bytes:
    """The frame of a map.

    Raises:
        FrameError: the payload is larger than `MAX_FRAME_BYTES`.
        TypeError, ValueError, OverflowError: a value has no msgpack form, which is a bug of the caller.
    """
    payload = pack(dict(fields))
    _check_length(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def payload_bytes(header: bytes) -> int:
    """How many bytes follow a header, known before any of them is read.

    Raises:
        FrameError: the header is cut short, or announces an empty or too large payload.
    """
    if len(header) != HEADER_BYTES:
        raise FrameError(f"the frame was cut short: {len(header)} of {HEADER_BYTES} header bytes", _REMEDY)
    (length,) = _LENGTH.unpack(header)
    _check_length(length)
    return int(length)


def decode(payload: bytes, expected_bytes: int) -> dict[str, Any]:
    """The map of a payload whose header announced `expected_bytes`.

    Raises:
        FrameError: the payload is cut short, no msgpack, or no map.
    """
    if len(payload) != expected_bytes:
        raise FrameError(f"the frame was cut short: {len(payload)} of {expected_bytes} payload bytes", _REMEDY)
    try:
        return unpack_map(payload)
    except ValueError as error:
        raise FrameError(f"the frame holds {error}", _REMEDY) from None


_REMEDY = "the other end of the socket is no ftd of this protocol, or it was killed while it wrote"


def _check_length(length: int) -> None:
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} payload bytes: expected 1 to {MAX_FRAME_BYTES}", _REMEDY)
