"""Waiting for the block that another thread runs, unless that thread waits for this one.

The forward of a block may start threads that reach other blocks, and join them: each would wait for the other without
an end. Python's frames tell.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures.thread import _WorkItem
from types import CodeType, FrameType

from ftd_client.stream.runtime import Stream
from ftd_client.stream.units import OffloadError

#: Between looks at what the other thread does: a look takes 20 µs, and most blocks are shorter.
_LOOK_S = 0.05

_JOIN: CodeType = threading.Thread.join.__code__
_ONE: tuple[CodeType, ...] = (futures.Future.result.__code__, futures.Future.exception.__code__)
_SEVERAL: tuple[CodeType, ...] = (futures.wait.__code__, futures.as_completed.__code__)
_WORK: CodeType = _WorkItem.run.__code__


def give_way(stream: Stream, what: str) -> None:
    """Returns once no other thread runs a block; the next one may begin as soon. Called without the lock.

    Raises:
        OffloadError: the thread that does waits, with no time limit, for this one, which was about to reach `what`.
    """
    me = threading.get_ident()
    while stream.thread not in (0, me):
        if stream.lock.acquire(timeout=_LOOK_S):
            stream.lock.release()
        elif _awaits_this(stream.thread):
            raise OffloadError(
                f"{what} is reached by a thread that the forward of another block waits for, and would have to wait "
                "for that block",
                "start the thread outside of modules that stream, or name the one that starts it in exclude_patterns",
            )


def _awaits_this(thread: int) -> bool:
    ours = [frame.f_locals["self"].future for frame in _stack(sys._getframe()) if frame.f_code is _WORK]
    for frame in _stack(sys._current_frames().get(thread)):
        code = frame.f_code
        if code is _JOIN or code in _ONE or code in _SEVERAL:
            found = frame.f_locals
            if found.get("timeout") is not None:
                continue
            if code is _JOIN:
                awaited = found["self"] is threading.current_thread()
            elif code in _ONE:
                awaited = found["self"] in ours
            else:
                awaited = any(future in ours for future in found["fs"])
            if awaited:
                return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
