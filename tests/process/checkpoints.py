"""Checkpoints for daemons: tiny ones, large ones that take no disk, and one whose load waits for the test."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from ftd.units import MIB
from tests.unit.source.checkpoint_files import Tensors, entry, file_of, valid_file, write

#: Three layers and something outside them. The bytes say which tensor they are.
TINY: Tensors = {
    "embed.weight": ("F32", (16, 8), hashlib.shake_256(b"embed").digest(512)),
    "layers.0.weight": ("BF16", (8, 8), hashlib.shake_256(b"0").digest(128)),
    "layers.1.weight": ("BF16", (8, 8), hashlib.shake_256(b"1").digest(128)),
    "layers.2.weight": ("BF16", (8, 8), hashlib.shake_256(b"2").digest(128)),
}


def tiny(directory: Path, *, tensors: Tensors = TINY) -> Path:
    """A model directory of about a kilobyte, with a configuration and a tokenizer beside the weights."""
    return write(directory, {
        "model.safetensors": valid_file(tensors),
        "config.json": {"model_type": "toy"},
        "tokenizer.json": {"vocab": []},
    })  # fmt: skip


def hollow(directory: Path, mib: int, *, name: str = "hollow.safetensors") -> Path:
    """A file of `mib` MiB of zeros in tensors of 1 MiB, whose data takes no disk. Read in requests of 16 MiB."""
    header = {f"layers.{i}.weight": entry("U8", [MIB], i * MIB, (i + 1) * MIB) for i in range(mib)}
    path = directory / name
    directory.mkdir(parents=True, exist_ok=True)
    data = file_of(header)
    path.write_bytes(data)
    os.truncate(path, len(data) + mib * MIB)
    return path


@contextlib.contextmanager
def held(file: Path) -> Iterator[int]:
    """Nobody opens `file` in this block: an open waits for its end (a write lease, fcntl(2)). Gives a descriptor of it.

    Held on a sidecar it stops a load behind the making of the segments and before the first weight, wherever it runs.
    Fork no worker inside: it would inherit the lease.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # how the kernel tells the holder that somebody waits
    fd = os.open(file, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield fd
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def digests(tensors: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}


TINY_DIGESTS = digests({name: data for name, (_, _, data) in TINY.items()})
