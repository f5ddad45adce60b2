"""The one bridge between tensors as the manifest describes them and torch's types."""

from __future__ import annotations

import torch

from ftd.errors import BindError
from ftd.tensorspec import TORCH_NAMES, TensorSpec

#: One that this torch lacks is not among them.
_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in TORCH_NAMES.items() if hasattr(torch, attribute)
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
#: First release of torch that has the type; all of the others are older than the oldest that is supported.
_SINCE = {"F8_E8M0": "2.7", "F4": "2.8"}


def torch_form(spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of the tensor in torch, which counts the bytes of 4-bit elements, two to a byte.

    Raises:
        BindError: this torch has no such type, or rows of 4-bit elements end inside a byte.
    """
    dtype = torch_dtype(spec.dtype, spec.name)
    if spec.dtype != "F4":
        return dtype, spec.shape
    *rows, row = spec.shape or (1,)
    if row % 2:
        raise BindError(
            f"tensor {spec.name!r} has rows of {row} 4-bit elements, which torch keeps in pairs",
            "convert the checkpoint to rows of even length",
        )
    return dtype, (*rows, row // 2)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec | None:
    """How the manifest describes a tensor; None where it cannot. The inverse of `torch_form`."""
    dtype = _NAMES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            return None  # a single element of it fills no byte
        shape = (*shape[:-1], shape[-1] * 2)
    return None if dtype is None else TensorSpec(name, dtype, shape)


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """The torch type of the element type `name`; `tensor` is who asks, for the message.

    Raises:
        BindError: this torch has no such type.
    """
    dtype = _TYPES.get(name)
    if dtype is None:
        raise BindError(
            f"tensor {tensor!r} has element type {name}, which torch {torch.__version__} lacks",
            f"use torch {_SINCE[name]} or newer, or convert the checkpoint"
            if name in _SINCE
            else "convert the checkpoint",
        )
    return dtype
