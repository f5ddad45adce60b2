"""Links: order, completion, faults and life; the CUDA link over a fake that runs streams in any allowed order."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda.runtime import CudaError
from ftd.errors import NotBuiltError, UsageError
from ftd_client.stream import links as module
from ftd_client.stream.cpu_link import CpuLink, Job, Jobs, move
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.link import Copy, LinkError
from ftd_client.stream.links import open_link
from tests.fake_cuda import FakeCuda
from tests.unit.client.stream.fakes import Threads

BOUND_S = 20


def _copy(to: torch.Tensor, source: torch.Tensor) -> Copy:
    return Copy(to.data_ptr(), source.data_ptr(), source.nbytes)


def _numbers(count: int, each: int = 64) -> list[torch.Tensor]:
    return [torch.full((each,), i, dtype=torch.int32) for i in range(count)]


class Gate:
    """A `copy` that waits for its turn."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, copies: Sequence[Copy]) -> None:
        assert self.open.wait(BOUND_S)
        move(copies)


@pytest.fixture
def cpu() -> Iterator[Callable[..., CpuLink]]:
    links: list[CpuLink] = []

    def make(*arguments: Any) -> CpuLink:
        links.append(CpuLink(*arguments))
        return links[-1]

    yield make
    for link in links:
        link.close()


# --- the CPU's ---------------------------------------------------------------------------------------------------


def test_copies_are_made_in_order_and_waited_for(cpu: Callable[..., CpuLink]) -> None:
    link, place, sources = cpu(), torch.zeros(64, dtype=torch.int32), _numbers(200)
    tickets = [link.submit([_copy(place, source)]) for source in sources]
    link.wait(tickets[-1])
    assert torch.equal(place, sources[-1])
    for ticket in tickets:
        link.wait(ticket)


def test_wait_blocks_until_the_bytes_are_there(cpu: Callable[..., CpuLink]) -> None:
    gate = Gate()
    link, place, source = cpu(gate), torch.zeros(64, dtype=torch.int32), _numbers(8)[7]
    ticket = link.submit([_copy(place, source)])
    waiter = threading.Thread(target=link.wait, args=(ticket,))
    waiter.start()
    assert not torch.equal(place, source)
    assert waiter.is_alive()
    gate.open.set()
    waiter.join(BOUND_S)
    assert not waiter.is_alive()
    assert torch.equal(place, source)


def test_drain_waits_for_all_whatever_their_order(cpu: Callable[..., CpuLink]) -> None:
    def pairs_swapped(jobs: Jobs) -> Iterable[Job]:
        while (first := jobs.get()) is not None:
            second = jobs.get()
            yield from (job for job in (second, first) if job is not None)
            if second is None:
                return

    made: list[int] = []

    def copy(copies: Sequence[Copy]) -> None:
        made.append(copies[0].src)
        move(copies)

    link, sources = cpu(copy, pairs_swapped), _numbers(4)
    places = torch.zeros(4, 64, dtype=torch.int32)
    for place, source in zip(places, sources, strict=True):
        link.submit([_copy(place, source)])
    link.drain()
    assert made == [sources[i].data_ptr() for i in (1, 0, 3, 2)]
    assert torch.equal(places, torch.stack(sources))


def test_a_copy_that_failed_raises_where_it_is_waited_for_and_nowhere_else(cpu: Callable[..., CpuLink]) -> None:
    def copy(copies: Sequence[Copy]) -> None:
        if copies[0].nbytes == 4:
            raise OSError("no such bytes")
        move(copies)

    link, place, source = cpu(copy), torch.zeros(64, dtype=torch.int32), _numbers(3)[2]
    bad = link.submit([Copy(place.data_ptr(), source.data_ptr(), 4)])
    good = link.submit([_copy(place, source)])
    link.wait(good)
    assert torch.equal(place, source)
    link.drain()
    for _ in range(2):
        with pytest.raises(LinkError, match="copying 4 bytes failed: OSError: no such bytes") as raised:
            link.wait(bad)
        assert isinstance(raised.value.__cause__, OSError)


def test_close_drains_and_may_be_repeated(cpu: Callable[..., CpuLink]) -> None:
    gate = Gate()
    link, place, source = cpu(gate), torch.zeros(64, dtype=torch.int32), _numbers(5)[4]
    ticket = link.submit([_copy(place, source)])
    gate.open.set()
    link.close()
    assert torch.equal(place, source)
    link.wait(ticket)
    link.close()
    link.drain()
    with pytest.raises(LinkError, match="closed"):
        link.submit([_copy(place, source)])


def test_threads_are_flat_over_100_links() -> None:
    place, source = torch.zeros(64, dtype=torch.int32), _numbers(2)[1]
    before = threading.active_count()
    for _ in range(100):
        link = CpuLink()
        link.submit([_copy(place, source)])
        link.close()
        assert threading.active_count() == before


def test_a_link_that_is_dropped_ends_its_thread() -> None:
    link = CpuLink()
    thread = link._thread
    del link
    gc.collect()
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_a_forked_child_is_refused_and_does_not_hang(in_child: Callable[..., Any], cpu: Callable[..., CpuLink]) -> None:
    gate = Gate()
    link, place, source = cpu(gate), torch.zeros(64, dtype=torch.int32), _numbers(2)[1]
    ticket = link.submit([_copy(place, source)])

    def child() -> list[str]:
        told = []
        for call in (lambda: link.submit([_copy(place, source)]), lambda: link.wait(ticket)):
            try:
                call()
            except LinkError as error:
                told.append(error.message)
        link.drain()  # nothing copies here
        link.close()
        return told

    told = in_child(child)
    gate.open.set()
    assert len(told) == 2
    assert all(f"belongs to process {os.getpid()}" in text for text in told)
    link.wait(ticket)
    assert torch.equal(place, source)


def test_a_link_is_for_the_cpu_or_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    link = open_link(torch.device("cpu"))
    assert link.device == torch.device("cpu")
    link.close()
    with pytest.raises(UsageError, match="no link leads to meta"):
        open_link(torch.device("meta"))
    monkeypatch.setattr(module, "load_runtime", lambda: (None, "no GPU is visible"))
    with pytest.raises(LinkError, match="no link leads to cuda:0: no GPU is visible"):
        open_link(torch.device("cuda:0"))


# --- CUDA's ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, Threads]:
    cuda = FakeCuda()
    return cuda, Threads(cuda, monkeypatch)


def test_a_link_to_cuda_takes_the_current_device_where_none_is_named(
    gpu: tuple[FakeCuda, Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, _ = gpu
    monkeypatch.setattr(module, "load_runtime", cuda.load)
    cuda.current = 1
    link = open_link(torch.device("cuda"))
    assert link.device == torch.device("cuda:1")
    link.close()


@given(
    seed=st.integers(0, 2**32),
    plan=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans()), min_size=1, max_size=30),
)
def test_compute_reads_what_was_copied_for_it_in_every_order_that_cuda_allows(
    seed: int, plan: list[tuple[int, int, bool]]
) -> None:
    """Each step: which of two streams computes, into which of three places, and whether the copy is ahead by one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda = FakeCuda(seed=seed)
        threads = Threads(cuda, monkeypatch)
        streams = [threads.stream, cuda.new_stream()]
        link = CudaLink(torch.device("cuda:0"), cuda)
        places, sources = torch.full((3, 4), -1, dtype=torch.int32), _numbers(len(plan), 4)
        read: list[int] = []
        tickets: dict[int, Any] = {}

        def submit(step: int) -> None:
            if step < len(plan) and step not in tickets:
                tickets[step] = link.submit([_copy(places[plan[step][1]], sources[step])])

        for step, (stream, place, ahead) in enumerate(plan):
            threads.stream = streams[stream]
            submit(step)
            if ahead and step + 1 < len(plan) and plan[step + 1][1] != place:
                submit(step + 1)
            link.wait(tickets.pop(step))
            cuda.compute(threads.stream, lambda place=place: read.append(int(places[place][0])))  # type: ignore[misc]
            if seed % 3 == step % 3:
                cuda.step()
        cuda.run()
        assert read == list(range(len(plan)))
        link.close()
        assert not cuda.events
        assert not cuda.streams


def test_events_come_back_with_their_tickets(gpu: tuple[FakeCuda, Threads]) -> None:
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    for _ in range(100):
        link.wait(link.submit([_copy(place, source)]))
    assert len(cuda.events) == 2  # one for what came before, one for the ticket
    held = [link.submit([_copy(place, source)]) for _ in range(10)]
    assert len({ticket.event for ticket in held}) == 10  # type: ignore[attr-defined]
    assert len(cuda.events) == 11
    del held
    for _ in range(10):
        link.submit([_copy(place, source)])
    assert len(cuda.events) == 11
    link.close()


def test_an_event_of_a_living_ticket_is_not_recorded_again(gpu: tuple[FakeCuda, Threads]) -> None:
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    first = link.submit([_copy(place, source)])
    cuda.run()
    for _ in range(5):
        link.submit([_copy(place, source)])
    assert cuda.event_query(first.event)  # type: ignore[attr-defined]
    link.close()


def test_every_handle_is_made_on_the_links_device_and_the_callers_stays(gpu: tuple[FakeCuda, Threads]) -> None:
    """A call with another device current would open a context there."""
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:1"), cuda), torch.zeros(4), torch.ones(4)
    assert cuda.current == 0
    seen: list[int] = []
    for name in ("memcpy_h2d_async", "stream_wait_event", "event_record", "stream_synchronize", "event_destroy"):
        real = getattr(cuda, name)
        setattr(cuda, name, lambda *a, real=real: (seen.append(cuda.current), real(*a))[1])
    link.wait(link.submit([_copy(place, source)]))
    link.drain()
    link.close()
    assert cuda.current == 0
    assert set(seen) == {1}
    assert {*cuda.named("event_create")[0], *cuda.named("stream_create")[0]} == {1}


def test_drain_waits_for_the_copies_and_the_compute_that_reads_them_alone(gpu: tuple[FakeCuda, Threads]) -> None:
    cuda, threads = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    read: list[torch.Tensor] = []
    link.drain()
    assert cuda.named("synchronize") == [[link.stream]], "no compute is known yet"
    link.wait(link.submit([_copy(place, source)]))
    cuda.compute(threads.stream, lambda: read.append(place.clone()))
    cuda.compute(cuda.new_stream(), lambda: None)
    link.drain()
    assert torch.equal(place, source)
    assert len(read) == 1 and torch.equal(read[0], source)
    assert cuda.named("synchronize")[1:] == [[link.stream], [threads.stream]]
    link.close()


@pytest.mark.parametrize("who", ["this", "last"])
def test_a_captured_stream_is_refused_before_anything_is_touched(gpu: tuple[FakeCuda, Threads], who: str) -> None:
    cuda, threads = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    ticket = link.submit([_copy(place, source)])
    cuda.capturing.add(threads.stream)
    if who == "last":
        threads.stream = cuda.new_stream()
    before = list(cuda.calls)
    with pytest.raises(NotBuiltError, match="captured into a CUDA graph"):
        link.submit([_copy(place, source)])
    with pytest.raises(NotBuiltError):
        link.wait(ticket)
    assert cuda.calls == before
    cuda.capturing.clear()
    link.wait(ticket)
    link.close()


@pytest.mark.parametrize("name", ["memcpy", "record", "wait"])
def test_a_refused_call_is_an_error_and_the_link_stays_usable(gpu: tuple[FakeCuda, Threads], name: str) -> None:
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    cuda.refuse = {name}
    with pytest.raises(CudaError, match="refused"):
        link.submit([_copy(place, source)])
    cuda.refuse = set()
    link.wait(link.submit([_copy(place, source)]))
    assert len(cuda.events) == 2
    cuda.run()
    assert torch.equal(place, source)
    link.close()


def test_a_link_that_cannot_be_made_leaves_nothing(gpu: tuple[FakeCuda, Threads]) -> None:
    cuda, _ = gpu
    cuda.refuse = {"event_create"}
    with pytest.raises(CudaError):
        CudaLink(torch.device("cuda:0"), cuda)
    assert not cuda.streams


@pytest.mark.parametrize("refuse", [set(), {"synchronize"}])
def test_closing_frees_everything_once_on_a_device_that_failed_too(
    gpu: tuple[FakeCuda, Threads], refuse: set[str]
) -> None:
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    ticket = link.submit([_copy(place, source)])
    cuda.refuse = refuse
    link.close()
    link.close()
    assert (cuda.events, cuda.streams) == (set(), set())
    assert torch.equal(place, source) == (not refuse), "drained first"
    link.wait(ticket)
    link.drain()
    with pytest.raises(LinkError, match="closed"):
        link.submit([_copy(place, source)])


def test_a_forked_child_makes_no_cuda_call(in_child: Callable[..., Any], gpu: tuple[FakeCuda, Threads]) -> None:
    cuda, _ = gpu
    link, place, source = CudaLink(torch.device("cuda:0"), cuda), torch.zeros(4), torch.ones(4)
    ticket = link.submit([_copy(place, source)])
    before = len(cuda.calls)

    def child() -> tuple[int, int]:
        refused = 0
        for call in (lambda: link.submit([_copy(place, source)]), lambda: link.wait(ticket)):
            try:
                call()
            except LinkError:
                refused += 1
        link.drain()
        link.close()
        return refused, len(cuda.calls)

    assert in_child(child) == (2, before)
    link.close()


def test_two_threads_never_mix_up_their_orders(gpu: tuple[FakeCuda, Threads]) -> None:
    """Each submit waits for an event recorded within it: calls of two threads must not interleave there."""
    cuda, _ = gpu
    link = CudaLink(torch.device("cuda:0"), cuda)
    inside, clashes = threading.Lock(), list[str]()

    def guarded(name: str) -> None:
        real = getattr(cuda, name)

        def call(*arguments: Any) -> None:
            if not inside.acquire(blocking=False):
                clashes.append(name)
            else:
                real(*arguments)
                inside.release()

        setattr(cuda, name, call)

    for name in ("event_record", "stream_wait_event", "memcpy_h2d_async"):
        guarded(name)
    place, source = torch.zeros(4), torch.ones(4)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(BOUND_S)
        for _ in range(200):
            link.wait(link.submit([_copy(place, source)]))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(BOUND_S)
    assert clashes == []
    link.close()


def test_memmove_of_no_bytes_touches_nothing() -> None:
    move([Copy(0, 0, 0)])
    assert ctypes.sizeof(ctypes.c_void_p) == 8
