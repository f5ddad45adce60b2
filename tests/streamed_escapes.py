"""Models whose weights outlive their layer's forward, and layers that guard their attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.streamed_blocks import Block, D, Stack, blocks, call
from tests.streamed_case import Case, case


class Positions(nn.Module):
    """Returns a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[: x.shape[0]]


@case
def view_of_weight() -> Case:
    """A layer's output is a view of its weight, and is used after all others have run."""

    class Late(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = self.layers[0](x)
            for layer in self.layers[1:]:
                x = layer(x)
            return self.head(x + positions)

    return Case(Late(Positions(), *blocks(4)), (call(), call(7, D)))


@case
def parameter_itself() -> Case:
    """A layer's output is its parameter; the caller asks for the model's output too, which holds another's."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self) -> torch.Tensor:
            return self.weight

    class Collects(Stack):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = self.layers[0](), self.layers[1]()
            for layer in self.layers[2:]:
                x = layer(x)
            return self.head(x + first), second

    return Case(Collects(Gives(), Gives(), *blocks(4)), (call(),))


@case
def nested_outputs() -> Case:
    """Outputs are dictionaries, tuples and lists in one another, with views of weights far inside."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            seen = [*state["seen"], {"bias": self.linear.bias, "rows": (self.linear.weight[:2], None)}]
            return {"x": self.linear(state["x"]), "seen": seen}

    class Collects(Stack):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            state: dict[str, Any] = {"x": x, "seen": []}
            for layer in self.layers:
                state = layer(state)
            return {"x": self.head(state["x"]), "seen": state["seen"]}

    return Case(Collects(*(Nested() for _ in range(5))), (call(),))


@case
def cached_view() -> Case:
    """A layer keeps a view of its weight from the first forward on, and computes with that ever after."""

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.transposed: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if self.transposed is None:
                self.transposed = self.linear.weight.t()
            return y + x @ self.transposed

    return Case(Stack(*(Caches() for _ in range(4))), (call(), call()))


@case
def sealed() -> Case:
    """A layer refuses that attributes are set once it is built."""

    class Sealed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.built = True

        def __setattr__(self, name: str, value: Any) -> None:
            if self.__dict__.get("built") and name != "training":
                raise AttributeError(f"{name} cannot be set")
            super().__setattr__(name, value)

    return Case(Stack(*(Sealed() for _ in range(3))), (call(),))


@case
def delegating() -> Case:
    """A layer passes attributes on to the module that it wraps: a forward set on it lands there."""

    class Wraps(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self._modules["wrapped"] = wrapped
            self.register_parameter("gain", nn.Parameter(torch.randn(D)))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules["wrapped"], name)

        def __setattr__(self, name: str, value: Any) -> None:
            wrapped = self.__dict__.get("_modules", {}).get("wrapped")
            if wrapped is None or name in ("training", "gain"):
                super().__setattr__(name, value)
            else:
                setattr(wrapped, name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * self.wrapped(x)

    return Case(Stack(*(Wraps(Block()) for _ in range(3))), (call(),))
