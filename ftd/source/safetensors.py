"""Reads the header of one safetensors file: one open, two small reads, no mapping, no weights."""

from __future__ import annotations

import os
from pathlib import Path

from ftd.errors import SourceError
from ftd.packing import no_collection
from ftd.source.access import opened, read_exactly
from ftd.source.base import SourceFile
from ftd.source.disguise import recognised
from ftd.source.header import LENGTH_BYTES, MAX_HEADER_BYTES, MIN_HEADER_BYTES, parse_header
from ftd.source.wording import DOWNLOAD_AGAIN
from ftd.tensorspec import TensorSpec

#: Read first: enough to tell what a file is that is no safetensors, little enough to be free.
_HEAD_BYTES = 1024


def read_file(path: Path, name: str) -> tuple[SourceFile, list[tuple[TensorSpec, int]]]:
    """The file and its tensors with absolute offsets, by rising offset; `name` is how the index writes it.

    Raises:
        SourceError: the file is missing, unreadable, cut short, or breaks the format; messages carry no path.
        SourceChangedError: it changed meanwhile.
    """
    with opened(path) as fd:
        status = os.fstat(fd)
        raw = _read_header(fd, status.st_size)
        with no_collection():
            tensors = parse_header(raw, status.st_size)
        file = SourceFile.of(path, name, status, raw)
        file.check_unchanged(fd)
        return file, tensors


def _read_header(fd: int, file_bytes: int) -> bytes:
    """The header's JSON bytes; its length is checked before anything of that size is allocated."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    if not head:
        raise SourceError("is empty (0 bytes)", DOWNLOAD_AGAIN)
    if len(head) < LENGTH_BYTES + MIN_HEADER_BYTES:
        raise SourceError(f"is {len(head)} bytes: too short for a safetensors header", DOWNLOAD_AGAIN)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if not MIN_HEADER_BYTES <= length <= limit:
        raise _no_safetensors(
            head,
            f"states a header of {length} bytes, expected {MIN_HEADER_BYTES} to {limit}"
            f" (the file has {file_bytes}, a header at most {MAX_HEADER_BYTES})",
        )
    if head[LENGTH_BYTES] not in b"{ \t\r\n":  # the reference implementation lets white space in front pass
        raise _no_safetensors(head, f"has no JSON object at byte {LENGTH_BYTES}")
    return read_exactly(fd, length, LENGTH_BYTES)


def _no_safetensors(head: bytes, problem: str) -> SourceError:
    found = recognised(head)
    if found is None:
        return SourceError(f"is no safetensors file: it {problem}", DOWNLOAD_AGAIN)
    what, remedy = found
    return SourceError(f"is no safetensors file: it is {what}", remedy)
