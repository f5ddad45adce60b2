"""Random models, names, shards and casts: what is bound is what torch makes of the same checkpoint, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ftd.errors import BindError
from ftd.shm.layout import Extent
from ftd.tensorspec import TensorSpec
from ftd_client.bind import bind
from ftd_client.choose import choose
from ftd_client.meta import meta_parameters
from ftd_client.ranks import Rank
from ftd_client.walk import walk

from .load.served import SEGMENT_BYTES, shared_weights
from .test_bind_random import _POOLS, _TREES, Entry, Tree, _build, _stored
from .weights import _NAMES, DictWeights, bits

_FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@settings(max_examples=80)
@given(tree=_TREES, pool=_POOLS, data=st.data())
def test_other_names_in_the_checkpoint_are_the_same_model(tree: Tree, pool: list[Entry], data: st.DataObject) -> None:
    reference = _build(tree, pool)
    stored = _stored(reference, data)
    # each top-level component has another name in the checkpoint, or several, or the same
    tops = sorted({name.split(".")[0] for name in stored.specs})
    prefixes = {
        top: data.draw(st.sampled_from([top, f"old.{top}", f"{top}x", f"ß.{top}.0"]), label=top) for top in tops
    }
    olds = {name: prefixes[name.split(".")[0]] + name.removeprefix(name.split(".")[0]) for name in stored.specs}
    there = DictWeights({olds[name]: value for name, value in stored.tensors.items()})
    there._extents = {olds[name]: extent for name, extent in stored._extents.items()}
    back = {old: name for name, old in olds.items()}
    key_map = data.draw(st.sampled_from([{old: top for top, old in prefixes.items()}, back.get, back.__getitem__]))
    with meta_parameters():
        model, expected = _build(tree, pool), _build(tree, pool)
    bind(model, there.select(choose(there.specs, key_map, None, None)))
    bind(expected, stored)
    assert [(g.names, g.tensor.requires_grad, bits(g.tensor)) for g in walk(model).groups()] == [
        (g.names, g.tensor.requires_grad, bits(g.tensor)) for g in walk(expected).groups()
    ]
    for one, other in zip(walk(model).parameters, walk(expected).parameters, strict=True):
        assert one.tensor.data_ptr() == other.tensor.data_ptr()


@st.composite
def _flat(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of several types by name; random bytes, so that NaNs and infinities are among the values."""
    tensors = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(_NAMES, key=str)))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        entry = Entry(dtype, shape, draw(st.integers(0, 2**20)), requires_grad=False)
        tensors[draw(st.sampled_from(["w", "layers.0.w", "b"])) + str(number)] = entry.make()
    return tensors


def _model(tensors: dict[str, torch.Tensor], buffers: set[str]) -> nn.Module:
    """On meta, of these shapes and of whatever type comes first."""
    root = nn.Module()
    for name, value in tensors.items():
        module, (*path, last) = root, name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        built = torch.empty(value.shape, device="meta")
        if name in buffers:
            module.register_buffer(last, built)
        else:
            module.register_parameter(last, nn.Parameter(built, requires_grad=False))
    return root


@settings(max_examples=120)
@given(tensors=_flat(), data=st.data())
def test_slices_and_casts_are_torchs(tensors: dict[str, torch.Tensor], data: st.DataObject) -> None:
    """MD-08, MD-09: `load_state_dict(assign=True)` of the sliced, cast tensors."""
    cuts: dict[str, slice | None] = {}
    for name, value in tensors.items():
        cuts[name] = None
        if value.ndim and data.draw(st.booleans()):
            start = data.draw(st.integers(0, value.shape[0]))
            cuts[name] = slice(start, data.draw(st.integers(start, value.shape[0])))
    dtype = data.draw(st.none() | st.sampled_from(_FLOATING))
    local = {name: value if cuts[name] is None else value[cuts[name]] for name, value in tensors.items()}
    cast = {
        name: value.to(dtype) if dtype is not None and value.dtype in _FLOATING else value
        for name, value in local.items()
    }
    overflows = [name for name in local if not torch.equal(_finite(local[name]), _finite(cast[name]))]
    buffers = data.draw(st.sets(st.sampled_from(sorted(tensors))))
    weights = DictWeights(tensors)
    selected = weights.select(choose(weights.specs, None, lambda name, shape: cuts[name], None))
    model = _model(local, buffers)
    if overflows:
        try:
            bind(model, selected, dtype=dtype)
        except BindError as error:
            assert sorted(line.split(":")[0] for line in error.problems) == sorted(overflows)
            return
        raise AssertionError("a value became infinite")
    bind(model, selected, dtype=dtype)
    expected = _model(local, buffers)
    expected.load_state_dict(cast, assign=True)
    assert {n: bits(t) for n, t in model.state_dict().items()} == {n: bits(t) for n, t in expected.state_dict().items()}
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        if parameter.numel() and cast[name] is local[name]:
            assert parameter.data_ptr() == local[name].data_ptr()


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.isfinite() if value.dtype in _FLOATING else torch.tensor(True)


@settings(max_examples=100)
@given(data=st.data(), world=st.integers(1, 4))
def test_slices_of_shared_memory_lie_where_the_rows_are(data: st.DataObject, world: int) -> None:
    """Through the mapping: views, extents, and the way back from a view to its extent."""
    table: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    at = [0, 0]
    for number in range(data.draw(st.integers(1, 6))):
        dtype = data.draw(st.sampled_from(["F32", "BF16", "U8", "F64", "F8_E4M3", "BOOL", "F4"]))
        rest = data.draw(st.lists(st.integers(0, 5), max_size=2))
        # rows of whole bytes: two elements of F4 each
        shape = (world * data.draw(st.integers(0, 5)), *rest, *([2] if dtype == "F4" else []))
        segment = data.draw(st.integers(0, 1))
        nbytes = TensorSpec("", dtype, shape).nbytes
        table[f"old.{number}"] = (dtype, shape, segment, at[segment])
        at[segment] += -(-nbytes // 512) * 512
    assert all(end <= size for end, size in zip(at, SEGMENT_BYTES, strict=True))
    weights = shared_weights("unused", table)
    for rank in range(world):
        shard = {"new": 0, "new.0": None}
        selected = weights.select(choose(weights.specs, {"old": "new"}, shard, Rank(rank, world)))
        assert list(selected.specs) == [f"new.{number}" for number in range(len(table))]
        for number, (old, (_, shape, segment, offset)) in enumerate(table.items()):
            view, whole = selected.view(f"new.{number}"), weights.view(old)
            share = shape[0] // world
            expected = whole if number == 0 else whole[rank * share : (rank + 1) * share]
            assert bits(view) == bits(expected)
            if view.nbytes:
                skipped = expected.data_ptr() - whole.data_ptr()
                assert view.data_ptr() == expected.data_ptr()
                assert view.untyped_storage().nbytes() == view.nbytes
                extent = Extent(segment, offset + skipped, view.nbytes)
                assert selected.where(f"new.{number}") == selected.locate(view) == weights.locate(view) == extent
        assert selected.identity == weights.identity
