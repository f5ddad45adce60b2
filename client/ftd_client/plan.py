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
from ftd_client.bits import same_bits
from ftd_client.choose import Choice, Piece
from ftd_client.views import SharedWeights
from ftd_client.walk import Group, Parts, foreign
from ftd_client.wording import bare, built, count, shape_text, title

#: Kinds of problems, each with what to do about it.
_REMEDIES = {
    "missing": "bind the class and config that the checkpoint was made for (an untied head needs its own tensor)",
    "unexpected": "bind the class that the checkpoint was made for, or pass strict=False to leave these names out",
    "shape": "build the model from the checkpoint's own config",
    "dtype": "use a newer torch, or convert the checkpoint",
    "tied": "build the model untied, or publish a checkpoint whose tied tensors are equal",
    # torch.device("meta") is no full answer: it does not reach torch.Tensor(n) and the like
    "real": "build the whole model under ftd_client.meta_parameters(), or bind with replace=True to give its values up",
    "type": "bind with dtype= to cast the checkpoint's, in memory of your own, or with replace=True to take its type",
    "range": "cast to bfloat16 or float32, or bind without dtype=",
    "foreign": "bind the model before it is quantised or wrapped, or materialise its lazy modules",
    "packed": "bind the model before it is quantised, or load it by the library that quantised it",
    "container": "use nn.ParameterList or nn.ParameterDict, or build the model on meta",
    "transient": "build the model under ftd_client.meta_parameters(), which leaves buffers real",
    "state": "pass strict=False to keep the state that the modules have",
    "rule": "correct the rule, or pass strict=False to go without it",
}

#: What may be cast, and to what: smaller types and integers are quantised, and mean nothing without their scales.
CAST_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


class Weights(Protocol):
    """What `bind` needs to know of weights: enough to compare without building a tensor, and then the tensors."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every name, with its type and shape."""

    @property
    def choice(self) -> Choice | None:
        """How these weights were made of a checkpoint's; None where they are the checkpoint's own."""

    def extent(self, name: str) -> Hashable:
        """Where the bytes of `name` lie: equal for names that share them."""

    def view(self, name: str) -> torch.Tensor:
        """The CPU tensor over those bytes, contiguous and of the spec's type and shape; nothing is copied."""


class Match(NamedTuple):
    """A group, and the tensor of the checkpoint that it gets.

    Attributes:
        stored: type in the checkpoint.
        dtype: type in the model; of another one than `stored` it is a cast and no view.
    """

    group: Group
    source: TensorSpec
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.stored

    @property
    def nbytes(self) -> int:
        """In the model."""
        return self.group.tensor.numel() * self.dtype.itemsize


@dataclass(slots=True)
class Plan:
    """What goes where, and everything that stands in the way.

    Attributes:
        dtype: what floating tensors become; None for what they are.
    """

    weights: Weights
    dtype: torch.dtype | None = None
    parameters: list[Match] = field(default_factory=list)
    buffers: list[Match] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
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
        first, before = found[0], len(self.problems)
        stored = self._stored(first, group)
        for spec in found[1:]:
            if self._stored(spec, group) is not None and stored is not None and not self._same_bytes(first, spec):
                text = f"{spec.dtype} of other bytes found, those of {first.name} ({first.dtype}) expected: a tie"
                self.refuse("tied", spec.name, text)
        if stored is None or len(self.problems) > before:
            return None
        return Match(group, first, stored, as_bound(stored, self.dtype))

    def origin(self, spec: TensorSpec) -> str:
        """What it is in the checkpoint, where that is not what it is in the model."""
        choice = self.weights.choice
        there = str(choice.pieces[spec.name]) if choice is not None else ""
        return f" ({there})" if there else ""

    def _stored(self, spec: TensorSpec, group: Group) -> torch.dtype | None:
        """Its type; None, with the problem noted, where this torch lacks it or the group has another shape."""
        try:
            dtype, shape = torch_form(spec)
        except BindError as error:
            self.problems.append(("dtype", error.message))
            return None
        if shape == group.tensor.shape:
            return dtype
        text = f"{shape_text(spec.shape)} of {spec.dtype} found in the checkpoint{self.origin(spec)}"
        self.refuse("shape", spec.name, f"{text}, {built(group)} expected")
        return None

    def _same_bytes(self, one: TensorSpec, other: TensorSpec) -> bool:
        if one.dtype != other.dtype:
            return False
        if self.weights.extent(one.name) == self.weights.extent(other.name):
            return True
        return same_bits(self.weights.view(one.name), self.weights.view(other.name))


def as_bound(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a tensor of type `stored` becomes."""
    return wanted if wanted is not None and stored in CAST_TYPES.values() else stored


def uncast(weights: SharedWeights, wanted: torch.dtype | None) -> SharedWeights:
    """Those of the weights that are views however they are bound."""
    if wanted is None:
        return weights
    kept = {n: Piece(n, spec) for n, spec in weights.specs.items() if CAST_TYPES.get(spec.dtype, wanted) == wanted}
    return weights.select(Choice(kept))


def compare(parts: Parts, weights: Weights, *, strict: bool, replace: bool, dtype: torch.dtype | None = None) -> Plan:
    """What goes where by names, types and shapes. Real parameters may have values of their own: `bind` compares."""
    plan = Plan(weights, dtype)
    for group in parts.parameters:
        why = foreign(group.tensor, nn.Parameter)
        if why is not None:
            plan.refuse("foreign", title(group), why)
            continue
        match = plan.match(group)
        if match is None:
            continue
        plan.parameters.append(match)
        built_as = group.tensor.dtype
        if not (replace or group.tensor.is_meta) and match.dtype not in (built_as, dtype):
            text = f"a real parameter of {bare(built_as)} found, {bare(match.dtype)} of the checkpoint expected"
            plan.refuse("type", title(group), text)
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
    _account_for_rules(plan, parts, strict)
    return plan


def _account_for_rules(plan: Plan, parts: Parts, strict: bool) -> None:
    """Accounts for rules of the key map and the shard that did nothing."""
    if plan.weights.choice is None:
        return
    plan.unmatched += plan.weights.choice.unmatched(place.name for group in parts.groups() for place in group.places)
    for rule in plan.unmatched if strict else ():
        plan.refuse("rule", repr(rule), "no name found that it fits")


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
                    "unexpected",
                    name,
                    f"{shape_text(spec.shape)} of {spec.dtype} found{plan.origin(spec)}, no place in the model",
                )
