"""Writes checkpoints byte by byte: the safetensors library pads and checks, and so cannot write what tests need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import FtdError, SourceError
from ftd.source.resolve import resolve
from ftd.tensorspec import TensorSpec

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

INDEX = "model.safetensors.index.json"


def file_of(header: Any, data: bytes = b"", *, padding: int = 0) -> bytes:
    """A file with this header (text, bytes, or what JSON is made of) and `padding` spaces behind it."""
    if isinstance(header, str):
        raw = header.encode()
    elif isinstance(header, bytes):
        raw = header
    else:
        raw = json.dumps(header, ensure_ascii=False).encode()
    raw += b" " * padding
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def valid_file(tensors: Tensors, *, padding: int = 0, metadata: Any = ...) -> bytes:
    """Tensors in the order given; `metadata` is written where it is not `...`."""
    header: dict[str, Any] = {} if metadata is ... else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = entry(dtype, list(shape), len(data), len(data) + len(content))
        data += content
    return file_of(header, data, padding=padding)


def filled(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of random bytes."""
    return dtype, shape, os.urandom(TensorSpec("", dtype, shape).nbytes)


def write(directory: Path, files: dict[str, bytes | str | dict[str, Any]]) -> Path:
    """Files by relative name; a dict is written as JSON."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


def index_of(shards: dict[str, list[str]]) -> dict[str, Any]:
    """The index that takes these tensors from these files."""
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": 0}, "weight_map": weight_map}


def sharded(directory: Path, shards: dict[str, Tensors]) -> Path:
    """A directory with shards and the index that fits."""
    files: dict[str, Any] = {name: valid_file(tensors) for name, tensors in shards.items()}
    files[INDEX] = index_of({name: list(tensors) for name, tensors in shards.items()})
    return write(directory, files)


#: Two small shards.
A: Tensors = {"a.weight": filled("F32", (2, 3)), "a.bias": filled("F32", (2,))}
B: Tensors = {"b.weight": filled("BF16", (5,))}


def refusal(path: Path, kind: type[FtdError] = SourceError) -> FtdError:
    """The error of resolving `path`, of exactly this class."""
    with pytest.raises(FtdError) as caught:
        resolve(path)
    assert type(caught.value) is kind
    assert caught.value.remedy
    return caught.value
