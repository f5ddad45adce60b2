"""Random torch checkpoints, in both layouts and in shards, read as torch reads them: bit for bit."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_files import same, saved, served

from ftd.source.resolve import resolve

# torch 2.13 writes these in the older layout and cannot read them there
_ZIP_ONLY = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
_ANY = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
_NAMES = st.one_of(
    st.from_regex(r"layers\.[0-9]{1,2}\.(weight|bias)", fullmatch=True),
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8),
    st.sampled_from(["重み", "веса.0", "😀", "nul\0", "a/b", "line\nbreak"]),
)


@st.composite
def states(draw: st.DrawFn, dtypes: list[torch.dtype]) -> OrderedDict[str, torch.Tensor]:
    """Tensors of their own, and views of any kind and ties of those before."""
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in draw(st.lists(_NAMES, min_size=1, max_size=8, unique=True)):
        if state and draw(st.booleans()):
            state[name] = draw(_views(state[draw(st.sampled_from(sorted(state)))]))
            continue
        dtype, shape = draw(st.sampled_from(dtypes)), draw(st.lists(st.integers(0, 4), max_size=4))
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
        state[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
    return state


@st.composite
def _views(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    for axis in range(tensor.dim()):
        if tensor.shape[axis] and draw(st.booleans()):
            begin = draw(st.integers(0, tensor.shape[axis] - 1))
            tensor = tensor.narrow(axis, begin, draw(st.integers(0, tensor.shape[axis] - begin)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


def reading(content: bytes) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.pt"
        path.write_bytes(content)
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        assert same(served(path), found)
        return found


@settings(max_examples=50, deadline=None)
@given(states(_ANY + _ZIP_ONLY))
def test_a_zip_reads_as_torch_reads_it(state: OrderedDict[str, torch.Tensor]) -> None:
    """TL-04, TL-06."""
    assert same(reading(saved(state)), state)


@settings(max_examples=50, deadline=None)
@given(states(_ANY))
def test_the_older_layout_reads_as_torch_reads_it(state: OrderedDict[str, torch.Tensor]) -> None:
    """TL-03, TL-06."""
    assert same(reading(saved(state, as_zip=False)), state)


@settings(max_examples=25, deadline=None)
@given(st.lists(states(_ANY), min_size=1, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3), st.randoms())
def test_shards_read_as_the_index_says(
    contents: list[OrderedDict[str, torch.Tensor]], layouts: list[bool], random: Any
) -> None:
    names = sorted({name for content in contents for name in content})
    shards = {name: random.choice([i for i, content in enumerate(contents) if name in content]) for name in names}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        index = {"weight_map": {name: f"s{shard}.bin" for name, shard in shards.items()}}
        files = {f"s{i}.bin": saved(contents[i], as_zip=layouts[i]) for i in range(len(contents))}
        write(folder, {**files, "pytorch_model.bin.index.json": index})
        assert same(served(folder), {name: contents[shard][name] for name, shard in shards.items()})


@settings(max_examples=25, deadline=None)
@given(states(_ANY))
def test_bytes_of_ties_and_views_are_those_of_what_is_seen(state: OrderedDict[str, torch.Tensor]) -> None:
    """Ties cost nothing; every other tensor its own bytes, whatever it is a view of."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "m.pt").write_bytes(saved(state))
        checkpoint = resolve(Path(directory))
    seen = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride(), t.dtype) if t.numel() else name
        for name, t in state.items()
    }
    stored = [t for t in checkpoint.tensors if t.spec.name not in checkpoint.ties]
    assert sum(t.spec.nbytes for t in stored) <= sum(t.nbytes for t in state.values())
    assert len(stored) <= len(seen)
