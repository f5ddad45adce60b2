"""A tensor without torch: name, element type, shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Bits of one element by the name that the safetensors format gives the type
#: (https://github.com/huggingface/safetensors, `Dtype` of the format's definition, 0.8).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
    "C64": 64,
}  # fmt: skip

#: What torch calls them, where it has them: attributes of the module.
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of a tensor; its bytes are row-major and contiguous.

    Attributes:
        name: key in the checkpoint.
        dtype: a key of `DTYPE_BITS`.
        shape: in elements; `()` is a scalar. For types below 8 bits as the file states it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements.

        Raises:
            ValueError: the elements do not fill whole bytes.
        """
        bits = math.prod(self.shape) * DTYPE_BITS[self.dtype]
        if bits % 8:
            raise ValueError(f"{bits} bits do not fill whole bytes")
        return bits // 8
