"""A model onto devices: one copy of each tensor, ties kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.cuda.runtime import load_runtime
from ftd.errors import BindError
from ftd.shm.layout import Extent
from ftd.units import format_bytes, format_seconds
from ftd_client.load.placement import Devices, Placement
from ftd_client.load.shipment import Shipment
from ftd_client.views import SharedWeights
from ftd_client.walk import Exchange, Group, Parts, foreign, walk
from ftd_client.wording import count, title


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What `move` did: tensors and bytes that were copied, ties counted once.

    Attributes:
        device: where they are; several, with commas, where a device map says so.
        way: how most bytes came: `push` by the daemon, `pull` through page-locked slots, or `copy` one by one.
        ways: bytes by way.
        why: why shared weights did not come by push; empty where they did, and of others.
    """

    device: str
    tensors: int
    bytes: int
    seconds: float
    way: str = "copy"
    ways: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({format_bytes(self.bytes)}) to {self.device} "
            f"in {format_seconds(self.seconds)} by {self.way}{self.why and f' ({self.why})'}"
        )


def move(model: nn.Module, devices: Devices, weights: SharedWeights | None = None) -> MoveReport:
    """Makes every parameter and buffer of `model` resident on its device, one copy of each, ties kept.

    Parameters get memory that torch allocated on the CPU as well: the model then depends on no mapping, and kernels
    meet the alignment they choose by. What is on another device already stays as it is. Gradients are not taken
    along. All copies are made before the first is assigned, so that running out of memory leaves the model whole.

    Args:
        weights: what views of go to GPUs at the speed of the link, to all GPUs at once. Those parameters are views of
            allocations of 256 MiB and more, which live as long as any of theirs. A view whose pages this process
            changed is copied as it sees it.

    Raises:
        UsageError: there is no such device, or a device map leaves something out.
        BindError: a tensor is on meta, or is more than a plain tensor.
    """
    placement = Placement(devices)
    parts = walk(model)
    _refuse_immovable(model, parts)
    began_ns = monotonic_ns()
    with torch.inference_mode(False), torch.no_grad():
        cargo = _Cargo(weights)
        left = [group for group in parts.parameters if not cargo.take(group, placement.of(group.name))]
        cargo.depart()
        try:
            moved: list[tuple[Group, torch.Tensor]] = []
            for group in left:
                source, target = group.tensor.detach(), placement.of(group.name)
                copy = source.to(target)
                if copy is source and target.type == "cpu":
                    copy = source.clone()
                if copy is not source:
                    moved.append((group, nn.Parameter(copy, requires_grad=group.tensor.requires_grad)))
            for group in (*parts.buffers, *parts.transient):
                copy = group.tensor.to(placement.of(group.name))
                if copy is not group.tensor:
                    moved.append((group, copy))
        finally:
            shipped = cargo.arrive()
        ways = Counter({way: nbytes for way, nbytes in cargo.ways.items() if nbytes})
        ways["copy"] += sum(tensor.nbytes for _, tensor in moved)
        moved += shipped
        with Exchange() as exchange:
            for group, tensor in moved:
                exchange.put(group, tensor)
        for target in {tensor.device for _, tensor in moved if tensor.is_cuda}:
            torch.cuda.current_stream(target).synchronize()
    seconds = (monotonic_ns() - began_ns) / NS
    nbytes = sum(tensor.nbytes for _, tensor in moved)
    return MoveReport(str(placement), len(moved), nbytes, seconds, ways.most_common(1)[0][0], ways, cargo.why)


class _Cargo:
    """Parameters that are views of shared weights and go to GPUs. They travel while the others are copied."""

    def __init__(self, weights: SharedWeights | None) -> None:
        self._weights = weights
        self._cuda = load_runtime()[0] if weights is not None and torch.cuda.is_available() else None
        self._groups: dict[torch.device, list[tuple[Group, Extent]]] = {}
        self._shipments: dict[torch.device, Shipment] = {}
        self.ways: Counter[str] = Counter()
        self.why = ""

    def take(self, group: Group, target: torch.device) -> bool:
        """Whether it does."""
        if self._weights is None or self._cuda is None or target.type != "cuda":
            return False
        extent = self._weights.locate(group.tensor)
        if extent is not None:
            self._groups.setdefault(_indexed(target), []).append((group, extent))
        return extent is not None

    def depart(self) -> None:
        for device, entries in self._groups.items():
            assert self._weights is not None and self._cuda is not None and device.index is not None
            extents = [extent for _, extent in entries]
            self._shipments[device] = Shipment(self._weights, extents, device, self._cuda, device.index)
        self._pool = ThreadPoolExecutor(max(1, len(self._shipments)), thread_name_prefix="ftd-load")
        self._trips = {device: self._pool.submit(each.carry) for device, each in self._shipments.items()}

    def arrive(self) -> list[tuple[Group, torch.Tensor]]:
        """The parameters on their devices. Returns, or raises, once nothing is under way any more."""
        with self._pool:
            # meanwhile: the kernel needs a while to tell
            changed = {
                device: self._weights.changed([extent for _, extent in entries]) if self._weights else []
                for device, entries in self._groups.items()
            }
            arrived: list[tuple[Group, torch.Tensor]] = []
            for device, entries in self._groups.items():
                trip, shipment = self._trips[device].result(), self._shipments[device]
                self.ways[trip.way] += shipment.nbytes
                self.why = self.why or trip.why
                for number, (group, _) in enumerate(entries):
                    tensor = shipment.tensor(number, group.tensor)
                    if changed[device][number]:
                        tensor.copy_(group.tensor)
                    arrived.append((group, nn.Parameter(tensor, requires_grad=group.tensor.requires_grad)))
        return arrived


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _refuse_immovable(model: nn.Module, parts: Parts) -> None:
    problems: list[str] = []
    for groups, expected in ((parts.parameters, nn.Parameter), (parts.buffers + parts.transient, torch.Tensor)):
        for group in groups:
            why = foreign(group.tensor, expected)
            if why is None and group.tensor.is_meta:
                why = "no data found (it is on meta), a real tensor expected"
            if why is not None:
                problems.append(f"{title(group)}: {why}")
    if problems:
        raise BindError(
            f"{type(model).__qualname__} can't be moved: {count(len(problems), 'tensor')} found that can't",
            "bind the model first, and before it is quantised or wrapped",
            tuple(problems),
        )
