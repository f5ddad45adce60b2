"""Weights into a model: every parameter a view of them, every persistent buffer a private copy.

First a plan, which compares names, types and shapes and touches nothing; then all assignments, or none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ftd.errors import InternalError
from ftd.torchspec import torch_form
from ftd.units import format_bytes
from ftd_client.buffers import recompute
from ftd_client.plan import Match, Plan, Weights, compare
from ftd_client.walk import Exchange, Group, Parts, contained, on_meta, walk
from ftd_client.wording import bare, count, shape_text, title


@dataclass(frozen=True, slots=True)
class DtypeChange:
    """A tensor that took the checkpoint's type in place of the one that the model was built with."""

    name: str
    built: torch.dtype
    bound: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}: {bare(self.built)} → {bare(self.bound)}"


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
            f"{count(len(self.bound), 'parameter')} bound ({format_bytes(self.bound_bytes)}), "
            f"{count(len(self.tied), 'tie')} kept",
            f"buffers: {len(self.cloned)} cloned, {len(self.recomputed)} recomputed, {len(self.left)} left",
        ]
        lists: dict[str, Iterable[object]] = {
            "types taken from the checkpoint": self.dtype_changes,
            "same bytes, not tied": (" = ".join(names) for names in self.shared),
            "ignored, non-persistent": self.ignored,
            "unexpected, left out": self.unexpected,
            "plain attributes still on meta": self.meta_attributes,
        }
        for heading, entries in lists.items():
            texts = [str(entry) for entry in entries]
            if texts:
                more = ", …" if len(texts) > 3 else ""
                lines.append(f"{heading}: {len(texts)} ({', '.join(texts[:3])}{more})")
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
    plan = compare(parts, weights, strict=strict, replace=replace)
    for name, kind in contained(model, [match.group.tensor for match in plan.parameters]):
        plan.refuse("container", name, f"a plain {kind} found that holds a parameter, and would keep its old values")
    transient = recompute(model, [group for group in parts.transient if group.tensor.is_meta])
    for group, reason in transient.refused.items():
        plan.refuse("transient", title(group), f"a non-persistent buffer on meta, which nothing recomputes: {reason}")
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


def _report(plan: Plan, parts: Parts) -> BindReport:
    weights = plan.weights
    by_extent: dict[Hashable, list[Match]] = {}
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


def _checked_view(weights: Weights, match: Match) -> torch.Tensor:
    view = weights.view(match.source.name)
    if (view.dtype, tuple(view.shape)) != torch_form(match.source):
        raise InternalError(
            f"view of {match.source.name!r} is {shape_text(view.shape)} of {view.dtype}, unlike its spec"
        )
    return view
