"""Weights as `bind` sees them, over a plain dict of tensors: the daemon and shared memory left out."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ftd.tensorspec import TensorSpec
from ftd_client.choose import Choice

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


class DictWeights:
    """A checkpoint held in a dict. Entries that are the same tensor object are stored ties.

    Attributes:
        asked: names whose view somebody took, in that order.
    """

    choice: Choice | None = None

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.specs = {
            name: TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        self.asked: list[str] = []
        self._extents = {name: id(tensor) for name, tensor in tensors.items()}
        self._keep = list(tensors.values())

    def extent(self, name: str) -> Hashable:
        return self._extents[name]

    def select(self, choice: Choice | None) -> DictWeights:
        if choice is None:
            return self
        selected = DictWeights({})
        selected.choice = choice
        for name, piece in choice.pieces.items():
            whole = self.tensors[piece.stored.name]
            selected.tensors[name] = whole if piece.rows is None else whole[slice(*piece.rows)]
            selected.specs[name] = piece.spec
            selected._extents[name] = (self._extents[piece.stored.name], piece.rows)
        return selected

    def view(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.tensors[name]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that makes two tensors the same to the last bit, NaNs included."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes()
