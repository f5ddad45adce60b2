"""Where each tensor lies in the segments: a pure function of the tensors' specs.

Tensors of one layer lie together, so that a layer is one copy. Every tensor starts at a multiple of 512 bytes
(libraries choose kernels by alignment; cudaMalloc aligns to as much). A layer starts at a huge page where that costs
at most a 64th of its bytes: a copy then begins on a page of its own, and small layers do not multiply the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ftd.packing import pack
from ftd.tensorspec import TensorSpec
from ftd.units import GIB, MIB

TENSOR_ALIGNMENT = 512
LAYER_ALIGNMENT = 2 * MIB
_PADDING_SHARE = 64
#: A segment is cut before the layer that would make it longer; a longer layer has one of its own.
SEGMENT_BYTES = 64 * GIB
#: Part of every fingerprint: another rule puts the same checkpoint elsewhere.
LAYOUT_RULES = f"layout-1:{TENSOR_ALIGNMENT}:{LAYER_ALIGNMENT}:{_PADDING_SHARE}"


# a NamedTuple: it is a key of dicts, and a dataclass takes three times as long to make and to hash
class Extent(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of the weights segment `segment`."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor, the index of its layer, and its bytes."""

    spec: TensorSpec
    layer: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors in the order in which they lie, behind them those that have the bytes of another one.

    `segments` are sizes in bytes, whole pages each.
    """

    layers: tuple[str, ...]
    tensors: tuple[Placed, ...]
    segments: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        return distinct_bytes(self.tensors)

    def gaps(self) -> list[Extent]:
        """Padding: every byte of the segments that is no tensor's."""
        gaps, at = [], [0] * len(self.segments)
        for extent in dict.fromkeys(placed.extent for placed in self.tensors):
            if extent.nbytes and extent.offset > at[extent.segment]:
                gaps.append(Extent(extent.segment, at[extent.segment], extent.offset - at[extent.segment]))
            if extent.nbytes:
                at[extent.segment] = extent.offset + extent.nbytes
        gaps += [Extent(i, at[i], size - at[i]) for i, size in enumerate(self.segments) if size > at[i]]
        return gaps


def distinct_bytes(tensors: Iterable[Placed]) -> int:
    """Bytes of tensors, those that several names share counted once."""
    return sum(extent.nbytes for extent in {placed.extent for placed in tensors})


def lay_out(
    specs: Iterable[TensorSpec],
    layer_of: Callable[[str], str],
    *,
    page_bytes: int,
    segment_bytes: int = SEGMENT_BYTES,
    same_as: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Places tensors in the order given, layer by layer in the order in which layers first appear.

    Args:
        layer_of: layer of a tensor's name.
        page_bytes: segments are rounded up to it.
        segment_bytes: see `SEGMENT_BYTES`; tests use small ones.
        same_as: names of tensors that have the bytes of another one, in its layer, and that one's name.
    """
    groups: dict[str, list[TensorSpec]] = {}
    tied: list[TensorSpec] = []
    for spec in specs:
        if spec.name in same_as:
            tied.append(spec)
        else:
            groups.setdefault(layer_of(spec.name), []).append(spec)
    placed: list[Placed] = []
    sizes: list[int] = []
    at = 0
    for layer, members in enumerate(groups.values()):
        length = _packed_bytes(members)
        start = _round_up(at, LAYER_ALIGNMENT if length >= LAYER_ALIGNMENT * _PADDING_SHARE else TENSOR_ALIGNMENT)
        if length and (not sizes or (start and start + length > segment_bytes)):
            if sizes:
                sizes[-1] = _round_up(at, page_bytes)
            sizes.append(0)
            start = 0
        at = start
        for spec in members:
            nbytes = spec.nbytes
            at = _round_up(at, TENSOR_ALIGNMENT) if nbytes else at
            placed.append(Placed(spec, layer, Extent(max(0, len(sizes) - 1), at if nbytes else 0, nbytes)))
            at += nbytes
    if sizes:
        sizes[-1] = _round_up(at, page_bytes)
    if tied:
        first = {each.spec.name: each for each in placed}
        placed += [replace(first[same_as[spec.name]], spec=spec) for spec in tied]
    return Layout(tuple(groups), tuple(placed), tuple(sizes))


def structure_fingerprint(layout: Layout) -> str:
    """Hash of names, types, shapes and layers: decides whether a profile or plan fits, whatever the bytes are."""
    rows = sorted([p.spec.name, p.spec.dtype, list(p.spec.shape), layout.layers[p.layer]] for p in layout.tensors)
    return hashlib.blake2b(pack(rows), digest_size=16).hexdigest()


def _packed_bytes(members: Sequence[TensorSpec]) -> int:
    at = 0
    for spec in members:
        nbytes = spec.nbytes
        at = _round_up(at, TENSOR_ALIGNMENT) + nbytes if nbytes else at
    return at


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
