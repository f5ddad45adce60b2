"""Models in which somebody else reads a layer's parameters: ties, borrowed weights, parents that read children's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.streamed_blocks import Block, D, Stack, blocks, call
from tests.streamed_case import Call, Case, case


@case
def tied_across() -> Case:
    """Embedding and head are one tensor, and both are layers."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(20, D), Block(), Block(), nn.Linear(D, 20, bias=False)])
            self.layers[3].weight = self.layers[0].weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = tokens
            for layer in self.layers:
                x = layer(x)
            return x

    return Case(Tied(), (Call((torch.randint(20, (2, 5)),)),), shared=True)


@case
def tied_within() -> Case:
    """Two linears of one block are one tensor."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(D, D), nn.Linear(D, D)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.other(F.gelu(self.one(x)))

    return Case(Stack(*(Tied() for _ in range(4))), (call(),))


@case
def two_names() -> Case:
    """One module under two names in a block, and one layer that stands twice in the stack."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(D, D)
            self.other = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(F.gelu(self.one(x)))

    again = Named()
    return Case(Stack(again, Named(), again), (call(),), shared=True)


@case
def plain_list() -> Case:
    """Layers are called through a plain list, which no walk over modules sees."""

    class Listed(Stack):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.order = [self.layers[at] for at in (2, 0, 1)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.order:
                x = layer(x)
            return self.head(x)

    return Case(Listed(*blocks(3)), (call(),))


@case
def multihead_attention() -> Case:
    """The parent reads the weight of `out_proj`, which it never calls."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    return Case(Stack(*(Attention() for _ in range(3))), (call(2, 3, D),))


@case
def encoder_layers() -> Case:
    """The fast path reads every parameter of the layer at once and calls none of its modules."""
    layers = (nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True) for _ in range(3))
    return Case(Stack(*layers), (call(2, 3, D),))


@case
def lstm() -> Case:
    """Weights are read from a list that the module keeps beside its parameters, and may be packed into one."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.lstm(x)[0]

    return Case(Stack(*(Recurrent() for _ in range(3))), (call(2, 3, D),))


@case
def borrowed_weight() -> Case:
    """A layer computes with the weight of another layer, which is not being called then."""

    class Borrows(nn.Module):
        def __init__(self, owner: nn.Linear) -> None:
            super().__init__()
            self.own = nn.Linear(D, D)
            self.owner = (owner,)  # hidden from named_modules

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.linear(self.own(x), self.owner[0].weight)

    layers = [nn.Linear(D, D), Block(), Block()]
    return Case(Stack(*layers, Borrows(layers[0])), (call(),))


@case
def borrowed_within() -> Case:
    """A block computes with the weight of its own child and never calls it."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.called = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.linear(self.called(x), self.used.weight, self.used.bias)

    return Case(Stack(*(Borrows() for _ in range(4))), (call(),))
