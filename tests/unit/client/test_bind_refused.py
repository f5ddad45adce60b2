"""What `bind` refuses: everything at once, by name, with the model left as it was."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from ftd.errors import BindError, InternalError
from ftd.tensorspec import TensorSpec
from ftd_client.bind import bind
from ftd_client.meta import meta_parameters

from .models import meta, net, problems_of, values
from .weights import DictWeights


def test_every_difference_is_told_at_once() -> None:
    tensors = net().state_dict()
    del tensors["0.bias"], tensors["1.running_var"]
    tensors["0.weight"] = torch.ones(4, 9)
    tensors["stray"] = torch.ones(2, dtype=torch.int64)
    weights = DictWeights(tensors)
    weights.specs["2.weight"] = TensorSpec("2.weight", "F6_E2M3", (2, 4))
    model = meta(net)
    model[2].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    problems = problems_of(model, weights)
    assert problems[0] == "0.weight: (4, 9) of F32 found in the checkpoint, (4, 3) of float32 expected"
    assert problems[1] == "0.bias: nothing found in the checkpoint, (4,) of float32 expected"
    assert problems[2].startswith("tensor '2.weight' has element type F6_E2M3, which torch")
    assert problems[3] == "2.bias: a real parameter of float64 found, float32 of the checkpoint expected"
    assert problems[4] == "1.running_var: nothing found in the checkpoint, (4,) of float32 expected"
    assert problems[5] == "stray: (2,) of I64 found, no place in the model"
    assert len(problems) == 6


def test_the_text_of_a_refusal_is_capped_and_the_list_is_not() -> None:
    model = meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(30))))
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
    tensors = {**net().state_dict(), "stray.a": torch.ones(1), "stray.b": torch.ones(1)}
    report = bind(meta(net), DictWeights(tensors), strict=False)
    assert report.unexpected == ("stray.a", "stray.b")
    del tensors["0.bias"]
    assert problems_of(meta(net), DictWeights(tensors), strict=False) == [
        "0.bias: nothing found in the checkpoint, (4,) of float32 expected"
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_persistent_buffer_is_refused_even_when_it_is_real(strict: bool) -> None:
    tensors = net().state_dict()
    del tensors["1.running_mean"]
    with meta_parameters():
        model = net()
    lines = problems_of(model, DictWeights(tensors), strict=strict)
    assert lines == ["1.running_mean: nothing found in the checkpoint, (4,) of float32 expected"]


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
    lines = problems_of(model, DictWeights({name: torch.ones(2, 2) for name in names}), replace=replace)
    assert [line.split(":")[0] for line in lines] == names
    assert "test_bind_refused.Packed found, plain Parameter expected" in lines[0]
    assert "test_bind_refused.Wrapped found, plain Tensor expected" in lines[3]


def test_a_parameter_that_is_a_buffer_too_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("again", model.weight, persistent=False)
    (line,) = problems_of(model, DictWeights({"weight": torch.ones(2, 2)}), replace=True)
    assert line == "again: a Parameter found in a buffer's place, plain Tensor expected"


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
    (line,) = problems_of(meta(Extra), DictWeights(tensors))
    assert line.startswith("_extra_state: state that the module keeps beside tensors")
    report = bind(meta(Extra), DictWeights(tensors), strict=False)
    assert report.left == ("_extra_state",)
    assert report.unexpected == (("_extra_state",) if stored else ())


def test_weights_that_give_another_tensor_than_they_said_are_a_bug() -> None:
    weights = DictWeights(values(nn.Linear(2, 2)))
    weights.tensors["bias"] = torch.ones(2, dtype=torch.float64)
    model = meta(lambda: nn.Linear(2, 2))
    with pytest.raises(InternalError, match="bias"):
        bind(model, weights)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_that_break_off_leave_the_model_on_meta() -> None:
    weights = DictWeights(values(net()))
    del weights.tensors["2.bias"]
    model = meta(net)
    with pytest.raises(KeyError):
        bind(model, weights)
    assert all(parameter.is_meta for parameter in model.parameters())
