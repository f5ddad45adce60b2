"""Tensors that several places share: one copy of them, refused by name where a mode moves whole layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client.stream.units import OffloadError
from tests.streamed_blocks import Block, D

from .offloading import NAME, beside, config, equal, offloaded, released, run, stack, to_inference, untouched, x

pytestmark = pytest.mark.usefixtures(released.__name__)
BLOCK_MODES = ["allocation_block_transfer", "raw_block_transfer"]
MODES = [*BLOCK_MODES, "strategy"]


def linear() -> nn.Linear:
    return nn.Linear(D, D, bias=False)


def tied_across() -> nn.Module:
    model = stack(linear(), Block(), linear(), Block())
    model.layers[2].weight = model.layers[0].weight
    return model


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_block_modes_refuse_what_layers_share_and_name_it(mode: str) -> None:
    model = tied_across()
    before = list(model.named_parameters())
    with pytest.raises(OffloadError, match=r"layers\.0\.weight.* in layers\.0 and layers\.2") as caught:
        ftd_client.offload(model, config(transfer_mode=mode), NAME)
    assert "transfer_mode='strategy'" in caught.value.remedy
    assert untouched(model, before)
    assert ftd_client.get_offload_manager(NAME).phase == "idle"


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_excluding_all_but_one_of_the_layers_is_a_way_out(mode: str) -> None:
    model = tied_across()
    manager, resident = beside(model, transfer_mode=mode, exclude_patterns=["layers.2"])
    for _ in range(5):
        assert equal(model, resident)
    assert "layers.0" not in manager.offload_units()


@pytest.mark.parametrize("mode", ["view", "getter", "torch_function"])
def test_strategy_keeps_one_copy_of_it_on_the_device(mode: str) -> None:
    model = tied_across()
    manager, resident = beside(model, transfer_mode="strategy", profile_mode=mode)
    for _ in range(5):
        assert equal(model, resident)
        assert model.layers[2].weight is model.layers[0].weight
    assert manager.resident_units() == ["layers.0.weight"]
    plan, usage = manager.plan, manager.get_gpu_memory_usage()
    assert plan is not None
    assert plan.resident_bytes == 4 * D * D, "its bytes count once"
    assert usage.total_bytes == usage.blocks_bytes + plan.resident_bytes + usage.unmapped_tensors_bytes
    ftd_client.release(NAME)
    assert model.layers[2].weight is model.layers[0].weight
    assert equal(model, resident)


@pytest.mark.parametrize("mode", MODES)
def test_a_tie_within_a_layer_is_no_matter(mode: str) -> None:
    model = stack(*(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(3)))
    for layer in model.layers:
        layer[2].weight = layer[0].weight
    manager, resident = beside(model, transfer_mode=mode)
    for _ in range(5):
        assert equal(model, resident)
    assert len(manager.resident_units()) == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_tie_with_what_is_not_managed_is_on_the_device_once(mode: str) -> None:
    model = stack(linear(), Block(), Block())
    model.head = linear()
    model.head.weight = model.layers[0].weight
    manager, resident = beside(model, transfer_mode=mode)
    for _ in range(5):
        assert equal(model, resident)
    assert manager.get_gpu_memory_usage().unmapped_tensors_bytes == 4 * D * D
    assert "layers.0" not in manager.offload_units()
    ftd_client.release(NAME)
    assert model.head.weight is model.layers[0].weight


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_share_bytes_and_are_no_tie_keep_their_values(mode: str) -> None:
    """Views of one storage that overlap: each is a tensor of its own, as its module reads it."""
    flat = torch.randn(2 * D * D)
    model = stack(linear(), linear(), linear())
    for at, layer in enumerate(model.layers):
        layer.weight = nn.Parameter(flat[at * 64 : at * 64 + D * D].view(D, D))
    manager, resident = beside(model, transfer_mode=mode)
    for _ in range(5):
        assert equal(model, resident)
    assert set(manager.offload_units()) == {"layers.0", "layers.1", "layers.2"}
    ftd_client.release(NAME)
    assert equal(model, resident)


def test_parameters_of_equal_values_are_no_tie() -> None:
    model = stack(linear(), linear(), linear())
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.fill_(0.25)
    manager = offloaded(model)
    to_inference(manager, model)
    assert len(manager.offload_units()) == 3
    run(model, x())
