"""Real parameters: taken for what they are only where they have the very values and the type that they get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ftd_client.bind import bind
from ftd_client.walk import walk

from .models import Toy, meta, net, problems_of, values
from .test_bind_random import _POOLS, _TREES, Entry, Tree, _build
from .weights import DictWeights, bits


def test_a_model_of_other_values_is_refused_by_name_unless_they_are_given_up() -> None:
    weights = DictWeights(net().state_dict())
    model = net()
    with torch.no_grad():
        model[1].weight.fill_(2)  # a norm's bias is zero in every model: equal
    assert problems_of(model, weights) == [
        f"{name}: a real parameter on cpu of other values found, those of the checkpoint expected"
        for name, _ in model.named_parameters()
        if name != "1.bias"
    ]
    bind(model, weights, replace=True)
    assert model[0].weight.data_ptr() == weights.tensors["0.weight"].data_ptr()


def test_a_model_of_the_same_values_shows_the_weights_and_lets_go_of_its_own() -> None:
    """As `from_pretrained` leaves it; buffers are the checkpoint's in any case."""
    model = net()
    weights = DictWeights({name: value.clone() for name, value in values(model).items()})
    model[1].running_mean.fill_(5)
    bind(model, weights)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights.tensors[name].data_ptr()
    assert model[1].running_mean.tolist() == [0.0] * 4


def test_binding_again_is_no_change_and_to_other_weights_is_one() -> None:
    weights = DictWeights(net().state_dict())
    model = meta(net)
    bind(model, weights)
    with torch.no_grad():
        model[0].bias.fill_(9)  # in place, in the weights' own memory
    bind(model, weights)
    assert model[0].bias.tolist() == [9.0] * 4
    newer = DictWeights(net().state_dict())
    assert "0.weight" in problems_of(model, newer)[0]
    report = bind(model, newer, replace=True)
    assert len(report.bound) == 6
    assert model[0].weight.data_ptr() == newer.tensors["0.weight"].data_ptr()


@pytest.mark.parametrize("where", [0, 1023, 1024, 4999])
def test_one_element_makes_a_difference_and_a_sign_of_zero_too(where: int) -> None:
    stored = torch.zeros(5000)
    own = stored.clone()
    own[where] = -0.0
    model = nn.ParameterList([nn.Parameter(own)])
    assert len(problems_of(model, DictWeights({"0": stored}))) == 1
    bind(model, DictWeights({"0": own.clone()}))


def test_values_are_compared_however_they_lie() -> None:
    stored = torch.arange(6.0).to(torch.complex64).reshape(2, 3) * 1j
    model = nn.ParameterList([nn.Parameter(stored.t().contiguous().t()), nn.Parameter(stored.conj())])
    assert not model[0].is_contiguous() and model[1].is_conj()
    bind(model, DictWeights({"0": stored, "1": stored.conj().resolve_conj()}))
    again = nn.ParameterList([nn.Parameter(stored.conj())])
    assert len(problems_of(again, DictWeights({"0": stored}))) == 1


def test_a_single_element_that_was_cut_out_with_steps_is_compared() -> None:
    """It is contiguous, with a stride of 2."""
    weights = DictWeights({"a": torch.ones(1), "b": torch.ones(2)[::2]})
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(4)[::2][:1])
    model.b = nn.Parameter(torch.ones(1))
    bind(model, weights)
    assert model.a.data_ptr() == weights.tensors["a"].data_ptr()
    model.a = nn.Parameter(torch.zeros(4)[::2][:1])
    assert len(problems_of(model, weights)) == 1


def test_equal_nans_are_equal() -> None:
    stored = torch.full((3,), torch.nan)
    bind(nn.ParameterList([nn.Parameter(stored.clone())]), DictWeights({"0": stored}))


@pytest.mark.parametrize("built", [torch.float64, torch.bfloat16, torch.int32])
def test_another_type_is_refused_with_both_ways_out(built: torch.dtype) -> None:
    """MD-08: told when it is bound, not by a product of two types in a forward."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=built), requires_grad=False)])
    weights = DictWeights({"0": torch.ones(2)})
    name = str(built).removeprefix("torch.")
    assert problems_of(model, weights) == [
        f"0: a real parameter of {name} found, float32 of the checkpoint expected"
    ]  # fmt: skip
    report = bind(model, weights, replace=True)
    assert [str(change) for change in report.dtype_changes] == [f"0: {name} → float32"]
    assert report.cast == ()


def test_with_dtype_a_real_parameter_is_compared_as_what_it_becomes() -> None:
    stored = torch.randn(5)
    for own in (stored.bfloat16(), stored.clone(), stored.double()):
        model = nn.ParameterList([nn.Parameter(own)])
        bind(model, DictWeights({"0": stored}), dtype=torch.bfloat16)
        assert bits(model[0]) == bits(stored.bfloat16())
    model = nn.ParameterList([nn.Parameter(stored + 1)])
    (line,) = problems_of(model, DictWeights({"0": stored}), dtype=torch.bfloat16)
    assert "of other values found" in line


@pytest.mark.parametrize("stored", [torch.ones(2, dtype=torch.int8), torch.ones(2).to(torch.float8_e4m3fn)])
def test_dtype_is_no_way_around_a_type_that_is_never_cast(stored: torch.Tensor) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    (line,) = problems_of(model, DictWeights({"0": stored}), dtype=torch.float32)
    assert line.startswith("0: a real parameter of float32 found")


def test_a_real_tie_is_compared_once_and_stays_one() -> None:
    model = Toy(tied=True)
    stored = model.embed.weight.detach().clone()
    bind(model, DictWeights({"head.weight": stored}))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.data_ptr() == stored.data_ptr()


def test_nothing_is_read_of_a_model_that_does_not_fit_by_names() -> None:
    weights = DictWeights({**net().state_dict(), "stray": torch.ones(1)})
    problems_of(net(), weights)
    assert weights.asked == []


@settings(max_examples=60)
@given(tree=_TREES, pool=_POOLS, data=st.data())
def test_any_model_takes_the_weights_that_it_has_and_no_others(
    tree: Tree, pool: list[Entry], data: st.DataObject
) -> None:
    model = _build(tree, pool)
    state = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    before = [(group.names, bits(group.tensor)) for group in walk(model).groups()]
    weights = DictWeights(state)
    bind(model, weights)
    parts = walk(model)
    assert [(group.names, bits(group.tensor)) for group in parts.groups()] == before
    stored = {value.data_ptr() for value in state.values()}
    assert all(group.tensor.data_ptr() in stored for group in parts.parameters)
    changeable = [group for group in parts.parameters if group.tensor.nbytes]
    if not changeable:
        return
    group = data.draw(st.sampled_from(changeable))
    at = data.draw(st.integers(0, group.tensor.nbytes - 1))
    changed = group.tensor.detach().clone()
    changed.view(-1).view(torch.uint8)[at] ^= 1
    other = DictWeights({name: changed if name in group.names else value for name, value in state.items()})
    (line,) = problems_of(model, other)
    assert line.split(":")[0].split(" ")[0] == group.name
