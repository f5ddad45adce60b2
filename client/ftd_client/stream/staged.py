"""A model taken apart for streaming: managed weights on the host, stand-ins in their places, the rest on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ftd.config.offload import OffloadConfig
from ftd.errors import OffloadConfigError
from ftd_client.stream.hooks import Conversion, Hooks, Uncopied
from ftd_client.stream.installed import put_all
from ftd_client.stream.link import Link
from ftd_client.stream.links import open_link
from ftd_client.stream.loader import Loader
from ftd_client.stream.managed import managed_parameters
from ftd_client.stream.parked import Access, Parked
from ftd_client.stream.residents import swap
from ftd_client.stream.rest import Rest
from ftd_client.stream.source import OwnSource, SharedSource, Source
from ftd_client.stream.units import OffloadError, Param, Unit, make_units, reads_below
from ftd_client.walk import walk

_log = logging.getLogger("ftd")

_version = attrgetter("_version")


class Staged:
    """Until `close`, which puts the model back as it was.

    Args:
        demand: gives a parameter to somebody who reaches for it where its stand-in is.
        passing: whether a tensor lies where other weights will be soon.

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
        passing: Callable[[torch.Tensor], bool],
    ) -> None:
        self._passing = passing
        self.model = model
        self._undo = ExitStack()
        try:
            self._open(config, device, demand)
        except BaseException:
            self._undo.close()
            raise

    def _open(self, config: OffloadConfig, device: torch.device, demand: Callable[[Param], torch.Tensor]) -> None:
        odd = [name for name, tensor in self.model.named_parameters() if tensor.is_inference()]
        if odd:
            raise OffloadError(
                f"{odd[0]} was made under torch.inference_mode(), as were {len(odd) - 1} more: such tensors don't tell "
                "when they change",
                "build and load the model outside of it; run it inside",
            )
        scripted = [path for path, module in self.model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            raise OffloadError(
                f"{scripted[0] or type(self.model).__qualname__} is TorchScript, whose parameters can't be exchanged",
                "offload the model that it was made from",
            )
        source: type[SharedSource] | type[OwnSource] = SharedSource if config.shm_enabled else OwnSource
        self.source: Source = source(self.model, config)
        self._undo.callback(self.source.close)
        parts = walk(self.model)
        managed = managed_parameters(self.model, parts, config)
        self.by_hand_only = not managed
        if not managed:
            managed = {name: "" for group in parts.parameters for name in group.names}
        ties = config.transfer_mode == "strategy"
        self.units, rest = make_units(self.model, parts, managed, ties=ties, by_hand=self.by_hand_only)
        if not self.units and not self.by_hand_only:
            raise OffloadConfigError(
                f"nothing to offload: all that include_patterns {list(config.include_patterns)} match has no bytes, or "
                f"is tied to what they don't match: {', '.join(list(managed)[:5])}",
                "include the other places of these tensors too",
            )
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
        self.link: Link = open_link(device, self.host.reach)
        self._undo.callback(self.link.close)
        self.loader = Loader(self.host, self.link, config.transfer_mode, self.source.courier())
        refused = self.loader.lent.refused
        self.parked = {
            param: Parked.of(
                param.name, param.tensor, device, Access(partial(demand, param), partial(_tensor, param), refused)
            )
            for param in params
        }
        self._undo.callback(self._restore)
        put_all(self.parked, self.parked.__getitem__)
        self._tensors = [param.tensor for param in self.parked]
        self._versions = list(map(_version, self._tensors))  # that are expected
        handle = self.model.register_state_dict_post_hook(_StandIns(self._list_stand_ins))  # type: ignore[no-untyped-call]
        self._undo.callback(handle.remove)
        guards = Hooks()
        guards.guard(self.model)
        guards.conversions(self.model, self._refuse_conversion)
        self._undo.callback(guards.close)

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
            self.rest.take([param.group for param in params])
            put_all(params, _tensor)
            expected = dict(zip(self.parked, self._versions, strict=True))
            for param in params:
                del self.parked[param], expected[param]
            self._tensors, self._versions = [param.tensor for param in expected], list(expected.values())

    def check(self) -> None:
        """
        Raises:
            OffloadError: a weight was changed where the change does not reach the device, or does not last.
        """
        found = list(map(_version, self._tensors))
        if found != self._versions:
            changed = [p.name for p, now, then in zip(self.parked, found, self._versions, strict=True) if now != then]
            raise OffloadError(
                f"changed while offloaded, which the device does not see: {', '.join(changed[:5])}",
                "call release() before weights are changed, and offload again",
            )
        self.loader.lent.check()

    def close(self, *, preserve_model: bool = True) -> None:
        """
        Raises:
            OffloadError: something was written to a weight that was handed out, and nobody was told; after the model
                is as it was before.
        """
        params = list(self.parked)
        try:
            self._undo.close()
        finally:
            self._passing = _never  # its owner holds us: weights are not to wait for the garbage collector
        if not preserve_model:
            with torch.inference_mode(False):
                put_all(params, _emptied)
        self.loader.lent.check()

    def _refuse_conversion(self, module: nn.Module, convert: Conversion) -> None:
        """
        Raises:
            OffloadError: it would change a managed parameter; nothing is converted yet.
        """
        inside = set(module.modules())
        for param, parked in self.parked.items():
            if any(place.module in inside for place in param.group.places):
                probe = _small(parked)
                with torch.no_grad():
                    same = convert(probe) is probe
                if not same:
                    raise OffloadError(
                        f"{param.name} is offloaded: {type(module).__qualname__} was about to be converted or moved, "
                        "which its bytes on the host would not follow",
                        "call release() first, and offload what it was converted to",
                    )

    def _list_stand_ins(self, _model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """A `state_dict()` that another thread takes within a forward finds some weights in place, for that moment."""
        for param, parked in self.parked.items():
            for name in param.group.names:
                found = state.get(prefix + name)
                if isinstance(found, torch.Tensor) and not isinstance(found, Parked) and self._passing(found):
                    state[prefix + name] = parked

    def _restore(self) -> None:
        for param, parked in self.parked.items():
            if not swap(param, parked, param.tensor):
                _log.warning("%s was replaced while it was offloaded: what replaced it stays", param.name)
            # whoever still has a stand-in gets the weight; and it keeps nothing of this alive
            parked.ftd_access.release()
        self.parked.clear()


class _StandIns(Uncopied):
    """The hook of `state_dict()`; an object, since torch leaves a mark on it."""

    def __init__(self, run: Callable[[nn.Module, dict[str, Any], str, Any], None]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> None:
        self._run(*args)


def _keep_resident(units: Sequence[Unit]) -> None:
    for unit in units:
        if unit.scope is not None and unit.scope._modules and reads_below(unit.scope):
            unit.resident = f"{type(unit.scope).__qualname__} computes in another way with stand-ins"


def _small(parked: Parked) -> torch.Tensor:
    """A tensor of a few elements of the same type and device, whose dimensions lie in the same order."""
    order = sorted(range(parked.dim()), key=parked.stride, reverse=True)
    sizes = [min(parked.size(dim), 2) for dim in order]
    small = torch.empty(sizes, dtype=parked.dtype, device=parked.device)
    return small.permute([order.index(dim) for dim in range(parked.dim())])


def _never(_tensor: torch.Tensor) -> bool:
    return False


def _tensor(param: Param) -> torch.Tensor:
    return param.tensor


def _emptied(param: Param) -> torch.Tensor:
    return nn.Parameter(torch.empty_like(param.tensor, device="meta"), requires_grad=False)
