"""Copies through slots: which bytes, in which order, and how they end, over a fake that runs streams in any order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda.runtime import CudaError
from ftd_client.load import pull, slots
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.link import Copy, LinkError, Ticket
from ftd_client.stream.staging import Batch, Staging
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import bounded, eventually
from tests.unit.client.stream.fakes import Threads
from tests.unit.wire.conftest import BOUND_S

SLOT = 64
#: A copy of this many bytes takes three slots.
NBYTES = 2 * SLOT + 16
GPU = torch.device("cuda:0")


class Some:
    """Reaches what it is told to."""

    def __init__(self, complete: bool = False) -> None:
        self.complete = complete
        self.sources: set[int] = set()

    def holds(self, copy: Copy) -> bool:
        return copy.src in self.sources


class Case:
    """A link over a fake, sources that tell which they are, and places that compute reads.

    Attributes:
        read: what compute found in a place: a set of one number unless something is wrong.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, count: int = 40, places: int = 3) -> None:
        self.cuda = FakeCuda(seed=seed)
        self.threads = Threads(self.cuda, monkeypatch)
        self.reach = Some()
        self.link = CudaLink(GPU, self.cuda, self.reach)
        self.sources = [ctypes.create_string_buffer(bytes([i + 1]) * NBYTES, NBYTES) for i in range(count)]
        self.places = [ctypes.create_string_buffer(NBYTES) for _ in range(places)]
        self.read: list[set[int]] = []

    def register(self, source: int) -> None:
        """As the thread that page-locks memory does, in the midst of everything."""
        address = ctypes.addressof(self.sources[source])
        if address not in self.reach.sources:
            self.cuda.host_register(address, NBYTES)
            self.reach.sources.add(address)

    def copy(self, place: int, source: int) -> Copy:
        return Copy(ctypes.addressof(self.places[place]), ctypes.addressof(self.sources[source]), NBYTES)

    def submit(self, place: int, source: int) -> Ticket:
        return self.link.submit([self.copy(place, source)])

    def wait_for(self, place: int, source: int) -> None:
        self.link.wait(self.submit(place, source))

    def compute(self, place: int) -> None:
        """Reads a place on the current stream."""
        self.cuda.compute(self.threads.stream, lambda: self.read.append(set(self.places[place].raw)))

    def close(self) -> None:
        bounded(self.link.close)
        assert (self.cuda.streams, self.cuda.events) == (set(), set())
        assert set(self.cuda.registered) == self.reach.sources, "no slot is left"
        assert not [thread for thread in threading.enumerate() if thread.name == "ftd-stage"]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(pull, "THREADS", 3)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    made = Case(monkeypatch)
    yield made
    made.cuda.refuse = set()
    made.cuda.before = lambda name, count: None
    made.close()


STEPS = st.tuples(
    st.integers(0, 2),  # the place that a copy goes to
    st.booleans(),  # whether its source is registered before it is submitted
    st.integers(0, 1),  # the stream that computes
    st.booleans(),  # whether compute reads it; else it is overwritten unread
    st.integers(0, 3),  # operations of the GPU's that run meanwhile
    st.booleans(),  # whether the threads stand still, until somebody waits for what they carry
)


@given(seed=st.integers(0, 2**32), plan=st.lists(STEPS, min_size=1, max_size=25), complete_at=st.integers(0, 30))
def test_compute_reads_what_was_copied_for_it_whichever_way_it_came(
    seed: int, plan: list[tuple[int, bool, int, bool, int, bool]], complete_at: int
) -> None:
    """Staged and direct copies in any mixture, in any order that CUDA allows, into places that are read or not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        case = Case(monkeypatch, seed)
        streams, expected = [case.threads.stream, case.cuda.new_stream()], []
        onward = threading.Event()
        case.cuda.before = lambda name, count: _hold(onward) if threading.current_thread() in _stages() else None
        for step, (place, registered, stream, is_read, runs, held) in enumerate(plan):
            if held:
                onward.clear()
            else:
                onward.set()
            if step >= complete_at:
                for source in range(step, len(plan)):
                    case.register(source)
                case.reach.complete = True
            if registered:
                case.register(step)
            case.threads.stream = streams[stream]
            ticket = case.submit(place, step)
            for _ in range(runs):
                case.cuda.step()
            if is_read:
                onward.set()
                bounded(partial(case.link.wait, ticket))
                case.compute(place)
                expected.append({step + 1})
        onward.set()
        bounded(case.link.drain)
        last = {place: step + 1 for step, (place, *_) in enumerate(plan)}
        case.cuda.run()
        assert case.read == expected
        for place, number in last.items():
            assert set(case.places[place].raw) == {number}
        case.close()


class Held:
    def __init__(self, event: int) -> None:
        self.event = event


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_never_overtakes_the_one_before_on_another_threads_stream(seed: int) -> None:
    """Though it was submitted before that one was queued."""
    cuda = FakeCuda(seed=seed)
    link, place = cuda.new_stream(), ctypes.create_string_buffer(8)
    sources = [ctypes.create_string_buffer(bytes([number]) * 8, 8) for number in (1, 2)]
    batches: list[Batch] = []
    for _ in sources:
        start, end = Held(cuda.event_create()), Held(cuda.event_create())
        cuda.event_record(start.event, link)
        batches.append(Batch(cuda, start, end, link, batches[-1] if batches else None, 1))
    for batch, source in zip(batches, sources, strict=True):
        stream, event = cuda.new_stream(), cuda.event_create()
        batch.behind(stream)
        cuda.memcpy_h2d_async(ctypes.addressof(place), ctypes.addressof(source), 8, stream)
        cuda.event_record(event, stream)
        batch.copied(stream, event)
        batch.done()
    cuda.run()
    assert set(place.raw) == {2}


@pytest.mark.parametrize("seed", range(20))
def test_one_that_is_queued_in_the_midst_of_the_next_submit_is_not_overtaken(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Their place gets both in their order, though nobody reads it in between, and by other threads' streams."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3))
    case, onward, each_has_one = Case(monkeypatch, seed), threading.Event(), threading.Barrier(3)

    def before(name: str, count: int) -> None:
        if name == "memcpy":
            each_has_one.wait(BOUND_S)
            _hold(onward)

    case.cuda.before = before
    case.submit(0, 0)
    staging, holds = case.link._staging, case.reach.holds
    assert staging is not None

    def queue_first(copy: Copy) -> bool:
        onward.set()
        staging.settle()
        return holds(copy)

    monkeypatch.setattr(case.reach, "holds", queue_first)
    bounded(lambda: case.submit(0, 1))
    staging.settle()
    case.cuda.run()
    assert set(case.places[0].raw) == {2}
    case.close()


def test_events_of_a_thread_that_is_told_to_end_last_until_its_batch_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one carries the last piece, and has the copy stream wait for all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3))
    case, onward, each_has_one = Case(monkeypatch), threading.Event(), threading.Barrier(3)
    waits, gone = case.cuda.stream_wait_event, []

    def wait(stream: int, event: int) -> None:
        if event not in case.cuda.events:
            gone.append(event)
        waits(stream, event)

    def before(name: str, count: int) -> None:
        if name == "memcpy":
            each_has_one.wait(BOUND_S)
            if count == 3:
                _hold(onward)

    monkeypatch.setattr(case.cuda, "stream_wait_event", wait)
    case.cuda.before = before
    ticket = case.submit(0, 0)
    eventually("two are carried", lambda: len(case.cuda.named("memcpy")) == 2)
    closing = threading.Thread(target=case.link.close)
    closing.start()
    for thread in _stages():
        thread.join(0.1)
    assert len(_stages()) == 3
    onward.set()
    closing.join(BOUND_S)
    case.link.wait(ticket)
    assert not gone
    case.close()


def test_one_that_failed_early_is_not_over_before_the_one_before_it() -> None:
    """Else a direct copy would be taken for the next in order."""
    cuda = FakeCuda()
    link = cuda.new_stream()
    one = Batch(cuda, Held(0), Held(cuda.event_create()), link, None, 1)
    other = Batch(cuda, Held(0), Held(cuda.event_create()), link, one, 1)
    other.error = OSError("no such bytes")
    thread = threading.Thread(target=other.done)
    thread.start()
    thread.join(0.1)
    assert not other.queued.is_set()
    one.done()
    thread.join(BOUND_S)
    assert [list(each) for each in cuda.named("record")] == [[one.end.event, link], [other.end.event, link]]
    with pytest.raises(LinkError, match="no such bytes"):
        other.wait()


def test_a_submit_of_both_kinds_is_whole(case: Case) -> None:
    case.register(1)
    ticket = case.link.submit([case.copy(0, 0), case.copy(1, 1), case.copy(2, 2)])
    case.link.wait(ticket)
    for place in range(3):
        case.compute(place)
    case.cuda.run()
    assert case.read == [{1}, {2}, {3}]
    direct = [nbytes for _, src, nbytes, _ in case.cuda.named("memcpy") if src == case.copy(1, 1).src]
    assert direct == [NBYTES], "in one piece"


def _stream(case: Case, source: int) -> list[Any]:
    address = case.copy(0, source).src
    return [stream for _, src, _, stream in case.cuda.named("memcpy") if src == address]


def test_submit_waits_for_nothing(case: Case) -> None:
    """Neither for compute that has to end first, nor for slots."""
    onward = threading.Event()
    case.cuda.before = lambda name, count: None if name != "event_synchronize" else _hold(onward)
    tickets = [case.submit(step % 3, step) for step in range(30)]
    assert not tickets[-1].batch.queued.is_set()  # type: ignore[attr-defined]
    onward.set()
    bounded(lambda: case.link.wait(tickets[-1]))
    case.compute(2)
    case.cuda.run()
    assert case.read == [{30}]


def _hold(onward: threading.Event) -> None:
    assert onward.wait(BOUND_S)


def test_what_is_registered_goes_directly_and_threads_rest_when_all_is(case: Case) -> None:
    case.link.wait(case.submit(0, 0))
    threads = _stages()
    assert threads
    case.register(1)
    case.link.wait(case.submit(0, 1))
    assert _stream(case, 1) == [case.link.stream]
    assert _stages() == threads
    case.reach.complete = True
    case.link.submit([])
    eventually("the threads to end", lambda: not _stages())
    assert set(case.cuda.registered) == case.reach.sources
    case.reach.complete = False  # a plan wants more
    case.link.wait(case.submit(1, 2))
    case.compute(0)
    case.compute(1)
    case.cuda.run()
    assert case.read == [{2}, {3}]


def _stages() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ftd-stage"]


def test_copies_without_bytes_are_soon_done(case: Case) -> None:
    nothing = Copy(0, 0, 0)
    bounded(lambda: case.link.wait(case.link.submit([nothing])))
    assert not _stages()
    onward = threading.Event()
    case.cuda.before = lambda name, count: _hold(onward) if threading.current_thread() in _stages() else None
    tickets = [case.link.submit(copies) for copies in ([case.copy(0, 0), nothing], [nothing], [])]
    onward.set()
    for ticket in tickets:
        bounded(partial(case.link.wait, ticket))


def test_turns_of_the_interpreter_lock_are_short_while_threads_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    case, before_s = Case(monkeypatch), sys.getswitchinterval()
    bounded(lambda: case.wait_for(0, 0))
    assert sys.getswitchinterval() < before_s
    case.close()
    assert sys.getswitchinterval() == before_s


def test_nothing_runs_where_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.reach.complete = True
    case.register(0)
    case.link.wait(case.submit(0, 0))
    assert not _stages()
    assert len(case.cuda.named("register")) == 1
    case.close()


def test_the_gpu_reads_slots_only(case: Case) -> None:
    bounded(lambda: case.link.wait(case.submit(0, 0)))
    case.link.drain()
    starts = [address for (address,) in case.cuda.named("register")]
    assert 1 <= len(starts) <= 3
    for _, src, nbytes, _ in case.cuda.named("memcpy"):
        assert any(start <= src and src + nbytes <= start + 2 * SLOT for start in starts)


def test_without_slots_the_driver_stages(case: Case) -> None:
    case.cuda.refuse = {"register"}
    ticket = case.submit(0, 0)
    bounded(lambda: case.link.wait(ticket))
    case.compute(0)
    case.cuda.run()
    assert case.read == [{1}]


def test_drain_waits_for_staged_copies(case: Case) -> None:
    onward = threading.Event()
    case.cuda.before = lambda name, count: _hold(onward) if name == "memcpy" and count == 2 else None
    case.submit(0, 0)
    drained = threading.Thread(target=case.link.drain)
    drained.start()
    assert drained.is_alive()
    onward.set()
    drained.join(BOUND_S)
    assert not drained.is_alive()
    assert set(case.places[0].raw) == {1}, "without a step of anybody else"


def test_close_waits_too_and_tickets_stay_good(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    tickets = [case.submit(step % 3, step) for step in range(9)]
    case.close()
    assert [set(place.raw) for place in case.places] == [{7}, {8}, {9}]
    for ticket in tickets:
        case.link.wait(ticket)
    with pytest.raises(LinkError, match="closed"):
        case.submit(0, 0)


CALLS = ["use_device", "stream_create", "event_create", "event_synchronize", "memcpy", "record", "wait"]


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_is_told_where_it_is_waited_for_and_the_next_submit_is_right(case: Case, name: str, nth: int) -> None:
    """Of any call that the threads make; and what was queued for the one that failed overtakes nothing."""
    before = dict(case.cuda.counts)

    def fail(called: str, count: int) -> None:
        if called == name and threading.current_thread() in _stages() and count - before.get(name, 0) >= nth:
            raise CudaError(f"{name}: no")

    case.cuda.before = fail
    ticket = case.link.submit([case.copy(0, 0), case.copy(1, 1), case.copy(2, 2)])
    with contextlib.suppress(LinkError):  # a late one may hit none of the calls
        bounded(lambda: case.link.wait(ticket))
    failed = ticket.batch.error  # type: ignore[attr-defined]
    if failed is not None:
        for _ in range(2):
            with pytest.raises(LinkError, match=f"a staged copy failed: CudaError: {name}: no"):
                case.link.wait(ticket)
    assert failed is not None or nth > 1
    if name in ("use_device", "stream_create", "event_create"):
        return  # the threads know no device
    case.cuda.before = lambda called, count: None
    again = case.link.submit([case.copy(place, 3 + place) for place in range(3)])
    bounded(lambda: case.link.wait(again))
    for place in range(3):
        case.compute(place)
    case.cuda.run()
    assert case.read == [{4}, {5}, {6}]


def test_a_refusal_to_the_caller_is_its_error(case: Case) -> None:
    case.cuda.refuse = {"record"}
    with pytest.raises(CudaError, match="refused"):
        case.submit(0, 0)
    case.cuda.refuse = set()
    bounded(lambda: case.link.wait(case.submit(0, 1)))
    case.compute(0)
    case.cuda.run()
    assert case.read == [{2}]


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_interrupt_of_a_submit_leaves_no_piece_that_nobody_waits_for(case: Case, nth: int) -> None:
    """Nor a batch that is never queued, whichever call of its submit the interrupt follows."""
    bounded(lambda: case.wait_for(0, 0))
    onward, carries, calls = threading.Event(), threading.Event(), 0

    def before(name: str, count: int) -> None:
        if name == "memcpy":
            carries.set()
            _hold(onward)

    case.cuda.before = before

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "c_return" and frame.f_code is Staging.put.__code__:
            calls += 1
            if calls == nth:
                carries.wait(0.1)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            case.submit(0, 1)
    finally:
        sys.setprofile(None)
    settling = threading.Thread(target=case.link.drain)
    settling.start()
    settling.join(0.1)
    assert settling.is_alive() or not carries.is_set()
    onward.set()
    settling.join(BOUND_S)
    assert not settling.is_alive()


def test_threads_work_on_the_links_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    Threads(cuda, monkeypatch)
    link = CudaLink(torch.device("cuda:1"), cuda, Some())
    source, place = ctypes.create_string_buffer(NBYTES), ctypes.create_string_buffer(NBYTES)
    link.wait(link.submit([Copy(ctypes.addressof(place), ctypes.addressof(source), NBYTES)]))
    link.close()
    assert {ordinal for (ordinal,) in cuda.named("stream_create")} == {1}
    assert cuda.contexts == {1}
    assert cuda.current == 0


def test_events_come_back_from_batches_too(case: Case) -> None:
    for step in range(30):
        bounded(partial(case.wait_for, step % 3, step))
    case.link.drain()
    count = len(case.cuda.events)
    for step in range(30):
        bounded(partial(case.wait_for, step % 3, step))
    case.link.drain()
    assert len(case.cuda.events) <= count + 2


def test_a_link_that_is_dropped_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.link.wait(case.submit(0, 0))
    threads = _stages()
    assert threads
    del case.link
    gc.collect()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert not case.cuda.registered


def test_a_forked_child_makes_no_cuda_call(in_child: Callable[..., Any], case: Case) -> None:
    ticket = case.submit(0, 0)
    case.link.drain()
    before = len(case.cuda.calls)

    def child() -> tuple[int, int]:
        refused = 0
        for call in (lambda: case.submit(0, 0), lambda: case.link.wait(ticket)):
            try:
                call()
            except LinkError:
                refused += 1
        case.link.drain()
        case.link.close()
        return refused, len(case.cuda.calls)

    assert in_child(child) == (2, before)
