"""Modules that keep weights neither as parameters nor as buffers: refused by name, whatever `strict` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftd_client.bind import bind
from ftd_client.walk import packed, walk

from .models import meta, problems_of, values
from .weights import DictWeights


class Packed(nn.Module):
    """Stands for a quantised linear: what it computes with is an object that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.secret = [torch.ones(2, 2)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = self.secret[0]


class Unwilling(nn.Module):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        raise NotImplementedError("on meta")


class Plain(nn.Linear):
    """Writes in its own way what torch would write."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, parameter in self._parameters.items():
            destination[prefix + name] = parameter if keep_vars else parameter.detach()


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"replace": True}])
def test_packed_weights_are_refused_by_name(options: dict[str, bool]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), Packed(), Unwilling())
        model[1].table = torch.zeros(2)
        return model

    tensors = {**values(build()[0]), "1.bias": torch.ones(2)}
    weights = DictWeights({**{f"0.{n}": t for n, t in values(nn.Linear(2, 2)).items()}, "1.bias": tensors["1.bias"]})
    with torch.device("meta"):
        model = build()
    model[1]._buffers["table"] = torch.zeros(2)
    assert problems_of(model, weights, **options) == [
        "1.packed: weights found that Packed keeps in a form of its own, plain tensors expected",
        "2: weights found that Unwilling keeps in a form of its own, plain tensors expected",
    ]


def test_a_module_that_only_writes_in_its_own_way_is_bound() -> None:
    weights = DictWeights(values(nn.Linear(2, 2)))
    report = bind(meta(lambda: Plain(2, 2)), weights)
    assert report.bound == ("weight", "bias")


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_quantised_modules_are_such_modules_and_its_fake_ones_are_not() -> None:
    import torch.ao.nn.quantized as quantised
    from torch.ao.quantization import FakeQuantize

    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no engine for quantised modules")
    names = [name for name, _ in packed(walk(nn.Sequential(quantised.Linear(4, 4), FakeQuantize())))]
    assert "0._packed_params._packed_params" in names
    assert all(name.startswith("0.") for name in names)
