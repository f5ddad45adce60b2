"""A checkpoint for benchmarks: random bytes in the shape of a transformer, written once, warm in the page cache."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

MIB = 1 << 20


def write(path: Path, total_bytes: int, tensors: int) -> int:
    """Writes a safetensors file of `tensors` bfloat16 tensors of equal size, ten a layer; gives their bytes."""
    each = total_bytes // tensors // 4096 * 4096
    header: dict[str, object] = {}
    for index in range(tensors):
        name = f"model.layers.{index // 10}.part{index % 10}.weight"
        header[name] = {
            "dtype": "BF16",
            "shape": [each // 4096, 2048],
            "data_offsets": [index * each, (index + 1) * each],
        }
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    block = os.urandom(64 * MIB)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left, at = each * tensors, 0
        while left:
            # another start each time, so that no two layers are equal
            piece = memoryview(block)[at % MIB :][: min(left, 63 * MIB)]
            left -= file.write(piece)
            at += 4097
    warm(path)
    return each * tensors


def warm(path: Path) -> None:
    """Brings the file into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 * MIB)
        while file.readinto(buffer):
            pass
