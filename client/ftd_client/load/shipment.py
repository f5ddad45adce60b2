"""Shared weights on their way to one GPU: by push, else by pull."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ftd.cuda.runtime import CudaRuntime
from ftd.errors import FtdError
from ftd.plan.block import aligned
from ftd.shm.layout import Extent
from ftd.units import format_bytes
from ftd_client.creator import Creator
from ftd_client.load.arenas import Run, plan_arenas
from ftd_client.load.pull import Copy, Pull, pull
from ftd_client.load.push import Inquiry, Landing, Pushing, PushLostError, reason_of
from ftd_client.views import SharedWeights

log = logging.getLogger("ftd_client")

#: What a silent daemon may still write to: never freed, never used again.
_given_up: list[torch.Tensor] = []
#: Shipments that a daemon was asked for and that nobody saw the end of: whatever happens meanwhile, their memory stays.
_under_way: set[Shipment] = set()


class Trip(NamedTuple):
    """How the bytes came.

    Attributes:
        way: `push`, `pull`, or `copy` where CUDA locks no memory.
        why: not by push.
        elsewhere: they lie in other memory than `Shipment.tensor` gave before.
    """

    way: str
    why: str = ""
    elsewhere: bool = False


class Shipment:
    """Extents of shared weights, and memory of a device that is to get them; they are on their way at once.

    Args:
        inquiry: whom to ask for a push, or why nobody. It is waited for when everything else is ready.
        pull: the pull to that device, in the latter case.

    Attributes:
        nbytes: of the extents.
    """

    def __init__(
        self,
        weights: SharedWeights,
        extents: Sequence[Extent],
        device: torch.device,
        cuda: CudaRuntime,
        ordinal: int,
        inquiry: Inquiry,
        pull: Callable[[], Pull],
    ) -> None:
        self._weights, self._device, self._cuda, self._ordinal = weights, device, cuda, ordinal
        self._extents = extents
        self.nbytes = sum(extent.nbytes for extent in extents)
        self._arenas = plan_arenas(extents)
        self._arena_of = {number: i for i, arena in enumerate(self._arenas) for number in arena.places}
        self._memory: list[torch.Tensor] = []
        self._allocate()
        # in the caller's thread: what starts a push waits for nobody's turn of the interpreter lock
        pushing = self._prepare()
        creator = inquiry.creator()
        self._way: Pushing | Pull
        self._why = creator if isinstance(creator, str) else pushing if isinstance(pushing, str) else ""
        if isinstance(pushing, Pushing) and isinstance(creator, Creator):
            _under_way.add(self)
            self._way = pushing
            pushing.start(creator, inquiry.line())
        else:
            self._way = pull()
            self._way.put(self._copies(), self._memory)

    def carry(self) -> Trip:
        """Brings the bytes, whatever the daemon does. In any thread.

        Raises:
            CudaError: the device refused them.
            torch.OutOfMemoryError: a push was lost, and there is no room for what it was to bring.
        """
        if isinstance(self._way, Pull):
            return Trip("pull" if self._way.result() else "copy", self._why)
        why, lost = self._await(self._way)
        if not why:
            return Trip("push")
        self._cuda.use_device(self._ordinal)
        if lost:
            log.warning("%s of %s stay taken until this process ends: %s", format_bytes(self.nbytes), self._device, why)
            self._allocate()
        return Trip("pull" if pull(self._cuda, self._ordinal, self._copies()) else "copy", why, lost)

    def _await(self, pushing: Pushing) -> tuple[str, bool]:
        """Why the push failed, and whether it may still write; nothing where it did not."""
        try:
            pushing.run()
            why, lost = "", False
        except (FtdError, OSError) as error:
            why, lost = reason_of(error), isinstance(error, PushLostError)
        if lost:
            _given_up.extend(self._memory)
        _under_way.discard(self)
        return why, lost

    def _copies(self) -> list[Copy]:
        pairs = zip(self._arenas, self._memory, strict=True)
        return [copy for arena, memory in pairs for copy in from_pages(self._weights, memory.data_ptr(), arena.runs)]

    def _prepare(self) -> Pushing | str:
        """A push; or why there can be none."""
        pairs = zip(self._arenas, self._memory, strict=True)
        landings = [Landing(memory.data_ptr(), arena.runs) for arena, memory in pairs]
        try:
            return prepare_push(self._weights, self._cuda, self._ordinal, landings)
        except (FtdError, OSError) as error:
            return reason_of(error)

    def tensor(self, number: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """`dtype[shape] @device`, contiguous, of the extent of that number.

        It keeps its arena's memory, and has a storage of its own bytes alone: torch and others take tensors of one
        storage for parts of one another (`torch.save` refuses them where their types differ).
        """
        arena = self._arena_of[number]
        start = self._arenas[arena].places[number]
        # what DLPack hands over is the memory, and no view of the tensor that it came from
        piece = from_dlpack(to_dlpack(self._memory[arena][start : start + self._extents[number].nbytes]))
        return piece.view(dtype).view(shape)

    def _allocate(self) -> None:
        sizes = [aligned(arena.nbytes) for arena in self._arenas]
        with torch.inference_mode(False):
            self._memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        if self._device.type == "cuda":
            # freed memory comes back before what reads it has run; the daemon knows nothing of this process's streams
            torch.cuda.current_stream(self._device).synchronize()


def prepare_push(weights: SharedWeights, cuda: CudaRuntime, ordinal: int, landings: Sequence[Landing]) -> Pushing:
    """Raises as `Pushing`."""
    with torch.cuda.device(ordinal):  # which is the caller's again afterwards
        cuda.use_device(ordinal)
        return Pushing(weights.generation, weights.inodes, cuda, ordinal, landings)


def from_pages(weights: SharedWeights, address: int, runs: Sequence[Run]) -> list[Copy]:
    """What brings runs from the shared pages to device memory at `address`."""
    pages = weights.shared
    return [Copy(address + run.dst, pages[run.segment].address + run.offset, run.nbytes) for run in runs]
