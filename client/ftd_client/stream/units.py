"""What streams at the finest: the parameters that one module's own forward reads, and nothing else does.

A *unit* is a scope (the module around whose forward its parameters have to be on the device) and the managed
parameters that are read there. Most scopes are leaves: a Linear with weight and bias. Where a module reads what lies
below it, as `nn.MultiheadAttention` reads `out_proj.weight` without calling `out_proj`, that module is the scope, and
the unit is all below it.

Streaming is safe for a unit because nobody else's parameters are put in its place while its scope's forward runs. Of
what no such promise can be made stays resident, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ftd.errors import FtdError
from ftd_client.walk import Group, Parts, contained, foreign
from ftd_client.wording import count, title

#: Parameters of a module that has units below it, up to this size, stay resident. Larger ones make the module one
#: unit with all that is below it: 256 KiB in each of 100 layers is nothing on a GPU, a layer too coarse is a lot.
_BARE_BYTES = 256 * 1024

#: Containers that hold modules and compute nothing themselves.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.TransformerEncoder, nn.TransformerDecoder)


class OffloadError(FtdError):
    """A model, or something done with it, that cannot be offloaded."""

    code = "offload"


@dataclass(eq=False, slots=True)
class Param:
    """A managed parameter: one tensor, wherever the model holds it.

    Attributes:
        name: the first of its dotted names.
        group: its places in the model, and the tensor that was there when the model was offloaded.
    """

    name: str
    group: Group

    @property
    def tensor(self) -> torch.Tensor:
        return self.group.tensor

    @property
    def nbytes(self) -> int:
        return self.group.tensor.nbytes


@dataclass(eq=False, slots=True)
class Unit:
    """Parameters that have to be on the device together.

    Attributes:
        name: the dotted name of the scope, or that of a region marked by hand.
        layer: the selected module that it lies in, or the region.
        scope: the module around whose forward they are needed; None for a region.
        params: in the model's order.
        resident: why it may not stream; empty where it may.
    """

    name: str
    layer: str
    scope: nn.Module | None
    params: list[Param] = field(default_factory=list)
    resident: str = ""

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.params)

    @property
    def is_region(self) -> bool:
        """Whether it is what a region marked by hand reads outside of any module: put in place when it is entered."""
        return self.scope is None and not self.resident


def make_units(
    model: nn.Module, parts: Parts, managed: Mapping[str, str], *, ties: bool, by_hand: bool = False
) -> tuple[list[Unit], list[Group]]:
    """The units of the managed parameters in the order of the model's modules, and the groups that are not managed.

    Args:
        managed: name of each managed parameter → its layer; a tied one under each of its names.
        ties: whether a parameter may be shared between layers (it is resident then).
        by_hand: regions marked by hand will tell what belongs together: nothing is put together here.

    Raises:
        OffloadError: a managed parameter is more than a plain tensor, lies in a plain list, or is shared between
            layers where that is not possible; every one is named.
    """
    params, rest, shared = _managed_params(parts, managed)
    _refuse(model, parts, params, shared, ties=ties)
    paths = {id(module): path for path, module in model.named_modules()}
    owners: dict[int, list[Param]] = {}
    units: list[Unit] = []
    for param in params:
        reason = _cannot_stream(param)
        modules = {id(place.module) for place in param.group.places}
        if reason or len(modules) > 1:
            units.append(_stuck(param, managed, reason or "tied: one tensor in several modules"))
        else:
            owners.setdefault(modules.pop(), []).append(param)
    units += _by_module(model, owners) if by_hand else _scoped(model, owners, managed)
    order = {path: position for position, path in enumerate(paths.values())}
    first = {name: position for position, name in enumerate(managed)}
    units.sort(key=lambda unit: (order.get(unit.name, len(order)), first.get(unit.params[0].name, 0)))
    return units, rest


def _managed_params(
    parts: Parts, managed: Mapping[str, str]
) -> tuple[list[Param], list[Group], dict[str, tuple[str, ...]]]:
    """Managed parameters, the rest, and those shared between layers (or a layer and the rest) with their layers."""
    params: list[Param] = []
    rest: list[Group] = []
    shared: dict[str, tuple[str, ...]] = {}
    for group in parts.parameters:
        layers = {managed[name] for name in group.names if name in managed}
        if not layers or not group.tensor.nbytes or not is_dense(group.tensor):
            rest.append(group)  # what a copy of bytes would not carry as it is, or has none
        elif len(layers) > 1:
            shared[title(group)] = tuple(sorted(layers))
            params.append(Param(group.name, group))
        elif any(name not in managed for name in group.names) and len({id(p.module) for p in group.places}) > 1:
            rest.append(group)  # one of its places has to find it on the device at any time
        else:
            params.append(Param(group.name, group))
    return params, rest, shared


def _refuse(
    model: nn.Module, parts: Parts, params: list[Param], shared: dict[str, tuple[str, ...]], *, ties: bool
) -> None:
    kind = type(model).__qualname__
    odd = [f"{title(p.group)}: {why}" for p in params if (why := foreign(p.tensor, nn.Parameter)) is not None]
    if odd:
        raise OffloadError(
            f"{kind} can't be offloaded: {count(len(odd), 'parameter')} found that a copy of bytes would not carry "
            f"whole: {'; '.join(odd[:5])}",
            "offload the model before it is quantised or wrapped",
        )
    boxed = contained(parts, [param.tensor for param in params])
    if boxed:
        texts = [f"{name} (a {container})" for name, container in boxed[:5]]
        raise OffloadError(
            f"{kind} can't be offloaded: managed parameters also lie in {', '.join(texts)}, where they can't be "
            "exchanged",
            "use nn.ParameterList or nn.ParameterDict there, or name them in exclude_patterns",
        )
    if shared and not ties:
        texts = [f"{name} in {' and '.join(layers)}" for name, layers in list(shared.items())[:5]]
        raise OffloadError(
            f"block transfers move layers as a whole, and tensors are shared between layers: {'; '.join(texts)}",
            "set transfer_mode='strategy', or exclude all but one of these layers",
        )


def _cannot_stream(param: Param) -> str:
    """Why a parameter has to stay resident by itself; empty where nothing stands in the way."""
    if param.group.aliases:
        module, attribute = param.group.aliases[0]
        return f"{type(module).__qualname__} keeps it in the plain attribute {attribute!r} too"
    for place in param.group.places:
        if type(place.module).__setattr__ is not nn.Module.__setattr__:
            return f"{type(place.module).__qualname__} keeps books in a __setattr__ of its own"
    return ""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _stuck(param: Param, managed: Mapping[str, str], reason: str) -> Unit:
    """A unit of one parameter that stays resident; its scope is nobody's forward."""
    layer = next(managed[name] for name in param.group.names if name in managed)
    return Unit(param.name, layer, None, [param], resident=reason)


def _scoped(model: nn.Module, owners: dict[int, list[Param]], managed: Mapping[str, str]) -> Iterator[Unit]:
    """Units of modules that own parameters; one whose forward reads below itself takes all that is there."""
    absorbed: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in absorbed:
            continue
        own = owners.get(id(module), [])
        inside = [m for m in module.modules() if id(m) in owners and id(m) not in absorbed]
        if all(m is module for m in inside):
            if own:
                yield _unit(path, module, own, managed)
        elif sum(param.nbytes for param in own) > _BARE_BYTES or reads_below(module):
            yield _unit(path, module, _absorb(module, owners, absorbed), managed)
        else:
            for param in own:
                yield _stuck(param, managed, f"{type(module).__qualname__} reads it beside modules that stream")


def _by_module(model: nn.Module, owners: dict[int, list[Param]]) -> Iterator[Unit]:
    """Units of modules that read nobody else's parameters, and of each other one alone until somebody reads it."""
    absorbed: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in absorbed:
            continue
        if not module._modules or reads_below(module):
            params = _absorb(module, owners, absorbed)
            if params:
                yield Unit(path, "", module, params)
        else:
            for param in owners.get(id(module), []):
                yield Unit(param.name, "", None, [param])


def _absorb(module: nn.Module, owners: dict[int, list[Param]], absorbed: set[int]) -> list[Param]:
    """Takes the parameters of a module and of all below it that nobody has taken yet, its own first."""
    inside = [m for m in module.modules() if id(m) in owners and id(m) not in absorbed]
    absorbed.update(map(id, inside))
    return [param for m in inside for param in owners[id(m)]]


def _unit(path: str, module: nn.Module, params: list[Param], managed: Mapping[str, str]) -> Unit:
    layer = next(managed[name] for name in params[0].group.names if name in managed)
    return Unit(path, layer, module, params)


def reads_below(module: nn.Module) -> bool:
    """Whether a module with parameters below it computes with those itself, as torch's own do (attention and its
    projections, fused layers)."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
