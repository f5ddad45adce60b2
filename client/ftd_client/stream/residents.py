"""What stays on the device: it outlives plans, so that the next one loads nothing anew that this one has.

A plan that keeps most of it must not need the memory of both. So it lies in arenas that are small beside a model: of
one that loses something, what stays is moved to memory of its own size before the next one is touched. Where there is
no room for that, it is given up and loaded anew, which makes room for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from ftd.plan.block import aligned
from ftd.units import MIB
from ftd_client.stream.layout import Layout
from ftd_client.stream.loader import Loader, as_parameter
from ftd_client.stream.memory import Memory, bytes_of
from ftd_client.stream.parked import Parked
from ftd_client.stream.units import OffloadError, Param

#: An arena that has as many bytes takes no more. A usual ring has room for what is moved of one; and torch's allocator,
#: which may add 1 MiB to each, shows what get_gpu_memory_usage() says within 1 %.
ARENA_BYTES = 256 * MIB


class _Arena:
    """One allocation and what lies in it."""

    def __init__(self, params: Sequence[Param], layouts: Sequence[Layout], device: torch.device) -> None:
        offsets = [0, *accumulate(aligned(layout.nbytes) for layout in layouts)]
        self.memory = Memory(offsets.pop(), device)
        self.params = list(params)
        self.places = list(zip(layouts, offsets, strict=True))


class Residents:
    """Parameters that are resident, of one plan after another. Called with the model's lock held and no forward under
    way.

    Args:
        parked: the stand-in of every managed parameter.

    Attributes:
        way: how the last that were loaded came: `push`, `pull` or `copy`.
        spare_bytes: free beside them, for what is moved: what the plan that ended had for its ring.
    """

    def __init__(self, parked: Mapping[Param, Parked], loader: Loader, device: torch.device) -> None:
        self._parked = parked
        self._loader = loader
        self._device = device
        self._held: dict[Param, tuple[torch.Tensor, int]] = {}  # with the version that is expected
        self._arenas: list[_Arena] = []
        self.way = ""
        self.spare_bytes = 0

    @property
    def nbytes(self) -> int:
        """Of the device that they take."""
        return sum(arena.memory.nbytes for arena in self._arenas)

    def tensor_of(self, param: Param) -> torch.Tensor | None:
        return self._held[param][0] if param in self._held else None

    def check(self) -> None:
        """
        Raises:
            OffloadError: one was changed in place, which lasts until the next plan only.
        """
        changed = self._changed()
        if changed:
            raise OffloadError(
                f"changed in place while offloaded, which does not last: {', '.join(p.name for p in changed[:5])}",
                "call release() before weights are changed, or name them in exclude_patterns",
            )

    def settle(self, params: Sequence[Param]) -> None:
        """Makes these resident and no others. What is there stays or is moved; the rest is loaded. It never takes more
        memory than was there before, the spare bytes included, or is afterwards.

        Raises:
            Exception: any, of memory or copies; some of them are resident then.
        """
        self.keep(params)
        self.spare_bytes = 0
        new = [param for param in params if param not in self._held]
        if not new:
            return
        arenas = list(self._laid_out(new))
        memories, self.way = self._loader.fill([(arena.memory, arena.places) for arena in arenas])
        if self._device.type == "cuda":
            # what is resident is read without asking the link, on whatever stream the next forward runs
            torch.cuda.current_stream(self._device).synchronize()
        for arena, memory in zip(arenas, memories, strict=True):
            arena.memory = memory
            self._arenas.append(arena)
            self._put(arena)

    def keep(self, params: Iterable[Param]) -> None:
        """As `drop` of all others."""
        self.drop(self._held.keys() - params)

    def drop(self, params: Iterable[Param]) -> None:
        """These are resident no more, where they were; and what lies with them and cannot be moved neither.

        Raises:
            OffloadError: one was replaced; what replaced it stays.
        """
        replaced = self._park([param for param in params if param in self._held])
        held = self._held
        # those first that make room
        arenas, self._arenas = sorted(self._arenas, key=lambda arena: any(param in held for param in arena.params)), []
        try:
            while arenas:
                self._close_up(arenas[0])
                arenas.pop(0)
        finally:
            self._arenas += arenas
        if replaced:
            raise OffloadError(
                f"replaced while offloaded: {', '.join(replaced[:5])}; what replaced them stays",
                "call release() before parameters are replaced, and offload again",
            )

    def review(self) -> None:
        """A plan has ended. What was changed or replaced is resident no more.

        Raises:
            OffloadError: some were.
        """
        changed = self._changed()
        replaced = [param for param, (tensor, _) in self._held.items() if not _in_place(param, tensor)]
        try:
            self.check()
        finally:
            self.drop({*changed, *replaced})

    def close(self) -> None:
        """All of it is parked, and the memory given back.

        Raises:
            OffloadError: as `review`.
        """
        try:
            self.check()
        finally:
            self.drop(list(self._held))

    def _changed(self) -> list[Param]:
        return [param for param, (tensor, version) in self._held.items() if tensor._version != version]

    def _laid_out(self, params: Sequence[Param]) -> Iterator[_Arena]:
        chosen: list[Param] = []
        layouts: list[Layout] = []
        nbytes = 0
        for param in params:
            chosen.append(param)
            layouts.append(self._loader.layout([param]))
            nbytes += layouts[-1].nbytes
            if nbytes >= ARENA_BYTES:
                yield _Arena(chosen, layouts, self._device)
                chosen, layouts, nbytes = [], [], 0
        if chosen:
            yield _Arena(chosen, layouts, self._device)

    def _park(self, params: Sequence[Param]) -> list[str]:
        """Gives the names of those that were replaced."""
        return [param.name for param in params if not swap(param, self._held.pop(param)[0], self._parked[param])]

    def _close_up(self, arena: _Arena) -> None:
        """Keeps of an arena's memory what is needed for what is left in it."""
        left = [param for param in arena.params if param in self._held]
        if len(left) == len(arena.params):
            self._arenas.append(arena)
            return
        if self._device.type == "cuda":
            # no link knows the streams of what is resident alone; what they read is freed next
            torch.cuda.synchronize(self._device)
        layouts = [self._loader.layout([param]) for param in left]
        if sum(aligned(layout.nbytes) for layout in layouts) > self.spare_bytes:
            self._park(left)
        elif left:
            self._move(_Arena(left, layouts, self._device))
        self.spare_bytes += arena.memory.nbytes
        arena.memory.free()

    def _move(self, to: _Arena) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for param, (_, offset) in zip(to.params, to.places, strict=True):
                # as bytes: torch copies no elements of less than one, and makes any bool 0 or 1
                source = bytes_of(self._held[param][0])
                to.memory.tensor(source, offset).copy_(source)
        if self._device.type == "cuda":
            # where it was is freed next, and may get new contents on another stream than this one
            torch.cuda.current_stream(self._device).synchronize()
        self._put(to)
        self._arenas.append(to)
        self.spare_bytes -= to.memory.nbytes

    def _put(self, arena: _Arena) -> None:
        """Its parameters are in their modules from now on."""
        with torch.inference_mode(False), torch.no_grad():
            for param, (_, offset) in zip(arena.params, arena.places, strict=True):
                tensor = as_parameter(arena.memory.tensor(param.tensor, offset), param)
                before = self.tensor_of(param)
                self._held[param] = tensor, tensor._version
                swap(param, self._parked[param] if before is None else before, tensor)


def _in_place(param: Param, tensor: torch.Tensor) -> bool:
    return all(place.module._parameters.get(place.attribute) is tensor for place in param.group.places)


def swap(param: Param, old: torch.Tensor, new: torch.Tensor) -> bool:
    """Puts `new` in the places of a parameter where `old` is; False where something else is in one, which stays."""
    group, fine = param.group, True
    with torch.inference_mode(False):
        for place in group.places:
            # not `place.registry`: getters take its place for a while
            found = place.module._parameters.get(place.attribute)
            if found is old:
                # by setattr, for modules that keep books on their tensors
                setattr(place.module, place.attribute, new)
            elif found is not new:
                fine = False
        for module, attribute in group.aliases:
            if module.__dict__.get(attribute) is old:
                module.__dict__[attribute] = new
    return fine
