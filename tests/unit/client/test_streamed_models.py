"""The streaming suite's models are what it takes them for: deterministic, finite, and reading all of their layers."""

from __future__ import annotations

import copy

import pytest
import torch

from ftd.config.selection import ModuleName, select
from tests.streamed_models import CASES, Case, made, tensors


def _outputs(case: Case) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [tensor.clone() for call in case.calls for tensor in tensors(call.run(case.model))]


def _managed(case: Case) -> list[str]:
    modules = [ModuleName(path) for path, _ in case.model.named_modules()]
    return list(select(case.include, (), modules, [name for name, _ in case.model.named_parameters()]).managed)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_forwards_are_deterministic_and_finite(name: str) -> None:
    case = made(name)
    outputs = _outputs(case)
    assert outputs
    assert all(tensor.isfinite().all() and tensor.numel() for tensor in outputs)
    assert _equal(outputs, _outputs(case)), "of the same model again"
    assert _equal(outputs, _outputs(made(name))), "of another model of that name"
    assert _equal(outputs, _outputs(Case(copy.deepcopy(made(name).model), case.calls))), "of a copy"


@pytest.mark.parametrize("name", CASES)
def test_outputs_depend_on_every_parameter_of_the_layers(name: str) -> None:
    """A wrong byte anywhere shows: no parameter is ignored or cancels out, those that the case names aside."""
    case = made(name)
    before = _outputs(case)
    managed = _managed(case)
    assert managed
    parameters = dict(case.model.named_parameters())
    for parameter in managed:
        # in place of another layer's: what a slot holds that was filled for somebody else
        tensor = parameters[parameter]
        kept = tensor.clone()
        tensor.copy_(kept.flip(0) + 1 if kept.dim() else kept + 1) if 0 not in tensor.stride() else tensor[:1].add_(1)
        assert _equal(before, _outputs(case)) != case.reads(parameter), parameter
        tensor.copy_(kept) if 0 not in tensor.stride() else tensor[:1].copy_(kept[:1])
    assert _equal(before, _outputs(case))


@pytest.mark.parametrize("name", CASES)
def test_shared_is_what_layers_share(name: str) -> None:
    case = made(name)
    names = [name for name, _ in case.model.named_parameters(remove_duplicate=False)]
    modules = [ModuleName(path) for path, _ in case.model.named_modules(remove_duplicate=False)]
    layers: dict[torch.Tensor, set[str]] = {}
    parameters = dict(case.model.named_parameters(remove_duplicate=False))
    for parameter, layer in select(case.include, (), modules, names).managed.items():
        layers.setdefault(parameters[parameter], set()).add(layer)
    assert any(len(found) > 1 for found in layers.values()) == case.shared


def test_every_case_says_what_is_hard_about_it() -> None:
    assert all((build.__doc__ or "").strip() for build in CASES.values())
