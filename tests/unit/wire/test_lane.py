"""A connection on which more follows the request: who reads it, in what order, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftd.clock import Deadline
from ftd.errors import AccessError, FrameError, NoAnswerError, PublishDamagedError, PublishRefusedError
from ftd.wire import frame
from ftd.wire.client import call
from ftd.wire.lane import FREE, LaneIn, LaneOut
from ftd.wire.peer import Peer
from ftd.wire.publish import MAX_PARTS, PUBLISH_LANE, Part, Put
from ftd.wire.server import Take

from .conftest import BOUND_S, Serving, as_nobody, needs_root
from .test_server import ask, echo, eventually

Serve = Callable[..., Serving]
TOKEN = b"t" * 16


def put(number: int) -> tuple[Part, ...]:
    return (Part(number, 0, 1, b"d" * 16),)


def soon() -> Deadline:
    return Deadline.after(BOUND_S)


class Daemon:
    """Its lanes copy nothing."""

    def __init__(self, serve: Serve, slots: int = 2, **options: Any) -> None:
        self.slots, self.seen = slots, list[int]()
        self.asked: list[dict[str, Any]] = []
        self.gate, self.over = threading.Event(), threading.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self.serving = serve({"echo": echo}, streams={PUBLISH_LANE: self.on_lane}, **options)

    async def on_lane(self, _: Peer, args: dict[str, Any], take: Take) -> dict[str, Any]:
        self.asked.append(args)
        sock = take()
        await asyncio.to_thread(self._run, sock)
        return {}

    def _check(self) -> None:
        if self.over.is_set():
            raise PublishRefusedError("given up")

    def _run(self, sock: socket.socket) -> None:
        with LaneIn(sock, self._check) as lane:
            for each in lane.puts(self.slots):
                assert self.gate.wait(BOUND_S)
                self.seen.append(each.parts[0].tensor)
                if self.fails:
                    raise self.fails

    def lane(self, number: int = 0) -> LaneOut:
        return LaneOut(self.serving.path, TOKEN, number, soon())


@pytest.fixture
def daemon(serve: Serve) -> Daemon:
    return Daemon(serve)


def slots(lane: LaneOut) -> Iterator[None]:
    while lane.answered(BOUND_S) and lane.freed():
        yield


def test_puts_come_in_their_order_and_the_reply_behind_the_last(daemon: Daemon) -> None:
    with daemon.lane(3) as lane:
        free = slots(lane)
        for number in range(100):
            next(free)
            lane.put(put(number), soon())
        lane.put((), soon())
        assert len(list(free)) == daemon.slots
        assert lane.reply(soon()) == {}
    assert daemon.seen == list(range(100))
    assert daemon.asked == [{"token": TOKEN, "lane": 3}]
    eventually(lambda: not daemon.serving.server._connections)


def test_a_slot_is_free_only_once_it_was_copied(daemon: Daemon) -> None:
    daemon.gate.clear()
    with daemon.lane() as lane:
        for number in range(2):
            assert lane.answered(BOUND_S) and lane.freed()
            lane.put(put(number), soon())
        assert not lane.answered(0.05)
        daemon.gate.set()
        assert lane.answered(BOUND_S) and lane.freed()


def test_the_loop_answers_others_meanwhile(daemon: Daemon) -> None:
    daemon.gate.clear()
    with daemon.lane() as lane:
        assert lane.answered(BOUND_S) and lane.freed()
        lane.put(put(0), soon())
        assert ask(daemon.serving.path, n=1) == {"n": 1}
        daemon.gate.set()


def test_the_largest_put_arrives(daemon: Daemon) -> None:
    """It is longer than what a socket holds."""
    parts = tuple(Part(number, 1 << 61, 1 << 61, b"d" * 16) for number in range(MAX_PARTS))
    with daemon.lane() as lane:
        for _ in range(2):
            assert lane.answered(BOUND_S) and lane.freed()
            lane.put(parts, soon())
        lane.put((), soon())
        for _ in slots(lane):
            pass
        assert lane.reply(soon()) == {}
    assert daemon.seen == [0, 0]


@pytest.mark.parametrize("ahead", [0, 1, 40])  # a socket takes about 90 of such frames, then a put waits
def test_an_error_arrives_whatever_was_said_behind_it(daemon: Daemon, ahead: int) -> None:
    daemon.fails = PublishDamagedError("torn")
    daemon.gate.clear()
    with daemon.lane() as lane:
        assert lane.answered(BOUND_S) and lane.freed()
        lane.put(put(0), soon())
        for _ in range(ahead):
            lane.put(put(1), soon())
        daemon.gate.set()
        for _ in slots(lane):
            pass
        lane.put(put(2), soon())  # to nobody
        with pytest.raises(PublishDamagedError, match="torn"):
            lane.reply(soon())


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", frame.encode({"parts": 7}), frame.encode({})])
def test_what_is_no_put_is_refused(daemon: Daemon, said: bytes) -> None:
    with daemon.lane() as lane:
        assert lane.answered(BOUND_S) and lane.freed()
        lane._sock.sendall(said)
        for _ in slots(lane):
            pass
        with pytest.raises(FrameError):
            lane.reply(soon())


def test_a_publisher_that_goes_ends_its_lane_and_no_other(daemon: Daemon) -> None:
    with daemon.lane() as stays:
        with daemon.lane() as goes:
            assert goes.answered(BOUND_S)
            goes._sock.sendall(b"\0\0")  # half of a header
        eventually(lambda: len(daemon.serving.server._connections) == 1)
        stays.put((), soon())
        for _ in slots(stays):
            pass
        assert stays.reply(soon()) == {}


def test_a_lane_that_is_to_end_ends_whatever_its_publisher_does(daemon: Daemon) -> None:
    with daemon.lane() as lane:
        for _ in range(2):
            assert lane.answered(BOUND_S) and lane.freed()
        daemon.over.set()
        assert lane.answered(BOUND_S) and not lane.freed()
        with pytest.raises(PublishRefusedError, match="given up"):
            lane.reply(soon())


def test_one_that_reads_nothing_is_waited_for_and_can_be_ended(serve: Serve) -> None:
    daemon = Daemon(serve, slots=1 << 20)  # more bytes than a socket holds
    with daemon.lane() as lane:
        assert lane.answered(BOUND_S)
        assert ask(daemon.serving.path, n=1) == {"n": 1}
        daemon.over.set()
        for _ in slots(lane):
            pass
        with pytest.raises(PublishRefusedError, match="given up"):
            lane.reply(soon())


def test_a_daemon_that_closes_is_no_answer(serve: Serve) -> None:
    daemon = Daemon(serve, close_grace_s=0.05)
    with daemon.lane() as lane:
        for _ in range(2):
            assert lane.answered(BOUND_S) and lane.freed()
        daemon.serving.run(daemon.serving.server.close())
        daemon.over.set()
        assert lane.answered(BOUND_S) and not lane.freed()
        with pytest.raises(NoAnswerError, match="closed the connection"):
            lane.reply(soon())


@needs_root
def test_it_may_be_for_the_owner_alone(serve: Serve, open_path: Any) -> None:
    daemon = Daemon(serve, path=open_path, mode=0o666, owner_only=frozenset({PUBLISH_LANE}))
    with as_nobody(), pytest.raises(AccessError, match=f"{PUBLISH_LANE} is refused"):
        call(daemon.serving.path, PUBLISH_LANE, {}, soon())
    assert daemon.asked == []


def test_what_is_said_is_one_byte_for_a_slot() -> None:
    ours, theirs = socket.socketpair()
    with ours, LaneIn(theirs, lambda: None) as lane:
        ours.sendall(frame.encode(Put(put(5)).to_map()) + frame.encode(Put(()).to_map()))
        assert [each.parts for each in lane.puts(3)] == [put(5)]
        assert ours.recv(100) == FREE * 4 == b"\1\1\1\1"
        assert not os.get_blocking(theirs.fileno())
