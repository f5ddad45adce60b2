"""Models that call their layers in another order than they hold them, more than once, or not at all."""

from __future__ import annotations

import torch
from torch import nn

from tests.streamed_blocks import Block, D, Stack, blocks, call, rows
from tests.streamed_case import Call, Case, case


@case
def twice_in_a_row() -> Case:
    """Each layer is called twice before the next one."""

    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(layer(x))
            return self.head(x)

    return Case(Twice(*blocks()), (call(),))


@case
def again_later() -> Case:
    """A layer is called once more after others have run."""

    class Again(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at in (0, 1, 2, 3, 1, 0):
                x = self.layers[at](x)
            return self.head(x)

    return Case(Again(*blocks()), (call(),))


@case
def looped_stack() -> Case:
    """The whole stack runs twice in one forward."""

    class Looped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    return Case(Looped(*blocks()), (call(),))


@case
def recursive() -> Case:
    """A layer calls itself: its scope is entered again before it is left."""

    class Recursive(Block):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = super().forward(x)
            return y if depth == 0 else self(y, depth - 1) + self.up(x)[..., :D]

    return Case(Stack(Block(), Recursive(), Block()), (call(),))


@case
def never_called() -> Case:
    """Layers that no forward calls, first, in the middle and last."""

    class Skips(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at in (1, 2, 4):
                x = self.layers[at](x)
            return self.head(x)

    return Case(Skips(*blocks(6)), (call(),), unread=("layers.0.*", "layers.3.*", "layers.5.*"))


@case
def early_exit() -> Case:
    """The input decides how many layers run: copies are on their way that nobody waits for."""

    class Exits(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[: 2 if x.shape[0] == 1 else 6]:
                x = layer(x)
            return self.head(x)

    return Case(Exits(*blocks(6)), (call(1, D), call(3, D), call(1, D)))


@case
def mixture() -> Case:
    """The input's values decide which experts run, and in which order."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D, 4, bias=False)
            self.experts = nn.ModuleList(blocks())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            score, chosen = self.router(x).sum(0).topk(2)
            return sum(self.experts[int(at)](x) * weight for at, weight in zip(chosen, score.softmax(0), strict=True))

    calls = tuple(call() for _ in range(12))
    return Case(Stack(*(Mixture() for _ in range(3))), calls)


@case
def reordered() -> Case:
    """The same layers run backwards for some inputs."""

    class Reordered(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers if x.shape[0] % 2 else reversed(self.layers):
                x = layer(x)
            return self.head(x)

    return Case(Reordered(*blocks()), (call(3, D), call(2, D), call(3, D)))


@case
def nested_layers() -> Case:
    """A layer inside a layer: the outer one's parameters are read before and after the inner ones."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(D, D), Block(), nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(self.first(x)))

    return Case(Stack(*(Outer() for _ in range(3))), (call(),), ("layers.*", "layers.*.inner"))


@case
def submodule_called() -> Case:
    """Callers call layers, and parts of layers, without the model."""
    calls = (call(), Call((rows(),), at="layers.2"), Call((rows(),), at="layers.0.up"), call())
    return Case(Stack(*blocks()), calls)
