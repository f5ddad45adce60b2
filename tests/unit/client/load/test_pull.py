"""Weights by pull: which bytes, through which memory, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.cuda.runtime import CudaError
from ftd_client.load import pull as module
from ftd_client.load import slots
from ftd_client.load.pull import Copy, Pull, PullCancelledError, pull
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import BOUND_S, bounded, eventually

SLOT = 8192
SOURCE_BYTES = 9 * SLOT + 77


class Case:
    """A source of random bytes, and a destination that says which of its bytes were written."""

    def __init__(self) -> None:
        self.data = random.Random(3).randbytes(SOURCE_BYTES)
        self._src = ctypes.create_string_buffer(self.data, SOURCE_BYTES)
        self._dst = ctypes.create_string_buffer(2 * SOURCE_BYTES)
        self.src, self.dst = ctypes.addressof(self._src), ctypes.addressof(self._dst)

    def read(self) -> bytes:
        return self._dst.raw[: 2 * SOURCE_BYTES]

    def whole(self) -> list[Copy]:
        return [Copy(self.dst, self.src, SOURCE_BYTES)]

    def is_there(self) -> bool:
        return self.read()[:SOURCE_BYTES] == self.data


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(module, "UNIT_BYTES", 2 * SLOT)


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.fixture(params=[0, 1, 2])
def cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    fake = FakeCuda(seed=request.param)
    yield fake
    check_over(fake)


def check_over(cuda: FakeCuda) -> None:
    """Slots are given back a little after the result."""
    eventually("threads are left", lambda: not [t for t in threading.enumerate() if t.name.startswith("ftd-pull")])
    assert (cuda.streams, cuda.events, cuda.registered) == (set(), set(), {})
    assert cuda.is_idle


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, SOURCE_BYTES - 1), st.integers(0, 5 * SLOT), st.integers(0, 99)), max_size=8
    ),
    threads=st.integers(1, 5),
    seed=st.integers(0, 9),
    locks=st.booleans(),
)
def test_every_byte_comes_from_its_place_and_no_other_is_touched(
    pieces: list[tuple[int, int, int]], threads: int, seed: int, locks: bool
) -> None:
    """Odd sizes, at odd addresses; through slots, or straight from the pages."""
    case, cuda = Case(), FakeCuda(seed=seed)
    cuda.refuse = set() if locks else {"register"}
    copies, expected, at = [], bytearray(2 * SOURCE_BYTES), 0
    for offset, most, gap in pieces:
        nbytes = min(most, SOURCE_BYTES - offset, 2 * SOURCE_BYTES - at - gap)
        if nbytes > 0:
            at += gap
            copies.append(Copy(case.dst + at, case.src + offset, nbytes))
            expected[at : at + nbytes] = case.data[offset : offset + nbytes]
            at += nbytes
    assert pull(cuda, 0, iter(copies), threads) is locks
    assert case.read() == bytes(expected)
    assert not locks or all(nbytes <= SLOT for _, _, nbytes, _ in cuda.named("memcpy"))
    check_over(cuda)


@pytest.mark.parametrize(
    ("units", "cores", "threads"), [(0, 16, 1), (0.1, 16, 1), (1, 16, 1), (1.1, 16, 2), (99, 16, 10), (99, 3, 3)]
)
def test_little_is_pulled_by_few_threads(
    monkeypatch: pytest.MonkeyPatch, units: float, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert module.threads_for(int(units * module.UNIT_BYTES)) == threads


def test_the_gpu_reads_page_locked_slots_only(cuda: FakeCuda, case: Case) -> None:
    assert pull(cuda, 1, case.whole(), 3)
    assert case.is_there()
    ((start,),) = cuda.named("register")
    for _, src, nbytes, _ in cuda.named("memcpy"):
        assert start <= src
        assert src + nbytes <= start + 3 * 2 * SLOT
    assert cuda.contexts == {1}


def test_each_thread_works_on_the_device(cuda: FakeCuda, case: Case) -> None:
    pull(cuda, 1, case.whole(), 3)
    assert cuda.named("stream_create") == [[1]] * 3
    assert cuda.current == 0, "the caller's is its own"


def test_memory_that_cannot_be_locked_costs_speed_only(cuda: FakeCuda, case: Case) -> None:
    cuda.refuse_at = 1
    assert pull(cuda, 0, case.whole(), 3) is False
    assert case.is_there()


def test_a_slot_is_not_filled_again_before_it_was_copied_out(cuda: FakeCuda, case: Case) -> None:
    """The fake copies at the last moment that CUDA allows."""
    assert pull(cuda, 0, case.whole(), 1)
    assert case.is_there()
    assert len(cuda.named("memcpy")) == 10


def test_a_thread_that_cannot_be_started_ends_those_that_were(
    cuda: FakeCuda, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "ftd-pull_1":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        bounded(lambda: pull(cuda, 0, case.whole(), 3))
    assert not cuda.named("memcpy")


def test_what_is_put_while_others_are_copied_comes_too(cuda: FakeCuda, case: Case) -> None:
    pulling = Pull(cuda, 0, 2)
    eventually("slots", lambda: len(cuda.named("register")) == 1)
    half = SOURCE_BYTES // 2
    pulling.put([Copy(case.dst, case.src, half)])
    eventually("a copy", lambda: bool(cuda.named("memcpy")))
    waiting = threading.Thread(target=pulling.result)  # which does not end it
    waiting.start()
    pulling.put([Copy(case.dst + half, case.src + half, SOURCE_BYTES - half)])
    pulling.finish()
    assert bounded(pulling.result)
    assert case.is_there()
    waiting.join(BOUND_S)
    with pytest.raises(RuntimeError, match="no more were to come"):
        pulling.put(case.whole())


def test_fewer_bytes_than_were_put_are_no_result(cuda: FakeCuda, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong weights would be."""
    pulling = Pull(cuda, 0, 2)
    pulling.put(case.whole())
    pulling._units.get()
    pulling.finish()
    with pytest.raises(RuntimeError, match=f"bytes were pulled: expected {SOURCE_BYTES}"):
        bounded(pulling.result)


@pytest.mark.parametrize("end", [Pull.cancel, Pull.finish, lambda _: None])
def test_one_that_nobody_gives_anything_ends(cuda: FakeCuda, end: Callable[[Pull], None]) -> None:
    """When it is told to, or dropped."""
    pulling = Pull(cuda, 0, 2)
    end(pulling)
    del pulling
    check_over(cuda)
    assert not cuda.named("memcpy")


def test_what_was_cancelled_is_no_result(cuda: FakeCuda, case: Case) -> None:
    """Some of it may be there, and nobody knows what."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(called: str, count: int) -> None:
        if called == "memcpy" and count == 2:
            reached.set()
            assert go_on.wait(BOUND_S)

    cuda.before = wait
    pulling = Pull(cuda, 0, 1)
    pulling.put(case.whole() * 200)
    assert reached.wait(BOUND_S)
    ending = threading.Thread(target=pulling.cancel)
    ending.start()
    eventually("cancelled", pulling._failed.is_set)
    go_on.set()
    ending.join(BOUND_S)
    with pytest.raises(PullCancelledError):
        pulling.result()
    assert len(cuda.named("memcpy")) < 1000


def test_slots_that_stay_locked_stay(cuda: FakeCuda, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came to lie there next would be copied as what lay there before."""
    kept: list[mmap.mmap] = []
    monkeypatch.setattr(slots, "_locked_for_good", kept)
    cuda.refuse = {"unregister"}
    assert pull(cuda, 0, case.whole(), 2)
    eventually("slots kept", lambda: len(kept) == 1)
    ((start, (nbytes, _)),) = cuda.registered.items()
    first = ctypes.addressof(ctypes.c_char.from_buffer(kept[0]))
    assert first <= start
    assert start + nbytes <= first + len(kept[0])
    cuda.registered.clear()


def test_nothing_is_soon_done(cuda: FakeCuda) -> None:
    assert pull(cuda, 0, [])
    assert not cuda.named("memcpy")


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize(
    "name", ["use_device", "stream_create", "event_create", "event_synchronize", "memcpy", "record", "synchronize"]
)
def test_what_the_device_refuses_is_raised_and_nothing_runs_on(cuda: FakeCuda, case: Case, name: str, nth: int) -> None:
    def fail(called: str, count: int) -> None:
        if called == name and count >= nth:
            if name == "synchronize":
                cuda.lose()  # it says so of a device that copies no more
            raise CudaError(f"{name}: no")

    cuda.before = fail
    # of two threads one may find done what the other waited for, and never wait itself
    threads = 1 if name.endswith("synchronize") else 2
    happens = nth <= {"use_device": 2, "stream_create": 2, "synchronize": 1, "event_create": 4}.get(name, 9)
    with pytest.raises(CudaError, match=f"{name}: no") if happens else contextlib.nullcontext():
        bounded(lambda: pull(cuda, 0, case.whole(), threads))
    assert happens or case.is_there()


def test_the_others_stop_when_one_fails(cuda: FakeCuda, case: Case) -> None:
    """Rather than copy 100 GB for nothing."""
    failed = threading.Event()

    def fail(called: str, count: int) -> None:
        if called == "memcpy" and count == 1:
            failed.set()
            raise CudaError("memcpy: no")
        if called == "event_synchronize" and count > 1:
            assert failed.wait(BOUND_S)

    cuda.before = fail
    many = case.whole() * 200
    with pytest.raises(CudaError):
        bounded(lambda: pull(cuda, 0, many, 2))
    assert len(cuda.named("memcpy")) < 1000


def _functions(thread: int) -> list[str]:
    """Names of the functions that a thread is in."""
    return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]


def test_ctrl_c_ends_it_soon_with_nothing_under_way(cuda: FakeCuda, case: Case) -> None:
    reached, interrupted = threading.Event(), threading.Event()

    def interrupt(called: str, count: int) -> None:
        if called == "memcpy" and count >= 3:
            reached.set()
            assert interrupted.wait(BOUND_S)
            time.sleep(0.005)  # on a busy machine the interrupted thread gets its turn late

    def send() -> None:
        assert reached.wait(BOUND_S)
        # CPython's pool forgets a thread when an interrupt comes while it starts
        eventually("the caller to wait", lambda: "result" in _functions(threading.main_thread().ident or 0))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def receive(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    cuda.before = interrupt
    before = signal.signal(signal.SIGINT, receive)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pull(cuda, 0, case.whole() * 200, 2)
    finally:
        signal.signal(signal.SIGINT, before)
        interrupted.set()
        sender.join(BOUND_S)
    assert len(cuda.named("memcpy")) < 1000


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_it_starts_leaves_no_thread_though_the_error_is_kept(
    cuda: FakeCuda, case: Case, interrupts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "ftd-pull":
            signal.raise_signal(signal.SIGINT)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt) as kept:
        pull(cuda, 0, case.whole(), 2)
    check_over(cuda)
    assert kept.tb is not None


def test_what_is_written_to_outlives_a_pull_that_is_dropped(cuda: FakeCuda, case: Case) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(called: str, count: int) -> None:
        if called == "memcpy" and count == 2:
            reached.set()
            assert go_on.wait(BOUND_S)

    cuda.before = wait
    memory = threading.Event()  # anything that can be watched
    there = weakref.ref(memory)
    pulling = Pull(cuda, 0, 1)
    pulling.put(case.whole(), memory)
    del memory
    assert reached.wait(BOUND_S)
    del pulling
    kept = there() is not None
    go_on.set()
    check_over(cuda)
    assert kept
    assert there() is None


def test_an_end_that_was_interrupted_is_made_good_by_the_next(cuda: FakeCuda) -> None:
    pulling = Pull(cuda, 0, 3)
    pulling._units.put(None)  # as far as the one before came
    pulling._is_finished = True
    bounded(pulling.cancel)
