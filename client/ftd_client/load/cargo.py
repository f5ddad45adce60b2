"""What of a model travels by shipment: it sets off before the model is bound, and is put in place while it travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from ftd.cuda.runtime import load_runtime
from ftd.shm.layout import Extent
from ftd.units import GIB
from ftd_client.creator import Creator
from ftd_client.load.placement import Placement
from ftd_client.load.shipment import Shipment, Trip, find_creator
from ftd_client.views import SharedWeights
from ftd_client.walk import modules_by_name

#: Travels for 19 ms at 55 GB/s, in which the rest is made ready.
_FIRST_BYTES = 1 * GIB


class _Taken(NamedTuple):
    """A parameter that was put in place of one that shows an extent of the weights."""

    shipment: Shipment
    number: int
    extent: Extent
    parameter: nn.Parameter
    source: torch.Tensor


class Cargo:
    """The parameters of a model that are, or will be, views of shared weights and go to GPUs; to all at once.

    A context manager: at its end nothing is under way any more.

    Attributes:
        why: why it did not go by push; empty where it did.
    """

    def __init__(self, weights: SharedWeights, placement: Placement) -> None:
        self._weights, self._placement = weights, placement
        self._trips: list[tuple[Shipment, Future[Trip]]] = []
        self._left: dict[tuple[torch.device, Extent], list[tuple[Shipment, int]]] = {}
        self._taken: list[_Taken] = []
        self._pool: ThreadPoolExecutor | None = None
        self.why = ""

    def depart(self, model: nn.Module, *, replace: bool = False) -> None:
        """Sends off what the model shows of the weights, and what it will show once it is bound.

        Args:
            replace: it will be bound whatever it shows now.

        Raises:
            UsageError: the placement leaves a name out.
            torch.OutOfMemoryError: a GPU has no room.
        """
        wanted = self._wanted(model, replace)
        cuda, _ = load_runtime() if wanted else (None, "")
        if cuda is None:
            return
        creator = find_creator(self._weights.namespace)
        cut = _parts if isinstance(creator, Creator) else _whole
        parts = [(device, part) for device, extents in wanted.items() for part in cut(extents)]
        self._pool = ThreadPoolExecutor(len(parts), thread_name_prefix="ftd-load")
        for device, extents in parts:
            assert device.index is not None
            shipment = Shipment(self._weights, extents, device, cuda, device.index, creator)
            self._trips.append((shipment, self._pool.submit(shipment.carry)))
            for number, extent in enumerate(extents):
                self._left.setdefault((device, extent), []).append((shipment, number))
        # beside the threads of a pull, which want the interpreter lock ever again, all else takes longer than after it
        wait([trip for shipment, trip in self._trips if not shipment.is_pushed])

    def take(self, source: torch.Tensor, target: torch.device) -> nn.Parameter | None:
        """A parameter on `target` in place of one that shows the weights; None where none travels there. Its bytes are
        there after `arrive`."""
        extent = self._weights.locate(source) if self._left else None
        left = self._left.get((target, extent)) if extent is not None else None
        if extent is None or not left:
            return None
        shipment, number = left.pop()
        parameter = nn.Parameter(shipment.tensor(number, source), source.requires_grad)
        self._taken.append(_Taken(shipment, number, extent, parameter, source))
        return parameter

    def arrive(self) -> Counter[str]:
        """Waits for all bytes, and gives how many came which way.

        Raises:
            CudaError: a device refused them.
        """
        ways: Counter[str] = Counter()
        # what this process changed in place, the segments know nothing of; asked while they travel
        changed = self._weights.changed([taken.extent for taken in self._taken])
        for shipment, trip in self._trips:
            way, why, elsewhere = trip.result()
            self.why = self.why or why
            ways[way] += shipment.nbytes
            for taken in self._taken if elsewhere else ():
                if taken.shipment is shipment:
                    taken.parameter.data = shipment.tensor(taken.number, taken.source)
        for taken, is_changed in zip(self._taken, changed, strict=True):
            if is_changed:
                taken.parameter.data.copy_(taken.source)
        return ways

    def __enter__(self) -> Cargo:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _wanted(self, model: nn.Module, replace: bool) -> dict[torch.device, list[Extent]]:
        if not self._placement.has_gpus:
            return {}
        specs = self._weights.specs
        wanted: dict[torch.device, list[Extent]] = {}
        seen: set[int] = set()
        for name, parameter in _parameters(model):
            comes = parameter.is_meta or replace
            if id(parameter) in seen or (comes and name not in specs):  # the latter may have another name
                continue
            seen.add(id(parameter))
            extent = self._weights.where(name) if comes else self._weights.locate(parameter)
            device = self._placement.of(name)
            if device.type == "cuda" and extent is not None and extent.nbytes:
                wanted.setdefault(device, []).append(extent)
        return wanted


def _whole(extents: list[Extent]) -> list[list[Extent]]:
    return [extents]


def _parts(extents: Sequence[Extent]) -> list[list[Extent]]:
    """In the order in which they lie, what comes first, and the rest: that is prepared while the first travels."""
    ordered = sorted(extents, key=lambda extent: (extent.segment, extent.offset))
    ends = accumulate(extent.nbytes for extent in ordered)
    first = next((i for i, end in enumerate(ends, 1) if end >= _FIRST_BYTES), len(ordered))
    return [part for part in (ordered[:first], ordered[first:]) if part]


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Under every name. torch's own way to say all names never ends where a module lies below itself."""
    for prefix, module in modules_by_name(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
