"""A block, and the grouping of blocks into layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

#: Every tensor starts at a multiple of this, in segments and in slots (libraries choose kernels by alignment), and
#: the allocator rounds what is resident up to as much. `ftd.shm.layout` has the same rule; a test compares the two.
ALIGNMENT = 512


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that move to the GPU together, in the order of execution.

    Args:
        index: position in the forward, from 0.
        name: unique name, for people and profiles.
        layer: name of the layer that the block is, or is a part of.
        nbytes: bytes of its slot, alignment between its tensors included. A block of 0 bytes never moves; it stands
            for compute between blocks (embeddings before the first layer, a head after the last).
        compute_ns: from the start of this block's compute to the start of the next one's (the last: to the end of the
            forward), measured with its bytes on the GPU; 0 while unknown.
    """

    index: int
    name: str
    layer: str
    nbytes: int
    compute_ns: int = 0

    @property
    def slot_bytes(self) -> int:
        """GPU memory that the block takes, resident or in the ring."""
        return aligned(self.nbytes)


class Joined(NamedTuple):
    """A block made of others, and their indices."""

    block: Block
    parts: tuple[int, ...]


def by_layer(blocks: Sequence[Block], apart: Collection[int] = ()) -> tuple[Joined, ...]:
    """`blocks` with neighbours of one layer joined into one block of the layer's name.

    A layer that the forward leaves and enters again becomes several blocks of one name. Its bytes are the sum of
    slots, so that the parts keep their alignment within it.

    Args:
        apart: indices of blocks that are never joined, since their bytes are also somebody else's.
    """
    joined: list[Joined] = []
    for (layer, alone), run in groupby(blocks, key=lambda b: (b.layer, b.index if b.index in apart else -1)):
        parts = tuple(run)
        name = parts[0].name if alone >= 0 else layer
        nbytes = parts[0].nbytes if len(parts) == 1 else sum(part.slot_bytes for part in parts)
        block = Block(len(joined), name, layer, nbytes, sum(part.compute_ns for part in parts))
        joined.append(Joined(block, tuple(part.index for part in parts)))
    return tuple(joined)
