"""Equality to the last bit."""

from __future__ import annotations

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality of contiguous tensors of one type, shape and device that tells NaNs and zeros apart."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # a single element is contiguous whatever its stride, which `view` keeps and then can't show as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
