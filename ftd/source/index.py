"""The index of a sharded checkpoint: which tensor is taken from which file."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path, PurePosixPath

from ftd.errors import SourceError
from ftd.source.access import opened, read_exactly
from ftd.source.disguise import recognised
from ftd.source.strictjson import Repeated, json_type, load_object
from ftd.source.wording import DOWNLOAD_AGAIN, encodable, quoted, shown

#: Largest index that is read. The largest published ones (some 10^5 tensors) take about 10 MB.
MAX_INDEX_BYTES = 100_000_000

Shards = dict[str, frozenset[str]]

#: `model.safetensors.index.json`, `pytorch_model.bin.index.json`; a variant stands before the suffix, as in
#: `model.safetensors.index.fp16.json`.
_NAME = re.compile(r".+\.(safetensors|bin)\.index(\.[^./]+)?\.json")


def is_index(name: str) -> bool:
    """Whether a file of this name is an index."""
    return _NAME.fullmatch(name) is not None


def read_index(path: Path) -> Shards:
    """The tensors of each shard, by the shard's name relative to the index's directory, sorted.

    Raises:
        SourceError: unreadable, larger than `MAX_INDEX_BYTES`, or as `parse_index`; messages carry no path.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_INDEX_BYTES:
            raise SourceError(f"is {size} bytes, an index has at most {MAX_INDEX_BYTES}", DOWNLOAD_AGAIN)
        return parse_index(read_exactly(fd, size, 0))


def parse_index(raw: bytes) -> Shards:
    """As `read_index`, of the file's bytes.

    Raises:
        SourceError: not JSON, no `weight_map` of strings to strings, a key or a tensor given twice, or a shard's name
            that leaves the directory.
    """
    try:
        index = load_object(raw, 0)
    except SourceError as error:
        # JSON text was expected here: only another kind is news
        found = None if raw.lstrip()[:1] in (b"{", b"[") else recognised(raw[:1024])
        raise SourceError(f"is {found[0]}", found[1]) if found else error from None
    if isinstance(index, Repeated):
        raise SourceError(f"has the key {quoted(index.key)} more than once: which one counts is unsure", DOWNLOAD_AGAIN)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        found_type = json_type(weight_map) if "weight_map" in index else "none"
        raise SourceError(f"has no usable weight_map: expected an object, found {found_type}", DOWNLOAD_AGAIN)
    if isinstance(weight_map, Repeated):
        raise SourceError(f"assigns tensor {quoted(weight_map.key)} more than once", DOWNLOAD_AGAIN)
    if not encodable(weight_map):
        raise SourceError("has a tensor name with a lone surrogate: it is no Unicode text", DOWNLOAD_AGAIN)
    shards: defaultdict[str, set[str]] = defaultdict(set)
    checked: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise SourceError(
                f"assigns tensor {quoted(tensor)} to {json_type(shard)}, expected a file name", DOWNLOAD_AGAIN
            )
        if shard not in checked:
            checked[shard] = _shard_name(shard)
        shards[checked[shard]].add(tensor)
    return {name: frozenset(shards[name]) for name in sorted(shards)}


def _shard_name(written: str) -> str:
    """The name without `./` and doubled slashes, so that one file has one name.

    The name as written is judged, not where links lead: the hub's cache links every file to a place outside.
    """
    name = PurePosixPath(written)
    if "\0" in written or not encodable([written]):
        problem = "is no file name"
    elif name.is_absolute():
        problem = "is an absolute path"
    elif ".." in name.parts:
        problem = "leaves the model's directory"
    elif name.parts:
        return str(name)
    else:
        problem = "is empty"
    raise SourceError(
        f"names the shard '{shown(written)}', which {problem}; expected a path inside the model's directory",
        "don't use this checkpoint unless you know who wrote its index; correct the names in it otherwise",
    )
