"""A bound model made resident: on the CPU here, where the copies are real as well."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ftd.errors import BindError, UsageError
from ftd_client.bind import bind, fit
from ftd_client.load.move import move
from ftd_client.load.placement import Placement
from ftd_client.meta import meta_parameters
from ftd_client.walk import walk
from tests.unit.client.weights import DictWeights, bits


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.LSTM(5, 5))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.arange(3), persistent=False)
    return model


def _bound() -> tuple[nn.Module, DictWeights]:
    weights = DictWeights(_model().state_dict(keep_vars=True))
    with meta_parameters():
        model = _model()
    bind(model, weights)
    return model, weights


def test_the_cpu_gets_private_aligned_memory_and_keeps_every_bit() -> None:
    model, weights = _bound()
    model[0].bias.requires_grad_(False)
    model[0].weight.note = "kept"
    report = move(model, Placement("cpu"))
    # three buffers of the norm and the table are private and on the CPU already
    assert report.tensors == len(walk(model).parameters)
    assert report.bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert (report.device, report.way) == ("cpu", "copy")
    assert report.seconds >= 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert bits(tensor) == bits(weights.view(name))
        assert tensor.data_ptr() % 64 == 0
        assert tensor.data_ptr() != weights.view(name).data_ptr()
    assert not model[0].bias.requires_grad
    assert model[0].weight.requires_grad
    assert model[0].weight.note == "kept"
    assert "to cpu" in str(report)


def test_a_model_on_meta_gets_memory_of_its_own_at_once() -> None:
    weights = DictWeights(_model().state_dict(keep_vars=True))
    with meta_parameters():
        model = _model()
    model[2].register_buffer("empty", torch.empty(0, device="meta"), persistent=False)
    table = model.table
    model[0].bias.requires_grad_(False)
    model[0].weight.note = "kept"
    report = move(model, Placement("cpu"), given=fit(model, weights))
    bind(copy.deepcopy(model), weights)  # refuses other values
    taken = [group.tensor for group in walk(model).groups() if group.tensor is not table]
    copied = [group.tensor for group in walk(model).parameters]
    assert (report.tensors, report.bytes) == (len(copied), sum(tensor.nbytes for tensor in copied))
    assert not {tensor.data_ptr() for tensor in taken if tensor.nbytes} & {
        tensor.data_ptr() for tensor in weights.tensors.values()
    }
    assert model[0].weight is model[1].weight
    assert model.table is table
    assert model[3]._flat_weights[0] is model[3].weight_ih_l0
    assert model[0].weight.note == "kept"
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]


def test_ties_are_one_copy() -> None:
    """OF-13."""
    model, _ = _bound()
    groups = [group.names for group in walk(model).groups()]
    move(model, Placement("cpu"))
    assert [group.names for group in walk(model).groups()] == groups
    assert model[0].weight is model[1].weight


def test_a_moved_model_computes_and_no_longer_reads_the_weights() -> None:
    model, weights = _bound()
    move(model, Placement(torch.device("cpu")))
    model.eval()
    given = torch.ones(2, 5)
    before, _ = model(given)
    for tensor in weights.tensors.values():
        tensor.zero_()
    after, _ = model(given)
    assert bits(before) == bits(after)


def test_a_tensor_on_meta_or_a_subclass_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2, affine=False)})
    model["c"] = nn.LazyLinear(2)
    with pytest.raises(BindError) as caught:
        move(model, Placement("cpu"))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "a.weight",
        "a.bias",
        "c.weight",
        "c.bias",
        "b.running_mean",
        "b.running_var",
        "b.num_batches_tracked",
    ]


@pytest.mark.parametrize("device", ["meta", "cuda:0"])
def test_a_device_that_holds_nothing_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model, _ = _bound()
    before = model[0].weight
    with pytest.raises(UsageError, match=device):
        move(model, Placement(device))
    assert model[0].weight is before


@pytest.mark.parametrize("bound", [True, False])
def test_running_out_of_memory_half_way_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    model, weights = _bound()
    given = None
    if not bound:
        with meta_parameters():
            model = _model()
        given = fit(model, weights)
    before = [id(group.tensor) for group in walk(model).groups()]
    copies = 0
    clone = torch.Tensor.clone

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        if copies == 3:
            raise torch.OutOfMemoryError("no memory")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", failing)
    with pytest.raises(torch.OutOfMemoryError):
        move(model, Placement("cpu"), given=given)
    assert [id(group.tensor) for group in walk(model).groups()] == before


def test_a_model_may_be_moved_in_inference_mode_and_written_to_later() -> None:
    model, _ = _bound()
    with torch.inference_mode():
        move(model, Placement("cpu"))
    with torch.no_grad():
        model[0].weight.add_(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gets_one_copy_of_everything() -> None:
    """OF-13, MD-03: ties counted once, buffers on the device of the parameters; moving again does nothing."""
    model, weights = _bound()
    model.ballast = nn.Parameter(torch.ones(1 << 20))
    model.ballast_too = model.ballast
    names = [group.names for group in walk(model).groups()]
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated(device)
    report = move(model, Placement("cuda"))
    groups = walk(model).groups()
    unique_bytes = sum(group.tensor.nbytes for group in groups)
    assert (report.tensors, report.bytes, report.device) == (len(groups), unique_bytes, "cuda")
    # the allocator rounds each tensor up to 512 bytes
    assert unique_bytes <= torch.cuda.memory_allocated(device) - before <= unique_bytes + 512 * len(groups)
    assert [group.names for group in groups] == names
    assert {group.tensor.device for group in groups} == {device}
    for name in weights.specs:
        assert bits(model.state_dict()[name].cpu()) == bits(weights.view(name))
    assert model[0].weight.requires_grad
    assert move(model, Placement(device)).tensors == 0
    del groups  # which hold the tensors on the GPU
    back = move(model, Placement("cpu"))
    assert back.bytes == unique_bytes
    assert torch.cuda.memory_allocated(device) == before
