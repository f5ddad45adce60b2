"""Weights into a model: every parameter a view of them, every persistent buffer a private copy.

First a plan, which compares names, types and shapes and touches nothing; then all assignments, or none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import BindError, InternalError, UsageError
from ftd.tensorspec import TensorSpec
from ftd.torchspec import torch_dtype
from ftd.units import format_bytes, format_seconds
from ftd_client.buffers import recompute
from ftd_client.walk import Exchange, Group, Parts, foreign, on_meta, walk

#: Kinds of problems, each with what to do about it.
_REMEDIES = {
    "missing": "bind the class and config that the checkpoint was made for (an untied head needs its own tensor)",
    "unexpected": "bind the class that the checkpoint was made for, or pass strict=False to leave these names out",
    "shape": "build the model from the checkpoint's own config",
    "dtype": "use a newer torch, or convert the checkpoint",
    "tied": "build the model untied, or publish a checkpoint whose tied tensors are equal",
    # torch.device("meta") is no full answer: it does not reach torch.Tensor(n) and the like
    "real": "build the whole model under ftd_client.meta_parameters(), or pass replace=True",
    "foreign": "bind the model before it is quantised or wrapped, or materialise its lazy modules",
    "transient": "build the model under ftd_client.meta_parameters(), which leaves buffers real",
    "state": "pass strict=False to keep the state that the modules have",
}


class Weights(Protocol):
    """What `bind` needs to know of weights: enough to compare without building a tensor, and then the tensors."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every name, with its type and shape."""

    def extent(self, name: str) -> Hashable:
        """Where the bytes of `name` lie: equal for names that share them."""

    def view(self, name: str) -> torch.Tensor:
        """The CPU tensor over those bytes, contiguous and of the spec's type and shape; nothing is copied."""


@dataclass(frozen=True, slots=True)
class DtypeChange:
    """A tensor that took the checkpoint's type in place of the one that the model was built with."""

    name: str
    built: torch.dtype
    bound: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}: {_bare(self.built)} → {_bare(self.bound)}"


@dataclass(frozen=True, slots=True)
class BindReport:
    """What `bind` did. A tensor with several names in the model goes by the first of them.

    Attributes:
        bound: parameters, now views of the weights.
        bound_bytes: bytes that they show; bytes shown twice count once.
        tied: names in the model of each parameter or buffer that has several.
        shared: parameters that are apart in the model and show the same bytes.
        dtype_changes: tensors that took the checkpoint's type.
        cloned: persistent buffers, now private copies.
        recomputed: non-persistent buffers that came from the modules' own init.
        left: non-persistent buffers, and extra state of modules, that stayed as they were.
        ignored: names of non-persistent buffers that the checkpoint holds nevertheless.
        unexpected: names of the checkpoint that the model has no place for (`strict=False`).
        meta_attributes: plain tensor attributes, neither parameters nor buffers, that are still on meta.
    """

    bound: tuple[str, ...]
    bound_bytes: int
    tied: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, ...], ...]
    dtype_changes: tuple[DtypeChange, ...]
    cloned: tuple[str, ...]
    recomputed: tuple[str, ...]
    left: tuple[str, ...]
    ignored: tuple[str, ...]
    unexpected: tuple[str, ...]
    meta_attributes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{_count(len(self.bound), 'parameter')} bound ({format_bytes(self.bound_bytes)}), "
            f"{_count(len(self.tied), 'tie')} kept",
            f"buffers: {len(self.cloned)} cloned, {len(self.recomputed)} recomputed, {len(self.left)} left",
        ]
        lists: dict[str, Iterable[object]] = {
            "types taken from the checkpoint": self.dtype_changes,
            "same bytes, not tied": (" = ".join(names) for names in self.shared),
            "ignored, non-persistent": self.ignored,
            "unexpected, left out": self.unexpected,
            "plain attributes still on meta": self.meta_attributes,
        }
        for title, entries in lists.items():
            texts = [str(entry) for entry in entries]
            if texts:
                more = ", …" if len(texts) > 3 else ""
                lines.append(f"{title}: {len(texts)} ({', '.join(texts[:3])}{more})")
        return "\n".join(lines)


def bind(model: nn.Module, weights: Weights, *, strict: bool = True, replace: bool = False) -> BindReport:
    """Gives a model built on meta its weights. Either all of it happens, or the model stays as it was.

    Parameters become views of the weights, with the checkpoint's type and the model's `requires_grad`; what is
    tied in the model is one Parameter in every place, whichever of its names the checkpoint holds. Persistent
    buffers become private copies. Non-persistent buffers that are real stay; those on meta are recomputed by their
    modules' own init. State that modules keep beside tensors (`get_extra_state`) is never set: weights hold none.

    Args:
        strict: refuse names of the checkpoint that the model has no place for, and extra state of modules.
        replace: accept parameters that are real already, such as those of an earlier bind.

    Raises:
        BindError: model and weights do not fit, with a line for every difference, or a module refused a tensor.
    """
    parts = walk(model)
    plan = _plan(parts, weights, strict=strict, replace=replace)
    transient = recompute(model, [group for group in parts.transient if group.tensor.is_meta])
    for group, reason in transient.refused.items():
        plan.refuse("transient", _title(group), f"a non-persistent buffer on meta, which nothing recomputes: {reason}")
    if plan.problems:
        raise plan.error(model)
    # tensors made in inference mode could not be written to outside of it
    with torch.inference_mode(False), torch.no_grad():
        fresh: list[tuple[Group, torch.Tensor]] = list(transient.values.items())
        for match in plan.parameters:
            view = _checked_view(weights, match)
            wants_grad = match.group.tensor.requires_grad and (view.is_floating_point() or view.is_complex())
            fresh.append((match.group, nn.Parameter(view, requires_grad=wants_grad)))
        fresh += [(match.group, _checked_view(weights, match).clone()) for match in plan.buffers]
        with Exchange() as exchange:
            for group, tensor in fresh:
                exchange.put(group, tensor)
            left_over = on_meta(model)
            if left_over:
                raise InternalError(f"bound, but still on meta: {', '.join(left_over)}")
    return _report(plan, parts)


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
    target = torch.device(device)
    if target.type == "meta" or (target.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {target} found, a device that holds data and is present expected", "use 'cpu'")
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


class _Match(NamedTuple):
    """A group, and the tensor of the checkpoint whose bytes it gets."""

    group: Group
    source: TensorSpec
    dtype: torch.dtype


@dataclass(slots=True)
class _Plan:
    """What goes where, and everything that stands in the way."""

    weights: Weights
    parameters: list[_Match] = field(default_factory=list)
    buffers: list[_Match] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, kind: str, name: str, text: str) -> None:
        self.problems.append((kind, f"{name}: {text}"))

    def error(self, model: nn.Module) -> BindError:
        remedies = dict.fromkeys(_REMEDIES[kind] for kind, _ in self.problems)
        return BindError(
            f"{type(model).__qualname__} and the weights do not fit: {_count(len(self.problems), 'difference')} found",
            "; ".join(remedies),
            tuple(line for _, line in self.problems),
        )

    def match(self, group: Group) -> _Match | None:
        """The tensor that `group` takes its bytes from; None, with the problems noted, where there is none."""
        specs = self.weights.specs
        found = [specs[place.name] for place in group.places if place.persistent and place.name in specs]
        if not found:
            self.refuse("missing", _title(group), f"nothing found in the checkpoint, {_built(group)} expected")
            return None
        before = len(self.problems)
        first, shape = found[0], group.tensor.shape
        dtypes = [self._dtype(spec) for spec in found]
        for spec in found:
            if spec.shape != shape:
                text = f"{_shape(spec.shape)} of {spec.dtype} found in the checkpoint, {_built(group)} expected"
                self.refuse("shape", spec.name, text)
        if len(self.problems) == before:
            for spec in found[1:]:
                if not self._same_bytes(first, spec):
                    text = f"{spec.dtype} of other bytes found, those of {first.name} ({first.dtype}) expected: a tie"
                    self.refuse("tied", spec.name, text)
        if len(self.problems) > before or dtypes[0] is None:
            return None
        return _Match(group, first, dtypes[0])

    def _dtype(self, spec: TensorSpec) -> torch.dtype | None:
        try:
            return torch_dtype(spec.dtype, spec.name)
        except BindError as error:
            self.problems.append(("dtype", error.message))
            return None

    def _same_bytes(self, one: TensorSpec, other: TensorSpec) -> bool:
        if one.dtype != other.dtype:
            return False
        if self.weights.extent(one.name) == self.weights.extent(other.name):
            return True
        raw = [self.weights.view(spec.name).reshape(-1).view(torch.uint8) for spec in (one, other)]
        return torch.equal(*raw)


def _plan(parts: Parts, weights: Weights, *, strict: bool, replace: bool) -> _Plan:
    plan = _Plan(weights)
    for group in parts.parameters:
        why = foreign(group.tensor, nn.Parameter)
        if why is not None:
            plan.refuse("foreign", _title(group), why)
            continue
        if not (replace or group.tensor.is_meta):
            plan.refuse("real", _title(group), f"a real parameter on {group.tensor.device} found, one on meta expected")
        match = plan.match(group)
        if match is not None:
            plan.parameters.append(match)
    for group in parts.buffers:
        why = foreign(group.tensor, torch.Tensor)
        if why is not None:
            plan.refuse("foreign", _title(group), why)
        elif (match := plan.match(group)) is not None:
            plan.buffers.append(match)
    for group in parts.transient:
        if group.tensor.is_meta:
            continue  # `recompute` judges these
        if isinstance(group.tensor, nn.Parameter):
            # the parameter's places would be bound, and this one would go on with the old values
            plan.refuse("foreign", _title(group), "a Parameter found in a buffer's place, plain Tensor expected")
        else:
            plan.left.append(group.name)
    _plan_names(plan, parts, strict)
    return plan


def _plan_names(plan: _Plan, parts: Parts, strict: bool) -> None:
    """Accounts for every name of the checkpoint that no parameter or persistent buffer claims, and for extra state."""
    specs = plan.weights.specs
    places = [place for group in parts.groups() for place in group.places]
    claimed = {place.name for place in places if place.persistent}
    plan.ignored += [place.name for place in places if not place.persistent and place.name in specs]
    claimed.update(plan.ignored)
    plan.unexpected += [name for name in specs if name not in claimed]
    plan.left += parts.extra_state
    if strict:
        for name in parts.extra_state:
            found = "found in the checkpoint too, but not to be set" if name in specs else "nothing found for it"
            plan.refuse("state", name, f"state that the module keeps beside tensors: {found}")
        for name in plan.unexpected:
            if name not in parts.extra_state:
                spec = specs[name]
                plan.refuse("unexpected", name, f"{_shape(spec.shape)} of {spec.dtype} found, no place in the model")


def _report(plan: _Plan, parts: Parts) -> BindReport:
    weights = plan.weights
    by_extent: dict[Hashable, list[_Match]] = {}
    for match in plan.parameters:
        # empty tensors may lie at one address without being one tensor
        if match.source.nbytes:
            by_extent.setdefault(weights.extent(match.source.name), []).append(match)
    return BindReport(
        bound=tuple(match.group.name for match in plan.parameters),
        bound_bytes=sum(same[0].source.nbytes for same in by_extent.values()),
        tied=tuple(group.names for group in parts.groups() if len(group.places) > 1),
        shared=tuple(tuple(match.group.name for match in same) for same in by_extent.values() if len(same) > 1),
        dtype_changes=tuple(
            DtypeChange(match.group.name, match.group.tensor.dtype, match.dtype)
            for match in (*plan.parameters, *plan.buffers)
            if match.group.tensor.dtype != match.dtype
        ),
        cloned=tuple(match.group.name for match in plan.buffers),
        recomputed=tuple(group.name for group in parts.transient if group.tensor.is_meta),
        left=tuple(plan.left),
        ignored=tuple(plan.ignored),
        unexpected=tuple(plan.unexpected),
        meta_attributes=parts.meta_attributes,
    )


def _checked_view(weights: Weights, match: _Match) -> torch.Tensor:
    view = weights.view(match.source.name)
    if view.shape != match.source.shape or view.dtype != match.dtype:
        raise InternalError(f"view of {match.source.name!r} is {_shape(view.shape)} of {view.dtype}, unlike its spec")
    return view


def _refuse_immovable(model: nn.Module, parts: Parts) -> None:
    problems: list[str] = []
    for groups, expected in ((parts.parameters, nn.Parameter), (parts.buffers + parts.transient, torch.Tensor)):
        for group in groups:
            why = foreign(group.tensor, expected)
            if why is None and group.tensor.is_meta:
                why = "no data found (it is on meta), a real tensor expected"
            if why is not None:
                problems.append(f"{_title(group)}: {why}")
    if problems:
        raise BindError(
            f"{type(model).__qualname__} can't be moved: {_count(len(problems), 'tensor')} found that can't",
            "bind the model first, and before it is quantised or wrapped",
            tuple(problems),
        )


def _title(group: Group) -> str:
    others = ", ".join((*group.names[1:4], *(["…"] if len(group.names) > 4 else [])))
    return f"{group.name} (also {others})" if others else group.name


def _built(group: Group) -> str:
    return f"{_shape(group.tensor.shape)} of {_bare(group.tensor.dtype)}"


def _shape(shape: Iterable[int]) -> str:
    return str(tuple(shape))


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
