"""Weights into a model: every parameter a view of them, every persistent buffer a private copy.

First a plan, which compares names, types and shapes and touches nothing; then all assignments, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ftd.errors import InternalError, UsageError
from ftd.packing import no_collection
from ftd.units import format_bytes
from ftd_client.bits import same_bits
from ftd_client.buffers import recompute
from ftd_client.plan import CAST_TYPES, Match, Plan, Weights, compare
from ftd_client.walk import Exchange, Group, Parts, contained, on_meta, packed, walk
from ftd_client.wording import bare, count, shape_text, title


# NamedTuples: there may be one for every tensor, and a frozen dataclass takes three times as long to make
class DtypeChange(NamedTuple):
    """A tensor that took the checkpoint's type in place of the one that the model was built with."""

    name: str
    built: torch.dtype
    bound: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}: {bare(self.built)} → {bare(self.bound)}"


class Cast(NamedTuple):
    """A tensor that was cast from the checkpoint's type (`dtype=`), into memory of this process."""

    name: str
    stored: torch.dtype
    bound: torch.dtype
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {bare(self.stored)} → {bare(self.bound)}"


@dataclass(frozen=True, slots=True)
class BindReport:
    """What `bind` did. A tensor with several names in the model goes by the first of them.

    Attributes:
        bound: parameters, now views of the weights, or cast from them.
        bound_bytes: bytes that the views show; bytes shown twice count once.
        tied: names in the model of each parameter or buffer that has several.
        shared: parameters that are apart in the model and show the same bytes.
        dtype_changes: tensors that got another type than the model was built with.
        cast: tensors that got another type than they have in the checkpoint.
        cast_bytes: memory of this process that cast parameters take: what sharing would have saved.
        cloned: persistent buffers, now private copies.
        recomputed: non-persistent buffers that came from the modules' own init.
        left: non-persistent buffers, and extra state of modules, that stayed as they were.
        ignored: names of non-persistent buffers that the checkpoint holds nevertheless.
        unexpected: names of the checkpoint that the model has no place for (`strict=False`), as the key map gives them.
        dropped: names of the checkpoint that the key map leaves out.
        unmatched: prefixes of the key map and patterns of the shard that fit no name (`strict=False`).
        meta_attributes: plain tensor attributes, neither parameters nor buffers, that are still on meta.
    """

    bound: tuple[str, ...]
    bound_bytes: int
    tied: tuple[tuple[str, ...], ...]
    shared: tuple[tuple[str, ...], ...]
    dtype_changes: tuple[DtypeChange, ...]
    cast: tuple[Cast, ...]
    cast_bytes: int
    cloned: tuple[str, ...]
    recomputed: tuple[str, ...]
    left: tuple[str, ...]
    ignored: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: tuple[str, ...]
    unmatched: tuple[str, ...]
    meta_attributes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{count(len(self.bound), 'parameter')} bound ({format_bytes(self.bound_bytes)}), "
            f"{count(len(self.tied), 'tie')} kept",
            f"buffers: {len(self.cloned)} cloned, {len(self.recomputed)} recomputed, {len(self.left)} left",
        ]
        lists: dict[str, Iterable[object]] = {
            f"cast, {format_bytes(self.cast_bytes)} of this process": self.cast,
            "other types than built": self.dtype_changes,
            "same bytes, not tied": (" = ".join(names) for names in self.shared),
            "ignored, non-persistent": self.ignored,
            "unexpected, left out": self.unexpected,
            "left out by the key map": self.dropped,
            "rules that fit no name": self.unmatched,
            "plain attributes still on meta": self.meta_attributes,
        }
        for heading, entries in lists.items():
            texts = [str(entry) for entry in entries]
            if texts:
                more = ", …" if len(texts) > 3 else ""
                lines.append(f"{heading}: {len(texts)} ({', '.join(texts[:3])}{more})")
        return "\n".join(lines)


#: Elements that are compared before all of them are.
_LOOK = 1024


class Fit:
    """A model and weights that fit one another; nothing is assigned yet.

    Attributes:
        buffers: what buffers get, private tensors on the CPU. Those that keep what they have are not among them.
    """

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self.parts, self.plan = parts, plan
        self.buffers: dict[Group, torch.Tensor] = {}
        self._casts: dict[Hashable, torch.Tensor] = {}

    def value(self, match: Match) -> torch.Tensor:
        """What a parameter gets, on the CPU: a view of the weights, or cast from them. Parameters that show the same
        bytes of the checkpoint show the same bytes when cast, too."""
        view = _checked_view(self.plan.weights, match)
        if not match.is_cast:
            return view
        there = (self.plan.weights.extent(match.source.name), match.stored)
        if there not in self._casts:
            self._casts[there] = _cast(view, match, self.plan)
        return self._casts[there].view(view.shape)


@no_collection()
def fit(
    model: nn.Module,
    weights: Weights,
    *,
    strict: bool = True,
    replace: bool = False,
    dtype: torch.dtype | None = None,
) -> Fit:
    """Compares a model with the weights that it is to get, and leaves it as it is; args and errors as of `bind`."""
    if dtype is not None and dtype not in CAST_TYPES.values():
        raise UsageError(
            f"bind: found dtype={dtype}, expected one of {', '.join(map(bare, CAST_TYPES.values()))}",
            "leave dtype out to take the checkpoint's types",
        )
    parts = walk(model)
    plan = compare(parts, weights, strict=strict, replace=replace, dtype=dtype)
    for name, kind in contained(parts, (match.group.tensor for match in plan.parameters)):
        plan.refuse("container", name, f"a plain {kind} found that holds a parameter, and would keep its old values")
    for name, kind in packed(parts):
        plan.refuse("packed", name, f"weights found that {kind} keeps in a form of its own, plain tensors expected")
    transient = recompute(model, [group for group in parts.transient if group.tensor.is_meta])
    for group, reason in transient.refused.items():
        plan.refuse("transient", title(group), f"a non-persistent buffer on meta, which nothing recomputes: {reason}")
    if plan.problems:
        raise plan.error(model)
    result = Fit(parts, plan)
    result.buffers.update(transient.values)
    # tensors made in inference mode could not be written to outside of it
    with torch.inference_mode(False), torch.no_grad():
        for match in plan.parameters:
            before = match.group.tensor
            if match.is_cast:
                result.value(match)  # which refuses what is out of range
            if not (replace or before.is_meta or _same(before, result.value(match))):
                text = f"a real parameter on {before.device} of other values found, those of the checkpoint expected"
                plan.refuse("real", title(match.group), text)
        for match in plan.buffers:
            view = _checked_view(weights, match)
            result.buffers[match.group] = _cast(view, match, plan) if match.is_cast else view.clone()
    if plan.problems:
        raise plan.error(model)
    return result


@no_collection()
def bind(
    model: nn.Module,
    weights: Weights,
    *,
    strict: bool = True,
    replace: bool = False,
    dtype: torch.dtype | None = None,
) -> BindReport:
    """Gives a model built on meta its weights. Either all of it happens, or the model stays as it was.

    Parameters become views of the weights, with the checkpoint's type and the model's `requires_grad`; what is
    tied in the model is one Parameter in every place, whichever of its names the checkpoint holds. Persistent
    buffers become private copies. Non-persistent buffers that are real stay; those on meta are recomputed by their
    modules' own init. State that modules keep beside tensors (`get_extra_state`) is never set: weights hold none.

    Args:
        strict: refuse names of the checkpoint that the model has no place for, rules that fit no name, and extra
            state of modules.
        replace: accept parameters that are real and have other values or types. Without it a real parameter is
            accepted where it has the very values that it gets, which costs reading both.
        dtype: cast what is stored in a floating type of 16 bits or more. A cast parameter is no view: it takes memory
            of this process, which the report lists.

    Raises:
        UsageError: `dtype` is no floating type of 16 bits or more.
        BindError: model and weights do not fit, with a line for every difference, or a module refused a tensor.
    """
    fits = fit(model, weights, strict=strict, replace=replace, dtype=dtype)
    with torch.inference_mode(False), torch.no_grad(), Exchange() as exchange:
        for match in fits.plan.parameters:
            exchange.put(match.group, match.group.parameter(fits.value(match)))
        for group, tensor in fits.buffers.items():
            exchange.put(group, tensor)
        left_over = on_meta(fits.parts.modules)
        if left_over:
            raise InternalError(f"bound, but still on meta: {', '.join(left_over)}")
    return _report(fits.plan, fits.parts)


def _cast(view: torch.Tensor, match: Match, plan: Plan) -> torch.Tensor:
    cast = view.to(match.dtype)
    narrower = torch.finfo(match.dtype).max < torch.finfo(match.stored).max
    if narrower and not torch.equal(view.isfinite(), cast.isfinite()):
        text = f"values beyond {bare(match.dtype)} found in {bare(match.stored)}, a cast would make them infinite"
        plan.refuse("range", title(match.group), text)
    return cast


def _same(real: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a parameter has these very values, to the bit; one that is such a view already is not read."""
    real = real.detach().to(value.device, value.dtype).resolve_conj().resolve_neg().contiguous()
    if real.data_ptr() == value.data_ptr():
        return True
    # a model of other values shows it at once, and is then refused without reading all of it
    ends = [tensor.view(-1)[:_LOOK] for tensor in (real, value)]
    return same_bits(*ends) and same_bits(real, value)


def _report(plan: Plan, parts: Parts) -> BindReport:
    weights, matches = plan.weights, (*plan.parameters, *plan.buffers)
    by_extent: defaultdict[Hashable, list[Match]] = defaultdict(list)
    for match in plan.parameters:
        # empty tensors may lie at one address without being one tensor
        if match.nbytes:
            by_extent[weights.extent(match.source.name)].append(match)
    firsts = [same[0] for same in by_extent.values()]
    return BindReport(
        bound=tuple(match.group.name for match in plan.parameters),
        bound_bytes=sum(match.nbytes for match in firsts if not match.is_cast),
        tied=tuple(group.names for group in parts.groups() if len(group.places) > 1),
        shared=tuple(tuple(match.group.name for match in same) for same in by_extent.values() if len(same) > 1),
        dtype_changes=tuple(
            DtypeChange(match.group.name, match.group.tensor.dtype, match.dtype)
            for match in matches
            if match.group.tensor.dtype != match.dtype
        ),
        cast=tuple(
            Cast(match.group.name, match.stored, match.dtype, match.nbytes) for match in matches if match.is_cast
        ),
        cast_bytes=sum(match.nbytes for match in firsts if match.is_cast),
        cloned=tuple(match.group.name for match in plan.buffers),
        recomputed=tuple(group.name for group in parts.transient if group.tensor.is_meta),
        left=tuple(plan.left),
        ignored=tuple(plan.ignored),
        unexpected=tuple(plan.unexpected),
        dropped=weights.choice.dropped if weights.choice is not None else (),
        unmatched=tuple(plan.unmatched),
        meta_attributes=parts.meta_attributes,
    )


def _checked_view(weights: Weights, match: Match) -> torch.Tensor:
    view = weights.view(match.source.name)
    if view.dtype != match.stored or view.shape != match.group.tensor.shape:
        raise InternalError(
            f"view of {match.source.name!r} is {shape_text(view.shape)} of {view.dtype}, unlike its spec"
        )
    return view
