"""Loading by push against the daemon's own end, and every way in which it can end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ftd.cuda import pump
from ftd.cuda.runtime import CudaError
from ftd.errors import AccessError, ControlError, PushRefusedError
from ftd.owner import Owner, start_ticks
from ftd.shm.layout import Extent
from ftd.wire import push as wire
from ftd.wire.peer import Peer
from ftd.wire.push import PushRequest
from ftd_client.creator import Creator
from ftd_client.load import push as module
from ftd_client.load import shipment as shipment_module
from ftd_client.load.pull import Pull
from ftd_client.load.shipment import Shipment, Trip
from ftd_client.views import SharedWeights
from tests.conftest import kill
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import (
    BOUND_S,
    GENERATION,
    FakeDaemon,
    FakeShipment,
    bounded,
    daemon_of,
    fake_device,
    shared_weights,
)

CPU = torch.device("cpu")
EXTENTS = [Extent(0, 0, 40_000), Extent(1, 512, 7000), Extent(0, 81_920, 512), Extent(0, 100_000, 33)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pump, "SLICE_BYTES", 4096)
    monkeypatch.setattr(module, "_PING_S", 0.3)
    monkeypatch.setattr(module, "_DEATH_S", 0.3)
    monkeypatch.setattr(module, "_START_S", 0.5)
    monkeypatch.setattr(shipment_module, "_given_up", [])
    yield
    assert not shipment_module._under_way


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def weights(namespace: str) -> SharedWeights:
    return shared_weights(namespace, {})


@pytest.fixture
def daemon(namespace: str, weights: SharedWeights, cuda: FakeCuda, runtime_dir: Path) -> Iterator[FakeDaemon]:
    with daemon_of(namespace, weights, cuda, runtime_dir) as made:
        yield made
    assert not cuda.opened


@pytest.fixture
def ship(weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shipment]:
    monkeypatch.setattr(torch.cuda, "device", fake_device(cuda))

    def make(extents: list[Extent] = EXTENTS, ordinal: int = 0) -> Shipment:
        pulls: list[Pull] = []

        def pull() -> Pull:
            pulls.append(Pull(cuda, ordinal, 2))
            return pulls[-1]

        with closing(module.Inquiry(weights.namespace)) as inquiry:
            shipment = FakeShipment(weights, extents, CPU, cuda, ordinal, inquiry, pull)
        for each in pulls:
            each.finish()
        return shipment

    return make


def carry(shipment: Shipment) -> Trip:
    return bounded(shipment.carry)


def check(shipment: Shipment, weights: SharedWeights, extents: list[Extent] = EXTENTS) -> None:
    """Every extent is there, bit for bit."""
    for number, extent in enumerate(extents):
        mapped = weights.private[extent.segment]
        raw = bytes(memoryview(mapped._mapping)[extent.offset : extent.offset + extent.nbytes])
        assert shipment.tensor(number, torch.uint8, (extent.nbytes,)).numpy().tobytes() == raw, extent


# --- as it should be -------------------------------------------------------------------------------------------------


def test_weights_come_by_push_into_memory_inside_of_a_larger_allocation(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, ship: Callable[..., Shipment]
) -> None:
    shipment = ship()
    assert carry(shipment) == Trip("push")
    check(shipment, weights)
    assert (daemon.pushes, shipment.nbytes) == (1, sum(extent.nbytes for extent in EXTENTS))
    assert not cuda.named("register"), "no page was locked for it"
    assert not cuda.opened


def test_the_callers_gpu_stays_as_it_was(daemon: FakeDaemon, cuda: FakeCuda, ship: Callable[..., Shipment]) -> None:
    """`cuda` without a number would mean another GPU after a load."""
    shipment = ship(ordinal=1)
    assert cuda.current == 0
    assert carry(shipment) == Trip("push")
    assert cuda.contexts == {1}


def test_more_pieces_than_a_request_holds_come_by_several(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_PIECES", 3)
    extents = [Extent(0, 8192 * number, 100 + number) for number in range(10)]
    shipment = ship(extents)
    assert carry(shipment) == Trip("push")
    assert daemon.pushes == 4
    check(shipment, weights, extents)


def test_nothing_needs_nothing(daemon: FakeDaemon, ship: Callable[..., Shipment]) -> None:
    shipment = ship([])
    assert carry(shipment) == Trip("push")
    assert (shipment.nbytes, daemon.pushes) == (0, 0)


def test_tensors_have_storages_and_version_counters_of_their_own_and_keep_the_memory(
    ship: Callable[..., Shipment], daemon: FakeDaemon, weights: SharedWeights
) -> None:
    """A write to one parameter must not look like a write to all of its arena."""
    shipment = ship()
    carry(shipment)
    tensors = [shipment.tensor(n, torch.int16, (EXTENTS[n].nbytes // 2,)) for n in (0, 1)]
    one, other = (torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors)
    assert (one.untyped_storage().nbytes(), other.untyped_storage().nbytes()) == (40_000, 7000)
    del tensors
    one.add_(1)
    assert one._version != other._version
    expected = bytes(memoryview(weights.private[1]._mapping)[512 : 512 + 7000])
    del shipment
    gc.collect()
    again = [torch.empty(50_000, dtype=torch.uint8).fill_(1) for _ in range(20)]
    assert other.numpy().tobytes() == expected
    assert all(each[0] == 1 for each in again)


# --- nothing of ours is with the daemon: the same memory is pulled into ----------------------------------------------


def pulled(shipment: Shipment, weights: SharedWeights, words: str) -> None:
    before = [memory.data_ptr() for memory in shipment._memory]
    trip = carry(shipment)
    assert (trip.way, trip.elsewhere) == ("pull", False)
    assert words in trip.why
    assert [memory.data_ptr() for memory in shipment._memory] == before
    assert shipment_module._given_up == []
    check(shipment, weights)


def test_without_a_daemon_it_is_pulled(weights: SharedWeights, ship: Callable[..., Shipment]) -> None:
    pulled(ship(), weights, "no daemon serves")


def test_a_daemon_of_another_run_with_the_same_number_pushes_nothing(
    namespace: str, weights: SharedWeights, cuda: FakeCuda, runtime_dir: Path, ship: Callable[..., Shipment]
) -> None:
    """After an orderly stop generations count from 1 again: its weights are others."""
    others = shared_weights(namespace, {}, seed=99)
    assert others.generation == weights.generation
    with daemon_of(namespace, others, cuda, runtime_dir) as daemon:
        pulled(ship(), weights, f"generation {GENERATION} of these segments is not served")
        assert daemon.pushes == 1


def test_a_daemon_that_says_nothing_is_not_given_the_memory(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment]
) -> None:
    daemon.hangs = True
    pulled(ship(), weights, "did not answer status")
    assert daemon.pushes == 0


@pytest.mark.parametrize("name", ["ipc_export", "allocation_of", "device_uuid"])
def test_memory_that_cannot_be_exported_is_pulled_into(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, ship: Callable[..., Shipment], name: str
) -> None:
    cuda.refuse = {name}
    shipment = ship()
    cuda.refuse = set()
    pulled(shipment, weights, f"{name}: refused")
    assert daemon.pushes == 0


def test_memory_that_cannot_be_exported_says_what_to_leave_out(
    daemon: FakeDaemon, cuda: FakeCuda, weights: SharedWeights
) -> None:
    cuda.refuse = {"ipc_export"}
    cuda.adopt(4096, 4096)
    landing = module.Landing(4096, [module.Run(0, 0, 0, 1)])
    with pytest.raises(PushRefusedError, match="cannot be exported") as caught:
        module.Pushing(GENERATION, weights.inodes, cuda, 0, [landing])
    assert "expandable_segments" in caught.value.remedy


@pytest.mark.parametrize("name", ["use_device", "stream_create", "ipc_open", "memcpy", "record", "event_synchronize"])
@pytest.mark.parametrize("nth", [1, 3])
def test_what_cuda_refuses_the_daemon_is_pulled(
    daemon: FakeDaemon, weights: SharedWeights, cuda: FakeCuda, ship: Callable[..., Shipment], name: str, nth: int
) -> None:
    """Half of it may be there already."""
    calls: list[str] = []

    def fail(called: str, count: int) -> None:
        if called == name and threading.current_thread().name.startswith("ftd-push"):
            calls.append(called)
            if len(calls) == nth:
                raise CudaError(f"{name}: not here")

    cuda.before = fail
    shipment = ship()
    trip = carry(shipment)
    assert trip.way == ("pull" if "not here" in trip.why else "push")
    if nth == 1 and name != "use_device":
        assert trip.way == "pull"
    check(shipment, weights)
    assert not cuda.opened


@pytest.mark.parametrize("error", [AccessError("no"), ControlError("no"), ValueError("a bug"), PushRefusedError("no")])
def test_whatever_the_daemon_answers_is_pulled(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment], error: Exception
) -> None:
    async def refuse(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        raise error

    daemon.answer = refuse
    pulled(ship(), weights, str(error.args[0]))


def test_a_daemon_that_has_too_many_connections_has_nothing_of_ours(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence would cost the memory."""
    real = module.Inquiry.creator

    def answered(self: module.Inquiry) -> Creator | str:
        found = real(self)
        daemon.serving.server._max_connections = 0
        return found

    monkeypatch.setattr(module.Inquiry, "creator", answered)
    monkeypatch.setattr(module.Inquiry, "line", lambda _: None)
    pulled(ship(), weights, "connections to the daemon are open")
    assert daemon.pushes == 0


def test_fewer_bytes_than_were_asked_for_are_not_enough(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment]
) -> None:
    async def less(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": PushRequest.from_args(args).nbytes - 1}

    daemon.answer = less
    pulled(ship(), weights, "bytes were pushed: expected")


# --- silence in the middle -------------------------------------------------------------------------------------------


class Silence:
    """Takes a push, writes to the memory late, and never answers."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.asked = threading.Event()
        daemon.answer = self._take

    async def _take(self, peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        self.asked.set()
        await asyncio.sleep(BOUND_S)
        return {}


def test_memory_that_a_living_daemon_may_still_write_to_is_kept_for_ever(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment], caplog: pytest.LogCaptureFixture
) -> None:
    Silence(daemon)
    shipment = ship()
    kept = list(shipment._memory)
    first = shipment.tensor(0, torch.uint8, (EXTENTS[0].nbytes,))
    trip = carry(shipment)
    assert (trip.way, trip.elsewhere) == ("pull", True)
    assert "did not answer push" in trip.why
    assert "and it lives" in trip.why
    assert [id(memory) for memory in shipment_module._given_up] == [id(memory) for memory in kept]
    for memory in kept:
        memory.fill_(0xAA)  # what is written there late
    check(shipment, weights)
    assert (first == 0xAA).all()
    assert "stay taken until this process ends" in caplog.text


def test_memory_stays_until_somebody_saw_the_end_of_its_push(daemon: FakeDaemon, ship: Callable[..., Shipment]) -> None:
    """An interrupt may come before anybody waits."""
    silence = Silence(daemon)
    memory = weakref.ref(ship()._memory[0])
    assert silence.asked.wait(BOUND_S), "it is on its way before anybody carries it"
    gc.collect()
    assert memory() is not None
    daemon.answer = None
    shipment = ship()
    assert carry(shipment) == Trip("push")
    (lost,) = shipment_module._under_way
    assert shipment is not lost
    shipment_module._under_way.clear()


@pytest.mark.parametrize("result", [{}, {"bytes": "many"}])
def test_an_answer_that_cannot_be_read_is_silence(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment], result: dict[str, Any]
) -> None:
    async def garbled(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        return result

    daemon.answer = garbled
    shipment = ship()
    trip = carry(shipment)
    assert (trip.way, trip.elsewhere) == ("pull", True)
    check(shipment, weights)


@pytest.fixture
def mortal(standing: Callable[..., int]) -> Owner:
    """A process that lives until it is killed."""
    pid = standing(lambda: None)
    return replace(Owner.current(), pid=pid, start_ticks=start_ticks(pid) or 0)


def test_once_the_daemon_is_dead_the_same_memory_is_pulled_into(
    namespace: str,
    weights: SharedWeights,
    cuda: FakeCuda,
    runtime_dir: Path,
    ship: Callable[..., Shipment],
    mortal: Owner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However late it dies within the bound, and not before all of it is gone."""
    monkeypatch.setattr(module, "_DEATH_S", BOUND_S)
    with daemon_of(namespace, weights, cuda, runtime_dir, mortal) as daemon:
        silence = Silence(daemon)
        shipment = ship()
        before = [memory.data_ptr() for memory in shipment._memory]
        trips: list[Trip] = []
        thread = threading.Thread(target=lambda: trips.append(shipment.carry()), daemon=True)
        thread.start()
        assert silence.asked.wait(BOUND_S)
        thread.join(1.0)
        assert thread.is_alive(), "silent, and it lives"
        assert not cuda.named("memcpy")
        kill(mortal.pid)
        thread.join(BOUND_S)
        assert [(trip.way, trip.elsewhere) for trip in trips] == [("pull", False)]
        assert [memory.data_ptr() for memory in shipment._memory] == before
        assert shipment_module._given_up == []
        check(shipment, weights)


def test_a_daemon_whose_life_cannot_be_told_from_here_counts_as_alive(
    namespace: str, weights: SharedWeights, cuda: FakeCuda, runtime_dir: Path, ship: Callable[..., Shipment]
) -> None:
    """As in another container."""
    elsewhere = replace(Owner.current(), pid_namespace=1)
    with daemon_of(namespace, weights, cuda, runtime_dir, elsewhere) as daemon:
        Silence(daemon)
        shipment = ship()
        assert carry(shipment).elsewhere
        check(shipment, weights)


def test_a_connection_that_breaks_is_silence(
    daemon: FakeDaemon, weights: SharedWeights, ship: Callable[..., Shipment]
) -> None:
    async def vanish(peer: Peer, args: dict[str, Any]) -> dict[str, Any]:
        for task in list(daemon.serving.server._connections):
            task.cancel()
        await asyncio.sleep(BOUND_S)
        return {}

    daemon.answer = vanish
    shipment = ship()
    trip = carry(shipment)
    assert trip.elsewhere
    assert "without an answer" in trip.why
    check(shipment, weights)
