"""What the contestants of a benchmark run are told; each runs in a process of its own."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.bench.stream import llama


@dataclass(frozen=True)
class Contest:
    """One run: the model, the device, and what the contestants before found.

    Args:
        tokens: four counts of tokens at which forwards are timed, ascending.
        checkpoint: safetensors file of the model.
        namespace: whose daemon serves it.
        budget_bytes: GPU memory that a peer with a memory mode is allowed.
        weight_bytes: GPU memory that ftd's memory mode is to use for weights and ring.
        activation_bytes: by count of tokens (as text), what the process has allocated at its peak beyond weights.
    """

    device: str
    tiny: bool
    tokens: tuple[int, ...]
    checkpoint: str
    namespace: str
    budget_bytes: int
    weight_bytes: int = 0
    activation_bytes: dict[str, int] | None = None

    @staticmethod
    def of(plain: dict[str, Any]) -> Contest:
        return Contest(**plain | {"tokens": tuple(plain["tokens"])})

    def plain(self) -> dict[str, Any]:
        """What JSON can carry."""
        return asdict(self)

    @property
    def shape(self) -> llama.Shape:
        return llama.TINY if self.tiny else llama.FULL

    @property
    def on(self) -> torch.device:
        return torch.device(self.device)

    @property
    def cuda(self) -> bool:
        return self.on.type == "cuda"

    @property
    def fewest(self) -> int:
        """The count at which nothing hides a copy."""
        return self.tokens[0]

    @property
    def many(self) -> int:
        """The count that FlexTensor is profiled for, at which compute hides copies."""
        return self.tokens[2]

    def on_cpu(self) -> llama.Llama:
        return llama.loaded(self.shape, Path(self.checkpoint), torch.device("cpu"))

    def resident(self) -> llama.Llama:
        return llama.loaded(self.shape, Path(self.checkpoint), self.on)

    def x(self, count: int) -> torch.Tensor:
        return llama.tokens_of(count, self.shape, self.on)

    def fraction(self, nbytes: int) -> float:
        total = (
            torch.cuda.get_device_properties(self.on).total_memory if self.cuda else psutil.virtual_memory().total
        )  # fmt: skip
        return nbytes / total

    def allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated(self.on) if self.cuda else 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.on) if self.cuda else 0
