"""Random module trees: whatever is tied, shared, typed or buffered, a bound model is its reference to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ftd.errors import BindError
from ftd_client.bind import bind
from ftd_client.load.move import move
from ftd_client.load.placement import Placement
from ftd_client.meta import meta_parameters
from ftd_client.walk import walk

from .weights import DictWeights, bits

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int8, torch.uint8, torch.int64, torch.bool,
]  # fmt: skip
_SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 3)]


@dataclass(frozen=True)
class Entry:
    """A tensor of the pool that every tree takes its parameters and buffers from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    requires_grad: bool

    def make(self) -> torch.Tensor:
        count = math.prod(self.shape)
        raw = torch.empty(count * self.dtype.itemsize, dtype=torch.uint8)
        # random bytes: NaNs, infinities and negative zeros are among the values
        raw.random_(0, 2 if self.dtype == torch.bool else 256, generator=torch.Generator("cpu").manual_seed(self.seed))
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Tree:
    """A module: its tensors as indices into the pool, its children, and a child that is there under two names."""

    parameters: list[int]
    buffers: list[int]
    transient: list[int]
    children: list[Tree] = field(default_factory=list)
    twice: bool = False


class Node(nn.Module):
    """Made of a tree. An index that occurs twice is one tensor object: a tie."""

    def __init__(self, tree: Tree, pool: list[Entry], made: dict[tuple[str, int], torch.Tensor]) -> None:
        super().__init__()
        for kind, indices in (("p", tree.parameters), ("b", tree.buffers), ("t", tree.transient)):
            for place, index in enumerate(indices):
                entry = pool[index]
                if (kind, index) not in made:
                    tensor = entry.make()
                    wants_grad = entry.requires_grad and (entry.dtype.is_floating_point or entry.dtype.is_complex)
                    made[kind, index] = nn.Parameter(tensor, requires_grad=wants_grad) if kind == "p" else tensor
                if kind == "p":
                    self.register_parameter(f"p{place}", made[kind, index])
                else:
                    self.register_buffer(f"{kind}{place}", made[kind, index], persistent=kind == "b")
        for place, child in enumerate(tree.children):
            self.add_module(f"c{place}", Node(child, pool, made))
        if tree.children and tree.twice:
            self.add_module("again", self.c0)


def _build(tree: Tree, pool: list[Entry]) -> nn.Module:
    return Node(tree, pool, {})


_ENTRIES = st.builds(
    Entry,
    dtype=st.sampled_from(_DTYPES),
    shape=st.sampled_from(_SHAPES),
    seed=st.integers(0, 2**20),
    requires_grad=st.booleans(),
)
_INDICES = st.lists(st.integers(0, 5), max_size=3)


def _trees(children: st.SearchStrategy[list[Tree]]) -> st.SearchStrategy[Tree]:
    return st.builds(
        Tree, parameters=_INDICES, buffers=_INDICES, transient=_INDICES, children=children, twice=st.booleans()
    )


_TREES = st.recursive(_trees(st.just([])), lambda below: _trees(st.lists(below, max_size=3)), max_leaves=6)
_POOLS = st.lists(_ENTRIES, min_size=6, max_size=6)


def _content(model: nn.Module) -> list[object]:
    return [(group.names, group.tensor.requires_grad, bits(group.tensor)) for group in walk(model).groups()]


def _stored(reference: nn.Module, data: st.DataObject) -> DictWeights:
    """A checkpoint of `reference` that holds at least one name of each tensor, some ties as one, some as copies."""
    state = dict(reference.state_dict(keep_vars=True))
    parts = walk(reference)
    for group in (*parts.parameters, *parts.buffers):
        for name in group.persistent_names[:-1]:
            how = data.draw(st.sampled_from(["tie", "copy", "drop"]))
            if how == "drop":
                del state[name]
            elif how == "copy":
                state[name] = state[name].detach().clone()
    return DictWeights(state)


@settings(max_examples=120, deadline=None)
@given(tree=_TREES, pool=_POOLS, data=st.data())
def test_a_bound_model_is_its_reference(tree: Tree, pool: list[Entry], data: st.DataObject) -> None:
    """MD-01, MD-04, MD-09, OF-11, ST-01, ST-03."""
    reference = _build(tree, pool)
    weights = _stored(reference, data)
    with meta_parameters():
        model = _build(tree, pool)
    report = bind(model, weights)
    parts = walk(model)
    assert _content(model) == _content(reference)
    assert list(model.state_dict()) == list(reference.state_dict())
    for group in parts.parameters:
        addresses = {weights.tensors[name].data_ptr() for name in group.names if name in weights.tensors}
        assert group.tensor.data_ptr() in addresses
    shared = {tensor.data_ptr() for tensor in weights.tensors.values() if tensor.numel()}
    assert not shared & {group.tensor.data_ptr() for group in (*parts.buffers, *parts.transient)}
    assert report.bound == tuple(group.name for group in parts.parameters)
    assert report.unexpected == report.dtype_changes == ()
    moved = move(model, Placement("cpu"))
    assert moved.tensors == len(parts.parameters)
    assert _content(model) == _content(reference)
    assert not shared & {group.tensor.data_ptr() for group in walk(model).groups()}


@settings(max_examples=60, deadline=None)
@given(tree=_TREES, pool=_POOLS, data=st.data())
def test_one_fault_is_refused_by_name_and_leaves_the_model_as_it_was(
    tree: Tree, pool: list[Entry], data: st.DataObject
) -> None:
    reference = _build(tree, pool)
    state = dict(reference.state_dict(keep_vars=True))
    parts = walk(reference)
    groups = [*parts.parameters, *parts.buffers]
    fault = data.draw(st.sampled_from(["stray", "missing", "shape"] if groups else ["stray"]))
    named = {"stray"}
    if fault == "stray":
        state["stray"] = torch.ones(1)
    else:
        group = data.draw(st.sampled_from(groups))
        named = set(group.persistent_names)
        for name in named:
            if fault == "missing":
                del state[name]
            else:
                state[name] = torch.ones(4, 4)
    with meta_parameters():
        model = _build(tree, pool)
    before = [(group.names, id(group.tensor)) for group in walk(model).groups()]
    with pytest.raises(BindError) as caught:
        bind(model, DictWeights(state))
    assert {line.split(":")[0].split(" ")[0] for line in caught.value.problems} <= named
    assert [(group.names, id(group.tensor)) for group in walk(model).groups()] == before
