"""Device memory of a plan: one allocation for the ring, one for what is resident; tensors at fixed places in them."""

from __future__ import annotations

import torch

from ftd.plan.block import ALIGNMENT

#: What another process may still write to: never freed, never used again.
_given_up: list[torch.Tensor] = []


class Memory:
    """`nbytes` of `device`, starting at a multiple of the alignment.

    Tensors made by `tensor` keep it alive; it counts in torch's allocator with its size rounded to the alignment.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # the CUDA allocator aligns to 512, the CPU's to 64
        spare = ALIGNMENT if device.type == "cpu" else 0
        with torch.inference_mode(False):
            flat = torch.empty(nbytes + spare, dtype=torch.uint8, device=device)
        self._shift = -flat.data_ptr() % ALIGNMENT if spare and nbytes else 0
        self._flat = flat
        self.device = device
        self.nbytes = nbytes
        self.address = flat.data_ptr() + self._shift

    def tensor(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor of the shape, strides and type of `like` at `offset`, a multiple of the alignment.

        Its version counter is its own, so that copies into the memory do not count as changes of it.
        """
        start = (self._shift + offset) // like.itemsize
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=like.dtype, device=self._flat.device)
            return tensor.set_(self._flat.untyped_storage(), start, like.shape, like.stride())

    @property
    def storage(self) -> int:
        """What torch counts references to the memory by."""
        storage: int = self._flat.untyped_storage()._cdata
        return storage

    def free(self) -> None:
        """Gives the memory back, as soon as no tensor of it is left."""
        self._flat = self._flat.new_empty(0)
        self.address, self.nbytes = 0, 0

    def give_up(self) -> None:
        """Keeps it until the process ends, since somebody else may write to it."""
        _given_up.append(self._flat)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes lie here; not of the one that is all of it, which nobody else has."""
        if tensor is self._flat or tensor.layout is not torch.strided or tensor.device != self._flat.device:
            return False
        try:
            return self.address <= tensor.data_ptr() < self.address + self.nbytes
        except RuntimeError:  # what torch.func wraps has no memory, and none of its attributes says so
            return False


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """`uint8[nbytes]` over the memory of a dense tensor, whatever the order of its dimensions."""
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        start = tensor.storage_offset() * tensor.itemsize
        return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
