"""What followers and the daemon say about stored profiles. Pure, and without an idea of what is in one.

    put_profile  {"profile": bytes}   → {}
    get_profile  {"identity": map}    → {"profile": bytes or nil}

A profile travels deflated (zlib, RFC 1950), since it may be larger than a frame and is mostly names that resemble one
another. What arrives is inflated up to a bound that its reader sets, and no further.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from ftd.errors import FrameError

PUT = "put_profile"
GET = "get_profile"


def put_args(profile: bytes) -> dict[str, Any]:
    return {"profile": zlib.compress(profile)}


def profile_put(args: Mapping[str, Any], at_most_bytes: int) -> bytes:
    """The profile that a follower offers.

    Raises:
        FrameError: there is none, it is not deflated, or larger than allowed.
    """
    return _inflated(args.get("profile"), at_most_bytes)


def get_args(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {"identity": dict(identity)}


def identity_asked(args: Mapping[str, Any]) -> dict[str, Any]:
    """What the profile that a follower asks for was measured on.

    Raises:
        FrameError: it does not say.
    """
    identity = args.get("identity")
    if not isinstance(identity, dict):
        raise FrameError(f"a request whose 'identity' is {type(identity).__name__}: expected dict", _REMEDY)
    return identity


def get_result(profile: bytes | None) -> dict[str, Any]:
    return {"profile": None if profile is None else zlib.compress(profile)}


def profile_got(result: Mapping[str, Any], at_most_bytes: int) -> bytes | None:
    """The profile that the daemon answers with; None where it has none.

    Raises:
        FrameError: the answer is something else, not deflated, or larger than allowed.
    """
    return None if result.get("profile", b"") is None else _inflated(result.get("profile"), at_most_bytes)


_REMEDY = "the other end of the socket is no ftd of this protocol"


def _inflated(data: Any, at_most_bytes: int) -> bytes:
    if not isinstance(data, bytes):
        raise FrameError(f"a message whose 'profile' is {type(data).__name__}: expected bytes", _REMEDY)
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(data, at_most_bytes + 1)
    except zlib.error as error:
        raise FrameError(f"a message whose 'profile' is not deflated: {error}", _REMEDY) from None
    if len(inflated) > at_most_bytes:
        raise FrameError(f"a profile of more than {at_most_bytes} bytes: expected no more", _REMEDY)
    if not stream.eof or stream.unused_data:
        found = "has something behind it" if stream.eof else "is cut short"
        raise FrameError(f"a message whose 'profile' {found}: expected one zlib stream", _REMEDY)
    return inflated
