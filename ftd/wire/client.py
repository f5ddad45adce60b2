"""The asking end of the control socket: blocking, bounded, and quick to import, since `ftd status` uses it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from ftd.clock import Deadline
from ftd.errors import AccessError, ControlError, NoAnswerError, os_reason
from ftd.wire import frame
from ftd.wire.messages import Reply, Request

#: Between two attempts at a listener whose backlog is full.
_RETRY_S = 0.02
#: For reading an answer that came in time to one who asks for it late, as a process that was stopped.
_GRACE_S = 1.0


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
    with Asked(path, op, args, deadline) as asked:
        return asked.reply(deadline)


class Asked:
    """A request that was sent and whose answer comes later. Closing it hangs up, which ends an operation that ends
    with its peer.

    Raises:
        as `call`, before the answer.
    """

    def __init__(self, path: Path, op: str, args: Mapping[str, Any], deadline: Deadline) -> None:
        request = frame.encode(Request(op, dict(args)).to_map())
        self._path, self._op = path, op
        self._begun = b""  # of the answer, as far as somebody has read it
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _explained(path, op, deadline, ControlError):
                _connect(self._sock, path, deadline)
            self._say(request, deadline)
        except BaseException:
            self._sock.close()
            raise

    def _say(self, data: bytes, deadline: Deadline) -> None:
        # a daemon that closes without reading may have said why: the answer, or its lack, decides
        with (
            _explained(self._path, self._op, deadline, NoAnswerError),
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
        ):
            _arm(self._sock, deadline)
            self._sock.sendall(data)

    def again(self, op: str, args: Mapping[str, Any], deadline: Deadline) -> None:
        """Asks for one more on the same connection, once the answer before was read: in half of the time."""
        self._op = op
        self._say(frame.encode(Request(op, dict(args)).to_map()), deadline)

    def answered(self, within_s: float) -> bool:
        """Whether `reply` would give something at once, be it an error; waits so long for it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def reply(self, deadline: Deadline) -> dict[str, Any]:
        """The result; raises as `call`."""
        if deadline.expired() and self.answered(0):
            deadline = Deadline.after(_GRACE_S)
        with _explained(self._path, self._op, deadline, NoAnswerError):
            reply = _receive(self._sock, self._path, deadline, self._begun)
        if reply.error is None:
            return reply.result
        try:
            raise reply.error
        finally:
            del reply  # else error and frame refer to each other, and all that callers hold waits for a collection

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _explained(path: Path, op: str, deadline: Deadline, failed: type[ControlError]) -> Iterator[None]:
    """Errors of the system as what they mean here; `failed` is the kind of those that mean nothing else."""
    allowed_s = deadline.remaining_s()
    try:
        yield
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


def _connect(sock: socket.socket, path: Path, deadline: Deadline) -> None:
    while True:
        _arm(sock, deadline)
        try:
            return sock.connect(os.fspath(path))
        except BlockingIOError:
            # connect(2) on a Unix socket does not wait for room in the backlog of a non-blocking caller
            deadline.pause(_RETRY_S)


def _receive(sock: socket.socket, path: Path, deadline: Deadline, begun: bytes) -> Reply:
    header = begun + _read_up_to(sock, frame.HEADER_BYTES - len(begun), deadline)
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
