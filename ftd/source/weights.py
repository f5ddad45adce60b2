"""Which files of a directory are the model's weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ftd.errors import SourceError
from ftd.source.index import is_index, read_index
from ftd.source.listing import Listing
from ftd.source.wording import plural, shown, some

_TRANSFORMERS, _DIFFUSERS = "model.safetensors", "diffusion_pytorch_model.safetensors"
_TORCH, _TORCH_DIFFUSERS = "pytorch_model.bin", "diffusion_pytorch_model.bin"
#: Where these libraries look for weights in a directory: safetensors first, and what torch.save wrote where there is
#: none; each in its order. `docs/decisions/index-or-file.md`
_READERS = {
    "transformers": (
        (_TRANSFORMERS, f"{_TRANSFORMERS}.index.json"),
        (_TORCH, f"{_TORCH}.index.json"),
    ),
    "diffusers": (
        (f"{_DIFFUSERS}.index.json", _DIFFUSERS),
        (f"{_TORCH_DIFFUSERS}.index.json", _TORCH_DIFFUSERS),
    ),
}

#: Ends of the names that torch checkpoints have.
_TORCH_NAMES = (".bin", ".pt", ".pth", ".ckpt")
#: Files of such a name that lie beside a model and are none: what trainers of transformers and accelerate keep.
_NO_MODEL = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|sampler|dl_state_dict)[_.0-9]*\.(bin|pt|pth|ckpt)"
)
# what else people keep weights in, by the end of the name
_OTHER_FORMATS = {".gguf": "GGUF", ".h5": "HDF5", ".msgpack": "flax", ".onnx": "ONNX", ".npz": "numpy"}
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".tmp")


@dataclass(frozen=True, slots=True)
class Weights:
    """The files to read.

    Attributes:
        index: name of the index that decides; None without one.
        wanted: by file, sorted: the tensors to take from it, None for all of them.
        notes: what was ignored.
    """

    index: str | None
    wanted: dict[str, frozenset[str] | None]
    notes: tuple[str, ...]


def is_torch_name(name: str) -> bool:
    """Whether a file of this name is expected to be torch.save's."""
    return name.endswith(_TORCH_NAMES)


def choose_weights(listing: Listing) -> Weights:
    """What a standard name leads to, an index or a file; else the only file there is.

    Raises:
        SourceError: no weights, standard names that lead to different files, several files and no standard name, or
            an index is broken.
    """
    standard = {name: _led_to(listing, name) for names in _looked_for(listing).values() for name in names}
    if not standard:
        return _only_file(listing)
    strays = [name for name in listing.top() if name.endswith(".safetensors")]
    if strays and not any(".safetensors" in name for name in standard):
        raise _formats_differ(listing, strays, list(standard))
    if len(standard) > 1 and not _same_files(listing, standard.values()):
        raise _ambiguous(listing, standard)
    index = next(filter(is_index, standard), None)
    wanted = standard[index or next(iter(standard))]
    return Weights(index, wanted, _ignored(listing, index, wanted))


def indexed_weights(listing: Listing, index: str) -> Weights:
    """What this index names, whatever lies beside it.

    Raises:
        SourceError: it is broken.
    """
    wanted = _led_to(listing, index)
    return Weights(index, wanted, _ignored(listing, index, wanted))


def _looked_for(listing: Listing) -> dict[str, list[str]]:
    """The standard names that each library finds here, in its order."""
    top = set(listing.top())
    found = {}
    for library, formats in _READERS.items():
        names = [[name for name in names if name in top] for names in formats]
        found[library] = names[0] or names[1]
    return found


def _led_to(listing: Listing, name: str) -> dict[str, frozenset[str] | None]:
    """The files that a file of weights or an index stands for, as `Weights.wanted`."""
    if not is_index(name):
        return {name: None}
    try:
        return dict(read_index(listing.root / name))
    except SourceError as error:
        raise SourceError(f"{shown(listing.root / name)}: {error.message}", error.remedy) from None


def _same_files(listing: Listing, choices: Iterable[Iterable[str]]) -> bool:
    # by where links lead: the hub's cache has one blob for a file published under both names
    return len({frozenset(os.path.realpath(listing.root / file) for file in files) for files in choices}) == 1


def _only_file(listing: Listing) -> Weights:
    kind, standard = "safetensors", _TRANSFORMERS
    files = [name for name in listing.top() if name.endswith(".safetensors")]
    if not files:
        kind, standard = "torch", _TORCH
        files = [name for name in listing.top() if _may_be_model(name)]
    if not files:
        raise _no_weights(listing)
    if len(files) > 1:
        raise SourceError(
            f"{shown(listing.root)} has {len(files)} {kind} files and no {standard}.index.json: {some(files, 16)}",
            "give the path of the one to load, or download the index as well",
        )
    wanted: dict[str, frozenset[str] | None] = {files[0]: None}
    return Weights(None, wanted, _ignored(listing, None, wanted))


def _may_be_model(name: str) -> bool:
    return is_torch_name(name) and not _NO_MODEL.fullmatch(name)


def _formats_differ(listing: Listing, strays: list[str], standard: list[str]) -> SourceError:
    paths = [f"--model {shown(listing.root / name)}" for name in (*strays[:2], *standard[:2])]
    return SourceError(
        f"{shown(listing.root)} holds {some(standard, 4)}, which transformers or diffusers would read, and"
        f" {some(strays, 4)} under no name that they look for",
        f"give the path of the one that is meant: {' or '.join(paths)}",
    )


def _ambiguous(listing: Listing, standard: dict[str, dict[str, frozenset[str] | None]]) -> SourceError:
    ways = [
        f"{name} (names {some(files, 4) or 'no file'})" if is_index(name) else name for name, files in standard.items()
    ]
    reads = [f"{library} would read {names[0]}" for library, names in _looked_for(listing).items() if names]
    paths = [f"--model {shown(listing.root / name)}" for name in standard]
    return SourceError(
        f"{shown(listing.root)} holds {' and '.join(ways)}: different files, of which {' and '.join(reads)}",
        f"give the path of the one that is meant: {' or '.join(paths)}",
    )


def _ignored(listing: Listing, index: str | None, wanted: dict[str, frozenset[str] | None]) -> tuple[str, ...]:
    rest = [name for name in listing.files if name.endswith(".safetensors") and name not in wanted]
    beside = [name for name in rest if "/" not in name]
    below = [name for name in rest if "/" in name]
    why = f"{index} does not name them" if index else f"only {shown(next(iter(wanted)))} is read"
    notes = [f"ignored {plural(len(beside), 'file')}, {why}: {some(beside, 32)}"] if beside else []
    torch = [name for name in listing.top() if _may_be_model(name) and name not in wanted]
    if torch:
        preferred = "safetensors is preferred" if _has_safetensors(index, wanted) else why
        notes.append(f"ignored {plural(len(torch), 'torch checkpoint')}, {preferred}: {some(torch, 32)}")
    if below:
        notes.append(f"ignored {plural(len(below), 'file')} of weights in subdirectories: {some(below, 32)}")
    return tuple(notes)


def _has_safetensors(index: str | None, wanted: dict[str, frozenset[str] | None]) -> bool:
    return any(".safetensors" in name for name in (index or "", *wanted))


def _no_weights(listing: Listing) -> SourceError:
    """Says what is there instead: the reader knows what they meant."""
    where = shown(listing.root)
    if not listing.files and not listing.directories:
        return SourceError(f"{where} is an empty directory, expected weights", "download the model there")
    inner = [name for name in listing.files if "/" in name]
    below = sorted({n.partition("/")[0] for n in inner if n.endswith(".safetensors") or _may_be_model(n)})
    if "snapshots" in listing.directories:
        return SourceError(
            f"{where} is a model's folder in the hub cache, not a model",
            "give one of the directories under its snapshots/",
        )
    if below:
        return SourceError(
            f"{where} has no weights itself; its subdirectories do: {some(below, 16)}",
            "give one of these directories",
        )
    top = list(listing.top())
    unfinished = [name for name in top if name.endswith(_UNFINISHED)]
    if unfinished:
        return SourceError(
            f"{where} has no weights, but unfinished downloads: {some(unfinished, 8)}",
            "finish the download",
        )
    others = [name for name in top if any(name.endswith(suffix) for suffix in _OTHER_FORMATS)]
    if others:
        formats = sorted({_OTHER_FORMATS["." + name.rpartition(".")[2]] for name in others})
        return SourceError(
            f"{where} has no weights of safetensors or torch; found {some(others, 8)}: {'/'.join(formats)}",
            "save the model as safetensors, or download its safetensors version",
        )
    found = some(top or listing.directories, 8)
    return SourceError(f"{where} has no weights; found {found}", "give the directory that holds model.safetensors")
