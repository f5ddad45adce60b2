"""What a model of the streaming suite is: how it is built, how it is called, which of its modules are layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

SEED = 20


@dataclass(frozen=True)
class Call:
    """One call of the model, or of the submodule `at`."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""

    def run(self, model: nn.Module) -> Any:
        return model.get_submodule(self.at)(*self.args, **self.kwargs)

    def to(self, device: torch.device | str) -> Call:
        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        args = tuple(moved(value) for value in self.args)
        return Call(args, {name: moved(value) for name, value in self.kwargs.items()}, self.at)


@dataclass(frozen=True)
class Case:
    """A model, and the calls that reach all of its layers.

    Attributes:
        include: patterns of its layers.
        shared: tensors are shared between layers, which only the transfer mode `strategy` streams.
        unread: globs of parameters of layers that no call reads.
    """

    model: nn.Module
    calls: tuple[Call, ...]
    include: tuple[str, ...] = ("layers.*",)
    shared: bool = False
    unread: tuple[str, ...] = ()

    def reads(self, parameter: str) -> bool:
        return not any(fnmatchcase(parameter, glob) for glob in self.unread)


#: Builders by name; `made` builds. The docstring of a builder says what its model does that is hard to stream.
CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def made(name: str) -> Case:
    """The case, on the CPU, in eval mode and without gradients; equal bit for bit in every process.

    No two parameters are alike: initial ones and zeros would hide that a norm was read in another's place.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        built = CASES[name]()
        with torch.no_grad():
            for parameter in built.model.parameters():
                if parameter.is_floating_point() and 0 not in parameter.stride():
                    parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.05)
    built.model.requires_grad_(False).eval()
    return built


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an output, however it is nested, in its order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for value in output:
            yield from tensors(value)
