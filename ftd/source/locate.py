"""From what a user wrote as the model's path to a place on disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ftd.errors import ConfigError, SourceError
from ftd.source.access import MissingFileError, explained, kind_of
from ftd.source.hub import snapshot
from ftd.source.wording import encodable, shown


def locate(path: Path, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """The path without links, and whether it is a directory.

    A file keeps its own name: in the hub's cache it is a link to a blob, far from the sidecars. A relative path where
    nothing is may be the name of a model on the hub, looked for in the cache that `environ` tells.

    Raises:
        ConfigError: nothing is there, or neither file nor directory, or its name is not UTF-8 (status and manifest
            could not carry it).
        SourceError: the system refuses to say.
    """
    text = os.fspath(path)
    if "\0" in text or not encodable([text]):
        raise ConfigError(f"model path '{shown(text)}' is no path in UTF-8", "rename the file or directory")
    if not path.is_absolute() and not os.path.lexists(path):
        path = snapshot(text, environ) or path
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            place = Path(os.path.realpath(path, strict=True))
        elif stat.S_ISREG(mode):
            place = Path(os.path.realpath(path.parent, strict=True)) / path.name
        else:
            raise ConfigError(
                f"model path {shown(text)} is {kind_of(mode)}, expected a checkpoint, an index or a directory",
                "correct the model's path",
            )
    except OSError as error:
        reason = explained(path, error)
        if isinstance(reason, MissingFileError) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise ConfigError(f"model path {shown(text)} {reason.message}", "correct the model's path") from None
        raise SourceError(f"{shown(text)}: {reason.message}", reason.remedy) from None
    if not encodable([os.fspath(place)]):
        raise ConfigError(f"model path {shown(text)} leads to a name that is not UTF-8", "rename it")
    return place, stat.S_ISDIR(mode)
