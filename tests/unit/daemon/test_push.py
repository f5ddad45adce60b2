"""The daemon's end of a push: what it refuses, and what ends with the follower."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftd.clock import Deadline
from ftd.cuda import pump
from ftd.cuda.pin import Region
from ftd.cuda.runtime import CudaError, CudaRuntime
from ftd.daemon.gpus import Gpus
from ftd.daemon.push import ENDS_WITH_PEER, Pusher
from ftd.errors import ControlError, PushRefusedError
from ftd.wire.client import call
from ftd.wire.push import PUSH, PushPiece, PushRequest, PushTarget, bytes_pushed
from ftd.wire.server import ControlServer
from tests.fake_cuda import Allocation, FakeCuda
from tests.unit.wire.conftest import BOUND_S, Serving

SLICE = 64
GENERATION = 3
INODES = (101, 102)
DATA = [random.Random(number).randbytes(20 * SLICE + number) for number in range(2)]


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def sources() -> Iterator[list[Region]]:
    keep = [ctypes.create_string_buffer(data, len(data)) for data in DATA]
    yield [Region(ctypes.addressof(each), len(data)) for each, data in zip(keep, DATA, strict=True)]
    del keep


class Daemon:
    """A `Pusher` behind a control socket, on a loop of its own."""

    def __init__(self, serving: Serving, pusher: Pusher) -> None:
        self.serving, self.pusher = serving, pusher

    def ask(self, request: PushRequest | dict[str, Any], within_s: float = BOUND_S) -> int:
        args = request.to_args() if isinstance(request, PushRequest) else request
        return bytes_pushed(call(self.serving.path, PUSH, args, Deadline.after(within_s)))

    def close(self) -> None:
        self.serving.run(self.pusher.close())


@pytest.fixture
def start(
    cuda: FakeCuda, sources: list[Region], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Daemon]]:
    monkeypatch.setattr(pump, "SLICE_BYTES", SLICE)
    with contextlib.ExitStack() as stack:

        def begin(
            *,
            allowed: bool = True,
            serves: bool = True,
            runtime: Callable[[], tuple[CudaRuntime | None, str]] = cuda.load,
        ) -> Daemon:
            gpus = Gpus()
            stack.callback(gpus.close)
            pusher = Pusher(gpus, allowed=allowed, runtime=runtime)
            if serves:
                pusher.serve(GENERATION, INODES, sources)
            server = ControlServer(
                tmp_path / "s", pusher.handlers(), mode=0o600, ends_with_peer=ENDS_WITH_PEER, close_grace_s=0.2
            )
            daemon = Daemon(Serving(server), pusher)
            stack.callback(daemon.serving.close)
            stack.callback(daemon.close)
            return daemon

        yield begin
    assert not cuda.opened
    assert cuda.is_idle
    assert (cuda.streams, cuda.events) == (set(), set())


def request(cuda: FakeCuda, memory: Allocation, segment: int = 1, *, gpu: int = 0) -> PushRequest:
    piece = PushPiece(0, segment, 0, memory.nbytes)
    return PushRequest(GENERATION, INODES, cuda.uuids[gpu], (PushTarget(cuda.handle(memory), (piece,)),))


def test_a_push_brings_the_bytes_and_status_says_so(cuda: FakeCuda, start: Callable[..., Daemon]) -> None:
    daemon = start()
    assert daemon.pusher.describe() == []
    for turn in (1, 2):
        memory = cuda.allocate(5 * SLICE, ordinal=1)
        assert daemon.ask(request(cuda, memory, gpu=1)) == 5 * SLICE
        assert memory.read() == DATA[1][: 5 * SLICE]
        assert not cuda.opened, "the follower may free it now"
        name = "GPU-02020202-0202-0202-0202-020202020202"
        assert daemon.pusher.describe() == [{"gpu": name, "pushed_bytes": turn * 5 * SLICE, "clients": 0}]
    assert cuda.contexts == {1}, "no context on a GPU that nobody asked for"


def test_gpus_are_found_by_uuid_whatever_their_order_here(cuda: FakeCuda, start: Callable[..., Daemon]) -> None:
    daemon = start()
    cuda.uuids.reverse()
    assert daemon.ask(request(cuda, cuda.allocate(SLICE, ordinal=1), gpu=1)) == SLICE
    assert cuda.contexts == {1}


def test_what_is_not_served_is_refused_in_words_and_touches_no_gpu(
    cuda: FakeCuda, start: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    good = request(cuda, cuda.allocate(SLICE))
    cases: list[tuple[dict[str, Any], PushRequest | dict[str, Any], str]] = [
        ({"serves": False}, good, "pushes nothing: its pages are not registered with CUDA"),
        ({"allowed": False}, good, "pushes nothing: its configuration says push: never"),
        ({"allowed": False, "serves": False}, good, "its configuration says push: never"),
        ({}, replace(good, generation=2), "generation 2 of these segments is not served: generation 3 is"),
        ({}, replace(good, inodes=(101, 103)), "generation 3 of these segments is not served"),
        ({}, replace(good, inodes=()), "is not served"),
        (
            {},
            replace(good, gpu=b"?" * 16),
            "GPU-3f3f3f3f-.* is not visible to this daemon: expected one of GPU-01010101-",
        ),
        ({"runtime": lambda: (None, "no GPU is visible")}, good, "pushes nothing: no GPU is visible"),
        ({}, {"generation": 3}, "without generation, inodes, gpu or targets"),
        ({}, replace(good, targets=(PushTarget(b"h" * 64, (PushPiece(0, 1, 20 * SLICE, 2),)),)), "one of 2 segments"),
    ]
    for options, asked, message in cases:
        daemon = start(**options)
        with pytest.raises(PushRefusedError, match=message):
            daemon.ask(asked)
        assert daemon.pusher.describe() == []
        daemon.close()
        daemon.serving.run(daemon.serving.server.close())
    assert cuda.contexts == set()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_uuids_that_cannot_be_asked_for_are_no_gpus(cuda: FakeCuda, start: Callable[..., Daemon]) -> None:
    cuda.refuse = {"device_uuid"}
    with pytest.raises(PushRefusedError, match="is not visible"):
        start().ask(request(cuda, cuda.allocate(SLICE)))


def test_what_cuda_refuses_crosses_and_is_logged(
    cuda: FakeCuda, start: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = start()
    cuda.refuse = {"use_device"}
    with pytest.raises(CudaError, match="use_device: refused"):
        daemon.ask(request(cuda, cuda.allocate(SLICE)))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"a push to pid {os.getpid()} on GPU-01010101-0101-0101-0101-010101010101 failed: use_device: refused (error 2)"
    ]
    cuda.refuse = set()
    assert daemon.ask(request(cuda, cuda.allocate(SLICE))) == SLICE


class Held:
    """Holds up the pump before the n-th copy is waited for."""

    def __init__(self, cuda: FakeCuda, name: str = "event_synchronize", nth: int = 1) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        self._what = name, nth
        cuda.before = self._before

    def _before(self, name: str, count: int) -> None:
        if (name, count) == self._what:
            self.reached.set()
            assert self._go.wait(BOUND_S)

    def wait(self) -> None:
        assert self.reached.wait(BOUND_S)

    def open(self) -> None:
        self._go.set()


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(BOUND_S)
    while not condition():
        assert not deadline.expired(), what
        deadline.pause(0.005)


def test_a_follower_that_goes_takes_its_push_along(
    cuda: FakeCuda, start: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon, memory = start(), cuda.allocate(20 * SLICE)
    held = Held(cuda)
    with caplog.at_level(logging.INFO), pytest.raises(ControlError):
        daemon.ask(request(cuda, memory), within_s=0.1)  # closes its end then
    held.wait()
    assert daemon.pusher.describe()[0]["clients"] == 1
    assert sum(cuda.opened.values()) == 1
    (push,) = daemon.pusher._pumps[cuda.uuids[0]]._pushes
    eventually("the push to be given up", lambda: push._error is not None)
    assert daemon.serving.server._connections, "it counts until its memory is let go of"
    held.open()
    eventually("the memory to be let go of", lambda: not cuda.opened)
    assert len(cuda.named("memcpy")) == pump.DEPTH
    eventually("the connection to end", lambda: not daemon.serving.server._connections)
    assert memory.read(10 * SLICE) == bytes(10 * SLICE)
    with caplog.at_level(logging.INFO):
        assert daemon.ask(request(cuda, cuda.allocate(SLICE))) == SLICE
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_daemon_that_stops_answers_that_it_does_and_copies_no_more(
    cuda: FakeCuda, start: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon, memory = start(), cuda.allocate(20 * SLICE)
    held, answers = Held(cuda), list[BaseException]()

    def ask() -> None:
        try:
            daemon.ask(request(cuda, memory))
        except BaseException as error:
            answers.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    held.wait()
    closing = asyncio.run_coroutine_threadsafe(daemon.pusher.close(), daemon.serving.loop)
    (push,) = daemon.pusher._pumps[cuda.uuids[0]]._pushes
    eventually("close to cancel it", lambda: push._error is not None)
    with pytest.raises(PushRefusedError, match="pushes nothing: it is stopping"):
        daemon.ask(request(cuda, memory))
    assert not closing.done(), "a copy is under way"
    held.open()
    closing.result(BOUND_S)
    assert cuda.is_idle
    asking.join(BOUND_S)
    assert [type(error) for error in answers] == [PushRefusedError]
    assert "stopped pushing" in str(answers[0])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "an ordinary stop"


def test_pushes_of_several_followers_run_side_by_side(cuda: FakeCuda, start: Callable[..., Daemon]) -> None:
    daemon = start()
    memories = [cuda.allocate(20 * SLICE, ordinal=number % 2) for number in range(6)]
    got: list[int] = []
    threads = [
        threading.Thread(
            target=lambda memory=memory, gpu=number % 2: got.append(daemon.ask(request(cuda, memory, gpu=gpu)))
        )  # type: ignore[misc]
        for number, memory in enumerate(memories)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert got == [20 * SLICE] * 6
    assert all(memory.read() == DATA[1][: 20 * SLICE] for memory in memories)
    assert sum(row["pushed_bytes"] for row in daemon.pusher.describe()) == 120 * SLICE
