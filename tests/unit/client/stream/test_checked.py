"""Diagnostics find weights that code changed past their version counters, and change nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client import OffloadConfig
from ftd_client.strategy import AllStreamed
from ftd_client.stream.checked import CheckedStream
from ftd_client.stream.runtime import Stream
from ftd_client.stream.units import OffloadError
from tests.streamed_models import made
from tests.unit.client.test_offload_models import run, same

NAME = "checked"
D = 16


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    ftd_client.release(NAME)


class Layer(nn.Linear):
    """A layer that does something with its weight before it computes, and may call another one meanwhile."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.__dict__["act"] = lambda layer: None
        self.__dict__["inner"] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self)
        if self.inner is not None:
            x = self.inner(x)
        return super().forward(x)


def stack(count: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(count))).requires_grad_(False)


def offload(model: nn.Module, *, diagnostics: bool = True, include: tuple[str, ...] = ("*",)) -> nn.Module:
    config = OffloadConfig(
        include_patterns=list(include),
        pinned_memory=False,
        load_strategy=AllStreamed(),
        num_blocks=2,
        min_blocks=2,
        profiling_iters=1,
        enable_diagnostics=diagnostics,
    )
    return ftd_client.offload(model, config, NAME)


def stream() -> Stream:
    return ftd_client.get_offload_manager(NAME)._offloaded.plans.running.installed.stream


def settled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Runs to the inference phase; the output."""
    for _ in range(ftd_client.get_offload_manager(NAME).iters_before_inference):
        model(x)
    return model(x)


def by_data(layer: Layer) -> None:
    layer.weight.data[3, 5] += 1


def by_numpy(layer: Layer) -> None:
    layer.weight.detach().numpy()[3, 5] += 1


def by_address(layer: Layer) -> None:
    ctypes.memset(layer.weight.data_ptr() + D * D * 4 - 1, 0x7F, 1)  # the last byte


WRITES = [by_data, by_numpy, by_address]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_a_turn_raises_and_is_gone_afterwards(write: Callable[[Layer], None]) -> None:
    model, x = offload(stack()), torch.randn(2, D)
    expected = settled(model, x)
    model[2].__dict__["act"] = write
    with pytest.raises(OffloadError, match=r"2\.weight: changed while it was on the device"):
        model(x)
    model[2].__dict__["act"] = lambda layer: None
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("write", WRITES)
def test_without_diagnostics_nobody_looks(write: Callable[[Layer], None]) -> None:
    """What the other tests rest on: these writes are past the version counter."""
    model, x = offload(stack(), diagnostics=False), torch.randn(2, D)
    settled(model, x)
    assert type(stream()) is Stream
    model[2].__dict__["act"] = write
    model(x)


def test_a_write_between_turns_raises_when_its_block_is_reached() -> None:
    model, x = offload(stack()), torch.randn(2, D)
    expected = settled(model, x)
    assert type(stream()) is CheckedStream
    stream().join()
    first = stream().steps[0]
    ctypes.memset(first.bindings[0].view.data_ptr(), 0x7F, 1)
    with pytest.raises(OffloadError, match=r"^0\.weight: found with other bytes than it first came"):
        model(x)
    assert torch.equal(model(x), expected)  # it was copied anew since


def test_a_block_called_by_another_ones_forward_is_checked_too() -> None:
    model, x = offload(stack()), torch.randn(2, D)
    while ftd_client.get_offload_manager(NAME).iters_before_inference:
        model(x)
    model[1].__dict__["inner"] = model[4]  # not before: what is reached twice in discovery stays resident
    # the first forward of its stream: it comes inside of the other one before it has come by itself
    reached: list[nn.Module] = []
    model[2].__dict__["act"] = reached.append
    model[4].__dict__["act"] = by_data
    with pytest.raises(OffloadError, match=r"4\.weight: changed while it was on the device"):
        model(x)
    assert not reached
    model[4].__dict__["act"] = lambda layer: None
    ftd_client.release(NAME)
    expected = model(x)
    assert torch.equal(settled(offload(model), x), expected)


#: What a check may disturb: odd bytes to digest, blocks entered inside of others, missed, never left.
ODD = ["strides", "odd_shapes", "mixed_dtypes", "nested_layers", "recursive", "again_later", "reordered", "early_exit",
       "submodule_called", "borrowed_weight", "multihead_attention", "tied_within"]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_nothing_else_is_different(name: str) -> None:
    case = made(name)
    expected = [run(call, case.model) for call in case.calls]
    model = offload(case.model, include=case.include)
    for _ in range(ftd_client.get_offload_manager(NAME).iters_before_inference + 2):
        for call, output in zip(case.calls, expected, strict=True):
            assert same(run(call, model), output)
