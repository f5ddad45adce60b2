"""Small models for the tests of `bind`, and the checks that every refusal must stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ftd.errors import BindError
from ftd_client.bind import bind
from ftd_client.walk import walk

from .weights import DictWeights


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Toy(nn.Module):
    """A language model with a head, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def problems_of(model: nn.Module, weights: DictWeights, **options: bool) -> list[str]:
    """The lines of the refusal; the model must be as it was, to the object."""
    before = [(group.names, id(group.tensor)) for group in walk(model).groups()]
    with pytest.raises(BindError) as caught:
        bind(model, weights, **options)
    assert [(group.names, id(group.tensor)) for group in walk(model).groups()] == before
    assert caught.value.remedy
    return list(caught.value.problems)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())
