"""What is not managed: parameters and buffers that live on the device as long as the model is offloaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ftd_client.stream.units import OffloadError
from ftd_client.walk import Exchange, Group, foreign
from ftd_client.wording import title


class Rest:
    """Groups moved to a device, and back.

    A Parameter stays the object that it was; only its memory is exchanged. It needs no grad meanwhile: its outputs
    would, and backward would ask for weights that are gone.

    Args:
        keep: whether what was there is held on to, because it costs nothing (a view of shared memory).
    """

    def __init__(self, device: torch.device, *, keep: bool) -> None:
        self._device = device
        self._keep = keep
        self._parameters: list[tuple[Group, torch.device, torch.Tensor | None, bool, int]] = []
        self._buffers: list[tuple[Group, torch.Tensor]] = []
        self.nbytes = 0

    def take(self, parameters: Sequence[Group], buffers: Sequence[Group] = ()) -> None:
        """Moves groups; all their copies are made before the first is put in place.

        Raises:
            OffloadError: one is no plain tensor, or is on meta.
        """
        for group, expected in [(g, nn.Parameter) for g in parameters] + [(g, torch.Tensor) for g in buffers]:
            why = foreign(group.tensor, expected)
            if why is not None or group.tensor.is_meta:
                raise OffloadError(
                    f"{title(group)} can't be moved to {self._device}: {why or 'it is on meta and holds no data'}",
                    "offload the model before it is quantised or wrapped",
                )
        with torch.inference_mode(False), torch.no_grad():
            moved = [group.tensor.detach().to(self._device) for group in parameters]
            moved_buffers = [group.tensor.to(self._device) for group in buffers]
            for group, tensor in zip(parameters, moved, strict=True):
                old = group.tensor.data
                wanted = group.tensor.requires_grad
                group.tensor.requires_grad_(False)
                if tensor.device != old.device:
                    group.tensor.data = tensor
                kept = old if self._keep else None
                self._parameters.append((group, old.device, kept, wanted, group.tensor._version))
            with Exchange() as exchange:
                for group, tensor in zip(buffers, moved_buffers, strict=True):
                    if tensor is not group.tensor:
                        exchange.put(group, tensor)
                    self._buffers.append((group, group.tensor))
        # one storage may hold several tensors, and is one allocation
        self.nbytes += sum(t.untyped_storage().nbytes() for t in _one_a_storage([*moved, *moved_buffers]))

    def restore(self) -> None:
        """Back to where everything was; what changed in between keeps its new values."""
        with torch.inference_mode(False), torch.no_grad():
            for group, device, kept, wanted, version in self._parameters:
                if kept is not None and group.tensor._version == version:
                    group.tensor.data = kept
                elif group.tensor.device != device:
                    group.tensor.data = group.tensor.data.to(device)
                group.tensor.requires_grad_(wanted)
            for group, old in self._buffers:
                for place in group.places:
                    now = place.registry.get(place.attribute)
                    if now is not None and now is not old:
                        place.registry[place.attribute] = now.to(old.device)
        self._parameters.clear()
        self._buffers.clear()
        self.nbytes = 0


def _one_a_storage(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.nbytes}.values())
