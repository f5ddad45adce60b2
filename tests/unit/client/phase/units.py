"""Units over a bare module or none, for tests of what only counts and orders them."""

from __future__ import annotations

import torch
from torch import nn

from ftd_client.stream.units import Param, Unit
from ftd_client.walk import Group, Place


def param(name: str, nbytes: int = 4) -> Param:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8), requires_grad=False))
    place = Place(module, "weight", name, module._parameters, True)  # type: ignore[arg-type]
    return Param(name, Group(module.weight, [place]))  # type: ignore[arg-type]


def unit(name: str, *, layer: str = "", nbytes: int = 4, resident: str = "", scope: bool = True) -> Unit:
    held = param(f"{name}.weight", nbytes)
    return Unit(name, layer or name, held.group.places[0].module if scope else None, [held], resident)
