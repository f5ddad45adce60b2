"""A checkpoint for benchmarks: a llama's directory with 1,002 tensors of random bytes, and its file in or out of the
page cache."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
LAYERS = 111
_VOCABULARY, _HEAD = 1024, 64


@dataclass(frozen=True)
class Checkpoint:
    """Attributes: its directory; its safetensors file; tensors and their bytes."""

    folder: Path
    file: Path
    tensors: int
    nbytes: int


def write(folder: Path, about_bytes: int, layers: int = LAYERS) -> Checkpoint:
    """Writes a bf16 LlamaForCausalLM that transformers can load too, and leaves it in the page cache."""
    width, hidden = _shape(about_bytes, layers)
    header: dict[str, object] = {}
    at = 0
    for name, shape in _tensors(width, hidden, layers):
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path = folder / "model.safetensors"
    block = os.urandom(64 * MIB)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left, start = at, 0
        while left:
            # another start each time, so that no two layers are equal
            piece = memoryview(block)[start % MIB :][: min(left, 63 * MIB)]
            left -= file.write(piece)
            start += 4097
    (folder / "config.json").write_text(json.dumps(_config(width, hidden, layers)))
    warm(path)
    return Checkpoint(folder, path, len(header), at)


def _shape(about_bytes: int, layers: int) -> tuple[int, int]:
    """(width, hidden width) of a llama whose layers have about so many bytes: 12 width² + 2 width parameters each
    where hidden = 8/3 width, and what rounding the width left goes into the hidden width."""
    parameters = about_bytes / 2 / layers
    width = max(round(math.sqrt(parameters / 12) / _HEAD), 1) * _HEAD
    hidden = max(round((parameters - 4 * width**2) / (3 * width) / 16), 1) * 16
    return width, hidden


def _tensors(width: int, hidden: int, layers: int) -> Iterator[tuple[str, list[int]]]:
    yield "model.embed_tokens.weight", [_VOCABULARY, width]
    for index in range(layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", [width]
        for part in "qkvo":
            yield f"{prefix}.self_attn.{part}_proj.weight", [width, width]
        yield f"{prefix}.post_attention_layernorm.weight", [width]
        yield f"{prefix}.mlp.gate_proj.weight", [hidden, width]
        yield f"{prefix}.mlp.up_proj.weight", [hidden, width]
        yield f"{prefix}.mlp.down_proj.weight", [width, hidden]
    yield "model.norm.weight", [width]
    yield "lm_head.weight", [_VOCABULARY, width]


def _config(width: int, hidden: int, layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": _VOCABULARY,
        "num_attention_heads": width // _HEAD, "num_key_value_heads": width // _HEAD, "head_dim": _HEAD,
        "tie_word_embeddings": False, "max_position_embeddings": 2048,
    }  # fmt: skip


def warm(path: Path) -> None:
    """Brings the file into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 * MIB)
        while file.readinto(buffer):
            pass


def cool(path: Path) -> float:
    """Puts the file out of the page cache; gives the share of it that stayed there all the same."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # the kernel drops no page that is still to be written
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached(path)


def cached(path: Path) -> float:
    """The share of the file's pages that are in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file:  # writable for ctypes only
        mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in bytes(pages)) / len(pages)
