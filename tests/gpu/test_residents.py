"""What stays on a GPU, and streams that compute: plans take turns while kernels of several streams still read."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client import OffloadConfig, OffloadManager
from ftd_client.strategy import Plan, Problem, assemble, workloads
from ftd_client.stream import residents
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.memory import bytes_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)
NAME = "residents"
#: 50 ms on a GPU of 2 GHz: longer than a plan takes to follow another one.
CYCLES = 100_000_000
WIDTH, LAYERS = 1024, 8
EVERY = range(LAYERS)


class Told:
    """A strategy that streams the layers it is told to."""

    def __init__(self) -> None:
        self.streamed: set[str] = set()

    def plan(self, problem: Problem) -> Plan:
        work = workloads(problem)[-1]
        streamed = [i for i in work.streamable if work.problem.blocks[work.parts[i][0]].layer in self.streamed]
        return assemble(work, streamed, work.smallest().ring_bytes if streamed else 0, "as told")


class Replanned:
    """A model, its resident twin, and a profile of it that is taken again and again: each time another plan follows."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(6)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in EVERY]
        self.model = nn.Sequential(*layers).requires_grad_(False).eval()
        self.twin = copy.deepcopy(self.model).to(GPU)
        self.xs = list(torch.randn(6, 8, WIDTH, device=GPU))
        with torch.inference_mode():
            self.expected = [self.twin(x) for x in self.xs]
        torch.cuda.synchronize(GPU)
        self._told = Told()
        self._directory = directory
        self.manager: OffloadManager = ftd_client.get_offload_manager(NAME)
        config = OffloadConfig(
            include_patterns=["*"],
            num_blocks=2,
            min_blocks=2,
            profiling_iters=1,
            max_gpu_mem_fraction=0.5,
            load_strategy=self._told,
        )
        ftd_client.offload(self.model, config, NAME)
        with torch.inference_mode():
            while self.manager.iters_before_inference:
                self.model(self.xs[0])
        self.manager.save_profile(directory)
        self.nbytes = sum(p.nbytes for p in self.twin.parameters())
        self.plans = self.manager._offloaded.plans  # type: ignore[union-attr]

    def replan(self, resident: set[int]) -> None:
        self._told.streamed = {str(layer) for layer in set(EVERY) - resident}
        self.manager.load_profile(self._directory)
        assert set(self.manager.resident_units()) == {str(layer) for layer in resident}


@pytest.fixture
def replanned(tmp_path: Path) -> Iterator[Replanned]:
    yield Replanned(tmp_path)
    ftd_client.release(NAME)


def test_filled_before_any_stream_reads(replanned: Replanned, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is put to work under one stream, and the forward runs on another that never waits for the first."""
    submit = CudaLink.submit

    def late(self: CudaLink, copies: object) -> object:
        with torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device=self.device)):
            torch.cuda._sleep(CYCLES)
        return submit(self, copies)  # type: ignore[arg-type]

    replanned.replan(set())
    monkeypatch.setattr(CudaLink, "submit", late)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        replanned.replan(set(EVERY))
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(GPU)):
        found = [replanned.model(x) for x in replanned.xs]
    torch.cuda.synchronize(GPU)
    assert all(map(torch.equal, found, replanned.expected))


def test_moved_before_any_stream_reads(replanned: Replanned, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of what stays and is moved. The layers alone are called: what streams would wait in their place."""

    def late(tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return bytes_of(tensor)

    stays = [0, 3]
    x = replanned.xs[0]
    replanned.replan(set(EVERY) - {1, 2})  # with a ring, whose memory is room for what is moved
    monkeypatch.setattr(residents, "bytes_of", late)
    with torch.inference_mode():
        expected = [replanned.twin[i](x) for i in stays]
        before = [replanned.model[i].weight.data_ptr() for i in stays]
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            replanned.replan(set(stays))
        assert [replanned.model[i].weight.data_ptr() for i in stays] != before
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            found = [replanned.model[i](x) for i in stays]
    torch.cuda.synchronize(GPU)
    assert all(map(torch.equal, found, expected))


def test_freed_after_every_stream_has_read(replanned: Replanned) -> None:
    """Kernels of a stream that nothing else waits for read what is resident, and the next plan's ring lies there."""
    replanned.replan(set(EVERY))
    was = range(at := replanned.model[0].weight.data_ptr(), at + replanned.nbytes)
    torch.cuda.empty_cache()  # so that there is no other place for the ring
    stream = torch.cuda.Stream(GPU)
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20 * CYCLES)  # a second: the next plan is read and made meanwhile
            behind = [replanned.model(x) for x in replanned.xs]
            read = stream.record_event()
        replanned.replan(set())
        assert read.query()
        assert replanned.plans.installed().ring.address in was
        found = [replanned.model(x) for x in replanned.xs]
    torch.cuda.synchronize(GPU)
    assert all(map(torch.equal, behind, replanned.expected))
    assert all(map(torch.equal, found, replanned.expected))


@pytest.mark.parametrize("seed", range(8))
def test_plans_and_streams_that_take_turns(replanned: Replanned, seed: int) -> None:
    """Plans and streams as they are drawn; nobody waits but for the last of all forwards."""
    draw = random.Random(seed)
    streams = [torch.cuda.Stream(GPU), torch.cuda.Stream(GPU), torch.cuda.default_stream(GPU)]
    found: list[tuple[int, torch.Tensor]] = []
    with torch.inference_mode():
        for _ in range(40):
            with torch.cuda.stream(draw.choice(streams)):
                share = draw.choice((0.0, 0.3, 0.7, 1.0))
                replanned.replan({layer for layer in EVERY if draw.random() < share})
            for _ in range(draw.randrange(4)):
                with torch.cuda.stream(draw.choice(streams)):
                    if draw.random() < 0.5:
                        torch.cuda._sleep(draw.randrange(CYCLES // 40))
                    i = draw.randrange(len(replanned.xs))
                    found.append((i, replanned.model(replanned.xs[i])))
        torch.cuda.synchronize(GPU)
    assert [i for i, y in found if not torch.equal(y, replanned.expected[i])] == []
