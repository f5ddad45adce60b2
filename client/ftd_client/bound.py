"""Which weights a model shows: known from the moment it is bound, for as long as it lives."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ftd_client.views import SharedWeights
from ftd_client.walk import walk

# not on the model: copying it would take the mappings along
_weights: weakref.WeakKeyDictionary[nn.Module, SharedWeights] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, weights: SharedWeights) -> None:
    """The model's parameters are views of these weights now."""
    _weights[model] = weights


def weights_of(model: nn.Module) -> SharedWeights | None:
    """What the model was bound to last; its parameters may have been exchanged since."""
    return _weights.get(model)


def strangers(model: nn.Module, weights: SharedWeights) -> list[str]:
    """Parameters that are not views of these weights; the weights may have a tied one under any of its names."""
    return [
        group.name
        for group in walk(model).parameters
        if group.tensor.nbytes
        and not any(name in weights.specs and _is_view(group.tensor, name, weights) for name in group.names)
    ]


def _is_view(parameter: torch.Tensor, name: str, weights: SharedWeights) -> bool:
    extent = weights.where(name)
    there = weights.private[extent.segment].address + extent.offset
    return not parameter.is_meta and parameter.device.type == "cpu" and parameter.data_ptr() == there
