"""Where the bytes of parameters lie on the host, by address, and which of them a GPU may read directly.

What is not page-locked is copied more slowly, and rightly all the same: every refusal of pinning is a warning.
"""

from __future__ import annotations

import logging
import os
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from ftd.cuda import pin as pinning
from ftd.cuda.pin import Pinned, Region
from ftd.cuda.runtime import CudaRuntime, load_runtime
from ftd.errors import FtdError, InternalError
from ftd.plan.block import aligned
from ftd.units import GIB, format_bytes
from ftd_client.stream.link import Copy, Reach
from ftd_client.stream.pinner import REGISTERING
from ftd_client.stream.units import is_dense

log = logging.getLogger(__name__)

#: Arenas are powers of two: torch's pinned allocator rounds up to them. The largest bounds what a model needs above
#: its own size while it moves, the smallest what a small one wastes.
_ARENA_BYTES = tuple(4 * GIB >> shift for shift in range(13))


Kind = Literal["cuda", "staged", "none"]
#: Address and bytes.
Source = tuple[int, int]


class PinnedMemoryError(FtdError, RuntimeError):
    """Pinned memory was asked for where there is no CUDA; a RuntimeError as its callers expect."""

    code = "pinned_memory"


@dataclass(eq=False)
class Host:
    """Addresses of tensors on the host, good until `close`.

    Made by `own_host` or `shared_host`. Copies from it have to be done before it is closed.

    Attributes:
        addresses: of each tensor's first byte; its elements lie as its strides say. 0 for one without bytes.
        reach: what of it needs no slots on its way; None for all.
        warnings: what was refused, one line each; logged too.
        tensors: in mode `torch` the pinned tensors, for the parameters to point to.
    """

    addresses: dict[str, int] = field(default_factory=dict)
    reach: Reach | None = None
    warnings: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._pinned_bytes = 0
        self._borders: list[int] = []
        self._undo = ExitStack()
        # memory that is still registered must not be freed: a host that is dropped undoes itself like a closed one
        self._end = weakref.finalize(self, _undo, self._undo, self._pid)
        self._end.atexit = False

    @property
    def kind(self) -> Kind:
        return "cuda" if self._pinned_bytes else "none"

    @property
    def pinned_bytes(self) -> int:
        """Page-locked for this host."""
        return self._pinned_bytes

    def want(self, sources: Sequence[Source]) -> None:
        """Says from where copies come again and again, in the order of the first ones: it is made ready for that."""

    def samples(self, sources: Sequence[Source]) -> Sequence[Source]:
        """Memory that it takes as long to copy from as from these, once all is ready that can be."""
        return sources

    def split(self, copy: Copy) -> list[Copy]:
        """The copy in parts that lie within one registration each: CUDA refuses a source that straddles two."""
        dst, src, nbytes = copy
        first, last = bisect_right(self._borders, src), bisect_left(self._borders, src + nbytes)
        if first == last:
            return [copy]
        cuts = [src, *self._borders[first:last], src + nbytes]
        return [Copy(dst + start - src, start, stop - start) for start, stop in pairwise(cuts)]

    def close(self) -> None:
        """Undoes registrations in reverse and lets go of the memory. May be called again, and in a forked child."""
        self._end()
        self.tensors.clear()
        self._pinned_bytes = 0

    def _keep(self, owner: object) -> None:
        """Keeps memory alive until what was registered in it later is undone."""
        self._undo.callback(_let_go, [owner])

    def _took(self, chunks: Sequence[Region]) -> None:
        self._pinned_bytes += sum(chunk.nbytes for chunk in chunks)
        edges = {edge for chunk in chunks for edge in (chunk.address, chunk.address + chunk.nbytes)}
        self._borders = sorted(edges.union(self._borders))

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        log.warning("%s", text)


def _let_go(owners: list[object]) -> None:
    owners.clear()


def _undo(stack: ExitStack, pid: int) -> None:
    if pid == os.getpid():
        stack.close()
    else:
        stack.pop_all()  # CUDA's registrations are not inherited


# --- a model's own tensors ---------------------------------------------------------------------------------------


Groups = Sequence[Sequence[tuple[str, torch.Tensor]]]


def own_host(
    groups: Groups,
    *,
    pinned: bool,
    mode: Literal["torch", "host_register"],
    device: torch.device,
    replace: Callable[[str, torch.Tensor], None] = lambda _name, _tensor: None,
) -> Host:
    """A host of a model's own CPU tensors.

    Args:
        groups: dense tensors by name; those of a group come to lie together. One tensor under several names, in
            several groups too, lies in the first place only.
        pinned: page-locks them, when `device` is a GPU.
        mode: `torch` copies group by group into page-locked memory; `host_register` page-locks them where they are.
        replace: in mode `torch`, called with each name and its pinned tensor once its group is copied. A caller who
            lets go of the original there needs memory for one arena, not for the model, beside it. `groups` must then
            not hold on to it otherwise: give the parameters themselves and set their `data`.

    Raises:
        PinnedMemoryError: `pinned` on a host without CUDA.
        InternalError: a tensor is not on the CPU or not dense.
    """
    if pinned and not torch.cuda.is_available():
        raise PinnedMemoryError(
            "pinned_memory=True needs CUDA, and none is available", "set pinned_memory=False on CPU-only hosts"
        )
    for name, tensor in (entry for group in groups for entry in group):
        _check_dense(name, tensor)
    host = Host()
    if pinned and device.type == "cuda":
        cuda, reason = load_runtime() if mode == "host_register" else (None, "")
        if cuda is not None:
            _register_own(host, groups, cuda, device)
        else:
            if mode == "host_register":
                host._warn(f"pinned_memory_mode=host_register is not possible: {reason}; torch is used instead")
            _copy_to_arenas(host, groups, replace, device)
            return host
    for name, tensor in (entry for group in groups for entry in group):
        host.addresses[name] = tensor.data_ptr()
        host._keep(tensor.detach())  # an alias: the caller's may be pointed elsewhere
    return host


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() and not is_dense(tensor):
        raise InternalError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected a dense tensor"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InternalError(f"{name} is {tensor.layout} on {tensor.device}: expected a strided tensor on the CPU")


#: A registration takes longer than the copy of less that it speeds up, and a model may have thousands of norms.
_LEAST_REGISTERED = 64 * 1024


def _register_own(host: Host, groups: Groups, cuda: CudaRuntime, device: torch.device) -> None:
    for _, tensor in (entry for group in groups for entry in group):
        host._keep(tensor.detach())
    ranges = ((t.data_ptr(), t.nbytes) for group in groups for _, t in group if t.nbytes)
    regions = pinning.pages_within(ranges, _LEAST_REGISTERED)
    with REGISTERING, torch.cuda.device(device):
        done = pinning.register(cuda, regions)
    _adopt(host, done, device)


def _adopt(host: Host, done: Pinned, device: torch.device) -> None:
    for warning in done.warnings:
        host._warn(warning)
    if done.kind == "cuda" and done.chunks:
        host._took(done.chunks)
        host._undo.callback(_unregister, done, device)


def _unregister(done: Pinned, device: torch.device) -> None:
    with REGISTERING, torch.cuda.device(device):
        done.close()


class _Arena(NamedTuple):
    """Page-locked memory to be: its size, and the groups that it holds, [first, last)."""

    nbytes: int
    first: int
    last: int


def plan_arenas(sizes: Sequence[int]) -> Iterator[_Arena]:
    """Power-of-two arenas for groups of the given bytes, in order, each whole in one arena.

    Each arena is of the size that the next groups fill best, the larger one of equals.
    """
    at = 0
    while at < len(sizes):
        ends = [0]
        for size in sizes[at:]:
            ends.append(ends[-1] + size)
            if ends[-1] > _ARENA_BYTES[0]:
                break
        fits = [(nbytes, bisect_right(ends, nbytes) - 1) for nbytes in _ARENA_BYTES]
        fits = [(nbytes, count) for nbytes, count in fits if count]
        if fits:
            nbytes, count = max(fits, key=lambda each: (ends[each[1]] / each[0], each[0]))
        else:
            nbytes, count = 1 << (sizes[at] - 1).bit_length(), 1
        yield _Arena(nbytes, at, at + count)
        at += count


class _Place(NamedTuple):
    """Of one tensor in its group's region, with all of its names."""

    names: list[str]
    offset: int


class _Packed(NamedTuple):
    """A group that has bytes: its number, its tensors' places, and its size."""

    number: int
    places: list[_Place]
    nbytes: int


def _pack(groups: Groups) -> list[_Packed]:
    """Looks at all tensors before the first is moved: tied ones are found by the address of their bytes, which says
    nothing once memory has been freed."""
    seen: dict[object, _Place] = {}
    packed = []
    for number, group in enumerate(groups):
        places: list[_Place] = []
        end = 0
        for name, tensor in group:
            if not tensor.nbytes:
                continue
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key in seen:
                seen[key].names.append(name)
                continue
            seen[key] = _Place([name], end)
            places.append(seen[key])
            end = aligned(end + tensor.nbytes)
        if places:
            packed.append(_Packed(number, places, end))
    return packed


def _copy_to_arenas(
    host: Host, groups: Groups, replace: Callable[[str, torch.Tensor], None], device: torch.device
) -> None:
    """Packs the groups into page-locked arenas. What CUDA has no memory for stays where it is."""
    packed = _pack(groups)
    host.addresses.update((name, 0) for group in groups for name, tensor in group if not tensor.nbytes)
    refused = False
    for arena in plan_arenas([group.nbytes for group in packed]):
        memory = None if refused else _page_locked(host, arena.nbytes, device)
        refused = memory is None
        at = 0
        for group in packed[arena.first : arena.last]:
            if memory is None:
                _leave(host, group, groups[group.number])
            else:
                for name, tensor in _fill(memory[at:], group, groups[group.number]):
                    host.addresses[name] = tensor.data_ptr()
                    host.tensors[name] = tensor
                    replace(name, tensor)
            at += group.nbytes
        if memory is not None:
            host._took([Region(memory.data_ptr(), at)])


def _leave(host: Host, group: _Packed, entries: Sequence[tuple[str, torch.Tensor]]) -> None:
    tensors = dict(entries)
    for place in group.places:
        tensor = tensors[place.names[0]].detach()
        host._keep(tensor)
        host.addresses.update(dict.fromkeys(place.names, tensor.data_ptr()))


def _fill(
    memory: torch.Tensor, group: _Packed, entries: Sequence[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """A group's tensors in page-locked memory, by all of their names, with the strides that they had."""
    tensors = dict(entries)
    filled = []
    with torch.inference_mode(False), torch.no_grad():
        for names, offset in group.places:
            tensor = tensors[names[0]]
            place = memory[offset : offset + tensor.nbytes].view(tensor.dtype)
            copied = place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
            filled += [(name, copied) for name in names]
    return filled


def _page_locked(host: Host, nbytes: int, device: torch.device) -> torch.Tensor | None:
    try:
        with torch.cuda.device(device), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        host._warn(
            f"CUDA gave no page-locked memory after {format_bytes(host.pinned_bytes)}:"
            f" {str(error).splitlines()[0]}; the rest of the model is not pinned"
        )
        return None
