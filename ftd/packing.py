"""msgpack with the limits of this product: maps with text keys, no extension types, nothing executable."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, cast

import msgpack


def pack(value: Any) -> bytes:
    """`value` as msgpack bytes; equal values give equal bytes (maps keep their order)."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes | memoryview) -> Any:
    """The value of exactly these bytes.

    Raises:
        ValueError: the bytes are no msgpack, are cut short, have something behind them, or hold an extension type.
    """
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension)
    except (msgpack.exceptions.UnpackException, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"no msgpack: {error or type(error).__name__}") from None


def _no_extension(kind: int, _: bytes) -> Any:
    raise ValueError(f"extension type {kind}")


def unpack_map(data: bytes | memoryview) -> dict[str, Any]:
    """As `unpack`, for a value that must be a map.

    Raises:
        ValueError: as `unpack`, or the value is no map.
    """
    value = unpack(data)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"expected a map with text keys, found {type(value).__name__}")
    return value


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the cyclic garbage collector from running in the body, which makes many objects and no cycles.

    Thousands of new objects set it off, and a full pass over a process that imported torch takes 80 ms, where
    decoding a manifest takes 5 (msgpack's documentation advises the same for large messages).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
