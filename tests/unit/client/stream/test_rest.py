"""What is not managed: on the device while the model is offloaded, and back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftd_client.stream.rest import Rest
from ftd_client.stream.units import OffloadError
from ftd_client.walk import walk

CPU, META = torch.device("cpu"), torch.device("meta")


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    made.register_buffer("table", torch.arange(4.0), persistent=False)
    return made


def taken(made: nn.Module, device: torch.device, *, keep: bool = False) -> Rest:
    parts = walk(made)
    rest = Rest(device, keep=keep)
    rest.take(parts.parameters, (*parts.buffers, *parts.transient))
    return rest


def state(made: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(made.named_parameters()), **dict(made.named_buffers())}


def test_parameters_stay_the_objects_they_were_and_want_no_grad() -> None:
    made = model()
    before = state(made)
    rest = taken(made, CPU)
    after = state(made)
    assert all(after[name] is before[name] for name in before)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    # 9 + 3 floats of the linear, four of 3 of the norm and its count, the table; the count has 8 bytes
    assert rest.nbytes == 4 * (9 + 3 + 4 * 3 + 4) + 8


def test_buffers_go_to_the_device_and_come_back() -> None:
    made = model()
    parts = walk(made)
    rest = Rest(META, keep=False)
    rest.take([], (*parts.buffers, *parts.transient))
    assert all(buffer.is_meta for buffer in made.buffers())
    assert "table" not in made.state_dict(), "what was transient stays so"
    for module, name in [(made[1], "running_mean"), (made[1], "running_var"), (made[1], "num_batches_tracked")]:
        setattr(module, name, torch.ones(3))
    made.table = torch.ones(4)
    rest.restore()
    assert all(buffer.device == CPU and buffer.eq(1).all() for buffer in made.buffers())


def test_where_it_is_already_nothing_moves() -> None:
    made = model()
    before = {name: tensor.data_ptr() for name, tensor in state(made).items()}
    rest = taken(made, CPU)
    assert {name: tensor.data_ptr() for name, tensor in state(made).items()} == before
    rest.restore()
    assert {name: tensor.data_ptr() for name, tensor in state(made).items()} == before


def test_grads_are_wanted_again_by_those_that_wanted_them() -> None:
    made = model()
    made[0].bias.requires_grad_(False)
    rest = taken(made, CPU)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    rest.restore()
    assert {name for name, parameter in made.named_parameters() if parameter.requires_grad} == {
        "0.weight", "1.weight", "1.bias",
    }  # fmt: skip
    assert rest.nbytes == 0


def test_what_changed_meanwhile_keeps_its_new_values() -> None:
    made = model()
    rest = taken(made, CPU)
    with torch.no_grad():
        made[0].weight.fill_(7)
        made[1].running_mean.fill_(8)
    made.table = torch.zeros(9)
    rest.restore()
    assert made[0].weight.eq(7).all() and made[1].running_mean.eq(8).all()
    assert made.table.shape == (9,)


def test_ties_count_once_and_stay_ties() -> None:
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    made[1].weight = made[0].weight
    rest = taken(made, CPU)
    assert made[1].weight is made[0].weight
    assert rest.nbytes == 36


def test_several_tensors_of_one_storage_are_one_allocation() -> None:
    made = nn.Module()
    flat = torch.zeros(10)
    made.a, made.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    assert taken(made, CPU).nbytes == 40


class Sub(nn.Parameter):
    pass


@pytest.mark.parametrize("odd", ["subclass", "sparse buffer", "meta"])
def test_what_cannot_be_moved_is_refused_by_name_and_nothing_was_moved(odd: str) -> None:
    made = model()
    if odd == "subclass":
        made.odd = Sub(torch.zeros(2))
    elif odd == "meta":
        made.odd = nn.Parameter(torch.zeros(2, device="meta"))
    else:
        made.register_buffer("odd", torch.zeros(2, 2).to_sparse())
    before = {name: (tensor, tensor.device, tensor.requires_grad) for name, tensor in state(made).items()}
    with pytest.raises(OffloadError, match="odd"):
        taken(made, META)
    after = {name: (tensor, tensor.device, tensor.requires_grad) for name, tensor in state(made).items()}
    assert all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(before.values(), after.values(), strict=True))


def test_taking_more_later_adds_up() -> None:
    made = model()
    parts = walk(made)
    rest = Rest(CPU, keep=False)
    rest.take(parts.parameters[:1])
    rest.take(parts.parameters[1:], parts.buffers)
    assert rest.nbytes == 4 * (9 + 3 + 4 * 3) + 8
    rest.restore()
    assert all(parameter.requires_grad for parameter in made.parameters())
