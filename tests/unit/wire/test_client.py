"""The asking end of the control socket, against daemons of every kind."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftd import errors
from ftd.clock import Deadline
from ftd.wire import frame
from ftd.wire.client import Asked, call
from ftd.wire.messages import Reply

from .conftest import NOBODY, Serving, as_nobody, needs_root

SHORT_S = 0.2
BOUND_S = 10.0


def ask(path: Path, seconds: float | None = BOUND_S) -> dict[str, object]:
    return call(path, "status", {}, Deadline.after(seconds))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], Path]]:
    """`daemon(script)` accepts one connection, runs the script on it and closes it; gives the socket's path."""
    with contextlib.ExitStack() as stack:

        def start(script: Callable[[socket.socket], None]) -> Path:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(tmp_path / "s"))
            listener.listen()

            def serve() -> None:
                # a client that has given up is what some of the scripts are about
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection, _ = listener.accept()
                    with connection:
                        script(connection)

            thread = threading.Thread(target=serve)
            thread.start()
            stack.callback(thread.join, BOUND_S)
            return tmp_path / "s"

        yield start


def until_closed(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def answering(data: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(data)

    return script


def test_a_call_without_a_deadline_answers(serve: Callable[..., Serving]) -> None:
    assert ask(serve({"status": lambda peer, args: {"state": "ready"}}).path, None) == {"state": "ready"}


def _nothing(path: Path) -> None:
    pass


def _stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


def _regular(path: Path) -> None:
    path.touch()


def _dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("make", [_nothing, _stale, _regular, _dangling])
def test_where_nobody_listens_the_error_names_the_path(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "s")
    with pytest.raises(errors.ControlError, match=f"no daemon listens at {tmp_path / 's'}") as caught:
        ask(tmp_path / "s")
    assert "ftd start" in caught.value.remedy


def test_a_path_longer_than_the_kernel_takes_is_a_control_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ControlError, match="path too long"):
        ask(tmp_path / ("x" * 120))


@needs_root
def test_a_socket_closed_to_the_user_is_an_access_error(serve: Callable[..., Serving], open_path: Path) -> None:
    path = serve({}, path=open_path, mode=0o600).path
    with as_nobody(), pytest.raises(errors.AccessError, match=f"uid {NOBODY} may not use the socket {path}"):
        ask(path)


def _silent(connection: socket.socket) -> None:
    until_closed(connection)


def _half_a_header(connection: socket.socket) -> None:
    connection.sendall(b"\0\0")
    until_closed(connection)


def _half_a_payload(connection: socket.socket) -> None:
    connection.sendall(struct.pack(">I", 100) + b"\x81")
    until_closed(connection)


def _trickle(connection: socket.socket) -> None:
    connection.settimeout(0.02)
    connection.recv(1 << 16)
    connection.sendall(struct.pack(">I", 10_000))
    while True:
        connection.sendall(b"\x81")
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1):
                return


@pytest.mark.parametrize("script", [_silent, _half_a_header, _half_a_payload, _trickle])
def test_a_daemon_that_does_not_finish_is_bounded(
    daemon: Callable[..., Path], script: Callable[[socket.socket], None]
) -> None:
    path = daemon(script)
    begun = time.monotonic()
    with pytest.raises(errors.ControlError, match=r"did not answer status within 0\.2 s"):
        ask(path, SHORT_S)
    assert SHORT_S <= time.monotonic() - begun < BOUND_S


def test_a_stopped_daemon_with_a_full_backlog_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped, contextlib.ExitStack() as stack:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        waiting.connect(str(path))
        with pytest.raises(errors.ControlError, match=r"did not answer status within 0\.2 s"):
            ask(path, SHORT_S)


def test_an_expired_deadline_sends_nothing(daemon: Callable[..., Path]) -> None:
    received = []
    path = daemon(lambda connection: received.append(connection.recv(1)))
    with pytest.raises(errors.ControlError, match="did not answer status within 0 s"):
        ask(path, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(str(path))  # the one that the script gets
        other.sendall(b"x")
        assert other.recv(1) == b""
    assert received == [b"x"]


def test_a_request_too_large_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(errors.FrameError, match="payload bytes: expected 1 to"):
        call(tmp_path / "s", "status", {"x": b"\0" * frame.MAX_FRAME_BYTES}, Deadline.after(BOUND_S))


@pytest.mark.parametrize("read_first", [True, False])
def test_a_connection_closed_without_an_answer_is_a_control_error(
    daemon: Callable[..., Path], read_first: bool
) -> None:
    path = daemon(lambda connection: connection.recv(1 << 16) if read_first else None)
    with pytest.raises(errors.ControlError, match="closed the connection without an answer"):
        ask(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", errors.FrameError),
        (struct.pack(">I", 100) + b"\x81", errors.FrameError),
        (b"\0\0", errors.FrameError),
        (struct.pack(">I", 1) + b"\x90", errors.FrameError),
        (frame.encode({"v": [1, 0]}), errors.FrameError),
        (frame.encode({"v": [9, 0], "result": {}}), errors.ProtocolMismatchError),
    ],
    ids=["text", "cut-payload", "cut-header", "list", "neither", "other-major"],
)
def test_an_answer_that_is_none_is_named(daemon: Callable[..., Path], data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        ask(daemon(answering(data)))


def test_an_answer_that_comes_before_the_request_is_read_still_counts(daemon: Callable[..., Path]) -> None:
    reply = frame.encode(Reply(error=errors.ControlError("too many peers", "retry")).to_map())
    with pytest.raises(errors.ControlError, match="too many peers"):
        call(
            daemon(lambda connection: connection.sendall(reply)),
            "status",
            {"x": b"\0" * 900_000},  # more than the kernel buffers: sending fails before the answer is read
            Deadline.after(BOUND_S),
        )


def test_an_answer_may_be_waited_for_elsewhere(daemon: Callable[..., Path]) -> None:
    go = threading.Event()

    def script(connection: socket.socket) -> None:
        assert go.wait(BOUND_S)
        answering(frame.encode(Reply({"x": 1}).to_map()))(connection)

    with Asked(daemon(script), "status", {}, Deadline.after(BOUND_S)) as asked:
        assert not asked.answered(0)
        assert not asked.answered(SHORT_S)
        go.set()
        assert asked.answered(BOUND_S)
        assert asked.reply(Deadline.after(BOUND_S)) == {"x": 1}


def test_a_connection_serves_one_request_after_another(serve: Callable[..., Serving]) -> None:
    said: list[str] = []

    def handler(peer: object, args: dict[str, object]) -> dict[str, object]:
        said.append(str(args["word"]))
        return args

    path = serve({"first": handler, "second": handler}).path
    with Asked(path, "first", {"word": "one"}, Deadline.after(BOUND_S)) as asked:
        assert asked.reply(Deadline.after(BOUND_S)) == {"word": "one"}
        asked.again("second", {"word": "two"}, Deadline.after(BOUND_S))
        assert asked.reply(Deadline.after(BOUND_S)) == {"word": "two"}
        asked.again("third", {}, Deadline.after(BOUND_S))
        with pytest.raises(errors.FtdError, match="third"):
            asked.reply(Deadline.after(BOUND_S))
    assert said == ["one", "two"]


def test_an_answer_that_is_there_counts_however_late_it_is_read(serve: Callable[..., Serving]) -> None:
    """As by a process that was stopped meanwhile."""
    path = serve({"status": lambda peer, args: {"state": "ready"}}).path
    with Asked(path, "status", {}, Deadline.after(BOUND_S)) as asked:
        assert asked.answered(BOUND_S)
        assert asked.reply(Deadline.after(0)) == {"state": "ready"}
        with pytest.raises(errors.NoAnswerError, match="did not answer"):
            asked.reply(Deadline.after(0))


def test_a_connection_that_ends_counts_as_answered(daemon: Callable[..., Path]) -> None:
    with Asked(daemon(lambda connection: None), "status", {}, Deadline.after(BOUND_S)) as asked:
        assert asked.answered(BOUND_S)
        with pytest.raises(errors.NoAnswerError, match="closed the connection without an answer"):
            asked.reply(Deadline.after(BOUND_S))


def test_leaving_hangs_up(daemon: Callable[..., Path]) -> None:
    ended = threading.Event()

    def script(connection: socket.socket) -> None:
        until_closed(connection)
        ended.set()

    with Asked(daemon(script), "status", {}, Deadline.after(BOUND_S)):
        assert not ended.wait(SHORT_S)
    assert ended.wait(BOUND_S)


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = ("torch", "asyncio", "pydantic", "filelock", "psutil", "rich", "yaml")
    code = f"import sys, ftd.wire.client, ftd.rundir; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
