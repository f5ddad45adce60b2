"""The files that travel with the weights: found when the checkpoint is resolved, read before the weights are."""

from __future__ import annotations

import os
import stat

from ftd.errors import SourceChangedError, SourceError, os_reason
from ftd.source.access import opened, read_exactly
from ftd.source.base import Sidecar
from ftd.source.listing import Listing
from ftd.source.sidecar_names import is_sidecar
from ftd.source.wording import shown, some
from ftd.units import MIB, format_bytes

#: All sidecars of a model together. They are copied for each generation; the weights are what may be large.
MAX_SIDECAR_BYTES = 32 * MIB
#: Names are few, but those of chat templates and modules are not counted, and empty files cost no bytes.
MAX_SIDECARS = 1024


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


def read_sidecar(sidecar: Sidecar) -> bytes:
    """Its bytes, of the size and time that the fingerprint stands for.

    Raises:
        SourceChangedError: it is another file by now, or cannot be read any more.
    """
    try:
        with opened(sidecar.path) as fd:
            _check_unchanged(sidecar, fd)  # before anything of that size is allocated
            data = read_exactly(fd, sidecar.bytes, 0)
            _check_unchanged(sidecar, fd)
            return data
    except SourceError as error:
        raise SourceChangedError(
            f"{shown(sidecar.path)} {error.message}", "start again once nothing writes to the directory"
        ) from None


def _check_unchanged(sidecar: Sidecar, fd: int) -> None:
    now = os.fstat(fd)
    if now.st_size != sidecar.bytes:
        raise SourceChangedError(f"has {now.st_size} bytes: expected {sidecar.bytes} as at the start")
    if now.st_mtime_ns != sidecar.mtime_ns:
        raise SourceChangedError(f"was written to since the start: expected mtime_ns {sidecar.mtime_ns}")
