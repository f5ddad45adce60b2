"""Tensors over a generation's segments: built when asked for, copied never."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Mapping
from types import MappingProxyType

import torch

from ftd.shm.manifest import Manifest
from ftd.tensorspec import TensorSpec
from ftd.torchspec import torch_dtype


class SharedWeights:
    """The weights of one generation as private copy-on-write views.

    Each tensor's storage is its own bytes and no more, so that copying or saving one does not take a whole segment
    along, and keeps the mapping alive: the segments are unmapped with the last tensor, and never under one.

    Args:
        mappings: private and writable, one a segment. Never closed: `mmap.close` would unmap under living tensors.
    """

    def __init__(self, manifest: Manifest, mappings: list[mmap.mmap]) -> None:
        self._mappings = mappings
        self._placed = {placed.spec.name: placed for placed in manifest.tensors}
        self.specs: Mapping[str, TensorSpec] = MappingProxyType({n: p.spec for n, p in self._placed.items()})

    def extent(self, name: str) -> Hashable:
        """Where the bytes of `name` lie; a tensor without bytes lies nowhere and shares nothing."""
        extent = self._placed[name].extent
        return extent if extent.nbytes else name

    def view(self, name: str) -> torch.Tensor:
        """`dtype[shape] @cpu`, contiguous, starting at a multiple of 512 bytes of the segment.

        Raises:
            KeyError: there is no such tensor.
            BindError: this torch has no such type.
        """
        placed = self._placed[name]
        dtype = torch_dtype(placed.spec.dtype, name)
        extent = placed.extent
        if not extent.nbytes:
            return torch.empty(placed.spec.shape, dtype=dtype, device="cpu")
        mapping = self._mappings[extent.segment]
        flat = torch.frombuffer(mapping, dtype=dtype, count=extent.nbytes // dtype.itemsize, offset=extent.offset)
        return flat.view(placed.spec.shape)
