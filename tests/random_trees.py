"""Random trees of modules: which children are called, how often, in which order, and who reads whose parameters.

Every output is finite and depends on each parameter that was read, so that a wrong weight shows in its bits.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

import ftd_client

D = 8


class BoomError(Exception):
    """Raised by the model's own code."""


@dataclass(frozen=True)
class Turn:
    """What one forward is told.

    Attributes:
        bits: decides which children are called, and the order of layers.
        boom: whether modules that can raise do.
        manager: whose regions are entered; empty for none.
        again: how often modules that call themselves may.
    """

    bits: int
    boom: bool = False
    manager: str = ""
    again: int = 1

    def region(self, name: str) -> AbstractContextManager[None]:
        return ftd_client.offload_block(name, self.manager) if self.manager and name else nullcontext()


class Node(nn.Module):
    """Computes with what it owns, then with its children, then perhaps with itself once more."""

    def __init__(self, rnd: random.Random, depth: int) -> None:
        super().__init__()
        kind = rnd.choice(["linear", "bare", "both", "attention", "none"] if depth else ["linear", "bare"])
        self.linear = nn.Linear(D, D, bias=rnd.random() < 0.5) if kind in ("linear", "both") else None
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True) if kind == "attention" else None
        bare = kind in ("bare", "both")
        self.weight = nn.Parameter(torch.randn(D, D) / 3) if bare else None
        self.scale = nn.Parameter(torch.randn(D)) if bare else None
        self.kids = nn.ModuleList(Node(rnd, depth - 1) for _ in range(rnd.randint(0, 3) if depth else 0))
        ways = ["call", "call", "call", "twice", "if", "read", "view"]
        self.uses = [
            (rnd.choice(ways), rnd.randrange(len(self.kids))) for _ in range(rnd.randint(0, 4)) if len(self.kids)
        ]
        self.recurs = rnd.random() < 0.15
        self.region = rnd.choice(["one", "two", "three"]) if rnd.random() < 0.25 else ""
        self.booms = rnd.random() < 0.05

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        with turn.region(self.region):
            x = self._own(x)
            for way, index in self.uses:
                x = self._use(x, way, index, turn)
            if self.booms and turn.boom:
                raise BoomError
            if self.recurs and turn.again:
                x = self(torch.tanh(x), replace(turn, again=turn.again - 1))
            if self.linear is not None and self.scale is not None:
                x = x * self.scale  # read again after everything below
            return torch.tanh(x)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.weight is not None and self.scale is not None:
            x = torch.tanh(x @ self.weight + self.scale)
        if self.linear is not None:
            x = torch.tanh(self.linear(x))
        return x

    def _use(self, x: torch.Tensor, way: str, index: int, turn: Turn) -> torch.Tensor:
        kid = self.kids[index]
        if way == "read":
            for parameter in list(kid.parameters())[:2]:
                x = x + parameter.sum() * 0.01
            return x
        if way == "if" and not turn.bits >> index & 1:
            return x
        views = [p[:2] for p in kid.parameters(recurse=False) if p.dim() == 2] if way == "view" else []
        for _ in range(2 if way == "twice" else 1):
            x = kid(x, turn)
        for view in views:  # made before the child ran, read after it
            x = x + view.sum() * 0.01
        return x


class Tree(nn.Module):
    """Layers in an order of its own, or one that each forward decides; one of them may stand twice."""

    def __init__(self, rnd: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Node(rnd, rnd.randint(0, 2)) for _ in range(rnd.randint(1, 5)))
        if rnd.random() < 0.3:
            self.layers[-1] = self.layers[0]
        self.order = [rnd.randrange(len(self.layers)) for _ in range(rnd.randint(1, 7))]
        self.shuffles = rnd.random() < 0.4
        self.out = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        order = list(self.order)
        if self.shuffles:
            random.Random(turn.bits).shuffle(order)
        for index in order:
            x = self.layers[index](x, turn)
        out: torch.Tensor = self.out(x)
        return out
