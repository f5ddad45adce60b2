"""From a path to a `Checkpoint`: finds the files, reads their headers, collects every problem before it gives up."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from ftd.errors import SourceChangedError, SourceError
from ftd.source.access import MissingFileError, explained, opened
from ftd.source.base import Checkpoint, SourceFile, StoredTensor
from ftd.source.index import is_index
from ftd.source.listing import Listing, list_directory
from ftd.source.locate import locate
from ftd.source.safetensors import read_file
from ftd.source.sidecars import pick_sidecars
from ftd.source.strided import Strides
from ftd.source.torchfile import is_torch, read_torch_file
from ftd.source.weights import Weights, choose_weights, indexed_weights, is_torch_name
from ftd.source.wording import plural, quoted, shown, some
from ftd.tensorspec import TensorSpec

#: How `save_pretrained` names shards.
_SHARD = re.compile(r"-[0-9]{3,6}-of-0*([2-9]|[1-9][0-9]+)\.(safetensors|bin)$")


def resolve(path: Path, allowed: Collection[str] = (), environ: Mapping[str, str] = os.environ) -> Checkpoint:
    """The checkpoint at `path`: a file of safetensors or torch, an index, a directory as Hugging Face's libraries write
    it, or the name of a model on the hub that is in the local cache.

    Reads headers and the index, no weights, and checks the size of every file. Closes all it opens.

    Args:
        path: a relative one in the form of a hub's name (`ftd/hubname.py`) is that name if nothing is there.
        allowed: full names of types that are left out where torch checkpoints hold them.
        environ: says where the hub's cache is.

    Raises:
        ConfigError: `path` is nothing that can be read as a model.
        SourceError: it is, and is broken or incomplete; all files with a problem are in the one error.
        SourceChangedError: a file changed while its header was read.
    """
    place, is_directory = locate(path, environ)
    if is_directory:
        try:
            listing = list_directory(place, below=True)
        except OSError as error:
            raise _at(place, explained(place, error)) from None
        weights = choose_weights(listing)
    elif is_index(place.name):
        listing = _around(place, below=True)
        weights = indexed_weights(listing, place.name)
    else:
        listing = _around(place, below=False)
        weights = Weights(None, {place.name: None}, _shard_note(place.name))
    files, tensors, kinds, notes = _read(place, listing.root, weights, allowed)
    sidecars, skipped = pick_sidecars(listing)
    return Checkpoint(
        path=place,
        kind=" and ".join(sorted(kinds)),
        files=files,
        tensors=tensors,
        sidecars=sidecars,
        notes=(*weights.notes, *notes, *listing.notes, *skipped),
    )


def _at(place: Path, error: SourceError) -> SourceError:
    return SourceError(f"{shown(place)}: {error.message}", error.remedy)


def _around(place: Path, *, below: bool) -> Listing:
    """The directory of a file, for what lies beside it: without, the file can still be read."""
    try:
        return list_directory(place.parent, below=below)
    except OSError as error:
        reason = explained(place.parent, error).message
        return Listing(place.parent, (), (), (f"no sidecars, {shown(place.parent)}: {reason}",))


def _shard_note(name: str) -> tuple[str, ...]:
    shard = _SHARD.search(name)
    return (f"{shown(name)} is one of {shard[1]} shards; only this one is read",) if shard else ()


def _read(
    place: Path, directory: Path, weights: Weights, allowed: Collection[str]
) -> tuple[tuple[SourceFile, ...], tuple[StoredTensor, ...], set[str], list[str]]:
    """The files, their tensors, which formats they have, and notes."""
    files: list[SourceFile] = []
    tensors: list[StoredTensor] = []
    kinds: set[str] = set()
    notes: list[str] = []
    problems: dict[str, SourceError] = {}
    for name, wanted in weights.wanted.items():
        try:
            kind, file, stored, file_notes = _read_one(directory / name, name, allowed)
            if wanted is not None:
                file_notes += _compare(wanted, {spec.name for spec, _, _ in stored})
        except SourceChangedError:
            raise  # no use in looking further: somebody is writing
        except SourceError as error:
            problems[name] = error
            continue
        tensors.extend(
            StoredTensor(spec, len(files), offset, strides)
            for spec, offset, strides in stored
            if wanted is None or spec.name in wanted
        )
        files.append(file)
        kinds.add(kind)
        notes.extend(f"{shown(name)}: {note}" for note in file_notes)
    if problems:
        raise _collected(place, directory, weights, problems)
    if not tensors:
        raise SourceError(f"{shown(place)} has no tensor in it", "give the path of a model with weights")
    return tuple(files), tuple(tensors), kinds, notes


def _read_one(
    path: Path, name: str, allowed: Collection[str]
) -> tuple[str, SourceFile, list[tuple[TensorSpec, int, Strides]], list[str]]:
    """The format of a file, the file, its tensors, and notes."""
    if is_torch_name(name) or (not name.endswith(".safetensors") and is_torch(_head(path))):
        found = read_torch_file(path, name, allowed)
        return "torch", found.file, found.tensors, list(found.notes)
    file, stored = read_file(path, name)
    return "safetensors", file, [(spec, offset, None) for spec, offset in stored], []


def _head(path: Path) -> bytes:
    with opened(path) as fd:
        return os.pread(fd, 16, 0)


def _compare(wanted: frozenset[str], present: set[str]) -> list[str]:
    """Notes on tensors of a shard that the index doesn't take from it; an error if it lacks any it does."""
    lacking = sorted(wanted - present)
    if lacking:
        raise SourceError(
            f"lacks {plural(len(lacking), 'tensor')} that the index takes from it:"
            f" {some([quoted(tensor) for tensor in lacking], 8)}",
            "index and shards are of different versions: download both again",
        )
    rest = sorted(present - wanted)
    if not rest:
        return []
    return [f"ignored {plural(len(rest), 'tensor')} that the index does not take from it: {some(rest, 8)}"]


def _collected(place: Path, directory: Path, weights: Weights, problems: dict[str, SourceError]) -> SourceError:
    """One error that tells all: missing files by name, then the first broken ones with what is wrong."""
    name, first = next(iter(problems.items()))
    if len(weights.wanted) == 1 and not isinstance(first, MissingFileError):
        return _at(directory / name, first)
    missing = {name: error for name, error in problems.items() if isinstance(error, MissingFileError)}
    broken = {name: error for name, error in problems.items() if name not in missing}
    parts = []
    if missing:
        by = f" that {weights.index} names" if weights.index else ""
        names = [
            name if error.message == "is missing" else f"{name} ({error.message})" for name, error in missing.items()
        ]
        parts.append(f"{len(missing)} of {plural(len(weights.wanted), 'file')}{by} missing: {some(names, 16)}")
    if broken:
        told = "; ".join(f"{shown(name)} {error.message}" for name, error in list(broken.items())[:5])
        more = f"; and {len(broken) - 5} more" if len(broken) > 5 else ""
        parts.append(f"{len(broken)} of {plural(len(weights.wanted), 'file')} broken: {told}{more}")
    # missing files first: what is broken often is the rest of the same download
    remedy = next(iter((missing or broken).values())).remedy
    return SourceError(f"{shown(place)}: {'; '.join(parts)}", remedy)
