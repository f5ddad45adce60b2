"""Reads what torch.save wrote, without torch and without unpickling: which tensors, and where their bytes lie.

Two layouts. Since torch 1.6 a zip archive with the pickle in `<name>/data.pkl` and each storage, stored and not
compressed, in `<name>/data/<key>`. Before, one file: four pickles (a magic number, a version, facts of the machine, the
state), the list of the storages' keys, then each storage: its length in elements and its bytes
(`torch/serialization.py`). The tar archives of torch before 0.1.10 are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftd.errors import SourceError
from ftd.packing import no_collection
from ftd.source.access import opened, read_exactly
from ftd.source.base import SourceFile
from ftd.source.disguise import recognised
from ftd.source.pickled import MAX_PICKLE_BYTES, EndsEarlyError, read_pickle
from ftd.source.statedict import Chosen, choose, placed
from ftd.source.strided import Strides
from ftd.source.torchnames import Mapping, Names, Storage, storage_of
from ftd.source.wording import DOWNLOAD_AGAIN, quoted, shown, some
from ftd.source.ziprecords import Directory, data_offset, read_directory
from ftd.tensorspec import TensorSpec

#: Numbers that begin the older layout (`MAGIC_NUMBER`, `PROTOCOL_VERSION`).
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_TAR_MEMBERS = (b"sys_info", b"pickle", b"tensors", b"storages")
#: Read first of the older layout, whose pickles don't say how long they are.
_FIRST_BYTES = 4 << 20
_HEAD_BYTES = 1024
_LISTED = 8


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file and its tensors.

    Attributes:
        tensors: with absolute offsets and, where the elements don't lie row by row, their strides; by rising offset.
        notes: what was left out, and which part of the file is the model.
    """

    file: SourceFile
    tensors: list[tuple[TensorSpec, int, Strides]]
    notes: tuple[str, ...]


def is_torch(head: bytes) -> bool:
    """Whether a file that begins with `head` may be one of torch.save's."""
    return head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def read_torch_file(path: Path, name: str, allowed: Collection[str] = ()) -> TorchFile:
    """The file and the tensors of its model; `name` is how the index writes it.

    Args:
        allowed: full names of types that are left out where they appear; every other that no state dict needs is
            refused.

    Raises:
        SourceError: missing, unreadable, cut short, no such file, or something in it is refused; messages carry no
            path.
        SourceChangedError: it changed meanwhile.
    """
    with opened(path) as fd:
        status = os.fstat(fd)
        head = os.pread(fd, _HEAD_BYTES, 0)
        if not is_torch(head):
            raise _no_torch(head)
        with no_collection():
            read = _read_zip if head.startswith(b"PK") else _read_legacy
            raw, chosen, places = read(fd, status.st_size, Names(allowed))
            tensors = placed(chosen, places, status.st_size)
        file = SourceFile.of(path, name, status, raw)
        file.check_unchanged(fd)
        return TorchFile(file, tensors, chosen.notes)


def _no_torch(head: bytes) -> SourceError:
    if not head:
        return SourceError("is empty (0 bytes)", DOWNLOAD_AGAIN)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return SourceError("is no torch checkpoint: it is a safetensors file", "name it *.safetensors")
    if head[257:262] == b"ustar" and head[:100].rstrip(b"\0") in _TAR_MEMBERS:
        return SourceError(
            "is a tar archive as torch before 0.1.10 wrote it, which only full unpickling can read",
            "where you trust it: torch.save(torch.load(path, weights_only=False), new_path)",
        )
    found = recognised(head)
    if found is None:
        return SourceError("is no torch checkpoint: neither a zip archive nor a pickle", DOWNLOAD_AGAIN)
    return SourceError(f"is no torch checkpoint: it is {found[0]}", found[1])


Found = tuple[bytes, Chosen, dict[str, int]]


def _read_zip(fd: int, file_bytes: int, names: Names) -> Found:
    """The bytes that identify the contents, the model, and where each of its storages begins."""
    directory = read_directory(fd, file_bytes)
    folder = _folder(directory)
    raw = _member(fd, directory, folder + b"data.pkl", MAX_PICKLE_BYTES)
    if folder + b"byteorder" in directory.records:
        order = _member(fd, directory, folder + b"byteorder", 16)
        if order != b"little":
            raise _other_order()
    try:
        value, _ = _known(raw, 0, names)
    except EndsEarlyError:
        raise _cut_short(len(raw)) from None
    chosen = choose(value, len(raw))
    places = {}
    for storage in _storages(chosen):
        record = directory.records.get(folder + b"data/" + storage.key.encode(errors="replace"))
        if record is None:
            raise SourceError(f"lacks the storage {quoted(storage.key)}", DOWNLOAD_AGAIN)
        _check_length(storage, record.nbytes)
        places[storage.key] = data_offset(fd, directory, record)
    _check_apart(chosen, places)
    return directory.raw + raw, chosen, places


def _folder(directory: Directory) -> bytes:
    pickles = [name for name in directory.records if name.endswith(b"/data.pkl") and name.count(b"/") == 1]
    if len(pickles) != 1:
        raise SourceError(
            "is a zip archive, but none that torch.save wrote: it has no <name>/data.pkl", "give the checkpoint's path"
        )
    folder = pickles[0].removesuffix(b"data.pkl")
    if folder + b"constants.pkl" in directory.records:
        raise SourceError(
            "is a TorchScript archive: a program, not a state dict",
            "write its weights: torch.save(torch.jit.load(path).state_dict(), new_path)",
        )
    return folder


def _member(fd: int, directory: Directory, name: bytes, limit_bytes: int) -> bytes:
    record = directory.records[name]
    if record.nbytes > limit_bytes:
        raise SourceError(
            f"has the member {shown(name.decode(errors='replace'))} of {record.nbytes} bytes, expected at most"
            f" {limit_bytes}",
            DOWNLOAD_AGAIN,
        )
    return read_exactly(fd, record.nbytes, data_offset(fd, directory, record))


def _read_legacy(fd: int, file_bytes: int, names: Names) -> Found:
    """As `_read_zip`, of the layout before torch 1.6."""
    limit = min(file_bytes, MAX_PICKLE_BYTES)
    window = min(limit, _FIRST_BYTES)
    while True:
        raw = read_exactly(fd, window, 0)
        try:
            value, keys, storages, end = _pickles(raw, names)
            break
        except EndsEarlyError:
            if window == limit:
                raise _cut_short(limit) from None
            window = min(limit, window * 4)
    places = _places(fd, file_bytes, end, keys, storages)
    chosen = choose(value, end)
    for storage in _storages(chosen):
        if storage.key not in places:
            raise SourceError(f"lacks the storage {quoted(storage.key)}", DOWNLOAD_AGAIN)
        _check_length(storage, storages[storage.key].nbytes)
    return raw[:end], chosen, places


def _pickles(raw: bytes, names: Names) -> tuple[Any, list[str], dict[str, Storage], int]:
    """The state, the keys of its storages in the order in which they follow, all storages, where the first begins."""
    magic, at = read_pickle(raw, 0, Names(), _no_storage)
    if magic != _MAGIC:
        raise SourceError(
            "is a pickle, but none that torch.save wrote", "write it by torch.save(model.state_dict(), path)"
        )
    version, at = read_pickle(raw, at, Names(), _no_storage)
    machine, at = read_pickle(raw, at, Names(), _no_storage)
    if version != _VERSION or not isinstance(machine, Mapping):
        raise SourceError(f"is of another version of torch's format than {_VERSION}", DOWNLOAD_AGAIN)
    if any(key == "little_endian" and order is not True for key, order in machine.pairs):
        raise _other_order()
    storages: dict[str, Storage] = {}

    def remembered(persistent_id: Any) -> Storage:
        storage = storage_of(persistent_id)
        storages.setdefault(storage.key, storage)
        return storage

    value, at = _known(raw, at, names, remembered)
    keys, at = read_pickle(raw, at, Names(), _no_storage)
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in storages for key in keys):
        raise SourceError("has a list of storages that does not fit its tensors", DOWNLOAD_AGAIN)
    return value, keys, storages, at


def _places(fd: int, file_bytes: int, at: int, keys: Iterable[str], storages: dict[str, Storage]) -> dict[str, int]:
    """Where each storage begins: they follow one another, each behind its length."""
    places: dict[str, int] = {}
    for key in keys:
        storage = storages[key]
        begin = at + 8
        at = begin + storage.nbytes
        if at > file_bytes:
            raise SourceError(
                f"file is {file_bytes} bytes, its storages need at least {at}: {at - file_bytes} bytes are missing",
                DOWNLOAD_AGAIN,
            )
        numel = int.from_bytes(read_exactly(fd, 8, begin - 8), "little")
        if numel != storage.numel or key in places:
            raise SourceError(
                f"has {numel} elements of storage {quoted(key)} at byte {begin - 8}, expected {storage.numel} once",
                DOWNLOAD_AGAIN,
            )
        places[key] = begin
    return places


def _known(raw: bytes, at: int, names: Names, remembered: Callable[[Any], Storage] = storage_of) -> tuple[Any, int]:
    """The state; refuses what has a name that is not on the list, all of them at once."""
    try:
        value, end = read_pickle(raw, at, names, remembered)
    except SourceError:
        if not names.unknown:  # else it is no wonder that the rest made no sense
            raise
        value, end = None, at
    if names.unknown:
        unknown = list(names.unknown)
        remedy = "save the state dict alone, torch.save(model.state_dict(), path)"
        if len(unknown) <= _LISTED:  # more of them are a whole model
            remedy += (
                "; or, where those values may be left out,"
                f" start with --set 'allow_types=[{some(unknown, _LISTED)}]': they are never made, only skipped"
            )
        raise SourceError(f"holds values of types that no state dict needs: {some(unknown, _LISTED)}", remedy)
    return value, end


def _storages(chosen: Chosen) -> list[Storage]:
    """Those of the model's tensors that have elements. One key may come with several descriptions."""
    return list(dict.fromkeys(tensor.storage for _, tensor in chosen.tensors if 0 not in tensor.shape))


def _check_length(storage: Storage, nbytes: int) -> None:
    if storage.nbytes != nbytes:
        raise SourceError(
            f"has {nbytes} bytes of storage {quoted(storage.key)}, its tensors need {storage.nbytes}", DOWNLOAD_AGAIN
        )


def _check_apart(chosen: Chosen, places: dict[str, int]) -> None:
    sizes = {storage.key: storage.nbytes for storage in _storages(chosen)}
    end = 0
    for key in sorted(sizes, key=places.__getitem__):
        if sizes[key] and places[key] < end:
            raise SourceError(f"has the storage {quoted(key)} inside another one", DOWNLOAD_AGAIN)
        end = max(end, places[key] + sizes[key])


def _no_storage(_: Any) -> Storage:
    raise TypeError


def _cut_short(nbytes: int) -> SourceError:
    if nbytes >= MAX_PICKLE_BYTES:
        return SourceError(f"has a pickle of more than {MAX_PICKLE_BYTES} bytes", "save the state dict alone")
    return SourceError(f"has a pickle that is cut short: it goes on behind its last byte, {nbytes}", DOWNLOAD_AGAIN)


def _other_order() -> SourceError:
    return SourceError("was written on a big-endian machine", "write it by torch.save on a little-endian one")
