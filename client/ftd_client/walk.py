"""What a model consists of, and the one way to put another tensor in its places.

Tensors are told apart by the identity of the Python object within one walk, never by a data pointer: every meta
tensor reports address 0, and so does every empty one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import filterfalse
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from ftd.errors import BindError

#: Attributes that torch keeps up to date itself: every module's own, and `nn.LSTM`'s list of its weights.
_KEPT_BY_TORCH = frozenset({*vars(nn.Module()), "_flat_weights"})
#: Types of most other attributes, asked first: what else a value is takes 300 ns to ask.
_SCALARS = frozenset({bool, int, float, str, type(None)})

Collection = list[object] | tuple[object, ...] | dict[object, object]


# a NamedTuple: there is one for every name, and a frozen dataclass takes three times as long to make
class Place(NamedTuple):
    """One attribute of one module where a tensor is registered, under one of the module's dotted names.

    Attributes:
        registry: the module's dict of parameters or of buffers.
        persistent: whether `state_dict()` holds it; true of every parameter.
    """

    module: nn.Module
    attribute: str
    name: str
    registry: dict[str, torch.Tensor | None]
    persistent: bool


@dataclass(slots=True, eq=False)
class Group:
    """All places that hold one tensor object: a tie is a group with several.

    Attributes:
        tensor: the object that the walk found.
        places: in the order of the walk, never empty.
        aliases: plain attributes (module, attribute) that hold the same object beside its registration.
    """

    tensor: torch.Tensor
    places: list[Place]
    aliases: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first dotted name: what reports and messages call the group."""
        return self.places[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    @property
    def persistent_names(self) -> tuple[str, ...]:
        """The keys of `state_dict()` that this group answers for."""
        return tuple(place.name for place in self.places if place.persistent)

    def parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        """`tensor` as a Parameter for this group's places: one that needs grad where the old one does and its type
        can."""
        wants_grad = self.tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        return nn.Parameter(tensor, requires_grad=wants_grad)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart, in the order of its modules.

    Attributes:
        modules: as `modules_by_name` gives them.
        parameters: every Parameter once.
        buffers: every tensor that is a persistent buffer somewhere.
        transient: buffers that `state_dict()` never holds.
        extra_state: `state_dict()` keys of modules with a `get_extra_state` or `set_extra_state` of their own.
        meta_attributes: names of plain tensor attributes on meta, which belong to no group.
        containers: lists, tuples and dicts in plain attributes, with their names; torch's own are not among them.
    """

    modules: tuple[tuple[str, nn.Module], ...]
    parameters: tuple[Group, ...]
    buffers: tuple[Group, ...]
    transient: tuple[Group, ...]
    extra_state: tuple[str, ...]
    meta_attributes: tuple[str, ...]
    containers: tuple[tuple[str, Collection], ...]

    def groups(self) -> tuple[Group, ...]:
        return (*self.parameters, *self.buffers, *self.transient)


def modules_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every (prefix, module), parents first; a shared module comes once for each of its names.

    The prefix ends in a dot, except the root's, which is empty. A module registered below itself is not entered
    again: the names under it would never end.
    """
    stack: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    while stack:
        prefix, module, above = stack.pop()
        yield prefix, module
        if not module._modules:
            continue
        chain = (*above, module)
        for name, child in reversed(module._modules.items()):
            # a leaf is nobody's parent, so the search is for the few others
            if child is not None and not (child._modules and any(child is parent for parent in chain)):
                stack.append((f"{prefix}{name}.", child, chain))


def walk(model: nn.Module) -> Parts:
    """Takes `model` apart. Touches no tensor's contents and computes nothing.

    The groups hold references to the tensors and modules, and are true until somebody reassigns one.
    """
    # ids serve as keys only inside this function, while `model` keeps every tensor and module alive
    parameters: dict[int, Group] = {}
    buffers: dict[int, Group] = {}
    plain: list[tuple[str, nn.Module, str, torch.Tensor]] = []
    containers: list[tuple[str, Collection]] = []
    seen: set[int] = set()
    modules = tuple(modules_by_name(model))
    for prefix, module in modules:
        if module._parameters:
            _collect(parameters, module, module._parameters, prefix)  # type: ignore[arg-type]
        if module._buffers:
            _collect(buffers, module, module._buffers, prefix)
        if id(module) not in seen:
            seen.add(id(module))
            for name in filterfalse(_KEPT_BY_TORCH.__contains__, module.__dict__):
                value = module.__dict__[name]
                if type(value) in _SCALARS:
                    continue
                if isinstance(value, torch.Tensor):
                    plain.append((prefix + name, module, name, value))
                elif isinstance(value, (list, tuple, dict)):
                    containers.append((prefix + name, value))
    meta_attributes: list[str] = []
    for name, module, attribute, value in plain:
        group = parameters.get(id(value)) or buffers.get(id(value))
        if group is not None:
            group.aliases.append((module, attribute))
        elif value.is_meta:
            meta_attributes.append(name)
    with_state = {kind for kind in {type(module) for _, module in modules} if _has_extra_state(kind)}
    return Parts(
        modules=modules,
        parameters=tuple(parameters.values()),
        buffers=tuple(group for group in buffers.values() if group.persistent_names),
        transient=tuple(group for group in buffers.values() if not group.persistent_names),
        extra_state=tuple(f"{prefix}_extra_state" for prefix, module in modules if type(module) in with_state),
        meta_attributes=tuple(meta_attributes),
        containers=tuple(containers),
    )


def contained(parts: Parts, tensors: Iterable[torch.Tensor]) -> list[tuple[str, str]]:
    """(name, type) of each container that holds one of `tensors`."""
    wanted = {id(tensor) for tensor in tensors if not tensor.is_meta}
    if not wanted:
        return []
    return [
        (name, type(held).__name__)
        for name, held in parts.containers
        if not wanted.isdisjoint(map(id, held.values() if isinstance(held, dict) else held))
    ]


def packed(parts: Parts) -> list[tuple[str, str]]:
    """(name, type of the module) of what modules write into `state_dict()` beside parameters, buffers and extra state.

    That is how quantised modules of torch keep weights in a form of their own. Asks only modules that write in a way
    of their own; one that can't goes by its own name.
    """
    found: list[tuple[str, str]] = []
    for prefix, module in parts.modules:
        kind = type(module)
        if kind._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        saved: dict[str, object] = {}
        known = {f"{prefix}{name}" for name in (*module._parameters, *module._buffers, "_extra_state")}
        try:
            module._save_to_state_dict(saved, prefix, keep_vars=True)
        except Exception:  # of the module's own code, such as one that unpacks what is on meta
            saved = {prefix.removesuffix(".") or kind.__qualname__: None}
        found += [(name, kind.__qualname__) for name in saved if name not in known]
    return found


def on_meta(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of the parameters and buffers that hold no bytes."""
    return [
        prefix + attribute
        for prefix, module in modules
        for registry in (module._parameters, module._buffers)
        for attribute, tensor in registry.items()
        if tensor is not None and tensor.is_meta
    ]


def foreign(tensor: torch.Tensor, expected: type[torch.Tensor]) -> str | None:
    """What makes `tensor` more than an `expected` over plain strided memory, as found and expected; else None.

    Subclasses keep state beside the bytes (scales, packed shapes, placements) that nobody but they can carry over.
    A Parameter over a subclass is of the subclass's type, so that the type alone tells.
    """
    found = type(tensor)
    if found is not expected:
        return f"{found.__module__}.{found.__qualname__} found, plain {expected.__name__} expected"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout} found, {torch.strided} expected"
    return None


class Exchange:
    """Puts other tensors into the places of groups; leaving its `with` by an exception puts every old one back.

    Places are written by `setattr`, as `load_state_dict(assign=True)` writes them, and not through the registries:
    modules that keep books on their tensors (`nn.LSTM` and its `_flat_weights`) do so in `__setattr__`.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Place, torch.Tensor]] = []
        self._aliases: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._undo()

    def put(self, group: Group, tensor: torch.Tensor) -> None:
        """Makes `tensor` the one object in every place of `group`; Python attributes of the old one go along.

        Raises:
            BindError: a module refused the tensor, or stored another one.
        """
        if group.tensor.__dict__:
            tensor.__dict__.update(group.tensor.__dict__)
        for place in group.places:
            # a shared module has one place under several names
            if place.registry.get(place.attribute) is not tensor:
                self._done.append((place, group.tensor))
                _assign(place, tensor)
        for module, attribute in group.aliases:
            self._aliases.append((module, attribute, group.tensor))
            module.__dict__[attribute] = tensor

    def _undo(self) -> None:
        for place, old in reversed(self._done):
            # by setattr for the module's own books; one that refused the new tensor may refuse the old one too
            with contextlib.suppress(Exception):
                setattr(place.module, place.attribute, old)
            place.registry[place.attribute] = old
            _keep_persistence(place)
        for module, attribute, old in self._aliases:
            module.__dict__[attribute] = old


def _collect(
    groups: dict[int, Group], module: nn.Module, registry: dict[str, torch.Tensor | None], prefix: str
) -> None:
    for attribute, tensor in registry.items():
        if tensor is None:
            continue
        persistent = attribute not in module._non_persistent_buffers_set
        place = Place(module, attribute, prefix + attribute, registry, persistent)
        group = groups.get(id(tensor))
        if group is None:
            groups[id(tensor)] = Group(tensor, [place])
        else:
            group.places.append(place)


def _has_extra_state(cls: type[nn.Module]) -> bool:
    base = nn.Module
    return cls.get_extra_state is not base.get_extra_state or cls.set_extra_state is not base.set_extra_state


def _assign(place: Place, tensor: torch.Tensor) -> None:
    try:
        setattr(place.module, place.attribute, tensor)
    except Exception as error:
        raise BindError(
            f"{place.name}: {_owner(place)} refused the tensor ({type(error).__name__}: {error})",
            "let the module's __setattr__ take a tensor as load_state_dict(assign=True) gives it; nothing was changed",
        ) from error
    _keep_persistence(place)
    if place.registry.get(place.attribute) is not tensor:
        raise BindError(
            f"{place.name}: {_owner(place)} stored another tensor than the one it was given",
            "bind outside of contexts that intercept the registration of tensors; nothing was changed",
        )


def _owner(place: Place) -> str:
    return type(place.module).__qualname__


def _keep_persistence(place: Place) -> None:
    """`nn.Buffer` objects carry a `persistent` of their own, which assigning lets win over the module's record."""
    if place.registry is place.module._buffers:
        transient = place.module._non_persistent_buffers_set
        (transient.discard if place.persistent else transient.add)(place.attribute)
