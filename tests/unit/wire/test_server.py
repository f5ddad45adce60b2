"""The daemon's end of the control socket, under peers of every kind."""

import asyncio
import logging
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd import errors
from ftd.clock import Deadline
from ftd.packing import pack
from ftd.wire import frame, server
from ftd.wire.client import call
from ftd.wire.messages import Reply, Request
from ftd.wire.peer import Peer, authorise

from .conftest import BOUND_S, NOBODY, Serving, as_nobody, needs_root

Serve = Callable[..., Serving]


def echo(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
    return args


def ask(path: Path, op: str = "echo", **args: Any) -> dict[str, Any]:
    return call(path, op, args, Deadline.after(BOUND_S))


def connect(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(BOUND_S)
    peer.connect(str(path))
    return peer


def receive_all(peer: socket.socket) -> bytes:
    """What the server says until it closes."""
    data = b""
    try:
        while piece := peer.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass  # it closed with bytes of ours unread
    return data


def receive_reply(peer: socket.socket) -> Reply:
    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := peer.recv(count - len(data))):
            data += piece
        return data

    length = frame.payload_bytes(receive(frame.HEADER_BYTES))
    return Reply.from_map(frame.decode(receive(length), length))


def kernel_buffer_bytes() -> int:
    """What a Unix stream socket takes while nobody reads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.setblocking(False)
        return ours.send(b"\0" * 900_000)


def error_in(data: bytes) -> errors.FtdError:
    length = frame.payload_bytes(data[:4])
    error = Reply.from_map(frame.decode(data[4:], length)).error
    assert error is not None
    return error


def eventually(condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(BOUND_S)
    while not condition():
        assert not deadline.expired()
        deadline.pause(0.005)


def is_closed(peer: socket.socket) -> bool:
    """Whether the server has closed the connection, without waiting; whatever it said before."""
    poll = select.poll()
    poll.register(peer, 0)  # a hang-up is always told
    return bool(poll.poll(0))


# --- what well-behaved peers get -------------------------------------------------------------------------------------


def test_handlers_may_be_functions_or_coroutines(serve: Serve) -> None:
    async def later(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"later": args["x"]}

    path = serve({"echo": echo, "later": later}).path
    assert ask(path, x=[1, b"\0", "é", None]) == {"x": [1, b"\0", "é", None]}
    assert ask(path, "later", x=2) == {"later": 2}


def test_the_kernel_says_who_asks(serve: Serve) -> None:
    path = serve({"who": lambda peer, args: {"pid": peer.pid, "uid": peer.uid, "gid": peer.gid}}).path
    assert ask(path, "who") == {"pid": os.getpid(), "uid": os.geteuid(), "gid": os.getegid()}


def test_several_requests_follow_one_another_on_a_connection(serve: Serve) -> None:
    with connect(serve({"echo": echo}).path) as peer:
        peer.sendall(b"".join(frame.encode(Request("echo", {"n": n}).to_map()) for n in range(3)))
        assert [receive_reply(peer).result["n"] for _ in range(3)] == [0, 1, 2]
        peer.sendall(frame.encode(Request("dance").to_map()))
        error = receive_reply(peer).error
        assert error is not None
        assert (error.code, "expected one of echo" in error.message) == ("control", True)
        peer.sendall(frame.encode(Request("echo", {"n": 3}).to_map()))
        assert receive_reply(peer).result == {"n": 3}


def test_a_slow_request_does_not_hold_up_others(serve: Serve) -> None:
    gate = asyncio.Event()

    async def wait(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return {}

    serving = serve({"echo": echo, "wait": wait})
    with connect(serving.path) as peer:
        peer.sendall(frame.encode(Request("wait").to_map()))
        assert ask(serving.path, n=1) == {"n": 1}
        serving.loop.call_soon_threadsafe(gate.set)
        assert receive_reply(peer).result == {}


# --- what goes wrong in handlers -------------------------------------------------------------------------------------


def test_an_error_of_a_handler_crosses_by_its_code(serve: Serve) -> None:
    def refuse(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        raise errors.MemoryShortError("8 GiB needed, 1 GiB free", "stop something")

    with pytest.raises(errors.MemoryShortError, match="8 GiB needed") as caught:
        ask(serve({"load": refuse}).path, "load")
    assert caught.value.remedy == "stop something"


def test_a_bug_becomes_an_internal_error_and_a_traceback_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        return {"x": args["missing"]}

    path = serve({"broken": broken, "echo": echo}).path
    with pytest.raises(errors.InternalError, match="broken failed inside the daemon: KeyError: 'missing'"):
        ask(path, "broken")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert ask(path, n=1) == {"n": 1}


@pytest.mark.parametrize(
    ("result", "code"),
    [({"x": object()}, "internal"), ({"x": 2**70}, "internal"), ({"x": b"\0" * frame.MAX_FRAME_BYTES}, "frame")],
    ids=["no-msgpack", "too-wide", "too-large"],
)
def test_a_result_that_does_not_fit_a_frame_becomes_an_error(serve: Serve, result: dict[str, Any], code: str) -> None:
    path = serve({"bad": lambda peer, args: result, "echo": echo}).path
    with pytest.raises(errors.FtdError) as caught:
        ask(path, "bad")
    assert caught.value.code == code
    assert ask(path, n=1) == {"n": 1}


# --- authorisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uid", "op", "allowed"), [(0, "stop", True), (7, "stop", True), (8, "status", True)])
def test_owner_and_root_may_do_all_and_others_the_rest(uid: int, op: str, allowed: bool) -> None:
    authorise(Peer(1, uid, uid), op, owner_uid=7, owner_only=frozenset({"stop"}))


def test_an_operation_of_the_owner_is_refused_to_others() -> None:
    with pytest.raises(errors.AccessError, match=r"stop is refused to uid 8: expected uid 7, .* or root"):
        authorise(Peer(1, 8, 0), "stop", owner_uid=7, owner_only=frozenset({"stop"}))


@needs_root
def test_another_user_gets_an_access_error_and_no_effect(serve: Serve, open_path: Path) -> None:
    ran = []
    handlers = {"stop": lambda peer, args: ran.append(peer) or {}, "echo": echo}
    path = serve(handlers, path=open_path, mode=0o666, owner_only=frozenset({"stop"})).path
    with as_nobody():
        with pytest.raises(errors.AccessError, match=f"stop is refused to uid {NOBODY}"):
            ask(path, "stop")
        assert ask(path, n=1) == {"n": 1}
    assert ran == []
    ask(path, "stop")
    assert len(ran) == 1


# --- hostile peers ---------------------------------------------------------------------------------------------------

BAD_FRAMES = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "frame"),
    "oversize": (struct.pack(">I", frame.MAX_FRAME_BYTES + 1), "frame"),
    "empty": (struct.pack(">I", 0), "frame"),
    "no-msgpack": (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "frame"),
    "list": (struct.pack(">I", 2) + b"\x91\x01", "frame"),
    "deep": (struct.pack(">I", 100_000) + b"\x91" * 100_000, "frame"),
    "no-version": (frame.encode({"op": "echo", "args": {}}), "frame"),
    "bad-args": (frame.encode({"v": [1, 0], "op": "echo", "args": 1}), "frame"),
    "other-major": (frame.encode({"v": [2, 0], "op": "echo", "args": {}}), "protocol_mismatch"),
}


@pytest.mark.parametrize(("data", "code"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_bad_frame_is_answered_with_an_error_and_the_connection_ends(serve: Serve, data: bytes, code: str) -> None:
    path = serve({"echo": echo}).path
    with connect(path) as peer:
        peer.sendall(data)
        assert error_in(receive_all(peer)).code == code
    assert ask(path, n=1) == {"n": 1}


@pytest.mark.parametrize("kept", [1, 4, 10], ids=["in-header", "after-header", "in-payload"])
def test_a_frame_cut_short_is_answered_with_an_error(serve: Serve, kept: int) -> None:
    path = serve({"echo": echo}).path
    with connect(path) as peer:
        peer.sendall(frame.encode(Request("echo").to_map())[:kept])
        peer.shutdown(socket.SHUT_WR)
        error = error_in(receive_all(peer))
    assert error.code == "frame"
    assert "cut short" in error.message


def test_random_bytes_never_stop_the_server(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    path = serve({"echo": echo}, frame_timeout_s=0.05).path
    noise = random.Random(1)
    for _ in range(60):
        body = noise.randbytes(noise.randrange(200))
        header = struct.pack(">I", len(body)) if noise.random() < 0.5 else b""
        with connect(path) as peer:
            peer.sendall(header + body)
            peer.shutdown(socket.SHUT_WR)
            receive_all(peer)
    assert ask(path, n=1) == {"n": 1}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_request_that_trickles_in_is_ended_by_the_frame_timeout(serve: Serve) -> None:
    path = serve({"echo": echo}, frame_timeout_s=0.2).path
    request = frame.encode(Request("echo", {"x": b"\0" * 4000}).to_map())
    begun = time.monotonic()
    with connect(path) as peer:
        for index in range(len(request)):
            readable, _, _ = select.select([peer], [], [], 0.01)
            if readable:
                break
            peer.sendall(request[index : index + 1])
        assert index < len(request) - 1
        error = error_in(receive_all(peer))
    assert "no whole request came within 0.2 s" in error.message
    assert 0.15 < time.monotonic() - begun < BOUND_S


def test_a_silent_connection_is_ended_by_the_frame_timeout(serve: Serve) -> None:
    with connect(serve({"echo": echo}, frame_timeout_s=0.05).path) as peer:
        assert error_in(receive_all(peer)).code == "control"


def test_a_peer_that_takes_no_reply_does_not_keep_its_place(serve: Serve) -> None:
    large = {"x": b"\0" * 1_000_000}  # several times what the kernel buffers
    path = serve({"large": lambda peer, args: large, "echo": echo}, frame_timeout_s=0.1, max_connections=1).path
    with connect(path) as peer:
        peer.sendall(frame.encode(Request("large").to_map()))

        def answered() -> bool:
            try:
                return ask(path, n=1) == {"n": 1}
            except errors.ControlError:
                return False  # the one place is taken

        eventually(answered)
        assert len(receive_all(peer)) < 1_000_000


def test_a_peer_that_leaves_before_its_answer_hurts_nobody(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    started, done = threading.Event(), threading.Event()
    gate = asyncio.Event()

    async def wait(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        started.set()
        await gate.wait()
        done.set()
        return {"x": b"\0" * 1_000_000}

    serving = serve({"wait": wait, "echo": echo})
    with connect(serving.path) as peer:
        peer.sendall(frame.encode(Request("wait").to_map()))
        assert started.wait(BOUND_S)
    serving.loop.call_soon_threadsafe(gate.set)
    assert done.wait(BOUND_S)
    assert ask(serving.path, n=1) == {"n": 1}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_of_200_connections_64_are_kept_and_the_others_closed_at_once(serve: Serve) -> None:
    path = serve({"echo": echo}, frame_timeout_s=60).path
    peers: list[socket.socket] = []
    try:
        for _ in range(200):
            peers.append(connect(path))
            # a closed one shows before the next comes, so that the backlog never fills
            if len(peers) > server.MAX_CONNECTIONS:
                eventually(lambda: is_closed(peers[-1]))
        kept = [peer for peer in peers if not is_closed(peer)]
        assert kept == peers[: server.MAX_CONNECTIONS]
        with pytest.raises(errors.ControlError, match="64 connections to the daemon are open") as caught:
            ask(path)
        # what was asked was not done: silence would leave that open
        assert not isinstance(caught.value, errors.NoAnswerError)
        kept[0].sendall(frame.encode(Request("echo", {"n": 1}).to_map()))
        assert receive_reply(kept[0]).result == {"n": 1}
    finally:
        for peer in peers:
            peer.close()

    def served() -> bool:
        try:
            return ask(path, n=2) == {"n": 2}
        except errors.ControlError:
            return False  # the loop has not seen the others go yet

    eventually(served)


@needs_root
def test_strangers_cannot_take_the_owners_places(serve: Serve, open_path: Path) -> None:
    path = serve({"echo": echo}, path=open_path, mode=0o666, frame_timeout_s=60).path
    peers = []
    try:
        with as_nobody():
            for _ in range(server.MAX_CONNECTIONS):
                peers.append(connect(path))
        eventually(lambda: sum(map(is_closed, peers)) == server.RESERVED_CONNECTIONS)
        with as_nobody(), pytest.raises(errors.ControlError):
            ask(path)
        assert ask(path, n=1) == {"n": 1}
    finally:
        for peer in peers:
            peer.close()


# --- start and close -------------------------------------------------------------------------------------------------


def test_close_removes_the_path_and_a_successor_may_come(serve: Serve, tmp_path: Path) -> None:
    first = serve({"echo": echo})
    first.run(first.server.close())
    assert not first.path.exists()
    first.run(first.server.close())  # a second time does nothing
    assert ask(serve({"echo": echo}).path, n=1) == {"n": 1}


def test_a_second_server_at_the_path_is_refused_and_the_first_answers_on(serve: Serve) -> None:
    path = serve({"echo": echo}).path
    with pytest.raises(errors.AlreadyRunningError):
        serve({})
    assert ask(path, n=1) == {"n": 1}


def test_close_leaves_a_path_that_was_replaced(serve: Serve, tmp_path: Path) -> None:
    serving = serve({"echo": echo})
    serving.path.unlink()
    serving.path.write_text("of somebody else")
    serving.run(serving.server.close())
    assert serving.path.read_text() == "of somebody else"


def test_close_lets_a_running_handler_answer(serve: Serve) -> None:
    started, gate = threading.Event(), asyncio.Event()
    # a little more than the kernel buffers, which a server that closes too early would drop
    large = {"x": b"\1" * (kernel_buffer_bytes() + 30_000)}

    async def stop(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        started.set()
        await gate.wait()
        return large

    serving = serve({"stop": stop}, close_grace_s=BOUND_S)
    with connect(serving.path) as peer, connect(serving.path) as idle:
        peer.sendall(frame.encode(Request("stop").to_map()))
        assert started.wait(BOUND_S)
        closing = asyncio.run_coroutine_threadsafe(serving.server.close(), serving.loop)
        assert receive_all(idle) == b""
        assert not closing.done()
        serving.loop.call_soon_threadsafe(gate.set)
        assert receive_reply(peer).result == large
        assert receive_all(peer) == b""
        closing.result(BOUND_S)


def test_close_cancels_a_handler_that_outlasts_the_grace(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def for_ever(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return {}

    serving = serve({"for_ever": for_ever}, close_grace_s=0.05)
    with connect(serving.path) as peer:
        peer.sendall(frame.encode(Request("for_ever").to_map()))
        assert started.wait(BOUND_S)
        serving.run(serving.server.close())
        assert cancelled.is_set()
        assert receive_all(peer) == b""
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_start_that_fails_after_binding_leaves_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any, **options: Any) -> None:
        raise OSError("no more of these")

    monkeypatch.setattr(asyncio, "start_unix_server", refuse)

    async def start() -> None:
        async with server.ControlServer(tmp_path / "s", {}, mode=0o600):
            raise AssertionError("it started")

    with pytest.raises(OSError, match="no more of these"):
        asyncio.run(start())
    assert not (tmp_path / "s").exists()


def test_a_reply_of_one_mebibyte_passes(serve: Serve) -> None:
    size = frame.MAX_FRAME_BYTES - len(pack(Reply({"x": b"\0" * 70000}).to_map())) + 70000
    path = serve({"large": lambda peer, args: {"x": b"\1" * size}}).path
    assert ask(path, "large") == {"x": b"\1" * size}
