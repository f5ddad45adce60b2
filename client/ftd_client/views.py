"""Tensors over a generation's segments: built when asked for, copied never."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import cached_property
from types import MappingProxyType

import torch

from ftd.shm.layout import Extent, Placed
from ftd.shm.manifest import Manifest
from ftd.tensorspec import TensorSpec
from ftd.torchspec import torch_form
from ftd_client.choose import Choice, Piece
from ftd_client.written import touches, written


class SharedWeights:
    """The weights of one generation as private copy-on-write views.

    Each tensor's storage is its own bytes and no more, so that copying or saving one does not take a whole segment
    along, and keeps the mapping alive: the segments are unmapped with the last tensor, and never under one.

    Args:
        mappings: private and writable, one a segment. Never closed: `mmap.close` would unmap under living tensors.
        pages: shared and read-only, one a segment: what DMA reads, since pinning a private mapping would copy it.

    Attributes:
        private, shared: the same, with their addresses.
        choice: what `select` was given; None for all tensors under the checkpoint's own names.
    """

    def __init__(self, manifest: Manifest, mappings: list[mmap.mmap], pages: list[mmap.mmap]) -> None:
        self._mappings = mappings
        self.private: Sequence[Mapped] = [Mapped(mapping) for mapping in mappings]
        self.shared: Sequence[Mapped] = [Mapped(mapping) for mapping in pages]
        self._manifest = manifest
        self.choice: Choice | None = None

    @cached_property
    def _placed(self) -> dict[str, Placed]:
        return {placed.spec.name: placed for placed in self._manifest.tensors}

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return MappingProxyType({name: placed.spec for name, placed in self._placed.items()})

    def select(self, choice: Choice | None) -> SharedWeights:
        """These weights with nothing but the chosen pieces, in the same mappings; None chooses all."""
        if choice is None:
            return self
        selected = copy(self)
        selected._placed = {name: self._cut(piece) for name, piece in choice.pieces.items()}
        selected.specs = MappingProxyType({n: p.spec for n, p in selected._placed.items()})
        selected.choice = choice
        return selected

    def _cut(self, piece: Piece) -> Placed:
        whole, spec = self._placed[piece.stored.name], piece.spec
        extent = Extent(whole.extent.segment, whole.extent.offset + piece.skipped_bytes, spec.nbytes)
        return Placed(spec, whole.layer, extent)

    @property
    def identity(self) -> Hashable:
        """Equal for the same pages only: a segment's name may come again, its inode not while anybody maps it."""
        told = self._manifest
        return told.namespace, told.fingerprint, tuple((fact.name, fact.inode) for fact in told.segments)

    @property
    def namespace(self) -> str:
        return self._manifest.namespace

    @property
    def generation(self) -> int:
        return self._manifest.generation

    @property
    def inodes(self) -> tuple[int, ...]:
        """Of its segments."""
        return tuple(fact.inode for fact in self._manifest.segments)

    @property
    def title(self) -> str:
        """For messages."""
        return f"generation {self._manifest.generation} of {self._manifest.namespace!r}"

    def extent(self, name: str) -> Hashable:
        """Where the bytes of `name` lie; a tensor without bytes lies nowhere and shares nothing."""
        extent = self._placed[name].extent
        return extent if extent.nbytes else name

    def where(self, name: str) -> Extent:
        """Segment, offset and bytes of `name`; a tensor without bytes has an extent that means nothing.

        Raises:
            KeyError: there is no such tensor.
        """
        return self._placed[name].extent

    def locate(self, tensor: torch.Tensor) -> Extent | None:
        """Where the bytes of a view of these weights lie, of whatever name or part of it; None of every other tensor,
        and of one whose elements do not lie there one behind the other."""
        plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
        if not plain or tensor.is_conj() or tensor.is_neg() or not tensor.nbytes:
            return None
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        for number, mapped in enumerate(self.private):
            if mapped.address <= address and address + nbytes <= mapped.address + mapped.nbytes:
                return Extent(number, address - mapped.address, nbytes)
        return None

    def changed(self, extents: Sequence[Extent]) -> list[bool]:
        """Of each extent, whether this process wrote to its pages: what it then sees is not what the segment holds."""
        pages = {number: written(self.private[number].address, self.private[number].nbytes)
                 for number in {extent.segment for extent in extents}}  # fmt: skip
        return [touches(pages[e.segment], self.private[e.segment].address + e.offset, e.nbytes) for e in extents]

    def view(self, name: str) -> torch.Tensor:
        """`dtype[shape] @cpu`, contiguous, starting at a multiple of 512 bytes of the segment (a slice: at its rows).

        Raises:
            KeyError: there is no such tensor.
            BindError: this torch has no such type.
        """
        placed = self._placed[name]
        return self.at(placed.extent, *torch_form(placed.spec))

    def at(self, extent: Extent, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """`dtype[shape] @cpu`, contiguous, over those bytes."""
        if not extent.nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        mapping = self._mappings[extent.segment]
        flat = torch.frombuffer(mapping, dtype=dtype, count=extent.nbytes // dtype.itemsize, offset=extent.offset)
        return flat.view(shape)


class Mapped:
    """A segment's mapping as copies and CUDA need it: by address. Keeps the mapping alive.

    Attributes:
        users: how many hosts use each chunk that is registered with CUDA, by its number; kept by `stream/pinner.py`.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.address = _address_of(mapping)
        self.nbytes = len(mapping)
        self.users = Counter[int]()


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable ABI (pybuffer.h)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address_of(mapping: mmap.mmap) -> int:
    """Of its first byte. `ctypes.c_char.from_buffer` refuses a read-only mapping, and torch warns of one."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(buffer), 0)
    address = int(buffer.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address
