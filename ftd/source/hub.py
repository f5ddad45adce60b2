"""Models of the Hugging Face hub that are in its local cache. Nothing is asked of the network, nothing is imported.

The cache of a model is `models--<org>--<name>`, with `refs/<revision>` (a file that holds a commit) and
`snapshots/<commit>`, a directory of links to the files' contents
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache). Reading that takes less than importing the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ftd.errors import ConfigError, SourceError
from ftd.hubname import MAIN, split_hub_name
from ftd.source.access import MissingFileError, opened
from ftd.source.wording import shown, some

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 256


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps downloads, by the variables that it reads (its `constants.py`)."""
    for variable, below in (
        ("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"),
    ):  # fmt: skip
        value = environ.get(variable)
        if value:
            return Path(os.path.expandvars(value)).expanduser() / below
    home = environ.get("HOME")
    return (Path(home) if home else Path("~").expanduser()) / ".cache/huggingface/hub"


def snapshot(text: str, environ: Mapping[str, str]) -> Path | None:
    """The directory of the model `org/name[@revision]` in the cache; None where `text` is no such name.

    Raises:
        ConfigError: it is not in the cache; the remedy downloads it.
    """
    name = split_hub_name(text)
    if name is None:
        return None
    repository, revision = name
    cache = cache_directory(environ)
    folder = cache / f"models--{repository.replace('/', '--')}"
    commit = revision if _COMMIT.fullmatch(revision) else _commit(folder / "refs" / revision)
    directory = folder / "snapshots" / commit if commit else None
    if directory is not None and directory.is_dir():
        return directory
    wanted = "" if revision == MAIN else f" --revision {revision}"
    found = _revisions(folder)
    known = f"; found there: {some(found, 8)}" if found else ""
    raise ConfigError(
        f"model {shown(text)} is neither a path nor, at revision {revision}, in the hub's cache {shown(cache)}{known}",
        f"run `hf download {repository}{wanted}` first, as a user who shares that cache; or correct the model's path",
    )


def _commit(ref: Path) -> str | None:
    try:
        with opened(ref) as fd:
            text = os.pread(fd, _MAX_REF_BYTES, 0).decode("ascii", "replace").strip()
    except SourceError as error:
        if isinstance(error, MissingFileError) or os.path.isdir(ref):  # noqa: PTH112  (Path's raises)
            return None
        raise ConfigError(f"{shown(ref)}: {error.message}", "let this user read the cache") from None
    return text if _COMMIT.fullmatch(text) else None


def _revisions(folder: Path) -> list[str]:
    try:
        refs = folder / "refs"
        return sorted(ref.relative_to(refs).as_posix() for ref in refs.rglob("*") if ref.is_file())
    except OSError:
        return []
