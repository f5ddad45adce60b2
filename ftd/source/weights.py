"""Which files of a directory are the model's weights."""

from __future__ import annotations

from dataclasses import dataclass

from ftd.errors import SourceError
from ftd.source.index import read_index
from ftd.source.listing import Listing
from ftd.source.wording import plural, shown, some

#: In order of preference: transformers' name, then that of diffusers.
_STEMS = ("model.safetensors", "diffusion_pytorch_model.safetensors")
INDEX_NAMES = tuple(f"{stem}.index.json" for stem in _STEMS)

# what else people keep weights in, by the end of the name
_OTHER_FORMATS = {
    ".bin": "torch", ".pt": "torch", ".pth": "torch", ".ckpt": "torch", ".gguf": "GGUF", ".h5": "HDF5",
    ".msgpack": "flax", ".onnx": "ONNX", ".npz": "numpy",
}  # fmt: skip
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


def choose_weights(listing: Listing) -> Weights:
    """An index wins; else the file of a standard name; else the only one there is.

    Raises:
        SourceError: no weights, several without an index, or the index is broken.
    """
    top = list(listing.top())
    index = next((name for name in INDEX_NAMES if name in top), None)
    wanted: dict[str, frozenset[str] | None]
    if index is not None:
        try:
            wanted = dict(read_index(listing.root / index))
        except SourceError as error:
            raise SourceError(f"{shown(listing.root / index)}: {error.message}", error.remedy) from None
    else:
        files = [name for name in top if name.endswith(".safetensors")]
        standard = [name for name in _STEMS if name in files]
        if not files:
            raise _no_weights(listing)
        if not standard and len(files) > 1:
            raise SourceError(
                f"{shown(listing.root)} has {len(files)} safetensors files and no {INDEX_NAMES[0]}: {some(files, 16)}",
                "give the path of the one to load, or download the index as well",
            )
        wanted = {(standard or files)[0]: None}
    return Weights(index, wanted, _ignored(listing, index, wanted))


def _ignored(listing: Listing, index: str | None, wanted: dict[str, frozenset[str] | None]) -> tuple[str, ...]:
    rest = [name for name in listing.files if name.endswith(".safetensors") and name not in wanted]
    beside = [name for name in rest if "/" not in name]
    below = [name for name in rest if "/" in name]
    why = f"{index} does not name them" if index else f"only {shown(next(iter(wanted)))} is read"
    notes = [f"ignored {plural(len(beside), 'file')}, {why}: {some(beside, 32)}"] if beside else []
    if below:
        notes.append(f"ignored {plural(len(below), 'file')} of weights in subdirectories: {some(below, 32)}")
    return tuple(notes)


def _no_weights(listing: Listing) -> SourceError:
    """Says what is there instead: the reader knows what they meant."""
    where = shown(listing.root)
    if not listing.files and not listing.directories:
        return SourceError(f"{where} is an empty directory, expected safetensors weights", "download the model there")
    below = sorted({name.partition("/")[0] for name in listing.files if "/" in name and name.endswith(".safetensors")})
    if "snapshots" in listing.directories:
        return SourceError(
            f"{where} is a model's folder in the hub cache, not a model",
            "give one of the directories under its snapshots/",
        )
    if below:
        return SourceError(
            f"{where} has no safetensors weights itself; its subdirectories do: {some(below, 16)}",
            "give one of these directories",
        )
    top = list(listing.top())
    unfinished = [name for name in top if name.endswith(_UNFINISHED)]
    if unfinished:
        return SourceError(
            f"{where} has no safetensors weights, but unfinished downloads: {some(unfinished, 8)}",
            "finish the download",
        )
    others = [name for name in top if any(name.endswith(suffix) for suffix in _OTHER_FORMATS)]
    if others:
        formats = sorted({_OTHER_FORMATS["." + name.rpartition(".")[2]] for name in others})
        return SourceError(
            f"{where} has no safetensors weights; found {some(others, 8)}: {'/'.join(formats)}, not supported yet",
            "save the model as safetensors, or download its safetensors version",
        )
    found = some(top or listing.directories, 8)
    return SourceError(
        f"{where} has no safetensors weights; found {found}", "give the directory that holds model.safetensors"
    )
