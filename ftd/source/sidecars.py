"""Which files beside the weights travel with them: configuration and tokenizer, small, never code or weights."""

from __future__ import annotations

import os
import stat
from pathlib import PurePosixPath

from ftd.errors import os_reason
from ftd.source.base import Sidecar
from ftd.source.listing import Listing
from ftd.source.wording import shown, some
from ftd.units import MIB, format_bytes

#: All sidecars of a model together. They are copied for each generation; the weights are what may be large.
MAX_SIDECAR_BYTES = 32 * MIB
#: A directory that is also a dump of small files must not fill the manifest.
MAX_SIDECARS = 1024

_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".codes"}
# `tokenizer.model.v3`, `vocab`: what such a stem ends in varies, unlike what is weights or code
_STEMS = ("tokenizer", "vocab")
_NEVER = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack",
    ".npy", ".npz", ".ot", ".pb", ".tflite", ".py", ".pyc", ".so", ".sh", ".zip", ".tar", ".gz",
}  # fmt: skip


def is_sidecar(name: str) -> bool:
    """Whether a file of this relative name is wanted, whatever its size."""
    file = PurePosixPath(name).name.lower()
    suffix = PurePosixPath(file).suffix
    if file.startswith(".") or suffix in _NEVER:
        return False
    if suffix == ".json":
        return ".index." not in file  # the index of weights: its tensors are in the manifest
    return suffix in _SUFFIXES or file.startswith(_STEMS)


def pick_sidecars(listing: Listing) -> tuple[tuple[Sidecar, ...], tuple[str, ...]]:
    """The sidecars by name, and notes on what was skipped.

    Small files first, so that config.json always makes it.
    """
    found: list[Sidecar] = []
    notes: list[str] = []
    for name in filter(is_sidecar, listing.files):
        path = listing.root / name
        try:
            status = path.stat()
        except OSError as error:
            notes.append(f"{shown(name)}: sidecar skipped, {os_reason(error)}")
            continue
        if not stat.S_ISREG(status.st_mode):
            notes.append(f"{shown(name)}: sidecar skipped, no regular file")
        elif not os.access(path, os.R_OK, effective_ids=True):
            notes.append(f"{shown(name)}: sidecar skipped, permission denied")
        else:
            found.append(Sidecar(name, path, status.st_size, status.st_mtime_ns))
    found.sort(key=lambda sidecar: (sidecar.bytes, sidecar.name))
    kept, total = 0, 0
    while kept < min(len(found), MAX_SIDECARS) and total + found[kept].bytes <= MAX_SIDECAR_BYTES:
        total += found[kept].bytes
        kept += 1
    if kept < len(found):
        names = [f"{sidecar.name} ({format_bytes(sidecar.bytes)})" for sidecar in found[kept:]]
        limits = f"{format_bytes(MAX_SIDECAR_BYTES)} and {MAX_SIDECARS} files"
        notes.append(f"sidecars skipped, beyond {limits} in all: {some(names, 16)}")
    return tuple(sorted(found[:kept], key=lambda sidecar: sidecar.name)), tuple(notes)
