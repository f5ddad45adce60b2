"""Models whose blocks are hard to stream for what they are made of: sizes, strides, dtypes, bare parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.streamed_case import Call, Case, case

D = 16


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, D)))


def call(*shape: int) -> Call:
    return Call((rows(*shape),))


class Block(nn.Module):
    """Pre-norm residual block; the usual one, which most of these models are made of."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers one after the other, and a head that stays."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def blocks(count: int = 4) -> list[nn.Module]:
    return [Block() for _ in range(count)]


@case
def norms_first() -> Case:
    """Nothing but small norms before larger linears: units of very different sizes."""
    return Case(Stack(*blocks()), (call(), call(5, D)))


@case
def bare_parameters() -> Case:
    """Blocks own parameters beside their modules: a class token read first, a layer scale read last."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, D))
            self.inner = Block()
            self.gamma = nn.Parameter(torch.randn(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gamma * self.inner(torch.cat([self.token, x]))

    return Case(Stack(*(Scaled() for _ in range(4))), (call(),))


@case
def empty_layers() -> Case:
    """Layers without parameters between others, one of them a container of nothing."""
    layers = [nn.Identity(), Block(), nn.Dropout(), nn.Sequential(), Block(), nn.ReLU(), Block()]
    return Case(Stack(*layers), (call(),))


@case
def one_giant_layer() -> Case:
    """One layer has nearly all bytes: no ring holds two of it for the price of one."""
    giant = nn.Sequential(nn.Linear(D, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, D))
    return Case(Stack(Block(), giant, Block()), (call(),))


@case
def only_layer() -> Case:
    """A single layer: the block that follows it is itself."""
    return Case(Stack(Block()), (call(),))


@case
def many_tiny_layers() -> Case:
    """64 layers of 1 KiB, hardly more than the alignment of a tensor."""

    class Adds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x) / 4

    return Case(Stack(*(Adds(D, D, bias=False) for _ in range(64))), (call(),))


@case
def odd_shapes() -> Case:
    """Parameters of no dimension and of no element, among them a layer of no bytes at all."""

    class Odd(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(0, D))
            self.weight = nn.Parameter(torch.randn(rows, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + torch.cat([self.nothing, self.weight]).sum(0)

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.sum()

    return Case(Stack(Odd(3), Nothing(), Odd(1), Odd(2)), (call(),), unread=("*.nothing", "layers.1.weight"))


@case
def strides() -> Case:
    """Parameters that are not contiguous: transposed, channels last, and expanded from one element."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, 2 * D).t())
            self.kernel = nn.Parameter(torch.randn(2, 2, 3, 3).to(memory_format=torch.channels_last))
            self.bias = nn.Parameter(torch.randn(1).expand(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x @ self.weight.t() @ self.weight) / D + self.bias
            return y + F.conv2d(x.view(-1, 2, 2, 4), self.kernel, padding=1).flatten(1)

    return Case(Stack(*(Strided() for _ in range(3))), (call(),))


@case
def mixed_dtypes() -> Case:
    """float16, bfloat16, float64 and int8 parameters side by side, quantized with an int8 buffer as well."""

    class Mixed(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D, dtype=dtype)
            quantized = torch.randint(-127, 128, (D, D), dtype=torch.int8)
            self.quantized = nn.Parameter(quantized, requires_grad=False)
            self.scale = nn.Parameter(torch.rand(D, 1) / 100)
            self.register_buffer("offset", torch.randint(-9, 9, (D,), dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x.to(self.linear.weight.dtype)).float()
            return x + F.linear(y, self.quantized.float() * self.scale, self.offset.float() / 10)

    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.float32)
    return Case(Stack(*(Mixed(dtype) for dtype in dtypes)), (call(),))


@case
def flat_storage() -> Case:
    """All parameters of all layers are slices of one tensor, at odd offsets."""
    model = Stack(*blocks(3))
    flat = torch.randn(1 + sum(p.numel() for p in model.parameters()))
    at = 1
    for parameter in model.parameters():
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    return Case(model, (call(),))


@case
def parametrized() -> Case:
    """The weight is computed at each access, from parameters of a child that nobody calls."""

    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).t()

    class Parametrized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = parametrizations.weight_norm(nn.Linear(D, D))
            self.symmetric = nn.Linear(D, D)
            parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.symmetric(F.gelu(self.normed(x)))

    return Case(Stack(*(Parametrized() for _ in range(3))), (call(),))
