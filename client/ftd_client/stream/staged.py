"""A model taken apart for streaming: managed weights on the host, stand-ins in their places, the rest on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd_client.stream.hooks import Hooks
from ftd_client.stream.installed import Loader, put_all
from ftd_client.stream.link import Link, open_link
from ftd_client.stream.managed import managed_parameters
from ftd_client.stream.parked import Parked
from ftd_client.stream.rest import Rest
from ftd_client.stream.source import OwnSource, SharedSource, Source
from ftd_client.stream.units import Param, Unit, make_units, reads_below
from ftd_client.walk import walk

_log = logging.getLogger("ftd")


class Staged:
    """Until `close`, which puts the model back as it was.

    Args:
        demand: gives a parameter to somebody who reaches for it where its stand-in is.

    Attributes:
        units: of what is managed, in the order of the model's modules.
        by_hand_only: patterns select nothing: everything is taken for managed until discovery knows what regions
            marked by hand hold.
        parked: every managed parameter with its stand-in.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        device: torch.device,
        demand: Callable[[Param], torch.Tensor],
    ) -> None:
        self.model = model
        self._undo = ExitStack()
        try:
            self._open(config, device, demand)
        except BaseException:
            self._undo.close()
            raise

    def _open(self, config: OffloadConfig, device: torch.device, demand: Callable[[Param], torch.Tensor]) -> None:
        source: type[SharedSource] | type[OwnSource] = SharedSource if config.shm_enabled else OwnSource
        self.source: Source = source(self.model, config)
        self._undo.callback(self.source.close)
        parts = walk(self.model)
        managed = managed_parameters(self.model, parts, config)
        self.by_hand_only = not managed
        if not managed:
            managed = {name: "" for group in parts.parameters for name in group.names}
        self.units, rest = make_units(self.model, parts, managed, ties=config.transfer_mode == "strategy")
        if config.profile_mode == "torch_function":
            _keep_resident(self.units)
        params = [param for unit in self.units for param in unit.params]
        self.rest = Rest(device, keep=self.source.shared)
        self._undo.callback(self.rest.restore)
        self.rest.take(rest, (*parts.buffers, *parts.transient))
        self.host = self.source.host([unit.params for unit in self.units], device)
        self._undo.callback(self.host.close)
        for warning in self.host.warnings:
            _log.warning("%s", warning)
        self.link: Link = open_link(device)
        self._undo.callback(self.link.close)
        self.loader = Loader(self.host, self.link, config.transfer_mode)
        self.parked = {
            param: Parked.of(param.name, param.tensor, device, partial(demand, param), partial(_tensor, param))
            for param in params
        }
        self._undo.callback(self._restore)
        put_all(self.parked, self.parked.__getitem__)
        guard = Hooks()
        guard.guard(self.model)
        self._undo.callback(guard.close)

    @property
    def nbytes(self) -> int:
        """Of what is managed."""
        return sum(param.nbytes for param in self.parked)

    def slot_bytes(self, unit: Unit) -> int:
        """The place that a unit takes on the device."""
        return self.loader.layout(unit.params).nbytes

    def drop(self, params: Sequence[Param]) -> None:
        """Parameters that turned out not to be managed live on the device from now on."""
        if params:
            put_all(params, _tensor)
            self.rest.take([param.group for param in params])
            for param in params:
                del self.parked[param]

    def close(self, *, preserve_model: bool = True) -> None:
        params = list(self.parked)
        self._undo.close()
        if not preserve_model:
            with torch.inference_mode(False):
                put_all(params, _emptied)

    def _restore(self) -> None:
        put_all(self.parked, _tensor)
        # each stand-in knows how to ask for its bytes, and so keeps everything here alive
        self.parked.clear()


def _keep_resident(units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.scope is not None and unit.scope._modules and reads_below(unit.scope):
            unit.resident = f"{type(unit.scope).__qualname__} computes in another way with stand-ins"


def _tensor(param: Param) -> torch.Tensor:
    return param.tensor


def _emptied(param: Param) -> torch.Tensor:
    return nn.Parameter(torch.empty_like(param.tensor, device="meta"), requires_grad=False)
