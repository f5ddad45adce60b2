"""Outputs of streamed blocks: what of them lies in the ring is copied before other weights do."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

#: How deep outputs are searched for views: a dataclass of lists of tensors is three.
_DEPTH = 5


def outliving(output: Any, is_ours: Callable[[torch.Tensor], bool], depth: int = _DEPTH) -> Any:
    """`output` with copies of the tensors that lie in the ring: they would be overwritten while the caller has them.

    Containers of Python are searched, and the attributes of other objects. A container that has such a tensor is made
    anew where it can't be changed, and changed where it can.
    """
    if isinstance(output, torch.Tensor):
        return output.detach().clone() if is_ours(output) else output
    if output is None or isinstance(output, _PLAIN) or not depth:
        return output
    if isinstance(output, Mapping):
        _replace_kept(output, list(output.items()), is_ours, depth, operator.setitem)
    elif isinstance(output, tuple | list | set | frozenset):
        kept = [outliving(item, is_ours, depth - 1) for item in output]
        if any(a is not b for a, b in zip(kept, output, strict=True)):
            return output._make(kept) if hasattr(output, "_make") else type(output)(kept)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [(entry.name, getattr(output, entry.name)) for entry in dataclasses.fields(output)]
        _replace_kept(output, items, is_ours, depth, object.__setattr__)
    elif hasattr(output, "__dict__") and not isinstance(output, nn.Module | type):
        _replace_kept(output, list(vars(output).items()), is_ours, depth, object.__setattr__)
    return output


_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def _replace_kept(
    holder: Any,
    items: list[tuple[Any, Any]],
    is_ours: Callable[[torch.Tensor], bool],
    depth: int,
    put: Callable[[Any, Any, Any], object],
) -> None:
    for key, value in items:
        kept = outliving(value, is_ours, depth - 1)
        if kept is not value:
            put(holder, key, kept)
