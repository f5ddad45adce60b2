"""Patches of `forward`: seen by every way to call, undone exactly, harmless under somebody else's."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ftd_client.stream.hooks import Forward, Hooks, is_offloaded, outliving, refuse_grad
from ftd_client.stream.parked import Access, Parked
from ftd_client.stream.units import OffloadError

from .toys import CPU

D = 4


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
        """Doc of the layer."""
        return super().forward(x) * scale + shift


def tag(log: list[str], name: str, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        log.append(name)
        return forward(*args, **kwargs)

    return run


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer(D, D).requires_grad_(False)


X = torch.ones(2, D)


def test_every_way_to_call_is_seen_and_gives_the_same(layer: Layer) -> None:
    expected, log, hooks = layer(X, 2.0, shift=1.0), [], Hooks()
    hooks.patch(layer, partial(tag, log, "ours"))
    for way in (layer, layer.forward, layer.__call__):
        assert torch.equal(way(X, 2.0, shift=1.0), expected)
    assert log == ["ours"] * 3


def test_the_signature_is_kept(layer: Layer) -> None:
    before = inspect.signature(layer.forward), layer.forward.__doc__, layer.forward.__name__
    hooks = Hooks()
    hooks.patch(layer, partial(tag, [], ""))
    assert (inspect.signature(layer.forward), layer.forward.__doc__, layer.forward.__name__) == before


def test_closing_leaves_no_trace(layer: Layer) -> None:
    before, hooks = dict(vars(layer)), Hooks()
    hooks.guard(layer)
    hooks.conversions(layer, lambda _module, _convert: None)
    hooks.patch(layer, partial(tag, [], ""))
    hooks.patch(layer, partial(tag, [], ""))
    hooks.getters([layer])
    assert vars(layer) != before
    hooks.close()
    after = vars(layer)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    hooks.close()


def test_a_forward_of_the_instances_own_comes_back(layer: Layer) -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    layer.forward = own  # type: ignore[method-assign,assignment]
    log, hooks = [], Hooks()
    hooks.patch(layer, partial(tag, log, "ours"))
    assert torch.equal(layer(X), X + 1)
    assert log == ["ours"]
    hooks.close()
    assert vars(layer)["forward"] is own


def test_patches_of_one_module_come_off_in_reverse(layer: Layer) -> None:
    log: list[str] = []
    hooks = Hooks()
    for name in ("inner", "outer"):
        hooks.patch(layer, partial(tag, log, name))
    layer(X)
    assert log == ["outer", "inner"]
    hooks.close()
    layer(X)
    assert log == ["outer", "inner"]


def test_somebodys_patch_over_ours_stays_and_ours_passes_calls_on(
    layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    expected, log, hooks = layer(X), [], Hooks()
    hooks.patch(layer, partial(tag, log, "ours"))
    theirs = tag(log, "theirs", layer.forward)
    layer.forward = theirs  # type: ignore[method-assign]
    assert torch.equal(layer(X), expected)
    assert log == ["theirs", "ours"]
    with caplog.at_level(logging.WARNING, "ftd"):
        hooks.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Layer.forward was patched after it was offloaded: that patch stays"
    ]
    log.clear()
    assert torch.equal(layer(X), expected)
    assert log == ["theirs"]
    assert vars(layer)["forward"] is theirs


def test_torchs_own_hooks_run_around_it(layer: Layer) -> None:
    log, hooks = [], Hooks()
    layer.register_forward_pre_hook(lambda *_: log.append("before"))
    hooks.patch(layer, partial(tag, log, "forward"))
    layer.register_forward_hook(lambda *_: log.append("after"))
    layer(X)
    assert log == ["before", "forward", "after"]


def test_a_module_that_guards_its_attributes_is_patched_all_the_same() -> None:
    class Sealed(Layer):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise AttributeError(name)
            super().__setattr__(name, value)

    sealed, log, hooks = Sealed(D, D), [], Hooks()
    hooks.patch(sealed, partial(tag, log, "ours"))
    sealed(X)
    hooks.close()
    sealed(X)
    assert log == ["ours"]


def test_a_guarded_model_is_known_and_refuses_copies(layer: Layer) -> None:
    beside = nn.Linear(D, D)
    model, hooks = nn.Sequential(nn.Sequential(layer), beside), Hooks()
    assert not is_offloaded(model)
    hooks.guard(model[0])
    assert is_offloaded(model) and is_offloaded(model[0]) and is_offloaded(layer) and not is_offloaded(beside)
    for module in (model, model[0], layer):
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(OffloadError, match="about to be copied or pickled with its hooks"):
                take(module)
    copy.deepcopy(beside)
    hooks.close()
    assert not is_offloaded(model)
    copy.deepcopy(model)


def test_a_patched_module_refuses_copies_without_a_guard_too(layer: Layer) -> None:
    hooks = Hooks()
    hooks.patch(layer, partial(tag, [], ""))
    with pytest.raises(OffloadError, match="about to be copied"):
        copy.deepcopy(layer)
    hooks.close()
    copy.deepcopy(layer)


# --- getters -----------------------------------------------------------------------------------------------------


def test_getters_fetch_what_is_parked_by_attribute_and_list_the_stand_in(layer: Layer) -> None:
    weight = layer.weight
    parked = Parked.of("weight", weight, CPU, Access(lambda: weight, lambda: weight, print))
    layer._parameters["weight"] = parked  # type: ignore[assignment]
    model, hooks = nn.Sequential(layer), Hooks()
    hooks.getters([model, None])
    assert layer.weight is weight
    assert next(layer.parameters()) is parked
    hooks.close()
    assert layer._parameters["weight"] is parked
    assert layer.weight is parked
    assert type(layer._parameters) is dict


# --- outputs that outlive their forward --------------------------------------------------------------------------

Pair = namedtuple("Pair", "one other")


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers are: a mapping of a class of its own."""


class Attributes:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@dataclass(frozen=True, slots=True)
class Slotted:
    one: Any
    other: Any


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, b),
        lambda a, b: [b, {"a": a}],
        Pair,
        lambda a, b: Output(x=a, y=(b, None, 3)),
        lambda a, b: {"deep": {"deeper": [(a,)]}, "b": b},
        lambda a, b: {a, b},
        lambda a, b: frozenset([a, b]),
        lambda a, b: Attributes(a=a, more=Attributes(b=[b])),
        lambda a, b: Slotted(a, {"b": b}),
    ],
)
def test_views_of_ours_are_copied_wherever_they_are_and_nothing_else(wrap: Any) -> None:
    memory, other = torch.arange(8.0), torch.arange(3.0)
    view = memory[2:4]
    output = outliving(wrap(view, other), lambda t: t.untyped_storage().data_ptr() == memory.data_ptr())
    assert type(output) is type(wrap(view, other))
    memory.zero_()
    flat = [t for t in _flat(output) if isinstance(t, torch.Tensor)]
    assert sorted(len(t) for t in flat) == [2, 3]
    for found in flat:
        assert torch.equal(found, torch.arange(8.0)[2:4] if len(found) == 2 else other)
        assert (found is other) == (len(found) == 3)


def test_an_output_without_such_views_is_the_same_object() -> None:
    unchanged = [torch.ones(1)], (torch.ones(1), 4), {"x": None}, "text", None, torch.ones(2)
    for output in (*unchanged, {torch.ones(1)}, Attributes(a=torch.ones(1)), Slotted(torch.ones(1), 1)):
        assert outliving(output, lambda _: False) is output


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Attributes):
        value = list(vars(value).values())
    if isinstance(value, Slotted):
        value = [value.one, value.other]
    if isinstance(value, list | tuple | set | frozenset):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


# --- grads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: (1, (t,)), lambda t: {"x": {"y": t}}, lambda t: Output(x=t)]
)
def test_an_input_that_requires_grad_is_refused_wherever_it_is(wrap: Any) -> None:
    refuse_grad("layers.0", wrap(torch.ones(1)))
    with pytest.raises(OffloadError, match=r"layers\.0 is streamed") as caught:
        refuse_grad("layers.0", wrap(torch.ones(1, requires_grad=True)))
    assert "torch.no_grad()" in caught.value.remedy
