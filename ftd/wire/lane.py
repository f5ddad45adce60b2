"""A lane: the connection on which puts follow `publish_lane`, one behind the other, without the daemon's loop.

    publisher → daemon   frames (`frame.py`), each the map of a put; the last one has no parts
    daemon → publisher   the byte 1 for each slot that is free, at first for all of them; then the reply's frame

The first byte of a frame is 0. A publisher says nothing before the first 1: until then the loop reads, and what it has
read is lost. At either end one thread has a lane: it waits in the kernel for the other one, and a slot costs each a
handful of calls, where a request to the loop costs a connection, a task and two changes of thread.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from ftd.clock import Deadline
from ftd.errors import PublishRefusedError
from ftd.wire import frame
from ftd.wire.client import Asked
from ftd.wire.publish import PUBLISH_LANE, Part, Put, lane_args

FREE = b"\1"
#: Between two looks whether the lane is to end.
_LOOK_S = 0.1
_RECEIVE_BYTES = 64 * 1024


class LaneIn:
    """The daemon's end. Leaving its `with` closes it.

    Args:
        sock: does not block.
        check: raises when the lane is to end whatever its publisher does.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None]) -> None:
        self._sock, self._check = sock, check
        self._data = bytearray()
        sock.settimeout(_LOOK_S)  # it never becomes a blocking one: the loop writes the reply to the same connection

    def puts(self, slots: int) -> Iterator[Put]:
        """Every put, until there is no more. A slot is free again once the next put is asked for.

        Raises:
            FrameError: what came is no put.
            PublishRefusedError: the publisher ended before that.
        """
        self._send(FREE * slots)
        while True:
            length = frame.payload_bytes(self._take(frame.HEADER_BYTES))
            put = Put.from_map(frame.decode(self._take(length), length))
            if not put.parts:
                return
            yield put
            self._send(FREE)

    def _take(self, count: int) -> bytes:
        while len(self._data) < count:
            self._check()
            try:
                some = self._sock.recv(_RECEIVE_BYTES)
            except TimeoutError:
                continue
            except ConnectionError:
                some = b""
            if not some:
                raise PublishRefusedError("its publisher ended", "publish again")
            self._data += some
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    def _send(self, data: bytes) -> None:
        while data:
            self._check()
            try:
                data = data[self._sock.send(data) :]
            except TimeoutError:
                continue
            except ConnectionError:
                return  # what is read next tells

    def __enter__(self) -> LaneIn:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()


class LaneOut(Asked):
    """The publisher's end.

    Args:
        deadline: for the daemon to take the request.

    Raises:
        as `call`, before the answer.
    """

    def __init__(self, path: Path, token: bytes, number: int, deadline: Deadline) -> None:
        super().__init__(path, PUBLISH_LANE, lane_args(token, number), deadline)

    def freed(self) -> bool:
        """Whether what came is a slot; else it is the answer. Once `answered` has told of something."""
        with contextlib.suppress(ConnectionResetError):
            self._begun = self._sock.recv(1)
        if self._begun != FREE:
            return False
        self._begun = b""
        return True

    def put(self, parts: tuple[Part, ...], deadline: Deadline) -> None:
        """Tells what lies in the next slot; nothing: that there is no more.

        Raises:
            NoAnswerError: the daemon does not take it.
        """
        self._say(frame.encode(Put(parts).to_map()), deadline)
