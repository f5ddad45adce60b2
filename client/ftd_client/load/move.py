"""A model onto devices: one copy of each tensor, ties kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import BindError
from ftd.packing import no_collection
from ftd.units import format_bytes, format_seconds
from ftd_client.bind import Fit
from ftd_client.load.cargo import Cargo
from ftd_client.load.placement import Placement
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


def move(model: nn.Module, placement: Placement, cargo: Cargo | None = None, given: Fit | None = None) -> MoveReport:
    """Makes every parameter and buffer of `model` resident on its device, one copy of each, ties kept.

    Parameters get memory that torch allocated on the CPU as well: the model then depends on no mapping, and kernels
    meet the alignment they choose by. What is on another device already stays as it is. Gradients are not taken
    along. Whatever fails, running out of memory too, leaves the model as it was.

    Args:
        cargo: what is on its way already; the rest is copied tensor by tensor.
        given: what the model gets on the devices in place of what it has.

    Raises:
        UsageError: a device map leaves something out.
        BindError: a tensor is on meta, or is more than a plain tensor.
    """
    began_ns = monotonic_ns()
    with torch.inference_mode(False), torch.no_grad(), Exchange() as exchange:
        with no_collection():
            moved, given_as_is, copied = _replaced(model, placement, cargo, given)
            for group, tensor in (*moved, *given_as_is):
                exchange.put(group, tensor)
        # all that is to be known is, before the last bytes are there
        count, nbytes = len(moved), sum(tensor.nbytes for _, tensor in moved)
        devices = {tensor.device for _, tensor in moved if tensor.is_cuda}
        ways = Counter(copy=copied)
        del moved, given_as_is, given  # here, since freeing takes time that the bytes need anyway
        if cargo is not None:
            ways.update(cargo.arrive())
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
    seconds = (monotonic_ns() - began_ns) / NS
    (way, _), *_rest = ways.most_common()
    return MoveReport(str(placement), count, nbytes, seconds, way, ways, cargo.why if cargo is not None else "")


def _replaced(
    model: nn.Module, placement: Placement, cargo: Cargo | None, given: Fit | None
) -> tuple[list[tuple[Group, torch.Tensor]], list[tuple[Group, torch.Tensor]], int]:
    """What is to be exchanged and for what, where it was given just so too, and how many bytes of the first were
    copied; the rest of them travel."""
    parts = given.parts if given is not None else walk(model)
    matches = {match.group: match for match in given.plan.parameters} if given is not None else {}
    buffers = given.buffers if given is not None else {}
    _refuse_immovable(model, parts, {*matches, *buffers})
    moved: list[tuple[Group, torch.Tensor]] = []
    given_as_is: list[tuple[Group, torch.Tensor]] = []
    copied = 0
    for group in parts.parameters:
        target, match = placement.of(group.name), matches.get(group)
        taken = cargo.take(group, target, match) if cargo is not None else None
        if taken is not None:
            moved.append((group, taken))
            continue
        plain = given.value(match) if given is not None and match is not None else group.tensor.detach()
        copy = plain.to(target)
        if copy is plain:
            if target.type != "cpu":
                continue
            copy = plain.clone()
        copied += copy.nbytes
        moved.append((group, group.parameter(copy)))
    for group in (*parts.buffers, *parts.transient):
        source = buffers.get(group, group.tensor)
        copy = source.to(placement.of(group.name))
        if copy is not source:
            copied += copy.nbytes
            moved.append((group, copy))
        elif source is not group.tensor:
            given_as_is.append((group, source))
    return moved, given_as_is, copied


def _refuse_immovable(model: nn.Module, parts: Parts, renewed: set[Group]) -> None:
    problems: list[str] = []
    for groups, expected in ((parts.parameters, nn.Parameter), (parts.buffers + parts.transient, torch.Tensor)):
        for group in groups:
            why = foreign(group.tensor, expected)
            if why is None and group.tensor.is_meta and group not in renewed:
                why = "no data found (it is on meta), a real tensor expected"
            if why is not None:
                problems.append(f"{title(group)}: {why}")
    if problems:
        raise BindError(
            f"{type(model).__qualname__} can't be moved: {count(len(problems), 'tensor')} found that can't",
            "bind the model first, and before it is quantised or wrapped",
            tuple(problems),
        )
