"""A model onto a device: one copy of each tensor, ties kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import BindError, UsageError
from ftd.units import format_bytes, format_seconds
from ftd_client.walk import Exchange, Group, Parts, foreign, walk
from ftd_client.wording import count, title


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What `move` did: tensors and bytes that were copied, ties counted once."""

    device: str
    tensors: int
    bytes: int
    seconds: float
    way: str = "copy"

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors ({format_bytes(self.bytes)}) to {self.device} "
            f"in {format_seconds(self.seconds)} by {self.way}"
        )


def move(model: nn.Module, device: torch.device | str) -> MoveReport:
    """Makes every parameter and buffer of `model` resident on `device`, one copy of each, ties kept.

    Parameters get memory that torch allocated on the CPU as well: the model then depends on no mapping, and kernels
    meet the alignment they choose by. What is on another device already stays as it is. Gradients are not taken
    along. All copies are made before the first is assigned, so that running out of memory leaves the model whole.

    Raises:
        UsageError: there is no such device.
        BindError: a tensor is on meta, or is more than a plain tensor.
    """
    target = check_device(device)
    parts = walk(model)
    _refuse_immovable(model, parts)
    began_ns = monotonic_ns()
    with torch.inference_mode(False), torch.no_grad():
        moved: list[tuple[Group, torch.Tensor]] = []
        for group in parts.parameters:
            source = group.tensor.detach()
            copy = source.to(target)
            if copy is source and target.type == "cpu":
                copy = source.clone()
            if copy is not source:
                moved.append((group, nn.Parameter(copy, requires_grad=group.tensor.requires_grad)))
        for group in (*parts.buffers, *parts.transient):
            copy = group.tensor.to(target)
            if copy is not group.tensor:
                moved.append((group, copy))
        with Exchange() as exchange:
            for group, tensor in moved:
                exchange.put(group, tensor)
        if target.type == "cuda":
            torch.cuda.synchronize(target)
    seconds = (monotonic_ns() - began_ns) / NS
    return MoveReport(str(target), len(moved), sum(tensor.nbytes for _, tensor in moved), seconds)


def check_device(device: torch.device | str) -> torch.device:
    """The device, if it is one that holds data and is here.

    Raises:
        UsageError: it is not.
    """
    expected = "a device that holds data and is present expected"
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r} found, {expected}", "use 'cuda:0' or 'cpu'") from None
    count = torch.cuda.device_count() if target.type == "cuda" else 1
    if target.type == "meta" or (target.index or 0) >= count:
        raise UsageError(f"device {target} found, {expected}", "use 'cpu'" if not count else f"there are {count}")
    return target


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
