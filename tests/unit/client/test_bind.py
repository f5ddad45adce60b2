"""What is bound, from which bytes and of which type."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ftd.clock import monotonic_ns
from ftd_client.bind import DtypeChange, bind
from ftd_client.meta import meta_parameters

from .models import Toy, meta, net, problems_of, values
from .weights import DictWeights, bits


def test_parameters_are_views_and_persistent_buffers_private_copies() -> None:
    reference = net()
    reference[1].running_mean.fill_(3.5)
    weights = DictWeights(reference.state_dict())
    model = meta(net)
    model[0].bias.requires_grad_(False)
    model[2].weight.note = "kept"
    report = bind(model, weights)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
        assert parameter.data_ptr() == weights.tensors[name].data_ptr()
        assert bits(parameter) == bits(reference.get_parameter(name))
        assert parameter.requires_grad is (name != "0.bias")
    for name, buffer in model.named_buffers():
        assert bits(buffer) == bits(reference.get_buffer(name))
        assert buffer.data_ptr() != weights.tensors[name].data_ptr()
    assert model[2].weight.note == "kept"
    assert report.bound == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert report.cloned == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert report.bound_bytes == sum(parameter.nbytes for parameter in reference.parameters())
    given = torch.ones(2, 3)
    assert bits(model.eval()(given)) == bits(reference.eval()(given))


def test_each_view_is_built_once_and_none_for_a_plan_that_fails() -> None:
    weights = DictWeights({**net().state_dict(), "stray": torch.ones(1)})
    problems_of(meta(net), weights)
    assert weights.asked == []
    bind(meta(net), weights, strict=False)
    assert sorted(weights.asked) == sorted(set(weights.tensors) - {"stray"})


def test_a_scalar_stays_a_scalar() -> None:
    """ST-03."""
    model = meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(()))]))
    bind(model, DictWeights({"0": torch.tensor(2.5)}))
    assert model[0].shape == ()
    assert model[0].item() == 2.5
    (line,) = problems_of(
        meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(()))])), DictWeights({"0": torch.ones(1)})
    )
    assert line == "0: (1,) of F32 found in the checkpoint, () of float32 expected"


def test_the_checkpoints_type_wins_and_is_listed() -> None:
    """MD-08."""
    tensors = {name: tensor.bfloat16() for name, tensor in net().state_dict().items() if tensor.is_floating_point()}
    tensors["0.bias"] = torch.ones(4)
    tensors["1.num_batches_tracked"] = torch.tensor(0)
    model = meta(net)
    report = bind(model, DictWeights(tensors))
    assert model[0].weight.dtype == model[1].running_mean.dtype == torch.bfloat16
    assert model[0].bias.dtype == torch.float32
    changed = {change.name for change in report.dtype_changes}
    assert changed == set(tensors) - {"0.bias", "1.num_batches_tracked"}
    assert DtypeChange("0.weight", torch.float32, torch.bfloat16) in report.dtype_changes
    assert "0.weight: float32 → bfloat16" in str(report)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
@pytest.mark.parametrize("built", [torch.float32, None])
def test_integer_parameters_are_attached_without_gradients(dtype: torch.dtype, built: torch.dtype | None) -> None:
    """MD-09: whether the model knew the type or not."""
    values = torch.tensor([1, 0, 1], dtype=dtype)
    declared = built or dtype

    def build() -> nn.Module:
        model = nn.ParameterList(
            [nn.Parameter(torch.empty(3, dtype=declared), requires_grad=declared.is_floating_point)]
        )
        model.register_buffer("mask", torch.empty(2, dtype=torch.bool))
        return model

    model = meta(build)
    mask = torch.tensor([True, False])
    bind(model, DictWeights({"0": values, "mask": mask}))
    assert not model[0].requires_grad
    assert bits(model[0]) == bits(values)
    assert bits(model.mask) == bits(mask)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.complex64])
def test_floating_and_complex_parameters_keep_requires_grad(dtype: torch.dtype) -> None:
    values = torch.arange(4.0).to(dtype)
    for wanted in (True, False):
        model = meta(lambda w=wanted: nn.ParameterList([nn.Parameter(torch.empty(4), requires_grad=w)]))
        bind(model, DictWeights({"0": values}))
        assert model[0].requires_grad is wanted
        assert bits(model[0]) == bits(values)


def test_non_persistent_buffers_stay_and_their_names_in_the_checkpoint_are_ignored() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("position_ids", torch.arange(4), persistent=False)
        return model

    with meta_parameters():
        model = build()
    before = model.position_ids
    report = bind(model, DictWeights({**values(build()), "position_ids": torch.zeros(9)}))
    assert model.position_ids is before
    assert report.ignored == ("position_ids",)
    assert report.left == ("position_ids",)
    assert "ignored, non-persistent: 1 (position_ids)" in str(report)


def test_plain_attributes_on_meta_are_listed() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.scale = torch.ones(1)
        model.__dict__["weight_too"] = model.weight
    report = bind(model, DictWeights(values(nn.Linear(2, 2))))
    assert report.meta_attributes == ("scale",)
    assert model.weight_too is model.weight


def test_a_bound_model_converts_and_copies_without_touching_the_weights() -> None:
    """MD-10."""
    reference = net()
    weights = DictWeights(values(reference))
    before = {name: bits(tensor) for name, tensor in weights.tensors.items()}
    for change in (copy.deepcopy, nn.Module.half, nn.Module.cpu, lambda m: m.to("cpu", torch.float64)):
        model = meta(net)
        bind(model, weights)
        changed = change(model)
        with torch.no_grad():
            if changed[0].weight.data_ptr() != weights.tensors["0.weight"].data_ptr():
                changed[0].weight.add_(1)
        assert not any(parameter.is_meta for parameter in changed.parameters())
    assert {name: bits(tensor) for name, tensor in weights.tensors.items()} == before


def test_binding_works_under_inference_mode_and_under_a_meta_default_device() -> None:
    weights = DictWeights(values(net()))
    model = meta(net)
    with torch.inference_mode(), torch.device("meta"):
        bind(model, weights)
    model[1].running_mean.add_(1)
    assert not model[0].weight.is_inference()


def test_a_report_reads_well() -> None:
    model = meta(lambda: Toy(tied=True))
    report = bind(model, DictWeights({"embed.weight": torch.ones(7, 4), "x": torch.ones(1)}), strict=False)
    assert str(report).splitlines() == [
        "1 parameter bound (112 B), 1 tie kept",
        "buffers: 0 cloned, 0 recomputed, 0 left",
        "unexpected, left out: 1 (x)",
    ]


def test_binding_takes_less_time_than_torchs_own_way() -> None:
    """A thousand parameters; both in the same process, so that the machine and its load don't matter."""

    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))) for _ in range(170))
        return nn.Sequential(*blocks)

    weights = DictWeights(values(build()))
    ours, torchs = [], []
    for _ in range(5):
        for times, way in (
            (ours, lambda model: bind(model, weights)),
            (torchs, lambda model: model.load_state_dict(weights.tensors, assign=True)),
        ):
            model = meta(build)
            began_ns = monotonic_ns()
            way(model)
            times.append(monotonic_ns() - began_ns)
    assert min(ours) < min(torchs)
