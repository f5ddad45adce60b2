"""How tensors are called in reports and messages."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ftd_client.walk import Group


def title(group: Group) -> str:
    others = ", ".join((*group.names[1:4], *(["…"] if len(group.names) > 4 else [])))
    return f"{group.name} (also {others})" if others else group.name


def built(group: Group) -> str:
    return f"{shape_text(group.tensor.shape)} of {bare(group.tensor.dtype)}"


def shape_text(shape: Iterable[int]) -> str:
    return str(tuple(shape))


def bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
