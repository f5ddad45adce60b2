"""Tensors as they are handed over to be published: described, cut into pieces, copied piece by piece into slots.

Nothing of the size of a tensor is ever allocated: what is not contiguous, or lies on a GPU, is copied into the slot in
the order of its elements, at most a slot at a time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ftd.errors import PublishRefusedError
from ftd.packing import no_collection
from ftd.shm.digest import PIECE_BYTES, cut
from ftd.tensorspec import TensorSpec
from ftd.torchspec import spec_of
from ftd.wire.publish import MAX_PARTS, places
from ftd_client.walk import foreign
from ftd_client.wording import bare, count

#: Whole-byte types to copy by: equal bits whatever they mean, and views of any tensor of that element size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 8


class Piece(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of the tensor with that index, in the order of its elements.

    `ends` says that the last byte of a piece, as digests have them, is here.
    """

    tensor: int
    offset: int
    nbytes: int
    ends: bool = True


class Cargo(NamedTuple):
    """What travels.

    Attributes:
        specs: of every name.
        tensors: of every name, with their bits as plain numbers.
        ties: names that have the bytes of an earlier one, and that one's name.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    ties: dict[str, str]


@no_collection()
def collect(weights: nn.Module | Mapping[str, torch.Tensor]) -> Cargo:
    """What a model's `state_dict()`, or any other mapping of names to tensors, holds.

    Raises:
        PublishRefusedError: something in it is no plain tensor; all such are named.
    """
    given = weights.state_dict(keep_vars=True) if isinstance(weights, nn.Module) else weights
    specs, tensors = list[TensorSpec](), list[torch.Tensor]()
    ties: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    problems, inner = [], False
    items = list(given.items())  # a mapping may make its tensors when it is asked, and an address be used again
    for name, value in items:
        problem = _problem(name, value)
        spec = spec_of(name, value) if problem is None else None
        if spec is None:
            inner |= hasattr(value, "__tensor_flatten__")
            problems.append(f"{name!r}: {problem or f'{bare(value.dtype)} found, a type of safetensors expected'}")
            continue
        kept = first.setdefault(_identity(value), name) if spec.nbytes else name
        if kept != name:
            ties[name] = kept
        specs.append(spec)
        tensors.append(_bits(value))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PublishRefusedError(
            f"{count(len(problems), 'tensor')} cannot be published: {'; '.join(problems[:_SHOWN])}{more}",
            "publish the inner tensors under names of their own, which tensor.__tensor_flatten__() gives, and put them"
            " together after attach"
            if inner
            else "leave them out, or convert them",
        )
    return Cargo(tuple(specs), tuple(tensors), ties)


def _problem(name: object, value: object) -> str | None:
    """Why this cannot travel; None where its type will tell."""
    if not isinstance(name, str) or name.encode("utf-8", "replace").decode() != name:
        return "a name that is no text"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__module__}.{type(value).__qualname__} found, a tensor expected"
    strange = foreign(value, nn.Parameter if type(value) is nn.Parameter else torch.Tensor)
    if strange is not None:
        return strange
    if value.is_quantized:
        return f"{bare(value.dtype)} with scales of its own found, a plain tensor expected"
    if value.is_meta:
        return "a tensor on meta found, one with bytes expected"
    held, end = value.untyped_storage().nbytes(), _end(value)  # libraries that shard empty storages by `resize_`
    return None if end <= held else f"a storage of {held} bytes found, {end} expected: it was given back"


def _end(tensor: torch.Tensor) -> int:
    """Bytes of its storage up to the end of its last element."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + steps + 1) * tensor.element_size()


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same view of the same memory. While all of them live, which the caller sees to."""
    return (
        tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_BITS[plain.element_size()])


def batches(cargo: Cargo) -> Iterator[list[Piece]]:
    """Every piece once, in the order of tensors, in groups of at most the bytes of a piece: what one lane takes."""
    batch, room = list[Piece](), PIECE_BYTES
    for index, spec in enumerate(cargo.specs):
        if spec.name in cargo.ties:
            continue
        for offset, nbytes in cut(0, spec.nbytes):
            if batch and nbytes > room:
                yield batch
                batch, room = [], PIECE_BYTES
            batch.append(Piece(index, offset, nbytes))
            room -= nbytes
    if batch:
        yield batch


def portions(pieces: Iterable[Piece], slot_bytes: int) -> Iterator[list[Piece]]:
    """The pieces in order, cut and grouped so that each group fits a slot.

    Args:
        slot_bytes: a multiple of PART_ALIGNMENT, so that nothing is cut inside an element.
    """
    portion, end = list[Piece](), 0
    for piece in pieces:
        at, stop = piece.offset, piece.offset + piece.nbytes
        while at < stop:
            if end >= slot_bytes or len(portion) == MAX_PARTS:
                yield portion
                portion, end = [], 0
            take = min(stop - at, slot_bytes - end)
            portion.append(Piece(piece.tensor, at, take, at + take == stop))
            at += take
            end = places([end, take])[-1]
    if portion:
        yield portion


def fill(slot: torch.Tensor, pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Copies pieces to their places in a slot; gives the bytes of each as they lie there.

    Args:
        slot: `uint8[slot_bytes] @cpu`.
    """
    starts = places([piece.nbytes for piece in pieces])
    found = []
    for piece, start in zip(pieces, starts, strict=False):
        target = slot[start : start + piece.nbytes]
        copy_range(target, tensors[piece.tensor], piece.offset)
        found.append(target.numpy().data)
    return found


def copy_range(target: torch.Tensor, tensor: torch.Tensor, offset: int) -> None:
    """Copies as many bytes of `tensor` as `target` has, from byte `offset` on, in the order of its elements.

    Args:
        target: `uint8[n] @cpu`, contiguous; `n` and `offset` are whole elements.
    """
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        # without torch: it would set several threads to a copy that runs beside others
        ctypes.memmove(target.data_ptr(), tensor.data_ptr() + offset, target.numel())
        return
    size = tensor.element_size()
    _copy(target.view(tensor.dtype), tensor, offset // size)


def _copy(target: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    if tensor.is_contiguous() or tensor.dim() == 1:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        target.copy_(flat[first : first + target.numel()])
        return
    row = math.prod(tensor.shape[1:])
    done = 0
    while done < target.numel():
        at, within = divmod(first + done, row)
        rows = (target.numel() - done) // row
        if within or not rows:  # a part of one row
            take = min(row - within, target.numel() - done)
            _copy(target[done : done + take], tensor[at], within)
        else:
            take = rows * row
            target[done : done + take].view(rows, *tensor.shape[1:]).copy_(tensor[at : at + rows])
        done += take
