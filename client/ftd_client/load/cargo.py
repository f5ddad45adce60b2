"""What of a model travels by shipment: it sets off before the model is bound, and is put in place while it travels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ftd.cuda.runtime import CudaRuntime, load_runtime
from ftd.shm.layout import Extent
from ftd.units import GIB, MIB
from ftd_client.interrupts import uninterrupted
from ftd_client.load.placement import Placement
from ftd_client.load.pull import Pull, threads_for
from ftd_client.load.push import Inquiry
from ftd_client.load.shipment import Shipment, Trip
from ftd_client.plan import Match
from ftd_client.views import SharedWeights
from ftd_client.walk import Group, modules_by_name

log = logging.getLogger("ftd_client")

#: What is sent off in parts of its own, before the rest: the first while the model is still looked at, and in the 5 and
#: 19 ms that they travel at 55 GB/s what follows is made ready.
_FIRST_BYTES = (256 * MIB, 1 * GIB)
#: More than any host has: three for each GPU.
_MOST_TRIPS = 128


class _Taken(NamedTuple):
    """A parameter that gets an extent of the weights."""

    shipment: Shipment
    number: int
    extent: Extent
    parameter: nn.Parameter


@dataclass(slots=True)
class _Pending:
    """What is to be sent off next; at once when it has so many bytes as the first of `firsts`."""

    firsts: list[int]
    extents: list[Extent] = field(default_factory=list)
    nbytes: int = 0


class Cargo:
    """The parameters of a model that show shared weights, or are to get them, and go to GPUs; to all at once.

    A context manager: at its end nothing is under way any more.

    Attributes:
        why: why it did not go by push; empty where it did.
    """

    def __init__(self, weights: SharedWeights, placement: Placement) -> None:
        self._weights, self._placement = weights, placement
        self._trips: list[tuple[Shipment, Future[Trip]]] = []
        self._left: dict[tuple[torch.device, Extent], list[tuple[Shipment, int]]] = {}
        self._taken: list[_Taken] = []
        self._pool = ThreadPoolExecutor(_MOST_TRIPS, thread_name_prefix="ftd-load")  # starts as many as there are trips
        self._inquiry: Inquiry | None = None
        self._pulls: dict[torch.device, Pull] = {}
        self.why = ""

    def depart(self, model: nn.Module, *, replace: bool = False) -> None:
        """Sends off what the model shows of the weights, and what it is to get of them.

        Args:
            replace: it gets them whatever it shows now.

        Raises:
            UsageError: the placement leaves a name out.
            torch.OutOfMemoryError: a GPU has no room.
        """
        cuda, _ = load_runtime() if self._placement.has_gpus else (None, "")
        if cuda is None:
            return
        self._inquiry = Inquiry(self._weights.namespace)
        wanted = self._wanted(model, replace)
        if not self._placement.is_total:
            wanted = iter(list(wanted))  # before anything is on its way
        with uninterrupted():  # trips and pulls wait for its end, and no interrupt may forestall what tells them
            self._send_off(wanted, cuda)

    def _send_off(self, wanted: Iterator[tuple[torch.device, Extent]], cuda: CudaRuntime) -> None:
        pending: dict[torch.device, _Pending] = {}
        self._pool.submit(bool)  # a thread, which sees the end of what is asked for, also where there is no other
        try:
            for device, extent in wanted:
                part = pending.setdefault(device, _Pending(list(_FIRST_BYTES)))
                part.extents.append(extent)
                part.nbytes += extent.nbytes
                if part.firsts and part.nbytes >= part.firsts[0]:
                    self._ship(device, part.extents, cuda)
                    pending[device] = _Pending(part.firsts[1:])
            for device, part in pending.items():
                if part.extents:
                    self._ship(device, part.extents, cuda)
        finally:
            for pull in self._pulls.values():
                pull.finish()
            self._pool.shutdown(wait=False)  # its threads end with their trips

    def _ship(self, device: torch.device, extents: list[Extent], cuda: CudaRuntime) -> None:
        assert device.index is not None
        assert self._inquiry is not None
        pull = partial(self._pull, device, cuda, sum(extent.nbytes for extent in extents))
        shipment = Shipment(self._weights, extents, device, cuda, device.index, self._inquiry, pull)
        self._trips.append((shipment, self._pool.submit(shipment.carry)))
        for number, extent in enumerate(extents):
            self._left.setdefault((device, extent), []).append((shipment, number))

    def _pull(self, device: torch.device, cuda: CudaRuntime, nbytes: int) -> Pull:
        """The one of all that is pulled to a device.

        Args:
            nbytes: of the first part, which is large or all of it.
        """
        if device not in self._pulls:
            self._pulls[device] = Pull(cuda, device.index, threads_for(nbytes))
        return self._pulls[device]

    def take(self, group: Group, target: torch.device, match: Match | None = None) -> nn.Parameter | None:
        """What travels to `target` for a group; None where nothing does. Its bytes are there after `arrive`.

        Args:
            match: what of the weights it gets; None for what it shows of them.
        """
        if not self._left or (match is not None and match.is_cast):
            return None
        extent = self._weights.locate(group.tensor) if match is None else self._weights.where(match.source.name)
        left = self._left.get((target, extent)) if extent is not None else None
        if extent is None or not left:
            return None
        shipment, number = left.pop()
        dtype = group.tensor.dtype if match is None else match.dtype
        parameter = group.parameter(shipment.tensor(number, dtype, group.tensor.shape))
        self._taken.append(_Taken(shipment, number, extent, parameter))
        return parameter

    def arrive(self) -> Counter[str]:
        """Waits for all bytes, and gives how many came which way.

        Raises:
            CudaError: a device refused them.
        """
        ways: Counter[str] = Counter()
        self._left.clear()  # here, since freeing takes time that the bytes need anyway
        # what this process changed in place, the segments know nothing of; asked while they travel
        changes = self._weights.changed([taken.extent for taken in self._taken])
        changed = [taken for taken, is_changed in zip(self._taken, changes, strict=True) if is_changed]
        for shipment, trip in self._trips:
            way, why, elsewhere = trip.result()
            self.why = self.why or why
            ways[way] += shipment.nbytes
            for taken in self._taken if elsewhere else ():
                if taken.shipment is shipment:
                    old = taken.parameter
                    old.data = shipment.tensor(taken.number, old.dtype, old.shape)
        if self.why:
            log.info("the weights are not pushed but pulled: %s", self.why)
        for taken in changed:
            there = taken.parameter.data
            there.copy_(self._weights.at(taken.extent, there.dtype, there.shape))
        return ways

    def __enter__(self) -> Cargo:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with uninterrupted():  # a trip would wait for ever
            for pull in self._pulls.values():
                if kind is not None:
                    pull.cancel()
                pull.finish()
        self._pool.shutdown()
        if self._inquiry is not None:
            self._inquiry.close()

    def _wanted(self, model: nn.Module, replace: bool) -> Iterator[tuple[torch.device, Extent]]:
        """What goes to a GPU, and to which; each parameter once."""
        specs = self._weights.specs
        seen: set[int] = set()
        for name, parameter in _parameters(model):
            comes = parameter.is_meta or replace
            if id(parameter) in seen or (comes and name not in specs):  # the latter may have another name
                continue
            seen.add(id(parameter))
            extent = self._weights.where(name) if comes else self._weights.locate(parameter)
            device = self._placement.of(name)
            if device.type == "cuda" and extent is not None and extent.nbytes:
                yield device, extent


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Under every name. torch's own way to say all names never ends where a module lies below itself."""
    for prefix, module in modules_by_name(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
