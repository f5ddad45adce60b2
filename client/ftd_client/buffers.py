"""Non-persistent buffers of a model built on meta, recomputed by the modules' own init and never guessed.

No checkpoint holds such a buffer, and memory that nobody wrote often looks plausible. So a value counts only with
its proof: the init runs twice, over two poisons and from two random seeds, and both runs must end in the same bits.
What the init did not write keeps its poison, what it drew at random follows the seed, and either way the runs differ.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ftd_client.bits import same_bits
from ftd_client.walk import Group, foreign, modules_by_name

#: Poison byte and random seed of each of the two runs. The bytes are complements, so as signed or floating numbers
#: the poisons differ in sign as well as in size, and as bools they are the two that there are.
_RUNS = ((0x5A, 0x0F7D), (0xA5, 0xF082))


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Outcome of `recompute`: for each group a value, or the reason why there is none."""

    values: dict[Group, torch.Tensor] = field(default_factory=dict)
    refused: dict[Group, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module, what encloses it from the root down to itself, and its buffers in question by attribute."""

    module: nn.Module
    enclosing: tuple[nn.Module, ...]
    wanted: dict[str, Group]


@dataclass(frozen=True, slots=True)
class _Init:
    """Code of the model that may compute a module's buffers."""

    label: str
    run: Callable[[], object]


def recompute(model: nn.Module, groups: Sequence[Group]) -> Recomputed:
    """Values for `groups`, which are on meta, as the init of the modules that own them computes them.

    Leaves the model and every random generator as they were, save for lists and dicts in plain attributes that an
    init changes in place. Runs before the parameters are bound: init code writes those too, which on meta does
    nothing. Values are private, contiguous and on the CPU. That an init is sound is proven here, that it computes
    what the constructor computed (with the default dtype of then) is the model's word.
    """
    owners: dict[int, _Owner] = {}
    for group in groups:
        for place in group.places:
            owner = owners.setdefault(id(place.module), _Owner(place.module, _enclosing(model, place.name), {}))
            owner.wanted[place.attribute] = group
    proven: dict[Group, list[torch.Tensor]] = {group: [] for group in groups}
    result = Recomputed()
    for owner in owners.values():
        values, reason = _own_init(owner)
        for attribute, group in owner.wanted.items():
            if attribute in values:
                proven[group].append(values[attribute])
            else:
                result.refused[group] = reason
    for group, candidates in proven.items():
        if candidates and all(same_bits(candidates[0], other) for other in candidates[1:]):
            result.values[group] = candidates[0]
            result.refused.pop(group, None)
        elif candidates:
            result.refused[group] = "the modules that share it compute different values"
    return result


def _enclosing(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    chain = [model]
    for part in name.split(".")[:-1]:
        child = chain[-1]._modules[part]
        assert child is not None
        chain.append(child)
    return tuple(chain)


def _own_init(owner: _Owner) -> tuple[dict[str, torch.Tensor], str]:
    """Proven values by attribute, and the reason why the other wanted attributes have none."""
    odd = [why for group in owner.wanted.values() if (why := foreign(group.tensor, torch.Tensor)) is not None]
    if odd:
        return {}, odd[0]
    kind = type(owner.module).__qualname__
    # a buffer without elements has no value to prove
    empty = {name: group.tensor for name, group in owner.wanted.items() if group.tensor.numel() == 0}
    proven = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in empty.items()}
    if any(not parameter.is_meta for parameter in owner.module.parameters()):
        return proven, f"{kind} holds real parameters, which its init could overwrite"
    reasons: list[str] = []
    for init in _inits(owner):
        if proven.keys() == owner.wanted.keys():
            break
        try:
            first, second = (_run(owner, init, poison, seed) for poison, seed in _RUNS)
        except Exception as error:  # any error of the model's own code: the next init may do better
            reasons.append(f"{init.label} raised {type(error).__name__}: {error}")
            continue
        for attribute in first.keys() & second.keys():
            if same_bits(first[attribute], second[attribute]):
                proven.setdefault(attribute, first[attribute])
        reasons.append(f"{init.label} leaves it unwritten, partly written or random")
    none = f"{kind} has no reset_parameters or reset_buffers, and nothing around it an _init_weights"
    return proven, "; ".join(reasons) or none


def _inits(owner: _Owner) -> Iterator[_Init]:
    """Candidates in the order of trust.

    First what transformers calls for the missing part of a checkpoint: `_init_weights(module)` of the nearest
    enclosing model, then of those around it (a composite hands its parts to the parts' own). Then torch's habit.
    """
    module = owner.module
    for around in reversed(owner.enclosing):
        init_weights = getattr(around, "_init_weights", None)
        if callable(init_weights):
            label = f"{type(around).__qualname__}._init_weights"
            yield _Init(label, lambda init_weights=init_weights: init_weights(module))  # type: ignore[misc]
    for name in ("reset_parameters", "reset_buffers"):
        reset = getattr(module, name, None)
        if callable(reset):
            yield _Init(f"{type(module).__qualname__}.{name}", reset)


def _run(owner: _Owner, init: _Init, poison: int, seed: int) -> dict[str, torch.Tensor]:
    """What `init` leaves in the wanted buffers; an attribute that it dropped or reshaped is not among them."""
    module = owner.module
    with ExitStack() as stack:
        stack.enter_context(_restored(module))
        stack.enter_context(_seeded(seed))
        # the caller may stand under a meta or CUDA default device, and in any mode
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        poisoned = {group: _poisoned(group.tensor, poison) for group in owner.wanted.values()}
        module._buffers.update({attribute: poisoned[group] for attribute, group in owner.wanted.items()})
        init.run()
        # init code may write the buffer, or register or assign another one in its place
        found = {attribute: module._buffers.get(attribute) for attribute in owner.wanted}
        return {
            attribute: tensor.detach().clone(memory_format=torch.contiguous_format)
            for attribute, tensor in found.items()
            if tensor is not None and _replaces(tensor, owner.wanted[attribute].tensor)
        }


def _replaces(tensor: torch.Tensor, built: torch.Tensor) -> bool:
    return (
        foreign(tensor, torch.Tensor) is None
        and tensor.device.type == "cpu"
        and tensor.dtype == built.dtype
        and tensor.shape == built.shape
    )


def _poisoned(like: torch.Tensor, byte: int) -> torch.Tensor:
    if like.dtype == torch.bool:
        byte &= 1  # a bool of any other value is undefined behaviour
    return torch.full((like.numel() * like.itemsize,), byte, dtype=torch.uint8).view(like.dtype).view(like.shape)


@contextmanager
def _restored(owner: nn.Module) -> Iterator[None]:
    """Puts back everything that code may register on or assign to `owner` and the modules below it.

    Inside, their real buffers are clones: init code writes all buffers of a module, not only those in question.
    """
    saved: list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]], set[str]]] = []
    for _, module in modules_by_name(owner):
        registries = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
        saved.append((module, dict(module.__dict__), registries, set(module._non_persistent_buffers_set)))
    for module, _, registries, _ in saved:
        for attribute, buffer in registries["_buffers"].items():
            if isinstance(buffer, torch.Tensor) and not buffer.is_meta:
                module._buffers[attribute] = buffer.detach().clone()
    try:
        yield
    finally:
        for module, attributes, registries, transient in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, entries in registries.items():
                registry = module.__dict__[name]
                registry.clear()
                registry.update(entries)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(transient)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Runs the body from `seed` and puts the random generators of Python, numpy and torch back."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=devices):
        try:
            # not torch.manual_seed: that one queues a seed for CUDA devices that are not initialised yet
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
