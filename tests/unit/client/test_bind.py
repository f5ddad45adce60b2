"""Parameters and buffers of one model from one set of weights: what is bound, and all that is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ftd.errors import BindError, InternalError
from ftd.tensorspec import TensorSpec
from ftd_client.bind import DtypeChange, bind
from ftd_client.meta import meta_parameters
from ftd_client.walk import walk

from .weights import DictWeights, bits


def _meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Toy(nn.Module):
    """A language model with a head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def _problems(model: nn.Module, weights: DictWeights, **options: bool) -> list[str]:
    """The lines of the refusal; the model must be as it was, to the object."""
    before = [(group.names, id(group.tensor)) for group in walk(model).groups()]
    with pytest.raises(BindError) as caught:
        bind(model, weights, **options)
    assert [(group.names, id(group.tensor)) for group in walk(model).groups()] == before
    assert caught.value.remedy
    return list(caught.value.problems)


def test_parameters_are_views_and_persistent_buffers_private_copies() -> None:
    reference = _net()
    reference[1].running_mean.fill_(3.5)
    weights = DictWeights(reference.state_dict())
    model = _meta(_net)
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
    weights = DictWeights({**_net().state_dict(), "stray": torch.ones(1)})
    _problems(_meta(_net), weights)
    assert weights.asked == []
    bind(_meta(_net), weights, strict=False)
    assert sorted(weights.asked) == sorted(set(weights.tensors) - {"stray"})


def test_every_difference_is_told_at_once() -> None:
    tensors = _net().state_dict()
    del tensors["0.bias"], tensors["1.running_var"]
    tensors["0.weight"] = torch.ones(4, 9)
    tensors["stray"] = torch.ones(2, dtype=torch.int64)
    weights = DictWeights(tensors)
    weights.specs["2.weight"] = TensorSpec("2.weight", "F4", (2, 4))
    model = _meta(_net)
    model[2].bias = nn.Parameter(torch.zeros(2))
    problems = _problems(model, weights)
    assert problems[0] == "0.weight: (4, 9) of F32 found in the checkpoint, (4, 3) of float32 expected"
    assert problems[1] == "0.bias: nothing found in the checkpoint, (4,) of float32 expected"
    assert problems[2].startswith("tensor '2.weight' has element type F4, which torch")
    assert problems[3] == "2.bias: a real parameter on cpu found, one on meta expected"
    assert problems[4] == "1.running_var: nothing found in the checkpoint, (4,) of float32 expected"
    assert problems[5] == "stray: (2,) of I64 found, no place in the model"
    assert len(problems) == 6


def test_the_text_of_a_refusal_is_capped_and_the_list_is_not() -> None:
    model = _meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(30))))
    with pytest.raises(BindError) as caught:
        bind(model, DictWeights({}))
    error = caught.value
    assert len(error.problems) == 60
    assert "60 differences found" in error.message
    lines = str(error).splitlines()
    assert len(lines) == 1 + BindError.SHOWN + 2
    assert lines[-2].endswith("… and 40 more")
    assert lines[-1].startswith("  → ")
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, str(again)) == (error.problems, str(error))


def test_strict_false_tolerates_unexpected_names_and_lists_them() -> None:
    tensors = {**_net().state_dict(), "stray.a": torch.ones(1), "stray.b": torch.ones(1)}
    report = bind(_meta(_net), DictWeights(tensors), strict=False)
    assert report.unexpected == ("stray.a", "stray.b")
    del tensors["0.bias"]
    assert _problems(_meta(_net), DictWeights(tensors), strict=False) == [
        "0.bias: nothing found in the checkpoint, (4,) of float32 expected"
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_persistent_buffer_is_refused_even_when_it_is_real(strict: bool) -> None:
    tensors = _net().state_dict()
    del tensors["1.running_mean"]
    with meta_parameters():
        model = _net()
    lines = _problems(model, DictWeights(tensors), strict=strict)
    assert lines == ["1.running_mean: nothing found in the checkpoint, (4,) of float32 expected"]


@pytest.mark.parametrize("kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
@pytest.mark.parametrize("stored_tie", [True, False])
def test_a_tie_is_one_parameter_whichever_names_the_checkpoint_holds(kept: list[str], stored_tie: bool) -> None:
    """MD-04."""
    values = torch.randn(7, 4)
    weights = DictWeights({name: values if stored_tie else values.clone() for name in kept})
    model = _meta(lambda: Toy(tied=True))
    report = bind(model, weights)
    assert model.head.weight is model.embed.weight
    assert bits(model.head.weight) == bits(values)
    assert report.tied == (("embed.weight", "head.weight"),)
    assert report.bound == ("embed.weight",)
    assert report.bound_bytes == values.nbytes


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(7, 4),
        torch.full((7, 4), -0.0),  # equal as numbers, not as bits
        torch.zeros(7, 4, dtype=torch.float16),
    ],
)
def test_a_tie_with_two_values_is_refused(other: torch.Tensor) -> None:
    """MD-06: the head of the checkpoint is never thrown away."""
    values = torch.zeros(7, 4)
    values[0, 0] = 1 if bits(other) == bits(values) else 0
    weights = DictWeights({"embed.weight": values, "head.weight": other})
    (line,) = _problems(_meta(lambda: Toy(tied=True)), weights)
    assert line.startswith("head.weight: ")
    assert "those of embed.weight (F32) expected" in line


def test_a_tie_of_equal_nans_is_kept() -> None:
    weights = DictWeights({name: torch.full((7, 4), torch.nan) for name in ("embed.weight", "head.weight")})
    bind(_meta(lambda: Toy(tied=True)), weights)


def test_a_missing_head_is_named() -> None:
    """MD-06, the other way round."""
    model = _meta(lambda: Toy(tied=False))
    lines = _problems(model, DictWeights({"embed.weight": torch.ones(7, 4)}))
    assert lines == ["head.weight: nothing found in the checkpoint, (7, 4) of float32 expected"]


def test_one_extent_may_serve_two_parameters_that_are_not_tied() -> None:
    values = torch.randn(7, 4)
    model = _meta(lambda: Toy(tied=False))
    report = bind(model, DictWeights({"embed.weight": values, "head.weight": values}))
    assert model.head.weight is not model.embed.weight
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert report.shared == (("embed.weight", "head.weight"),)
    assert report.bound_bytes == values.nbytes


def test_empty_tensors_share_nothing() -> None:
    """ST-01: both lie at address 0, with shapes and types of their own."""
    model = _meta(
        lambda: nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0, dtype=torch.float16))])
    )
    shared = torch.empty(0)
    weights = DictWeights({"0": shared, "1": torch.empty(3, 0, dtype=torch.float16)})
    weights._extents["1"] = weights._extents["0"]
    report = bind(model, weights)
    assert report.shared == ()
    assert report.bound_bytes == 0
    assert model[0] is not model[1]
    assert (model[1].shape, model[1].dtype) == ((3, 0), torch.float16)


def test_a_scalar_stays_a_scalar() -> None:
    """ST-03."""
    model = _meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(()))]))
    bind(model, DictWeights({"0": torch.tensor(2.5)}))
    assert model[0].shape == ()
    assert model[0].item() == 2.5
    (line,) = _problems(
        _meta(lambda: nn.ParameterList([nn.Parameter(torch.empty(()))])), DictWeights({"0": torch.ones(1)})
    )
    assert line == "0: (1,) of F32 found in the checkpoint, () of float32 expected"


def test_the_checkpoints_type_wins_and_is_listed() -> None:
    """MD-08."""
    tensors = {name: tensor.bfloat16() for name, tensor in _net().state_dict().items() if tensor.is_floating_point()}
    tensors["0.bias"] = torch.ones(4)
    tensors["1.num_batches_tracked"] = torch.tensor(0)
    model = _meta(_net)
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

    model = _meta(build)
    mask = torch.tensor([True, False])
    bind(model, DictWeights({"0": values, "mask": mask}))
    assert not model[0].requires_grad
    assert bits(model[0]) == bits(values)
    assert bits(model.mask) == bits(mask)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.complex64])
def test_floating_and_complex_parameters_keep_requires_grad(dtype: torch.dtype) -> None:
    values = torch.arange(4.0).to(dtype)
    for wanted in (True, False):
        model = _meta(lambda w=wanted: nn.ParameterList([nn.Parameter(torch.empty(4), requires_grad=w)]))
        bind(model, DictWeights({"0": values}))
        assert model[0].requires_grad is wanted
        assert bits(model[0]) == bits(values)


def test_real_parameters_need_replace_and_so_does_binding_again() -> None:
    weights = DictWeights(_net().state_dict())
    lines = _problems(_net(), weights)
    assert lines == [
        f"{name}: a real parameter on cpu found, one on meta expected" for name, _ in _net().named_parameters()
    ]
    model = _meta(_net)
    bind(model, weights)
    assert len(_problems(model, weights)) == 6
    newer = DictWeights(_net().state_dict())
    report = bind(model, newer, replace=True)
    assert len(report.bound) == 6
    assert model[0].weight.data_ptr() == newer.tensors["0.weight"].data_ptr()


class Packed(nn.Parameter):
    """Stands for a 4-bit parameter: a packed shape, and a state attribute that moving would drop."""

    def __new__(cls, data: torch.Tensor) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = "scales"
        return made


class Wrapped(torch.Tensor):
    """Stands for a quantised tensor subclass."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("replace", [True, False])
def test_subclasses_are_refused_by_name(device: str, replace: bool) -> None:
    """OF-09, OF-10."""
    data = torch.ones(2, 2, device=device)
    model = nn.Module()
    model.packed = Packed(data)
    model.wrapped = nn.Parameter(data.as_subclass(Wrapped), requires_grad=False)
    model.lazy = nn.LazyLinear(2, bias=False)
    model.register_buffer("scale", data.as_subclass(Wrapped))
    names = ["packed", "wrapped", "lazy.weight", "scale"]
    lines = _problems(model, DictWeights({name: torch.ones(2, 2) for name in names}), replace=replace)
    assert [line.split(":")[0] for line in lines] == names
    assert "test_bind.Packed found, plain Parameter expected" in lines[0]
    assert "test_bind.Wrapped found, plain Tensor expected" in lines[3]


def test_a_parameter_that_is_a_buffer_too_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("again", model.weight, persistent=False)
    (line,) = _problems(model, DictWeights({"weight": torch.ones(2, 2)}), replace=True)
    assert line == "again: a Parameter found in a buffer's place, plain Tensor expected"


def test_non_persistent_buffers_stay_and_their_names_in_the_checkpoint_are_ignored() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("position_ids", torch.arange(4), persistent=False)
        return model

    with meta_parameters():
        model = build()
    before = model.position_ids
    report = bind(model, DictWeights({**_values(build()), "position_ids": torch.zeros(9)}))
    assert model.position_ids is before
    assert report.ignored == ("position_ids",)
    assert report.left == ("position_ids",)
    assert "ignored, non-persistent: 1 (position_ids)" in str(report)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def test_tied_buffers_are_cloned_once() -> None:
    def build() -> nn.Module:
        model = nn.ModuleList([nn.Module(), nn.Module()])
        table = torch.arange(3.0)
        model[0].register_buffer("t", table)
        model[1].register_buffer("t", table)
        return model

    model = _meta(build)
    report = bind(model, DictWeights({"1.t": torch.ones(3)}))
    assert model[0].t is model[1].t
    assert report.cloned == ("0.t",)
    assert report.tied == (("0.t", "1.t"),)
    assert bits(model[0].t) == bits(torch.ones(3))


class Extra(nn.Linear):
    """Keeps state beside its tensors."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("bind must not set it")


@pytest.mark.parametrize("stored", [True, False])
def test_extra_state_is_never_set_and_never_silent(stored: bool) -> None:
    tensors = {"weight": torch.ones(1, 1), **({"_extra_state": torch.zeros(1)} if stored else {})}
    (line,) = _problems(_meta(Extra), DictWeights(tensors))
    assert line.startswith("_extra_state: state that the module keeps beside tensors")
    report = bind(_meta(Extra), DictWeights(tensors), strict=False)
    assert report.left == ("_extra_state",)
    assert report.unexpected == (("_extra_state",) if stored else ())


def test_plain_attributes_on_meta_are_listed() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.scale = torch.ones(1)
        model.__dict__["weight_too"] = model.weight
    report = bind(model, DictWeights(_values(nn.Linear(2, 2))))
    assert report.meta_attributes == ("scale",)
    assert model.weight_too is model.weight


def test_weights_that_give_another_tensor_than_they_said_are_a_bug() -> None:
    weights = DictWeights(_values(nn.Linear(2, 2)))
    weights.tensors["bias"] = torch.ones(2, dtype=torch.float64)
    model = _meta(lambda: nn.Linear(2, 2))
    with pytest.raises(InternalError, match="bias"):
        bind(model, weights)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_that_break_off_leave_the_model_on_meta() -> None:
    weights = DictWeights(_values(_net()))
    del weights.tensors["2.bias"]
    model = _meta(_net)
    with pytest.raises(KeyError):
        bind(model, weights)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_bound_model_converts_and_copies_without_touching_the_weights() -> None:
    """MD-10."""
    reference = _net()
    weights = DictWeights(_values(reference))
    before = {name: bits(tensor) for name, tensor in weights.tensors.items()}
    for change in (copy.deepcopy, nn.Module.half, nn.Module.cpu, lambda m: m.to("cpu", torch.float64)):
        model = _meta(_net)
        bind(model, weights)
        changed = change(model)
        with torch.no_grad():
            if changed[0].weight.data_ptr() != weights.tensors["0.weight"].data_ptr():
                changed[0].weight.add_(1)
        assert not any(parameter.is_meta for parameter in changed.parameters())
    assert {name: bits(tensor) for name, tensor in weights.tensors.items()} == before


def test_binding_works_under_inference_mode_and_under_a_meta_default_device() -> None:
    weights = DictWeights(_values(_net()))
    model = _meta(_net)
    with torch.inference_mode(), torch.device("meta"):
        bind(model, weights)
    model[1].running_mean.add_(1)
    assert not model[0].weight.is_inference()


def test_a_report_reads_well() -> None:
    model = _meta(lambda: Toy(tied=True))
    report = bind(model, DictWeights({"embed.weight": torch.ones(7, 4), "x": torch.ones(1)}), strict=False)
    assert str(report).splitlines() == [
        "1 parameter bound (112 B), 1 tie kept",
        "buffers: 0 cloned, 0 recomputed, 0 left",
        "unexpected, left out: 1 (x)",
    ]
