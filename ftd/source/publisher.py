"""What the publisher of a checkpoint says that its files are: SHA-256, where it can be found on this host.

- `<file>.sha256` beside the file: its only line, or the line that names it, as `sha256sum` and `shasum --tag` write it.
- The Hugging Face cache: a file is a link to a blob, and the blob of a large file is called by its SHA-256.
- Downloads of the Hugging Face hub into a directory (`local_dir`): `.cache/huggingface/download/<file>.metadata` has
  the same hash as its second line. As the hub does, it is disregarded where the file was written to since.

The formats themselves hold none: safetensors has no checksum, and torch's zip files have CRC-32 of records that their
writer may leave out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ftd.errors import SourceError
from ftd.source.access import opened, read_exactly
from ftd.source.base import SourceFile
from ftd.source.wording import shown

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GNU_LINE = re.compile(r"\\?([0-9a-fA-F]{64})(?:[ \t]+\*?(.+))?")
_BSD_LINE = re.compile(r"SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_MAX_BYTES = 1 << 20
#: What a file's time may be off against the clock of who wrote it (huggingface_hub, `read_download_metadata`).
_CLOCK_S = 1.0


def stated_hashes(file: SourceFile) -> dict[str, str]:
    """Hex SHA-256 of the file by who states it; empty where nobody does.

    Raises:
        SourceError: a `.sha256` beside it says nothing about it, or cannot be read.
    """
    found = {}
    for place, digest in (_beside(file), _blob(file), _download(file)):
        if digest is not None:
            found[place] = digest
    return found


def _beside(file: SourceFile) -> tuple[str, str | None]:
    path = file.path.with_name(f"{file.path.name}.sha256")
    if not path.exists():
        return "", None
    text = _text(path)
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := _BSD_LINE.fullmatch(line):
            name, digest = match.groups()
        elif match := _GNU_LINE.fullmatch(line):
            digest, name = match.groups()
        else:
            continue
        if name is None or os.path.basename(name) == file.path.name:  # noqa: PTH119  (text of somebody, no path yet)
            return str(path), digest.lower()
    raise SourceError(
        f"{shown(path)} has no SHA-256 of {shown(file.path.name)}: expected a line as sha256sum writes it",
        "write it anew, or remove it",
    )


def _blob(file: SourceFile) -> tuple[str, str | None]:
    blob = Path(os.path.realpath(file.path))
    is_hash = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) is not None
    return f"the name of {blob}", blob.name if is_hash else None


def _download(file: SourceFile) -> tuple[str, str | None]:
    for root in file.path.parents:
        path = root / ".cache/huggingface/download" / f"{file.path.relative_to(root)}.metadata"
        if not os.access(path, os.R_OK):  # also one in a `.cache` that is closed to this user
            continue
        _commit, etag, saved = [*_text(path).split("\n"), "", "", ""][:3]
        try:
            is_current = file.mtime_ns / 1e9 - _CLOCK_S <= float(saved)
        except ValueError:
            is_current = False
        return str(path), etag.strip() if is_current and _SHA256.fullmatch(etag.strip()) else None
    return "", None


def _text(path: Path) -> str:
    try:
        with opened(path) as fd:
            return read_exactly(fd, min(os.fstat(fd).st_size, _MAX_BYTES), 0).decode(errors="replace")
    except SourceError as error:
        raise SourceError(f"{shown(path)} {error.message}", error.remedy) from None
