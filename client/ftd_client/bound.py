"""Which weights a model shows: known from the moment it is bound, for as long as it lives."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ftd_client.views import SharedWeights

# not on the model: copying it would take the mappings along
_weights: weakref.WeakKeyDictionary[nn.Module, SharedWeights] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, weights: SharedWeights) -> None:
    """The model's parameters are views of these weights now."""
    _weights[model] = weights


def weights_of(model: nn.Module) -> SharedWeights | None:
    """What the model was bound to last; its parameters may have been exchanged since."""
    return _weights.get(model)


def strangers(model: nn.Module, weights: SharedWeights) -> list[str]:
    """Names of parameters that are not views of these weights."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.nbytes and not (name in weights.specs and _is_view(parameter, name, weights))
    ]


def _is_view(parameter: torch.Tensor, name: str, weights: SharedWeights) -> bool:
    extent = weights.where(name)
    there = weights.private[extent.segment].address + extent.offset
    return not parameter.is_meta and parameter.device.type == "cpu" and parameter.data_ptr() == there
