"""A plan at work: what is resident by it, its memory for the rest, and the stream that fills that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ftd.plan.plan import Plan
from ftd_client.stream.link import Link
from ftd_client.stream.loader import Loader, as_parameter
from ftd_client.stream.memory import Memory
from ftd_client.stream.parked import Parked
from ftd_client.stream.program import make_program
from ftd_client.stream.residents import Residents
from ftd_client.stream.runtime import Binding, Step, Stream
from ftd_client.stream.units import Param, Unit
from ftd_client.walk import Exchange


class Installed:
    """What a plan holds, until `close`.

    Args:
        plan: of the blocks that `units` are, in that order; None stands for compute between units.
        unplanned: units that no forward has reached: loaded whenever one does.
        parked: the stand-in of every managed parameter; what of them is not resident is parked already.
        residents: of the plan before; of this one afterwards, and left as they are by `close`.
        ring: whether blocks pass through fixed places; without, `streamed` says what is to be streamed otherwise.
        runtime: of the stream.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit | None],
        unplanned: Sequence[Unit],
        parked: Mapping[Param, Parked],
        residents: Residents,
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
        self.residents = residents
        self._loader = loader
        self._link = link
        program = make_program(plan)
        self.streamed = [_units(units, turn.parts) for turn in program.turns] + [[unit] for unit in unplanned]
        self.resident = resident_units(plan, units)
        self.ring = Memory(0, link.device)
        self.stream = runtime(lock, (), 0, (), link, self.ring, loader.load)
        try:
            loader.want(p for block in self.streamed[: len(program.turns)] for unit in block for p in unit.params)
            residents.settle([param for unit in self.resident for param in unit.params])
            if ring:
                self.ring = Memory(plan.ring_bytes, link.device)
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

    def views(self) -> list[tuple[str, torch.Tensor]]:
        """Every view that streaming puts in place, with the name of its unit."""
        units = {param: unit.name for block in self.streamed for unit in block for param in unit.params}
        return [(units[b.param], b.view) for step in self.stream.steps for b in step.bindings]

    def close(self) -> None:
        """Parks what streams and gives its memory back.

        Raises:
            OffloadError: a parameter that streams was changed in place or replaced; after everything is given back.
        """
        try:
            self.stream.close()
        finally:
            self._link.drain()
            self.residents.spare_bytes = self.ring.nbytes
            self.ring.free()

    def _step(self, units: Sequence[Unit], address: int, due: tuple[int, ...], evicts: tuple[int, ...]) -> Step:
        params = [param for unit in units for param in unit.params]
        layout = self._loader.layout(params)
        bindings = []
        for param, offset in zip(params, layout.offsets, strict=True):
            view = as_parameter(self.ring.tensor(param.tensor, address + offset), param)
            bindings += _bindings(param, view, self.parked[param])
        copies = self._loader.copies(layout, self.ring.address + address)
        return Step(units[0].name, copies, tuple(bindings), due, evicts)


def resident_units(plan: Plan, units: Sequence[Unit | None]) -> list[Unit]:
    """Those that stay on the device, of the blocks that `units` are."""
    return list(dict.fromkeys(unit for block in plan.resident for unit in _units(units, plan.parts[block])))


def _units(units: Sequence[Unit | None], parts: Sequence[int]) -> list[Unit]:
    return [unit for part in parts if (unit := units[part]) is not None]


def _bindings(param: Param, view: torch.Tensor, parked: Parked) -> list[Binding]:
    places = {(id(place.module), place.attribute): place for place in param.group.places}
    return [Binding(place.registry, place.attribute, view, parked, param) for place in places.values()]


def _unplanned_step(unit: Unit, parked: Mapping[Param, Parked]) -> Step:
    bindings = [b for param in unit.params for b in _bindings(param, param.tensor, parked[param])]
    return Step(unit.name, (), tuple(bindings), (), ())


def put_all(params: Iterable[Param], tensor_of: Callable[[Param], torch.Tensor]) -> None:
    """Puts tensors in all places of parameters."""
    with torch.inference_mode(False), Exchange() as exchange:
        for param in params:
            exchange.put(param.group, tensor_of(param))
