"""The link and the host on a real GPU: bits, order under delays, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ftd.cuda import pin
from ftd.cuda.pin import Region, register
from ftd.cuda.runtime import READ_ONLY_REGISTRATION, CudaError, Cudart, load_runtime
from ftd.errors import NotBuiltError
from ftd.shm.segment import Access, Segment
from ftd.units import MIB
from ftd_client.stream import pinner
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.host import own_host
from ftd_client.stream.link import Copy, LinkError
from ftd_client.stream.links import open_link
from ftd_client.stream.shared import shared_host
from ftd_client.views import SharedWeights
from tests.unit.client.load.served import eventually
from tests.unit.client.stream.test_shared import EXTENTS, Manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

GPU = torch.device("cuda", 0)
#: Of torch.cuda._sleep; about 50 ms at 1–2 GHz, far longer than anything that could overtake.
LATE_CYCLES = 100_000_000
BOUND_S = 30


@pytest.fixture
def link() -> Iterator[CudaLink]:
    made = open_link(GPU)
    assert isinstance(made, CudaLink)
    yield made
    made.close()
    torch.cuda.synchronize()


@pytest.fixture
def cuda() -> Cudart:
    found, reason = load_runtime()
    assert isinstance(found, Cudart), reason
    return found


def late(link: CudaLink) -> None:
    """Holds up the copies submitted from now on."""
    with torch.cuda.stream(torch.cuda.ExternalStream(link.stream, device=link.device)):
        torch.cuda._sleep(LATE_CYCLES)


def _copy(place: torch.Tensor, source: torch.Tensor) -> Copy:
    return Copy(place.data_ptr(), source.data_ptr(), source.nbytes)


def _sources(count: int, each: int = MIB) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32).unsqueeze(1).expand(count, each).contiguous().pin_memory()


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_arrive(link: CudaLink, pinned: bool) -> None:
    source = torch.randint(0, 255, (5 * MIB + 3,), dtype=torch.uint8)
    source = source.pin_memory() if pinned else source
    place = torch.zeros_like(source, device=GPU)
    link.wait(link.submit([_copy(place, source)]))
    assert torch.equal(place.cpu(), source)


def test_compute_waits_for_late_copies_and_copies_for_late_compute(link: CudaLink) -> None:
    """One place, used 20 times in turn, whichever side is late."""
    sources, place = _sources(20), torch.full((MIB,), -1, dtype=torch.int32, device=GPU)
    out = torch.empty(20, MIB, dtype=torch.int32, device=GPU)
    torch.cuda.synchronize()
    for i in range(20):
        if i % 3 == 0:
            late(link)
        if i % 3 == 1:
            torch.cuda._sleep(LATE_CYCLES)
        link.wait(link.submit([_copy(place, sources[i])]))
        out[i].copy_(place)
    assert torch.equal(out.cpu(), sources)


def test_streams_that_take_turns_do_not_overtake(link: CudaLink) -> None:
    """The second stream waits for an older ticket only, and writes what the first is still to read."""
    first, second = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    source, place = _sources(1)[0], torch.full((MIB,), 7, dtype=torch.int32, device=GPU)
    out = torch.empty_like(place)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        ticket = link.submit([_copy(place, source)])
        link.wait(ticket)
        torch.cuda._sleep(LATE_CYCLES)
        out.copy_(place)
    with torch.cuda.stream(second):
        link.wait(ticket)
        place.fill_(9)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), source)


def test_threads_with_streams_of_their_own(link: CudaLink) -> None:
    sources, places = _sources(4), torch.zeros(4, MIB, dtype=torch.int32, device=GPU)
    wrong = torch.zeros(4, dtype=torch.int64, device=GPU)
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            for _ in range(50):
                places[i].fill_(-1)
                link.wait(link.submit([_copy(places[i], sources[i])]))
                wrong[i] += (places[i] != i).sum()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0, 0]


def test_drain_waits_for_copies_and_for_the_compute_behind_them(link: CudaLink) -> None:
    source, place = _sources(1)[0], torch.zeros(MIB, dtype=torch.int32, device=GPU)
    link.submit([_copy(place, source)])
    for _ in range(10):
        torch.cuda._sleep(LATE_CYCLES)
    end = torch.cuda.Event()
    end.record()
    link.drain()
    assert end.query(), "memory is freed next, which compute may still read"


def test_a_capture_is_refused_and_stays_whole(link: CudaLink) -> None:
    source, place = _sources(1)[0], torch.zeros(MIB, dtype=torch.int32, device=GPU)
    ticket = link.submit([_copy(place, source)])
    link.wait(ticket)
    value = torch.zeros(4, device=GPU)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(NotBuiltError):
            link.submit([_copy(place, source)])
        with pytest.raises(NotBuiltError):
            link.wait(ticket)
    graph.replay()
    assert value.tolist() == [1.0] * 4
    link.wait(link.submit([_copy(place, source)]))
    assert torch.equal(place.cpu(), source)


def test_host_cost(link: CudaLink) -> None:
    source, place = torch.zeros(1024).pin_memory(), torch.zeros(1024, device=GPU)
    copies = [_copy(place, source)]
    best_us = float("inf")
    for _ in range(20):
        link.drain()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            link.wait(link.submit(copies))
        best_us = min(best_us, (time.perf_counter() - start) * 1e4)
    print(f"submit and wait: {best_us:.1f} µs of host time")
    assert best_us <= 20, "10 is the aim on a quiet machine"


def test_links_leave_nothing(cuda: Cudart) -> None:
    source, place = torch.ones(1024).pin_memory(), torch.zeros(1024, device=GPU)
    free: list[int] = []
    for i in range(300):
        made = open_link(GPU)
        tickets = [made.submit([_copy(place, source)]) for _ in range(20)]
        made.close()
        made.wait(tickets[-1])
        with pytest.raises(LinkError):
            made.submit([])
        if i in (99, 299):
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info(GPU)[0])
    assert free[1] >= free[0]


def test_a_refused_call_leaves_no_error_for_torch(link: CudaLink, cuda: Cudart) -> None:
    """CU-01."""
    place, source = torch.zeros(16, device=GPU), torch.ones(16).pin_memory()
    with pytest.raises(CudaError, match="cudaMemcpyAsync"):
        link.submit([Copy(0, source.data_ptr(), 64)])
    assert not cuda.event_query(_pending_event(link))
    assert torch.ones(3, device=GPU).sum().item() == 3
    link.wait(link.submit([_copy(place, source)]))
    assert place.sum().item() == 16


def _pending_event(link: CudaLink) -> int:
    late(link)
    ticket = link.submit([])
    return ticket.event  # type: ignore[attr-defined,no-any-return]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_link_to_another_device_than_the_current_one() -> None:
    torch.cuda.set_device(0)
    other = torch.device("cuda", 1)
    made = open_link(other)
    source = torch.arange(1024.0).pin_memory()
    place = torch.zeros(1024, device=other)
    made.wait(made.submit([_copy(place, source)]))
    assert torch.equal(place.cpu(), source)
    assert torch.cuda.current_device() == 0
    made.close()


# --- hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["torch", "host_register"])
def test_own_tensors_arrive_over_borders_of_registrations(
    link: CudaLink, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "CHUNK_BYTES", 256 * 1024)
    tensors = {f"w{i}": torch.randn(300_000 + i).to(torch.bfloat16) for i in range(6)}
    tensors["permuted"] = torch.randn(64, 32, 16).permute(2, 0, 1)
    groups = [list(tensors.items())[:3], list(tensors.items())[3:]]
    host = own_host(groups, pinned=True, mode=mode, device=GPU)  # type: ignore[arg-type]
    assert (host.kind, host.warnings) == ("cuda", [])
    assert all(tensor.is_pinned() for tensor in host.tensors.values())
    for name, tensor in tensors.items():
        place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        parts = host.split(Copy(place.data_ptr(), host.addresses[name], tensor.nbytes))
        assert mode == "torch" or len(parts) > 1 or name == "permuted"
        link.wait(link.submit(parts))
        assert torch.equal(place.cpu(), tensor), name
    link.drain()
    host.close()
    assert torch.ones(3, device=GPU).sum().item() == 3


@pytest.fixture
def weights() -> Iterator[SharedWeights]:
    mappings, pages = [], []
    for nbytes in (15 * 4096, 2 * 4096):
        with Segment.create(f"/ftdw.{uuid.uuid4().hex}", nbytes, Access()) as segment:
            segment.write(os.urandom(nbytes))
            mappings.append(segment.map_private())
            pages.append(segment.map_shared())
            segment.unlink()
    yield SharedWeights(Manifest(EXTENTS), mappings, pages)  # type: ignore[arg-type]


def test_shared_weights_arrive_from_read_only_pages(
    cuda: Cudart, weights: SharedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are registered, and after: through slots, directly, and from the page that was changed."""
    monkeypatch.setattr(pinner, "CHUNK_BYTES", 4 * 4096)
    weights.view("small").data.add_(1)
    names = [name for name, extent in EXTENTS.items() if extent.nbytes]
    expected = {name: weights.view(name).clone() for name in names}
    supported = bool(cuda.device_attribute(READ_ONLY_REGISTRATION, 0))
    hosts = [shared_host(weights, names, pin=True, device=GPU) for _ in range(2)]
    for host in hosts:
        assert host.kind == ("cuda" if supported else "staged"), host.warnings
        made = open_link(GPU, host.reach)
        host.want([(host.addresses[name], EXTENTS[name].nbytes) for name in names])
        for is_settled in (False, True):
            if is_settled and supported:
                eventually("all to be registered", lambda host=host: host.pinned_bytes == 13 * 4096)  # type: ignore[misc]
            for name in names:
                place = torch.zeros(EXTENTS[name].nbytes, dtype=torch.uint8, device=GPU)
                made.wait(made.submit(host.split(Copy(place.data_ptr(), host.addresses[name], place.nbytes))))
                assert torch.equal(place.cpu(), expected[name]), name
        made.close()
        host.close()
    assert _anonymous_bytes() <= 4096, "the private mapping was not copied by pinning"
    assert torch.ones(3, device=GPU).sum().item() == 3


def _anonymous_bytes() -> int:
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = "/dev/shm/ftdw." in line
        elif ours and head[0] == "Anonymous:":
            total += int(head[1]) * 1024
    return total


def test_registering_twice_is_refused_and_forgotten(cuda: Cudart) -> None:
    memory = torch.zeros(4 * MIB, dtype=torch.uint8)
    region = Region(memory.data_ptr() & ~4095, 2 * MIB)
    with torch.cuda.device(GPU):
        one = register(cuda, [region])
        two = register(cuda, [region])
        assert (one.kind, two.kind, len(two.warnings)) == ("cuda", "none", 1)
        assert torch.ones(3, device=GPU).sum().item() == 3
        one.close()
        again = register(cuda, [region])
        assert again.kind == "cuda"
        again.close()


def test_a_forked_child_is_refused(link: CudaLink) -> None:
    ticket = link.submit([])
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                link.wait(ticket)
            except LinkError:
                link.close()
                status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    link.wait(ticket)
