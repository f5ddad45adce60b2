"""Pushing into memory of other processes: which bytes, in whose turn, and that every push ends."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.clock import Deadline
from ftd.cuda import pump as module
from ftd.cuda.pin import CHUNK_BYTES, Region
from ftd.cuda.pump import DEPTH, Piece, Pump, Push, PushAbandonedError, PushCancelledError, PushRangeError
from ftd.cuda.runtime import CudaError
from tests.fake_cuda import Allocation, FakeCuda

BOUND_S = 20
SLICE = 64
CHUNK = 4 * SLICE
SOURCE_BYTES = 5 * CHUNK + 3 * SLICE + 7


class Sources:
    """Two regions of random bytes, registered by chunks as the daemon registers its segments."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.data = [random.Random(number).randbytes(SOURCE_BYTES) for number in range(2)]
        self._keep = [ctypes.create_string_buffer(data, len(data)) for data in self.data]
        self.regions = [Region(ctypes.addressof(each), SOURCE_BYTES) for each in self._keep]
        for region in self.regions:
            for at in range(0, SOURCE_BYTES, CHUNK):
                cuda.host_register(region.address + at, min(CHUNK, SOURCE_BYTES - at))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", SLICE)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def sources(cuda: FakeCuda) -> Sources:
    return Sources(cuda)


@pytest.fixture
def start(cuda: FakeCuda, sources: Sources) -> Iterator[Callable[..., Pump]]:
    """Pumps, closed at the end; whatever happened nothing may be open, queued or left behind then."""
    made: list[Pump] = []

    def begin(ordinal: int = 0) -> Pump:
        made.append(Pump(cuda, ordinal, sources.regions))
        return made[-1]

    yield begin
    for pump in made:
        pump.close()
        assert not pump._thread.is_alive()
        assert (pump.clients, pump._pushes) == (0, {})
    assert not cuda.opened


class Gate:
    """Holds up the n-th call of a name, from 1."""

    def __init__(self, cuda: FakeCuda, name: str, nth: int) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self._what = name, nth
        cuda.before = self._before

    def _before(self, name: str, count: int) -> None:
        if (name, count) == self._what:
            self.reached.set()
            assert self._opened.wait(BOUND_S)

    def wait(self) -> None:
        assert self.reached.wait(BOUND_S)

    def open(self) -> None:
        self._opened.set()


def whole(memory: Allocation, source: int = 0, offset: int = 0) -> list[Piece]:
    return [(0, source, offset, memory.nbytes)]


def push_to(cuda: FakeCuda, memory: Allocation, client: Any = "one", pieces: list[Piece] | None = None) -> Push:
    return Push(client, [(cuda.handle(memory), whole(memory) if pieces is None else pieces)])


def copies(cuda: FakeCuda) -> list[tuple[int, int]]:
    """(dst, bytes) in the order in which they were queued."""
    return [(dst, nbytes) for dst, _, nbytes, _ in cuda.named("memcpy")]


def eventually(what: str, condition: Callable[[], bool]) -> None:
    deadline = Deadline.after(BOUND_S)
    while not condition():
        assert not deadline.expired(), what
        deadline.pause(0.002)


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_slices_fit_into_registrations() -> None:
    """Of the real sizes; those of the tests are small."""
    assert CHUNK_BYTES % (32 << 20) == 0
    assert CHUNK % SLICE == 0


PIECES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, SOURCE_BYTES - 1), st.integers(1, 3 * CHUNK)), min_size=1, max_size=6
)


@given(pushes=st.lists(st.lists(PIECES, min_size=1, max_size=3), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_every_byte_comes_from_its_place_and_no_other_is_touched(
    pushes: list[list[list[tuple[int, int, int]]]], seed: int
) -> None:
    """A copy that crosses a border between registrations is refused by the fake, as by CUDA."""
    cuda = FakeCuda(seed=seed)
    sources = Sources(cuda)
    pump = Pump(cuda, 0, sources.regions)
    asked: list[tuple[Push, list[tuple[Allocation, bytes]]]] = []
    for client, targets in enumerate(pushes):
        given, wanted = [], []
        for target in targets:
            at, pieces, expected = 3, list[Piece](), bytearray(3)
            for source, offset, most in target:
                nbytes = min(most, SOURCE_BYTES - offset)
                pieces.append((at, source, offset, nbytes))
                expected += sources.data[source][offset : offset + nbytes] + bytes(5)
                at += nbytes + 5
            memory = cuda.allocate(len(expected))
            given.append((cuda.handle(memory), pieces))
            wanted.append((memory, bytes(expected)))
        asked.append((Push(client % 2, given), wanted))
    try:
        for push, _ in asked:
            pump.submit(push)
        total = 0
        for push, wanted in asked:
            got = push.done.result(BOUND_S)
            total += got
            assert got == sum(nbytes for _, pieces in push.targets for *_, nbytes in pieces)
            assert all(memory.read() == expected for memory, expected in wanted), "when it says so, all is there"
        assert pump.pushed_bytes == total
    finally:
        pump.close()
    assert not cuda.opened
    assert (cuda.streams, cuda.events) == (set(), set())
    assert all(nbytes <= SLICE for _, nbytes in copies(cuda))


def test_the_context_is_made_by_the_first_push_on_the_gpu_it_is_for(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    pump = start(1)
    assert cuda.contexts == set()
    for _ in range(2):
        push = push_to(cuda, cuda.allocate(SLICE, ordinal=1))
        pump.submit(push)
        assert push.done.result(BOUND_S) == SLICE
    assert cuda.contexts == {1}
    assert cuda.named("stream_create") == [[1]]


def test_a_target_opened_twice_is_closed_twice(cuda: FakeCuda, sources: Sources, start: Callable[..., Pump]) -> None:
    pump, memory = start(), cuda.allocate(2 * SLICE)
    handle = cuda.handle(memory)
    twice = Push("one", [(handle, [(0, 0, 0, SLICE)]), (handle, [(SLICE, 1, 0, SLICE)])])
    other = Push("two", [(handle, [(0, 0, 0, SLICE)])])
    gate = Gate(cuda, "event_synchronize", 1)
    pump.submit(twice)
    pump.submit(other)
    gate.wait()
    gate.open()
    assert (twice.done.result(BOUND_S), other.done.result(BOUND_S)) == (2 * SLICE, SLICE)
    assert memory.read() == sources.data[0][:SLICE] + sources.data[1][:SLICE]
    assert len(cuda.named("ipc_open")) == len(cuda.named("ipc_close")) == 3


def test_nothing_is_closed_while_its_client_has_more_to_come(
    cuda: FakeCuda, sources: Sources, start: Callable[..., Pump]
) -> None:
    """The link would idle: the driver closes nothing before what is queued is copied."""
    memories = [cuda.allocate(3 * SLICE) for _ in range(4)]
    pieces = [(0, 0, 0, SLICE), (SLICE, 1, 0, 2 * SLICE)]
    first = Push("one", [(cuda.handle(memory), pieces) for memory in memories[:2]])
    second, other = push_to(cuda, memories[2], "one", pieces), push_to(cuda, memories[3], "two", pieces)
    pump, gate = start(), Gate(cuda, "event_synchronize", 1)
    for push in (first, second, other):
        pump.submit(push)
    gate.wait()
    gate.open()
    assert other.done.result(BOUND_S) == 3 * SLICE
    assert second.done.result(BOUND_S) == 3 * SLICE
    assert first.done.result(BOUND_S) == 6 * SLICE
    assert [address for (address,) in cuda.named("ipc_close")][-3:] == [memory.peer for memory in memories[:3]]
    assert [memory.read() for memory in memories] == [sources.data[0][:SLICE] + sources.data[1][: 2 * SLICE]] * 4


def test_whoever_always_has_more_to_come_gets_its_answers(
    cuda: FakeCuda, start: Callable[..., Pump], monkeypatch: pytest.MonkeyPatch
) -> None:
    pump, gate = start(), Gate(cuda, "event_synchronize", 4)
    monkeypatch.setattr(module, "HOLD_S", 0.0)
    pushes = [push_to(cuda, cuda.allocate(slices * SLICE)) for slices in (2, 20)]
    for push in pushes:
        pump.submit(push)
    gate.wait()  # in the middle of the second
    assert pushes[0].done.result(BOUND_S) == 2 * SLICE
    gate.open()
    assert pushes[1].done.result(BOUND_S) == 20 * SLICE


def test_a_push_of_nothing_gives_nothing(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    push = Push("one", [])
    start().submit(push)
    assert push.done.result(BOUND_S) == 0
    assert cuda.contexts == set()


# --- turns ---------------------------------------------------------------------------------------------------------


def test_clients_take_turns_slice_by_slice_and_many_pushes_are_one_share(
    cuda: FakeCuda, start: Callable[..., Pump]
) -> None:
    pump = start()
    gate = Gate(cuda, "memcpy", 1)
    first = [cuda.allocate(4 * SLICE) for _ in range(3)]
    pushes = [push_to(cuda, memory, "many") for memory in first]
    second = cuda.allocate(6 * SLICE)
    pushes.append(push_to(cuda, second, "few"))
    pump.submit(pushes[0])
    gate.wait()
    for push in pushes[1:]:
        pump.submit(push)
    assert pump.clients == 2
    gate.open()
    for push in pushes:
        push.done.result(BOUND_S)
    owners = ["few" if second.peer <= dst < second.peer + second.nbytes else "many" for dst, _ in copies(cuda)]
    while_both = owners[: len(owners) - owners[::-1].index("few")]
    runs = [len(list(run)) for _, run in itertools.groupby(while_both)]
    assert len(runs) >= 10
    assert max(runs) <= 2, "the end of a push takes a turn too"


def test_no_more_is_queued_than_keeps_the_link_busy(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    pump, memory = start(), cuda.allocate(20 * SLICE)
    gate = Gate(cuda, "event_synchronize", 1)
    push = push_to(cuda, memory)
    pump.submit(push)
    gate.wait()
    assert len(copies(cuda)) == DEPTH
    gate.open()
    assert push.done.result(BOUND_S) == 20 * SLICE
    assert len(cuda.named("event_create")) == DEPTH


# --- ends ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_push_copies_nothing_more_and_lets_go(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    pump, memory = start(), cuda.allocate(20 * SLICE)
    gate = Gate(cuda, "event_synchronize", 2)
    push = push_to(cuda, memory)
    pump.submit(push)
    gate.wait()
    push.cancel()
    assert not push.done.done(), "copies of it are under way"
    gate.open()
    with pytest.raises(PushCancelledError):
        push.done.result(BOUND_S)
    assert not cuda.opened
    assert cuda.is_idle
    assert len(copies(cuda)) == DEPTH + 1
    assert memory.read(10 * SLICE) == bytes(10 * SLICE)
    other = push_to(cuda, cuda.allocate(SLICE))
    pump.submit(other)
    assert other.done.result(BOUND_S) == SLICE


def test_a_push_cancelled_before_its_turn_opens_nothing(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    pump = start()
    gate = Gate(cuda, "memcpy", 1)
    first, second = (push_to(cuda, cuda.allocate(SLICE), name) for name in ("one", "two"))
    pump.submit(first)
    gate.wait()
    pump.submit(second)
    second.cancel()
    gate.open()
    assert first.done.result(BOUND_S) == SLICE
    with pytest.raises(PushCancelledError):
        second.done.result(BOUND_S)
    assert len(cuda.named("ipc_open")) == 1
    second.cancel()


def test_whoever_waits_cannot_end_a_push_by_its_future(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    """asyncio cancels the futures that it wraps: the pump must be able to tell all the same."""
    pump = start()
    gate = Gate(cuda, "memcpy", 1)
    push = push_to(cuda, cuda.allocate(SLICE))
    pump.submit(push)
    gate.wait()
    assert not push.done.cancel()
    gate.open()
    assert push.done.result(BOUND_S) == SLICE


def test_close_ends_what_is_under_way_and_refuses_what_comes(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    pump = start()
    gate = Gate(cuda, "event_synchronize", 1)
    pushes = [push_to(cuda, cuda.allocate(20 * SLICE), name) for name in ("one", "one", "two")]
    for push in pushes:
        pump.submit(push)
    gate.wait()
    closing = threading.Thread(target=pump.close)
    closing.start()
    eventually("close to begin", lambda: pump._closing)
    assert closing.is_alive(), "copies are under way"
    gate.open()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert cuda.is_idle
    assert (cuda.streams, cuda.events) == (set(), set())
    late = push_to(cuda, cuda.allocate(SLICE))
    pump.submit(late)
    for push in (*pushes, late):
        assert isinstance(push.done.exception(0), PushCancelledError)
    pump.close()


def test_a_driver_that_does_not_return_is_left_alone_with_its_pushes(
    cuda: FakeCuda, start: Callable[..., Pump]
) -> None:
    """CU-19: whoever waits is told, but not that nothing is copied any more."""
    pump = start()
    gate = Gate(cuda, "event_synchronize", 1)
    pushes = [push_to(cuda, cuda.allocate(20 * SLICE), name) for name in ("one", "two")]
    for push in pushes:
        pump.submit(push)
    gate.wait()
    assert not pump.close(0.01)
    for push in pushes:
        assert isinstance(push.done.exception(0), PushAbandonedError)
    gate.open()  # it returns after all
    assert pump.close()
    assert all(isinstance(push.done.exception(0), PushAbandonedError) for push in pushes)


def test_a_pump_that_pushed_nothing_closes(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    start().close()
    assert cuda.contexts == set()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[(1, 0, 0, SLICE)], [(0, 0, 0, SLICE + 1)], [(0, 0, 0, 1), (1 << 50, 0, 0, 1)]])
def test_a_push_beyond_its_allocation_is_refused_before_a_byte_of_it_is_written(
    cuda: FakeCuda, start: Callable[..., Pump], pieces: list[Piece]
) -> None:
    pump, memory, other = start(), cuda.allocate(SLICE), cuda.allocate(SLICE)
    push = push_to(cuda, memory, pieces=pieces)
    good = push_to(cuda, other)
    pump.submit(push)
    pump.submit(good)
    with pytest.raises(PushRangeError, match=rf"of an allocation of {SLICE}: expected it to stay inside"):
        push.done.result(BOUND_S)
    assert memory.read() == bytes(SLICE)
    assert good.done.result(BOUND_S) == SLICE


@pytest.mark.parametrize("what", ["unknown", "of another GPU"])
def test_a_handle_that_cannot_be_opened_is_refused(cuda: FakeCuda, start: Callable[..., Pump], what: str) -> None:
    pump = start()
    handle = b"?" * 64 if what == "unknown" else cuda.handle(cuda.allocate(SLICE, ordinal=1))
    push = Push("one", [(cuda.handle(cuda.allocate(SLICE)), [(0, 0, 0, SLICE)]), (handle, [(0, 0, 0, SLICE)])])
    pump.submit(push)
    with pytest.raises(CudaError):
        push.done.result(BOUND_S)
    assert not cuda.opened


CALLS = [
    "use_device", "stream_create", "ipc_open", "allocation_of", "event_create", "memcpy", "record",
    "event_synchronize", "synchronize", "ipc_close", "event_destroy", "stream_destroy",
]  # fmt: skip


@pytest.mark.parametrize("nth", [1, 2, 3, 7])
@pytest.mark.parametrize("name", CALLS)
def test_whatever_call_fails_every_push_ends_and_the_next_ones_work(
    cuda: FakeCuda, sources: Sources, start: Callable[..., Pump], name: str, nth: int
) -> None:
    failed: list[str] = []

    def fail(called: str, count: int) -> None:
        if (called, count) == (name, nth):
            failed.append(name)
            raise CudaError(f"{name}: out of memory (error 2)")

    cuda.before = fail
    pump = start()
    memories = [cuda.allocate(6 * SLICE) for _ in range(4)]
    pushes = [push_to(cuda, memory, number % 2) for number, memory in enumerate(memories)]
    for push in pushes:
        pump.submit(push)
    errors = [push.done.exception(BOUND_S) for push in pushes]
    assert cuda.is_idle, "nothing is copied once a push is over"
    # handles that the device would not close are its own affair
    assert sum(cuda.opened.values()) == (len(failed) if name == "ipc_close" else 0)
    cuda.opened.clear()
    refused = [error for error in errors if error is not None]
    assert len(refused) == (len(failed) if name not in ("synchronize", "event_destroy", "stream_destroy") else 0)
    assert all(isinstance(error, CudaError) and "out of memory" in error.message for error in refused)
    for memory, push, error in zip(memories, pushes, errors, strict=True):
        assert error is not None or memory.read() == sources.data[0][: 6 * SLICE]
        assert error is not None or push.done.result() == 6 * SLICE
    last = push_to(cuda, cuda.allocate(SLICE))
    pump.submit(last)
    assert last.done.result(BOUND_S) == SLICE
    pump.close()
    assert len(cuda.events) <= DEPTH if name in ("event_destroy",) else not cuda.events


def test_after_an_error_that_stays_every_push_fails_and_none_hangs(cuda: FakeCuda, start: Callable[..., Pump]) -> None:
    """As after an illegal access: the context is lost, and each call says so."""
    lost = threading.Event()

    def fail(name: str, count: int) -> None:
        if (name, count) == ("event_synchronize", 3):
            lost.set()
        if lost.is_set():
            raise CudaError(f"{name}: an illegal memory access was encountered (error 700)")

    cuda.before = fail
    pump = start()
    pushes = [push_to(cuda, cuda.allocate(9 * SLICE), name) for name in ("one", "two", "two")]
    for push in pushes:
        pump.submit(push)
    for push in pushes:
        assert isinstance(push.done.exception(BOUND_S), CudaError)
    pushed = pump.pushed_bytes
    for _ in range(3):
        late = push_to(cuda, cuda.allocate(SLICE))
        pump.submit(late)
        assert isinstance(late.done.exception(BOUND_S), CudaError)
    assert pump.pushed_bytes == pushed == 2 * SLICE
    cuda.opened.clear()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["ipc_open", "memcpy", "record", "event_synchronize", "synchronize"])
def test_a_bug_ends_every_push_and_lets_go_of_its_memory(cuda: FakeCuda, start: Callable[..., Pump], name: str) -> None:
    """Also of the push in whose end it happens, and no copy runs on."""

    def fail(called: str, count: int) -> None:
        if called == name and count == 2 - (name == "synchronize"):
            raise RuntimeError("a bug")

    cuda.before = fail
    pump = start()
    pushes = [push_to(cuda, cuda.allocate(9 * SLICE), number) for number in range(3)]
    if name == "synchronize":  # which only the end of a failed push asks for
        pushes[0].targets = [*pushes[0].targets, (b"?" * 64, [(0, 0, 0, 1)])]
    for push in pushes:
        pump.submit(push)
    errors = [push.done.exception(BOUND_S) for push in pushes]
    assert any(isinstance(error, RuntimeError) for error in errors)
    assert not cuda.opened
    late = push_to(cuda, cuda.allocate(SLICE))
    eventually("the pump to give up", lambda: pump._closing)
    pump.submit(late)
    assert isinstance(late.done.exception(BOUND_S), PushCancelledError)
    assert cuda.is_idle
