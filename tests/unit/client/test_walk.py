"""What a walk finds, and how an exchange puts tensors into places or leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftd.errors import BindError
from ftd_client.meta import meta_parameters
from ftd_client.walk import Exchange, foreign, on_meta, walk


class Tied(nn.Module):
    """A head tied to an embedding, a norm shared by two names, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.first = nn.LayerNorm(3)
        self.second = self.first
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)


def test_a_walk_groups_all_names_of_one_tensor() -> None:
    parts = walk(Tied())
    assert [group.names for group in parts.parameters] == [
        ("embed.weight", "head.weight"),
        ("first.weight", "second.weight"),
        ("first.bias", "second.bias"),
    ]
    assert [group.names for group in parts.buffers] == [("count",)]
    assert [group.names for group in parts.transient] == [("table",)]
    assert parts.extra_state == parts.meta_attributes == ()


def test_a_walk_has_the_names_and_the_order_that_torch_has() -> None:
    model = nn.Sequential(Tied(), nn.LSTM(3, 3), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2))
    parts = walk(model)
    parameters = [name for name, _ in model.named_parameters()]
    assert [group.name for group in parts.parameters] == parameters
    every = {place.name for group in parts.parameters for place in group.places}
    assert every == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {place.name for group in (*parts.buffers, *parts.transient) for place in group.places}
    assert buffers == {name for name, _ in model.named_buffers(remove_duplicate=False)}
    persistent = {place.name for group in parts.groups() for place in group.places if place.persistent}
    assert persistent == set(model.state_dict())


def test_meta_tensors_of_one_shape_are_told_apart() -> None:
    """OF-11: all of them report data pointer 0, and so do empty tensors (ST-01)."""
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(20))
    assert {group.tensor.data_ptr() for group in walk(model).parameters} == {0}
    assert len(walk(model).parameters) == 20
    empty = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))])
    assert len(walk(empty).parameters) == 2


def test_a_buffer_that_is_persistent_in_one_place_only_is_one_group() -> None:
    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    table = torch.ones(2)
    model["a"].register_buffer("t", table, persistent=False)
    model["b"].register_buffer("t", table)
    parts = walk(model)
    assert [group.names for group in parts.buffers] == [("a.t", "b.t")]
    assert parts.buffers[0].persistent_names == ("b.t",)
    assert parts.transient == ()


def test_a_module_registered_below_itself_ends_the_walk_there() -> None:
    model = nn.Module()
    model.child = nn.Linear(2, 2)
    model.child.parent = model
    model.me = model
    assert [group.names for group in walk(model).parameters] == [("child.weight",), ("child.bias",)]


def test_plain_attributes_are_aliases_or_reported_when_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.w = nn.Parameter(torch.empty(2))
        model.__dict__["same_w"] = model.w
        model.loose = torch.empty(3)
    model.real = torch.ones(3)
    parts = walk(model)
    assert parts.parameters[0].aliases == [(model, "same_w")]
    assert parts.meta_attributes == ("loose",)
    assert on_meta(parts.modules) == ["w"]


def test_modules_with_extra_state_are_named() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> torch.Tensor:
            return torch.ones(1)

    assert walk(nn.Sequential(nn.Linear(1, 1), Extra())).extra_state == ("1._extra_state",)


class Scaled(torch.Tensor):
    """Stands for a quantised tensor that keeps scales beside its bytes."""


@pytest.mark.parametrize(
    ("tensor", "expected", "found"),
    [
        (nn.Parameter(torch.ones(1)), nn.Parameter, None),
        (torch.ones(1), torch.Tensor, None),
        (nn.Buffer(torch.ones(1)), torch.Tensor, None),
        (nn.UninitializedParameter(), nn.Parameter, "torch.nn.parameter.UninitializedParameter found"),
        (nn.Parameter(torch.ones(1).as_subclass(Scaled)), nn.Parameter, "test_walk.Scaled found"),
        (torch.ones(1).as_subclass(Scaled), torch.Tensor, "test_walk.Scaled found"),
        (nn.Parameter(torch.ones(1)), torch.Tensor, "plain Tensor expected"),
        (torch.eye(2).to_sparse(), torch.Tensor, "layout torch.sparse_coo found"),
    ],
)
def test_what_is_more_than_plain_memory_is_foreign(
    tensor: torch.Tensor, expected: type[torch.Tensor], found: str | None
) -> None:
    """OF-09, OF-10."""
    why = foreign(tensor, expected)
    assert (why is None) if found is None else (why is not None and found in why)


def test_an_exchange_keeps_the_books_of_modules_that_track_their_tensors() -> None:
    """`nn.LSTM` computes from a list of its own, which only its `__setattr__` updates."""
    model = nn.LSTM(2, 3)
    group = walk(model).parameters[0]
    fresh = nn.Parameter(torch.full((12, 2), 0.5))
    with Exchange() as exchange:
        exchange.put(group, fresh)
    assert model.weight_ih_l0 is fresh
    assert model._flat_weights[0] is fresh
    with pytest.raises(ZeroDivisionError), Exchange() as exchange:
        exchange.put(walk(model).parameters[0], nn.Parameter(torch.zeros(12, 2)))
        assert model._flat_weights[0] is not fresh
        _ = 1 / 0
    assert model._flat_weights[0] is model.weight_ih_l0 is fresh


class Stubborn(nn.Linear):
    """Refuses every assignment once it is built."""

    frozen = False

    def __setattr__(self, name: str, value: object) -> None:
        if self.frozen:
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Converting(nn.Linear):
    """Stores something else than it is given."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, nn.Parameter(value * 2) if isinstance(value, nn.Parameter) else value)


def _frozen() -> nn.Module:
    module = Stubborn(2, 2)
    module.__dict__["frozen"] = True
    return module


@pytest.mark.parametrize(
    ("last", "message"),
    [(_frozen(), "Stubborn refused the tensor"), (Converting(2, 2), "Converting stored another")],
)
def test_a_module_that_refuses_brings_every_earlier_place_back(last: nn.Module, message: str) -> None:
    model = nn.Sequential(Tied(), nn.LSTM(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), last)
    model[0].__dict__["alias"] = model[0].embed.weight
    before = _snapshot(model)
    parts = walk(model)
    with pytest.raises(BindError, match=message), Exchange() as exchange:
        for group in parts.groups():
            fresh = group.tensor.detach().clone()
            exchange.put(group, nn.Parameter(fresh) if isinstance(group.tensor, nn.Parameter) else fresh)
    assert _snapshot(model) == before


def test_a_hook_that_intercepts_registration_is_an_error() -> None:
    model = nn.Linear(2, 2)
    before = _snapshot(model)
    with (
        meta_parameters(),
        pytest.raises(BindError, match=r"weight: Linear stored another tensor.*\n.*intercept"),
        Exchange() as exchange,
    ):
        exchange.put(walk(model).parameters[0], nn.Parameter(torch.ones(2, 2)))
    assert _snapshot(model) == before


@pytest.mark.parametrize("persistent", [True, False])
def test_persistence_is_the_modules_record_and_not_the_buffers(persistent: bool) -> None:
    model = nn.Module()
    model.table = nn.Buffer(torch.ones(2), persistent=not persistent)
    model.register_buffer("table", model.table, persistent=persistent)
    parts = walk(model)
    with Exchange() as exchange:
        exchange.put((parts.buffers or parts.transient)[0], torch.zeros(2))
    assert isinstance(model.table, nn.Buffer)
    assert bool(model.state_dict()) is persistent


def _snapshot(model: nn.Module) -> list[object]:
    """The identity of every tensor in every place, registered or not."""
    seen: list[object] = []
    for name, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            seen += [(name, key, id(tensor)) for key, tensor in registry.items()]
        seen += [(name, key, id(v)) for key, v in module.__dict__.items() if isinstance(v, torch.Tensor)]
        seen += [
            (name, [id(w) for w in module.__dict__.get("_flat_weights", [])], set(module._non_persistent_buffers_set))
        ]
    return seen
