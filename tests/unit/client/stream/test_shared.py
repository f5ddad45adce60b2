"""Shared weights on the host: what is registered, when, by whom, and what of it is undone; the rest goes by slots."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftd.clock import Deadline
from ftd.cuda.runtime import CudaError
from ftd.shm.layout import Extent
from ftd.shm.names import Names
from ftd.shm.segment import Access, Segment
from ftd.shm.slots import Turns, prepare
from ftd_client import written as written_module
from ftd_client.load import pull, slots
from ftd_client.stream import pinner as pinner_module
from ftd_client.stream import shared as module
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.link import Copy, LinkError
from ftd_client.stream.pinner import Pinner
from ftd_client.stream.shared import SharedHost, shared_host
from ftd_client.views import SharedWeights
from tests.fake_cuda import FakeCuda
from tests.unit.client.load.served import bounded, eventually
from tests.unit.client.stream.fakes import Threads
from tests.unit.wire.conftest import BOUND_S

PAGE = mmap.PAGESIZE
CHUNK = 4 * PAGE
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Placed:
    def __init__(self, spec: Any, extent: Extent) -> None:
        self.spec, self.extent = spec, extent


class Spec:
    dtype = "U8"

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.shape = name, (nbytes,)


class Manifest:
    def __init__(self, extents: dict[str, Extent]) -> None:
        self.tensors = [Placed(Spec(name, extent.nbytes), extent) for name, extent in extents.items()]


EXTENTS = {
    "first": Extent(0, 0, 3 * PAGE),
    "across": Extent(0, 3 * PAGE, 2 * PAGE),
    "late": Extent(0, 13 * PAGE, PAGE),
    "small": Extent(0, 14 * PAGE, 512),
    "neighbour": Extent(0, 14 * PAGE + 512, 512),
    "other": Extent(1, 512, 1024),
    "empty": Extent(0, 0, 0),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    _patch(monkeypatch, fake)
    yield fake
    eventually("the threads to end", lambda: not _pinning())
    assert not fake.registered


def _patch(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> Threads:
    monkeypatch.setattr(module, "load_runtime", fake.load)
    monkeypatch.setattr(pinner_module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.run())
    return Threads(fake, monkeypatch)


def _pinning() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ftd-pin"]


def _weights() -> SharedWeights:
    mappings, pages = [], []
    for nbytes in (15 * PAGE, 2 * PAGE):
        with Segment.create(f"/ftdw.{uuid.uuid4().hex}", nbytes, Access()) as segment:
            segment.write(os.urandom(nbytes))
            mappings.append(segment.map_private())
            pages.append(segment.map_shared())
            segment.unlink()
    return SharedWeights(Manifest(EXTENTS), mappings, pages)  # type: ignore[arg-type]


@pytest.fixture
def weights() -> SharedWeights:
    return _weights()


Open = Callable[..., SharedHost]


@pytest.fixture
def opened(weights: SharedWeights, cuda: FakeCuda) -> Iterator[Open]:
    """Hosts that are closed at the end, whatever happened."""
    made: list[SharedHost] = []

    def make(names: Sequence[str] = tuple(EXTENTS), **more: Any) -> SharedHost:
        made.append(shared_host(weights, names, pin=True, device=GPU, **more))
        return made[-1]

    yield make
    for host in made:
        bounded(host.close)


def _want(host: SharedHost, *names: str) -> None:
    """As plans do; returns once all is registered that will be."""
    host.want([(host.addresses[name], EXTENTS[name].nbytes) for name in names])
    _settle(host)


def _settle(host: SharedHost) -> None:
    assert host._pinner is not None
    pinner = host._pinner
    eventually("the thread's end", lambda: not (pinner._is_running or pinner._wanted))


def _raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _bytes_at(host: SharedHost, name: str) -> bytes:
    nbytes = EXTENTS[name].nbytes
    return ctypes.string_at(host.addresses[name], nbytes) if nbytes else b""


def _is_shared(weights: SharedWeights, host: SharedHost, name: str) -> bool:
    extent = EXTENTS[name]
    both = [weights.private[extent.segment].address, weights.shared[extent.segment].address]
    return bool(both.index(host.addresses[name] - extent.offset))


def _chunks(cuda: FakeCuda) -> dict[int, tuple[int, bool]]:
    """What is registered of the weights: not slots."""
    return {address: entry for address, entry in cuda.registered.items() if entry[1]}


def _registrations(cuda: FakeCuda) -> list[int]:
    return [address for (address,) in cuda.named("register")]


# --- where they lie ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin_it", [False, True])
def test_for_a_cpu_they_are_the_views(weights: SharedWeights, cuda: FakeCuda, pin_it: bool) -> None:
    host = shared_host(weights, list(EXTENTS), pin=pin_it, device=CPU)
    assert host.addresses == {n: weights.view(n).data_ptr() if e.nbytes else 0 for n, e in EXTENTS.items()}
    assert (host.kind, host.pinned_bytes, host.warnings, host.reach, cuda.calls) == ("none", 0, [], None, [])
    host.want([(host.addresses["first"], PAGE)])
    assert host.samples([(4096, 1)]) == [(4096, 1)]
    host.close()


def test_for_a_gpu_they_are_the_segments_pages_and_nothing_is_registered_unasked(
    weights: SharedWeights, cuda: FakeCuda
) -> None:
    host = shared_host(weights, list(EXTENTS), pin=False, device=GPU)
    for name, extent in EXTENTS.items():
        assert not extent.nbytes or _is_shared(weights, host, name)
        assert _bytes_at(host, name) == _raw(weights.view(name))
    assert host.addresses["empty"] == 0
    assert (host.kind, host.pinned_bytes, host.warnings, host.reach, cuda.calls) == ("none", 0, [], None, [])
    host.close()


def test_what_was_changed_in_place_is_read_where_it_was_changed(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    weights.view("small").data.add_(1)
    host = opened()
    found = {name: _is_shared(weights, host, name) for name in EXTENTS if name != "empty"}
    # the neighbour shares the page that the kernel copied: its bytes are the same in both
    assert found == {
        "first": True, "across": True, "late": True, "small": False, "neighbour": False, "other": True,
    }  # fmt: skip
    for name, is_shared in found.items():
        assert _bytes_at(host, name) == _raw(weights.view(name))
        place = host.locate(host.addresses[name])
        assert place == ((EXTENTS[name].segment, EXTENTS[name].offset) if is_shared else None)
    _want(host, "first", "small")
    assert host.reach is not None and not host.reach.complete, "slots carry the changed one for good"
    private = weights.private[0]
    assert not any(private.address <= address < private.address + private.nbytes for address in cuda.registered)


def test_where_the_kernel_does_not_tell_nothing_is_registered(
    weights: SharedWeights, cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_module, "_PAGEMAP", "/nowhere")
    host = opened(["first", "other"])
    assert (host.kind, host.pinned_bytes, _chunks(cuda)) == ("staged", 0, {})
    assert not _is_shared(weights, host, "first")
    _want(host, "first", "other")
    assert not _chunks(cuda)


def test_names_that_are_not_there_are_errors(weights: SharedWeights) -> None:
    with pytest.raises(KeyError):
        shared_host(weights, ["none"], pin=False, device=CPU)


def test_mappings_live_as_long_as_the_host(weights: SharedWeights, cuda: FakeCuda, opened: Open) -> None:
    host = opened(["first", "late"])
    expected = _raw(weights.view("first"))
    weights.private, weights.shared, weights._mappings = [], [], []
    gc.collect()
    assert _bytes_at(host, "first") == expected
    assert "/dev/shm/ftdw." in Path("/proc/self/maps").read_text()
    host.close()
    gc.collect()
    assert "/dev/shm/ftdw." not in Path("/proc/self/maps").read_text()


# --- what is registered ------------------------------------------------------------------------------------------


def test_the_first_chunk_is_registered_at_once_and_others_when_they_are_wanted(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    host = opened(["across", "first", "late", "empty", "other"])
    base, second = weights.shared[0].address, weights.shared[1].address
    assert _registrations(cuda) == [base]
    assert (host.kind, host.pinned_bytes, host.warnings) == ("cuda", CHUNK, [])
    assert host.samples([(1, 2)]) == [(base, CHUNK)], "costs are measured from what is page-locked"
    _want(host, "other", "late", "empty", "across")
    assert _registrations(cuda) == [base, second, base + 3 * CHUNK, base + CHUNK], "in their order"
    assert cuda.registered == {
        base: (CHUNK, True), base + CHUNK: (CHUNK, True), base + 3 * CHUNK: (3 * PAGE, True), second: (2 * PAGE, True),
    }  # fmt: skip
    assert (host.kind, host.pinned_bytes) == ("cuda", 13 * PAGE)
    _want(host, "late", "first")
    assert len(cuda.named("register")) == 4, "all are"
    host.close()
    host.close()
    assert cuda.registered == {}
    assert cuda.named("unregister") == cuda.named("register")[::-1]
    assert (host.kind, host.pinned_bytes) == ("none", 0)


def test_a_later_plan_may_want_more(cuda: FakeCuda, opened: Open) -> None:
    host = opened()
    assert host.reach is not None
    assert not host.reach.complete
    _want(host, "first")
    assert host.reach.complete
    _want(host, "late")
    assert host.reach.complete
    assert host.pinned_bytes == CHUNK + 3 * PAGE


def test_a_copy_is_split_at_the_grid_whatever_is_registered_yet(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    host = opened(["late", "across"])
    across = host.addresses["across"]
    parts = [Copy(7, across, PAGE), Copy(7 + PAGE, across + PAGE, PAGE)]
    assert host.split(Copy(7, across, 2 * PAGE)) == parts
    assert host.reach is not None
    assert not any(map(host.reach.holds, parts))
    _want(host, "across")
    assert host.split(Copy(7, across, 2 * PAGE)) == parts
    assert all(map(host.reach.holds, parts))
    outside = [host.addresses["across"] + 5 * PAGE, weights.shared[1].address, 4096]
    assert not any(host.reach.holds(Copy(0, address, 1)) for address in outside)


def test_two_models_register_what_they_share_once(weights: SharedWeights, cuda: FakeCuda, opened: Open) -> None:
    one, two = opened(["first", "across"]), opened(["across", "late"])
    _want(one, "first", "across")
    _want(two, "across", "late")
    assert len(cuda.named("register")) == 3
    assert two.pinned_bytes == 11 * PAGE
    one.close()
    base = weights.shared[0].address
    assert set(cuda.registered) == {base, base + CHUNK, base + 3 * CHUNK}, "across has its first page in chunk 0"
    two.close()
    assert cuda.registered == {}
    opened(["first"]).close()
    assert cuda.registered == {}
    assert all(not mapped.users for mapped in weights.shared)


def test_the_thread_works_on_its_device_and_makes_no_context_elsewhere(
    weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def noted(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments, **more: (seen.append(cuda.current), call(*arguments, **more))[1]  # type: ignore[func-returns-value]

    for name in ("host_register", "host_unregister"):
        monkeypatch.setattr(cuda, name, noted(getattr(cuda, name)))
    host = shared_host(weights, list(EXTENTS), pin=True, device=torch.device("cuda:1"))
    _want(host, "late", "other")
    host.close()
    assert seen == [1] * 6
    assert cuda.contexts == {1}
    assert cuda.current == 0


def test_whoever_watches_is_told_as_it_grows_and_at_the_end(
    cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinner_module, "_TELL_NS", 0)
    host = opened()
    told: list[tuple[str, int]] = []
    host.watch(lambda: told.append((host.kind, host.pinned_bytes)))
    _want(host, "across", "late")
    eventually("the last word", lambda: told[-1:] == [("cuda", 11 * PAGE)])
    assert sorted(set(told)) == [("cuda", 8 * PAGE), ("cuda", 11 * PAGE)]


def test_not_more_often_than_anybody_looks(cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinner_module, "CHUNK_BYTES", PAGE)
    monkeypatch.setattr(pinner_module, "_TELL_NS", 10**18)
    host = opened()
    told: list[int] = []
    host.watch(lambda: told.append(host.pinned_bytes))
    _want(host, *EXTENTS)
    eventually("the last word", lambda: bool(told))
    assert told == [host.pinned_bytes]


def test_what_the_watcher_raises_stops_nothing(cuda: FakeCuda, opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> None:
        raise OSError("no space")

    host = opened()
    host.watch(told)
    _want(host, "late")
    eventually("the end", lambda: not _pinning())
    assert host.pinned_bytes == CHUNK + 3 * PAGE
    assert "no space" in caplog.text


# --- refusals ----------------------------------------------------------------------------------------------------


def _refuse_nth(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    cuda.refuse_at = len(cuda.named("register")) + nth


def _refuse_above(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    _refuse_if(cuda, monkeypatch, lambda size: size > nbytes)


def _refuse_in_total(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    _refuse_if(cuda, monkeypatch, lambda size: size + sum(n for n, _ in _chunks(cuda).values()) > nbytes)


def _refuse_if(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool]) -> None:
    real = cuda.host_register

    def register(address: int, nbytes: int, *, read_only: bool = False) -> None:
        if read_only and refused(nbytes):
            raise CudaError("cudaHostRegister: out of memory (error 2)")
        real(address, nbytes, read_only=read_only)

    monkeypatch.setattr(cuda, "host_register", register)


@pytest.mark.parametrize(
    ("refuse", "limit"), [(_refuse_nth, 1), (_refuse_above, CHUNK - 1), (_refuse_in_total, CHUNK - 1)]
)
def test_refused_at_once_all_is_staged_with_one_warning(
    weights: SharedWeights, cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, refuse: Callable[..., None], limit: int,
) -> None:  # fmt: skip
    other = opened(["other"])
    refuse(cuda, monkeypatch, limit)
    host = opened()
    assert (host.kind, host.pinned_bytes) == ("staged", 0)
    assert host.warnings == [
        "the shared weights cannot be pinned: CUDA refused after 0 B: cudaHostRegister: out of memory (error 2); "
        "they are staged"
    ]
    assert [record.getMessage() for record in caplog.records] == host.warnings
    assert host.reach is not None and not host.reach.complete
    assert host.samples([(4096, 7)]) == [(4096, 7)]
    _want(host, *EXTENTS)
    assert set(cuda.registered) == {weights.shared[1].address}, "not tried again, and no harm to the other"
    host.close()
    assert set(cuda.registered) == {weights.shared[1].address}
    other.close()
    assert all(not mapped.users for mapped in weights.shared)


@pytest.mark.parametrize(
    ("refuse", "limit", "kept"),
    [
        (_refuse_nth, 1, 1), (_refuse_nth, 2, 2), (_refuse_nth, 3, 3),
        (_refuse_in_total, CHUNK, 1), (_refuse_in_total, 2 * CHUNK, 2),
    ],
)  # fmt: skip
def test_refused_later_what_is_registered_stays_and_is_undone_in_reverse(
    weights: SharedWeights, cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, refuse: Callable[..., None], limit: int, kept: int,
) -> None:  # fmt: skip
    host = opened()
    told: list[tuple[str, int]] = []
    host.watch(lambda: told.append((host.kind, host.pinned_bytes)))
    refuse(cuda, monkeypatch, limit)
    _want(host, "across", "late", "other")
    assert len(cuda.registered) == kept
    assert (host.kind, host.pinned_bytes) == ("staged", sum(nbytes for nbytes, _ in cuda.registered.values()))
    assert host.reach is not None and not host.reach.complete
    eventually("status to be told", lambda: told[-1:] == [(host.kind, host.pinned_bytes)])
    assert len([record for record in caplog.records if "be pinned" in record.getMessage()]) == 1
    _want(host, *EXTENTS)
    assert len(cuda.registered) == kept, "not tried again"
    registered = cuda.named("register")[:kept]
    host.close()
    assert cuda.named("unregister") == registered[::-1]
    assert all(not mapped.users for mapped in weights.shared)


def test_a_device_without_read_only_registration_is_not_tried(cuda: FakeCuda, opened: Open) -> None:
    cuda.read_only = False
    host = opened(["first"])
    assert host.warnings == [
        "the shared weights cannot be pinned: cuda:0 registers no read-only memory; they are staged"
    ]
    assert (host.kind, host.pinned_bytes) == ("staged", 0)
    _want(host, "first")
    assert not _chunks(cuda)
    assert len(cuda.named("register")) == 1, "slots, to see whether there are any"


def test_where_nothing_can_be_locked_copies_are_as_slow_as_they_were(cuda: FakeCuda, opened: Open) -> None:
    cuda.refuse = {"register"}
    host = opened(["first"])
    assert (host.kind, host.pinned_bytes, host.reach) == ("none", 0, None)
    assert host.warnings[0].endswith("register: refused (error 2); they are copied more slowly")
    host.want([(host.addresses["first"], PAGE)])


def test_without_a_runtime_that_is_the_reason(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_runtime", lambda: (None, "no libcudart was found"))
    host = opened(["first"])
    assert host.warnings == ["the shared weights cannot be pinned: no libcudart was found; they are copied more slowly"]
    assert host.reach is None


def test_a_thread_that_gets_no_device_is_a_refusal(cuda: FakeCuda, opened: Open) -> None:
    host = opened()
    cuda.refuse = {"use_device"}
    _want(host, "late")
    assert (host.kind, host.pinned_bytes) == ("staged", CHUNK)


# --- its end -----------------------------------------------------------------------------------------------------


class Gate:
    """Holds registrations, from the second on, until `open` is set."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        cuda.before = self

    def __call__(self, name: str, count: int) -> None:
        if name == "register" and count > 1:
            self.reached.set()
            assert self.open.wait(BOUND_S)


def test_closing_in_the_midst_of_a_registration_leaves_nothing(cuda: FakeCuda, opened: Open) -> None:
    host, gate = opened(), Gate(cuda)
    host.want([(host.addresses[name], EXTENTS[name].nbytes) for name in ("across", "late", "other")])
    assert gate.reached.wait(BOUND_S)
    closing = threading.Thread(target=host.close)
    closing.start()
    eventually("it to stop", lambda: host._pinner is None or host._pinner._stop.is_set())
    gate.open.set()
    closing.join(BOUND_S)
    assert not closing.is_alive()
    assert cuda.registered == {}
    assert len(cuda.named("register")) == 2, "those behind it are left out"
    eventually("the thread's end", lambda: not _pinning())


def test_the_collector_may_close_it_in_the_midst_of_its_own_registration(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    host = opened()
    pinner = host._pinner
    assert pinner is not None

    def collect(name: str, _count: int) -> None:
        if name == "register":
            pinner.close()

    cuda.before = collect
    host.want([(host.addresses["across"], 2 * PAGE), (host.addresses["late"], PAGE)])
    eventually("the thread's end", lambda: not _pinning())
    assert len(cuda.named("register")) == 2
    assert cuda.registered == {}
    assert all(not mapped.users for mapped in weights.shared)


@pytest.mark.parametrize("nth", range(1, 6))
def test_the_collector_may_close_another_models_in_the_midst_of_a_registration(
    cuda: FakeCuda, opened: Open, nth: int
) -> None:
    """From Python 3.12 on it runs where a call returns: after any of them what counts as registered is."""
    one = opened(["first"])
    events = 0

    def collect(frame: FrameType, event: str, _: object) -> None:
        nonlocal events
        if event == "c_return" and frame.f_code is Pinner._register.__code__:
            events += 1
            if events == nth:
                one.close()

    sys.setprofile(collect)
    try:
        other = opened(["first"])
    finally:
        sys.setprofile(None)
    assert events
    assert {region.address for region in other._pinner.regions} == set(_chunks(cuda))  # type: ignore[union-attr]


def test_without_a_thread_it_says_so_and_closes(cuda: FakeCuda, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    host = opened()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", start)
        host.want([(host.addresses["late"], PAGE)])
    host.close()
    assert not cuda.registered


def test_an_interrupt_of_the_first_registration_leaves_nothing(
    weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(self: Pinner, chunk: Any) -> None:
        register(self, chunk)
        raise KeyboardInterrupt

    register = Pinner.first
    monkeypatch.setattr(Pinner, "first", first)
    with pytest.raises(KeyboardInterrupt):
        shared_host(weights, ["first"], pin=True, device=GPU)
    gc.collect()
    assert cuda.named("register")
    assert not cuda.registered


def test_closed_while_it_has_its_turn_it_registers_nothing(cuda: FakeCuda, opened: Open) -> None:
    class Closing:
        @contextlib.contextmanager
        def turn(self, *_: object) -> Iterator[bool]:
            assert host._pinner is not None
            host._pinner.close()
            yield True

        def close(self) -> None:
            """There is nothing to."""

    host = opened(turns=Closing)
    _want(host, "late")
    eventually("the thread's end", lambda: not _pinning())
    assert len(cuda.named("register")) == 1


def test_turns_that_cannot_be_taken_cost_nothing(cuda: FakeCuda, opened: Open) -> None:
    class Broken:
        def turn(self, *_: object) -> Any:
            raise OSError(errno.ENOLCK, "No locks available")

        def close(self) -> None:
            """There is nothing to."""

    host = opened(turns=Broken)
    _want(host, "across", "late")
    assert host.pinned_bytes == 11 * PAGE
    assert host.kind == "cuda"


def test_it_is_not_complete_before_all_is_registered(cuda: FakeCuda, opened: Open) -> None:
    host, gate = opened(), Gate(cuda)
    assert host.reach is not None
    host.want([(host.addresses["late"], PAGE)])
    assert gate.reached.wait(BOUND_S)
    assert not host.reach.complete
    gate.open.set()
    _settle(host)
    assert host.reach.complete


def test_one_that_is_dropped_undoes_itself_though_its_thread_runs(weights: SharedWeights, cuda: FakeCuda) -> None:
    host, gate = shared_host(weights, list(EXTENTS), pin=True, device=GPU), Gate(cuda)
    host.watch(lambda: None)
    host.want([(host.addresses["across"], 2 * PAGE), (host.addresses["late"], PAGE)])
    assert gate.reached.wait(BOUND_S)
    gone = weakref.ref(host)
    gate.open.set()
    del host
    gc.collect()
    assert gone() is None
    eventually("all to be undone", lambda: not cuda.registered and not _pinning())
    assert all(not mapped.users for mapped in weights.shared)


def test_before_its_process_ends(weights: SharedWeights, cuda: FakeCuda) -> None:
    """Once nothing reads it any more."""
    host = shared_host(weights, list(EXTENTS), pin=True, device=GPU)
    _want(host, "late")
    place, idle = ctypes.create_string_buffer(PAGE), list[bool]()
    stream = cuda.new_stream()
    cuda.memcpy_h2d_async(ctypes.addressof(place), host.addresses["late"], PAGE, stream)
    cuda.before = lambda name, _count: idle.append(cuda.is_idle) if name == "unregister" else None
    pinner_module._leave()
    assert cuda.registered == {}
    assert idle == [True, True]
    host.close()


def test_a_device_that_failed_ends_as_well(
    weights: SharedWeights, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_device: int) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    host = shared_host(weights, ["first"], pin=True, device=GPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lost)
        pinner_module._leave()
    host.close()


def test_a_forked_child_leaves_registrations_alone(in_child: Callable[..., Any], cuda: FakeCuda, opened: Open) -> None:
    host = opened()
    _want(host, "late")

    def child() -> int:
        host.close()
        pinner_module._leave()
        return len(cuda.named("unregister"))

    assert in_child(child) == 0


# --- turns -------------------------------------------------------------------------------------------------------


@pytest.fixture
def names(namespace: str) -> Names:
    return Names(namespace)


@pytest.fixture
def turns(names: Names) -> Iterator[Turns]:
    """Another follower's."""
    prepare(names, Access())
    made = Turns.of(names)
    assert made is not None
    with made:
        yield made


@pytest.mark.leaves_segments
def test_chunks_are_registered_in_turns_with_other_followers(
    cuda: FakeCuda, opened: Open, names: Names, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinner_module, "_TURN_S", BOUND_S)
    host = opened(turns=lambda: Turns.of(names))
    assert host.pinned_bytes == CHUNK, "the first takes no turn"
    asked = threading.Event()
    real = Turns._take

    def take(self: Turns, *arguments: Any) -> bool:
        asked.set()
        return real(self, *arguments)

    with turns.turn(Deadline.after(0)) as ours:
        assert ours
        monkeypatch.setattr(Turns, "_take", take)
        host.want([(host.addresses[name], EXTENTS[name].nbytes) for name in ("across", "late")])
        assert asked.wait(BOUND_S)
        assert host.pinned_bytes == CHUNK
    eventually("the rest", lambda: host.pinned_bytes == 11 * PAGE)
    _settle(host)
    with turns.turn(Deadline.after(0)) as ours:
        assert ours, "given back"


@pytest.mark.leaves_segments
def test_one_that_stands_still_with_its_turn_is_waited_for_once(
    cuda: FakeCuda, opened: Open, names: Names, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinner_module, "_TURN_S", 0.01)
    asked: list[int] = []
    real = Turns.turn

    def turn(*arguments: Any) -> Any:
        asked.append(1)
        return real(*arguments)

    monkeypatch.setattr(Turns, "turn", turn)
    with turns.turn(Deadline.after(0)):
        host = opened(turns=lambda: Turns.of(names))
        asked.clear()
        _want(host, "across", "late", "other")
    assert host.pinned_bytes == 13 * PAGE
    assert len(asked) == 1


@pytest.mark.leaves_segments
def test_closing_ends_the_wait_for_a_turn(
    cuda: FakeCuda, opened: Open, names: Names, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinner_module, "_TURN_S", 1e6)
    with turns.turn(Deadline.after(0)):
        host = opened(turns=lambda: Turns.of(names))
        host.want([(host.addresses["late"], PAGE)])
        bounded(host.close)
    assert not _pinning()


# --- with a link -------------------------------------------------------------------------------------------------

NAMES = [name for name in EXTENTS if name != "empty"]
ACTIONS = st.one_of(
    st.tuples(st.just("want"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)),
    st.tuples(st.just("register"), st.integers(1, 3)),  # so many registrations go on
    st.tuples(st.just("copy"), st.sampled_from(NAMES), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("gpu"), st.integers(1, 5)),
)


@given(
    actions=st.lists(ACTIONS, max_size=30),
    seed=st.integers(0, 2**16),
    refuse_at=st.integers(0, 5),
    changed=st.sampled_from([None, "small", "across"]),
)
def test_bytes_are_right_however_registration_and_copies_meet(
    actions: list[tuple[Any, ...]], seed: int, refuse_at: int, changed: str | None
) -> None:
    """Against a model that knows only which tensor was copied to which place last."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as stack:
        cuda = FakeCuda(seed=seed, refuse_at=refuse_at)
        threads = _patch(monkeypatch, cuda)
        monkeypatch.setattr(slots, "SLOT_BYTES", PAGE)
        monkeypatch.setattr(pull, "THREADS", 2)
        weights = _weights()
        if changed is not None:
            weights.view(changed).data.add_(1)
        expected_of = {name: _raw(weights.view(name)) for name in NAMES}
        host = shared_host(weights, NAMES, pin=True, device=GPU)
        stack.callback(host.close)
        allowed = threading.Semaphore(0)
        stack.callback(allowed.release, 1000)  # before the host is closed

        def before(name: str, _count: int) -> None:
            if name == "register" and threading.current_thread() in _pinning():
                assert allowed.acquire(timeout=BOUND_S)

        cuda.before = before
        link = CudaLink(GPU, cuda, host.reach)
        stack.callback(link.close)
        places = [ctypes.create_string_buffer(3 * PAGE) for _ in range(2)]
        read: list[bool] = []

        def compare(place: int, name: str) -> None:
            read.append(places[place].raw[: len(expected_of[name])] == expected_of[name])

        count = 0
        for action, *arguments in actions:
            if action == "want":
                host.want([(host.addresses[name], EXTENTS[name].nbytes) for name in arguments[0]])
            elif action == "register":
                allowed.release(arguments[0])
            elif action == "gpu":
                for _ in range(arguments[0]):
                    cuda.step()
            else:
                name, place, is_read = arguments
                at = ctypes.addressof(places[place])
                ticket = link.submit(host.split(Copy(at, host.addresses[name], EXTENTS[name].nbytes)))
                if is_read:
                    bounded(lambda ticket=ticket: link.wait(ticket))  # type: ignore[misc]
                    cuda.compute(threads.stream, lambda p=place, n=name: compare(p, n))  # type: ignore[misc]
                    count += 1
        bounded(link.drain)
        cuda.run()
        assert read == [True] * count
        allowed.release(1000)
        bounded(link.close)
        bounded(host.close)
        eventually("the thread's end", lambda: not _pinning())
        assert (cuda.registered, cuda.streams, cuda.events) == ({}, set(), set())
        assert all(not mapped.users for mapped in weights.shared)


def test_unregistered_memory_is_never_read_by_the_gpu_where_slots_are(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    cuda.refuse_at = 2
    host = opened()
    link = CudaLink(GPU, cuda, host.reach)
    place = ctypes.create_string_buffer(3 * PAGE)
    _want(host, "late")
    for name in NAMES:
        parts = host.split(Copy(ctypes.addressof(place), host.addresses[name], EXTENTS[name].nbytes))
        bounded(lambda parts=parts: link.wait(link.submit(parts)))  # type: ignore[misc]
    bounded(link.drain)
    for _, src, nbytes, _ in cuda.named("memcpy"):
        assert any(at <= src and src + nbytes <= at + size for at, (size, _) in cuda.registered.items())
    bounded(link.close)
    with pytest.raises(LinkError):
        link.submit([])


def test_what_only_another_model_registered_is_not_read_by_the_gpu(
    weights: SharedWeights, cuda: FakeCuda, opened: Open
) -> None:
    """It may undo that at any time: its own copies alone are waited for."""
    other, host = opened(["across"]), opened(["late", "across"])
    _want(other, "across")
    _want(host, "late")
    assert host.reach is not None and host.reach.complete
    link, place = CudaLink(GPU, cuda, host.reach), ctypes.create_string_buffer(2 * PAGE)
    base, nbytes = ctypes.addressof(place), EXTENTS["across"].nbytes
    ticket = link.submit(host.split(Copy(base, host.addresses["across"], nbytes)))
    bounded(lambda: link.wait(ticket))
    other.close()
    bounded(link.drain)
    assert place.raw == _raw(weights.view("across"))
    pages = weights.shared[0]
    assert not any(pages.address <= src < pages.address + pages.nbytes for _, src, *_ in cuda.named("memcpy"))
    bounded(link.close)


def test_the_grid_has_no_gaps(weights: SharedWeights, cuda: FakeCuda, opened: Open) -> None:
    host = opened()
    base = weights.shared[0].address
    inside = [border for border in host._borders if base <= border < base + weights.shared[0].nbytes]
    assert inside[0] == base
    assert all(two - one == CHUNK for one, two in pairwise(inside))
