"""The one bridge between element type names and torch types."""

from __future__ import annotations

import torch

from ftd.errors import BindError

# getattr: a torch that lacks a type still serves the others; `torch_dtype` names what is missing
_TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """The torch type of the element type `name`; `tensor` is who asks, for the message.

    Raises:
        BindError: this torch has no such type.
    """
    attribute = _TORCH_NAMES.get(name)
    dtype = getattr(torch, attribute, None) if attribute else None
    if not isinstance(dtype, torch.dtype):
        raise BindError(
            f"tensor {tensor!r} has element type {name}, which torch {torch.__version__} lacks",
            "use a newer torch, or convert the checkpoint",
        )
    return dtype
