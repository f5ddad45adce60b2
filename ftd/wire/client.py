"""The asking end of the control socket: blocking, bounded, and quick to import, since `ftd status` uses it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftd.clock import Deadline
from ftd.errors import AccessError, ControlError, NoAnswerError, os_reason
from ftd.wire import frame
from ftd.wire.messages import Reply, Request

#: Between two attempts at a listener whose backlog is full.
_RETRY_S = 0.02


def call(path: Path, op: str, args: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
    """Asks the daemon at `path` for one operation and gives its result.

    Args:
        deadline: bounds connecting, sending and receiving together; a daemon that is stopped or wedged accepts
            connections (its kernel does) and then says nothing.

    Raises:
        ControlError: nobody listens, or takes the connection in time.
        NoAnswerError: the request may have arrived, and no answer came in time.
        FrameError: what came is no answer.
        AccessError: the socket's mode keeps this user out, or the daemon refuses the operation to it.
        ProtocolMismatchError: the daemon speaks another major version.
        FtdError: what the daemon answered, restored by its code.
    """
    request = frame.encode(Request(op, dict(args)).to_map())
    allowed_s = deadline.remaining_s()
    failed: type[ControlError] = ControlError
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _connect(sock, path, deadline)
            _arm(sock, deadline)
            failed = NoAnswerError
            # a daemon that closes without reading may have said why: the answer, or its lack, decides
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request)
            reply = _receive(sock, path, deadline)
    except TimeoutError:
        raise failed(
            f"the daemon at {path} did not answer {op} within {allowed_s:.3g} s",
            "it is stopped, wedged or very busy: see its log",
        ) from None
    except PermissionError:
        raise AccessError(
            f"uid {os.geteuid()} may not use the socket {path}",
            "run the command as the daemon's user or as a member of the socket's group",
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise ControlError(f"no daemon listens at {path}", "start one with `ftd start`") from None
    except OSError as error:
        raise failed(
            f"the daemon at {path} gave no answer to {op}: {os_reason(error)}", "see the daemon's log and try again"
        ) from None
    if reply.error is not None:
        raise reply.error
    return reply.result


def _connect(sock: socket.socket, path: Path, deadline: Deadline) -> None:
    while True:
        _arm(sock, deadline)
        try:
            return sock.connect(os.fspath(path))
        except BlockingIOError:
            # connect(2) on a Unix socket does not wait for room in the backlog of a non-blocking caller
            deadline.pause(_RETRY_S)


def _receive(sock: socket.socket, path: Path, deadline: Deadline) -> Reply:
    header = _read_up_to(sock, frame.HEADER_BYTES, deadline)
    if not header:
        raise NoAnswerError(
            f"the daemon at {path} closed the connection without an answer", "it is ending or has too many peers: retry"
        )
    length = frame.payload_bytes(header)
    return Reply.from_map(frame.decode(_read_up_to(sock, length, deadline), length))


def _read_up_to(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """`count` bytes, or fewer where the stream ends: the codec judges what is short."""
    data = bytearray()
    while len(data) < count:
        _arm(sock, deadline)
        try:
            piece = sock.recv(count - len(data))
        except ConnectionResetError:
            break  # the daemon closed with bytes of ours unread: an end like any other
        if not piece:
            break
        data += piece
    return bytes(data)


def _arm(sock: socket.socket, deadline: Deadline) -> None:
    left_s = deadline.remaining_s()
    # a timeout of zero would mean non-blocking, not expired
    if left_s == 0:
        raise TimeoutError
    sock.settimeout(left_s)
