"""Streaming on a GPU against time: late copies, slow kernels, several streams and threads, graphs, long runs."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import nn

import ftd_client
from ftd.errors import NotBuiltError
from ftd_client import OffloadConfig
from ftd_client.strategy import AllStreamed
from ftd_client.stream.cuda_link import CudaLink

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)
NAME = "streams"
#: 5 ms on a GPU of 2 GHz: longer than all copies of these models together.
CYCLES = 10_000_000
WIDTH = 512


class Layer(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        return x + self.down(torch.relu(self.up(x)))


def built(layers: int, cycles: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    model = nn.Sequential(*(Layer(cycles) for _ in range(layers))).requires_grad_(False).eval()
    return model, copy.deepcopy(model).to(GPU)


def offloaded(model: nn.Module, **fields: object) -> nn.Module:
    few = {"num_blocks": 2, "min_blocks": 2, "profiling_iters": 2, "load_strategy": AllStreamed()}
    return ftd_client.offload(model, OffloadConfig(include_patterns=["*"], **(few | fields)), NAME)


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return list(torch.randn(count, 8, WIDTH, device=GPU))


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


@pytest.mark.parametrize("late", [lambda n: True, lambda n: n % 7 == 3], ids=["every", "one_in_seven"])
def test_late_copies(monkeypatch: pytest.MonkeyPatch, late: object) -> None:
    """OF-04: the copy stream is held up in front of copies, so that compute has to wait for each."""
    submit, count = CudaLink.submit, 0

    def slow(self: CudaLink, copies: object) -> object:
        nonlocal count
        count += 1
        if late(count):  # type: ignore[operator]
            with torch.cuda.stream(torch.cuda.ExternalStream(self.stream, device=self.device)):
                torch.cuda._sleep(CYCLES // 10)
        return submit(self, copies)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaLink, "submit", slow)
    model, resident = built(12)
    offloaded(model)
    with torch.inference_mode():
        for x in inputs(20):
            assert torch.equal(model(x), resident(x))
    assert count > 20


def test_slow_kernels() -> None:
    """OF-01: many small layers, each behind a slow kernel, two slots: a place is never reused before compute ends."""
    model, resident = built(24, CYCLES // 100)
    offloaded(model)
    with torch.inference_mode():
        xs = inputs(200)
        found = [model(x) for x in xs]  # queued without looking, so that the host runs far ahead
        assert all(torch.equal(y, resident(x)) for x, y in zip(xs, found, strict=True))


def test_streams_that_take_turns() -> None:
    model, resident = built(12, CYCLES // 200)
    offloaded(model)
    streams = [torch.cuda.Stream(GPU), torch.cuda.Stream(GPU), torch.cuda.default_stream(GPU)]
    with torch.inference_mode():
        xs = inputs(60)
        torch.cuda.synchronize(GPU)
        found = []
        for i, x in enumerate(xs):
            with torch.cuda.stream(streams[i % 3]):
                found.append(model(x))
        torch.cuda.synchronize(GPU)
        assert all(torch.equal(y, resident(x)) for x, y in zip(xs, found, strict=True))


def test_threads() -> None:
    model, resident = built(12, CYCLES // 200)
    offloaded(model)
    xs = inputs(40)
    with torch.inference_mode():
        expected = [resident(x) for x in xs]
    torch.cuda.synchronize(GPU)
    wrong: list[int] = []

    def work(part: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(GPU)):
            for i in range(part, len(xs), 4):
                y = model(xs[i])
                torch.cuda.current_stream(GPU).synchronize()
                if not torch.equal(y, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_capture_is_refused() -> None:
    """OF-06: refused before anything is captured; the model is usable afterwards."""
    model, resident = built(4)
    offloaded(model)
    x = inputs(1)[0]
    with torch.inference_mode():
        for _ in range(5):
            model(x)
        torch.cuda.synchronize(GPU)
        with pytest.raises(NotBuiltError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
        assert torch.equal(model(x), resident(x))


def test_two_managers() -> None:
    """OF-18, on one GPU: each has its link, ring and events."""
    one, one_resident = built(6)
    other, other_resident = built(9)
    offloaded(one)
    try:
        ftd_client.offload(other, OffloadConfig(include_patterns=["*"], num_blocks=2, min_blocks=2), NAME + "2")
        with torch.inference_mode():
            for x in inputs(20):
                assert torch.equal(one(x), one_resident(x))
                assert torch.equal(other(x), other_resident(x))
    finally:
        ftd_client.release(NAME + "2")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    """OF-18: current device 0 while the target is 1; both at once."""
    models = [built(6) for _ in range(2)]
    try:
        for i, (model, _) in enumerate(models):
            ftd_client.offload(model, OffloadConfig(include_patterns=["*"], gpu_device=i), f"{NAME}{i}")
        with torch.inference_mode():
            for x in inputs(10):
                for i, (model, resident) in enumerate(models):
                    y = model(x.to(f"cuda:{i}"))
                    assert y.device.index == i
                    assert torch.equal(y.to(GPU), resident(x))
    finally:
        for i in range(2):
            ftd_client.release(f"{NAME}{i}")


def test_two_thousand_forwards_and_a_hundred_attachments_leave_nothing() -> None:
    process = psutil.Process()
    x = inputs(1)[0]

    def facts() -> tuple[int, int, int, int]:
        gc.collect()
        torch.cuda.synchronize(GPU)
        return (
            process.num_fds(),
            process.num_threads(),
            len(process.memory_maps(grouped=False)),
            process.memory_info().rss,
        )

    def cycle(forwards: int) -> int:
        model, resident = built(4)
        offloaded(model)
        with torch.inference_mode():
            for _ in range(forwards):
                y = model(x)
            assert torch.equal(y, resident(x))
        ftd_client.release(NAME)
        gc.collect()
        return torch.cuda.memory_allocated(GPU)

    for _ in range(5):
        allocated = cycle(5)
    before = facts()
    cycle(2000)
    for _ in range(100):
        assert cycle(5) == allocated
    after = facts()
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2] + 10
    assert after[3] - before[3] < 32 * 2**20, (before, after)
