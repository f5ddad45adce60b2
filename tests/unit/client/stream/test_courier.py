"""What stays on a GPU: pushed by the daemon's own end, else pulled; and what becomes of memory that was given up."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftd.cuda import pump
from ftd_client.load import push as push_module
from ftd_client.load.push import Pushing
from ftd_client.stream import courier as module
from ftd_client.stream import memory as memory_module
from ftd_client.stream import shared
from ftd_client.stream.courier import Courier, Delivery, Load
from ftd_client.stream.link import Copy
from ftd_client.stream.memory import Memory
from ftd_client.stream.shared import SharedHost, shared_host
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import FakeDaemon, bounded, daemon_of, shared_weights
from tests.unit.client.stream.fakes import Threads
from tests.unit.wire.conftest import BOUND_S

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
#: In the segments: two neighbours with padding between them, one further on, and one of another segment.
TENSORS = {
    "one": ("U8", (5000,), 0, 0),
    "two": ("U8", (3000,), 0, 5120),
    "far": ("U8", (512,), 0, 81_920),
    "other": ("U8", (7000,), 1, 512),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "SLICE_BYTES", 4096)
    monkeypatch.setattr(push_module, "_PING_S", 0.3)
    monkeypatch.setattr(push_module, "_DEATH_S", 0.3)
    monkeypatch.setattr(push_module, "_START_S", 0.5)
    monkeypatch.setattr(memory_module, "_given_up", [])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    Threads(fake, monkeypatch)
    monkeypatch.setattr(shared, "load_runtime", fake.load)
    return fake


@pytest.fixture
def weights(namespace: str) -> SharedWeights:
    return shared_weights(namespace, TENSORS)


@pytest.fixture
def daemon(namespace: str, weights: SharedWeights, cuda: FakeCuda, runtime_dir: Path) -> Iterator[FakeDaemon]:
    with daemon_of(namespace, weights, cuda, runtime_dir) as made:
        yield made
    assert not cuda.opened


class Case:
    """A courier, and memory for what it brings."""

    def __init__(self, weights: SharedWeights, cuda: FakeCuda, *, pulls: bool = True) -> None:
        self.host: SharedHost = shared_host(weights, list(TENSORS), pin=True, device=GPU)
        self.courier = Courier(weights, self.host, cuda, 0, pulls=pulls)
        self.memory, self.cuda = self.fresh(cuda), cuda
        self.expected = {name: _raw(weights.view(name)) for name in TENSORS}

    @staticmethod
    def fresh(cuda: FakeCuda) -> Memory:
        made = Memory(20_480, CPU)
        cuda.adopt(made.address, made.nbytes)
        return made

    def places(self) -> dict[str, int]:
        """Aligned, in the order of their names."""
        return {"one": 0, "two": 5120, "far": 8192, "other": 8704}

    def copies(self, memory: Memory | None = None) -> list[Copy]:
        start = (memory or self.memory).address
        return [Copy(start + at, self.host.addresses[name], len(self.expected[name]))
                for name, at in self.places().items()]  # fmt: skip

    def bring(self) -> Delivery:
        delivery: Delivery = bounded(lambda: self.courier.bring([(self.memory, self.copies())]))
        return delivery

    def wrong(self, memory: Memory) -> list[str]:
        return [
            name
            for name, at in self.places().items()
            if ctypes.string_at(memory.address + at, len(self.expected[name])) != self.expected[name]
        ]


def _raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@pytest.fixture
def made(weights: SharedWeights, cuda: FakeCuda) -> Iterator[Callable[..., Case]]:
    cases: list[Case] = []

    def make(**more: Any) -> Case:
        cases.append(Case(weights, cuda, **more))
        return cases[-1]

    yield make
    for case in cases:
        case.host.close()
    assert not cuda.registered


def _silence(daemon: FakeDaemon) -> None:
    """It takes pushes and says nothing of them."""

    async def silent(peer: Any, args: dict[str, Any]) -> Any:
        await asyncio.sleep(BOUND_S)

    daemon.answer = silent


def test_the_daemon_brings_it_and_nothing_is_registered_for_it(daemon: FakeDaemon, made: Callable[..., Case]) -> None:
    case = made()
    registered = dict(case.cuda.registered)
    (memory,), left, way = case.bring()
    assert (memory is case.memory, left, way, case.courier.why) == (True, [], "push", "")
    assert case.wrong(memory) == []
    assert case.cuda.registered == registered
    assert len(case.cuda.named("register")) == len(registered)
    case.bring()
    assert daemon.pushes == 2, "a replan brings it anew"


def test_neighbours_are_one_piece(daemon: FakeDaemon, made: Callable[..., Case]) -> None:
    case = made()
    seen: list[list[int]] = []
    real = daemon.pusher.handlers()["push"]

    async def answer(peer: Any, args: dict[str, Any]) -> Any:
        seen.extend(piece[1:] for _, pieces in args["targets"] for piece in pieces)
        return await real(peer, args)

    daemon.answer = answer
    case.bring()
    assert seen == [[0, 0, 5120 + 3000], [0, 81_920, 512], [1, 512, 7000]]
    assert case.wrong(case.memory) == []


def _apart(case: Case) -> list[Load]:
    """Every other weight into memory of its own."""
    memories = [case.memory, Case.fresh(case.cuda)]
    return [(memory, case.copies(memory)[number::2]) for number, memory in enumerate(memories)]


def _wrong(case: Case, memories: list[Memory]) -> list[list[str]]:
    return [[name for name in case.wrong(memory) if name in list(TENSORS)[number::2]]
            for number, memory in enumerate(memories)]  # fmt: skip


@pytest.mark.parametrize("served", [True, False])
def test_several_memories_are_one_push_or_one_pull(request: pytest.FixtureRequest, made: Any, served: bool) -> None:
    daemon = request.getfixturevalue("daemon") if served else None
    case = made()
    loads = _apart(case)
    memories, left, way = bounded(lambda: case.courier.bring(loads))
    assert (memories, left, way) == ([memory for memory, _ in loads], [], "push" if served else "pull")
    assert _wrong(case, memories) == [[], []]
    assert daemon is None or daemon.pushes == 1


def test_of_several_that_a_silent_daemon_may_write_to_none_is_used_again(
    daemon: FakeDaemon, weights: SharedWeights, made: Callable[..., Case]
) -> None:
    _silence(daemon)
    weights.view("far").data.add_(1)
    case = made()
    loads = _apart(case)
    memories, left, way = bounded(lambda: case.courier.bring(loads))
    assert way == "pull" and left == [case.copies(memories[0])[2]]
    assert _wrong(case, memories) == [["far"], []]
    kept = {memory.untyped_storage()._cdata for memory in memory_module._given_up}
    assert kept == {memory.storage for memory, _ in loads}


def test_what_this_process_changed_is_left(
    daemon: FakeDaemon, weights: SharedWeights, made: Callable[..., Case]
) -> None:
    weights.view("far").data.add_(1)
    case = made()
    _, left, way = case.bring()
    assert (left, way) == ([case.copies()[2]], "push")
    assert case.wrong(case.memory) == ["far"]
    assert case.host.locate(left[0].src) is None


def test_where_all_was_changed_nobody_is_asked(
    daemon: FakeDaemon, weights: SharedWeights, made: Callable[..., Case]
) -> None:
    for name in TENSORS:
        weights.view(name).data.add_(1)
    case = made()
    (memory,), left, way = case.bring()
    assert (memory is case.memory, left, way) == (True, case.copies(), "")
    assert daemon.pings == 0


def test_without_a_daemon_it_is_pulled(made: Callable[..., Case]) -> None:
    case = made()
    (memory,), left, way = case.bring()
    assert (memory is case.memory, left, way) == (True, [], "pull")
    assert "no daemon serves" in case.courier.why
    assert case.wrong(memory) == []


def test_one_that_does_not_push_is_asked_once(daemon: FakeDaemon, made: Callable[..., Case]) -> None:
    async def refuse(peer: Any, args: dict[str, Any]) -> Any:
        raise OSError("no")

    daemon.answer = refuse
    case = made()
    for _ in range(3):
        assert case.bring().way == "pull"
        assert case.wrong(case.memory) == []
    assert (daemon.pings, daemon.pushes) == (1, 1)


def test_one_that_hangs_is_asked_once(daemon: FakeDaemon, made: Callable[..., Case]) -> None:
    daemon.hangs = True
    case = made()
    for _ in range(2):
        assert case.bring().way == "pull"
    assert (daemon.pings, daemon.pushes) == (1, 0)
    daemon.hangs = False


def test_where_no_slots_may_be_locked_the_link_has_to(made: Callable[..., Case]) -> None:
    case = made(pulls=False)
    (memory,), left, way = case.bring()
    assert (memory is case.memory, way) == (True, "")
    assert sum(copy.nbytes for copy in left) >= sum(map(len, case.expected.values()))
    for copy in left:
        ctypes.memmove(copy.dst, copy.src, copy.nbytes)
    assert case.wrong(memory) == []


def test_memory_that_a_silent_daemon_may_write_to_is_never_used_again(
    daemon: FakeDaemon, weights: SharedWeights, made: Callable[..., Case]
) -> None:
    _silence(daemon)
    weights.view("far").data.add_(1)
    case = made()
    (memory,), left, way = case.bring()
    assert memory.address != case.memory.address
    assert way == "pull"
    assert "and it lives" in case.courier.why
    assert left == [case.copies(memory)[2]]
    assert case.wrong(memory) == ["far"]
    (kept,) = memory_module._given_up
    assert case.memory.address <= kept.data_ptr() + 512
    assert kept.untyped_storage()._cdata == case.memory.storage


def test_other_memory_is_what_torch_made_of_it_before_anything_is_copied_there(
    daemon: FakeDaemon, made: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `torch.use_deterministic_algorithms` it is filled, on the current stream."""

    async def silent(peer: Any, args: dict[str, Any]) -> Any:
        await asyncio.sleep(BOUND_S)

    def fresh(nbytes: int, device: torch.device) -> Memory:
        told.append("made")
        return case.fresh(case.cuda)

    daemon.answer = silent
    case = made()
    case.memory.device = GPU
    told: list[str] = []
    monkeypatch.setattr(module, "Memory", fresh)
    stream = SimpleNamespace(synchronize=lambda: told.append("done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(module, "pull", lambda *_: told.append("pulled"))
    assert case.bring().way == "pull"
    assert told == ["done", "made", "done", "pulled"]


def test_a_push_ends_before_an_interrupt_does(
    daemon: FakeDaemon, made: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is freed by whoever caught it, and the daemon is still writing to it."""
    case = made()
    ended: list[bool] = []
    real = Pushing.run

    def run(self: Any) -> None:
        real(self)
        ended.append(True)

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            super().submit(*arguments, **more)
            raise KeyboardInterrupt

    monkeypatch.setattr(Pushing, "run", run)
    monkeypatch.setattr(module, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.bring()
    assert ended == [True]
    assert not case.cuda.opened


def test_memory_that_an_interrupted_push_may_still_write_to_is_not_freed(
    daemon: FakeDaemon, made: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that hangs is when somebody interrupts."""

    async def silent(peer: Any, args: dict[str, Any]) -> Any:
        await asyncio.sleep(BOUND_S)

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            super().submit(*arguments, **more)
            raise KeyboardInterrupt

    daemon.answer = silent
    monkeypatch.setattr(module, "ThreadPoolExecutor", Interrupted)
    case = made()
    with pytest.raises(KeyboardInterrupt):
        case.bring()
    (kept,) = memory_module._given_up
    assert kept.untyped_storage()._cdata == case.memory.storage
