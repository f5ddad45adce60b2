"""What of a device's memory a plan may take: of a GPU by its allocator, of the CPU by what the system has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftd.units import GIB, MIB
from ftd_client.phase import budget as module
from ftd_client.phase.budget import Activations, budget_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB of which others hold 30 and torch 20, with 16 of those in use."""
    gpu = SimpleNamespace(total=80 * GIB, free=30 * GIB, reserved=20 * GIB, allocated=16 * GIB, peak=0, resets=0)
    asked: list[Any] = []

    def of(value: str) -> Any:
        def tell(device: torch.device) -> Any:
            asked.append(device)
            return getattr(gpu, value)

        return tell

    def reset(device: torch.device) -> None:
        asked.append(device)
        gpu.resets += 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gpu.total))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu.free, gpu.total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", of("allocated"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of("reserved"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of("peak"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    gpu.asked = asked
    return gpu


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    memory = SimpleNamespace(total=1000, available=600)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    return memory


def test_without_a_fraction_there_is_none(gpu: SimpleNamespace) -> None:
    assert budget_bytes(None, GPU, ours=0, others=0, activation_bytes=0) is None
    assert budget_bytes(None, CPU, ours=0, others=0, activation_bytes=0) is None


def test_of_a_gpu_the_fraction_is_of_all_and_the_rest_of_the_process_is_taken_off(gpu: SimpleNamespace) -> None:
    found = budget_bytes(0.5, GPU, ours=6 * GIB, others=99, activation_bytes=3 * GIB)
    assert found == 40 * GIB - (16 - 6) * GIB - 3 * GIB
    assert set(gpu.asked) == {GPU}, "of the device that was asked for"


def test_what_others_hold_on_the_gpu_caps_it(gpu: SimpleNamespace) -> None:
    found = budget_bytes(0.9, GPU, ours=0, others=0, activation_bytes=0)
    assert found == (30 + 20) * GIB - 16 * GIB


def test_while_activations_are_unmeasured_a_share_is_kept_free(gpu: SimpleNamespace) -> None:
    gpu.allocated = 0
    assert budget_bytes(0.5, GPU, ours=0, others=0, activation_bytes=None) == 40 * GIB - 40 * GIB // 16
    small = budget_bytes(0.01, GPU, ours=0, others=0, activation_bytes=None)
    assert small == int(0.01 * 80 * GIB) - 64 * MIB


def test_it_is_never_below_nothing(gpu: SimpleNamespace, host: SimpleNamespace) -> None:
    assert budget_bytes(1e-9, GPU, ours=0, others=0, activation_bytes=None) == 0
    assert budget_bytes(1e-9, CPU, ours=0, others=50, activation_bytes=None) == 0


def test_of_the_cpu_what_is_not_managed_is_taken_off_and_ours_counts_as_free(host: SimpleNamespace) -> None:
    assert budget_bytes(0.5, CPU, ours=0, others=30, activation_bytes=None) == 500 - 30
    assert budget_bytes(0.5, CPU, ours=0, others=30, activation_bytes=20) == 500 - 30 - 20
    host.available = 100
    assert budget_bytes(0.5, CPU, ours=0, others=30, activation_bytes=None) == 100
    assert budget_bytes(0.5, CPU, ours=70, others=30, activation_bytes=None) == 170


def test_activations_are_the_highest_peak_beyond_what_was_there(gpu: SimpleNamespace) -> None:
    activations = Activations(GPU)
    assert activations.peak_bytes is None
    for allocated, peak in ((100, 150), (300, 320), (10, 15)):
        gpu.allocated, gpu.peak = allocated, peak
        activations.begin()
        activations.finish()
    assert activations.peak_bytes == 50
    assert gpu.resets == 3


def test_on_the_cpu_nobody_tells_of_activations() -> None:
    activations = Activations(CPU)
    activations.begin()
    torch.ones(1000)
    activations.finish()
    assert activations.peak_bytes is None
