"""The first 16 bytes of both coordination segments: 8 bytes magic · u16 major · u16 minor · u32 segment bytes,
little-endian."""

from __future__ import annotations

import struct

from ftd._version import PROTOCOL, __version__
from ftd.errors import ProtocolMismatchError, SegmentError

_HEADER = struct.Struct("<8sHHI")
HEADER_BYTES = _HEADER.size


def encode_header(magic: bytes, segment_bytes: int) -> bytes:
    return _HEADER.pack(magic, *PROTOCOL, segment_bytes)


def check_header(data: bytes, magic: bytes, segment_bytes: int, name: str) -> None:
    """Checks the first bytes of the segment `name`.

    Raises:
        SegmentError: another magic or length.
        ProtocolMismatchError: another major version.
    """
    if len(data) < HEADER_BYTES or data[:8] != magic:
        raise SegmentError(f"{name} is no segment of ftd: found {data[:8]!r}, expected {magic!r}")
    _, major, minor, found = _HEADER.unpack_from(data)
    if major != PROTOCOL[0]:
        raise ProtocolMismatchError(
            f"{name} speaks protocol {major}.{minor}, this ftd {__version__} speaks {PROTOCOL[0]}.{PROTOCOL[1]}",
            "run the same release of ftd on both sides",
        )
    if found != segment_bytes:
        raise SegmentError(f"{name} says that it holds {found} bytes: expected {segment_bytes}")
