"""Which init may recompute a buffer: that of the models around it, then the module's own."""

from __future__ import annotations

import torch
from torch import nn

from ftd_client.buffers import recompute
from ftd_client.walk import walk

from .models import meta

_UNPROVEN = "leaves it unwritten, partly written or random"


def _outcome(model: nn.Module) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Values and reasons of refusal by name."""
    result = recompute(model, walk(model).transient)
    values = {group.name: tensor.tolist() for group, tensor in result.values.items()}
    return values, {group.name: reason for group, reason in result.refused.items()}


class Base(nn.Module):
    """A module with one buffer, which its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Rotary(Base):
    """Known to the models below by its class."""


class Four(nn.Module):
    """`_init_weights` as transformers 4 wrote it: weights by kind of module, buffers not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rotary = Rotary()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)


class Five(Four):
    """`_init_weights` as transformers 5 writes it."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Rotary):
            module.table.copy_(torch.arange(4.0))


class Twice(Four):
    """An enclosing model with another idea; the nearest one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Five()

    def _init_weights(self, module: nn.Module) -> None:
        module.table.fill_(9.0)


_TABLE = [0.0, 1.0, 2.0, 3.0]


def test_transformers_4_is_refused_by_name() -> None:
    assert _outcome(meta(Four)) == ({}, {"rotary.table": f"Four._init_weights {_UNPROVEN}"})


def test_transformers_5_recomputes_through_the_nearest_model() -> None:
    assert _outcome(nn.Sequential(meta(Five))) == ({"0.rotary.table": _TABLE}, {})
    assert _outcome(meta(Twice)) == ({"rotary.table": [9.0] * 4, "inner.rotary.table": _TABLE}, {})


def test_each_buffer_may_have_another_init() -> None:
    class Both(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("other", torch.ones(2), persistent=False)

        def _init_weights(self, module: nn.Module) -> None:
            module.table.copy_(torch.arange(4.0))

        def reset_parameters(self) -> None:
            raise TypeError("not this one")

        def reset_buffers(self) -> None:
            self.other.fill_(1.0)

    assert _outcome(meta(Both)) == ({"table": _TABLE, "other": [1.0, 1.0]}, {})


class Odd(Base):
    """An `_init_weights` of another signature, and an init that does nothing."""

    def _init_weights(self) -> None:
        self.table.fill_(1.0)

    def reset_parameters(self) -> None:
        pass


def test_the_reason_names_every_init_that_failed() -> None:
    values, reasons = _outcome(meta(Odd))
    assert values == {}
    assert reasons["table"].startswith("Odd._init_weights raised TypeError: ")
    assert reasons["table"].endswith(f"; Odd.reset_parameters {_UNPROVEN}")


def test_a_buffer_without_elements_needs_no_init() -> None:
    def build() -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("cache", torch.empty(0, 2), persistent=False)
        model.register_buffer("table", torch.ones(1), persistent=False)
        return model

    values, reasons = _outcome(meta(build))
    assert values == {"cache": []}
    assert reasons == {"table": f"Linear.reset_parameters {_UNPROVEN}"}
