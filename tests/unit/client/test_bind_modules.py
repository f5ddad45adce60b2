"""Kinds of modules that keep their tensors in unusual ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ftd.errors import BindError, InternalError
from ftd_client.bind import bind
from ftd_client.load.move import move
from ftd_client.load.placement import Placement
from ftd_client.walk import walk

from .weights import DictWeights, bits


class Doubled(nn.Module):
    """A parametrization: what is stored times two."""

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return stored * 2


class Holder(nn.Module):
    """Lists and dicts of parameters, nested modules by key, and a parameter used through a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(3)), "b": self.several[0]})
        self.blocks = nn.ModuleDict({"x": nn.Linear(3, 3), "y": nn.Identity()})

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.blocks["x"](given * self.several[0] + self.several[2]) * self.named["b"] + self.named["a"]


class First(nn.Module):
    """The output of a recurrent module without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)[0]


def _parametrized() -> nn.Module:
    model = nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Doubled())
    return model


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "weight_norm_by_hook": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "parametrized": _parametrized,
    "lists_and_dicts": Holder,
    "lstm": lambda: First(nn.LSTM(3, 3, num_layers=2, bidirectional=True)),
    "gru": lambda: First(nn.GRU(3, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", _KINDS)
def test_a_bound_and_a_moved_model_compute_what_the_reference_computes(kind: str) -> None:
    torch.manual_seed(0)
    reference = _KINDS[kind]().eval()
    weights = DictWeights(dict(reference.state_dict(keep_vars=True)))
    with torch.device("meta"):
        model = _KINDS[kind]().eval()
    report = bind(model, weights)
    assert len(report.bound) == len(list(reference.parameters()))
    assert [g.names for g in walk(model).groups()] == [g.names for g in walk(reference).groups()]
    given = torch.randn(2, 3)
    with torch.no_grad():
        expected = bits(reference(given))
        assert bits(model(given)) == expected
        move(model, Placement("cpu"))
        for tensor in weights.tensors.values():
            tensor.zero_()
        assert bits(model(given)) == expected


class Closed(nn.Linear):
    """Takes no parameter once `close` was called."""

    def close(self) -> None:
        self.__dict__["closed"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("closed"):
            raise RuntimeError("closed")
        super().__setattr__(name, value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", ["meta", "real"])
def test_a_module_that_refuses_half_way_leaves_every_other_module_as_it_was(where: str) -> None:
    def build() -> nn.Module:
        return nn.ModuleList([*(make() for make in _KINDS.values()), Closed(2, 2), nn.Linear(2, 2)])

    weights = DictWeights(dict(build().state_dict(keep_vars=True)))
    with torch.device("meta" if where == "meta" else "cpu"):
        model = build()
    model[-2].close()
    before = _identities(model)
    with pytest.raises(BindError, match=r"9\.weight: Closed refused the tensor \(RuntimeError: closed\)") as caught:
        bind(model, weights, replace=True)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert _identities(model) == before


class Forgetful(nn.Module):
    """Registers its first parameter anew whenever the second is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(1))
        self.b = nn.Parameter(torch.empty(1))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "b":
            super().__setattr__("a", nn.Parameter(torch.empty(1, device="meta")))


def test_nothing_stays_on_meta_unnoticed() -> None:
    with torch.device("meta"):
        model = Forgetful()
    before = (model.a, model.b)
    with pytest.raises(InternalError, match="still on meta: a"):
        bind(model, DictWeights({"a": torch.ones(1), "b": torch.ones(1)}))
    assert model.a is before[0]
    assert model.b is before[1]


def test_hooks_stay() -> None:
    calls: list[str] = []
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    bind(model, DictWeights(dict(nn.Linear(2, 2).state_dict())))
    model(torch.ones(1, 2))
    model.state_dict()
    assert calls == ["pre", "state"]


def _identities(model: nn.Module) -> list[object]:
    seen: list[object] = [(group.names, id(group.tensor)) for group in walk(model).groups()]
    for name, module in model.named_modules():
        seen += [(name, key, id(value)) for key, value in module.__dict__.items() if isinstance(value, torch.Tensor)]
        seen += [(name, [id(weight) for weight in module.__dict__.get("_flat_weights", [])])]
        seen += [(name, list(module._parameters), list(module._buffers), set(module._non_persistent_buffers_set))]
    return seen
