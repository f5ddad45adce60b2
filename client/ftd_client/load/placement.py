"""Which device each part of a model goes to."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import torch

from ftd.errors import UsageError

Device = torch.device | str | int
#: A device for all of a model, or one for each module by its dotted name, as accelerate writes a device map.
Devices = Device | Mapping[str, Device]


class Placement:
    """The device of each name.

    Raises:
        UsageError: a device holds no data or is not here.
    """

    def __init__(self, devices: Devices) -> None:
        given = devices if isinstance(devices, Mapping) else {"": devices}
        self._devices = {name: check_device(device) for name, device in given.items()}

    @property
    def has_gpus(self) -> bool:
        return any(device.type == "cuda" for device in self._devices.values())

    @property
    def is_total(self) -> bool:
        """Whether every name has a device, whatever it is."""
        return "" in self._devices

    @property
    def brief(self) -> str:
        """All devices, or the first of very many: what a follower's slot has room for (docs/format.md)."""
        return textwrap.shorten(str(self), 64, placeholder=" ...")

    def of(self, name: str) -> torch.device:
        """Of the longest module name that leads to this one.

        Raises:
            UsageError: none does.
        """
        if len(self._devices) == 1 and "" in self._devices:
            return self._devices[""]
        prefix = name
        while prefix not in self._devices:
            if not prefix:
                raise UsageError(
                    f"the device map has no device for {name}: {', '.join(sorted(self._devices)[:5])} found",
                    "add an entry for it, or one for '', which is all that has none",
                )
            prefix = prefix.rpartition(".")[0]
        return self._devices[prefix]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(str, self._devices.values())))


def check_device(device: Device) -> torch.device:
    """The device, a GPU with its index, if it is one that holds data and is here. A number is a GPU's.

    Raises:
        UsageError: it is not.
    """
    expected = "a device that holds data and is present expected"
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device {device!r} found, {expected}", "use 'cuda:0' or 'cpu'") from None
    count = torch.cuda.device_count() if target.type == "cuda" else 1
    if target.type == "meta" or (target.index or 0) >= count:
        raise UsageError(f"device {target} found, {expected}", "use 'cpu'" if not count else f"there are {count}")
    indexed = target.type == "cpu" or target.index is not None
    return target if indexed else torch.device(target.type, torch.cuda.current_device())
