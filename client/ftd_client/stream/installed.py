"""A plan at work: its memory on the device, what is resident in it, and the stream that fills the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from ftd.plan.block import aligned
from ftd.plan.plan import Plan
from ftd_client.stream.courier import Courier
from ftd_client.stream.host import Host
from ftd_client.stream.layout import Layout, Piece, TransferMode, lay_out
from ftd_client.stream.lent import Lent
from ftd_client.stream.link import Copy, Link, Ticket
from ftd_client.stream.memory import Memory
from ftd_client.stream.parked import Parked
from ftd_client.stream.program import make_program
from ftd_client.stream.runtime import Binding, Step, Stream
from ftd_client.stream.units import OffloadError, Param, Unit
from ftd_client.walk import Exchange


class Loader:
    """Copies of parameters into device memory: what a plan's memory and demand are filled by.

    Args:
        courier: brings what it can of what stays on the device.

    Attributes:
        lent: what was handed out in memory of its own.
    """

    def __init__(self, host: Host, link: Link, mode: TransferMode, courier: Courier | None = None) -> None:
        self._host = host
        self._link = link
        self._mode = mode
        self._courier = courier
        self.lent = Lent()

    def layout(self, params: Sequence[Param]) -> Layout:
        """The place that parameters take together."""
        return lay_out([Piece(self._host.addresses[p.name], p.nbytes) for p in params], self._mode)

    def copies(self, layout: Layout, address: int) -> tuple[Copy, ...]:
        """Those that fill such a place at an address of the device."""
        return self._split(_filling(layout, address))

    def want(self, params: Iterable[Param]) -> None:
        """Says which parameters are copied again and again, in order."""
        self._host.want([(self._host.addresses[param.name], param.nbytes) for param in params])

    def fill(self, memory: Memory, places: Iterable[tuple[Layout, int]]) -> tuple[Memory, str]:
        """Fills places of fresh memory, at these offsets; they are there for what is computed next.

        Returns:
            The memory, which is another one where that may still be written to; and which way most bytes came: `push`,
            `pull` or `copy`.
        """
        copies: Sequence[Copy] = [
            copy for layout, offset in places for copy in _filling(layout, memory.address + offset)
        ]
        way = ""
        if self._courier is not None:
            memory, copies, way = self._courier.bring(memory, copies)
        if copies:
            self._link.wait(self._link.submit(self._split(copies)))
        return memory, way or "copy"

    def _split(self, copies: Iterable[Copy]) -> tuple[Copy, ...]:
        return tuple(piece for copy in copies for piece in self._host.split(copy))

    def submit(self, params: Sequence[Param]) -> tuple[list[torch.Tensor], Ticket]:
        """Parameters to be handed out, in fresh memory of their own, and the ticket of the copies into them."""
        tensors, ticket = self._submit(params)
        self.lent.add(params, tensors)
        return tensors, ticket

    def lend(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Parameters to be handed out, there for what is computed next."""
        tensors = self.load(params)
        self.lent.add(params, tensors)
        return tensors

    def _submit(self, params: Sequence[Param]) -> tuple[list[torch.Tensor], Ticket]:
        with torch.inference_mode(False), torch.no_grad():
            fresh = [
                torch.empty_strided(p.tensor.shape, p.tensor.stride(), dtype=p.tensor.dtype, device=self._link.device)
                for p in params
            ]
            copies = [
                piece
                for param, tensor in zip(params, fresh, strict=True)
                for piece in self._host.split(Copy(tensor.data_ptr(), self._host.addresses[param.name], param.nbytes))
            ]
            parameters: list[torch.Tensor] = [_parameter(tensor, p) for tensor, p in zip(fresh, params, strict=True)]
            return parameters, self._link.submit(copies)

    def load(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Parameters in fresh memory, there for what is computed next. Whoever asks looks at their versions."""
        tensors, ticket = self._submit(params)
        try:
            self._link.wait(ticket)
        except BaseException:
            # interrupted, or an earlier copy failed: the memory must not go while it is written
            self._link.drain()
            raise
        return tensors


def _filling(layout: Layout, address: int) -> Iterator[Copy]:
    return (Copy(address + run.offset, run.address, run.nbytes) for run in layout.runs)


def _parameter(tensor: torch.Tensor, param: Param) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter.__dict__.update(param.tensor.__dict__)
    return parameter


class Installed:
    """What a plan holds, until `close`.

    Args:
        plan: of the blocks that `units` are, in that order; None stands for compute between units.
        unplanned: units that no forward has reached: loaded whenever one does.
        parked: the stand-in of every managed parameter; what of them is not resident is parked already.
        ring: whether blocks pass through fixed places; without, `streamed` says what is to be streamed otherwise.
        runtime: of the stream.

    Attributes:
        way: how what is resident came: `push`, `pull` or `copy`.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit | None],
        unplanned: Sequence[Unit],
        parked: Mapping[Param, Parked],
        loader: Loader,
        link: Link,
        lock: threading.RLock,
        *,
        ring: bool = True,
        runtime: type[Stream] = Stream,
    ) -> None:
        self.plan = plan
        self.order = [unit for unit in units if unit is not None]
        self.parked = parked
        self._loader = loader
        self._link = link
        program = make_program(plan)
        self.streamed = [_units(units, turn.parts) for turn in program.turns] + [[unit] for unit in unplanned]
        self.resident = list(dict.fromkeys(u for i in plan.resident for u in _units(units, plan.parts[i])))
        self._held: dict[Param, tuple[torch.Tensor, int]] = {}  # resident ones, with the version that is expected
        self.ring = Memory(plan.ring_bytes if ring else 0, link.device)
        self.arena = Memory(0, link.device)
        self.stream = runtime(lock, (), 0, (), link, self.ring, loader.load)
        self.way = ""
        try:
            loader.want(p for block in self.streamed[: len(program.turns)] for unit in block for p in unit.params)
            self.arena = self._make_resident([param for unit in self.resident for param in unit.params])
            if ring:
                steps = [
                    self._step(turn_units, turn.address, turn.due, turn.evicts)
                    for turn, turn_units in zip(program.turns, self.streamed, strict=False)
                ]
                steps += [_unplanned_step(unit, parked) for unit in unplanned]
                self.stream = runtime(lock, steps, len(program.turns), program.ahead, link, self.ring, loader.load)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error tells more
                self.close()
            raise

    def tensor_of(self, param: Param) -> torch.Tensor | None:
        """A resident parameter's tensor."""
        return self._held[param][0] if param in self._held else None

    def views(self) -> list[tuple[str, torch.Tensor]]:
        """Every view that streaming puts in place, with the name of its unit."""
        units = {param: unit.name for block in self.streamed for unit in block for param in unit.params}
        return [(units[b.param], b.view) for step in self.stream.steps for b in step.bindings]

    def check(self) -> None:
        """
        Raises:
            OffloadError: a resident parameter was changed in place, which lasts until the next plan only.
        """
        changed = [param.name for param, (tensor, version) in self._held.items() if tensor._version != version]
        if changed:
            raise OffloadError(
                f"changed in place while offloaded, which does not last: {', '.join(changed[:5])}",
                "call release() before weights are changed, or name them in exclude_patterns",
            )

    def close(self) -> None:
        """Parks everything and gives the memory back.

        Raises:
            OffloadError: a parameter was changed in place or replaced; after everything is given back.
        """
        try:
            try:
                self.stream.close()
            finally:
                replaced = [p.name for p, (tensor, _) in self._held.items() if not swap(p, tensor, self.parked[p])]
                self._link.drain()
                self.ring.free()
                self.arena.free()
            if replaced:
                raise OffloadError(
                    f"replaced while offloaded: {', '.join(replaced[:5])}; what replaced them stays",
                    "call release() before parameters are replaced, and offload again",
                )
            self.check()
        finally:
            self._held.clear()

    def _make_resident(self, params: Sequence[Param]) -> Memory:
        layouts = [self._loader.layout([param]) for param in params]
        offsets = [0, *accumulate(aligned(layout.nbytes) for layout in layouts)]
        self.arena = Memory(offsets[-1], self._link.device)
        arena, self.way = self._loader.fill(self.arena, zip(layouts, offsets, strict=False))
        with torch.inference_mode(False), torch.no_grad():
            for param, offset in zip(params, offsets, strict=False):
                tensor = _parameter(arena.tensor(param.tensor, offset), param)
                self._held[param] = tensor, tensor._version
                swap(param, self.parked[param], tensor)
        return arena

    def _step(self, units: Sequence[Unit], address: int, due: tuple[int, ...], evicts: tuple[int, ...]) -> Step:
        params = [param for unit in units for param in unit.params]
        layout = self._loader.layout(params)
        bindings = []
        for param, offset in zip(params, layout.offsets, strict=True):
            view = _parameter(self.ring.tensor(param.tensor, address + offset), param)
            bindings += _bindings(param, view, self.parked[param])
        copies = self._loader.copies(layout, self.ring.address + address)
        return Step(units[0].name, copies, tuple(bindings), due, evicts)


def _units(units: Sequence[Unit | None], parts: Sequence[int]) -> list[Unit]:
    return [unit for part in parts if (unit := units[part]) is not None]


def _bindings(param: Param, view: torch.Tensor, parked: Parked) -> list[Binding]:
    places = {(id(place.module), place.attribute): place for place in param.group.places}
    return [Binding(place.registry, place.attribute, view, parked, param) for place in places.values()]


def _unplanned_step(unit: Unit, parked: Mapping[Param, Parked]) -> Step:
    bindings = [b for param in unit.params for b in _bindings(param, param.tensor, parked[param])]
    return Step(unit.name, (), tuple(bindings), (), ())


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


def put_all(params: Iterable[Param], tensor_of: Callable[[Param], torch.Tensor]) -> None:
    """Puts tensors in all places of parameters."""
    with torch.inference_mode(False), Exchange() as exchange:
        for param in params:
            exchange.put(param.group, tensor_of(param))
