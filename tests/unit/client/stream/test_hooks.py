"""Patches of `forward`: seen by every way to call, undone exactly, harmless under somebody else's."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import sys
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ftd_client
from ftd_client.stream.cuda_link import CudaLink
from ftd_client.stream.hooks import Forward, Hooks, is_offloaded, refuse_grad, streamed
from ftd_client.stream.parked import Access, Parked
from ftd_client.stream.units import OffloadError
from tests.fake_cuda import FakeCuda
from tests.unit.client.stream.fakes import Threads

from .toys import CPU, Toy

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


# --- grads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: (1, (t,)), lambda t: {"x": {"y": t}}, lambda t: OrderedDict(x=t)]
)
def test_an_input_that_requires_grad_is_refused_wherever_it_is(wrap: Any) -> None:
    refuse_grad("layers.0", wrap(torch.ones(1)))
    with pytest.raises(OffloadError, match=r"layers\.0 is streamed") as caught:
        refuse_grad("layers.0", wrap(torch.ones(1, requires_grad=True)))
    assert "torch.no_grad()" in caught.value.remedy


# --- what a block costs the host ---------------------------------------------------------------------------------


def test_a_steady_block_takes_no_more_than_fourteen_calls_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of Python takes 0.1 to 0.2 µs of a host that may spend 30 on a block, CUDA's part included."""
    cuda = FakeCuda()
    Threads(cuda, monkeypatch)
    toy, link = Toy([[512, 512]] * 6), CudaLink(torch.device("cuda:0"), cuda)
    toy.stream._link = link
    toy.link.drain()
    hooks, layers = Hooks(), [unit.scope for unit in toy.streamed]
    for unit, layer in zip(toy.streamed, layers, strict=True):
        assert layer is not None
        vars(layer)["forward"] = lambda: X
        hooks.patch(layer, partial(streamed, toy.stream, *toy.steps[unit], layer))

    def forward() -> None:
        toy.stream.begin()
        for layer in layers:
            layer()
        toy.stream.end()

    for step in toy.stream.steps:
        step.ticket = link.submit(step.copies) if step.ticket is not None else None
    with torch.inference_mode():
        forward()
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _argument: Any) -> None:
            if event == "call" and Path(ftd_client.__file__).parent in Path(frame.f_code.co_filename).parents:
                calls[frame.f_code.co_qualname] += 1

        sys.setprofile(count)
        try:
            forward()
        finally:
            sys.setprofile(None)
    assert calls["CudaLink.submit"] == calls["CudaLink.wait"] == len(layers) == 12
    assert sum(calls.values()) <= 14 * len(layers) + 12, calls
    hooks.close()
    link.close()
