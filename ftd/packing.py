"""msgpack with the limits of this product: maps with text keys, no extension types, nothing executable."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
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
    decoding a manifest takes 5 (msgpack's documentation advises the same for large messages). Nor do they set off a
    full pass afterwards: those that are left are looked at once, alone, as if they had been few.
    """
    if not gc.isenabled():
        yield
        return
    me = threading.get_ident()
    _paused_by.append(me)
    try:
        gc.disable()
        yield
    finally:
        # switched on with a pass due, the collector itself chooses how old the objects are that it looks at
        if 0 < gc.get_threshold()[0] < gc.get_count()[0]:
            gc.collect(0)
        gc.enable()
        _paused_by.remove(me)


#: Threads that are in `no_collection` and will switch the collector on again.
_paused_by: list[int] = []


def _after_fork() -> None:
    """In the child only the thread that forked is still within, if it was."""
    if _paused_by:
        _paused_by[:] = [thread for thread in _paused_by if thread == threading.get_ident()]
        if not _paused_by:
            gc.enable()


os.register_at_fork(after_in_child=_after_fork)
