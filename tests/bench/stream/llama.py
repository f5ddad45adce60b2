"""A llama-shaped model for benchmarks of offloading, its checkpoint, and how a forward of it is timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int


#: 7 GB.
FULL = Shape(16, 4096, 14336, 32, 8)
#: As many modules, none of which computes for long: what is left of a forward is the host's work.
THIN = Shape(16, 64, 128, 4, 2)
TINY = Shape(3, 64, 128, 4, 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, kv = shape.width, shape.width // shape.heads * shape.kv_heads
        self.heads = shape.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = nn.Linear(d, kv, bias=False), nn.Linear(d, kv, bias=False)
        self.gate, self.up = nn.Linear(d, shape.hidden, bias=False), nn.Linear(d, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        by_head = (x.shape[0], x.shape[1], -1, x.shape[2] // self.heads)
        q, k, v = (part(y).view(by_head).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def skeleton(shape: Shape) -> Llama:
    """The model on meta."""
    with torch.device("meta"):
        return Llama(shape).to(DTYPE).requires_grad_(False).eval()


def random(shape: Shape, device: torch.device) -> Llama:
    """The model with weights of its own, the same in every process of a device."""
    model = skeleton(shape).to_empty(device=device)
    source = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        centre, spread = (0.0, 0.02) if parameter.dim() > 1 else (1.0, 0.1)
        parameter.normal_(centre, spread, generator=source)
    return model


def loaded(shape: Shape, checkpoint: Path, device: torch.device) -> Llama:
    """The checkpoint's model in memory that torch allocated: tensors of a file's mapping stand at odd addresses, where
    kernels round otherwise."""
    from safetensors import safe_open

    model = skeleton(shape).to_empty(device=device)
    with safe_open(checkpoint, "pt") as file:
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
    return model


def layer_bytes(model: nn.Module) -> int:
    """Bytes of all layers, which are what streams."""
    return sum(p.nbytes for name, p in model.named_parameters() if name.startswith("layers."))


def tokens_of(count: int, shape: Shape, device: torch.device) -> torch.Tensor:
    """bf16[1, count, width] @device, the same in every process."""
    return torch.randn(1, count, shape.width, generator=torch.Generator().manual_seed(count)).to(device, DTYPE)


def wait(device: torch.device) -> None:
    """Until the output is there. Not for the device: what is being copied for the next forward is its affair."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def timed(model: nn.Module, x: torch.Tensor, forwards: int = 7, warm: int = 2) -> float:
    """Milliseconds of a steady forward, from the output of the one before to its own: the median."""
    times = []
    with torch.inference_mode():
        for _ in range(warm):
            model(x)
            wait(x.device)
        for _ in range(forwards):
            begun = time.perf_counter()
            model(x)
            wait(x.device)
            times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def host_us(model: nn.Module, x: torch.Tensor, forwards: int = 50, warm: int = 10) -> float:
    """Microseconds until a forward has been submitted, with the device idle when it begins: the median."""
    times = []
    with torch.inference_mode():
        for _ in range(warm + forwards):
            begun = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - begun)
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
    return statistics.median(times[warm:]) * 1e6
