"""Every model of the suite on a GPU: the resident model's bits from the first forward on, in every mode and phase."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch

import ftd_client
from ftd_client import OffloadConfig
from ftd_client.strategy import AllStreamed
from tests.streamed_models import CASES, made
from tests.unit.client.test_offload_models import WAYS, run, same

NAME = "gpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda", 0)
HOSTS = {"pinned": {}, "registered": {"pinned_memory_mode": "host_register"}, "pageable": {"pinned_memory": False}}


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_resident_model(name: str, way: str) -> None:
    check(name, WAYS[way])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["llama", "many_tiny_layers", "mixture"])
def test_whatever_the_host_memory(name: str, host: str) -> None:
    check(name, HOSTS[host])


def check(name: str, way: dict[str, object]) -> None:
    case = made(name)
    if case.shared and way.get("transfer_mode") != "strategy":
        return  # block modes refuse it by name, which the CPU suite tests
    resident = copy.deepcopy(case.model).to(GPU)
    calls = [call.to(GPU) for call in case.calls]
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    fields = {"num_blocks": 2, "min_blocks": 2, "load_strategy": AllStreamed(), "profiling_iters": 2} | way
    model = ftd_client.offload(case.model, OffloadConfig(include_patterns=list(case.include), **fields), NAME)
    manager = ftd_client.get_offload_manager(NAME)
    for _ in range(manager.iters_before_inference + 3):
        for call in calls:
            assert same(run(call, model), run(call, resident)), (manager.phase, call)
    ftd_client.release(NAME)
    after = model.state_dict()
    assert all(value.device == after[key].device and torch.equal(after[key], value) for key, value in before.items())


def test_memory_is_what_the_allocator_shows() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4096, 8192, dtype=torch.bfloat16)
            self.down = torch.nn.Linear(8192, 4096, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    model = torch.nn.Sequential(*(Layer() for _ in range(10))).eval()
    x = torch.randn(4, 4096, dtype=torch.bfloat16, device=GPU)
    with torch.no_grad():
        torch.nn.functional.linear(x, torch.zeros(8, 4096, dtype=torch.bfloat16, device=GPU))  # cuBLAS's workspace
    gc.collect()
    before = torch.cuda.memory_allocated(GPU)
    total = torch.cuda.get_device_properties(GPU).total_memory
    fraction = (before + 900e6) / total
    ftd_client.offload(model, OffloadConfig(include_patterns=["*"], max_gpu_mem_fraction=fraction), NAME)
    manager = ftd_client.get_offload_manager(NAME)
    with torch.no_grad():
        for _ in range(manager.iters_before_inference + 1):
            torch.cuda.reset_peak_memory_stats(GPU)
            model(x)
            peak = torch.cuda.max_memory_allocated(GPU)
            usage = manager.get_gpu_memory_usage().total_bytes
            shown = torch.cuda.memory_allocated(GPU) - before
            assert abs(usage - shown) <= 0.01 * shown, (manager.phase, usage, shown)
    assert peak <= fraction * total * 1.0001
    assert usage > 0.85 * 900e6  # it uses what it is given
    ftd_client.release(NAME)
    del model
    gc.collect()
    assert torch.cuda.memory_allocated(GPU) <= before + 2**20
