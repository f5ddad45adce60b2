"""Random checkpoints, read as the safetensors library reads them; random damage, refused and nothing else."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import Tensors, file_of, index_of, valid_file, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from ftd.errors import FtdError, SourceError
from ftd.source.header import parse_header
from ftd.source.index import parse_index
from ftd.source.resolve import resolve
from ftd.tensorspec import DTYPE_BITS, TensorSpec

# several scripts, escapes, the empty name; what UTF-8 cannot encode is no name
_NAMES = st.one_of(
    st.from_regex(r"(model\.)?layers\.[0-9]{1,2}\.(mlp|attn)\.(weight|bias)", fullmatch=True),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.sampled_from(
        ["", "重み", "веса.0", "وزن", "😀.weight", 'quote"d', "back\\slash", "line\nbreak", "nul\0", "a/b"]
    ),
).filter(lambda name: name != "__metadata__")
_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, names: st.SearchStrategy[str] = _NAMES) -> Tensors:
    built: Tensors = {}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(_SHAPES)
        try:
            size = TensorSpec(name, dtype, shape).nbytes
        except ValueError:  # below eight bits, and not whole bytes
            dtype, size = "U8", TensorSpec(name, "U8", shape).nbytes
        built[name] = (dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    return built


_METADATA = st.sampled_from([..., {}, None, {"format": "pt"}, {"ключ": "значение"}])


def as_library(content: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(content)}


def as_ftd(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = resolve(path)
    contents = [file.path.read_bytes() for file in checkpoint.files]
    read = {
        t.spec.name: (t.spec.dtype, t.spec.shape, contents[t.file][t.offset : t.offset + t.spec.nbytes])
        for t in checkpoint.tensors
    }
    assert len(read) == len(checkpoint.tensors)
    return read


@settings(max_examples=100, deadline=None)
@given(tensors().filter(bool), st.integers(0, 9), _METADATA)
def test_a_file_reads_as_the_library_reads_it(content: Tensors, padding: int, metadata: Any) -> None:
    """ST-01, ST-03, ST-06, ST-08, ST-21: names, types, shapes and bytes, at any offset."""
    with tempfile.TemporaryDirectory() as directory:
        raw = valid_file(content, padding=padding, metadata=metadata)
        write(Path(directory), {"model.safetensors": raw})
        assert as_ftd(Path(directory)) == as_library(raw) == content


@settings(max_examples=40, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.lists(st.integers(0, 9), min_size=4, max_size=4), st.randoms())
def test_shards_read_as_the_index_says(contents: list[Tensors], paddings: list[int], random: Any) -> None:
    """A name in several shards is taken from the one that the index gives; what it does not name is left."""
    names = sorted({name for content in contents for name in content})
    taken = [name for name in names if random.random() < 0.8]
    home = {name: random.choice([i for i, content in enumerate(contents) if name in content]) for name in taken}
    with tempfile.TemporaryDirectory() as directory:
        shards = {i: f"shard-{i}.safetensors" for i in range(len(contents))}
        files: dict[str, Any] = {shards[i]: valid_file(c, padding=paddings[i]) for i, c in enumerate(contents)}
        files["model.safetensors.index.json"] = index_of(
            {shards[i]: [name for name in taken if home[name] == i] for i in shards}
        )
        write(Path(directory), files)
        expected = {name: as_library(files[shards[home[name]]])[name] for name in taken}
        if expected:
            assert as_ftd(Path(directory)) == expected
        else:
            with pytest.raises(SourceError, match="no tensor"):
                resolve(Path(directory))


def outcome(content: bytes) -> bool:
    """Whether ftd takes the file; anything but an `FtdError` fails the test."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(content)
        try:
            resolve(path)
        except FtdError as error:
            assert "\n" not in error.message
            return False
        return True


@settings(max_examples=120, deadline=None)
@given(tensors().filter(bool), _METADATA, st.data())
def test_a_flipped_bit_is_refused_or_harmless_to_the_library_too(content: Tensors, metadata: Any, data: Any) -> None:
    raw = bytearray(valid_file(content, metadata=metadata))
    header_end = 8 + int.from_bytes(raw[:8], "little")
    bit = data.draw(st.integers(0, header_end * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    if outcome(bytes(raw)):
        deserialize(bytes(raw))  # raises what the library would refuse


@settings(max_examples=60, deadline=None)
@given(tensors().filter(bool), st.data())
def test_every_truncation_is_refused(content: Tensors, data: Any) -> None:
    """ST-09."""
    raw = valid_file(content)
    assert not outcome(raw[: data.draw(st.integers(0, len(raw) - 1))])
    assert not outcome(raw + b"\0")


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "U8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_SLOPPY_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F4", "F7", ""]) | _JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2) | _JSON,
    },
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8), _SLOPPY_ENTRY | _JSON, max_size=4) | _JSON, st.integers(0, 64))
def test_any_json_header_is_a_header_or_a_source_error(header: Any, data_bytes: int) -> None:
    """ST-19, ST-20: what is taken, the library takes as well."""
    raw = json.dumps(header).encode()
    try:
        parse_header(raw, 8 + len(raw) + data_bytes)
    except SourceError:
        return
    try:
        deserialize(file_of(raw, bytes(data_bytes)))
    except SafetensorError:
        # values of the metadata are not looked into
        assert "__metadata__" in header


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_header_or_a_source_error(raw: bytes) -> None:
    with contextlib.suppress(SourceError):
        parse_header(raw, 8 + len(raw))


@settings(max_examples=120, deadline=None)
@given(st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=4), st.text(max_size=6)) | _JSON}) | _JSON)
def test_any_json_index_is_an_index_or_a_source_error(index: Any) -> None:
    """ST-16: whatever the names, none that is let through leaves the directory."""
    try:
        shards = parse_index(json.dumps(index).encode())
    except SourceError:
        return
    for name in shards:
        path = Path(name)
        assert path.parts and not path.is_absolute() and ".." not in path.parts and "\0" not in name
