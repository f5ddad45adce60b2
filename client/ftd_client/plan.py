"""Which bytes go where in a model, and everything that stands in the way. Compares; touches nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ftd.errors import BindError
from ftd.tensorspec import TensorSpec
from ftd.torchspec import torch_form
from ftd_client.walk import Group, Parts, foreign
from ftd_client.wording import built, count, shape_text, title

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
    "container": "use nn.ParameterList or nn.ParameterDict, or build the model on meta",
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


class Match(NamedTuple):
    """A group, and the tensor of the checkpoint whose bytes it gets."""

    group: Group
    source: TensorSpec
    dtype: torch.dtype


@dataclass(slots=True)
class Plan:
    """What goes where, and everything that stands in the way."""

    weights: Weights
    parameters: list[Match] = field(default_factory=list)
    buffers: list[Match] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, kind: str, name: str, text: str) -> None:
        self.problems.append((kind, f"{name}: {text}"))

    def error(self, model: nn.Module) -> BindError:
        remedies = dict.fromkeys(_REMEDIES[kind] for kind, _ in self.problems)
        return BindError(
            f"{type(model).__qualname__} and the weights do not fit: {count(len(self.problems), 'difference')} found",
            "; ".join(remedies),
            tuple(line for _, line in self.problems),
        )

    def match(self, group: Group) -> Match | None:
        """The tensor that `group` takes its bytes from; None, with the problems noted, where there is none."""
        specs = self.weights.specs
        found = [specs[place.name] for place in group.places if place.persistent and place.name in specs]
        if not found:
            self.refuse("missing", title(group), f"nothing found in the checkpoint, {built(group)} expected")
            return None
        before = len(self.problems)
        first, shape = found[0], group.tensor.shape
        forms = [self._form(spec) for spec in found]
        for spec, form in zip(found, forms, strict=True):
            if form is not None and form[1] != shape:
                text = f"{shape_text(spec.shape)} of {spec.dtype} found in the checkpoint, {built(group)} expected"
                self.refuse("shape", spec.name, text)
        if len(self.problems) == before:
            for spec in found[1:]:
                if not self._same_bytes(first, spec):
                    text = f"{spec.dtype} of other bytes found, those of {first.name} ({first.dtype}) expected: a tie"
                    self.refuse("tied", spec.name, text)
        if len(self.problems) > before or forms[0] is None:
            return None
        return Match(group, first, forms[0][0])

    def _form(self, spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]] | None:
        try:
            return torch_form(spec)
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


def compare(parts: Parts, weights: Weights, *, strict: bool, replace: bool) -> Plan:
    plan = Plan(weights)
    for group in parts.parameters:
        why = foreign(group.tensor, nn.Parameter)
        if why is not None:
            plan.refuse("foreign", title(group), why)
            continue
        if not (replace or group.tensor.is_meta):
            plan.refuse("real", title(group), f"a real parameter on {group.tensor.device} found, one on meta expected")
        match = plan.match(group)
        if match is not None:
            plan.parameters.append(match)
    for group in parts.buffers:
        why = foreign(group.tensor, torch.Tensor)
        if why is not None:
            plan.refuse("foreign", title(group), why)
        elif (match := plan.match(group)) is not None:
            plan.buffers.append(match)
    for group in parts.transient:
        if group.tensor.is_meta:
            continue  # `recompute` judges these
        if isinstance(group.tensor, nn.Parameter):
            # the parameter's places would be bound, and this one would go on with the old values
            plan.refuse("foreign", title(group), "a Parameter found in a buffer's place, plain Tensor expected")
        else:
            plan.left.append(group.name)
    _account_for_names(plan, parts, strict)
    return plan


def _account_for_names(plan: Plan, parts: Parts, strict: bool) -> None:
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
                plan.refuse(
                    "unexpected", name, f"{shape_text(spec.shape)} of {spec.dtype} found, no place in the model"
                )
