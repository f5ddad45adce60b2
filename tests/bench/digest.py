"""What tensors hold, as one word that is the same on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Depends on every byte of every tensor and its place, not on types or shapes.

    A sum of words weighted by odd numbers of their own, modulo 2^64: integers, so that the order of the additions and
    the device do not matter. Takes tensors whose bytes are a multiple of 8.
    """
    weights: dict[tuple[int, torch.device], torch.Tensor] = {}
    sums = {}
    for name, tensor in tensors.items():
        words = tensor.detach().contiguous().reshape(-1).view(torch.int64)
        key = (words.numel(), words.device)
        if key not in weights:
            weights[key] = 2 * torch.arange(words.numel(), device=words.device) + 1
        sums[name] = (words * weights[key]).sum()
    if not sums:
        return ""
    # one copy from the device, not a thousand
    values = torch.stack(list(sums.values())).tolist()
    return hashlib.blake2b(repr(sorted(zip(sums, values, strict=True))).encode(), digest_size=16).hexdigest()
