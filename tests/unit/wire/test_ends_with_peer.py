"""Operations that end with the peer that asked for them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ftd.errors import InternalError, NoLeaseError
from ftd.wire import frame
from ftd.wire.messages import Request
from ftd.wire.peer import Peer

from .conftest import BOUND_S, Serving
from .test_server import ask, connect, echo, eventually, receive_all, receive_reply

Serve = Callable[..., Serving]


class Work:
    """A handler that waits for its gate, and tells how it ended."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.gate = asyncio.Event()
        self.linger = False

    async def __call__(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            if self.linger:
                await self.gate.wait()
            self.cancelled.set()
            raise
        return args


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def serving(serve: Serve, work: Work) -> Serving:
    return serve({"work": work, "stay": work, "echo": echo}, ends_with_peer=frozenset({"work"}), close_grace_s=0.2)


def request(op: str, **args: Any) -> bytes:
    return frame.encode(Request(op, args).to_map())


def open_gate(serving: Serving, work: Work) -> None:
    serving.loop.call_soon_threadsafe(work.gate.set)


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_peer_that_stays_gets_its_answer(serving: Serving, work: Work) -> None:
    with connect(serving.path) as peer:
        peer.sendall(request("work", n=1))
        assert work.begun.wait(BOUND_S)
        open_gate(serving, work)
        assert receive_reply(peer).result == {"n": 1}
        peer.sendall(request("work", n=2))
        assert receive_reply(peer).result == {"n": 2}
    assert not work.cancelled.is_set()


@pytest.mark.parametrize("more", [b"", b"half", request("echo", n=1), bytes(500_000)])
def test_the_handler_ends_when_its_peer_goes_whatever_that_sent_besides(
    serving: Serving, work: Work, more: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = connect(serving.path)
    peer.sendall(request("work"))
    assert work.begun.wait(BOUND_S)
    peer.setblocking(False)
    if more:
        peer.send(more)  # what the kernel takes
    assert not work.cancelled.is_set()
    peer.close()
    assert work.cancelled.wait(BOUND_S)
    eventually(lambda: not serving.server._connections)
    assert ask(serving.path, n=1) == {"n": 1}
    assert quiet(caplog)


def test_a_killed_peer_is_gone(serving: Serving, work: Work) -> None:
    code = f"""
import socket, sys
peer = socket.socket(socket.AF_UNIX); peer.connect({str(serving.path)!r}); peer.sendall({request("work")!r})
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert work.begun.wait(BOUND_S)
        assert not work.cancelled.is_set()
        child.kill()
        assert work.cancelled.wait(BOUND_S)


def test_a_peer_that_only_says_no_more_still_gets_its_answer(serving: Serving, work: Work) -> None:
    with connect(serving.path) as peer:
        peer.sendall(request("work", n=1))
        peer.shutdown(socket.SHUT_WR)
        assert work.begun.wait(BOUND_S)
        assert not work.cancelled.wait(0.1)
        open_gate(serving, work)
        assert receive_reply(peer).result == {"n": 1}


def test_others_run_to_their_end(serving: Serving, work: Work) -> None:
    with connect(serving.path) as peer:
        peer.sendall(request("stay"))
        assert work.begun.wait(BOUND_S)
    assert ask(serving.path, n=1) == {"n": 1}
    assert not work.cancelled.wait(0.1)
    open_gate(serving, work)
    eventually(lambda: not serving.server._connections)
    assert not work.cancelled.is_set()


def test_requests_behind_it_are_answered_after_it(serving: Serving, work: Work) -> None:
    with connect(serving.path) as peer:
        peer.sendall(request("work", n=1) + request("echo", n=2) + request("work", n=3))
        assert work.begun.wait(BOUND_S)
        open_gate(serving, work)
        assert [receive_reply(peer).result["n"] for _ in range(3)] == [1, 2, 3]


def test_errors_cross_as_those_of_others_do(serve: Serve) -> None:
    async def refuse(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        raise NoLeaseError("no") if args else ValueError("a bug")

    path = serve({"refuse": refuse}, ends_with_peer=frozenset({"refuse"})).path
    with pytest.raises(NoLeaseError):
        ask(path, "refuse", n=1)
    with pytest.raises(InternalError, match="ValueError: a bug"):
        ask(path, "refuse")


def test_the_connection_keeps_its_place_until_the_handler_has_ended(serving: Serving, work: Work) -> None:
    """A push ends only once the memory of its peer is let go of."""
    work.linger = True
    with connect(serving.path) as peer:
        peer.sendall(request("work"))
        assert work.begun.wait(BOUND_S)
    assert ask(serving.path, n=1) == {"n": 1}
    assert not work.cancelled.wait(0.1)
    assert len(serving.server._connections) == 1
    open_gate(serving, work)
    assert work.cancelled.wait(BOUND_S)
    eventually(lambda: not serving.server._connections)


def test_close_ends_it_after_its_grace(serving: Serving, work: Work, caplog: pytest.LogCaptureFixture) -> None:
    with connect(serving.path) as peer:
        peer.sendall(request("work"))
        assert work.begun.wait(BOUND_S)
        serving.run(serving.server.close())
        assert work.cancelled.is_set()
        assert receive_all(peer) == b""
    assert quiet(caplog)


def test_close_lets_it_answer_within_its_grace(serve: Serve, work: Work) -> None:
    serving = serve({"work": work}, ends_with_peer=frozenset({"work"}), close_grace_s=BOUND_S)
    with connect(serving.path) as peer:
        peer.sendall(request("work", n=1))
        assert work.begun.wait(BOUND_S)
        closing = asyncio.run_coroutine_threadsafe(serving.server.close(), serving.loop)
        eventually(lambda: serving.server._closing)
        open_gate(serving, work)
        assert receive_reply(peer).result == {"n": 1}
        closing.result(BOUND_S)
