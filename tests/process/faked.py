"""A worker whose model streams to a GPU that is a fake: real daemon, real segments, and CUDA as it may refuse."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ftd.cuda.runtime import CudaError
from ftd_client.load import pull, slots
from ftd_client.phase import replanning
from ftd_client.strategy import Plan, Problem, assemble, workloads
from ftd_client.stream import pinner, shared, source, staged
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.link import Copy, Reach, Ticket
from tests.fake_cuda import FakeCuda
from tests.process import streaming
from tests.process.daemons import PATIENCE_S
from tests.unit.client.load.served import eventually
from tests.unit.client.stream.fakes import Threads

GPU = torch.device("cuda", 0)
#: Of the grid: 16 chunks in the model of the tests.
CHUNK_BYTES = 64 * 1024


class Link(CudaLink):
    """Into memory of the CPU, which the fake takes for a GPU's. Its compute runs at once: so all that it was told to
    wait for is done when it is told."""

    def __init__(self, cuda: FakeCuda, threads: Threads, reach: Reach | None) -> None:
        super().__init__(GPU, cuda, reach)
        self.device = torch.device("cpu")
        self._fake, self._threads = cuda, threads
        self.staged = self.direct = 0

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        ticket = super().submit(copies)
        if hasattr(ticket, "batch"):
            self.staged += 1
        else:
            self.direct += bool(copies)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        super().wait(ticket)
        self._fake.stream_synchronize(self._threads.stream)


class Gpu:
    """Until the worker's end.

    Attributes:
        go: registrations of the thread wait for it.
        reached: one of them does.
    """

    def __init__(self, refuse: str, limit: int) -> None:
        self.cuda, patch = FakeCuda(), pytest.MonkeyPatch()
        self.threads = Threads(self.cuda, patch)
        self.go, self.reached = threading.Event(), threading.Event()
        self.links: list[Link] = []
        patch.setattr(shared, "load_runtime", self.cuda.load)
        patch.setattr(source, "load_runtime", self.cuda.load)
        patch.setattr(torch.cuda, "synchronize", lambda _device: self.cuda.run())
        patch.setattr(pinner, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(slots, "SLOT_BYTES", CHUNK_BYTES // 4)
        patch.setattr(pull, "UNIT_BYTES", CHUNK_BYTES)
        patch.setattr(staged, "open_link", self._open)
        # with a budget the first plan is the strategy's own
        patch.setattr(replanning, "budget_bytes", lambda *_, **__: 1 << 40)
        host = source.SharedSource.host
        patch.setattr(source.SharedSource, "host", lambda it, blocks, _device: host(it, blocks, GPU))
        self.cuda.before = self._before
        self._refuse(refuse, limit)

    def _open(self, _device: torch.device, reach: Reach | None) -> Link:
        self.links.append(Link(self.cuda, self.threads, reach))
        return self.links[-1]

    def _before(self, name: str, _count: int) -> None:
        if name == "register" and threading.current_thread().name == "ftd-pin":
            self.reached.set()
            assert self.go.wait(PATIENCE_S)

    def _refuse(self, what: str, limit: int) -> None:
        real, cuda = self.cuda.host_register, self.cuda
        total = count = 0

        def register(address: int, nbytes: int, *, read_only: bool = False) -> None:
            nonlocal total, count
            count += read_only
            refused = {
                "": False,
                "all": True,
                "read_only": read_only,
                "nth": read_only and count == limit,
                "above": read_only and nbytes > limit,
                "total": read_only and total + nbytes > limit,
            }[what]
            if refused:
                raise CudaError("cudaHostRegister: out of memory (error 2)")
            real(address, nbytes, read_only=read_only)
            total += nbytes * read_only

        if what == "unsupported":
            cuda.read_only = False
        else:
            cuda.host_register = register  # type: ignore[method-assign]

    @property
    def registered_bytes(self) -> int:
        return sum(nbytes for nbytes, read_only in self.cuda.registered.values() if read_only)


_gpu: list[Gpu] = []


def offload(namespace: str, size: tuple[int, int], refuse: str = "", limit: int = 0) -> None:
    """The second half of the model streams, and nothing but the first chunk is registered before `go`."""
    _gpu[:] = [Gpu(refuse, limit)]
    streaming.offload(namespace, size, pinned_memory=True, load_strategy=FirstHalfResident())


class FirstHalfResident:
    """So that it is known which chunks are wanted."""

    name = "first_half_resident"

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[0]
        return assemble(work, work.streamable[len(work.streamable) // 2 :], work.ring_cap, self.name)


def go() -> None:
    """Registration goes on; returns at its end."""
    _gpu[0].go.set()
    eventually("the thread's end", lambda: not [t for t in threading.enumerate() if t.name == "ftd-pin"])


def await_registration() -> None:
    """Returns when the thread is in the midst of one, with the turn of the namespace."""
    assert _gpu[0].reached.wait(PATIENCE_S)


def release_in_the_midst() -> None:
    releasing = threading.Thread(target=streaming.release)
    releasing.start()
    eventually("it to stop", lambda: any(_stopped()))
    _gpu[0].go.set()
    releasing.join(PATIENCE_S)
    assert not releasing.is_alive()


def _stopped() -> list[bool]:
    return [each._stop.is_set() for each in pinner._alive]


def facts() -> dict[str, Any]:
    gpu = _gpu[0]
    return {
        "registered": gpu.registered_bytes,
        "staged": sum(link.staged for link in gpu.links),
        "direct": sum(link.direct for link in gpu.links),
        "way": streaming.manager()._offloaded.plans.residents.way,
        "contexts": sorted(gpu.cuda.contexts),
    }


def nothing_left() -> bool:
    """After `release`."""
    gpu = _gpu[0]
    names = [t.name for t in threading.enumerate() if t.name in ("ftd-pin", "ftd-stage")]
    return not (gpu.cuda.registered or gpu.cuda.streams or gpu.cuda.events or names)
