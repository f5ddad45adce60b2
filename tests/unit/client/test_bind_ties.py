"""Ties of the model and ties of the checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftd_client.bind import bind

from .models import Toy, meta, problems_of
from .weights import DictWeights, bits


@pytest.mark.parametrize("kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
@pytest.mark.parametrize("stored_tie", [True, False])
def test_a_tie_is_one_parameter_whichever_names_the_checkpoint_holds(kept: list[str], stored_tie: bool) -> None:
    """MD-04."""
    values = torch.randn(7, 4)
    weights = DictWeights({name: values if stored_tie else values.clone() for name in kept})
    model = meta(lambda: Toy(tied=True))
    report = bind(model, weights)
    if stored_tie:
        # known from the extent alone: no byte of a large head is read to compare it with itself
        assert weights.asked == kept[:1]
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
        torch.zeros(7, 4, dtype=torch.int32),  # the same bytes of another type
    ],
)
def test_a_tie_with_two_values_is_refused(other: torch.Tensor) -> None:
    """MD-06: the head of the checkpoint is never thrown away."""
    values = torch.zeros(7, 4)
    values[0, 0] = 1 if bits(other) == bits(values) else 0
    weights = DictWeights({"embed.weight": values, "head.weight": other})
    (line,) = problems_of(meta(lambda: Toy(tied=True)), weights)
    assert line.startswith("head.weight: ")
    assert "those of embed.weight (F32) expected" in line


def test_a_tie_of_equal_nans_is_kept() -> None:
    weights = DictWeights({name: torch.full((7, 4), torch.nan) for name in ("embed.weight", "head.weight")})
    bind(meta(lambda: Toy(tied=True)), weights)


def test_a_missing_head_is_named() -> None:
    """MD-06, the other way round."""
    model = meta(lambda: Toy(tied=False))
    lines = problems_of(model, DictWeights({"embed.weight": torch.ones(7, 4)}))
    assert lines == ["head.weight: nothing found in the checkpoint, (7, 4) of float32 expected"]


def test_one_extent_may_serve_two_parameters_that_are_not_tied() -> None:
    values = torch.randn(7, 4)
    model = meta(lambda: Toy(tied=False))
    report = bind(model, DictWeights({"embed.weight": values, "head.weight": values}))
    assert model.head.weight is not model.embed.weight
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert report.shared == (("embed.weight", "head.weight"),)
    assert report.bound_bytes == values.nbytes


def test_empty_tensors_share_nothing() -> None:
    """ST-01: both lie at address 0, with shapes and types of their own."""
    model = meta(
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


def test_tied_buffers_are_cloned_once() -> None:
    def build() -> nn.Module:
        model = nn.ModuleList([nn.Module(), nn.Module()])
        table = torch.arange(3.0)
        model[0].register_buffer("t", table)
        model[1].register_buffer("t", table)
        return model

    model = meta(build)
    report = bind(model, DictWeights({"1.t": torch.ones(3)}))
    assert model[0].t is model[1].t
    assert report.cloned == ("0.t",)
    assert report.tied == (("0.t", "1.t"),)
    assert bits(model[0].t) == bits(torch.ones(3))
