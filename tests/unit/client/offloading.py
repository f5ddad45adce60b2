"""What the tests of offloaded models share: a model, a configuration on the CPU, and equality bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client import OffloadConfig, OffloadManager
from ftd_client.strategy import AllStreamed
from ftd_client.stream.cpu_link import CpuLink
from ftd_client.stream.link import Link, Reach
from tests.streamed_blocks import D, Stack, blocks

NAME = "test"


def x(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(rows))


def stack(*layers: nn.Module, kind: type[Stack] = Stack, count: int = 4) -> Stack:
    """In eval mode; no two of its weights are alike."""
    torch.manual_seed(5)
    model = kind(*(layers or blocks(count))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def config(**fields: Any) -> OffloadConfig:
    """Everything streams, through as little memory as can be, and nothing takes long."""
    usual: dict[str, Any] = {
        "include_patterns": ["layers.*"],
        "pinned_memory": False,
        "num_blocks": 2,
        "min_blocks": 2,
        "load_strategy": AllStreamed(),
        "profiling_iters": 2,
    }
    return OffloadConfig(**(usual | fields))


def offloaded(model: nn.Module, name: str = NAME, **fields: Any) -> OffloadManager:
    ftd_client.offload(model, config(**fields), name)
    return ftd_client.get_offload_manager(name)


def beside(model: nn.Module, **fields: Any) -> tuple[OffloadManager, nn.Module]:
    """The manager of the offloaded model, and a resident one of the same weights."""
    resident = copy.deepcopy(model)
    return offloaded(model, **fields), resident


def run(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return model(*(args or (x(),)))


def equal(model: nn.Module, resident: nn.Module, *args: Any) -> bool:
    return torch.equal(run(model, *args), run(resident, *args))


def to_inference(manager: OffloadManager, model: nn.Module) -> None:
    for _ in range(manager.iters_before_inference):
        run(model)
    assert manager.phase == "inference"


def untouched(model: nn.Module, before: Sequence[tuple[str, nn.Parameter]]) -> bool:
    """Whether the model is as it was before it was offloaded: its parameters, and no hook."""
    now = list(model.named_parameters())
    return (
        [name for name, _ in now] == [name for name, _ in before]
        and all(one is other for (_, one), (_, other) in zip(now, before, strict=True))
        and not any("forward" in vars(module) for module in model.modules())
    )


@pytest.fixture
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


def use_link(monkeypatch: pytest.MonkeyPatch, make: Callable[[], CpuLink]) -> list[Link]:
    """Models are offloaded over links that `make` makes; those that it has made."""
    made: list[Link] = []

    def open_link(device: torch.device, reach: Reach | None) -> Link:
        made.append(make())
        return made[-1]

    monkeypatch.setattr("ftd_client.stream.staged.open_link", open_link)
    return made
